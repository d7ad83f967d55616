package container

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"

	containerv1 "github.com/gpuaas/millwright/proto/millwright/container/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
	"github.com/gpuaas/millwright/tasks/step"
)

// Stop is the kind container.stop. It stops only what container.run started.
type Stop struct{}

var (
	_ tasks.Task[*containerv1.StopSpec]      = Stop{}
	_ tasks.Intender[*containerv1.StopSpec]  = Stop{}
	_ tasks.Deadliner[*containerv1.StopSpec] = Stop{}
)

// StopInfo describes container.stop.
func StopInfo() tasks.Info {
	return tasks.Info{
		Kind: "container.stop", Revision: 1, Class: tasks.State,
		Summary: "stop and remove what container.run started, and keep it stopped",
	}
}

// Validate implements [tasks.Task].
func (Stop) Validate(s *containerv1.StopSpec) error {
	var p tasks.Problems
	checkName(&p, s.GetName())
	return p.Err()
}

// Locks implements [tasks.Task].
func (Stop) Locks(s *containerv1.StopSpec) []tasks.Lock {
	return []tasks.Lock{{Name: intentKey(s.GetName())}}
}

// Intent implements [tasks.Intender].
func (Stop) Intent(s *containerv1.StopSpec) (string, tasks.IntentChange) {
	return intentKey(s.GetName()), tasks.IntentRemove
}

// Deadline implements [tasks.Deadliner].
func (Stop) Deadline(*containerv1.StopSpec) time.Duration { return deadline }

// Plan implements [tasks.Task].
func (Stop) Plan(ctx context.Context, h host.Reader, spec *containerv1.StopSpec) (tasks.Plan, error) {
	if err := checkRuntime(ctx, h); err != nil {
		return tasks.Plan{}, err
	}
	st, err := h.Container(ctx, spec.GetName())
	if err != nil || !st.Exists {
		return tasks.Plan{}, err
	}
	if !st.Ours {
		return tasks.Plan{}, unfit("container %s in namespace millwright was not made by Millwright: remove it by hand", spec.GetName())
	}
	p := tasks.Plan{
		Differences: []tasks.Difference{{Subject: "container " + spec.GetName(), Have: step.DescribeContainer(st)}},
		Steps:       []tasks.Step{step.RemoveContainer(&taskv1.ContainerRemoveStep{Name: spec.GetName()})},
	}
	if old, err := step.ContainerSetup(st.Record); err == nil {
		last, err := giveUpImage(ctx, h, old)
		if err != nil {
			return tasks.Plan{}, err
		}
		p.Steps = append(p.Steps, last...)
	}
	return p, nil
}

// Verify implements [tasks.Task].
func (Stop) Verify(ctx context.Context, h host.Prober, spec *containerv1.StopSpec) error {
	st, err := h.Container(ctx, spec.GetName())
	if err != nil {
		return err
	}
	if st.Exists {
		return fmt.Errorf("container %s %s: %w", spec.GetName(), step.DescribeContainer(st), tasks.ErrNotSatisfied)
	}
	return nil
}

// Result implements [tasks.Task].
func (Stop) Result(_ context.Context, _ host.Prober, spec *containerv1.StopSpec, _ [][]byte) (proto.Message, error) {
	return &containerv1.StopResult{Name: spec.GetName()}, nil
}
