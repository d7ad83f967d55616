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

	"github.com/gpuaas/millwright/agent/internal/gate"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
)

// pass lets time pass in a bubble.
func pass(d time.Duration) { <-time.NewTimer(d).C }

func passes(context.Context) error { return tasks.Transient(errors.New("the server is away")) }

// TestRetries are capped, whatever restarts and reboots come in between; only an
// error that may pass brings one, and never of a command.
func TestRetries(t *testing.T) {
	for _, tc := range []struct {
		name, spec string
		err        func(context.Context) error
		between    string // the boot in which the agent starts again, during the first back-off
		want       int
	}{
		{"idempotent", "retry:a", passes, "", 3},
		{"agent restarts in back-off", "retry:a", passes, "boot-1", 3},
		{"node reboots in back-off", "retry:a", passes, "boot-2", 3},
		{"final error", "retry:a", fail, "", 1},
		{"a step that says nothing", "a", passes, "", 1},
		{"a command", "once:a", passes, "", 1},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newNode(t)
				n.w.on("apply a", tc.err)
				begun := time.Now()
				n.accept(1, "switch.on", "@l "+tc.spec)
				if tc.between != "" {
					pass(time.Second) // of a back-off of 10 s
					n.restart(tc.between)
				}
				rec := n.ended(1)
				if rec.GetState() != failed || n.w.count("apply a") != tc.want || n.steps(1)[0].GetAttempts() != uint32(tc.want) {
					t.Errorf("ended %v after %d attempts, %d in the journal, want failed after %d: %s",
						rec.GetState(), n.w.count("apply a"), n.steps(1)[0].GetAttempts(), tc.want, rec.GetMessage())
				}
				// 10 s and 20 s: a restart does not begin the wait anew, a reboot
				// makes it no longer than it was.
				if took := time.Since(begun); tc.want == 3 && (took < 29*time.Second || took > 33*time.Second) {
					t.Errorf("it took %v, want the two waits of 30 s together", took)
				}
				if rec.GetEvents() > 12 {
					t.Errorf("%d events", rec.GetEvents())
				}
			})
		})
	}
}

// TestRetrySucceeds says in the journal how often it was tried.
func TestRetrySucceeds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.w.on("apply a", passes)
		n.accept(1, "switch.on", "@l retry:a")
		pass(time.Second)
		n.w.on("apply a", nil)
		want(t, n.ended(1), succeeded, noUndo, "")
		if s := n.steps(1)[0]; s.GetAttempts() != 2 || s.GetFailures() != 1 || s.GetError() != "" {
			t.Errorf("step = %v", s)
		}
	})
}

// TestCancelInBackOff ends the wait at once, also of a wait that an agent took
// up again, and undoes.
func TestCancelInBackOff(t *testing.T) {
	for _, restart := range []bool{false, true} {
		t.Run(fmt.Sprint(restart), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newNode(t)
				n.w.on("apply a", passes)
				n.accept(1, "switch.on", "@l z retry:a")
				pass(time.Second)
				begun := time.Now()
				if err := n.e.Cancel(t.Context(), &agentv1.CancelRequest{TaskId: taskID(1), LeafHash: n.record(1).GetLeafHash(), RequestedBy: "bob"}); err != nil {
					t.Fatal(err)
				}
				if restart {
					n.restart("boot-1")
				}
				rec := n.ended(1)
				want(t, rec, cancelled, complete, "CANCELLED")
				if took := time.Since(begun); took > time.Second || n.w.count("apply a") != 1 || !strings.Contains(rec.GetMessage(), "bob") {
					t.Errorf("it took %v, %d attempts, %q", took, n.w.count("apply a"), rec.GetMessage())
				}
				n.w.want(t, map[string]int{})
			})
		})
	}
}

// TestHungCalls ignore their context. None may keep the task for ever.
func TestHungCalls(t *testing.T) {
	for _, tc := range []struct {
		call   string
		state  taskv1.TaskState
		undo   taskv1.UndoState
		reason string
	}{
		{"plan @l", refused, notNeeded, "PLAN_FAILED"},
		{"observe b", failed, complete, "STEP_TIMEOUT"},
		{"apply b", held, noUndo, "HOST_HANGS"},
		{"verify b", failed, complete, "STEP_TIMEOUT"},
		{"check @l", failed, complete, "VERIFY_FAILED"},
		{"undo a", held, noUndo, "UNDO_FAILED"},
	} {
		t.Run(tc.call, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newNode(t)
				release := make(chan struct{})
				defer close(release)
				call := strings.Replace(tc.call, "@l", "l", 1)
				n.w.on(call, func(context.Context) error { <-release; return errors.New("too late") })
				if call == "undo a" {
					n.w.on("apply b", fail)
				}
				n.accept(1, "switch.on", "@l a b")
				want(t, n.ended(1), tc.state, tc.undo, tc.reason)
				if tc.state != held {
					return
				}
				// Its lock is kept, and nothing is undone while it may still act.
				n.accept(2, "switch.on", "@l c")
				n.until(func(ev *taskv1.Event) bool { return ev.GetWaiting().GetTaskId() == taskID(2) })
				_, err := n.e.Resolve(t.Context(), &agentv1.ResolveTaskRequest{TaskId: taskID(1), As: taskv1.ResolveAs_RESOLVE_AS_UNDO, Reason: "x"})
				var r *gate.Refusal
				if !errors.As(err, &r) || !strings.Contains(r.Message, "hangs") {
					t.Errorf("undo while the call hangs = %v", err)
				}
			})
		})
	}
}

// TestDeadlineGoesOn goes on over a restart and a reboot in the middle of a step.
func TestDeadlineGoesOn(t *testing.T) {
	for _, boot := range []string{"boot-1", "boot-2"} {
		t.Run(boot, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newNode(t)
				n.w.on("apply a", func(ctx context.Context) error { <-ctx.Done(); return context.Cause(ctx) })
				n.accept(1, "switch.on", "@l z a", func(l *taskv1.TaskLeaf) { l.Deadline = durationpb.New(time.Minute) })
				begun := time.Now()
				pass(40 * time.Second)
				n.restart(boot)
				want(t, n.ended(1), failed, complete, "DEADLINE_EXCEEDED")
				if took := time.Since(begun); took > 62*time.Second || took < 59*time.Second {
					t.Errorf("it ended after %v, want a minute", took)
				}
			})
		})
	}
}

// TestUndoHeld undoes what can be undone by a person's word, over a crash in the
// middle, and says what was not.
func TestUndoHeld(t *testing.T) {
	for _, restart := range []bool{false, true} {
		t.Run(fmt.Sprint(restart), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newNode(t)
				n.w.on("apply p", func(context.Context) error { return fmt.Errorf("no record: %w", host.ErrOutcomeUnknown) })
				n.accept(1, "switch.on", "@l a once:p")
				want(t, n.ended(1), held, noUndo, "OUTCOME_UNKNOWN")
				n.accept(2, "switch.on", "@l c")
				if restart {
					n.w.on("undo a", func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() })
				}
				n.resolve(10, 1, taskv1.ResolveAs_RESOLVE_AS_UNDO, n.record(1).GetLeafHash())
				want(t, n.ended(10), succeeded, noUndo, "")
				if restart {
					synctest.Wait()
					n.halt()
					n.w.on("undo a", nil)
					n.open()
					n.start()
				}
				n.until(func(ev *taskv1.Event) bool { return ev.GetFinished().GetTaskId() == taskID(1) })
				rec := n.record(1)
				want(t, rec, failed, notPossible, "OUTCOME_UNKNOWN")
				for _, s := range []string{"alice", "undone: step 0 (turn on a)", "not undone: step 1 (turn on p)", "not known"} {
					if !strings.Contains(rec.GetMessage(), s) {
						t.Errorf("message = %q, want %q", rec.GetMessage(), s)
					}
				}
				want(t, n.ended(2), succeeded, noUndo, "") // the lock is free
				n.w.want(t, map[string]int{"c": 1})
			})
		})
	}
}

// TestUndoHeldAgain can fail over and over within the events of one task.
func TestUndoHeldAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.w.on("apply b", fail)
		n.w.on("undo a", fail)
		n.accept(1, "switch.on", "@l a b")
		want(t, n.ended(1), held, noUndo, "UNDO_FAILED")
		undo := func() {
			if s, err := n.e.Resolve(t.Context(), &agentv1.ResolveTaskRequest{TaskId: taskID(1), As: taskv1.ResolveAs_RESOLVE_AS_UNDO, Reason: "again"}); err != nil || s != taskv1.TaskState_TASK_STATE_RUNNING {
				t.Fatalf("undo = %v, %v", s, err)
			}
		}
		for range 5 {
			undo()
			pass(time.Second)
			want(t, n.record(1), held, noUndo, "UNDO_FAILED")
		}
		n.w.on("undo a", nil)
		undo()
		n.until(func(ev *taskv1.Event) bool { return ev.GetFinished().GetTaskId() == taskID(1) })
		want(t, n.record(1), failed, complete, "UNDO_FAILED")
		if e := n.record(1).GetEvents(); e > 12 {
			t.Errorf("%d events", e)
		}
	})
}

// TestRebootLoop holds a task that comes back from one boot after another.
func TestRebootLoop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.w.on("apply a", func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() })
		n.accept(1, "switch.on", "@l a")
		synctest.Wait()
		for i := range 4 {
			n.restart(fmt.Sprintf("boot-%d", i+2))
			synctest.Wait()
		}
		want(t, n.ended(1), held, noUndo, "REBOOT_LOOP")
		if got := n.w.count("apply a"); got != 4 {
			t.Errorf("applied %d times, want 4", got)
		}
	})
}

// TestRebootBudget is kept over restarts, and by the clock of the wall.
func TestRebootBudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		for i := 1; i <= 3; i++ {
			n.accept(i, "switch.press", "@node reboot:r")
			want(t, n.ended(i), succeeded, noUndo, "")
			n.restart("boot-1")
		}
		n.accept(4, "switch.press", "@node reboot:r")
		rec := n.ended(4)
		want(t, rec, refused, notNeeded, "REBOOT_BUDGET")
		if !strings.Contains(rec.GetMessage(), "reboots.most") {
			t.Errorf("message = %q, want the way out", rec.GetMessage())
		}
		n.clock.move(25 * time.Hour)
		n.accept(5, "switch.press", "@node reboot:r")
		want(t, n.ended(5), succeeded, noUndo, "")
	})
}

// TestLockQueue shows who waits behind whom, and tells when that changes.
func TestLockQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		first, second := make(chan struct{}), make(chan struct{})
		n.w.on("apply a", func(context.Context) error { <-first; return nil })
		n.w.on("apply b", func(context.Context) error { <-second; return nil })
		for i, s := range []string{"a", "b", "c"} {
			n.accept(i+1, "switch.on", "@l "+s)
			synctest.Wait()
		}
		claims, err := n.e.Claims()
		if err != nil || len(claims) != 3 || !claims[0].GetGranted() || claims[1].GetGranted() || len(claims[2].GetBehind()) != 2 ||
			claims[2].GetBehind()[1] != taskID(2) || claims[0].GetKind() != "switch.on" || claims[2].GetSince() == nil {
			t.Errorf("claims = %v, %v", claims, err)
		}
		if m := n.record(3).GetMessage(); !strings.Contains(m, "held by task "+taskID(1)) {
			t.Errorf("the third waits: %q", m)
		}
		close(first)
		synctest.Wait()
		if m := n.record(3).GetMessage(); !strings.Contains(m, "held by task "+taskID(2)) {
			t.Errorf("the third waits, once the first has ended: %q", m)
		}
		n.restart("boot-1") // the order is kept
		synctest.Wait()
		if m := n.record(3).GetMessage(); !strings.Contains(m, "held by task "+taskID(2)) {
			t.Errorf("the third waits, after a restart: %q", m)
		}
		close(second)
		want(t, n.ended(3), succeeded, noUndo, "")
	})
}

// TestHeldDoesNotBlockReboot lets a kind that passes held tasks have the node,
// while the held task keeps its lock from all others.
func TestHeldDoesNotBlockReboot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.w.on("apply p", func(context.Context) error { return fmt.Errorf("no record: %w", host.ErrOutcomeUnknown) })
		n.accept(1, "switch.press", "@l once:p")
		want(t, n.ended(1), held, noUndo, "OUTCOME_UNKNOWN")
		n.restart("boot-1") // it is known as held after a restart too
		n.accept(2, "node.press", "@node b")
		want(t, n.ended(2), succeeded, noUndo, "")
		n.accept(3, "switch.press", "@node c")
		n.until(func(ev *taskv1.Event) bool { return ev.GetWaiting().GetTaskId() == taskID(3) })
		if m := n.record(3).GetMessage(); !strings.Contains(m, "until a person settles it, by task "+taskID(1)) {
			t.Errorf("the third waits: %q", m)
		}
	})
}
