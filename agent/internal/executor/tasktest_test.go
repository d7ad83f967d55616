package executor_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/gpuaas/millwright/agent/internal/executor"
	"github.com/gpuaas/millwright/agent/internal/state"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/all"
	"github.com/gpuaas/millwright/tasks/tasktest"
	"google.golang.org/protobuf/proto"
)

// TestKinds puts all kinds to the suite with the real executor on its real
// journal: a crash before and after each journal write and host change, and a
// failure of each host call.
func TestKinds(t *testing.T) {
	for _, dir := range []string{"container", "gpu", "mig", "secret", "slurm", "storage", "system"} {
		t.Run(dir, func(t *testing.T) {
			cases, err := tasktest.Load(all.Registry(), "../../../tasks/"+dir+"/testdata")
			if err != nil {
				t.Fatal(err)
			}
			var some []tasktest.Case
			for i := 0; i < len(cases); i += eachCase {
				some = append(some, cases[i])
			}
			if len(some) == 0 {
				t.Fatal("no cases")
			}
			if eachCase > 1 {
				tasktest.Sample(t, newRunner, all.Registry(), some)
				return
			}
			tasktest.Run(t, newRunner, all.Registry(), some)
		})
	}
}

// runner is the executor as the suite runs it.
type runner struct {
	store *state.Store
	reg   *tasks.Registry
	clock *testClock
}

func newRunner(t testing.TB, reg *tasks.Registry) tasktest.Runner {
	clock := newClock()
	return &runner{store: openStore(t, memoryDir(t), "boot-0", clock), reg: reg, clock: clock}
}

// Run implements tasktest.Runner.
func (r *runner) Run(ctx context.Context, p *tasktest.Process, t tasktest.Task) (tasktest.Outcome, error) {
	boot, err := p.Hosts().Prober().BootID(ctx)
	if err != nil && ctx.Err() == nil {
		boot, err = p.Hosts().Prober().BootID(ctx) // the agent would not start, and be started again
	}
	if err != nil {
		return tasktest.Outcome{}, err
	}
	// What a boot leaves to do for intents is tested elsewhere; here it would
	// come in between.
	if err := r.store.Update(func(tx *state.Tx) error { tx.PutBootID(boot); return nil }); err != nil {
		return tasktest.Outcome{}, err
	}
	e := executor.New(executor.Config{
		Journal: killable{r.store, p.Point}, Gate: openGate{r.reg}, Hosts: p.Hosts(), Registry: r.reg,
		Clock: r.clock, Logger: discard(), BootID: boot, Room: anyRoom, Reboots: executor.RebootBudget{Most: 3, Within: 24 * time.Hour},
	})
	a := assignment(t.ID, t.Kind, t.Spec)
	known := r.store.View(func(tx *state.Tx) error { _, err := tx.Task(t.ID); return err }) == nil
	if !known {
		if answer := e.Deliver(ctx, a); answer.GetAccepted() == nil {
			if ctx.Err() != nil {
				return tasktest.Outcome{}, context.Cause(ctx)
			}
			return tasktest.Outcome{}, fmt.Errorf("not accepted: %v", answer)
		}
	}
	done := runExecutor(ctx, e)
	err = waitEnded(ctx, r.store, t.ID)
	done()
	if err == nil && ctx.Err() != nil {
		err = context.Cause(ctx) // it died after it had written the end
	}
	if err == nil {
		err = r.store.Check()
	}
	if err != nil {
		return tasktest.Outcome{}, err
	}
	return r.outcome(t.ID)
}

func (r *runner) outcome(id string) (out tasktest.Outcome, err error) {
	err = r.store.View(func(tx *state.Tx) error {
		rec, err := tx.Task(id)
		if err != nil {
			return err
		}
		out = tasktest.Outcome{
			State: rec.GetState(), Undo: rec.GetUndo(), Reason: rec.GetReason(), Message: rec.GetMessage(), Result: rec.GetResult(),
		}
		if out.State == taskv1.TaskState_TASK_STATE_REFUSED {
			out.Undo = 0 // the suite asks it only of tasks that began
		}
		if out.Reason == "STEP_FAILED" {
			out.Reason = "" // the cases name only the reasons that steps give
		}
		if len(rec.GetPlanDigest()) == 0 {
			return nil
		}
		out.Plan = new(taskv1.Plan)
		if err := proto.Unmarshal(rec.GetPlan(), out.Plan); err != nil {
			return err
		}
		for i := range out.Plan.GetSteps() {
			sr, err := tx.Step(id, uint32(i))
			if err != nil {
				return err
			}
			out.Steps = append(out.Steps, outcomeOf(sr))
		}
		return nil
	})
	return out, err
}

func outcomeOf(sr *agentv1.StepRecord) *taskv1.StepOutcome {
	return &taskv1.StepOutcome{
		Phase: sr.GetPhase(), Attempts: sr.GetAttempts(), StartTime: sr.GetStartTime(), EndTime: sr.GetEndTime(),
		Error: sr.GetError(), Command: sr.GetCommand(),
	}
}

// killable is a journal that a process loses when it is killed.
type killable struct {
	*state.Store
	point func(name string) error
}

// Update passes a point before and after the write.
func (k killable) Update(fn func(*state.Tx) error) error {
	if err := k.point("before a journal write"); err != nil {
		return err
	}
	if err := k.Store.Update(fn); err != nil {
		return err
	}
	return k.point("after a journal write")
}
