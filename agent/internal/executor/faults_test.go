package executor_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpuaas/millwright/agent/internal/executor"
	"github.com/gpuaas/millwright/agent/internal/gate"
	"github.com/gpuaas/millwright/agent/internal/state"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
)

// doubtJournal reports one chosen write as failed that is durable all the same,
// as when the mark beside the file could not be written.
type doubtJournal struct {
	*state.Store

	mu sync.Mutex
	at int // counts down with each write; guarded by mu
}

func (d *doubtJournal) Update(fn func(*state.Tx) error) error {
	if err := d.Store.Update(fn); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.at--; d.at == 0 {
		return fmt.Errorf("%w: %w", state.ErrWrite, syscall.EIO)
	}
	return nil
}

func (d *doubtJournal) missed() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.at > 0
}

// TestWriteInDoubt reports each write of a run in turn as failed though it is
// there, from the acceptance on. The task ends all the same, once.
func TestWriteInDoubt(t *testing.T) {
	for at, missed := 1, false; !missed; at++ {
		synctest.Test(t, func(t *testing.T) {
			n := newNode(t)
			synctest.Wait() // the boot is noted
			d := &doubtJournal{at: at}
			n.journal = func(s *state.Store) executor.Journal { d.Store = s; return d }
			n.restart("boot-1")
			synctest.Wait() // nothing is left to be found
			if a := n.deliver(1, "switch.on", "a check:b once:c"); a.GetAccepted() == nil && at > 1 {
				t.Fatalf("Deliver = %v, want accepted", a)
			}
			want(t, n.ended(1), succeeded, noUndo, "")
			n.w.want(t, map[string]int{"a": 1, "b": 1, "c": 1})
			if missed = d.missed(); missed && at < 10 {
				t.Errorf("only %d writes in a run of three steps", at-1)
			}
			// What was answered with not now is known when it comes again.
			if a := n.deliver(1, "switch.on", "a check:b once:c"); !a.GetAccepted().GetKnown() {
				t.Errorf("the second delivery = %v, want accepted as known", a)
			}
		})
	}
}

// TestRestoreInDoubt does the same with a restore, after which its lock is free.
func TestRestoreInDoubt(t *testing.T) {
	for at, missed := 1, false; !missed; at++ {
		synctest.Test(t, func(t *testing.T) {
			n := newNode(t)
			n.accept(1, "switch.on", "@k a")
			n.ended(1)
			n.w.put("a", 0)
			d := &doubtJournal{at: at}
			n.journal = func(s *state.Store) executor.Journal { d.Store = s; return d }
			n.restart("boot-2")
			n.until(func(ev *taskv1.Event) bool {
				return ev.GetIntentChanged().GetState() == taskv1.IntentState_INTENT_STATE_RESTORED
			})
			n.w.want(t, map[string]int{"a": 1})
			n.deliver(2, "switch.on", "@k b") // its acceptance may be the one in doubt
			want(t, n.ended(2), succeeded, noUndo, "")
			missed = d.missed()
		})
	}
}

// TestStepUnknownAfterReboot boots with an agent that does not know the steps of
// a task in flight: a person has to see to it.
func TestStepUnknownAfterReboot(t *testing.T) {
	n := newNode(t)
	reached := make(chan struct{}, 1)
	n.w.on("apply b", func(ctx context.Context) error {
		reached <- struct{}{}
		<-ctx.Done()
		return ctx.Err()
	})
	n.accept(1, "switch.on", "a b")
	<-reached
	n.halt()
	n.boot = "boot-2"
	n.open()
	n.e = executor.New(executor.Config{
		Journal: n.store, Gate: n.gate, Hosts: noHosts{}, Registry: n.w.kinds(), Clock: n.clock, Logger: discard(), BootID: n.boot, Room: anyRoom, Reboots: executor.RebootBudget{Most: 3, Within: 24 * time.Hour},
	})
	n.start()
	want(t, n.ended(1), held, noUndo, "UNDO_FAILED")
	if got := n.record(1).GetMessage(); !strings.Contains(got, "undo of step 1 (turn on b)") {
		t.Errorf("message = %q, want the step as the plan numbers it", got)
	}
}

// slowGate lets something happen while it decides about a restore.
type slowGate struct {
	openGate
	during func()
	err    error
}

func (g slowGate) Restore(ctx context.Context, env *taskv1.Envelope, signed *taskv1.SignedLeaf, v uint64) (*gate.Admission, error) {
	adm, err := g.openGate.Restore(ctx, env, signed, v)
	g.during()
	if g.err != nil {
		return nil, g.err
	}
	return adm, err
}

// TestIntentEndsBeforeItsRestore ends an intent by a task after the node has
// looked at it and before it restores or suspends it: what the task did stands.
func TestIntentEndsBeforeItsRestore(t *testing.T) {
	for name, refusal := range map[string]error{
		"allowed": nil, "denied": &gate.Refusal{Reason: gate.ReasonPolicyDenied, Message: "denied by line 3"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newNode(t)
				n.accept(1, "switch.on", "@k a")
				n.ended(1)
				n.halt()
				n.w.put("a", 0)
				var once sync.Once
				n.gate = slowGate{openGate: openGate{n.w.registry()}, err: refusal, during: func() {
					if refusal == nil && n.clock.Boot() < 2*time.Minute {
						return // the node may get there by itself
					}
					once.Do(func() {
						n.accept(2, "switch.forget", "@k b")
						n.ended(2)
					})
				}}
				n.boot = "boot-2"
				n.open()
				n.start()
				<-time.After(10 * time.Minute) // in the bubble
				synctest.Wait()
				n.w.want(t, map[string]int{"b": 1})
				if in := n.intent("k"); in != nil {
					t.Errorf("intent = %v, want none", in)
				}
			})
		})
	}
}

// TestRestoreOfUnknownKind starts an agent that does not know the kind of a
// restore in flight: the restore ends, and nothing waits for it.
func TestRestoreOfUnknownKind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.accept(1, "switch.on", "@k a")
		n.ended(1)
		n.w.put("a", 0)
		reached := make(chan struct{}, 1)
		n.w.on("apply a", func(ctx context.Context) error {
			reached <- struct{}{}
			<-ctx.Done()
			return ctx.Err()
		})
		n.restart("boot-2")
		<-reached
		n.halt()
		n.gate = slowGate{openGate: openGate{n.w.registry()}, during: func() {}, err: &gate.Refusal{Reason: gate.ReasonUnknownKind, Message: "unknown kind"}}
		n.open()
		n.e = executor.New(executor.Config{
			Journal: n.store, Gate: n.gate, Hosts: noHosts{}, Registry: tasks.NewRegistry(), Clock: n.clock, Logger: discard(), BootID: n.boot, Room: anyRoom, Reboots: executor.RebootBudget{Most: 3, Within: 24 * time.Hour},
		})
		n.start()
		n.until(func(ev *taskv1.Event) bool {
			return ev.GetIntentChanged().GetState() == taskv1.IntentState_INTENT_STATE_SUSPENDED
		})
		synctest.Wait()
		if err := n.store.View(func(tx *state.Tx) error {
			return tx.Open(func(id string, s taskv1.TaskState) error { return fmt.Errorf("%s is %v", id, s) })
		}); err != nil {
			t.Errorf("left open: %v", err)
		}
	})
}
