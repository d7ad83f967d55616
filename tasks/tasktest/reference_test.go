package tasktest_test

import (
	"context"
	"errors"
	"testing"
	"time"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
	"github.com/gpuaas/millwright/tasks/tasktest"
)

// reference is the smallest executor that passes the suite, with a journal in
// memory. It is here to test the suite and the kinds; the agent's own executor
// has its own test. Its faults are what the suite must find.
type reference struct {
	reg     *tasks.Registry
	records map[string]*record
	faults
}

// faults break the reference.
type faults struct {
	observeLate bool // the journal learns of Observe only with Apply
	skipUnsure  bool // a step whose Apply gave an error is not undone
	rerun       bool // a command that was running is started again
}

type record struct {
	plan    *taskv1.Plan
	steps   []stepRecord
	failure error
	done    bool
	outcome tasktest.Outcome
}

type stepRecord struct {
	phase       taskv1.StepPhase
	before, out []byte
	unsure      bool
	earlier     bool // it was applied in an earlier life of the process
}

func (r *reference) save(p *tasktest.Process, id string, rec *record) error {
	if err := p.Point("before journal write"); err != nil {
		return err
	}
	c := *rec
	c.steps = append([]stepRecord(nil), rec.steps...)
	r.records[id] = &c
	return p.Point("after journal write")
}

func (r *reference) Run(ctx context.Context, p *tasktest.Process, t tasktest.Task) (tasktest.Outcome, error) {
	rec := &record{}
	if stored, ok := r.records[t.ID]; ok {
		c := *stored
		c.steps = append([]stepRecord(nil), stored.steps...)
		for i := range c.steps {
			c.steps[i].earlier = c.steps[i].phase == taskv1.StepPhase_STEP_PHASE_APPLIED
		}
		rec = &c
	}
	if rec.done {
		return rec.outcome, nil
	}
	k, err := r.reg.Kind(t.Kind)
	if err != nil {
		return tasktest.Outcome{}, err
	}
	if rec.plan == nil {
		if rec.plan, err = r.reg.Plan(ctx, p.Hosts().Prober(), k, t.Spec); err != nil {
			return r.end(p, t.ID, rec, err, tasktest.Outcome{State: taskv1.TaskState_TASK_STATE_REFUSED, Reason: "PRECONDITION"})
		}
		rec.steps = make([]stepRecord, len(rec.plan.GetSteps()))
		if err := r.save(p, t.ID, rec); err != nil {
			return tasktest.Outcome{}, err
		}
	}
	o := tasktest.Outcome{State: taskv1.TaskState_TASK_STATE_SUCCEEDED, Plan: rec.plan}
	if rec.failure == nil {
		err := r.forward(ctx, p, t, k, rec, &o)
		if errors.Is(err, tasktest.ErrKilled) {
			return o, err
		}
		if errors.Is(err, host.ErrOutcomeUnknown) {
			o.State = taskv1.TaskState_TASK_STATE_HELD
			return r.end(p, t.ID, rec, err, o)
		}
		if err != nil {
			rec.failure = err
			if err := r.save(p, t.ID, rec); err != nil {
				return o, err
			}
		}
	}
	if rec.failure != nil {
		if err := r.backward(ctx, p, t, rec, &o); err != nil {
			if errors.Is(err, tasktest.ErrKilled) {
				return o, err
			}
			o.State = taskv1.TaskState_TASK_STATE_HELD
			return r.end(p, t.ID, rec, err, o)
		}
	}
	return r.end(p, t.ID, rec, rec.failure, o)
}

func (r *reference) end(p *tasktest.Process, id string, rec *record, err error, o tasktest.Outcome) (tasktest.Outcome, error) {
	if errors.Is(err, tasktest.ErrKilled) {
		return o, err
	}
	if err != nil {
		o.Message = err.Error()
	}
	if reason := (*tasks.ReasonError)(nil); errors.As(err, &reason) {
		o.Reason = reason.Reason
	}
	rec.done, rec.outcome = true, o
	return o, r.save(p, id, rec)
}

func (r *reference) forward(ctx context.Context, p *tasktest.Process, t tasktest.Task, k *tasks.Kind, rec *record, o *tasktest.Outcome) error {
	var outs [][]byte
	for i := range rec.steps {
		s, err := r.reg.Open(rec.plan.GetSteps()[i])
		if err != nil {
			return err
		}
		h := p.Hosts().ForStep(t.ID, uint32(i))
		sr := &rec.steps[i]
		if r.rerun && sr.phase == taskv1.StepPhase_STEP_PHASE_OBSERVED {
			h = p.Hosts().ForStep(t.ID+" again", uint32(i))
		}
		for sr.phase < taskv1.StepPhase_STEP_PHASE_VERIFIED {
			switch sr.phase {
			case taskv1.StepPhase_STEP_PHASE_UNSPECIFIED:
				sr.before, err = s.Observe(ctx, h)
			case taskv1.StepPhase_STEP_PHASE_OBSERVED:
				sr.out, err = apply(ctx, s, h)
				sr.unsure = err != nil
			default:
				err = s.Verify(ctx, h)
				if sr.earlier && errors.Is(err, tasks.ErrNotSatisfied) && rec.plan.GetSteps()[i].GetEffect() == taskv1.Effect_EFFECT_IDEMPOTENT {
					sr.phase, sr.earlier = taskv1.StepPhase_STEP_PHASE_OBSERVED, false // a reboot has undone it
					continue
				}
			}
			if reason := (*tasks.ReasonError)(nil); errors.As(err, &reason) && reason.Unchanged {
				sr.phase, sr.unsure = taskv1.StepPhase_STEP_PHASE_UNSPECIFIED, false
			}
			if err != nil {
				return err
			}
			sr.phase++
			if r.observeLate && sr.phase == taskv1.StepPhase_STEP_PHASE_OBSERVED {
				continue
			}
			if err := r.save(p, t.ID, rec); err != nil {
				return err
			}
		}
		outs = append(outs, sr.out)
	}
	if err := k.Verify(ctx, p.Hosts().Prober(), t.Spec); err != nil {
		return &tasks.ReasonError{Reason: "VERIFY_FAILED", Err: err}
	}
	result, err := k.Result(ctx, p.Hosts().Prober(), t.Spec, tasks.OwnOuts(rec.plan, outs))
	o.Result = result
	return err
}

// apply applies a step, and has it look again as long as it may wait.
func apply(ctx context.Context, s tasks.Step, h host.Host) (out []byte, err error) {
	var most time.Duration
	if w, ok := s.(tasks.Waiter); ok {
		most = w.WaitMost()
	}
	for begun := time.Now(); ; {
		out, err = s.Apply(ctx, h)
		if !tasks.IsWait(err) || time.Since(begun) >= most {
			return out, err
		}
		select {
		case <-time.After(time.Second):
		case <-ctx.Done():
			return out, context.Cause(ctx)
		}
	}
}

func (r *reference) backward(ctx context.Context, p *tasktest.Process, t tasktest.Task, rec *record, o *tasktest.Outcome) error {
	o.State, o.Undo = taskv1.TaskState_TASK_STATE_FAILED, taskv1.UndoState_UNDO_STATE_NOT_NEEDED
	for i := len(rec.steps) - 1; i >= 0; i-- {
		sr := &rec.steps[i]
		if sr.phase == taskv1.StepPhase_STEP_PHASE_UNSPECIFIED || r.skipUnsure && sr.unsure {
			continue
		}
		if o.Undo != taskv1.UndoState_UNDO_STATE_NOT_POSSIBLE {
			o.Undo = taskv1.UndoState_UNDO_STATE_COMPLETE
		}
		if sr.phase == taskv1.StepPhase_STEP_PHASE_UNDONE {
			continue
		}
		if sr.phase == taskv1.StepPhase_STEP_PHASE_NOT_UNDOABLE {
			o.Undo = taskv1.UndoState_UNDO_STATE_NOT_POSSIBLE
			continue
		}
		s, err := r.reg.Open(rec.plan.GetSteps()[i])
		if err != nil {
			return err
		}
		sr.phase = taskv1.StepPhase_STEP_PHASE_UNDOING
		if err := r.save(p, t.ID, rec); err != nil {
			return err
		}
		err = s.Undo(ctx, p.Hosts().ForStep(t.ID, uint32(i)), sr.before)
		sr.phase = taskv1.StepPhase_STEP_PHASE_UNDONE
		if errors.Is(err, tasks.ErrIrreversible) {
			sr.phase, err = taskv1.StepPhase_STEP_PHASE_NOT_UNDOABLE, nil
			o.Undo = taskv1.UndoState_UNDO_STATE_NOT_POSSIBLE
		}
		if err != nil {
			return err
		}
		if err := r.save(p, t.ID, rec); err != nil {
			return err
		}
	}
	return nil
}

func newReference(f faults) tasktest.NewRunner {
	return func(_ testing.TB, reg *tasks.Registry) tasktest.Runner {
		return &reference{reg: reg, records: map[string]*record{}, faults: f}
	}
}
