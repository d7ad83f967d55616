package slurm

import (
	"context"
	"fmt"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	slurmv1 "github.com/gpuaas/millwright/proto/millwright/slurm/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
	"github.com/gpuaas/millwright/tasks/step"
)

// Drain is the kind slurm.drain.
type Drain struct{}

var (
	_ tasks.Task[*slurmv1.DrainSpec]      = Drain{}
	_ tasks.Intender[*slurmv1.DrainSpec]  = Drain{}
	_ tasks.Deadliner[*slurmv1.DrainSpec] = Drain{}
)

// DrainInfo describes slurm.drain.
func DrainInfo() tasks.Info {
	return tasks.Info{
		Kind: "slurm.drain", Revision: 1, Class: tasks.State,
		Summary: "let no new job of Slurm start on the node",
	}
}

// Validate implements [tasks.Task].
func (Drain) Validate(s *slurmv1.DrainSpec) error {
	var p tasks.Problems
	checkReason(&p, s.GetReason())
	checkWait(&p, s.GetWaitForJobs())
	return p.Err()
}

// Locks implements [tasks.Task].
func (Drain) Locks(*slurmv1.DrainSpec) []tasks.Lock { return lock() }

// Intent implements [tasks.Intender].
func (Drain) Intent(*slurmv1.DrainSpec) (string, tasks.IntentChange) {
	return drainKey, tasks.IntentSet
}

// Deadline implements [tasks.Deadliner].
func (Drain) Deadline(s *slurmv1.DrainSpec) time.Duration {
	return s.GetWaitForJobs().AsDuration() + tasks.DefaultDeadline
}

// ask surveys a node that the controller has to know. Whoever does not get an
// answer knows nothing of the node, and does nothing to it.
func ask(ctx context.Context, h host.Reader) (*survey, error) {
	s, err := look(ctx, h, nil, tasks.Plan{})
	switch {
	case err != nil:
		return nil, err
	case !s.answered:
		return nil, unfit("the state of node %s is not known: %v", s.machine.HostName, s.silence)
	case !s.node.Known:
		return nil, unfit("Slurm's controller does not know node %s: use slurm.join first", s.node.Name)
	}
	return s, nil
}

// Plan implements [tasks.Task].
func (Drain) Plan(ctx context.Context, h host.Reader, spec *slurmv1.DrainSpec) (tasks.Plan, error) {
	s, err := ask(ctx, h)
	if err != nil {
		return tasks.Plan{}, err
	}
	if s.node.Drained() && !s.node.DrainedBy(ownerDrain) {
		return tasks.Plan{}, unfit("node %s is drained already, by somebody else: %q", s.node.Name, s.node.Reason)
	}
	wait := spec.GetWaitForJobs().AsDuration() > 0
	if s.node.DrainedBy(ownerDrain) && (!wait || len(s.node.Jobs) == 0) {
		return tasks.Plan{}, nil
	}
	return tasks.Plan{
		Differences: []tasks.Difference{{Subject: "node " + s.node.Name + " in Slurm", Have: strings.Join(s.node.States, "+"), Want: "DRAIN"}},
		Steps: []tasks.Step{step.DrainSlurm(&slurmv1.SlurmDrainStep{
			Node: s.machine.HostName, Controllers: s.controllers(), Owner: ownerDrain, Reason: spec.GetReason(), WaitForJobs: spec.GetWaitForJobs(),
		})},
	}, nil
}

// Verify implements [tasks.Task].
func (Drain) Verify(ctx context.Context, h host.Prober, spec *slurmv1.DrainSpec) error {
	s, err := ask(ctx, h)
	switch {
	case err != nil:
		return err
	case !s.node.DrainedBy(ownerDrain):
		return fmt.Errorf("node %s is %s, reason %q: %w", s.node.Name, strings.Join(s.node.States, "+"), s.node.Reason, tasks.ErrNotSatisfied)
	case spec.GetWaitForJobs().AsDuration() > 0 && len(s.node.Jobs) > 0:
		return fmt.Errorf("node %s has %s: %w", s.node.Name, step.SlurmJobs(s.node.Jobs), tasks.ErrNotSatisfied)
	}
	return nil
}

// Result implements [tasks.Task].
func (Drain) Result(ctx context.Context, h host.Prober, _ *slurmv1.DrainSpec, _ [][]byte) (proto.Message, error) {
	return drainResult(ctx, h)
}

func drainResult(ctx context.Context, h host.Reader) (proto.Message, error) {
	s, err := ask(ctx, h)
	if err != nil {
		return nil, err
	}
	return &slurmv1.DrainResult{Node: s.node.Name, State: strings.Join(s.node.States, "+"), Jobs: uint32(len(s.node.Jobs))}, nil
}
