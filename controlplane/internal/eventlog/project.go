package eventlog

import (
	"errors"
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/millwright/pki/envelope"
	auditv1 "github.com/gpuaas/millwright/proto/millwright/audit/v1"
	serverv1 "github.com/gpuaas/millwright/proto/millwright/server/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"

	"github.com/gpuaas/millwright/controlplane/internal/store"
)

// Retry times of a deferred task are held between these.
const (
	minRetry = time.Second
	// MaxRetry is how long a deferred task waits at most.
	MaxRetry = time.Hour
)

// project carries an entry into tasks and nodes. It returns what the entry
// means for a task, or nil when it concerns none.
func (t *Tx) project(e *auditv1.LogEntry) (*taskv1.TaskEvent, error) {
	switch b := e.GetEntry().(type) {
	case *auditv1.LogEntry_NodeFrame:
		return t.frame(e, b.NodeFrame)
	case *auditv1.LogEntry_TaskCreated:
		return t.created(e, b.TaskCreated)
	case *auditv1.LogEntry_TaskAssigned:
		return t.assigned(e, b.TaskAssigned)
	case *auditv1.LogEntry_TaskDeferred:
		return t.deferred(e, b.TaskDeferred)
	case *auditv1.LogEntry_TaskRefused:
		return t.refused(e, b.TaskRefused)
	case *auditv1.LogEntry_TaskDecided:
		return t.decided(e, b.TaskDecided)
	case *auditv1.LogEntry_CancelRequested:
		return t.cancelRequested(e, b.CancelRequested)
	default:
		return nil, t.projectNode(e)
	}
}

// projectNode carries an entry that concerns no task into its node.
func (t *Tx) projectNode(e *auditv1.LogEntry) error {
	switch b := e.GetEntry().(type) {
	case *auditv1.LogEntry_NodeJoined:
		return t.joined(e, b.NodeJoined)
	case *auditv1.LogEntry_NodeEvicted:
		node, err := t.Node(b.NodeEvicted.GetNode())
		if err != nil {
			return err
		}
		node.Evicted, node.EvictReason, node.EvictIndex = true, b.NodeEvicted.GetReason(), e.GetIndex()
		t.PutNode(node)
		return nil
	case *auditv1.LogEntry_TokenCreated:
		node, err := t.nodeOrNew(b.TokenCreated.GetNode())
		if err != nil {
			return err
		}
		t.PutNode(node)
		return nil
	case *auditv1.LogEntry_JournalChanged:
		node, err := t.nodeOrNew(b.JournalChanged.GetNode())
		if err != nil {
			return err
		}
		node.JournalId = b.JournalChanged.GetNewJournalId()
		node.Generation = max(node.GetGeneration(), b.JournalChanged.GetGeneration())
		t.PutNode(node)
		return t.forgetHealth(b.JournalChanged.GetNode())
	case *auditv1.LogEntry_JournalGap:
		g := b.JournalGap
		return t.foundOnNode(g.GetNode(), "JournalGap", "FRAMES_LOST",
			fmt.Sprintf("events %d to %d of journal %s are gone for good", g.GetFromSeq(), g.GetToSeq()-1, g.GetJournalId()))
	case *auditv1.LogEntry_JournalFork:
		f := b.JournalFork
		return t.foundOnNode(f.GetNode(), "JournalFork", "CHAIN_BROKEN",
			fmt.Sprintf("event %d of journal %s does not fit what was stored: two hosts may share the identity, or the node's state was altered; look at the node, then evict it and join it again", f.GetSeq(), f.GetJournalId()))
	case *auditv1.LogEntry_JoinDenied, *auditv1.LogEntry_SecretChanged:
		return nil
	}
	return errors.New("log entry of an unknown type")
}

func (t *Tx) joined(e *auditv1.LogEntry, j *auditv1.NodeJoined) error {
	node, err := t.nodeOrNew(j.GetNode())
	if err != nil {
		return err
	}
	t.PutNode(&serverv1.NodeRow{
		Name: j.GetNode(), Generation: j.GetGeneration(), JoinTime: e.GetRecordTime(),
		KeySha256: j.GetKeySha256(), Facts: node.GetFacts(), AgentVersion: node.GetAgentVersion(),
		Kinds: node.GetKinds(), JournalId: node.GetJournalId(), SessionEpoch: node.GetSessionEpoch(),
		BootId: node.GetBootId(), TrustRootVersion: node.GetTrustRootVersion(), EvictIndex: node.GetEvictIndex(),
	})
	return t.forgetHealth(j.GetNode())
}

func (t *Tx) created(e *auditv1.LogEntry, c *auditv1.TaskCreated) (*taskv1.TaskEvent, error) {
	if env := c.GetEnvelope(); env != nil {
		t.PutEnvelope(env)
	}
	row, err := t.newTask(e, c.GetSignedLeaf(), c.GetEnvelopeSha256())
	if err != nil {
		return nil, err
	}
	row.RequestId = c.GetRequestId()
	row.Task.CreatedBy = e.GetActor()
	for _, id := range c.GetKeyIds() {
		row.Task.AuthorizedBy = append(row.Task.AuthorizedBy, t.cfg.Authorizer(id))
	}
	return t.event(e, row, "CREATED", nil), nil
}

// newTask returns the row of a task that is not stored yet, in the queue.
func (t *Tx) newTask(e *auditv1.LogEntry, signed *taskv1.SignedLeaf, envelopeSHA []byte) (*serverv1.TaskRow, error) {
	leaf := &taskv1.TaskLeaf{}
	if err := proto.Unmarshal(signed.GetLeaf(), leaf); err != nil {
		return nil, fmt.Errorf("decode leaf: %w", err)
	}
	env, err := t.Envelope(envelopeSHA)
	if err != nil {
		return nil, err
	}
	set := &taskv1.TaskSet{}
	if err := proto.Unmarshal(env.GetPayload(), set); err != nil {
		return nil, fmt.Errorf("decode task set: %w", err)
	}
	if _, err := t.Task(leaf.GetTaskId()); !errors.Is(err, store.ErrNotFound) {
		return nil, fmt.Errorf("create task %s: it exists: %w", leaf.GetTaskId(), err)
	}
	hash := envelope.LeafHash(signed.GetLeaf())
	row := &serverv1.TaskRow{
		SignedLeaf: signed, EnvelopeSha256: envelopeSHA,
		Task: &taskv1.Task{
			Id: leaf.GetTaskId(), Node: leaf.GetNode(), Kind: leaf.GetKind(), Revision: leaf.GetRevision(),
			Mode: leaf.GetMode(), State: taskv1.TaskState_TASK_STATE_QUEUED, Spec: t.cfg.Spec(leaf),
			CreateTime: e.GetRecordTime(), IssuedAt: set.GetIssuedAt(),
			NotBefore: set.GetNotBefore(), NotAfter: set.GetNotAfter(),
			RetryOf: leaf.GetRetryOf(), Project: leaf.GetProject(), Labels: leaf.GetLabels(),
			Cause: leaf.GetCause(), RequestReason: leaf.GetReason(),
			CreateIndex: e.GetIndex(), UpdateIndex: e.GetIndex(), LeafHash: hash[:],
		},
	}
	t.tasks[leaf.GetTaskId()] = row
	return row, nil
}

func (t *Tx) assigned(e *auditv1.LogEntry, a *auditv1.TaskAssigned) (*taskv1.TaskEvent, error) {
	return t.changeTask(e, a.GetTaskId(), "ASSIGNED", func(row *serverv1.TaskRow, _ *taskv1.TaskEvent) {
		row.AssignmentId, row.SessionEpoch, row.Generation = a.GetAssignmentId(), a.GetSessionEpoch(), a.GetGeneration()
		row.RetryTime = nil
		row.Task.State = taskv1.TaskState_TASK_STATE_ASSIGNED
		row.Task.JournalId = a.GetJournalId()
	})
}

func (t *Tx) deferred(e *auditv1.LogEntry, d *auditv1.TaskDeferred) (*taskv1.TaskEvent, error) {
	return t.changeTask(e, d.GetTaskId(), "DEFERRED", func(row *serverv1.TaskRow, ev *taskv1.TaskEvent) {
		a := d.GetAnswer()
		if was := condition(row.Task, "Deferred"); was.GetReason() != a.GetReason() {
			ClearConditions(&row.Task.Conditions, "Deferred")
		}
		t.condition(row.Task, "Deferred", a.GetReason(), a.GetMessage())
		// What was deferred for long is tried more rarely, since each try is kept.
		since := t.now.Sub(condition(row.Task, "Deferred").GetTransitionTime().AsTime())
		wait := min(max(a.GetRetryAfter().AsDuration(), since/8, minRetry), MaxRetry)
		row.RetryTime = timestamppb.New(t.now.Add(wait))
		row.AssignmentId = ""
		row.Task.State = taskv1.TaskState_TASK_STATE_QUEUED
		ev.Reason, ev.Message = a.GetReason(), a.GetMessage()
	})
}

func (t *Tx) refused(e *auditv1.LogEntry, r *auditv1.TaskRefused) (*taskv1.TaskEvent, error) {
	return t.changeTask(e, r.GetTaskId(), "REFUSED", func(row *serverv1.TaskRow, ev *taskv1.TaskEvent) {
		state := taskv1.TaskState_TASK_STATE_REFUSED
		if r.GetAnswer().GetReason() == "WINDOW_PASSED" {
			state = taskv1.TaskState_TASK_STATE_EXPIRED
			ev.Type = "EXPIRED"
		}
		ev.Reason, ev.Message = r.GetAnswer().GetReason(), r.GetAnswer().GetMessage()
		t.end(row.Task, state, e.GetRecordTime(), ev)
		row.Task.Undo = taskv1.UndoState_UNDO_STATE_NOT_NEEDED
	})
}

func (t *Tx) cancelRequested(e *auditv1.LogEntry, c *auditv1.CancelRequested) (*taskv1.TaskEvent, error) {
	return t.changeTask(e, c.GetTaskId(), "CANCEL_REQUESTED", func(row *serverv1.TaskRow, ev *taskv1.TaskEvent) {
		row.Task.CancelRequested = true
		row.CancelBy, row.CancelReason = e.GetActor(), c.GetReason()
		ev.Message = c.GetReason()
	})
}

// decided carries a state that the server gave by itself.
func (t *Tx) decided(e *auditv1.LogEntry, d *auditv1.TaskDecided) (*taskv1.TaskEvent, error) {
	kind := stateWord(d.GetState())
	if d.GetState() == taskv1.TaskState_TASK_STATE_QUEUED {
		kind = "REQUEUED"
	}
	row, err := t.Task(d.GetTaskId())
	if err != nil {
		return nil, err
	}
	if d.GetReason() == ReasonJournalLost {
		if err := t.loseIntentOf(row.GetTask()); err != nil {
			return nil, err
		}
	}
	return t.event(e, row, kind, func(row *serverv1.TaskRow, ev *taskv1.TaskEvent) {
		ev.Reason, ev.Message = d.GetReason(), d.GetMessage()
		switch d.GetState() {
		case taskv1.TaskState_TASK_STATE_QUEUED:
			row.AssignmentId = ""
			row.Task.State = d.GetState()
		case taskv1.TaskState_TASK_STATE_CANCELLED, taskv1.TaskState_TASK_STATE_EXPIRED:
			t.end(row.Task, d.GetState(), e.GetRecordTime(), ev)
			row.Task.Undo = taskv1.UndoState_UNDO_STATE_NOT_NEEDED
		case taskv1.TaskState_TASK_STATE_SUCCEEDED, taskv1.TaskState_TASK_STATE_ABANDONED:
			t.end(row.Task, d.GetState(), e.GetRecordTime(), ev)
			if d.GetReason() == reasonResolved {
				row.Task.AssertedBy = e.GetActor()
			}
		default:
			row.Task.State = d.GetState()
			row.Task.Reason, row.Task.Message = d.GetReason(), d.GetMessage()
		}
	}), nil
}

// end gives a task its last state.
func (t *Tx) end(task *taskv1.Task, state taskv1.TaskState, when *timestamppb.Timestamp, ev *taskv1.TaskEvent) {
	task.State, task.EndTime = state, when
	task.Reason, task.Message = ev.GetReason(), ev.GetMessage()
	ClearConditions(&task.Conditions, "Deferred", "Waiting", "Undoing", "Resumed")
}

// changeTask carries an entry into one task. A task that has ended is not changed:
// the entry then only stands in its history, as late.
func (t *Tx) changeTask(e *auditv1.LogEntry, id, kind string, apply func(*serverv1.TaskRow, *taskv1.TaskEvent)) (*taskv1.TaskEvent, error) {
	row, err := t.Task(id)
	if err != nil {
		return nil, err
	}
	return t.event(e, row, kind, apply), nil
}

// event applies a change to row and returns what it means.
func (t *Tx) event(e *auditv1.LogEntry, row *serverv1.TaskRow, kind string, apply func(*serverv1.TaskRow, *taskv1.TaskEvent)) *taskv1.TaskEvent {
	ev := &taskv1.TaskEvent{
		Index: e.GetIndex(), TaskId: row.GetTask().GetId(), Node: row.GetTask().GetNode(),
		RecordTime: e.GetRecordTime(), EventTime: e.GetRecordTime(), Type: kind, Actor: e.GetActor(),
	}
	ended := store.Terminal(row.GetTask().GetState())
	if apply != nil {
		to := row
		if ended {
			to = proto.CloneOf(row) // what it would have become tells type and reason
		}
		apply(to, ev)
	}
	ev.Late = ended
	ev.State = row.GetTask().GetState()
	if !ended {
		row.Task.UpdateIndex = e.GetIndex()
		t.tasks[ev.TaskId] = row
	}
	return ev
}
