package executor_test

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// stopped is a call that says when it was reached and then waits: for go, or,
// when it can be cut off, for its context.
func stopped(reached chan<- struct{}, release <-chan struct{}) func(context.Context) error {
	return func(ctx context.Context) error {
		select {
		case reached <- struct{}{}:
		default:
		}
		select {
		case <-release:
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// TestCancelAtEveryPhase cancels a task in each phase of its life on the node.
// Each row says where it is when the cancel comes, how it ends, what is left of
// it, and a call that must not have been made afterwards.
func TestCancelAtEveryPhase(t *testing.T) {
	for _, tc := range []struct {
		phase string
		spec  string
		at    string // the call in which it is; empty: it waits
		after bool   // behind the change of that call
		fails string // a call that fails, before
		late  bool   // the cancel changes nothing
		state taskv1.TaskState
		undo  taskv1.UndoState
		why   string
		on    map[string]int
		never string
	}{
		{phase: "waiting for a lock", spec: "@l a", state: cancelled, undo: notNeeded, why: "CANCELLED", never: "observe a"},
		{phase: "planning", spec: "@l a", at: "plan l", state: cancelled, undo: notNeeded, why: "CANCELLED", never: "observe a"},
		{phase: "observing the first step", spec: "@l a b", at: "observe a", state: cancelled, undo: complete, why: "CANCELLED", never: "apply a"},
		{phase: "applying a step", spec: "@l a b", at: "apply a", state: cancelled, undo: complete, why: "CANCELLED", never: "observe b"},
		{phase: "a step was applied", spec: "@l a b", at: "apply a", after: true, state: cancelled, undo: complete, why: "CANCELLED", never: "observe b"},
		{phase: "running a command", spec: "@l once:p b", at: "apply p", state: cancelled, undo: notPossible, why: "CANCELLED", never: "observe b"},
		{phase: "verifying a step", spec: "@l a b", at: "verify a", state: cancelled, undo: complete, why: "CANCELLED", never: "observe b"},
		{phase: "between two steps", spec: "@l a b", at: "verify a", after: true, state: cancelled, undo: complete, why: "CANCELLED", never: "apply b"},
		{phase: "observing the second step", spec: "@l a b", at: "observe b", state: cancelled, undo: complete, why: "CANCELLED", never: "apply b"},
		{phase: "waiting to try again", spec: "@l a retry:b", fails: "apply b", state: cancelled, undo: complete, why: "CANCELLED"},
		{phase: "in the final check", spec: "@l a", at: "check l", late: true, state: succeeded, undo: noUndo, on: map[string]int{"a": 1}},
		{phase: "undoing", spec: "@l a b", at: "undo a", fails: "verify b", late: true, state: failed, undo: complete, why: "STEP_FAILED"},
	} {
		t.Run(tc.phase, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newNode(t)
				reached, release := make(chan struct{}, 1), make(chan struct{})
				switch {
				case tc.at == "" && tc.fails == "": // another task has the lock
					n.w.on("apply z", waitFor(release))
					n.accept(2, "switch.on", "@l z")
					synctest.Wait()
				case tc.fails != "" && tc.at == "":
					n.w.on(tc.fails, passes)
				case tc.fails != "":
					n.w.on(tc.fails, fail)
				}
				switch {
				case tc.at != "" && tc.after:
					n.w.onAfter(tc.at, stopped(reached, release))
				case tc.at != "":
					n.w.on(tc.at, stopped(reached, release))
				}
				n.accept(1, "switch.on", tc.spec)
				if tc.at != "" {
					<-reached
				} else {
					pass(time.Second)
				}
				cancelIt(t, n, 1)
				cancelIt(t, n, 1) // again changes nothing
				if asked := n.record(1).GetCancelRequested(); asked == tc.late && n.record(1).GetState() != cancelled {
					t.Errorf("the cancel is in the journal: %t; it came too late: %t", asked, tc.late)
				}
				synctest.Wait()
				close(release)
				rec := n.ended(1)
				want(t, rec, tc.state, tc.undo, tc.why)
				if says := strings.Count(rec.GetMessage(), "bob asked to cancel it: wrong node"); says > 1 || says == 0 != tc.late {
					t.Errorf("message = %q: who and why %d times, and too late: %t", rec.GetMessage(), says, tc.late)
				}
				on := n.w.state()
				delete(on, "z")
				if want := tc.on; len(on) != len(want) || on["a"] != want["a"] {
					t.Errorf("what is left is %v, want %v", on, want)
				}
				if tc.never != "" && n.w.count(tc.never) > 0 {
					t.Errorf("%q was called", tc.never)
				}
				state := rec.GetState()
				cancelIt(t, n, 1) // it has ended
				if again := n.record(1).GetState(); again != state {
					t.Errorf("a cancel after its end made it %v", again)
				}
			})
		})
	}
}

func cancelIt(t *testing.T, n *node, i int) {
	t.Helper()
	if err := n.e.Cancel(t.Context(), &agentv1.CancelRequest{
		TaskId: taskID(i), LeafHash: n.record(i).GetLeafHash(), RequestedBy: "bob", Reason: "wrong node",
	}); err != nil {
		t.Errorf("Cancel = %v", err)
	}
}

// TestCancelOfAHeldTask changes nothing: a person has to settle it.
func TestCancelOfAHeldTask(t *testing.T) {
	n := newNode(t)
	n.w.on("apply b", fail)
	n.w.on("undo a", fail)
	n.accept(1, "switch.on", "@l a b")
	want(t, n.ended(1), held, noUndo, "UNDO_FAILED")
	cancelIt(t, n, 1)
	if rec := n.record(1); rec.GetState() != held || rec.GetCancelRequested() {
		t.Errorf("a cancel made a held task %v", rec)
	}
}
