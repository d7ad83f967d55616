// Package fakehost is a node in memory. It has files, mounts, a systemd that
// understands mount units and simple services, commands that are counted, a
// container runtime, a package database, and a Slurm cluster that it can be a
// node of.
// It passes the suite of package hosttest, as the real node does, and can be
// made to fail or to stop before and after each call.
//
// What it leaves out: permissions, the time that things take, dependencies
// between units other than those of mounts, and the output of commands.
package fakehost

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"
	"sync"

	"github.com/gpuaas/millwright/tasks/host"
)

const (
	rootDev = "254:1"
	runDev  = "0:25"
	unitDir = "/etc/systemd/system"
)

// Node is the machine: what is left when a process of the agent dies. It is
// safe for concurrent use.
type Node struct {
	// mu guards all that follows.
	mu        sync.Mutex
	entries   map[string]entry // by device and path within it
	mounts    []host.Mount
	nextDev   int
	boot      int
	reboots   int  // that were asked for
	inhibited bool // no reboot is taken on
	fstypes   map[string]bool
	users     map[string]bool
	volumes   map[string]string // what servers serve (GlusterFS: server:/name), to device
	later     map[string]int    // what is served: mounts that fail before it answers
	lies      map[string]bool   // what is served: its helper says yes and mounts nothing
	absent    map[string]bool   // host names, ports and modules that are not there
	hung      map[string]bool   // devices that do not answer
	stale     map[string]bool   // devices whose server has something else now
	stuck     map[string]string // devices that are let go only by force, abort or lazy
	uses      []use
	loaded    map[string]unit   // units in systemd's memory
	unnoticed map[string]bool   // mount units that systemd takes to be mounted, or not, wrongly
	failed    map[string]string // result of failed units
	services  map[string]bool   // services that are active
	results   map[string]Result // of commands, by their arguments
	commands  map[commandKey]*command
	runs      map[string]int // how often a command was started
	base      map[string]entry

	slurm        cluster
	slurmDevices []string // that the cluster's configuration names

	disks         map[string]disk             // by the kernel's name
	striped       map[string][]host.Signature // what arrays hold that are stopped, by UUID
	images        map[string]bool             // by digest
	containers    map[string]*container
	containerRuns int
	endings       map[string]ending // of containers that end at once, by their arguments

	secrets   map[string]string // values, by name
	noSecrets bool              // no value can be had
	fetch     func(ctx context.Context, taskID, name string) ([]byte, error)
	kept      map[keptKey]keptFile
	packages  packages
	gpus      gpus
}

type entry struct {
	mode   fs.FileMode
	data   string
	target string
	user   string // empty: root
	group  string // empty: root
}

type use struct {
	path string
	host.Use
}

// New returns a node that has just booted: an ext4 root file system, a tmpfs on
// /run, the directories of a Debian system, and nothing in them.
func New() *Node {
	n := &Node{
		entries: map[string]entry{}, boot: 1, nextDev: 100,
		fstypes: map[string]bool{"ext4": true, "xfs": true, "tmpfs": true, "fuse": true, "overlay": true},
		users:   map[string]bool{"root": true, "nobody": true},
		volumes: map[string]string{}, hung: map[string]bool{}, stale: map[string]bool{}, stuck: map[string]string{},
		later: map[string]int{}, lies: map[string]bool{}, absent: map[string]bool{},
		loaded: map[string]unit{}, unnoticed: map[string]bool{}, failed: map[string]string{}, services: map[string]bool{},
		secrets: map[string]string{}, kept: map[keptKey]keptFile{},
		results: map[string]Result{}, commands: map[commandKey]*command{}, runs: map[string]int{},
		slurm: newCluster(),
		disks: map[string]disk{}, striped: map[string][]host.Signature{}, images: map[string]bool{}, containers: map[string]*container{}, endings: map[string]ending{},
		packages: newPackages(),
	}
	n.mountBase()
	for _, p := range []string{"/etc/systemd/system", "/usr/bin", "/usr/sbin", "/usr/local/bin", "/bin", "/sbin",
		"/var/lib", "/mnt", "/srv", "/opt", "/home", "/tmp", "/boot"} {
		n.mkdirAll(p)
	}
	n.base = maps.Clone(n.entries)
	return n
}

// isBase reports whether a mount is one with which a node begins.
func isBase(m host.Mount) bool {
	return slices.Contains([]string{"/", "/run", "/sys/fs/cgroup"}, m.Target)
}

func (n *Node) mountBase() {
	n.mounts = []host.Mount{
		{ID: 1, Dev: rootDev, Root: "/", Target: "/", Options: []string{"rw", "relatime"}, FSType: "ext4", Source: "/dev/vda1", Super: []string{"rw"}},
		{ID: 2, Parent: 1, Dev: runDev, Root: "/", Target: "/run", Options: []string{"rw", "nosuid"}, FSType: "tmpfs", Source: "tmpfs", Super: []string{"rw", "mode=755"}},
		{ID: 3, Parent: 1, Dev: "0:26", Root: "/", Target: "/sys/fs/cgroup", Options: []string{"rw", "nosuid"}, FSType: "cgroup2", Source: "cgroup2", Super: []string{"rw"}},
	}
	n.entries[rootDev+"|/"] = entry{mode: fs.ModeDir | 0o755}
	n.entries[rootDev+"|/run"] = entry{mode: fs.ModeDir | 0o755}
	n.entries[runDev+"|/"] = entry{mode: fs.ModeDir | 0o755}
	n.mkdirAll("/run/systemd/system")
}

func (n *Node) mkdirAll(p string) {
	if p == "/" {
		return
	}
	n.mkdirAll(path.Dir(p))
	if _, ok := n.entries[n.key(p)]; !ok {
		n.entries[n.key(p)] = entry{mode: fs.ModeDir | 0o755}
	}
}

// Reboot is a reset without warning: what was written stands, all that ran is
// gone, and systemd mounts what is enabled.
func (n *Node) Reboot() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.boot++
	keep := []string{rootDev}
	for _, d := range n.disks {
		keep = append(keep, d.Dev)
	}
	for _, dev := range n.volumes {
		keep = append(keep, dev)
	}
	maps.DeleteFunc(n.entries, func(k string, _ entry) bool {
		dev, _, _ := strings.Cut(k, "|")
		return !slices.Contains(keep, dev)
	})
	clear(n.unnoticed)
	n.stopSlurm(slurmdUnit)
	n.uses, n.loaded, n.failed, n.services = nil, map[string]unit{}, map[string]string{}, map[string]bool{}
	n.mountBase()
	n.rebootGPUs()
	n.assembleAtBoot()
	for _, c := range n.containers {
		c.run, c.state = 0, "" // their records stay, and nothing starts them
	}
	var wanted []string
	for k := range n.entries {
		if dir := path.Dir(k); strings.HasPrefix(dir, rootDev+"|"+unitDir+"/") && strings.HasSuffix(dir, ".wants") {
			wanted = append(wanted, path.Base(k))
		}
	}
	// A unit whose source is another's mount comes after it.
	slices.Sort(wanted)
	for range 2 {
		for _, u := range wanted {
			if err := n.start(u); err != nil && !errors.Is(err, errNoDevice) {
				n.failed[u] = "exit-code"
			}
		}
	}
}

// BootID returns the id of the present boot.
func (n *Node) BootID() string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return bootID(n.boot)
}

func bootID(boot int) string { return fmt.Sprintf("00000000-0000-4000-8000-%012d", boot) }

// Reboots returns how many reboots were asked for and came.
func (n *Node) Reboots() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.reboots
}

// Runs returns how often a process was started for a command.
func (n *Node) Runs(argv ...string) int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.runs[strings.Join(argv, " ")]
}

// Started returns how many processes were started in all.
func (n *Node) Started() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	total := 0
	for _, c := range n.runs {
		total += c
	}
	return total
}
