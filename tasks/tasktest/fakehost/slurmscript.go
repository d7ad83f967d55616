package fakehost

import (
	"context"
	"fmt"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gpuaas/millwright/tasks/host"
)

// doSlurm changes the cluster.
func (n *Node) doSlurm(what string, a []string) error {
	s := &n.slurm
	switch {
	case what == "controller" && len(a) == 2:
		s.server, s.version = a[0], a[1]
		for _, p := range slurmPrograms() {
			n.entries[n.key(p)] = entry{mode: 0o755, data: "ELF"}
		}
	case what == "remote" && len(a) == 2:
		s.server, s.version = a[0], a[1]
	case what == "gone" && len(a) == 0:
		for _, p := range slurmPrograms() {
			delete(n.entries, n.key(p))
		}
		*s = newCluster()
	case what == "forget" && len(a) == 1:
		delete(s.nodes, a[0])
	case what == "drain" && len(a) == 2:
		node := s.nodes[a[0]]
		node.States, node.Reason = append(slices.Clone(node.States), "DRAIN"), a[1]
		s.nodes[a[0]] = node
	case what == "memory" && len(a) == 1:
		m, err := strconv.ParseUint(a[0], 10, 63)
		s.slurmd.RealMemoryMiB = m
		return err
	case what == "key" && len(a) == 1:
		s.key = a[0]
	case what == "noreturn" && len(a) == 0:
		s.noReturn = true
	case what == "down" && len(a) == 0:
		s.down = true
	case what == "up" && len(a) == 0:
		s.down = false
	case what == "skew" && len(a) == 1:
		d, err := time.ParseDuration(a[0])
		s.skew = d
		return err
	case what == "slurmd" && len(a) == 1:
		s.slurmd.Version = a[0]
	case what == "nojobs" && len(a) == 1:
		s.badJobs = a[0]
	case what == "says" && len(a) == 1:
		s.says = a[0]
	case what == "nodevices" && len(a) == 0:
		s.noDevices = true
	case what == "device" && len(a) == 1:
		n.slurmDevices = append(n.slurmDevices, a[0])
	case (what == "node" || what == "static") && len(a) >= 2:
		node := host.SlurmNode{Name: a[0], Known: true, States: strings.Split(a[1], "+"), Partitions: []string{"gpu"}, Version: s.version}
		if len(a) > 2 {
			node.Gres = a[2]
		}
		if len(a) > 3 {
			node.Reason = a[3]
		}
		s.nodes[a[0]], s.static[a[0]] = node, what == "static"
	case what == "job" && (len(a) == 4 || len(a) == 5):
		node, job := s.nodes[a[0]], host.SlurmJob{ID: a[1], User: a[2], State: a[3], Name: "job"}
		if len(a) == 5 {
			d, err := time.ParseDuration(a[4])
			if err != nil {
				return err
			}
			job.End = time.Now().Add(d)
		}
		node.Jobs = append(node.Jobs, job)
		for _, m := range n.mounts {
			s.uses = append(s.uses, job.ID+" "+m.Target)
		}
		s.nodes[a[0]] = node
	case what == "nojob" && len(a) == 1:
		node := s.nodes[a[0]]
		node.Jobs = nil
		s.nodes[a[0]] = node
	default:
		return fmt.Errorf("unknown change of Slurm %q, or not its number of words: %w", what, fs.ErrInvalid)
	}
	return nil
}

// dumpSlurm describes what the controller has.
func (n *Node) dumpSlurm() []string {
	var lines []string
	for _, name := range slices.Sorted(maps.Keys(n.slurm.nodes)) {
		node := n.slurm.nodes[name]
		states := slices.Sorted(slices.Values(node.States))
		lines = append(lines, fmt.Sprintf("slurm %s %s gres %q features %s reason %q", name, strings.Join(states, "+"), node.Gres, strings.Join(node.Features, ","), node.Reason))
	}
	return append(lines, n.slurm.disturbed...)
}

// disturb notes what was done to a mount that a job on the node has had since it
// began: no task may.
func (n *Node) disturb(what, target string) {
	node, err := n.slurmNode(host.SlurmRef{})
	for _, j := range node.Jobs {
		if err == nil && slices.Contains(n.slurm.uses, j.ID+" "+target) {
			n.slurm.disturbed = append(n.slurm.disturbed, fmt.Sprintf("slurm job %s was disturbed: %s %s", j.ID, what, target))
		}
	}
}

func (v *view) SlurmNode(ctx context.Context, ref host.SlurmRef) (host.SlurmNode, error) {
	return call(ctx, v, Op{Name: "SlurmNode", Object: slurmName(ref)}, func() (host.SlurmNode, error) { return v.n.slurmNode(ref) })
}

func (v *view) SlurmController(ctx context.Context, _ []string) (host.SlurmController, error) {
	return call(ctx, v, Op{Name: "SlurmController"}, func() (host.SlurmController, error) {
		name, _, _ := strings.Cut(v.n.slurm.server, ":")
		return host.SlurmController{Name: path.Base(name), Version: v.n.slurm.version}, v.n.ask("scontrol")
	})
}

func (v *view) SlurmMachine(ctx context.Context) (host.SlurmMachine, error) {
	return call(ctx, v, Op{Name: "SlurmMachine"}, func() (host.SlurmMachine, error) { return v.n.slurmMachine() })
}

func (v *view) ProbeMunge(ctx context.Context) (host.MungeProbe, error) {
	return call(ctx, v, Op{Name: "ProbeMunge"}, func() (host.MungeProbe, error) { return v.n.probeMunge() })
}

func (v *view) ProbeSlurmServer(ctx context.Context, server string) error {
	_, err := call(ctx, v, Op{Name: "ProbeSlurmServer", Object: server}, func() (struct{}, error) { return struct{}{}, v.n.probeSlurmServer(server) })
	return err
}

func (v *view) ProbeSlurmJob(ctx context.Context, ref host.SlurmRef, gres string) (int, error) {
	return call(ctx, v, Op{Name: "ProbeSlurmJob", Object: slurmName(ref)}, func() (int, error) { return v.n.probeSlurmJob(ref, gres) })
}

func (v *view) DrainSlurmNode(ctx context.Context, ref host.SlurmRef, owner, text string) error {
	return change(ctx, v, "DrainSlurmNode", slurmName(ref), func() error { return v.n.drainSlurm(ref, owner, text) })
}

func (v *view) ResumeSlurmNode(ctx context.Context, ref host.SlurmRef, owner string) error {
	return change(ctx, v, "ResumeSlurmNode", slurmName(ref), func() error { return v.n.resumeSlurm(ref, owner) })
}

func (v *view) ReviveSlurmNode(ctx context.Context, ref host.SlurmRef, owner string) error {
	return change(ctx, v, "ReviveSlurmNode", slurmName(ref), func() error {
		if node := v.n.slurm.nodes[slurmName(ref)]; node.DrainedBy(owner) && v.n.ask("scontrol") == nil {
			v.n.slurm.up(node)
		}
		return v.n.resumeSlurm(ref, owner)
	})
}

func (v *view) DeleteSlurmNode(ctx context.Context, ref host.SlurmRef) error {
	return change(ctx, v, "DeleteSlurmNode", slurmName(ref), func() error { return v.n.deleteSlurm(ref) })
}
