package systemd

import (
	"context"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/gpuaas/millwright/tasks/host"
)

const (
	errNoUnit     = "org.freedesktop.systemd1.NoSuchUnit"
	errUnitExists = "org.freedesktop.systemd1.UnitExists"
	errNoFile     = "org.freedesktop.DBus.Error.FileNotFound"
	errNoUnitFile = "org.freedesktop.systemd1.NoSuchUnitFile"
)

// Unit implements host.UnitReader.
func (c *Conn) Unit(ctx context.Context, name string) (host.UnitStatus, error) {
	u, err := c.unit(ctx, name)
	return u.UnitStatus, err
}

// unit is the state of a unit with its job.
type unit struct {
	host.UnitStatus
	job bool // whether a job for it waits or runs
}

func (c *Conn) unit(ctx context.Context, name string) (unit, error) {
	var u unit
	err := c.call(ctx, c.cfg.CallTimeout, func(ctx context.Context, l *link) error {
		p, err := l.GetUnitPropertiesContext(ctx, name)
		if err != nil {
			return err
		}
		u = fromProperties(p)
		if err := u.refresh(ctx, l, name); err != nil {
			return err
		}
		kind := resultInterface(name)
		if u.Load == "not-found" || kind == "" {
			return nil
		}
		r, err := l.GetUnitTypePropertyContext(ctx, name, kind, "Result")
		if err != nil {
			return err
		}
		u.Result, _ = r.Value.Value().(string)
		return nil
	})
	if err != nil {
		return unit{}, fmt.Errorf("read state of unit %s: %w", name, err)
	}
	return u, nil
}

func fromProperties(p map[string]any) unit {
	str := func(name string) string { s, _ := p[name].(string); return s }
	flag := func(name string) bool { b, _ := p[name].(bool); return b }
	u := unit{UnitStatus: host.UnitStatus{
		Load: str("LoadState"), Active: str("ActiveState"), Sub: str("SubState"),
		Enabled: str("UnitFileState"), Fragment: str("FragmentPath"),
		NeedReload: flag("NeedDaemonReload"), ConditionMet: flag("ConditionResult"),
	}}
	u.DropIns, _ = p["DropInPaths"].([]string)
	if id, ok := p["InvocationID"].([]byte); ok {
		u.Invocation = hex.EncodeToString(id)
	}
	if job, ok := p["Job"].([]any); ok && len(job) > 0 {
		id, _ := job[0].(uint32)
		u.job = id != 0
	}
	return u
}

// refresh corrects what systemd remembers by what is on disk: it reads the
// enablement of a loaded unit only once, and does not notice the first drop-in.
func (u *unit) refresh(ctx context.Context, l *link, name string) error {
	if u.Load != "loaded" || u.Fragment == "" || u.Enabled == "transient" {
		return nil
	}
	var state string
	manager := l.bus.Object("org.freedesktop.systemd1", "/org/freedesktop/systemd1")
	err := manager.CallWithContext(ctx, "org.freedesktop.systemd1.Manager.GetUnitFileState", 0, name).Store(&state)
	switch {
	case err == nil:
		u.Enabled = state
	case connectionFault(err):
		return err
	}
	u.NeedReload = u.NeedReload || unknownDropIn(name, u.DropIns)
	return nil
}

// unknownDropIn reports whether there is a drop-in of the unit that systemd does
// not know.
func unknownDropIn(name string, known []string) bool {
	names := map[string]bool{}
	for _, k := range known {
		names[filepath.Base(k)] = true
	}
	for _, dir := range []string{"/etc/systemd/system", "/run/systemd/system", "/usr/lib/systemd/system"} {
		entries, err := os.ReadDir(filepath.Join(dir, name+".d"))
		if err != nil {
			continue // mostly there is none
		}
		for _, e := range entries {
			if strings.HasSuffix(e.Name(), ".conf") && !names[e.Name()] {
				return true
			}
		}
	}
	return false
}

// resultInterface is the interface on which units of a type have a Result, or
// empty for a type that has none.
func resultInterface(name string) string {
	_, suffix, _ := strings.Cut(name[max(0, strings.LastIndexByte(name, '.')):], ".")
	switch suffix {
	case "service", "mount", "automount", "socket", "swap", "timer", "path", "scope":
		return strings.ToUpper(suffix[:1]) + suffix[1:]
	}
	return ""
}

// Running reports whether the state is one in which processes of the unit may
// run.
func Running(u host.UnitStatus) bool {
	switch u.Active {
	case "active", "activating", "deactivating", "reloading", "refreshing":
		return true
	}
	return false
}
