package tasks

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks/host"
)

const (
	// DefaultJobWait is how long jobs are waited for when a spec does not say.
	DefaultJobWait = time.Hour
	// MaxJobWait is the longest that a spec may ask for.
	MaxJobWait = 7 * 24 * time.Hour
)

// Disturbance is what a plan does to work that others run on the node.
type Disturbance struct {
	// What it does, in words: "unmounts /data".
	What string
	// Wait is how long that work is waited for.
	Wait time.Duration
	// Reboots is set when the node reboots.
	Reboots bool
	// GPUs is set when the node's GPUs are others afterwards, as Slurm writes them:
	// gpu:1g.10gb:7.
	GPUs *string
}

// Asker is a workload manager that is asked before a plan disturbs a node.
type Asker interface {
	// Ask returns what is to be done before and after, and nil when the node runs
	// nothing of the manager's. The owner's tag marks all that the task does to
	// the node there. When it is not known what runs, the error wraps
	// [ErrPrecondition]: no answer is not "nothing".
	Ask(ctx context.Context, h host.Reader, owner string, d Disturbance) (*Gate, error)
}

// Gate is what surrounds the steps of a plan that disturbs a node.
type Gate struct {
	// Before waits until nothing is disturbed any more. Its undo gives the node
	// back. Both steps are a [GateStep].
	Before Step
	// After gives the node back.
	After Step
	// Stop has the manager let go of what changes, once nothing is disturbed, and
	// Tell has it know what there is instead. Both may be none.
	Stop, Tell []Step
	// InTheWay is what runs now.
	InTheWay *taskv1.InTheWay
}

// GateStep is a step that asks a workload manager. What it returns is not given
// to the kind's Result.
type GateStep interface {
	Step
	// Gates does nothing.
	Gates()
}

// Waiter is a step that may wait for others: its Apply looks once, and returns an
// error marked by [Wait] when it is not yet time. A cancel ends the wait. Only a
// step whose effect is idempotent may be one.
type Waiter interface {
	// WaitMost is how long it waits at most, in all its tries.
	WaitMost() time.Duration
}

// Wait marks an error of a [Waiter]'s Apply: it is to look again. When the time
// is over the error is the step's failure.
func Wait(err error) error { return &waiting{err} }

// IsWait returns whether err, or an error that it wraps, was marked by [Wait].
func IsWait(err error) bool {
	var w *waiting
	return errors.As(err, &w)
}

type waiting struct{ err error }

func (w *waiting) Error() string { return w.err.Error() }
func (w *waiting) Unwrap() error { return w.err }

// JobWait is the time that a spec gives to jobs.
func JobWait(d *durationpb.Duration) time.Duration {
	if d == nil {
		return DefaultJobWait
	}
	return d.AsDuration()
}

// CheckJobWait reports a wait_for_jobs that is no time to wait.
func CheckJobWait(p *Problems, d *durationpb.Duration) {
	if d != nil && (!d.IsValid() || d.AsDuration() < 0 || d.AsDuration() > MaxJobWait) {
		p.Add("wait_for_jobs", fmt.Sprintf("%d.%09ds", d.GetSeconds(), d.GetNanos()),
			fmt.Sprintf("must be from 0s to %v: leave it out for %v", MaxJobWait, DefaultJobWait))
	}
}

// AddAsker registers a workload manager. They are asked in this order.
func (r *Registry) AddAsker(a Asker) { r.askers = append(r.askers, a) }

// gate puts the steps of a plan between those that ask the node's workload
// managers, and notes in out who is in the way.
func (r *Registry) gate(ctx context.Context, h host.Reader, k *Kind, spec proto.Message, p Plan, out *taskv1.Plan) ([]Step, error) {
	if p.Disturbs == nil || len(p.Steps) == 0 {
		return p.Steps, nil
	}
	owner, err := ownerTag(k, spec)
	if err != nil {
		return nil, err
	}
	var before, after []Step
	for _, a := range r.askers {
		g, err := a.Ask(ctx, h, owner, *p.Disturbs)
		if err != nil {
			return nil, err
		}
		if g == nil {
			continue
		}
		before, after = append(before, g.Before), append([]Step{g.After}, after...)
		p.Steps = slices.Concat(g.Stop, p.Steps, g.Tell)
		out.InTheWay = append(out.InTheWay, g.InTheWay)
	}
	if len(before) > 0 {
		out.Impact = append([]taskv1.Impact{taskv1.Impact_IMPACT_DRAIN}, out.GetImpact()...)
	}
	return append(append(before, p.Steps...), after...), nil
}

// ownerTag is the same for the same spec: two tasks with it never run at a time,
// as they need the same locks, and the second finds what the first may have left.
func ownerTag(k *Kind, spec proto.Message) (string, error) {
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(spec)
	if err != nil {
		return "", fmt.Errorf("serialise spec of %s: %w", k.Kind, err)
	}
	return fmt.Sprintf("mw:%s-%x", k.Kind, sha256.Sum256(b))[:len("mw:")+len(k.Kind)+1+8], nil
}

// OwnOuts are the outs of a kind's own steps.
func OwnOuts(p *taskv1.Plan, outs [][]byte) [][]byte {
	var own [][]byte
	for i, s := range p.GetSteps() {
		if !s.GetGate() && i < len(outs) {
			own = append(own, outs[i])
		}
	}
	return own
}
