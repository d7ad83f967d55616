package step

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	slurmv1 "github.com/gpuaas/millwright/proto/millwright/slurm/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
)

const (
	// OwnerDrain is the tag of slurm.drain. A person wants the node drained: such
	// a drain stands like an administrator's.
	OwnerDrain = "mw:drain"
	// ownTags begins the tags of all drains of Millwright.
	ownTags = "mw:"
	// returnTime is how long the controller may take to have the node again.
	returnTime = 10 * time.Minute
)

type askSlurm struct{ args *slurmv1.SlurmAskStep }

var (
	_ tasks.GateStep = askSlurm{}
	_ tasks.Waiter   = askSlurm{}
	_ tasks.GateStep = returnSlurm{}
	_ tasks.Waiter   = returnSlurm{}
)

// AskSlurm returns the step that has a node take no new job, under the tag of the
// task, and waits until it has none. A node that somebody else has drained stays
// drained by them. It ends when no job is on the node; its undo ends its own
// drain, and no other.
func AskSlurm(args *slurmv1.SlurmAskStep) tasks.Step { return askSlurm{args} }

func (s askSlurm) Args() proto.Message { return s.args }

// Gates implements [tasks.GateStep].
func (s askSlurm) Gates() {}

// WaitMost implements [tasks.Waiter].
func (s askSlurm) WaitMost() time.Duration { return s.args.GetWaitForJobs().AsDuration() }

func (s askSlurm) Title() string {
	return fmt.Sprintf("have Slurm drain node %s as %s, and wait %v at most for its jobs",
		s.args.GetNode(), s.args.GetOwner(), s.args.GetWaitForJobs().AsDuration())
}

func (s askSlurm) ref() host.SlurmRef { return slurmRef(s.args.GetNode(), s.args.GetControllers()) }

// Observe returns nothing: the tag says what is the task's to take back.
func (s askSlurm) Observe(context.Context, host.Reader) ([]byte, error) { return nil, nil }

func (s askSlurm) Apply(ctx context.Context, h host.Host) ([]byte, error) {
	n, err := h.SlurmNode(ctx, s.ref())
	if err != nil {
		return nil, noAnswer(err)
	}
	if other := otherTask(n, s.args.GetOwner()); other != "" {
		return nil, tasks.Wait(reasonError(tasks.ReasonSlurmForeignDrain, "another task has drained node %s, and ends that itself: %q: %w", n.Name, other, host.ErrBusy))
	}
	if n.Known && !n.Drained() {
		err := h.DrainSlurmNode(ctx, s.ref(), s.args.GetOwner(), s.args.GetReason())
		if err != nil && !errors.Is(err, host.ErrNotOurs) { // somebody was faster, or the node is down: no job starts
			return nil, noAnswer(err)
		}
	}
	switch err := slurmQuiet(ctx, h, s.ref()); {
	case errors.Is(err, host.ErrBusy):
		return nil, tasks.Wait(&tasks.ReasonError{Reason: tasks.ReasonSlurmJobs, Err: err})
	case err != nil:
		return nil, noAnswer(err)
	}
	return nil, nil
}

// noAnswer is waited for too. Nothing is known without an answer.
func noAnswer(err error) error {
	if !errors.Is(err, host.ErrSlurm) {
		return err
	}
	return tasks.Wait(reasonError(tasks.ReasonSlurmControllerDown, "whether jobs run on the node is not known: %w", err))
}

// otherTask returns the reason of a drain that another task ends by itself.
func otherTask(n host.SlurmNode, owner string) string {
	if !n.Drained() || !strings.HasPrefix(n.Reason, ownTags) || n.DrainedBy(owner) || n.DrainedBy(OwnerDrain) {
		return ""
	}
	return n.Reason
}

// slurmQuiet returns nil when the controller says that no job is on the node, and
// that none can start there.
func slurmQuiet(ctx context.Context, h host.Reader, ref host.SlurmRef) error {
	n, err := h.SlurmNode(ctx, ref)
	switch {
	case err != nil:
		return err
	case !n.Known:
		return nil // the controller starts nothing on it
	case !n.Drained() && !n.Is("DOWN") && !n.Is("FAIL"):
		return fmt.Errorf("node %s is %s, and jobs could start on it: %w", n.Name, strings.Join(n.States, "+"), host.ErrBusy)
	}
	return slurmIdle(ctx, h, ref)
}

func (s askSlurm) Verify(ctx context.Context, h host.Prober) error {
	err := slurmQuiet(ctx, h, s.ref())
	if errors.Is(err, host.ErrBusy) {
		err = fmt.Errorf("%w: %w", err, tasks.ErrNotSatisfied)
	}
	return err
}

func (s askSlurm) Undo(ctx context.Context, h host.Host, _ []byte) error {
	return endDrain(ctx, h, s.ref(), s.args.GetOwner())
}

// endDrain ends a drain of the owner's. What is not the owner's stays.
func endDrain(ctx context.Context, h host.Host, ref host.SlurmRef, owner string) error {
	n, err := h.SlurmNode(ctx, ref)
	if err != nil || !n.Known || !n.DrainedBy(owner) {
		return err
	}
	if err := h.ResumeSlurmNode(ctx, ref, owner); err != nil && !errors.Is(err, host.ErrNotOurs) {
		return err
	}
	return nil
}

type returnSlurm struct{ args *slurmv1.SlurmReturnStep }

// ReturnSlurm returns the step that ends the drain of [AskSlurm], once the node
// has registered again when it was rebooted. Its undo drains the node again, and
// fails while there are jobs: what is undone after it would disturb them.
func ReturnSlurm(args *slurmv1.SlurmReturnStep) tasks.Step { return returnSlurm{args} }

func (s returnSlurm) Args() proto.Message { return s.args }

// Gates implements [tasks.GateStep].
func (s returnSlurm) Gates() {}

// WaitMost implements [tasks.Waiter].
func (s returnSlurm) WaitMost() time.Duration { return returnTime }

func (s returnSlurm) Title() string {
	t := fmt.Sprintf("end the drain %s of node %s", s.args.GetOwner(), s.args.GetNode())
	if s.args.GetRebooted() {
		t += " once it has registered again"
	}
	return t
}

func (s returnSlurm) ref() host.SlurmRef { return slurmRef(s.args.GetNode(), s.args.GetControllers()) }

// Observe returns nothing: the tag says what is the task's.
func (s returnSlurm) Observe(context.Context, host.Reader) ([]byte, error) { return nil, nil }

func (s returnSlurm) Apply(ctx context.Context, h host.Host) ([]byte, error) {
	n, err := h.SlurmNode(ctx, s.ref())
	if err != nil {
		return nil, noAnswer(err)
	}
	if err := s.registered(n); err != nil {
		return nil, tasks.Wait(&tasks.ReasonError{Reason: tasks.ReasonSlurmNotRegistered, Err: err})
	}
	if s.args.GetRebooted() && n.Is("DOWN") && n.DrainedBy(s.args.GetOwner()) {
		err = h.ReviveSlurmNode(ctx, s.ref(), s.args.GetOwner())
	} else {
		err = endDrain(ctx, h, s.ref(), s.args.GetOwner())
	}
	if err != nil {
		return nil, noAnswer(err)
	}
	return nil, nil
}

// registered returns nil when slurmd was started since the reboot and answers. A
// node that is somebody else's to give back is not waited for.
func (s returnSlurm) registered(n host.SlurmNode) error {
	if !s.args.GetRebooted() || !n.Known || !n.DrainedBy(s.args.GetOwner()) {
		return nil
	}
	if n.SlurmdStart.IsZero() || n.SlurmdStart.Unix() == s.args.GetSlurmdStart() || n.Is("NOT_RESPONDING") {
		return fmt.Errorf("node %s is %s, and its slurmd has not registered since the reboot: %w", n.Name, strings.Join(n.States, "+"), tasks.ErrNotSatisfied)
	}
	return nil
}

func (s returnSlurm) Verify(ctx context.Context, h host.Prober) error {
	n, err := h.SlurmNode(ctx, s.ref())
	if err == nil && n.DrainedBy(s.args.GetOwner()) {
		err = fmt.Errorf("node %s is %s, reason %q: %w", n.Name, strings.Join(n.States, "+"), n.Reason, tasks.ErrNotSatisfied)
	}
	return err
}

func (s returnSlurm) Undo(ctx context.Context, h host.Host, _ []byte) error {
	n, err := h.SlurmNode(ctx, s.ref())
	if err != nil {
		return err
	}
	if n.Known && !n.Drained() {
		if err := h.DrainSlurmNode(ctx, s.ref(), s.args.GetOwner(), "is brought back as it was"); err != nil && !errors.Is(err, host.ErrNotOurs) {
			return err
		}
	}
	return slurmQuiet(ctx, h, s.ref())
}
