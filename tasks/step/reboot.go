package step

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
)

// rebootTimeout is how long a node may take to go down and come up.
const rebootTimeout = 10 * time.Minute

type reboot struct{ args *taskv1.RebootStep }

var (
	_ tasks.Limiter = reboot{}
	_ tasks.Delayer = reboot{}
	_ tasks.Prover  = reboot{}
)

// Reboot returns the step that ends the boot that its arguments name. Its Apply
// asks for the reboot and waits until it is cut off by it. What another boot id
// shows is done, whoever did it.
func Reboot(args *taskv1.RebootStep) tasks.Step { return reboot{args} }

func (s reboot) Args() proto.Message { return s.args }

func (s reboot) Title() string { return "reboot the node" }

// Timeout implements [tasks.Limiter].
func (s reboot) Timeout() time.Duration {
	if d := s.args.GetTimeout().AsDuration(); d > 0 {
		return d
	}
	return rebootTimeout
}

// Delay implements [tasks.Delayer].
func (s reboot) Delay() time.Duration { return s.args.GetDelay().AsDuration() }

// Observe returns nothing: a reboot cannot be undone.
func (s reboot) Observe(context.Context, host.Reader) ([]byte, error) { return nil, nil }

func (s reboot) Apply(ctx context.Context, h host.Host) ([]byte, error) {
	boot, err := h.BootID(ctx)
	if err != nil {
		return nil, s.unchanged(fmt.Errorf("read boot id: %w", err))
	}
	if boot != s.args.GetBootId() {
		return s.Proof(ctx, h)
	}
	if err := h.Reboot(ctx, s.args.GetReason()); err != nil {
		return nil, s.unchanged(err)
	}
	<-ctx.Done()
	return nil, fmt.Errorf("%w: the reboot was asked for, and the node is still up in boot %s: %w", host.ErrOutcomeUnknown, boot, context.Cause(ctx))
}

// unchanged is a reboot that will not come.
func (s reboot) unchanged(err error) error {
	return &tasks.ReasonError{Reason: tasks.ReasonRebootRefused, Unchanged: true, Err: err}
}

func (s reboot) Verify(ctx context.Context, h host.Prober) error {
	boot, err := h.BootID(ctx)
	if err != nil {
		return fmt.Errorf("read boot id: %w", err)
	}
	if boot == s.args.GetBootId() {
		return fmt.Errorf("the node is still in boot %s: %w", boot, tasks.ErrNotSatisfied)
	}
	return nil
}

// Proof implements [tasks.Prover].
func (s reboot) Proof(ctx context.Context, h host.Prober) ([]byte, error) {
	boot, err := h.BootID(ctx)
	if err != nil {
		return nil, fmt.Errorf("read boot id: %w", err)
	}
	return encode(&taskv1.RebootOutcome{BootIdBefore: s.args.GetBootId(), BootIdAfter: boot})
}

// Undo returns [tasks.ErrIrreversible].
func (s reboot) Undo(context.Context, host.Host, []byte) error {
	return fmt.Errorf("reboot: %w", tasks.ErrIrreversible)
}
