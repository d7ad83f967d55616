package dispatch

import (
	"context"
	"errors"
	"fmt"
	"strings"

	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	auditv1 "github.com/gpuaas/millwright/proto/millwright/audit/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"

	"github.com/gpuaas/millwright/controlplane/internal/crash"
	"github.com/gpuaas/millwright/controlplane/internal/eventlog"
	"github.com/gpuaas/millwright/controlplane/internal/store"
)

// answer takes a node's answer to an assignment. That it accepted is said again
// by the event, which carries what a server needs to know the task.
func (d *Dispatcher) answer(ctx context.Context, s *session, a *agentv1.AssignmentAnswer) error {
	crash.Point("server.answer.received")
	s.mu.Lock()
	taskID, known := s.sent[a.GetAssignmentId()]
	delete(s.sent, a.GetAssignmentId())
	s.mu.Unlock()
	if !known || a.GetAccepted() != nil && !a.GetAccepted().GetKnown() {
		return nil
	}
	crash.Point("server.answer.before")
	if err := d.cfg.Log.Commit(ctx, func(tx *eventlog.Tx) error { return d.answered(tx, s, taskID, a) }); err != nil {
		return unavailable(s, "store an answer", err)
	}
	crash.Point("server.answer.committed")
	s.want(func() {
		s.assignDue = true
		s.eager = s.eager && a.GetDeferred() == nil
	})
	return nil
}

func (d *Dispatcher) answered(tx *eventlog.Tx, s *session, taskID string, a *agentv1.AssignmentAnswer) error {
	row, err := tx.Task(taskID)
	if err != nil {
		return err
	}
	if row.GetTask().GetState() != taskv1.TaskState_TASK_STATE_ASSIGNED || row.GetAssignmentId() != a.GetAssignmentId() {
		return nil // its events have said more already
	}
	switch p := a.GetAnswer().(type) {
	case *agentv1.AssignmentAnswer_Accepted:
		return d.knownAlready(tx, s, taskID, p.Accepted)
	case *agentv1.AssignmentAnswer_Refused:
		p.Refused.Reason, p.Refused.Message = shorten(p.Refused.GetReason()), shorten(p.Refused.GetMessage())
		return tx.Append(s.peer.ID, &auditv1.LogEntry{Entry: &auditv1.LogEntry_TaskRefused{TaskRefused: &auditv1.TaskRefused{
			TaskId: taskID, Node: s.peer.Node, Answer: p.Refused}}})
	case *agentv1.AssignmentAnswer_Deferred:
		p.Deferred.Reason, p.Deferred.Message = shorten(p.Deferred.GetReason()), shorten(p.Deferred.GetMessage())
		if err := tx.Append(s.peer.ID, &auditv1.LogEntry{Entry: &auditv1.LogEntry_TaskDeferred{TaskDeferred: &auditv1.TaskDeferred{
			TaskId: taskID, Node: s.peer.Node, Answer: p.Deferred}}}); err != nil {
			return err
		}
		return cancelQueued(tx, d.cfg.Actor, taskID)
	}
	return fmt.Errorf("answer to assignment %s says nothing", a.GetAssignmentId())
}

// knownAlready holds a task that the node has had before, when the event that
// says so is not to come: it fell into a gap of the journal. Else the task would
// be sent and answered as known for ever. If it still goes on, its later events
// settle it.
func (d *Dispatcher) knownAlready(tx *eventlog.Tx, s *session, taskID string, a *agentv1.Accepted) error {
	journal, err := tx.Journal(s.peer.Node, s.journalID)
	if err != nil && !errors.Is(err, store.ErrNotFound) {
		return err
	}
	if a.GetJournalId() != s.journalID || a.GetSeq() > journal.GetLastSeq() {
		return nil // its event is on the way
	}
	return tx.Append(d.cfg.Actor, &auditv1.LogEntry{Entry: &auditv1.LogEntry_TaskDecided{TaskDecided: &auditv1.TaskDecided{
		TaskId: taskID, Node: s.peer.Node, State: taskv1.TaskState_TASK_STATE_HELD, Reason: eventlog.ReasonEventsLost,
		Message: fmt.Sprintf("node %s has taken it before, and the events that say what became of it are lost; "+
			"look at the node, then settle it: millctl task resolve %s --as abandon; if it is still wanted: millctl task retry %s",
			s.peer.Node, taskID, taskID),
	}}})
}

// shorten keeps the words of an answer short, since every list shows them.
func shorten(s string) string {
	if len(s) <= maxWords {
		return s
	}
	return strings.ToValidUTF8(s[:maxWords], "") + "..."
}

// cancelQueued ends a task that came back to the queue after someone had asked
// to cancel it.
func cancelQueued(tx *eventlog.Tx, actor, taskID string) error {
	row, err := tx.Task(taskID)
	if err != nil || !row.GetTask().GetCancelRequested() || row.GetTask().GetState() != taskv1.TaskState_TASK_STATE_QUEUED {
		return err
	}
	return tx.Append(actor, &auditv1.LogEntry{Entry: &auditv1.LogEntry_TaskDecided{TaskDecided: &auditv1.TaskDecided{
		TaskId: taskID, Node: row.GetTask().GetNode(), State: taskv1.TaskState_TASK_STATE_CANCELLED,
		Reason: "CANCELLED", Message: "cancelled before the node took it",
	}}})
}
