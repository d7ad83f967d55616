package executor_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpuaas/millwright/agent/internal/executor"
	"github.com/gpuaas/millwright/agent/internal/gate"
	"github.com/gpuaas/millwright/agent/internal/state"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
)

// dyingJournal is a journal that a process loses at a chosen write: before it,
// or after it without hearing of it.
type dyingJournal struct {
	*state.Store
	at     int // counts down by one before and one after each write
	die    context.CancelFunc
	isDead bool
}

var errDead = errors.New("the process is dead")

func (d *dyingJournal) tick() error {
	if d.isDead {
		return errDead
	}
	if d.at--; d.at == 0 {
		d.isDead = true
		d.die()
		return errDead
	}
	return nil
}

func (d *dyingJournal) Update(fn func(*state.Tx) error) error {
	if err := d.tick(); err != nil {
		return err
	}
	if err := d.Store.Update(fn); err != nil {
		return err
	}
	return d.tick()
}

// TestCrashAtEveryWrite kills the executor before and after each journal write
// of a run, restarts it with the state file reopened, in the same boot and in
// another, and wants one of two ends: all on, or as it was. No counter is
// counted twice.
func TestCrashAtEveryWrite(t *testing.T) {
	for _, tc := range []struct {
		name, kind, spec, fail string
		want                   map[string]int
	}{
		{"all kinds of steps", "switch.on", "a check:b once:c d", "", map[string]int{"a": 1, "b": 1, "c": 1, "d": 1}},
		{"undone", "switch.on", "a check:b d", "apply d", map[string]int{}},
		{"undone in part", "switch.on", "a once:c d", "apply d", map[string]int{"c": 1}},
	} {
		for _, boot := range []string{"boot-1", "boot-2"} {
			t.Run(tc.name+" "+boot, func(t *testing.T) {
				at := 1
				for ; crashOnce(t, tc.kind, tc.spec, tc.fail, boot, tc.want, at); at++ {
				}
				t.Logf("%d crash points", at-1)
				if at < 15 {
					t.Errorf("only %d crash points", at-1)
				}
			})
		}
	}
}

// crashOnce returns false when the run has fewer writes.
func crashOnce(t *testing.T, kind, spec, failing, boot string, want map[string]int, at int) bool {
	t.Helper()
	n := newNode(t)
	n.stop()
	if failing != "" {
		n.w.on(failing, fail)
	}
	if err := n.store.Update(func(tx *state.Tx) error { tx.PutBootID(n.boot); return nil }); err != nil {
		t.Fatal(err)
	}
	deliverTo(t, n, kind, spec)
	ctx, die := context.WithCancel(t.Context())
	defer die()
	d := &dyingJournal{Store: n.store, at: at, die: die}
	n.e = executor.New(executor.Config{Journal: d, Gate: n.gate, Registry: n.w.registry(), Clock: n.clock, Logger: discard(), BootID: n.boot, Hosts: noHosts{}, Room: anyRoom})
	stop := runExecutor(ctx, n.e)
	_ = waitEnded(ctx, n.store, taskID(1))
	stop()
	n.stop = func() {}
	n.restart(boot)
	rec := n.ended(1)
	if state := n.w.state(); fmt.Sprint(state) != fmt.Sprint(want) {
		t.Errorf("crash point %d: switches = %v, want %v (%v: %s)", at, state, want, rec.GetState(), rec.GetMessage())
	}
	finished := 0
	for _, ev := range n.events() {
		if ev.GetFinished().GetTaskId() == taskID(1) {
			finished++
		}
	}
	if finished != 1 {
		t.Errorf("crash point %d: the task ended %d times in the history", at, finished)
	}
	dead := d.isDead
	n.halt()
	n.open()
	n.start()
	return dead
}

// TestAfterReboot undoes by the reboot what two steps did, one of which was
// verified before: both are applied again. A command is not.
func TestAfterReboot(t *testing.T) {
	n := newNode(t)
	block := func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }
	n.w.on("verify c", block)
	n.accept(1, "switch.on", "a check:b once:p c")
	n.until(func(ev *taskv1.Event) bool { return ev.GetStepEnded().GetStep() == 1 })
	waitPhase(t, n, 3, taskv1.StepPhase_STEP_PHASE_APPLIED)
	n.halt()
	n.w.put("a", 0)
	n.w.put("b", 0)
	n.w.put("c", 0)
	n.w.on("verify c", nil)
	n.boot = "boot-2"
	n.open()
	n.start()
	want(t, n.ended(1), succeeded, noUndo, "")
	n.w.want(t, map[string]int{"a": 1, "b": 1, "c": 1, "p": 1})
	resumed := false
	for _, ev := range n.events() {
		if r := ev.GetResumed(); r != nil {
			resumed = r.GetRebooted() && r.GetStep() == 3
		}
	}
	if !resumed {
		t.Errorf("no event says that it was resumed at step 3 after a reboot: %s", n.story(1))
	}
}

// TestResumedInUndo tells of the step that is undone next, not of the first.
func TestResumedInUndo(t *testing.T) {
	n := newNode(t)
	n.w.on("apply d", fail)
	n.w.on("undo b", func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() })
	n.accept(1, "switch.on", "a check:b d")
	waitPhase(t, n, 1, taskv1.StepPhase_STEP_PHASE_UNDOING)
	n.halt()
	n.w.on("undo b", nil)
	n.open()
	n.start()
	want(t, n.ended(1), failed, complete, "STEP_FAILED")
	var got *taskv1.TaskResumed
	for _, ev := range n.events() {
		if r := ev.GetResumed(); r != nil {
			got = r
		}
	}
	if got.GetStep() != 1 || got.GetFound() != "step being undone" {
		t.Errorf("resumed = %v, want at step 1, being undone", got)
	}
}

// waitPhase waits until a step is durable in a phase.
func waitPhase(t *testing.T, n *node, step int, phase taskv1.StepPhase) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	deadline := time.After(10 * time.Second)
	for {
		if steps := n.steps(1); len(steps) > step && steps[step].GetPhase() == phase {
			return
		}
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("step %d did not get to %v: %v", step, phase, n.steps(1))
		}
	}
}

// TestRebootStep is proven by another boot id, and applied again without one.
func TestRebootStep(t *testing.T) {
	for _, tc := range []struct {
		boot  string
		times int
	}{{"boot-1", 2}, {"boot-2", 1}} {
		t.Run(tc.boot, func(t *testing.T) {
			n := newNode(t)
			applied := make(chan struct{}, 1)
			n.w.onAfter("apply r", func(ctx context.Context) error {
				applied <- struct{}{}
				<-ctx.Done()
				return ctx.Err()
			})
			n.accept(1, "switch.on", "reboot:r")
			<-applied
			n.halt()
			n.w.onAfter("apply r", nil)
			n.boot = tc.boot
			n.open()
			n.start()
			want(t, n.ended(1), succeeded, noUndo, "")
			n.w.want(t, map[string]int{"r": tc.times})
		})
	}
}

func TestHeldUnknown(t *testing.T) {
	n := newNode(t)
	n.w.on("apply p", func(context.Context) error { return fmt.Errorf("no record: %w", host.ErrOutcomeUnknown) })
	n.accept(1, "switch.press", "@l once:p")
	rec := n.ended(1)
	want(t, rec, held, noUndo, "OUTCOME_UNKNOWN")
	if !strings.Contains(rec.GetMessage(), "task resolve") {
		t.Errorf("message = %q, want the way out", rec.GetMessage())
	}
	// It keeps its lock, over a restart too, and is not carried on.
	n.accept(2, "switch.on", "@l a")
	n.restart("boot-2")
	n.until(func(ev *taskv1.Event) bool { return ev.GetWaiting().GetTaskId() == taskID(2) })
	if w := n.record(2); !strings.Contains(w.GetMessage(), taskID(1)) || w.GetReason() != "LOCKED" {
		t.Errorf("the second task waits for %q, %s, want the held task", w.GetMessage(), w.GetReason())
	}
	if got := n.w.count("apply p"); got != 1 {
		t.Errorf("the command was asked for %d times", got)
	}
	// A person's signed word about another leaf counts for nothing.
	n.resolve(10, 1, taskv1.ResolveAs_RESOLVE_AS_ACCEPT, make([]byte, 32))
	want(t, n.ended(10), refused, notNeeded, "PRECONDITION")
	n.resolve(11, 1, taskv1.ResolveAs_RESOLVE_AS_UNDO, n.record(1).GetLeafHash())
	want(t, n.ended(11), refused, notNeeded, "PRECONDITION")
	n.resolve(12, 1, taskv1.ResolveAs_RESOLVE_AS_ACCEPT, n.record(1).GetLeafHash())
	want(t, n.ended(12), succeeded, noUndo, "")
	n.until(func(ev *taskv1.Event) bool { return ev.GetFinished().GetTaskId() == taskID(1) })
	if rec := n.record(1); rec.GetState() != succeeded || rec.GetAssertedBy() != "alice" {
		t.Errorf("the held task is %v, asserted by %q, want succeeded by alice", rec.GetState(), rec.GetAssertedBy())
	}
	var result taskv1.ResolveResult
	if err := n.record(12).GetResult().UnmarshalTo(&result); err != nil || result.GetState() != succeeded {
		t.Errorf("result = %v, %v", &result, err)
	}
	want(t, n.ended(2), succeeded, noUndo, "") // the lock is free
	n.resolve(13, 1, taskv1.ResolveAs_RESOLVE_AS_ABANDON, n.record(1).GetLeafHash())
	want(t, n.ended(13), refused, notNeeded, "PRECONDITION")
}

func (n *node) resolve(i, target int, as taskv1.ResolveAs, hash []byte) {
	n.t.Helper()
	a := assignment(taskID(i), "task.resolve", &taskv1.ResolveSpec{TaskId: taskID(target), LeafHash: hash, As: as})
	if got := n.e.Deliver(n.t.Context(), a); got.GetAccepted() == nil {
		n.t.Fatalf("Deliver(resolve) = %v", got)
	}
}

func TestHeldUndoFailed(t *testing.T) {
	n := newNode(t)
	n.w.on("apply b", fail)
	n.w.on("undo a", fail)
	n.accept(1, "switch.on", "a b")
	want(t, n.ended(1), held, noUndo, "UNDO_FAILED")
	if got, want := n.story(1), "accepted planned started step_ended undoing held"; got != want {
		t.Errorf("events = %s, want %s", got, want)
	}
	n.restart("boot-1")
	// A goal that is not reached cannot be accepted, not by root either.
	as := func(s taskv1.ResolveAs) (taskv1.TaskState, error) {
		return n.e.Resolve(t.Context(), &agentv1.ResolveTaskRequest{TaskId: taskID(1), As: s, Reason: "seen to"})
	}
	var refusal *gate.Refusal
	if _, err := as(taskv1.ResolveAs_RESOLVE_AS_ACCEPT); !errors.As(err, &refusal) || refusal.Reason != "VERIFY_FAILED" {
		t.Errorf("accept = %v, want VERIFY_FAILED", err)
	}
	n.w.put("b", 1)
	if s, err := as(taskv1.ResolveAs_RESOLVE_AS_ACCEPT); err != nil || s != succeeded {
		t.Errorf("accept once the node is right = %v, %v", s, err)
	}
	if rec := n.record(1); rec.GetAssertedBy() != "root on the node" {
		t.Errorf("asserted by %q", rec.GetAssertedBy())
	}
	if _, err := as(taskv1.ResolveAs_RESOLVE_AS_ABANDON); !errors.As(err, &refusal) {
		t.Errorf("a second settlement = %v, want a refusal", err)
	}
	n.w.on("apply x", fail)
	n.w.on("undo c", fail)
	n.accept(2, "switch.on", "c b x")
	n.ended(2)
	if s, err := n.e.Resolve(t.Context(), &agentv1.ResolveTaskRequest{TaskId: taskID(2), As: taskv1.ResolveAs_RESOLVE_AS_ABANDON}); err != nil || s != abandoned {
		t.Errorf("abandon = %v, %v", s, err)
	}
	want(t, n.record(2), abandoned, notPossible, "UNDO_FAILED")
}

func TestCancel(t *testing.T) {
	n := newNode(t)
	ctx := t.Context()
	cancelTask := func(i int) error {
		return n.e.Cancel(ctx, &agentv1.CancelRequest{TaskId: taskID(i), LeafHash: n.record(i).GetLeafHash(), RequestedBy: "spiffe://x/operator/bob", Reason: "wrong node"})
	}
	reached := make(chan struct{}, 1)
	block := func(ctx context.Context) error {
		reached <- struct{}{}
		<-ctx.Done()
		return context.Cause(ctx)
	}

	// A command is stopped.
	n.w.on("apply p", block)
	n.accept(1, "switch.press", "@l once:p")
	<-reached
	// One that waits for the lock ends.
	n.accept(2, "switch.on", "@l a")
	n.until(func(ev *taskv1.Event) bool { return ev.GetWaiting().GetTaskId() == taskID(2) })
	if err := cancelTask(2); err != nil {
		t.Fatal(err)
	}
	want(t, n.ended(2), cancelled, notNeeded, "CANCELLED")
	if err := cancelTask(1); err != nil {
		t.Fatal(err)
	}
	want(t, n.ended(1), cancelled, notPossible, "CANCELLED")

	// Another step is not cut off: the task stops at its edge and is undone.
	edge := make(chan struct{})
	n.w.on("apply c", func(ctx context.Context) error {
		reached <- struct{}{}
		select {
		case <-edge:
		case <-ctx.Done():
		}
		return ctx.Err()
	})
	n.accept(3, "switch.on", "c d")
	<-reached
	if err := cancelTask(3); err != nil {
		t.Fatal(err)
	}
	close(edge)
	want(t, n.ended(3), cancelled, complete, "CANCELLED")
	if n.w.count("apply d") > 0 {
		t.Error("a step began after the cancel")
	}
	for i := range 3 {
		if got := n.record(i + 1).GetMessage(); strings.Count(got, "bob asked to cancel it: wrong node") != 1 {
			t.Errorf("message of task %d = %q, want who and why, once", i+1, got)
		}
	}

	// It is too late once the final check has begun.
	n.w.on("check @e", nil)
	late := make(chan struct{})
	n.w.on("check e", func(context.Context) error {
		reached <- struct{}{}
		<-late
		return nil
	})
	n.accept(4, "switch.on", "@e e")
	<-reached
	if err := cancelTask(4); err != nil {
		t.Fatal(err)
	}
	close(late)
	want(t, n.ended(4), succeeded, noUndo, "")
	if err := cancelTask(4); err != nil {
		t.Errorf("cancel of a task that has ended = %v, want nil", err)
	}
	if err := n.e.Cancel(ctx, &agentv1.CancelRequest{TaskId: taskID(4), LeafHash: []byte("other")}); !errors.Is(err, executor.ErrUnknownTask) {
		t.Errorf("cancel of another leaf = %v, want ErrUnknownTask", err)
	}
}

// TestCancelOutlivesTheAgent asks for a cancel, and the agent dies before it is
// honoured.
func TestCancelOutlivesTheAgent(t *testing.T) {
	n := newNode(t)
	reached := make(chan struct{}, 1)
	n.w.on("apply b", func(ctx context.Context) error {
		reached <- struct{}{}
		<-ctx.Done()
		return ctx.Err()
	})
	n.accept(1, "switch.on", "a b")
	<-reached
	if err := n.e.Cancel(t.Context(), &agentv1.CancelRequest{TaskId: taskID(1), LeafHash: n.record(1).GetLeafHash(), RequestedBy: "bob"}); err != nil {
		t.Fatal(err)
	}
	n.restart("boot-1")
	want(t, n.ended(1), cancelled, complete, "CANCELLED")
	n.w.want(t, map[string]int{})
}

func TestLocksInOrder(t *testing.T) {
	n := newNode(t)
	go1, go2 := make(chan struct{}), make(chan struct{})
	n.w.on("apply a", waitFor(go1))
	n.w.on("apply z", waitFor(go2))
	n.accept(1, "switch.on", "@m:/x a")
	n.accept(2, "switch.on", "@m:/x/y b")
	n.accept(3, "switch.on", "@m:/x/y/z c")
	n.accept(4, "switch.on", "@other z")
	n.until(func(ev *taskv1.Event) bool { return ev.GetStarted().GetTaskId() == taskID(4) }) // not behind the others
	n.until(func(ev *taskv1.Event) bool { return ev.GetWaiting().GetTaskId() == taskID(3) })
	n.restart("boot-1")
	close(go2)
	want(t, n.ended(4), succeeded, noUndo, "")
	close(go1)
	for i := 1; i <= 3; i++ {
		want(t, n.ended(i), succeeded, noUndo, "")
	}
	var order []string
	for _, ev := range n.events() {
		if f := ev.GetFinished(); f != nil {
			order = append(order, f.GetTaskId()[35:])
		}
	}
	if got := strings.Join(order, ""); got != "4123" {
		t.Errorf("tasks ended in the order %s, want 4123", got)
	}
}

func waitFor(c <-chan struct{}) func(context.Context) error {
	return func(ctx context.Context) error {
		select {
		case <-c:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (n *node) intent(key string) *agentv1.IntentRecord {
	n.t.Helper()
	var in *agentv1.IntentRecord
	if err := n.store.View(func(tx *state.Tx) (err error) {
		in, err = tx.Intent(key)
		if errors.Is(err, state.ErrNotFound) {
			in, err = nil, nil
		}
		return err
	}); err != nil {
		n.t.Fatal(err)
	}
	return in
}

func TestIntents(t *testing.T) {
	const active, resting = taskv1.IntentState_INTENT_STATE_ACTIVE, taskv1.IntentState_INTENT_STATE_RESTING
	n := newNode(t)
	n.accept(1, "switch.on", "@k a")
	n.ended(1)
	if in := n.intent("k"); in.GetState() != active || in.GetTaskId() != taskID(1) || in.GetSignedLeaf() == nil || in.GetTrustRootVersion() != 1 {
		t.Errorf("intent = %v, want that of task 1 in force", in)
	}
	// A task that supersedes it puts it to rest, and it wakes when that is undone.
	reached := make(chan struct{})
	n.w.on("apply b", func(context.Context) error { reached <- struct{}{}; <-reached; return errBoom })
	n.accept(2, "switch.on", "@k b")
	<-reached
	if in := n.intent("k"); in.GetState() != resting || in.GetRestingFor() != taskID(2) {
		t.Errorf("intent while task 2 runs = %v, want it to rest", in)
	}
	reached <- struct{}{}
	want(t, n.ended(2), failed, complete, "STEP_FAILED")
	if in := n.intent("k"); in.GetState() != active || in.GetTaskId() != taskID(1) {
		t.Errorf("intent after task 2 was undone = %v, want that of task 1 in force", in)
	}
	// A plan changes nothing.
	n.accept(3, "switch.on", "@k c", func(l *taskv1.TaskLeaf) { l.Mode = taskv1.Mode_MODE_PLAN })
	n.ended(3)
	if in := n.intent("k"); in.GetTaskId() != taskID(1) {
		t.Errorf("intent after a plan = %v", in)
	}
	n.accept(4, "switch.forget", "@k d")
	n.ended(4)
	if in := n.intent("k"); in != nil {
		t.Errorf("intent after its removal = %v", in)
	}
	if got, want := n.story(4), "accepted planned started intent_changed finished"; got != want {
		t.Errorf("events = %s, want %s", got, want)
	}
}

// TestIntentsAfterBoot lets a boot undo what intents want: one comes back by
// itself, one is restored, one is no longer allowed.
func TestIntentsAfterBoot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		for i, spec := range []string{"@k1 a", "@k2 b", "@k3 c"} {
			n.accept(i, "switch.on", spec)
			n.ended(i)
		}
		n.halt()
		n.w.put("a", 0)
		n.w.put("b", 0)
		n.w.put("c", 0)
		n.gate = restoreGate{openGate{n.w.registry()}, taskID(2)}
		n.boot = "boot-2"
		n.open()
		n.start()
		time.AfterFunc(30*time.Second, func() { n.w.put("a", 1) })
		n.until(func(ev *taskv1.Event) bool {
			return ev.GetIntentChanged().GetState() == taskv1.IntentState_INTENT_STATE_RESTORED
		})
		n.w.want(t, map[string]int{"a": 1, "b": 1})
		for _, ev := range n.events() {
			c := ev.GetIntentChanged()
			switch c.GetState() {
			case taskv1.IntentState_INTENT_STATE_RESTORED:
				if c.GetKey() != "k2" || c.GetTaskId() != taskID(1) {
					t.Errorf("restored = %v, want k2 of task 1", c)
				}
			case taskv1.IntentState_INTENT_STATE_SUSPENDED:
				if c.GetKey() != "k3" || !strings.Contains(c.GetMessage(), "denied") {
					t.Errorf("suspended = %v, want k3", c)
				}
			default:
			}
		}
		if in := n.intent("k3"); in.GetState() != taskv1.IntentState_INTENT_STATE_SUSPENDED {
			t.Errorf("k3 = %v, want suspended", in)
		}
		if left, err := n.e.Unfinished(t.Context()); err != nil || len(left) != 0 {
			t.Errorf("Unfinished = %v, %v: a restore is no task of the server", left, err)
		}
		// Once seen to, a restart in the same boot does nothing.
		synctest.Wait()
		n.restart("boot-2")
		n.w.put("a", 0)
		synctest.Wait()
		if n.w.get("a") != 0 {
			t.Error("an intent was restored without a boot")
		}
	})
}

// restoreGate does not allow what one task left.
type restoreGate struct {
	openGate
	denied string
}

func (g restoreGate) Restore(ctx context.Context, env *taskv1.Envelope, signed *taskv1.SignedLeaf, v uint64) (*gate.Admission, error) {
	adm, err := g.openGate.Restore(ctx, env, signed, v)
	if err == nil && adm.Leaf.GetTaskId() == g.denied {
		return nil, &gate.Refusal{Reason: gate.ReasonPolicyDenied, Message: "denied by line 3"}
	}
	return adm, err
}

// TestRestoreThatCannotBeUndone is suspended, and the node told of it.
func TestRestoreFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.accept(1, "switch.on", "@k a")
		n.ended(1)
		n.halt()
		n.w.put("a", 0)
		n.w.onAfter("apply a", fail)
		n.w.on("undo a", fail)
		n.boot = "boot-2"
		n.open()
		n.start()
		n.until(func(ev *taskv1.Event) bool {
			return ev.GetIntentChanged().GetState() == taskv1.IntentState_INTENT_STATE_SUSPENDED
		})
		if in := n.intent("k"); in.GetState() != taskv1.IntentState_INTENT_STATE_SUSPENDED {
			t.Errorf("intent = %v, want suspended", in)
		}
		// Its lock is free.
		n.w.onAfter("apply a", nil)
		n.accept(2, "switch.on", "@k b")
		want(t, n.ended(2), succeeded, noUndo, "")
	})
}

var _ tasks.Task[*taskv1.ResolveSpec] = resolveTask{}
