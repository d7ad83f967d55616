package executor_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/gpuaas/millwright/agent/internal/executor"
	"github.com/gpuaas/millwright/agent/internal/gate"
	"github.com/gpuaas/millwright/agent/internal/state"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
)

var errBoom = errors.New("boom")

func fail(context.Context) error { return errBoom }

func TestSucceeds(t *testing.T) {
	n := newNode(t)
	n.accept(1, "switch.on", "a check:b")
	rec := n.ended(1)
	want(t, rec, succeeded, noUndo, "")
	n.w.want(t, map[string]int{"a": 1, "b": 1})
	if got, want := n.story(1), "accepted planned started step_ended intent_changed finished"; got != want {
		t.Errorf("events = %s, want %s", got, want)
	}
	var result wrapperspb.StringValue
	if err := rec.GetResult().UnmarshalTo(&result); err != nil || result.GetValue() != "out of a,out of b" {
		t.Errorf("result = %q, %v", result.GetValue(), err)
	}
	n.accept(2, "switch.on", "a check:b")
	n.ended(2)
	if got, want := n.story(2), "accepted planned intent_changed finished"; got != want {
		t.Errorf("events of a task with nothing to do = %s, want %s", got, want)
	}
}

func TestFailureIsUndone(t *testing.T) {
	for _, tc := range []struct {
		name, spec, call string
		after            bool
		reason           string
		undo             taskv1.UndoState
		want             map[string]int
	}{
		{"observe of the first", "a b", "observe a", false, "STEP_FAILED", notNeeded, map[string]int{}},
		{"apply of the second", "a b", "apply b", false, "STEP_FAILED", complete, map[string]int{}},
		{"apply of the second, after the change", "a b", "apply b", true, "STEP_FAILED", complete, map[string]int{}},
		{"verify of the second", "a b", "verify b", false, "STEP_FAILED", complete, map[string]int{}},
		{"the final check", "a b", "check switch:a", false, "VERIFY_FAILED", complete, map[string]int{}},
		{"after a step that cannot be undone", "a once:p b", "apply b", false, "STEP_FAILED", notPossible, map[string]int{"p": 1}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			n := newNode(t)
			if tc.after {
				n.w.onAfter(tc.call, fail)
			} else {
				n.w.on(tc.call, fail)
			}
			n.accept(1, "switch.on", tc.spec)
			rec := n.ended(1)
			want(t, rec, failed, tc.undo, tc.reason)
			if !strings.Contains(rec.GetMessage(), "boom") {
				t.Errorf("message = %q, want the cause", rec.GetMessage())
			}
			n.w.want(t, tc.want)
		})
	}
}

func TestPlanEnds(t *testing.T) {
	drift := func(l *taskv1.TaskLeaf) { l.PlanDigest = make([]byte, 32) }
	planOnly := func(l *taskv1.TaskLeaf) { l.Mode = taskv1.Mode_MODE_PLAN }
	for _, tc := range []struct {
		name   string
		hook   func(context.Context) error
		change []func(*taskv1.TaskLeaf)
		state  taskv1.TaskState
		undo   taskv1.UndoState
		reason string
	}{
		{"precondition", func(context.Context) error { return fmt.Errorf("no such disk: %w", tasks.ErrPrecondition) }, nil, refused, notNeeded, "PRECONDITION"},
		{"drifted", nil, []func(*taskv1.TaskLeaf){drift}, refused, notNeeded, "PLAN_DRIFTED"},
		{"panic", func(context.Context) error { panic("in a plan") }, nil, refused, notNeeded, "PLAN_FAILED"},
		{"plan only", nil, []func(*taskv1.TaskLeaf){planOnly}, succeeded, noUndo, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			n := newNode(t)
			n.w.on("plan switch:a", tc.hook)
			n.accept(1, "switch.on", "a", tc.change...)
			rec := n.ended(1)
			want(t, rec, tc.state, tc.undo, tc.reason)
			n.w.want(t, map[string]int{})
			if tc.state != succeeded {
				return
			}
			var plan taskv1.Plan
			if err := rec.GetResult().UnmarshalTo(&plan); err != nil || len(plan.GetSteps()) != 1 || plan.GetDifferences()[0].GetSubject() != "switch a" {
				t.Errorf("result = %v, %v, want the plan", &plan, err)
			}
			// The digest of the plan lets the same plan pass.
			_, digest, err := tasks.MarshalPlan(&plan)
			if err != nil {
				t.Fatal(err)
			}
			n.accept(2, "switch.on", "a", func(l *taskv1.TaskLeaf) { l.PlanDigest = digest })
			want(t, n.ended(2), succeeded, noUndo, "")
		})
	}
}

// TestPlanIsTriedAgain while the node cannot be read, for two minutes.
func TestPlanIsTriedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		tries := 0
		n.w.on("plan switch:a", func(context.Context) error {
			if tries++; tries < 6 {
				return errBoom
			}
			return nil
		})
		n.accept(1, "switch.on", "a")
		want(t, n.ended(1), succeeded, noUndo, "")
		n.w.on("plan switch:b", fail)
		n.accept(2, "switch.on", "b")
		want(t, n.ended(2), refused, notNeeded, "PLAN_FAILED")
	})
}

func TestPanicInStep(t *testing.T) {
	n := newNode(t)
	n.w.on("apply b", func(context.Context) error { panic("in a step") })
	n.accept(1, "switch.on", "a b")
	rec := n.ended(1)
	want(t, rec, failed, complete, "STEP_FAILED")
	if !strings.Contains(rec.GetMessage(), "panic: in a step") {
		t.Errorf("message = %q", rec.GetMessage())
	}
	n.w.want(t, map[string]int{})
}

// TestFewEvents runs a plan of many steps, in many lives.
func TestFewEvents(t *testing.T) {
	n := newNode(t)
	var names []string
	for i := range 30 {
		names = append(names, fmt.Sprintf("s%d", i))
	}
	reached := make(chan struct{}, 1)
	block := func(ctx context.Context) error {
		reached <- struct{}{}
		<-ctx.Done()
		return ctx.Err()
	}
	for i := range 10 {
		n.w.on(fmt.Sprintf("apply s%d", 3*i), block)
	}
	n.w.on("apply s29", fail)
	n.accept(1, "switch.on", strings.Join(names, " "))
	for i := range 10 {
		<-reached
		n.w.on(fmt.Sprintf("apply s%d", 3*i), nil)
		n.restart("boot-1")
	}
	rec := n.ended(1)
	want(t, rec, failed, complete, "STEP_FAILED")
	if got := len(strings.Fields(n.story(1))); got > executor.MaxEvents || uint32(got) != rec.GetEvents() {
		t.Errorf("%d events, counted %d, want at most %d: %s", got, rec.GetEvents(), executor.MaxEvents, n.story(1))
	}
	for _, ev := range n.events() {
		if f := ev.GetFinished(); f != nil && len(f.GetSteps()) != 30 {
			t.Errorf("the last event tells of %d steps, want all", len(f.GetSteps()))
		}
	}
}

func TestDeliver(t *testing.T) {
	n := newNode(t)
	first := n.deliver(1, "switch.on", "a").GetAccepted()
	if first == nil || first.GetKnown() {
		t.Fatalf("first delivery = %v, want accepted as new", first)
	}
	n.ended(1)
	again := n.deliver(1, "switch.on", "a").GetAccepted()
	if again == nil || !again.GetKnown() || again.GetSeq() != first.GetSeq() || again.GetJournalId() != first.GetJournalId() {
		t.Errorf("second delivery = %v, want known, with the answer of the first %v", again, first)
	}
	head := n.head()
	if r := n.deliver(1, "switch.on", "b").GetRefused(); r.GetReason() != "ID_REUSED" {
		t.Errorf("the same id with another leaf = %v, want ID_REUSED", r)
	}
	if r := n.deliver(2, "nothing.here", "b").GetRefused(); r.GetReason() != "UNKNOWN_KIND" {
		t.Errorf("unknown kind = %v, want UNKNOWN_KIND", r)
	}
	if r := n.e.Deliver(t.Context(), &agentv1.Assignment{}).GetRefused(); r == nil {
		t.Error("an empty assignment was not refused")
	}
	if got := n.head(); got != head {
		t.Errorf("refusals changed the journal: %+v, before %+v", got, head)
	}
	n.accept(2, "switch.on", "b") // the id of a refused task is not burnt
	n.ended(2)
	if got := n.w.count("apply a"); got != 1 {
		t.Errorf("a was applied %d times, want once", got)
	}
}

func (n *node) head() state.Head {
	n.t.Helper()
	var h state.Head
	if err := n.store.View(func(tx *state.Tx) (err error) { h, err = tx.Head(); return err }); err != nil {
		n.t.Fatal(err)
	}
	return h
}

func TestCredits(t *testing.T) {
	n := newNode(t)
	release := make(chan struct{})
	n.w.on("plan x", func(ctx context.Context) error {
		select {
		case <-release:
		case <-ctx.Done():
		}
		return nil
	})
	for i := range executor.Credits {
		n.accept(i, "switch.on", "@x a")
	}
	if d := n.deliver(99, "switch.on", "@x a").GetDeferred(); d.GetReason() != "NO_CREDIT" || d.GetRetryAfter().AsDuration() <= 0 {
		t.Errorf("one more = %v, want NO_CREDIT", d)
	}
	resolve := assignment(taskID(98), "task.resolve", &taskv1.ResolveSpec{TaskId: taskID(1), As: taskv1.ResolveAs_RESOLVE_AS_ABANDON})
	if a := n.e.Deliver(t.Context(), resolve).GetAccepted(); a == nil {
		t.Error("task.resolve was not accepted without a credit")
	}
	want(t, n.ended(98), refused, notNeeded, "PRECONDITION")
	close(release)
	for i := range executor.Credits {
		want(t, n.ended(i), succeeded, noUndo, "")
	}
	n.accept(99, "switch.on", "@x a")
}

// brokenJournal refuses to write while err is set.
type brokenJournal struct {
	*state.Store
	err    func() error
	unsent int64
}

func (b *brokenJournal) Update(fn func(*state.Tx) error) error {
	if err := b.err(); err != nil {
		return err
	}
	return b.Store.Update(fn)
}

func (b *brokenJournal) UnackedBytes() int64 { return b.unsent }

func TestDeferred(t *testing.T) {
	n := newNode(t)
	full := error(nil)
	b := &brokenJournal{Store: n.store, err: func() error { return full }}
	e := executor.New(executor.Config{Journal: b, Gate: n.gate, Registry: n.w.registry(), Clock: n.clock, Logger: discard(), BootID: n.boot, Hosts: noHosts{}, Room: anyRoom})
	full = fmt.Errorf("%w: %w", state.ErrWrite, syscall.ENOSPC)
	a := assignment(taskID(1), "switch.on", wrapperspb.String("a"))
	if d := e.Deliver(t.Context(), a).GetDeferred(); d.GetReason() != "DISK_FULL" {
		t.Errorf("on a full disk = %v, want DISK_FULL", d)
	}
	if err := e.Problem(); !state.DiskFull(err) {
		t.Errorf("Problem = %v, want that the disk is full", err)
	}
	full, b.unsent = nil, executor.OutboxLimit
	if d := e.Deliver(t.Context(), a).GetDeferred(); d.GetReason() != "OUTBOX_FULL" {
		t.Errorf("with a full outbox = %v, want OUTBOX_FULL", d)
	}
	b.unsent = 0
	if got := e.Deliver(t.Context(), a).GetAccepted(); got == nil || got.GetKnown() {
		t.Errorf("then = %v, want accepted as new: what was deferred burns no id", got)
	}
	if err := e.Problem(); err != nil {
		t.Errorf("Problem = %v, want none", err)
	}
}

// TestNoRoom wants that no task begins on a full disk while the journal still
// finds a page: it would only fail there, and the next one, until the queue is
// empty. The word about a held task is taken all the same.
func TestNoRoom(t *testing.T) {
	n := newNode(t)
	room := fmt.Errorf("/state has 12 KiB free: %w", syscall.ENOSPC)
	e := executor.New(executor.Config{
		Journal: n.store, Gate: n.gate, Registry: n.w.registry(), Clock: n.clock, Logger: discard(), BootID: n.boot, Hosts: noHosts{},
		Room: func() error { return room },
	})
	a := assignment(taskID(1), "switch.on", wrapperspb.String("a"))
	d := e.Deliver(t.Context(), a).GetDeferred()
	if d.GetReason() != "DISK_FULL" || d.GetRetryAfter().AsDuration() == 0 || !strings.Contains(d.GetMessage(), "make room") {
		t.Errorf("on a full disk = %v, want DISK_FULL, the way out, and a time", d)
	}
	word := assignment(taskID(2), "task.resolve", &taskv1.ResolveSpec{TaskId: taskID(9), As: taskv1.ResolveAs_RESOLVE_AS_ABANDON})
	if got := e.Deliver(t.Context(), word).GetAccepted(); got == nil {
		t.Error("task.resolve on a full disk was not accepted")
	}
	room = nil
	if got := e.Deliver(t.Context(), a).GetAccepted(); got == nil || got.GetKnown() {
		t.Errorf("then = %v, want accepted as new", got)
	}
}

// TestJournalFailureStops fails each write of a run in turn. The task stops
// where it is, never turns to undo, and goes on when the disk lets it.
func TestJournalFailureStops(t *testing.T) {
	for at := 1; ; at++ {
		hit := false
		synctest.Test(t, func(t *testing.T) {
			n := newNode(t)
			n.stop()
			writes := 0
			b := &brokenJournal{Store: n.store, err: func() error {
				if writes++; writes >= at && writes < at+3 {
					hit = true
					return fmt.Errorf("%w: %w", state.ErrWrite, syscall.ENOSPC)
				}
				return nil
			}}
			n.e = executor.New(executor.Config{Journal: b, Gate: n.gate, Registry: n.w.registry(), Clock: n.clock, Logger: discard(), BootID: n.boot, Hosts: noHosts{}, Room: anyRoom})
			// The task is there already; the boot has been seen to.
			if err := n.store.Update(func(tx *state.Tx) error { tx.PutBootID(n.boot); return nil }); err != nil {
				t.Fatal(err)
			}
			deliverTo(t, n, "switch.on", "a check:b once:c")
			n.start()
			want(t, n.ended(1), succeeded, noUndo, "")
			n.w.want(t, map[string]int{"a": 1, "b": 1, "c": 1})
			if n.w.count("undo a")+n.w.count("undo b") > 0 {
				t.Errorf("a failure of write %d turned the task to undo", at)
			}
		})
		if !hit {
			if at < 10 {
				t.Errorf("only %d writes in a run of three steps", at)
			}
			return
		}
	}
}

// deliverTo has a task accepted by an executor that then goes away.
func deliverTo(t *testing.T, n *node, kind, spec string) {
	t.Helper()
	e := executor.New(executor.Config{Journal: n.store, Gate: n.gate, Registry: n.w.registry(), Clock: n.clock, Logger: discard(), BootID: n.boot, Hosts: noHosts{}, Room: anyRoom})
	if a := e.Deliver(t.Context(), assignment(taskID(1), kind, wrapperspb.String(spec))); a.GetAccepted() == nil {
		t.Fatalf("Deliver = %v", a)
	}
}

func TestDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		slow := func(ctx context.Context) error { <-ctx.Done(); return context.Cause(ctx) }
		n.w.on("apply b", slow)
		minute := func(l *taskv1.TaskLeaf) { l.Deadline = durationpb.New(time.Minute) }
		n.accept(1, "switch.on", "a b", minute)
		rec := n.ended(1)
		want(t, rec, failed, complete, "DEADLINE_EXCEEDED")
		if d := rec.GetEndTime().AsTime().Sub(rec.GetStartTime().AsTime()); d < time.Minute || d > 70*time.Second {
			t.Errorf("it ran for %v, want a minute", d)
		}
		// A command sees why its context ended.
		var cause error
		n.w.on("apply p", func(ctx context.Context) error { <-ctx.Done(); cause = context.Cause(ctx); return cause })
		n.accept(2, "switch.press", "once:p", minute)
		want(t, n.ended(2), failed, notPossible, "DEADLINE_EXCEEDED")
		if !errors.Is(cause, host.ErrStop) {
			t.Errorf("cause = %v, want host.ErrStop", cause)
		}
		// A step's own time is not the task's.
		n.w.on("apply c", slow)
		n.accept(3, "switch.on", "c", func(l *taskv1.TaskLeaf) { l.Deadline = durationpb.New(time.Hour) })
		want(t, n.ended(3), failed, complete, "STEP_TIMEOUT")
	})
}

// TestStartGate waits while the gate says so, and ends what it refuses.
func TestStartGate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		answers := []error{
			&gate.Deferral{Reason: "POLICY_INVALID", Message: "line 3", RetryAfter: time.Minute},
			&gate.Deferral{Reason: "POLICY_INVALID", Message: "line 3", RetryAfter: time.Minute},
		}
		g := &startGate{openGate: openGate{n.w.registry()}, next: func() error {
			if len(answers) == 0 {
				return nil
			}
			err := answers[0]
			answers = answers[1:]
			return err
		}}
		n.halt()
		n.gate = g
		n.open()
		n.start()
		n.accept(1, "switch.on", "a")
		want(t, n.ended(1), succeeded, noUndo, "")
		if got, want := n.story(1), "accepted waiting planned started intent_changed finished"; got != want {
			t.Errorf("events = %s, want %s", got, want)
		}
		for i, tc := range []struct {
			reason string
			state  taskv1.TaskState
		}{{gate.ReasonWindowPassed, expired}, {gate.ReasonPolicyDenied, refused}} {
			refusal := &gate.Refusal{Reason: tc.reason, Message: "no"}
			answers = []error{refusal, refusal}
			n.accept(10+i, "switch.on", "b")
			want(t, n.ended(10+i), tc.state, notNeeded, tc.reason)
		}
		n.w.want(t, map[string]int{"a": 1})
	})
}

type startGate struct {
	openGate
	next func() error
}

func (g *startGate) Start(ctx context.Context, env *taskv1.Envelope, signed *taskv1.SignedLeaf) (*gate.Admission, error) {
	if err := g.next(); err != nil {
		return nil, err
	}
	return g.Admit(ctx, env, signed)
}

func TestAck(t *testing.T) {
	n := newNode(t)
	n.accept(1, "switch.on", "a once:p")
	n.ended(1)
	h := n.head()
	if err := n.e.Ack(t.Context(), "another journal", h.LastSeq); err != nil || n.head().AckedSeq != 0 {
		t.Errorf("Ack of another journal = %v, acknowledged %d, want it ignored", err, n.head().AckedSeq)
	}
	if err := n.e.Ack(t.Context(), h.JournalID, h.LastSeq+1); !errors.Is(err, state.ErrAckAhead) {
		t.Errorf("Ack beyond the end = %v, want ErrAckAhead", err)
	}
	if err := n.e.Ack(t.Context(), h.JournalID, h.LastSeq-1); err != nil {
		t.Fatal(err)
	}
	if n.steps(1)[0].GetBefore() == nil || n.record(1).GetAcknowledged() {
		t.Error("erased before the last event was acknowledged")
	}
	if err := n.e.Ack(t.Context(), h.JournalID, h.LastSeq); err != nil {
		t.Fatal(err)
	}
	for i, sr := range n.steps(1) {
		if sr.GetBefore() != nil {
			t.Errorf("step %d still has what its undo needed", i)
		}
	}
	if !n.record(1).GetAcknowledged() {
		t.Error("the task is not marked as acknowledged")
	}
	var outputs []state.Output
	if err := n.store.View(func(tx *state.Tx) (err error) { outputs, err = tx.Outputs(); return err }); err != nil {
		t.Fatal(err)
	}
	if len(outputs) != 1 || outputs[0] != (state.Output{TaskID: taskID(1), Step: 1}) {
		t.Errorf("outputs = %v, want that of the command", outputs)
	}
}

// TestClockAhead lets the clock be years ahead during a sweep, and then right
// again: what ran does not run again although its id is forgotten.
func TestClockAhead(t *testing.T) {
	n := newNode(t)
	n.accept(1, "switch.on", "check:a")
	n.ended(1)
	n.w.put("a", 0)
	if err := n.store.Sweep(t0.Add(10 * 365 * 24 * time.Hour)); err != nil {
		t.Fatal(err)
	}
	if r := n.deliver(1, "switch.on", "check:a").GetRefused(); r.GetReason() != gate.ReasonWindowPassed || !strings.Contains(r.GetMessage(), "clock") {
		t.Errorf("delivered again = %v, want it refused", r)
	}
	n.w.want(t, map[string]int{})
}

// TestNotStarted leaves nothing to undo and no output behind.
func TestNotStarted(t *testing.T) {
	n := newNode(t)
	n.w.on("apply p", func(context.Context) error {
		return &tasks.ReasonError{Reason: tasks.ReasonCommandNotStarted, Unchanged: true, Err: errBoom}
	})
	n.accept(1, "switch.press", "once:p")
	want(t, n.ended(1), failed, notNeeded, "COMMAND_NOT_STARTED")
	if err := n.store.View(func(tx *state.Tx) error {
		if more, err := tx.HasOutput(taskID(1)); err != nil || more {
			t.Errorf("HasOutput = %v, %v", more, err)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if sr := n.steps(1)[0]; sr.GetAttempts() != 1 || !strings.Contains(sr.GetError(), "boom") {
		t.Errorf("step = %v, want the attempt and its error", sr)
	}
}

// TestExitWhileAway: a command ended by itself while the agent was away, past
// the deadline. How it ended is what counts.
func TestExitWhileAway(t *testing.T) {
	n := newNode(t)
	reached := make(chan struct{}, 1)
	n.w.on("apply p", func(ctx context.Context) error {
		reached <- struct{}{}
		<-ctx.Done()
		return ctx.Err()
	})
	n.accept(1, "switch.press", "once:p", func(l *taskv1.TaskLeaf) { l.Deadline = durationpb.New(time.Minute) })
	<-reached
	n.halt()
	n.w.on("apply p", func(context.Context) error {
		return &tasks.ReasonError{Reason: tasks.ReasonCommandExit, Command: &taskv1.CommandOutcome{ExitCode: 7}, Err: errors.New("exited with code 7")}
	})
	n.clock.move(time.Hour)
	n.open()
	n.start()
	rec := n.ended(1)
	want(t, rec, failed, notPossible, "COMMAND_EXIT")
	if sr := n.steps(1)[0]; sr.GetCommand().GetExitCode() != 7 {
		t.Errorf("command = %v, want code 7", sr.GetCommand())
	}
}

func TestUnfinished(t *testing.T) {
	n := newNode(t)
	block := func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }
	n.w.on("apply b", block)
	n.accept(2, "switch.on", "b")
	n.accept(1, "switch.on", "a")
	n.ended(1)
	got, err := n.e.Unfinished(t.Context())
	if err != nil || len(got) != 1 || got[0].GetTaskId() != taskID(2) || !proto.Equal(got[0], &agentv1.UnfinishedTask{
		TaskId: taskID(2), LeafHash: n.record(2).GetLeafHash(), State: n.record(2).GetState(),
	}) {
		t.Errorf("Unfinished = %v, %v", got, err)
	}
}
