package executor

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/millwright/agent/internal/crash"
	"github.com/gpuaas/millwright/agent/internal/gate"
	"github.com/gpuaas/millwright/agent/internal/state"
	"github.com/gpuaas/millwright/pki/envelope"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// The codes of answers that the executor makes itself.
const (
	reasonNoCredit   = "NO_CREDIT"
	reasonOutboxFull = "OUTBOX_FULL"
	reasonDiskFull   = "DISK_FULL"
	reasonIDReused   = "ID_REUSED"
)

// fullRetry is when a task that found the disk full is offered again.
const fullRetry = 30 * time.Second

// rememberFor is how much longer than its window a task id is remembered.
const rememberFor = 24 * time.Hour

// Deliver answers an assignment. What it accepts is durable when it returns,
// and is carried out by Run. A task that it knows is accepted again and nothing
// changes. What it defers or refuses leaves no trace in the journal.
func (e *Executor) Deliver(ctx context.Context, a *agentv1.Assignment) *agentv1.AssignmentAnswer {
	accepted, err := e.deliver(ctx, a)
	out := &agentv1.AssignmentAnswer{AssignmentId: a.GetAssignmentId()}
	var refusal *gate.Refusal
	var deferral *gate.Deferral
	switch {
	case err == nil:
		out.Answer = &agentv1.AssignmentAnswer_Accepted{Accepted: accepted}
	case errors.As(err, &refusal):
		out.Answer = &agentv1.AssignmentAnswer_Refused{Refused: &agentv1.Refused{Reason: refusal.Reason, Message: refusal.Message}}
	case errors.As(err, &deferral):
		out.Answer = deferred(deferral)
	default:
		e.log.ErrorContext(ctx, "task could not be accepted", "err", err)
		out.Answer = deferred(&gate.Deferral{
			Reason: reasonDiskFull, Message: err.Error() + "; see to the disk of the node", RetryAfter: fullRetry,
		})
	}
	return out
}

func deferred(d *gate.Deferral) *agentv1.AssignmentAnswer_Deferred {
	return &agentv1.AssignmentAnswer_Deferred{Deferred: &agentv1.Deferred{
		Reason: d.Reason, Message: d.Message, RetryAfter: durationpb.New(d.RetryAfter),
	}}
}

func (e *Executor) deliver(ctx context.Context, a *agentv1.Assignment) (*agentv1.Accepted, error) {
	if known, err := e.known(a.GetSignedLeaf()); err != nil || known != nil {
		e.pickUp(taskIDOf(a.GetSignedLeaf()))
		return known, err
	}
	adm, err := e.cfg.Gate.Admit(ctx, a.GetEnvelope(), a.GetSignedLeaf())
	if err != nil {
		return nil, err
	}
	if size := e.cfg.Journal.UnackedBytes(); size >= OutboxLimit {
		return nil, &gate.Deferral{
			Reason:     reasonOutboxFull,
			Message:    fmt.Sprintf("the node holds %d bytes of events that the server has not acknowledged, and takes no task beyond %d", size, OutboxLimit),
			RetryAfter: 10 * time.Second,
		}
	}
	if err := e.checkRoom(adm.Leaf); err != nil {
		return nil, err
	}
	out := &agentv1.Accepted{}
	crash.Point("executor.accept.before")
	err = e.update(func(tx *state.Tx) error { return e.accept(tx, a, adm, out) })
	if errors.Is(err, state.ErrWrite) {
		e.pickUp(adm.Leaf.GetTaskId())
	}
	if err != nil {
		return nil, err
	}
	crash.Point("executor.accept.committed")
	if !out.GetKnown() {
		t := e.newTask(adm.Leaf.GetTaskId())
		t.log.InfoContext(ctx, "task accepted", "kind", adm.Leaf.GetKind(), "seq", out.GetSeq())
		e.launch(t)
	}
	return out, nil
}

// pickUp launches an accepted task that nobody carries on: the write that
// accepted it was reported as failed, and it is there all the same.
func (e *Executor) pickUp(id string) {
	t := e.newTask(id)
	if err := t.load(); err == nil && waits(t.rec) == 1 && !state.Terminal(t.rec.GetState()) {
		e.launch(t)
	}
}

// known answers for a leaf that was accepted before, whatever became of its
// window or of the keys since: nothing is carried out for it again. It needs no
// signature, since it tells nothing and changes nothing.
func (e *Executor) known(signed *taskv1.SignedLeaf) (*agentv1.Accepted, error) {
	id := taskIDOf(signed)
	hash := envelope.LeafHash(signed.GetLeaf())
	var out *agentv1.Accepted
	err := e.cfg.Journal.View(func(tx *state.Tx) error {
		seen, err := tx.Seen(id)
		switch {
		case errors.Is(err, state.ErrNotFound):
			return nil
		case err == nil && sameHash(seen.GetLeafHash(), hash[:]):
			out, err = knownAnswer(tx, id)
		}
		return err
	})
	return out, err
}

// taskIDOf is the task id of a leaf that nobody has verified, or "" when it
// cannot be decoded: the gate says what is wrong with it.
func taskIDOf(signed *taskv1.SignedLeaf) string {
	leaf := new(taskv1.TaskLeaf)
	if proto.Unmarshal(signed.GetLeaf(), leaf) != nil {
		return ""
	}
	return leaf.GetTaskId()
}

// kindOf is the kind that a leaf names, or "".
func kindOf(signed *taskv1.SignedLeaf) string {
	leaf := new(taskv1.TaskLeaf)
	if proto.Unmarshal(signed.GetLeaf(), leaf) != nil {
		return ""
	}
	return leaf.GetKind()
}

func knownAnswer(tx *state.Tx, id string) (*agentv1.Accepted, error) {
	meta, err := tx.Journal()
	if err != nil {
		return nil, err
	}
	out := &agentv1.Accepted{JournalId: meta.GetJournalId(), Known: true}
	switch rec, err := tx.Task(id); {
	case err == nil:
		out.Seq = rec.GetAcceptSeq()
	case !errors.Is(err, state.ErrNotFound):
		return nil, err
	}
	return out, nil
}

// accept makes a task durable: its record, its id, and its first event.
func (e *Executor) accept(tx *state.Tx, a *agentv1.Assignment, adm *gate.Admission, out *agentv1.Accepted) error {
	id, hash := adm.Leaf.GetTaskId(), adm.LeafHash[:]
	seen, err := tx.Seen(id)
	switch {
	case err == nil && sameHash(seen.GetLeafHash(), hash):
		known, err := knownAnswer(tx, id)
		if err != nil {
			return err
		}
		proto.Merge(out, known)
		return nil
	case err == nil:
		return &gate.Refusal{Reason: reasonIDReused, Message: fmt.Sprintf("task id %s was used for another task; make the task again with a new id", id)}
	case !errors.Is(err, state.ErrNotFound):
		return err
	}
	if err := e.checkCredit(tx, adm.Leaf); err != nil {
		return err
	}
	forget := adm.TaskSet.GetNotAfter().AsTime().Add(rememberFor)
	if gone := tx.Forgotten(); !forget.After(gone) {
		return &gate.Refusal{Reason: gate.ReasonWindowPassed, Message: fmt.Sprintf(
			"the node's clock has been ahead and it has forgotten which tasks that end before %s it has run; sign it again with a later not_after",
			gone.Add(-rememberFor).UTC().Format(time.RFC3339))}
	}
	tx.Issued(adm.TaskSet.GetIssuedAt().AsTime())
	if err := tx.PutSeen(id, &agentv1.SeenRecord{LeafHash: hash, ForgetAfter: timestamppb.New(forget)}); err != nil {
		return err
	}
	meta, err := tx.Journal()
	if err != nil {
		return err
	}
	seq, err := tx.Append(&taskv1.Event{Payload: &taskv1.Event_Accepted{Accepted: &taskv1.TaskAccepted{
		TaskId: id, LeafHash: hash, Envelope: a.GetEnvelope(), SignedLeaf: a.GetSignedLeaf(),
		TrustRootVersion: adm.RootVersion, AuthorizedBy: adm.Authorizers,
	}}})
	if err != nil {
		return err
	}
	out.JournalId, out.Seq = meta.GetJournalId(), seq
	return tx.PutTask(&agentv1.TaskRecord{
		TaskId: id, LeafHash: hash, Envelope: a.GetEnvelope(), SignedLeaf: a.GetSignedLeaf(),
		TrustRootVersion: adm.RootVersion, AuthorizedBy: adm.Authorizers,
		State: taskv1.TaskState_TASK_STATE_ACCEPTED, AcceptTime: e.now(), AcceptSeq: seq,
		BootId: e.cfg.BootID, Events: 1, Origin: state.OriginTask,
	})
}

// checkRoom defers a task that would find the disk full. The word of a person
// about a held task leaves nothing behind, and may be what makes room.
func (e *Executor) checkRoom(leaf *taskv1.TaskLeaf) error {
	if leaf.GetKind() == kindResolve {
		return nil
	}
	if err := e.cfg.Room(); err != nil {
		return &gate.Deferral{Reason: reasonDiskFull, Message: err.Error() + "; make room on the disk of the node", RetryAfter: fullRetry}
	}
	return nil
}

// checkCredit defers a task beyond the node's credits. Held tasks take none,
// nor does the word of a person about one.
func (e *Executor) checkCredit(tx *state.Tx, leaf *taskv1.TaskLeaf) error {
	if leaf.GetKind() == kindResolve {
		return nil
	}
	n := 0
	err := tx.Open(func(_ string, s taskv1.TaskState) error {
		if s != taskv1.TaskState_TASK_STATE_HELD {
			n++
		}
		return nil
	})
	if err == nil && n >= Credits {
		err = &gate.Deferral{
			Reason:     reasonNoCredit,
			Message:    fmt.Sprintf("the node has %d tasks that have not ended, and takes no more", n),
			RetryAfter: 5 * time.Second,
		}
	}
	return err
}
