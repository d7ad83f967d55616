package slurm

import (
	"context"
	"fmt"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	slurmv1 "github.com/gpuaas/millwright/proto/millwright/slurm/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
	"github.com/gpuaas/millwright/tasks/step"
)

// Leave is the kind slurm.leave.
type Leave struct{}

var (
	_ tasks.Task[*slurmv1.LeaveSpec]      = Leave{}
	_ tasks.Intender[*slurmv1.LeaveSpec]  = Leave{}
	_ tasks.Deadliner[*slurmv1.LeaveSpec] = Leave{}
)

// LeaveInfo describes slurm.leave.
func LeaveInfo() tasks.Info {
	return tasks.Info{
		Kind: "slurm.leave", Revision: 2, Class: tasks.State,
		Since:   map[protoreflect.Name]uint32{"keep_packages": 2},
		Summary: "drain the node, and take it out of its Slurm cluster",
	}
}

// Validate implements [tasks.Task].
func (Leave) Validate(s *slurmv1.LeaveSpec) error {
	var p tasks.Problems
	checkWait(&p, s.GetWaitForJobs())
	return p.Err()
}

// Locks implements [tasks.Task].
func (Leave) Locks(s *slurmv1.LeaveSpec) []tasks.Lock {
	if s.GetKeepPackages() {
		return lock()
	}
	return append(lock(), tasks.Lock{Name: "packages"})
}

// Intent implements [tasks.Intender].
func (Leave) Intent(*slurmv1.LeaveSpec) (string, tasks.IntentChange) {
	return memberKey, tasks.IntentRemove
}

// Deadline implements [tasks.Deadliner].
func (Leave) Deadline(s *slurmv1.LeaveSpec) time.Duration {
	return s.GetWaitForJobs().AsDuration() + tasks.DefaultDeadline
}

// Plan implements [tasks.Task].
func (Leave) Plan(ctx context.Context, h host.Reader, spec *slurmv1.LeaveSpec) (tasks.Plan, error) {
	own, err := anythingOfOurs(ctx, h)
	if err != nil || !own {
		return tasks.Plan{}, err
	}
	s, err := look(ctx, h, nil, tasks.Plan{})
	if err != nil {
		return tasks.Plan{}, err
	}
	if !s.answered {
		return tasks.Plan{}, unfit("whether node %s has jobs is not known: %v", s.machine.HostName, s.silence)
	}
	p := tasks.Plan{Differences: s.leftovers()}
	controllers := s.controllers()
	if s.node.Known {
		p.Steps = append(p.Steps, step.DrainSlurm(&slurmv1.SlurmDrainStep{
			Node: s.machine.HostName, Controllers: controllers, Owner: ownerLeave, Reason: "leaves the cluster",
			WaitForJobs: spec.GetWaitForJobs(), Empty: true,
		}))
	}
	p.Steps = append(p.Steps, step.StopSlurmd(&slurmv1.SlurmdStopStep{
		Node: s.machine.HostName, Controllers: controllers, Forget: s.node.Known && s.node.Is("DYNAMIC_NORM"),
	}))
	if p.Steps, err = s.withoutKey(ctx, h, p.Steps); err != nil {
		return tasks.Plan{}, err
	}
	for _, f := range []struct{ path, content string }{{optionsPath, s.options}, {dropInPath, s.dropIn}} {
		if f.content != "" {
			p.Steps = append(p.Steps, step.RemoveFile(&taskv1.RemoveFileStep{Path: f.path}))
		}
	}
	p.Steps = append(p.Steps, step.SetUnit(&taskv1.UnitStep{Unit: step.SlurmdUnit, Action: taskv1.UnitAction_UNIT_ACTION_DAEMON_RELOAD}))
	if spec.GetKeepPackages() {
		return p, nil
	}
	// Last, since what has gone can be had again only while a source has it.
	return p, s.withoutPackages(ctx, h, &p)
}

// anythingOfOurs reports whether a file of slurm.join is there.
func anythingOfOurs(ctx context.Context, h host.Reader) (bool, error) {
	for _, f := range []string{optionsPath, dropInPath} {
		content, err := readOwn(ctx, h, f)
		if err != nil || content != "" {
			return content != "", err
		}
	}
	return false, nil
}

func (s *survey) leftovers() []tasks.Difference {
	var diffs []tasks.Difference
	if s.node.Known {
		diffs = append(diffs, tasks.Difference{Subject: "node " + s.node.Name + " in Slurm", Have: strings.Join(s.node.States, "+")})
	}
	if active(s.slurmd) {
		diffs = append(diffs, tasks.Difference{Subject: "unit " + step.SlurmdUnit, Have: s.slurmd.Active})
	}
	for _, f := range []struct{ path, content string }{{optionsPath, s.options}, {dropInPath, s.dropIn}} {
		if f.content != "" {
			diffs = append(diffs, tasks.Difference{Subject: "file " + f.path, Have: "there"})
		}
	}
	if s.ownsKey() {
		diffs = append(diffs, tasks.Difference{Subject: "munge key in " + step.MungeKey, Have: "the cluster's"})
	}
	return diffs
}

// Verify implements [tasks.Task]. That the controller has forgotten the node was
// asked while the node still could; here it has no way to ask.
func (Leave) Verify(ctx context.Context, h host.Prober, _ *slurmv1.LeaveSpec) error {
	own, err := anythingOfOurs(ctx, h)
	if err != nil {
		return err
	}
	if own {
		return fmt.Errorf("a file of slurm.join is still there: %w", tasks.ErrNotSatisfied)
	}
	return nil
}

// Result implements [tasks.Task].
func (Leave) Result(ctx context.Context, h host.Prober, _ *slurmv1.LeaveSpec, _ [][]byte) (proto.Message, error) {
	m, err := h.SlurmMachine(ctx)
	if err != nil { // Slurm may be gone with its packages
		if m, err = kernelMachine(ctx, h); err != nil {
			return nil, err
		}
	}
	return &slurmv1.LeaveResult{Node: m.HostName}, nil
}
