package executor

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/millwright/agent/internal/clock"
	"github.com/gpuaas/millwright/agent/internal/crash"
	"github.com/gpuaas/millwright/agent/internal/gate"
	"github.com/gpuaas/millwright/agent/internal/state"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
)

const (
	// settleFor is how long after a boot a node may take to be as its intents
	// want it: units that systemd starts at boot may still be on their way.
	settleFor = 2 * time.Minute
	// restoreAgain is the wait after a round in which not all was seen to.
	restoreAgain    = 5 * time.Second
	maxRestoreAgain = time.Hour
)

// errTaken says that a restore has to wait for a task.
var errTaken = errors.New("its locks are taken by a task")

// reconcile sees to the intents once after each boot: what is not as an intent
// wants it is restored. It returns when all are seen to, or ctx ends.
func (e *Executor) reconcile(ctx context.Context) {
	keys, seen, err := e.intentsToSee()
	if err != nil {
		e.log.ErrorContext(ctx, "intents cannot be read", "err", err)
	}
	if err != nil {
		return
	}
	var early map[string]bool
	if !seen {
		early = e.earlyFirst(keys)
	}
	settled := e.earlySettled(early)
	if seen {
		return
	}
	begun := e.cfg.Clock.Boot()
	for pause := restoreAgain; len(keys) > 0; {
		settling := e.cfg.Clock.Boot()-begun < settleFor
		var left []string
		for _, key := range keys {
			patient := settling && !early[key]
			done, err := e.see(ctx, key, patient)
			if err != nil || !done {
				e.log.WarnContext(ctx, "intent is not yet seen to", "intent", key, "err", err)
				left = append(left, key)
			}
			if err == nil && done || errors.Is(err, errTaken) {
				settled(key)
			}
			if ctx.Err() != nil {
				return
			}
		}
		if keys = left; len(keys) == 0 {
			break
		}
		if !clock.Sleep(ctx, pause) {
			return
		}
		if !settling {
			pause = min(2*pause, maxRestoreAgain)
		}
	}
	if err := e.update(func(tx *state.Tx) error { tx.PutBootID(e.cfg.BootID); return nil }); err != nil {
		e.log.ErrorContext(ctx, "boot cannot be noted", "err", err)
		return
	}
	crash.Point("executor.boot.committed")
}

// earlySettled returns what is told of each early intent that need not be waited
// for any more. After the last of them, who waits for that is told.
func (e *Executor) earlySettled(early map[string]bool) func(key string) {
	waited := maps.Clone(early)
	tell := sync.OnceFunc(func() {
		if e.cfg.Early != nil {
			e.cfg.Early()
		}
	})
	settled := func(key string) {
		if delete(waited, key); len(waited) == 0 {
			tell()
		}
	}
	settled("")
	return settled
}

// earlyFirst puts the intents of kinds first whose goal does not come back by
// itself after a boot and on which others wait, and returns which these are.
func (e *Executor) earlyFirst(keys []string) map[string]bool {
	early := map[string]bool{}
	for _, key := range keys {
		in, err := e.intent(key)
		if err != nil {
			continue // it is looked at in its turn
		}
		var leaf taskv1.TaskLeaf
		if err := proto.Unmarshal(in.GetSignedLeaf().GetLeaf(), &leaf); err != nil {
			continue // so is this
		}
		kind, err := e.cfg.Registry.Kind(leaf.GetKind())
		if err == nil && kind.Early {
			early[key] = true
		}
	}
	slices.SortStableFunc(keys, func(a, b string) int {
		switch {
		case early[a] == early[b]:
			return 0
		case early[a]:
			return -1
		}
		return 1
	})
	return early
}

// intentsToSee returns the intents in force, and whether all were seen to in
// this boot already.
func (e *Executor) intentsToSee() (keys []string, seen bool, err error) {
	err = e.cfg.Journal.View(func(tx *state.Tx) error {
		if seen = tx.BootID() == e.cfg.BootID; seen {
			return nil
		}
		return tx.Intents(func(in *agentv1.IntentRecord) error {
			if in.GetState() == taskv1.IntentState_INTENT_STATE_ACTIVE {
				keys = append(keys, in.GetKey())
			}
			return nil
		})
	})
	return keys, seen, err
}

// see verifies one intent and restores it when the node is not as it wants.
// While patient it gives the node time to get there by itself. It returns true
// once there is nothing more to do for it.
func (e *Executor) see(ctx context.Context, key string, patient bool) (bool, error) {
	t, adm, done, err := e.claim(ctx, key)
	if t == nil {
		return done, err
	}
	defer t.releaseLocks()
	limited, unlimit := context.WithTimeout(ctx, stepTimeout)
	defer unlimit()
	err = t.check(limited, func() error { return adm.Kind.Verify(limited, e.cfg.Hosts.Prober(), adm.Spec) })
	if err == nil {
		t.log.InfoContext(ctx, "intent is verified after a boot", "intent", key)
		return true, nil
	}
	if patient || ctx.Err() != nil || !errors.Is(err, tasks.ErrNotSatisfied) {
		return false, err
	}
	t.log.WarnContext(ctx, "intent is restored", "intent", key, "err", err)
	return e.restore(ctx, t)
}

// claim makes a task that can restore an intent, and takes its locks, which its
// caller releases. Where there is nothing more to do for the intent it returns no
// task and true.
func (e *Executor) claim(ctx context.Context, key string) (t *task, adm *gate.Admission, done bool, err error) {
	in, err := e.intent(key)
	if errors.Is(err, state.ErrNotFound) {
		return nil, nil, true, nil
	}
	if err != nil {
		return nil, nil, false, err
	}
	if in.GetState() != taskv1.IntentState_INTENT_STATE_ACTIVE {
		return nil, nil, true, nil // a task has it
	}
	adm, err = e.cfg.Gate.Restore(ctx, in.GetEnvelope(), in.GetSignedLeaf(), in.GetTrustRootVersion())
	var refusal *gate.Refusal
	if errors.As(err, &refusal) {
		return nil, nil, true, e.suspend(in, refusal.Message)
	}
	if err != nil {
		return nil, nil, false, err
	}
	t = e.newRestore(in, adm)
	if t.grant = e.locks.try(t.id, adm.Kind.Locks(adm.Spec)); t.grant == nil {
		return nil, nil, false, errTaken
	}
	if now, err := e.intent(key); err != nil || !sameIntent(now, in) {
		t.releaseLocks()
		return nil, nil, false, err // a task had it before the locks were taken: look again
	}
	return t, adm, false, nil
}

func (e *Executor) intent(key string) (in *agentv1.IntentRecord, err error) {
	err = e.cfg.Journal.View(func(tx *state.Tx) error {
		in, err = tx.Intent(key)
		return err
	})
	return in, err
}

// sameIntent reports whether no task has touched an intent since it was read.
func sameIntent(a, b *agentv1.IntentRecord) bool {
	return a.GetTaskId() == b.GetTaskId() && a.GetState() == b.GetState()
}

// newRestore is a task of the node's own that brings an intent back.
func (e *Executor) newRestore(in *agentv1.IntentRecord, adm *gate.Admission) *task {
	t := e.newTask("restore-" + uuid.NewString())
	t.admit(adm)
	t.spec = adm.Kind.ForRestore(adm.Spec)
	t.resumed = true
	t.fresh = &agentv1.TaskRecord{
		TaskId: t.id, LeafHash: adm.LeafHash[:], Envelope: in.GetEnvelope(), SignedLeaf: in.GetSignedLeaf(),
		TrustRootVersion: in.GetTrustRootVersion(), State: taskv1.TaskState_TASK_STATE_ACCEPTED,
		AcceptTime: e.now(), Origin: state.OriginReconcile,
	}
	t.rec = t.fresh
	return t
}

// restore plans and carries out. A plan that would disturb more than the signer
// allowed is not carried out.
func (e *Executor) restore(ctx context.Context, t *task) (bool, error) {
	plan, err := t.planned(ctx)
	if err != nil {
		return false, fmt.Errorf("plan the restore: %w", err)
	}
	for _, w := range plan.GetInTheWay() {
		if len(w.GetWork()) > 0 {
			return false, fmt.Errorf("%s has jobs on the node that a restore would disturb, and it does not wait for them: it is tried again later", w.GetManager())
		}
	}
	encoded, digest, err := tasks.MarshalPlan(plan)
	if err != nil {
		return false, err
	}
	if refusal := t.checkPlan(plan, digest); refusal != nil {
		return false, refusal
	}
	if err := t.freeze(plan, encoded, digest); err != nil && t.load() != nil {
		return false, err // it is not there
	}
	e.run(ctx, t)
	return t.rec.GetState() == succeeded, nil
}

// endRestore tells what came of a restore and forgets its record. An intent
// whose restore could not even be undone is suspended.
func (t *task) endRestore(tx *state.Tx, rec *agentv1.TaskRecord) error {
	if t.kind == nil {
		return nil // this agent does not know it; the next look suspends the intent
	}
	key, _ := t.kind.Intent(t.spec)
	ev := &taskv1.IntentChanged{Key: key, State: taskv1.IntentState_INTENT_STATE_RESTORED, Message: "the node was not as it should be, and is again"}
	in, err := tx.Intent(key)
	if err != nil && !errors.Is(err, state.ErrNotFound) {
		return err
	}
	if err == nil {
		ev.TaskId = in.GetTaskId()
	}
	if rec.GetState() != succeeded {
		ev.State = taskv1.IntentState_INTENT_STATE_ACTIVE
		ev.Message = "it could not be restored: " + rec.GetMessage()
		if rec.GetUndo() == taskv1.UndoState_UNDO_STATE_NOT_POSSIBLE && err == nil {
			ev.State, in.State = taskv1.IntentState_INTENT_STATE_SUSPENDED, taskv1.IntentState_INTENT_STATE_SUSPENDED
			if err := tx.PutIntent(in); err != nil {
				return err
			}
		}
	}
	_, err = tx.Append(&taskv1.Event{Payload: &taskv1.Event_IntentChanged{IntentChanged: ev}})
	return err
}

// suspend stops restoring an intent that is no longer allowed.
func (e *Executor) suspend(in *agentv1.IntentRecord, why string) error {
	return e.update(func(tx *state.Tx) error {
		now, err := tx.Intent(in.GetKey())
		if errors.Is(err, state.ErrNotFound) || err == nil && !sameIntent(now, in) {
			return nil // a task has it
		}
		if err != nil {
			return err
		}
		in.State = taskv1.IntentState_INTENT_STATE_SUSPENDED
		if err := tx.PutIntent(in); err != nil {
			return err
		}
		_, err = tx.Append(&taskv1.Event{Payload: &taskv1.Event_IntentChanged{IntentChanged: &taskv1.IntentChanged{
			Key: in.GetKey(), State: in.GetState(), TaskId: in.GetTaskId(), Message: why,
		}}})
		return err
	})
}
