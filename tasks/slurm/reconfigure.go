package slurm

import (
	"context"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	slurmv1 "github.com/gpuaas/millwright/proto/millwright/slurm/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
	"github.com/gpuaas/millwright/tasks/step"
)

// Reconfigure is the kind slurm.reconfigure.
type Reconfigure struct{}

var (
	_ tasks.Task[*slurmv1.ReconfigureSpec]      = Reconfigure{}
	_ tasks.Intender[*slurmv1.ReconfigureSpec]  = Reconfigure{}
	_ tasks.Deadliner[*slurmv1.ReconfigureSpec] = Reconfigure{}
)

// ReconfigureInfo describes slurm.reconfigure.
func ReconfigureInfo() tasks.Info {
	return tasks.Info{
		Kind: "slurm.reconfigure", Revision: 4, Class: tasks.State,
		Since:   map[protoreflect.Name]uint32{"node.munge_key": 2, "node.packages": 3, "node.dynamic.gpus": 4},
		Summary: "drain the node, and have it register in Slurm with another description",
	}
}

// Validate implements [tasks.Task].
func (Reconfigure) Validate(s *slurmv1.ReconfigureSpec) error {
	var p tasks.Problems
	if s.GetNode() == nil {
		p.Add("node", "", "is required: say what slurm.join would be asked for")
	} else {
		validateJoin(&p, "node.", s.GetNode())
	}
	checkWait(&p, s.GetWaitForJobs())
	return p.Err()
}

// Locks implements [tasks.Task].
func (Reconfigure) Locks(s *slurmv1.ReconfigureSpec) []tasks.Lock { return lockFor(s.GetNode()) }

// Intent implements [tasks.Intender]: it takes the place of the join's.
func (Reconfigure) Intent(*slurmv1.ReconfigureSpec) (string, tasks.IntentChange) {
	return memberKey, tasks.IntentSet
}

// Deadline implements [tasks.Deadliner].
func (Reconfigure) Deadline(s *slurmv1.ReconfigureSpec) time.Duration {
	return s.GetWaitForJobs().AsDuration() + tasks.DefaultDeadline
}

// Plan implements [tasks.Task].
func (Reconfigure) Plan(ctx context.Context, h host.Reader, spec *slurmv1.ReconfigureSpec) (tasks.Plan, error) {
	s, err := lookFor(ctx, h, spec.GetNode())
	if err != nil {
		return tasks.Plan{}, err
	}
	if !s.joined() {
		return tasks.Plan{}, unfit("the node is no member by slurm.join: run that first")
	}
	m := wanted(spec.GetNode(), s)
	diffs := s.differences(ctx, h, m)
	if len(diffs) == 0 {
		return tasks.Plan{}, nil
	}
	if s.onlyPackages(diffs) {
		return s.packages, nil
	}
	if err := s.elsewhere(m); err != nil {
		return tasks.Plan{}, err
	}
	if !s.answered {
		return tasks.Plan{}, unfit("whether node %s has jobs is not known: %v", s.machine.HostName, s.silence)
	}
	if err := s.preflight(ctx, h, spec.GetNode()); err != nil {
		return tasks.Plan{}, err
	}
	p := tasks.Plan{Differences: diffs, Steps: slices.Clone(s.packages.Steps)}
	if s.node.Known {
		p.Steps = append(p.Steps, step.DrainSlurm(&slurmv1.SlurmDrainStep{
			Node: s.machine.HostName, Controllers: s.controllers(), Owner: ownerReconfigure, Reason: "gets another description",
			WaitForJobs: spec.GetWaitForJobs(), Empty: true,
		}))
	}
	p.Steps = append(p.Steps, s.joinSteps(m)...)
	return p, nil
}

// Verify implements [tasks.Task].
func (Reconfigure) Verify(ctx context.Context, h host.Prober, spec *slurmv1.ReconfigureSpec) error {
	return verifyMember(ctx, h, spec.GetNode())
}

// Result implements [tasks.Task].
func (Reconfigure) Result(ctx context.Context, h host.Prober, spec *slurmv1.ReconfigureSpec, _ [][]byte) (proto.Message, error) {
	return memberResult(ctx, h, spec.GetNode().GetControllers())
}
