package executor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/gpuaas/millwright/agent/internal/crash"
	"github.com/gpuaas/millwright/agent/internal/state"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
)

// resumeAll takes up the tasks that have not ended. Those that had their locks
// get them back before any other is asked: they held them together, so they
// cannot conflict.
func (e *Executor) resumeAll(ctx context.Context) error {
	var open []*task
	err := e.cfg.Journal.View(func(tx *state.Tx) error {
		return tx.Open(func(id string, _ taskv1.TaskState) error {
			open = append(open, e.newTask(id))
			return nil
		})
	})
	if err != nil {
		return fmt.Errorf("read unfinished tasks: %w", err)
	}
	// One that cannot be read is left as it is, and does not keep the others.
	open = slices.DeleteFunc(open, func(t *task) bool {
		err := t.load()
		if err != nil {
			e.log.ErrorContext(ctx, "unfinished task cannot be read", "task_id", t.id, "err", err)
		}
		return err != nil
	})
	slices.SortFunc(open, func(a, b *task) int {
		return cmp.Or(cmp.Compare(waits(a.rec), waits(b.rec)), cmp.Compare(a.rec.GetAcceptSeq(), b.rec.GetAcceptSeq()))
	})
	for _, t := range open {
		if waits(t.rec) == 0 {
			t.relock(ctx)
		}
		if t.rec.GetState() == taskv1.TaskState_TASK_STATE_HELD {
			e.locks.stick(t.grant)
		}
		if t.rec.GetState() != taskv1.TaskState_TASK_STATE_HELD {
			e.launch(t)
		}
	}
	return nil
}

// waits is 1 for a task that has no locks yet.
func waits(rec *agentv1.TaskRecord) int {
	if len(rec.GetPlanDigest()) == 0 {
		return 1
	}
	return 0
}

func (t *task) relock(ctx context.Context) {
	if err := t.open(); err != nil {
		t.log.ErrorContext(ctx, "locks of a task are not known", "err", err)
		return
	}
	t.askLocks()
}

// carryOn brings the task from what is durable to its end. A nil error says
// that it has ended or is held; otherwise it can be called again.
func (t *task) carryOn(ctx context.Context) error {
	err := t.load()
	switch {
	case errors.Is(err, state.ErrNotFound) && t.rec != nil && t.quiet():
		t.releaseLocks() // its end is durable, whatever was said of it
		return nil
	case err != nil:
		return err
	case state.Terminal(t.rec.GetState()):
		t.releaseLocks()
		return nil
	case t.rec.GetState() == taskv1.TaskState_TASK_STATE_HELD:
		return nil
	case waits(t.rec) == 1:
		if ready, err := t.begin(ctx); err != nil || !ready {
			return err
		}
		t.resumed = true
	}
	if err := t.open(); err != nil {
		return t.hold(ctx, reasonOutcomeUnknown, fmt.Sprintf(
			"this agent cannot carry on with it: %v; install an agent that knows it, or settle the task by hand", err), -1, nil)
	}
	if err := t.takeUp(ctx); err != nil {
		return err
	}
	if why := t.loops(); why != "" {
		return t.hold(ctx, reasonRebootLoop, why, -1, nil)
	}
	if t.rec.GetUndoing() {
		return t.backward(ctx)
	}
	return t.forward(ctx)
}

// takeUp notes once in each life of the agent that the task goes on.
func (t *task) takeUp(ctx context.Context) error {
	if t.resumed {
		return nil
	}
	rebooted := t.rec.GetBootId() != t.e.cfg.BootID
	at, found := t.position()
	err := t.commit(func(tx *state.Tx, rec *agentv1.TaskRecord) error {
		if rebooted {
			rec.BootId = t.e.cfg.BootID
			rec.Boots++
			rec.StartBootTime = durationpb.New(t.e.cfg.Clock.Boot() - t.wallSpent(rec))
		}
		return t.emitOptional(tx, rec, &taskv1.Event{Payload: &taskv1.Event_Resumed{Resumed: &taskv1.TaskResumed{
			TaskId: t.id, Step: uint32(at), Found: found, Rebooted: rebooted,
		}}})
	})
	if err != nil {
		return err
	}
	crash.Point("executor.resume")
	t.resumed = true
	t.log.InfoContext(ctx, "task goes on", "step", at, "found", found, "rebooted", rebooted)
	return nil
}

// wallSpent is how long the task has run by the wall clock. A clock that was
// set cannot make it negative.
func (t *task) wallSpent(rec *agentv1.TaskRecord) time.Duration {
	return max(0, t.e.cfg.Clock.Now().Sub(rec.GetStartTime().AsTime()))
}

// position says at which step the task goes on, and what the journal knows of
// it.
func (t *task) position() (int, string) {
	if t.rec.GetUndoing() {
		return t.undoPosition()
	}
	for i, sr := range t.steps {
		switch sr.GetPhase() {
		case taskv1.StepPhase_STEP_PHASE_UNSPECIFIED:
			return i, "step not begun"
		case taskv1.StepPhase_STEP_PHASE_OBSERVED:
			return i, "step begun, its outcome not recorded"
		case taskv1.StepPhase_STEP_PHASE_APPLIED:
			return i, "step applied, not verified"
		default: // it has its outcome
		}
	}
	return len(t.steps), "all steps verified"
}

// undoPosition is position of a task that undoes its steps, the last first.
func (t *task) undoPosition() (int, string) {
	for i, sr := range slices.Backward(t.steps) {
		switch {
		case sr.GetPhase() == taskv1.StepPhase_STEP_PHASE_UNDOING:
			return i, "step being undone"
		case undoable(sr.GetPhase()):
			return i, "step to be undone"
		}
	}
	return 0, "no step left to undo"
}

// rebooted brings a step that was reached in an earlier boot to what still
// holds: what a reboot has undone is applied again.
func (t *task) rebooted(ctx context.Context, i int, step tasks.Step) error {
	sr, planned := t.steps[i], t.plan.GetSteps()[i]
	phase := sr.GetPhase()
	done := phase == taskv1.StepPhase_STEP_PHASE_APPLIED || phase == taskv1.StepPhase_STEP_PHASE_VERIFIED
	again := planned.GetEffect() == taskv1.Effect_EFFECT_IDEMPOTENT || planned.GetEffect() == taskv1.Effect_EFFECT_CHECK_THEN_ACT
	if !done || !again || sr.GetBootId() == t.e.cfg.BootID || t.gaveWay(i) {
		return nil
	}
	limited, unlimit := t.reading(ctx)
	defer unlimit()
	err := t.verifies(limited, step)
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case errors.Is(err, tasks.ErrNotSatisfied):
		t.log.InfoContext(ctx, "a reboot has undone a step", "step", i, "err", err)
		sr.Phase = taskv1.StepPhase_STEP_PHASE_OBSERVED
	case err != nil:
		return t.readError(ctx, limited, i, err)
	default:
		sr.Phase = taskv1.StepPhase_STEP_PHASE_VERIFIED
	}
	sr.BootId = t.e.cfg.BootID
	return t.putStep(i)
}

// gaveWay reports whether a step asked others to give way to a reboot of the
// plan, which has begun. No job outlives that and what keeps new ones away is
// not on this node, so nobody is asked again: right after a boot there may be no
// answer yet, and the step that gives the node back waits for one.
func (t *task) gaveWay(i int) bool {
	steps := t.plan.GetSteps()
	for j := i + 1; j < len(steps) && steps[i].GetGate(); j++ {
		if steps[j].GetEffect() == taskv1.Effect_EFFECT_REBOOT && undoable(t.steps[j].GetPhase()) {
			return true
		}
	}
	return false
}
