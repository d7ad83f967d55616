package eventlog_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/gpuaas/millwright/pki/envelope"
	"github.com/gpuaas/millwright/pki/pkitest"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	auditv1 "github.com/gpuaas/millwright/proto/millwright/audit/v1"
	serverv1 "github.com/gpuaas/millwright/proto/millwright/server/v1"
	systemv1 "github.com/gpuaas/millwright/proto/millwright/system/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"

	"github.com/gpuaas/millwright/controlplane/internal/eventlog"
	"github.com/gpuaas/millwright/controlplane/internal/store"
	"github.com/gpuaas/millwright/controlplane/internal/store/boltstore"
)

// fixture is a log on a real store, with a clock that tests set.
type fixture struct {
	t       testing.TB
	db      *boltstore.Store
	log     *eventlog.Log
	now     time.Time
	cluster *pkitest.Cluster
	seq     uint64
}

func newFixture(t testing.TB, cluster *pkitest.Cluster) *fixture {
	t.Helper()
	db, err := boltstore.Create(filepath.Join(t.TempDir(), "store.db"))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { _ = db.Run(ctx) })
	t.Cleanup(func() {
		cancel()
		wg.Wait()
		_ = db.Close()
	})
	f := &fixture{t: t, db: db, now: time.Unix(1_800_000_000, 0), cluster: cluster}
	f.log = eventlog.New(eventlog.Config{
		Writer: db, Now: func() time.Time { return f.now },
		Spec: func(l *taskv1.TaskLeaf) *anypb.Any {
			return &anypb.Any{TypeUrl: "type.googleapis.com/millwright.system.v1.CommandSpec", Value: l.GetSpec()}
		},
		Verify: func(env *taskv1.Envelope, signed *taskv1.SignedLeaf) error {
			_, err := cluster.Root.VerifyTaskSet(env, signed)
			return err
		},
	})
	return f
}

func (f *fixture) append(actor string, e *auditv1.LogEntry) {
	f.t.Helper()
	if err := f.log.Commit(context.Background(), func(tx *eventlog.Tx) error { return tx.Append(actor, e) }); err != nil {
		f.t.Fatalf("Append(%v): %v", e, err)
	}
}

// create adds a signed task for node n to the log.
func (f *fixture) create() (id string, signed *taskv1.SignedLeaf, env *taskv1.Envelope) {
	f.t.Helper()
	spec, err := proto.Marshal(&systemv1.CommandSpec{Argv: []string{"/bin/true"}})
	if err != nil {
		f.t.Fatal(err)
	}
	leaf := &taskv1.TaskLeaf{TaskId: pkitest.NewTaskID(f.t), Node: "n", Mode: taskv1.Mode_MODE_EXECUTE, Kind: "system.command", Revision: 1, Spec: spec}
	env, leaves := f.cluster.Sign(f.t, leaf)
	var sum []byte
	err = f.log.Commit(context.Background(), func(tx *eventlog.Tx) error {
		sum = tx.PutEnvelope(env)
		return tx.Append("alice", &auditv1.LogEntry{Entry: &auditv1.LogEntry_TaskCreated{TaskCreated: &auditv1.TaskCreated{
			TaskId: leaf.GetTaskId(), Node: "n", RequestId: "r", Envelope: env, EnvelopeSha256: sum, SignedLeaf: leaves[0],
			KeyIds: []string{"k"}}}})
	})
	if err != nil {
		f.t.Fatal(err)
	}
	return leaf.GetTaskId(), leaves[0], env
}

// frame adds a node's event to the log.
func (f *fixture) frame(e *taskv1.Event) {
	f.t.Helper()
	f.seq++
	e.JournalId, e.Seq = "j", f.seq
	b, err := proto.Marshal(e)
	if err != nil {
		f.t.Fatal(err)
	}
	f.append("node", &auditv1.LogEntry{Entry: &auditv1.LogEntry_NodeFrame{NodeFrame: &auditv1.NodeFrame{
		Node: "n", Generation: 1, JournalId: "j", Seq: f.seq, Frame: b}}})
}

func (f *fixture) task(id string) *serverv1.TaskRow {
	f.t.Helper()
	var row *serverv1.TaskRow
	err := f.db.View(context.Background(), func(v store.View) (err error) {
		row, err = v.Task(id)
		return err
	})
	if err != nil {
		f.t.Fatal(err)
	}
	return row
}

func (f *fixture) entries() []store.Entry {
	f.t.Helper()
	var out []store.Entry
	err := f.db.View(context.Background(), func(v store.View) (err error) {
		out, err = v.Entries(1, 1_000_000, 1<<30)
		return err
	})
	if err != nil {
		f.t.Fatal(err)
	}
	return out
}

// anyEvent is some event about a task.
func anyEvent(r *rand.Rand, id string, signed *taskv1.SignedLeaf, env *taskv1.Envelope) *taskv1.Event {
	hash := envelope.LeafHash(signed.GetLeaf())
	ends := []taskv1.TaskState{3, 9, 10, 11, 12, 13, 14}
	all := []*taskv1.Event{
		{Payload: &taskv1.Event_Accepted{Accepted: &taskv1.TaskAccepted{TaskId: id, LeafHash: hash[:], Envelope: env, SignedLeaf: signed}}},
		{Payload: &taskv1.Event_Waiting{Waiting: &taskv1.TaskWaiting{TaskId: id, Reason: "LOCKED"}}},
		{Payload: &taskv1.Event_Planned{Planned: &taskv1.TaskPlanned{TaskId: id, Plan: &taskv1.Plan{Kind: "k"}}}},
		{Payload: &taskv1.Event_Started{Started: &taskv1.TaskStarted{TaskId: id}}},
		{Payload: &taskv1.Event_StepEnded{StepEnded: &taskv1.StepEnded{TaskId: id, Step: r.Uint32N(3)}}},
		{Payload: &taskv1.Event_Resumed{Resumed: &taskv1.TaskResumed{TaskId: id, Rebooted: true}}},
		{Payload: &taskv1.Event_Undoing{Undoing: &taskv1.TaskUndoing{TaskId: id, Reason: "CANCELLED"}}},
		{Payload: &taskv1.Event_Held{Held: &taskv1.TaskHeld{TaskId: id, Reason: "OUTCOME_UNKNOWN"}}},
		{Payload: &taskv1.Event_Finished{Finished: &taskv1.TaskFinished{TaskId: id, State: ends[r.IntN(len(ends))]}}},
		{Payload: &taskv1.Event_IntentChanged{IntentChanged: &taskv1.IntentChanged{TaskId: id, Key: "mount:/x", State: taskv1.IntentState_INTENT_STATE_ACTIVE}}},
		{Payload: &taskv1.Event_JournalOpened{JournalOpened: &taskv1.JournalOpened{Reason: taskv1.JournalReason_JOURNAL_REASON_CORRUPT}}},
	}
	return all[r.IntN(len(all))]
}

// anyDecision is something that the server or its callers do to a task.
func anyDecision(r *rand.Rand, id string) *auditv1.LogEntry {
	states := []taskv1.TaskState{taskv1.TaskState_TASK_STATE_QUEUED, taskv1.TaskState_TASK_STATE_HELD, taskv1.TaskState_TASK_STATE_EXPIRED,
		taskv1.TaskState_TASK_STATE_CANCELLED, taskv1.TaskState_TASK_STATE_ABANDONED, taskv1.TaskState_TASK_STATE_ACCEPTED}
	all := []*auditv1.LogEntry{
		{Entry: &auditv1.LogEntry_TaskAssigned{TaskAssigned: &auditv1.TaskAssigned{TaskId: id, Node: "n", AssignmentId: "a", JournalId: "j", SessionEpoch: 3}}},
		{Entry: &auditv1.LogEntry_TaskDeferred{TaskDeferred: &auditv1.TaskDeferred{TaskId: id, Node: "n", Answer: &agentv1.Deferred{Reason: "DISK_FULL", RetryAfter: durationpb.New(time.Second)}}}},
		{Entry: &auditv1.LogEntry_CancelRequested{CancelRequested: &auditv1.CancelRequested{TaskId: id, Node: "n", Reason: "why"}}},
		{Entry: &auditv1.LogEntry_TaskDecided{TaskDecided: &auditv1.TaskDecided{TaskId: id, Node: "n", State: states[r.IntN(len(states))], Reason: "R", Message: "m"}}},
		{Entry: &auditv1.LogEntry_TaskRefused{TaskRefused: &auditv1.TaskRefused{TaskId: id, Node: "n", Answer: &agentv1.Refused{Reason: "POLICY_DENIED"}}}},
	}
	return all[r.IntN(len(all))]
}

// TestProjectionsFollowFromTheLog drives tasks through all that can happen, in
// any order, and checks what must hold whatever happens: indexes without a gap,
// states that do not change once terminal, and rows that come out the same when
// the log alone is read again.
func TestProjectionsFollowFromTheLog(t *testing.T) {
	t.Parallel()
	cluster := pkitest.New(t)
	for seed := range uint64(20) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			r := rand.New(rand.NewPCG(seed, 1))
			f := newFixture(t, cluster)
			var ids []string
			ended := map[string]*serverv1.TaskRow{}
			for range 5 {
				id, signed, env := f.create()
				ids = append(ids, id)
				for range 12 {
					f.now = f.now.Add(time.Second)
					if r.IntN(3) == 0 {
						f.append("someone", anyDecision(r, id))
					} else {
						f.frame(anyEvent(r, id, signed, env))
					}
					row := f.task(id)
					if was := ended[id]; was != nil && !proto.Equal(was, row) {
						t.Fatalf("a task that had ended changed: %s", cmp.Diff(was, row, protocmp.Transform()))
					}
					if store.Terminal(row.GetTask().GetState()) {
						ended[id] = row
					}
				}
			}
			if len(ended) == 0 {
				t.Error("no task ended; the test shows nothing")
			}
			again := replay(t, f)
			for _, id := range ids {
				if diff := cmp.Diff(f.task(id), again.task(id), protocmp.Transform()); diff != "" {
					t.Errorf("task %s from the log alone (-stored +again):\n%s", id, diff)
				}
			}
		})
	}
}

// replay appends the entries of a log to a new one, at the times that they
// have, and checks that each comes out with the same bytes.
func replay(t *testing.T, f *fixture) *fixture {
	t.Helper()
	again := newFixture(t, f.cluster)
	for i, e := range f.entries() {
		if e.Index != uint64(i+1) {
			t.Fatalf("entry %d has the index %d", i+1, e.Index)
		}
		entry, err := e.Decode()
		if err != nil {
			t.Fatal(err)
		}
		again.now = entry.GetRecordTime().AsTime()
		again.append(entry.GetActor(), entry)
	}
	if diff := cmp.Diff(f.entries(), again.entries(), protocmp.Transform()); diff != "" {
		t.Errorf("the log came out differently (-was +is):\n%s", diff)
	}
	return again
}

// A node that defers for days must not fill the log: each try is kept.
func TestDeferredForLongIsTriedRarely(t *testing.T) {
	t.Parallel()
	f := newFixture(t, pkitest.New(t))
	id, _, _ := f.create()
	defers := func(reason string) time.Duration {
		f.append("server", &auditv1.LogEntry{Entry: &auditv1.LogEntry_TaskAssigned{TaskAssigned: &auditv1.TaskAssigned{TaskId: id}}})
		f.append("node", &auditv1.LogEntry{Entry: &auditv1.LogEntry_TaskDeferred{TaskDeferred: &auditv1.TaskDeferred{
			TaskId: id, Answer: &agentv1.Deferred{Reason: reason, RetryAfter: durationpb.New(30 * time.Second)}}}})
		return f.task(id).GetRetryTime().AsTime().Sub(f.now)
	}
	tries, begin := 0, f.now
	for f.now.Sub(begin) < 7*24*time.Hour {
		wait := defers("POLICY_INVALID")
		if tries == 0 && wait != 30*time.Second {
			t.Errorf("first it waits %s, want what the node said", wait)
		}
		tries, f.now = tries+1, f.now.Add(wait)
	}
	if tries > 250 {
		t.Errorf("%d tries in 7 days", tries)
	}
	if wait := defers("DISK_FULL"); wait != 30*time.Second {
		t.Errorf("for another reason it waits %s, want what the node said", wait)
	}
}

func TestDecisionThatIsRefusedWritesNothing(t *testing.T) {
	t.Parallel()
	f := newFixture(t, pkitest.New(t))
	id, _, _ := f.create()
	before, row := f.entries(), f.task(id)
	changed := f.log.Changed()
	refused := errors.New("refused")
	err := f.log.Commit(t.Context(), func(tx *eventlog.Tx) error {
		if err := tx.Append("x", anyDecision(rand.New(rand.NewPCG(1, 1)), id)); err != nil {
			return err
		}
		return refused
	})
	if !errors.Is(err, refused) {
		t.Errorf("Commit = %v", err)
	}
	err = f.log.Commit(t.Context(), func(tx *eventlog.Tx) error {
		return tx.Append("x", &auditv1.LogEntry{Entry: &auditv1.LogEntry_TaskDecided{TaskDecided: &auditv1.TaskDecided{TaskId: "none"}}})
	})
	if !errors.Is(err, store.ErrNotFound) {
		t.Errorf("Commit for an unknown task = %v", err)
	}
	if diff := cmp.Diff(before, f.entries(), protocmp.Transform()); diff != "" {
		t.Errorf("log (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(row, f.task(id), protocmp.Transform()); diff != "" {
		t.Errorf("task (-want +got):\n%s", diff)
	}
	select {
	case <-changed:
		t.Error("a refused decision woke the watchers")
	default:
	}
	f.create()
	<-changed
}

// TestAcceptedWithAnotherLeaf checks that a node cannot pass off another leaf
// for one that was created.
func TestAcceptedWithAnotherLeaf(t *testing.T) {
	t.Parallel()
	f := newFixture(t, pkitest.New(t))
	id, signed, env := f.create()
	f.frame(&taskv1.Event{Payload: &taskv1.Event_Accepted{Accepted: &taskv1.TaskAccepted{TaskId: id, LeafHash: make([]byte, 32), SignedLeaf: signed, Envelope: env}}})
	if got := f.task(id).GetTask().GetState(); got != taskv1.TaskState_TASK_STATE_QUEUED {
		t.Errorf("task is %s", got)
	}
	last := f.entries()[1]
	entry, err := last.Decode()
	if err != nil || entry.GetNodeFrame().GetNotApplied() == "" || last.Event != nil {
		t.Errorf("entry = %v, %v", entry, err)
	}
}

// FuzzFrame checks that whatever bytes a node puts into a frame, they are
// stored and never stop the log.
// TestTaskOfALostJournalStaysHeld reads a stream of the old journal for longer
// than the node has a new one.
func TestTaskOfALostJournalStaysHeld(t *testing.T) {
	f := newFixture(t, pkitest.New(t))
	id, signed, env := f.create()
	hash := envelope.LeafHash(signed.GetLeaf())
	f.append("server", &auditv1.LogEntry{Entry: &auditv1.LogEntry_TaskAssigned{TaskAssigned: &auditv1.TaskAssigned{
		TaskId: id, Node: "n", AssignmentId: "a", JournalId: "j", SessionEpoch: 1, Generation: 1}}})
	f.append("node", &auditv1.LogEntry{Entry: &auditv1.LogEntry_JournalChanged{JournalChanged: &auditv1.JournalChanged{
		Node: "n", OldJournalId: "j", NewJournalId: "j2", Generation: 1}}})
	f.append("server", &auditv1.LogEntry{Entry: &auditv1.LogEntry_TaskDecided{TaskDecided: &auditv1.TaskDecided{
		TaskId: id, Node: "n", State: taskv1.TaskState_TASK_STATE_HELD, Reason: eventlog.ReasonJournalLost, Message: "look"}}})
	for _, e := range []*taskv1.Event{
		{Payload: &taskv1.Event_Accepted{Accepted: &taskv1.TaskAccepted{TaskId: id, LeafHash: hash[:], SignedLeaf: signed, Envelope: env}}},
		{Payload: &taskv1.Event_Started{Started: &taskv1.TaskStarted{TaskId: id}}},
	} {
		f.frame(e)
		if got := f.task(id).GetTask(); got.GetState() != taskv1.TaskState_TASK_STATE_HELD || got.GetReason() != eventlog.ReasonJournalLost {
			t.Errorf("after %T the task is %s (%s), want it held for its lost journal", e.GetPayload(), got.GetState(), got.GetReason())
		}
	}
	f.frame(&taskv1.Event{Payload: &taskv1.Event_Finished{Finished: &taskv1.TaskFinished{TaskId: id, State: taskv1.TaskState_TASK_STATE_SUCCEEDED}}})
	if got := f.task(id).GetTask().GetState(); got != taskv1.TaskState_TASK_STATE_SUCCEEDED {
		t.Errorf("a task that has ended there is %s, want SUCCEEDED", got)
	}
}

func FuzzFrame(f *testing.F) {
	fx := newFixture(f, pkitest.New(f))
	id, signed, env := fx.create()
	r := rand.New(rand.NewPCG(1, 2))
	for range 40 {
		b, err := proto.Marshal(anyEvent(r, id, signed, env))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		fx.seq++
		err := fx.log.Commit(t.Context(), func(tx *eventlog.Tx) error {
			return tx.Append("node", &auditv1.LogEntry{Entry: &auditv1.LogEntry_NodeFrame{NodeFrame: &auditv1.NodeFrame{
				Node: "n", JournalId: "j", Seq: fx.seq, Frame: b}}})
		})
		if err != nil {
			t.Errorf("frame %x was not stored: %v", b, err)
		}
	})
}
