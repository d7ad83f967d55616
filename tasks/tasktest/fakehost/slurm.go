package fakehost

import (
	"fmt"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gpuaas/millwright/tasks/host"
)

const (
	slurmdUnit = "slurmd.service"
	mungeUnit  = "munge.service"
	mungeKey   = "/etc/munge/munge.key"
	slurmSelf  = "node1" // the machine's name in Slurm
)

// cluster is the Slurm cluster that the node can see.
type cluster struct {
	server  string // where the controller listens; empty: there is none
	version string
	key     string // the key of the cluster's munge; empty: any will do
	down    bool   // nothing answers
	nodes   map[string]host.SlurmNode
	static  map[string]bool // nodes that stand in the controller's slurm.conf
	slurmd  host.SlurmMachine
	memKey  string        // the key that munged has in memory
	skew    time.Duration // of munged's clock
	badJobs string        // why no job runs
	says    string        // what the controller answers to everything
	// noDevices has jobs that are given no GPU.
	noDevices bool
	// noReturn has nodes down when they come back from a reboot.
	noReturn bool
	boot     int // in which the node has registered
	// disturbed are the jobs that ran while something was done that disturbs them.
	disturbed []string
	uses      []string // JOB TARGET
}

func newCluster() cluster {
	return cluster{
		nodes: map[string]host.SlurmNode{}, static: map[string]bool{},
		slurmd: host.SlurmMachine{Version: "22.05.8", RealMemoryMiB: 16000, HostName: slurmSelf},
	}
}

func slurmError(format string, args ...any) error {
	return fmt.Errorf("%s: %w", fmt.Sprintf(format, args...), host.ErrSlurm)
}

func slurmPrograms() []string {
	return []string{"/usr/bin/scontrol", "/usr/bin/squeue", "/usr/bin/srun", "/usr/bin/scancel", "/usr/bin/munge", "/usr/bin/unmunge"}
}

// ask is what every question to the controller needs.
func (n *Node) ask(program string) error {
	if _, err := n.findProgram(program); err != nil {
		return err
	}
	switch s := &n.slurm; {
	case !n.services[mungeUnit]:
		return slurmError("%s: Munge encode failed: Failed to access /run/munge/munge.socket.2", program)
	case s.server == "" || s.down:
		return slurmError("%s: Unable to contact slurm controller (connect failure)", program)
	case s.says != "":
		return slurmError("%s: %s", program, s.says)
	case !n.trusted():
		return slurmError("%s: Zero Bytes were transmitted or received", program)
	}
	return nil
}

// trusted reports whether the controller takes munged's credentials.
func (n *Node) trusted() bool {
	s := &n.slurm
	return (s.key == "" || s.memKey == s.key) && s.skew.Abs() <= 5*time.Minute
}

func slurmName(ref host.SlurmRef) string {
	if ref.Node == "" {
		return slurmSelf
	}
	return ref.Node
}

func (n *Node) slurmNode(ref host.SlurmRef) (host.SlurmNode, error) {
	if err := n.ask("scontrol"); err != nil {
		return host.SlurmNode{}, err
	}
	node, ok := n.slurm.nodes[slurmName(ref)]
	if !ok {
		return host.SlurmNode{Name: slurmName(ref)}, nil
	}
	node.States = slices.Clone(node.States)
	node.Jobs = slices.DeleteFunc(slices.Clone(node.Jobs), func(j host.SlurmJob) bool { return !j.End.IsZero() && !time.Now().Before(j.End) })
	return node, nil
}

func (n *Node) slurmMachine() (host.SlurmMachine, error) {
	if _, err := n.findProgram("slurmd"); err != nil {
		return host.SlurmMachine{}, err
	}
	return n.slurm.slurmd, nil
}

func (n *Node) probeMunge() (host.MungeProbe, error) {
	if _, err := n.findProgram("munge"); err != nil {
		return host.MungeProbe{}, err
	}
	if !n.services[mungeUnit] {
		return host.MungeProbe{}, slurmError("munge: Failed to access /run/munge/munge.socket.2")
	}
	return host.MungeProbe{Encoded: time.Unix(0, 0).Add(n.slurm.skew), Skew: n.slurm.skew}, nil
}

func (n *Node) probeSlurmServer(server string) error {
	if want, _, _ := strings.Cut(n.slurm.server, ":"); n.slurm.down || want == "" || !strings.HasPrefix(server+":", want+":") {
		return fmt.Errorf("connect to Slurm's controller at %s: connection refused", server)
	}
	return nil
}

func (n *Node) probeSlurmJob(ref host.SlurmRef, gres string) (int, error) {
	node, err := n.slurmNode(ref)
	switch {
	case err != nil:
		return 0, err
	case !node.Known || !node.Is("IDLE") && !node.Is("MIXED") || node.Drained():
		return 0, slurmError("srun: Required node not available (down, drained or reserved)")
	case n.slurm.badJobs != "":
		return 0, slurmError("srun: %s", n.slurm.badJobs)
	}
	name, count, _ := strings.Cut(gres, ":")
	if gres == "" || name == "gpu" && n.slurm.noDevices {
		return 0, nil
	}
	return strconv.Atoi(count[strings.LastIndex(count, ":")+1:])
}

func (n *Node) drainSlurm(ref host.SlurmRef, owner, text string) error {
	node, err := n.slurmNode(ref)
	switch {
	case err != nil:
		return err
	case !node.Known:
		return slurmError("node %s: the controller does not know it", node.Name)
	case node.DrainedBy(owner):
		return nil
	case node.Drained() || node.Is("DOWN") && node.Reason != "":
		return fmt.Errorf("drain node %s: it is %s for another reason, %q: %w", node.Name, strings.Join(node.States, "+"), node.Reason, host.ErrNotOurs)
	}
	node.States = append(node.States, "DRAIN")
	if node.Reason = owner; text != "" {
		node.Reason += ": " + text
	}
	n.slurm.nodes[node.Name] = node
	return nil
}

func (n *Node) resumeSlurm(ref host.SlurmRef, owner string) error {
	node, err := n.slurmNode(ref)
	if err != nil || node.Known && !node.Drained() {
		return err
	}
	if !node.Known {
		return slurmError("node %s: the controller does not know it", node.Name)
	}
	if !node.DrainedBy(owner) {
		return fmt.Errorf("resume node %s: it is %s for another reason, %q: %w", node.Name, strings.Join(node.States, "+"), node.Reason, host.ErrNotOurs)
	}
	node.States, node.Reason = slices.DeleteFunc(node.States, func(s string) bool { return s == "DRAIN" }), ""
	n.slurm.nodes[node.Name] = node
	return nil
}

func (n *Node) deleteSlurm(ref host.SlurmRef) error {
	node, err := n.slurmNode(ref)
	switch {
	case err != nil || !node.Known:
		return err
	case n.slurm.static[node.Name]:
		return fmt.Errorf("remove node %s from Slurm: it stands in the controller's slurm.conf and is not dynamic: %w", node.Name, host.ErrNotOurs)
	case len(node.Jobs) > 0:
		return slurmError("remove node %s: Requested nodes are busy", node.Name)
	}
	delete(n.slurm.nodes, node.Name)
	return nil
}

var slurmSetting = regexp.MustCompile(`(Gres|Feature|RealMemory)=([^ '"]*)`)

// slurmOptions are the options that slurmd is started with.
func (n *Node) slurmOptions() string {
	u := n.load(slurmdUnit)
	options := u.last("Service.ExecStart")
	for _, file := range u.all("Service.EnvironmentFile") {
		f, err := n.readFile(strings.TrimPrefix(file, "-"))
		if err == nil {
			options += " " + string(f.Data)
		}
	}
	return options
}

// startSlurm is what happens when slurmd or munged has started.
func (n *Node) startSlurm(unit string) error {
	s := &n.slurm
	if unit == mungeUnit {
		f, err := n.readFile(mungeKey)
		if err != nil || f.Mode.Perm()&0o077 != 0 {
			return fmt.Errorf("unit %s: result exit-code: munged: Error: Keyfile is insecure: %w", unit, host.ErrJob)
		}
		s.memKey = string(f.Data)
		return nil
	}
	if unit != slurmdUnit {
		return nil
	}
	options := n.slurmOptions()
	if n.ask("slurmd") != nil || s.tooNew() {
		return nil //nolint:nilerr // it goes on trying, and exits only later
	}
	if len(n.slurmDevices) > 0 { // slurmd shows the controller's configuration while it runs
		n.mkdirAll(path.Dir(fakeGresConf))
		n.entries[n.key(fakeGresConf)] = entry{mode: 0o644, data: "Name=gpu File=" + strings.Join(n.slurmDevices, "\nName=gpu File=") + "\n"}
	}
	n.register(options)
	return nil
}

// up ends the down state of a node.
func (s *cluster) up(node host.SlurmNode) {
	node.States = slices.Clone(node.States)
	if i := slices.Index(node.States, "DOWN"); i >= 0 {
		node.States[i] = "IDLE"
	}
	s.nodes[node.Name] = node
}

const fakeGresConf = "/run/slurm/conf/gres.conf"

func (s *cluster) tooNew() bool { return s.slurmd.Version > s.version }

// register makes the node known to the controller, or has it answer again.
func (n *Node) register(options string) {
	s := &n.slurm
	have, known := s.nodes[slurmSelf]
	if !known && !strings.Contains(options, "-Z") {
		return
	}
	node := host.SlurmNode{Name: slurmSelf, Known: true, States: []string{"IDLE", "DYNAMIC_NORM"}, Partitions: []string{"gpu"}, Address: slurmSelf}
	for _, m := range slurmSetting.FindAllStringSubmatch(options, -1) {
		switch m[1] {
		case "Gres":
			node.Gres = m[2]
		case "Feature":
			node.Features = strings.Split(m[2], ",")
		case "RealMemory":
			node.RealMemoryMiB, _ = strconv.ParseUint(m[2], 10, 63) // what is no number counts as 0
		}
	}
	if known {
		gres := node.Gres
		node = have
		node.States = slices.DeleteFunc(slices.Clone(have.States), func(st string) bool { return st == "DOWN" || st == "NOT_RESPONDING" || st == "IDLE" || st == "UNKNOWN" })
		node.States = append([]string{"IDLE"}, node.States...)
		if !s.static[slurmSelf] && gres != have.Gres {
			node.States = append(node.States, "DRAIN", "INVALID_REG")
			node.Reason = "gres/gpu count reported lower than configured"
		}
	}
	if n.missingDevice() {
		return
	}
	if known && s.noReturn && s.boot != n.boot {
		node.States[0] = "DOWN"
	}
	s.boot = n.boot
	// By the second, as Slurm keeps it; each boot takes one.
	node.Version, node.SlurmdStart = s.slurmd.Version, time.Now().UTC().Truncate(time.Second).Add(time.Duration(n.boot-1)*time.Second)
	s.nodes[slurmSelf] = node
}

// missingDevice reports whether a device that a node's configuration names is
// not there.
func (n *Node) missingDevice() bool {
	for _, f := range n.slurmDevices {
		if _, err := n.lstat(f); err != nil {
			return true
		}
	}
	return false
}

// stopSlurm is what happens when slurmd has stopped: the controller notices.
func (n *Node) stopSlurm(unit string) {
	if unit == slurmdUnit {
		for _, p := range []string{fakeGresConf, "/run/slurm/conf", "/run/slurm"} {
			delete(n.entries, n.key(p))
		}
	}
	node, ok := n.slurm.nodes[slurmSelf]
	if unit != slurmdUnit || !ok || !n.services[unit] {
		return
	}
	node.States = slices.DeleteFunc(slices.Clone(node.States), func(s string) bool { return s == "IDLE" || s == "DOWN" })
	node.States = append([]string{"DOWN"}, node.States...)
	n.slurm.nodes[slurmSelf] = node
}
