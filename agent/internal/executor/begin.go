package executor

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/gpuaas/millwright/agent/internal/crash"
	"github.com/gpuaas/millwright/agent/internal/gate"
	"github.com/gpuaas/millwright/agent/internal/state"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
)

// The codes of tasks that end before a step began.
const (
	reasonCancelled    = "CANCELLED"
	reasonPrecondition = "PRECONDITION"
	reasonPlanFailed   = "PLAN_FAILED"
	reasonPlanDrifted  = "PLAN_DRIFTED"
	reasonLocked       = "LOCKED"
)

// lookAgain bounds a wait, since the wall clock may be set and the policy
// changed meanwhile.
const lookAgain = 30 * time.Second

// planFor is how long a plan is tried while the node cannot be read.
const planFor = 2 * time.Minute

// prepare asks for the locks of a task that may start. It is called in the
// order in which the tasks were accepted, so that locks are given in that order
// too. What it cannot do now, begin does.
func (t *task) prepare(ctx context.Context) {
	if t.grant != nil {
		return
	}
	if err := t.load(); err != nil || t.rec.GetState() != taskv1.TaskState_TASK_STATE_ACCEPTED && t.rec.GetState() != taskv1.TaskState_TASK_STATE_WAITING {
		return
	}
	if err := t.mayStart(ctx); err == nil && !t.resolves() {
		t.askLocks()
	}
}

func (t *task) mayStart(ctx context.Context) error {
	adm, err := t.e.cfg.Gate.Start(ctx, t.rec.GetEnvelope(), t.rec.GetSignedLeaf())
	if err != nil {
		return err
	}
	t.admit(adm)
	return nil
}

func (t *task) askLocks() {
	locks := t.kind.Locks(t.spec)
	if t.planOnly() {
		locks = shared(locks)
	}
	t.grant = t.e.locks.request(t.id, locks, t.kind.PassesHeld)
}

func (t *task) releaseLocks() {
	t.e.locks.release(t.grant)
	t.grant = nil
}

// begin brings an accepted task to its plan. It returns true when the plan is
// durable, and false when the task has ended.
func (t *task) begin(ctx context.Context) (bool, error) {
	stoppable, done := t.cancel.bind(ctx)
	defer done()
	for {
		if t.cancel.isOn() {
			return false, t.finish(ctx, end{state: cancelled, reason: reasonCancelled})
		}
		if done, ready, err := t.tryBegin(ctx, stoppable); done || err != nil {
			return ready, err
		}
		if ctx.Err() != nil {
			return false, ctx.Err()
		}
	}
}

// tryBegin asks the gate and then does the next thing that can be done. It
// returns done when the task has ended, or is ready by its plan.
func (t *task) tryBegin(ctx, stoppable context.Context) (done, ready bool, err error) {
	err = t.mayStart(ctx)
	var refusal *gate.Refusal
	wait := deferral(err)
	switch {
	case errors.As(err, &refusal):
		return true, false, t.refuse(ctx, refusal)
	case wait != nil:
		t.releaseLocks()
		return false, false, t.waitFor(stoppable, wait.Reason, wait.Message, nil, wait.RetryAfter)
	case err != nil:
		return false, false, err
	case t.resolves():
		return true, false, t.resolve(ctx)
	}
	held, err := t.haveLocks(stoppable)
	if err != nil || !held {
		return false, false, err
	}
	ready, err = t.makePlan(ctx, stoppable)
	return true, ready, err
}

func deferral(err error) *gate.Deferral {
	var d *gate.Deferral
	errors.As(err, &d)
	return d
}

// refuse ends a task that the gate refuses.
func (t *task) refuse(ctx context.Context, r *gate.Refusal) error {
	to := refused
	if r.Reason == gate.ReasonWindowPassed {
		to = expired
	}
	return t.finish(ctx, end{state: to, reason: r.Reason, message: r.Message})
}

// haveLocks asks for the locks and waits for them for a while.
func (t *task) haveLocks(ctx context.Context) (bool, error) {
	if t.grant == nil {
		t.askLocks()
	}
	select {
	case <-t.grant.given:
		return true, nil
	default:
	}
	why, moved := t.e.locks.behind(t.grant)
	if why == "" {
		return false, nil // it has them by now
	}
	return false, t.waitFor(ctx, reasonLocked, why, moved, lookAgain)
}

// waitFor says in the journal why the task waits, when that is another reason or
// message than before, and waits until early is closed, ctx ends or the time is
// over, whichever comes first. The last event that there is room for is kept for
// another reason: who else is ahead is then only told on the node.
func (t *task) waitFor(ctx context.Context, reason, message string, early <-chan struct{}, d time.Duration) error {
	same := t.rec.GetState() == taskv1.TaskState_TASK_STATE_WAITING && t.rec.GetReason() == reason
	if !same || t.rec.GetMessage() != message {
		err := t.commit(func(tx *state.Tx, rec *agentv1.TaskRecord) error {
			rec.State, rec.Reason, rec.Message = taskv1.TaskState_TASK_STATE_WAITING, reason, message
			if !same {
				rec.WaitTime = t.e.now()
			} else if rec.GetEvents() >= maxBeforePlan-1 {
				return nil
			}
			return t.emitOptional(tx, rec, &taskv1.Event{Payload: &taskv1.Event_Waiting{
				Waiting: &taskv1.TaskWaiting{TaskId: t.id, Reason: reason, Message: message},
			}})
		})
		if err != nil {
			return err
		}
		crash.Point("executor.waiting.committed")
		t.log.InfoContext(ctx, "task waits", "reason", reason, "why", message)
	}
	timer := time.NewTimer(min(d, lookAgain) + t.apart())
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	case <-early:
	}
	return nil
}

// apart is less than a millisecond, and another time for each task: those that
// wait for the same thing do not look again at the same moment.
func (t *task) apart() time.Duration {
	h := fnv.New32a()
	_, _ = h.Write([]byte(t.id)) // never fails
	return time.Duration(h.Sum32()%1_000_000) * time.Nanosecond
}

// makePlan plans while the locks are held, and freezes the plan.
func (t *task) makePlan(ctx, stoppable context.Context) (bool, error) {
	plan, err := t.planned(stoppable)
	switch {
	case ctx.Err() != nil:
		return false, ctx.Err()
	case t.cancel.isOn():
		return false, t.finish(ctx, end{state: cancelled, reason: reasonCancelled})
	case errors.Is(err, tasks.ErrPrecondition):
		return false, t.finish(ctx, end{state: refused, reason: reasonPrecondition, message: err.Error()})
	case err != nil:
		return false, t.finish(ctx, end{state: refused, reason: reasonPlanFailed, message: "no plan could be made: " + err.Error()})
	}
	encoded, digest, err := tasks.MarshalPlan(plan)
	if err != nil {
		return false, t.finish(ctx, end{state: refused, reason: reasonPlanFailed, message: err.Error()})
	}
	if t.planOnly() {
		result, err := anypb.New(plan)
		if err != nil {
			return false, fmt.Errorf("pack plan of task %s: %w", t.id, err)
		}
		return false, t.finish(ctx, end{state: succeeded, result: result, digest: digest})
	}
	if refusal := t.checkPlan(plan, digest); refusal != nil {
		return false, t.finish(ctx, end{state: refused, reason: refusal.Reason, message: refusal.Message})
	}
	refusal, err := t.rebootBudget(plan)
	if err != nil {
		return false, err
	}
	if refusal != nil {
		return false, t.finish(ctx, end{state: refused, reason: refusal.Reason, message: refusal.Message})
	}
	crash.Point("executor.plan.made")
	if err := t.freeze(plan, encoded, digest); err != nil {
		return false, err
	}
	crash.Point("executor.plan.committed")
	return true, t.load()
}

func (t *task) planned(ctx context.Context) (*taskv1.Plan, error) {
	ctx, done := context.WithTimeout(ctx, planFor)
	defer done()
	return retry(ctx, t, 1<<20, func() (*taskv1.Plan, error) {
		return t.e.cfg.Registry.Plan(ctx, t.e.cfg.Hosts.Prober(), t.kind, t.spec)
	})
}

// checkPlan refuses a plan that is not the one approved, or that disturbs more
// than the signer allowed.
func (t *task) checkPlan(plan *taskv1.Plan, digest []byte) *gate.Refusal {
	if want := t.leaf.GetPlanDigest(); len(want) > 0 && !sameHash(want, digest) && !t.quiet() {
		return &gate.Refusal{Reason: reasonPlanDrifted, Message: fmt.Sprintf(
			"the node has changed since the plan was approved: plan %x was approved, and it would be %x now; plan again and approve that", want, digest)}
	}
	for _, impact := range plan.GetImpact() {
		if !slices.Contains(t.leaf.GetAllowedImpact(), impact) {
			return &gate.Refusal{Reason: gate.ReasonImpactNotAllowed, Message: fmt.Sprintf(
				"the plan causes %s, which the signer did not allow; sign it again with that impact allowed", impact)}
		}
	}
	return nil
}

// freeze makes the plan durable. From here on the task is carried on by it,
// whatever happens.
func (t *task) freeze(plan *taskv1.Plan, encoded, digest []byte) error {
	return t.commit(func(tx *state.Tx, rec *agentv1.TaskRecord) error {
		rec.State, rec.Reason, rec.Message = taskv1.TaskState_TASK_STATE_RUNNING, "", ""
		rec.Plan, rec.PlanDigest = encoded, digest
		rec.BootId, rec.StartTime = t.e.cfg.BootID, t.e.now()
		rec.StartBootTime = durationpb.New(t.e.cfg.Clock.Boot())
		if err := t.restIntent(tx); err != nil {
			return err
		}
		err := t.emit(tx, rec, &taskv1.Event{Payload: &taskv1.Event_Planned{Planned: &taskv1.TaskPlanned{
			TaskId: t.id, Plan: proto.CloneOf(plan), PlanDigest: digest,
		}}})
		if err != nil || len(plan.GetSteps()) == 0 {
			return err
		}
		return t.emit(tx, rec, &taskv1.Event{Payload: &taskv1.Event_Started{Started: &taskv1.TaskStarted{TaskId: t.id}}})
	})
}

func cancelMessage(rec *agentv1.TaskRecord) string {
	if why := rec.GetCancelReason(); why != "" {
		return why
	}
	return "someone asked to cancel it"
}
