package fakehost

import (
	"fmt"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/gpuaas/millwright/tasks/host"
)

// Do changes the node behind the agent's back: one change a line, words apart
// by spaces, a word with spaces in Go's quotes. The changes are
//
//	device PATH
//	dir PATH [MODE]                 file PATH MODE CONTENT      link PATH TARGET
//	program PATH                    user NAME                   remove PATH
//	volume SERVER:/NAME             lose SERVER:/NAME           nofs TYPE
//	fs TYPE                         later SOURCE N: mounts that fail first
//	lies SOURCE: its helper says yes and mounts nothing
//	absent NAME: a host name, HOST:PORT or kernel module
//	stale PATH                      stuck PATH force|abort|lazy
//	show TARGET OPTIONS: what the mount table shows of the file system
//	mount TARGET TYPE SOURCE        bind SOURCE TARGET          umount TARGET
//	remount TARGET ro|rw            hang PATH
//	busy PATH PID COMMAND           idle PATH
//	result exit=N|signal=N|timeout|oom|block ARGUMENTS...
//	says TEXT ARGUMENTS...: what a command writes to its standard output
//	edit PATH OLD NEW               reload                      inhibit
//	enable UNIT                     disable UNIT                reboot
//	unnoticed UNIT active|inactive: what systemd wrongly takes it to be
//	archive PATH DIGEST...          foreign NAME: a container that is not ours
//	ends exit=N|oom ARGUMENTS...: containers that end at once
//	die NAME: a container ends
//	secret NAME VALUE               nosecrets                   owner PATH USER GROUP
//	offer NAME VERSION [NEED|!NAME...]: a package that a source offers, the newest
//	deb PATH NAME VERSION [NEED|!NAME...]: one in a file
//	package NAME VERSION [held] [config-files|installed-twice] [NEED...]: one that is installed
//	brings NAME CHANGE...: what is done on the node when a package is installed
//	nodpkg                          dpkglock
//	dnf: the node has rpm and dnf; before its packages          noversionlock
//	slurm controller SERVER VERSION: a cluster, and Slurm's programs on the node
//	slurm remote SERVER VERSION: a cluster alone
//	slurm key CONTENT               slurm down|up|gone
//	slurm node|static NAME STATES [GRES [REASON]]               slurm skew DURATION
//	slurm job NODE ID USER STATE [DURATION]: it ends after that
//	slurm nojob NODE                 slurm slurmd VERSION
//	slurm noreturn: nodes that were rebooted are down, as with ReturnToService=0
//	slurm forget NODE                slurm drain NODE REASON    slurm memory MIB
//	slurm nojobs REASON: none is run slurm device PATH: one that must be there
//	slurm nodevices: jobs are given no GPU
//	slurm says WORDS: what the controller answers, whatever it is asked
//	disk NAME SERIAL|-              loop NAME FILE              blank NAME
//	holds NAME TYPE [UUID]          partition NAME PARTITION    holder NAME DEVICE
//	swap NAME                       renamed NAME NEW
//	gpu ...: see doGPU
//
// Empty lines and those that begin with # are left out.
func (n *Node) Do(script string) error {
	for line := range strings.Lines(script) {
		words, err := split(strings.TrimSpace(line))
		if err != nil {
			return fmt.Errorf("%s: %w", strings.TrimSpace(line), err)
		}
		if len(words) == 0 || strings.HasPrefix(words[0], "#") {
			continue
		}
		if words[0] == "reboot" {
			n.Reboot()
			continue
		}
		n.mu.Lock()
		err = n.do(words[0], words[1:])
		n.mu.Unlock()
		if err != nil {
			return fmt.Errorf("%s: %w", strings.TrimSpace(line), err)
		}
	}
	return nil
}

// split splits a line into words.
func split(line string) ([]string, error) {
	var words []string
	for line != "" {
		if line[0] == '"' {
			q, err := strconv.QuotedPrefix(line)
			if err != nil {
				return nil, err
			}
			w, err := strconv.Unquote(q)
			if err != nil {
				return nil, err
			}
			words, line = append(words, w), strings.TrimLeft(line[len(q):], " ")
			continue
		}
		w, rest, _ := strings.Cut(line, " ")
		words, line = append(words, w), strings.TrimLeft(rest, " ")
	}
	return words, nil
}

// arity returns how many words a verb takes, at least and at most.
func arity(verb string) (least, most int) {
	switch verb {
	case "reload", "inhibit", "nosecrets", "nodpkg", "dpkglock", "dnf", "noversionlock":
		return 0, 0
	case "device", "program", "user", "remove", "volume", "lose", "nofs", "umount", "hang", "idle", "fs", "lies", "absent", "stale", "enable", "disable", "foreign", "die", "blank", "swap", "unassembled":
		return 1, 1
	case "dir":
		return 1, 2
	case "holds":
		return 2, 3
	case "array":
		return 3, 34
	case "link", "bind", "remount", "unnoticed", "secret", "later", "stuck", "show", "disk", "loop", "partition", "holder", "renamed":
		return 2, 2
	case "file", "mount", "busy", "edit", "owner":
		return 3, 3
	case "slurm", "gpu":
		return 1, 7
	case "result", "says", "archive", "ends", "offer", "deb", "package", "brings":
		return 2, 256
	default:
		return 1, 0
	}
}

func (n *Node) do(verb string, a []string) error {
	if least, most := arity(verb); len(a) < least || len(a) > most {
		return fmt.Errorf("unknown verb %q, or not its number of words", verb)
	}
	switch verb {
	case "dir", "file", "link", "program", "device", "remove", "edit", "owner":
		return n.doFile(verb, a)
	case "mount", "bind", "umount", "remount", "show":
		return n.doMount(verb, a)
	case "fs", "nofs", "volume", "lose", "later", "lies", "absent", "hang", "stale", "stuck":
		return n.doServer(verb, a)
	case "archive", "foreign", "ends", "die":
		return n.doContainer(verb, a)
	case "offer", "deb", "package", "brings", "nodpkg", "dpkglock", "dnf", "noversionlock":
		return n.doPackages(verb, a)
	case "slurm":
		return n.doSlurm(a[0], a[1:])
	case "gpu":
		return n.doGPU(a[0], a[1:])
	case "disk", "loop", "blank", "holds", "partition", "holder", "swap", "renamed", "array", "unassembled":
		return n.doDisk(verb, a)
	case "result":
		return n.doResult(a[0], strings.Join(a[1:], " "))
	case "says":
		argv := strings.Join(a[1:], " ")
		r := n.results[argv]
		r.Stdout = a[0]
		n.results[argv] = r
	case "inhibit":
		n.inhibited = true
	case "secret":
		n.secrets[a[0]] = a[1]
	case "nosecrets":
		n.noSecrets = true
	case "user":
		n.users[a[0]] = true
	case "idle":
		n.uses = slices.DeleteFunc(n.uses, func(u use) bool { return u.path == a[0] })
	case "busy":
		pid, err := strconv.Atoi(a[1])
		n.uses = append(n.uses, use{a[0], host.Use{PID: pid, Command: a[2], How: "cwd"}})
		return err
	case "unnoticed":
		n.unnoticed[a[0]] = a[1] == "active"
	case "reload":
		n.reload()
	case "enable", "disable":
		return n.setEnabled(a[0], verb == "enable")
	}
	return nil
}

func (n *Node) doFile(verb string, a []string) error {
	n.mkdirAll(path.Dir(a[0]))
	k := n.key(a[0])
	switch verb {
	case "dir":
		e := entry{mode: fs.ModeDir | 0o755}
		if len(a) == 2 {
			mode, err := strconv.ParseUint(a[1], 8, 9)
			if err != nil {
				return err
			}
			e.mode = fs.ModeDir | fs.FileMode(mode)
		}
		n.entries[k] = e
	case "file":
		mode, err := strconv.ParseUint(a[1], 8, 9)
		n.entries[k] = entry{mode: fs.FileMode(mode), data: a[2]}
		return err
	case "link":
		n.entries[k] = entry{mode: fs.ModeSymlink | 0o777, target: a[1]}
	case "device":
		n.entries[k] = entry{mode: fs.ModeDevice | fs.ModeCharDevice | 0o666}
	case "program":
		n.entries[k] = entry{mode: 0o755, data: "ELF"}
	case "remove":
		delete(n.entries, k)
	case "owner":
		e := n.entries[k]
		e.user, e.group = named(a[1]), named(a[2])
		n.entries[k] = e
	case "edit":
		e := n.entries[k]
		if !strings.Contains(e.data, a[1]) {
			return fmt.Errorf("%s does not hold %q", a[0], a[1])
		}
		e.data = strings.ReplaceAll(e.data, a[1], a[2])
		n.entries[k] = e
	}
	return nil
}

func (n *Node) doMount(verb string, a []string) error {
	switch verb {
	case "mount":
		n.mkdirAll(a[0])
		n.nextDev++
		if dev := fmt.Sprintf("0:%d", n.nextDev); n.volumes[a[2]] == "" && strings.HasPrefix(a[1], "fuse") {
			n.volumes[a[2]] = dev // its client lives
		}
		n.mount(host.Mount{
			Target: a[0], FSType: a[1], Source: a[2], Dev: fmt.Sprintf("0:%d", n.nextDev), Root: "/",
			Options: []string{"rw", "relatime"}, Super: []string{"rw"},
		})
	case "bind":
		n.mkdirAll(a[1])
		m := host.Mount{Target: a[1], Options: []string{"rw", "relatime"}}
		if err := n.source(&m, "none", a[0], []string{"bind"}); err != nil {
			return err
		}
		n.mount(m)
	case "umount":
		if !n.umount(a[0]) {
			return fmt.Errorf("nothing is mounted on %s", a[0])
		}
	case "remount", "show":
		for i := range n.mounts {
			switch {
			case n.mounts[i].Target != a[0]:
			case verb == "show":
				n.mounts[i].Super = strings.Split(a[1], ",")
			default:
				n.mounts[i].Options = []string{a[1], "relatime"}
			}
		}
	}
	return nil
}

func (n *Node) doServer(verb string, a []string) (err error) {
	switch verb {
	case "fs", "nofs":
		n.fstypes[a[0]] = verb == "fs"
	case "volume":
		n.nextDev++
		n.volumes[a[0]] = fmt.Sprintf("0:%d", n.nextDev)
	case "lose":
		delete(n.volumes, a[0])
	case "later":
		n.later[a[0]], err = strconv.Atoi(a[1])
	case "lies":
		n.lies[a[0]] = true
	case "absent":
		n.absent[a[0]] = true
	case "hang":
		n.hung[n.over(a[0]).Dev] = true
	case "stale":
		n.stale[n.over(a[0]).Dev] = true
	case "stuck":
		n.stuck[n.over(a[0]).Dev] = a[1]
	}
	return err
}

func (n *Node) doResult(how, argv string) error {
	var r Result
	key, value, _ := strings.Cut(how, "=")
	num, err := strconv.Atoi(value)
	switch key {
	case "exit":
		r.ExitCode = num
	case "signal":
		r.Signal = num
	case "timeout":
		r, err = Result{TimedOut: true, Signal: 9}, nil
	case "oom":
		r, err = Result{OOMKilled: true, Signal: 9}, nil
	case "block":
		r, err = Result{Blocks: true}, nil
	default:
		err = fmt.Errorf("unknown result %q", how)
	}
	r.Stdout = n.results[argv].Stdout
	n.results[argv] = r
	return err
}

// Dump describes the node: what is on its file systems besides the directories
// of a fresh one, its mounts, and how often each command was started. Equal
// nodes have equal descriptions.
func (n *Node) Dump() string {
	n.mu.Lock()
	defer n.mu.Unlock()
	var lines []string
	for _, k := range slices.Sorted(maps.Keys(n.entries)) {
		e := n.entries[k]
		if b, ok := n.base[k]; ok && b == e {
			continue
		}
		dev, p, _ := strings.Cut(k, "|")
		if dev != rootDev {
			if p == "/" || !slices.ContainsFunc(n.mounts, func(m host.Mount) bool { return m.Dev == dev }) {
				continue
			}
			p = n.sourceOf(dev) + " " + p
		}
		switch {
		case e.mode.IsDir():
			lines = append(lines, fmt.Sprintf("dir %s %#o", p, e.mode.Perm()))
		case e.mode&fs.ModeSymlink != 0:
			lines = append(lines, fmt.Sprintf("link %s %s", p, e.target))
		default:
			line := fmt.Sprintf("file %s %#o %q", p, e.mode.Perm(), e.data)
			if e.user != "" || e.group != "" {
				line += " " + e.ownedBy() + ":" + e.groupOf()
			}
			lines = append(lines, line)
		}
	}
	mounts := slices.DeleteFunc(slices.Clone(n.mounts), isBase)
	slices.SortStableFunc(mounts, func(a, b host.Mount) int { return strings.Compare(a.Target, b.Target) })
	for _, m := range mounts {
		lines = append(lines, fmt.Sprintf("mount %s %s %s[%s] %s %s", m.Target, m.FSType, m.Source, m.Root,
			strings.Join(m.Options, ","), strings.Join(m.Super, ",")))
	}
	for _, u := range slices.Sorted(maps.Keys(n.failed)) {
		if n.mounted(u) {
			continue // An unmount failed: the unit is active with that result.
		}
		lines = append(lines, "failed "+u+" "+n.failed[u])
	}
	for _, a := range slices.Sorted(maps.Keys(n.runs)) {
		lines = append(lines, fmt.Sprintf("started %d %s", n.runs[a], a))
	}
	lines = append(lines, n.dumpDisks()...)
	lines = append(lines, n.dumpContainers()...)
	lines = append(lines, n.dumpPackages()...)
	lines = append(lines, n.dumpSlurm()...)
	lines = append(lines, n.dumpGPUs()...)
	return strings.Join(append(lines, ""), "\n")
}

func (n *Node) sourceOf(dev string) string {
	for _, m := range n.mounts {
		if m.Dev == dev {
			return m.Source
		}
	}
	return dev
}
