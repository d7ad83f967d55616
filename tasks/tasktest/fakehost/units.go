package fakehost

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"

	"github.com/gpuaas/millwright/tasks/host"
)

const mountInfo = "/proc/self/mountinfo"

// unit is a unit file with its drop-ins, as systemd has it in memory or would
// read it from disk.
type unit struct {
	fragment string // empty: there is no file
	dropIns  []string
	text     string
}

// last returns the last value of a setting, by section and key.
func (u unit) last(key string) string {
	v := ""
	for _, s := range u.all(key) {
		v = s
	}
	return v
}

func (u unit) all(key string) []string {
	var out []string
	section := ""
	for line := range strings.Lines(u.text) {
		line = strings.TrimSpace(line)
		if strings.HasPrefix(line, "[") {
			section = strings.Trim(line, "[]")
		} else if k, v, ok := strings.Cut(line, "="); ok && section+"."+k == key {
			out = append(out, v)
		}
	}
	return out
}

// disk reads a unit from disk.
func (n *Node) disk(name string) unit {
	var u unit
	for _, dir := range []string{unitDir, "/run/systemd/system", "/run/systemd/generator", "/usr/lib/systemd/system"} {
		if f, err := n.readFile(path.Join(dir, name)); err == nil {
			u.fragment, u.text = path.Join(dir, name), string(f.Data)
			break
		}
	}
	for _, dir := range []string{unitDir, "/run/systemd/system", "/usr/lib/systemd/system"} {
		names, err := n.readDir(path.Join(dir, name+".d"))
		if err != nil {
			continue
		}
		for _, f := range names {
			if file, err := n.readFile(path.Join(dir, name+".d", f)); err == nil && strings.HasSuffix(f, ".conf") {
				u.dropIns = append(u.dropIns, path.Join(dir, name+".d", f))
				u.text += "\n" + string(file.Data)
			}
		}
	}
	return u
}

// load returns a unit as systemd has it in memory, after it has read it if it
// did not know it.
func (n *Node) load(name string) unit {
	u, ok := n.loaded[name]
	if ok && u.fragment != "" {
		return u
	}
	u = n.disk(name)
	if u.fragment == "" && n.mounted(name) {
		u.fragment = mountInfo
	}
	n.loaded[name] = u
	return u
}

func (n *Node) reload() {
	clear(n.unnoticed)
	for _, name := range slices.Collect(maps.Keys(n.loaded)) {
		delete(n.loaded, name)
		n.load(name)
	}
}

// noticed reports whether systemd takes a mount unit to be mounted.
func (n *Node) noticed(name string) bool {
	if believed, ok := n.unnoticed[name]; ok {
		return believed
	}
	return n.mounted(name)
}

// mounted reports whether the mount of a mount unit is on the table.
func (n *Node) mounted(name string) bool {
	return slices.ContainsFunc(n.mounts, func(m host.Mount) bool { return unitName(m.Target) == name })
}

func (n *Node) unitStatus(name string) host.UnitStatus {
	u := n.load(name)
	st := host.UnitStatus{
		Load: "loaded", Active: "inactive", Sub: "dead", Result: "success", Fragment: u.fragment,
		DropIns: slices.Clone(u.dropIns), ConditionMet: true, Enabled: n.enabledState(name),
	}
	onDisk := n.disk(name)
	if u.fragment != mountInfo {
		st.NeedReload = u.fragment != onDisk.fragment || u.text != onDisk.text
	}
	if u.fragment == "" {
		st.Load = "not-found"
	}
	if r, ok := n.failed[name]; ok {
		st.Active, st.Sub, st.Result = "failed", "failed", r
	}
	switch {
	case n.noticed(name):
		st.Active, st.Sub = "active", "mounted"
	case n.services[name]:
		st.Active, st.Sub = "active", "exited"
	case n.conditionFails(u):
		st.ConditionMet = false
	}
	return st
}

func (n *Node) conditionFails(u unit) bool {
	p := u.last("Unit.ConditionPathExists")
	if p == "" {
		return false
	}
	_, err := n.lstat(p)
	return err != nil
}

func (n *Node) start(name string) error {
	u := n.load(name)
	if n.noticed(name) || n.services[name] {
		return nil
	}
	delete(n.failed, name)
	if u.fragment == "" {
		return fmt.Errorf("start %s: %w", name, host.ErrNoUnit)
	}
	if n.conditionFails(u) {
		return nil
	}
	var err error
	if strings.HasSuffix(name, ".mount") {
		err = n.mountUnit(name, u)
	} else {
		err = n.startService(name, u)
	}
	// The unit of a device that is not there waits for it, and has not failed.
	if err != nil && !errors.Is(err, errNoDevice) {
		n.failed[name] = "exit-code"
	}
	return err
}

func (n *Node) startService(name string, u unit) error {
	argv := u.last("Service.ExecStart")
	program, _, _ := strings.Cut(argv, " ")
	_, err := n.lstat(n.real(program, true))
	if r := n.results[argv]; err != nil || r.ExitCode != 0 {
		return fmt.Errorf("unit %s: result exit-code: %w", name, host.ErrJob)
	}
	if err := n.startSlurm(name); err != nil {
		return err
	}
	n.services[name] = u.last("Service.RemainAfterExit") == "yes" || name == mungeUnit || name == slurmdUnit
	return nil
}

func (n *Node) stop(name string) error {
	n.stopSlurm(name)
	delete(n.failed, name)
	delete(n.services, name)
	for n.noticed(name) && n.mounted(name) {
		var target string
		for _, m := range n.mounts {
			if unitName(m.Target) == name {
				target = m.Target
			}
		}
		if uses := n.usersOf(target); len(uses) > 0 {
			n.failed[name] = "exit-code"
			return fmt.Errorf("stop %s: %s is used by process %d (%s, %s): %w", name, target, uses[0].PID, uses[0].Command, uses[0].How, host.ErrBusy)
		}
		if n.stuck[n.over(target).Dev] != "" {
			n.failed[name] = "timeout"
			return fmt.Errorf("stop %s: result timeout: %w", name, host.ErrJob)
		}
		// Systemd stops the units of mounts below, and of bind mounts from there.
		for _, m := range slices.Clone(n.mounts) {
			required := slices.ContainsFunc(n.load(unitName(m.Target)).all("Unit.RequiresMountsFor"), func(p string) bool { return within(p, target) })
			if m.Target != target && (within(m.Target, target) || required) {
				if err := n.stop(unitName(m.Target)); err != nil {
					return err
				}
			}
		}
		if h := n.mountHealth(target); h != host.MountDisconnected && h != host.MountStale { // nobody can use those
			n.disturb("unmounted", target)
		}
		n.umount(target)
	}
	return nil
}

func (n *Node) wantsLinks(name string) []string {
	var out []string
	prefix := rootDev + "|"
	for k := range n.entries {
		p := strings.TrimPrefix(k, prefix)
		if strings.HasPrefix(k, prefix) && path.Base(p) == name && strings.HasSuffix(path.Dir(p), ".wants") && path.Dir(path.Dir(p)) == unitDir {
			out = append(out, p)
		}
	}
	return out
}

func (n *Node) enabledState(name string) string {
	u := n.disk(name)
	switch {
	case u.fragment == "":
		return ""
	case len(n.wantsLinks(name)) > 0:
		return "enabled"
	case u.last("Install.WantedBy") == "":
		return "static"
	default:
		return "disabled"
	}
}

func (n *Node) setEnabled(name string, enabled bool) error {
	if !enabled {
		for _, link := range n.wantsLinks(name) {
			delete(n.entries, rootDev+"|"+link)
			if dir := rootDev + "|" + path.Dir(link); len(n.children(dir)) == 0 {
				delete(n.entries, dir)
			}
		}
		return nil
	}
	u := n.disk(name)
	if u.fragment == "" {
		return fmt.Errorf("enable %s: %w", name, host.ErrNoUnit)
	}
	for target := range strings.FieldsSeq(u.last("Install.WantedBy")) {
		dir := path.Join(unitDir, target+".wants")
		n.mkdirAll(dir)
		n.entries[n.key(path.Join(dir, name))] = entry{mode: fs.ModeSymlink | 0o777, target: u.fragment}
	}
	return nil
}
