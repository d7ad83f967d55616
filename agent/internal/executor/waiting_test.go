package executor_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/gpuaas/millwright/agent/internal/executor"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
)

// asker is a toggle that waits for others, twenty minutes at most.
type asker struct{ toggle }

func (asker) Gates()                  {}
func (asker) WaitMost() time.Duration { return 20 * time.Minute }

// inTheWay is a call that is told to wait until a time of the clock, for another
// one each minute.
func inTheWay(n *node, until time.Duration) func(context.Context) error {
	return func(context.Context) error {
		if now := n.clock.Boot(); now < until {
			return tasks.Wait(&tasks.ReasonError{Reason: tasks.ReasonSlurmJobs, Err: fmt.Errorf("job %d runs", int(now/time.Minute)%2)})
		}
		return nil
	}
}

// TestStepWaits: a step waits for others, over restarts, no longer than it may,
// until somebody cancels it; who they are is told.
func TestStepWaits(t *testing.T) {
	for _, tc := range []struct {
		name     string
		until    time.Duration // they are gone then
		deadline time.Duration // of the leaf
		cancel   bool
		restarts int
		state    taskv1.TaskState
		undo     taskv1.UndoState
		reason   string
		on       map[string]int
		most     time.Duration // it has ended by then
	}{
		{name: "until they are gone", until: 15 * time.Minute, restarts: 3, state: succeeded, undo: noUndo, on: map[string]int{"a": 1, "b": 1}, most: 16 * time.Minute},
		{name: "in vain", until: time.Hour, restarts: 3, state: failed, undo: complete, reason: "SLURM_JOBS", most: 21 * time.Minute},
		{name: "up to the signed deadline", until: time.Hour, deadline: 5 * time.Minute, state: failed, undo: complete, reason: "SLURM_JOBS", most: 6 * time.Minute},
		{name: "until it is cancelled", until: time.Hour, cancel: true, state: cancelled, undo: complete, reason: "CANCELLED", most: 5 * time.Minute},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newNode(t)
				n.w.on("apply a", inTheWay(n, tc.until))
				begun := time.Now()
				n.accept(1, "switch.on", "wait:a b", func(l *taskv1.TaskLeaf) {
					if tc.deadline > 0 {
						l.Deadline = durationpb.New(tc.deadline)
					}
				})
				for range tc.restarts {
					pass(4 * time.Minute)
					n.restart("boot-0")
				}
				if tc.cancel {
					pass(4 * time.Minute)
					cancelIt(t, n, 1)
				}
				rec := n.ended(1)
				want(t, rec, tc.state, tc.undo, tc.reason)
				if took := time.Since(begun); took > tc.most {
					t.Errorf("it ended after %v, want %v at most", took, tc.most)
				}
				if tc.reason == "SLURM_JOBS" && !strings.Contains(rec.GetMessage(), "runs") {
					t.Errorf("it does not say who was in the way: %q", rec.GetMessage())
				}
				if got := n.steps(1)[0].GetAttempts(); got != 1 {
					t.Errorf("%d attempts, want one that waits", got)
				}
				n.w.want(t, tc.on)
				toldWaits(t, n)
			})
		})
	}
}

// toldWaits asks that the server was told for whom the task waits, and that there
// was room for the rest.
func toldWaits(t *testing.T, n *node) {
	t.Helper()
	waits, all := 0, 0
	for _, ev := range n.events() {
		if w := ev.GetStepWaiting(); w != nil {
			waits++
			if w.GetStep() != 0 || w.GetReason() != "SLURM_JOBS" || !strings.HasSuffix(w.GetMessage(), " runs") {
				t.Errorf("told %v", w)
			}
		}
		all++
	}
	if waits == 0 || all > executor.MaxEvents+2 {
		t.Errorf("%d waits told, %d events in all", waits, all)
	}
}

// TestVerifiedBeforeItIsGivenBack: what is not as the spec wants it is found, and
// undone, while the node is still kept free of others.
func TestVerifiedBeforeItIsGivenBack(t *testing.T) {
	n := newNode(t)
	n.w.on("check a", func(context.Context) error { return fmt.Errorf("it is not: %w", tasks.ErrNotSatisfied) })
	n.accept(1, "switch.on", "@a wait:before b wait:after")
	want(t, n.ended(1), failed, complete, "VERIFY_FAILED")
	if n.w.count("apply after") != 0 || n.w.count("undo b") != 1 || n.w.count("undo before") != 1 {
		t.Errorf("the node was given back first: %v", n.w.calls)
	}
	n.w.want(t, nil)
}

// TestWaitIsNoRetry: an error that is not marked is final.
func TestWaitIsNoRetry(t *testing.T) {
	n := newNode(t)
	n.w.on("apply a", func(context.Context) error { return errors.New("broken") })
	n.accept(1, "switch.on", "wait:a b")
	want(t, n.ended(1), failed, complete, "STEP_FAILED")
	if got := n.w.count("apply a"); got != 1 {
		t.Errorf("applied %d times", got)
	}
}

// manager is a workload manager of a node that has the switch "member", with a
// job for each turn of the switch "jobs".
type manager struct{ w *world }

func (m manager) Ask(context.Context, host.Reader, string, tasks.Disturbance) (*tasks.Gate, error) {
	if m.w.get("member") == 0 {
		return nil, nil
	}
	g := &tasks.Gate{Before: m.w.step("wait:ask"), After: m.w.step("wait:return"), InTheWay: &taskv1.InTheWay{Manager: "manager"}}
	for range m.w.get("jobs") {
		g.InTheWay.Work = append(g.InTheWay.Work, &taskv1.RunningWork{Id: "7"})
	}
	return g, nil
}

// TestRestoreWaitsForNobody: a restore that would disturb jobs is not begun, and
// comes back when they are gone.
func TestRestoreWaitsForNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.accept(1, "switch.keep", "@k a")
		want(t, n.ended(1), succeeded, noUndo, "")
		n.w.put("member", 1)
		n.w.put("jobs", 1)
		n.w.put("a", 0)
		pass(20 * time.Minute)
		if n.w.get("a") != 0 || n.w.count("apply ask") != 0 {
			t.Errorf("a job was in the way, and the restore went on: %v", n.w.calls)
		}
		n.w.put("jobs", 0)
		pass(2 * time.Hour)
		n.w.want(t, map[string]int{"a": 1, "member": 1, "ask": 1, "return": 1})
	})
}

// TestRebootAsksNobodyAgain: after a reboot that others gave way to, the manager
// that does not answer yet is waited for by the step that gives the node back,
// and is not asked again whether it may be rebooted.
func TestRebootAsksNobodyAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		applied := make(chan struct{}, 1)
		n.w.onAfter("apply r", func(ctx context.Context) error {
			applied <- struct{}{}
			<-ctx.Done()
			return ctx.Err()
		})
		n.accept(1, "switch.press", "@node wait:before reboot:r wait:after")
		<-applied
		n.halt()
		n.w.onAfter("apply r", nil)
		silent := func(context.Context) error { return fmt.Errorf("no answer: %w", host.ErrSlurm) }
		n.w.on("verify before", silent)
		n.w.on("undo before", silent)
		n.w.on("apply after", inTheWay(n, n.clock.Boot()+5*time.Minute))
		n.boot = "boot-2"
		n.open()
		n.start()
		want(t, n.ended(1), succeeded, noUndo, "")
		n.w.want(t, map[string]int{"before": 1, "r": 1, "after": 1})
	})
}

// TestRestoreDoesLess: what only the signer's own task is to do is not done again
// by a restore.
func TestRestoreDoesLess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.accept(1, "switch.keep", "@k a only:b")
		want(t, n.ended(1), succeeded, noUndo, "")
		n.w.want(t, map[string]int{"a": 1, "b": 1})
		n.w.put("a", 0)
		n.w.put("b", 0)
		pass(2 * time.Hour)
		n.w.want(t, map[string]int{"a": 1})
	})
}
