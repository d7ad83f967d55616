package dispatch

import (
	"context"
	"errors"
	"time"

	"github.com/google/uuid"

	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	auditv1 "github.com/gpuaas/millwright/proto/millwright/audit/v1"
	serverv1 "github.com/gpuaas/millwright/proto/millwright/server/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"

	"github.com/gpuaas/millwright/controlplane/internal/crash"
	"github.com/gpuaas/millwright/controlplane/internal/eventlog"
	"github.com/gpuaas/millwright/controlplane/internal/store"
)

// queuePage is how many tasks of a queue are read at a time.
const queuePage = 2 * maxCredits

// kindResolve needs no credit: it settles a task that holds none either.
const kindResolve = "task.resolve"

// assign records what the node has credit for, and then sends it.
func (d *Dispatcher) assign(ctx context.Context, s *session, stream Stream) error {
	for {
		ids, retryAt, err := d.choose(ctx, s)
		if err != nil {
			return unavailable(s, "read the queue", err)
		}
		s.mu.Lock()
		s.retryAt = retryAt
		s.mu.Unlock()
		if len(ids) == 0 {
			return nil
		}
		var out []*agentv1.Assignment
		crash.Point("server.assign.before")
		err = d.cfg.Log.Commit(ctx, func(tx *eventlog.Tx) error {
			out, err = d.record(tx, s, ids)
			return err
		})
		if err != nil {
			return s.stall("record an assignment", err)
		}
		if len(out) == 0 {
			return nil
		}
		crash.Point("server.assign.committed")
		for i, a := range out {
			s.mu.Lock()
			s.sent[a.GetAssignmentId()] = ids[i]
			s.mu.Unlock()
			if err := stream.Send(s.message(&agentv1.SessionResponse{Message: &agentv1.SessionResponse_Assignment{Assignment: a}})); err != nil {
				return err
			}
			crash.Point("server.assign.sent")
		}
	}
}

// choose returns the tasks to send now, the oldest first, and when the next one
// that was deferred may be tried; the zero time for never.
func (d *Dispatcher) choose(ctx context.Context, s *session) (ids []string, retryAt time.Time, err error) {
	now := d.cfg.Now()
	s.mu.Lock()
	eager := s.eager
	s.mu.Unlock()
	var free int
	var held bool
	err = d.cfg.Reader.View(ctx, func(v store.View) error {
		free, held, err = s.free(v)
		return err
	})
	// What needs no credit settles a held task: where none is held, the queue is
	// read no further than the credits reach.
	for after, more := uint64(0), true; more && err == nil && (free > 0 || held); {
		var rows []*serverv1.TaskRow
		err = d.cfg.Reader.View(ctx, func(v store.View) error {
			rows, err = v.OpenTasks(s.peer.Node, store.Queued, after, queuePage)
			return err
		})
		more = len(rows) == queuePage
		for _, row := range rows {
			after = row.GetTask().GetCreateIndex()
			retry := retryTime(row, now)
			switch {
			case !row.GetTask().GetNotAfter().AsTime().After(now):
				// The sweep is about to say so.
			case !eager && retry.After(now):
				if retryAt.IsZero() || retry.Before(retryAt) {
					retryAt = retry
				}
			case row.GetTask().GetKind() == kindResolve:
				ids = append(ids, row.GetTask().GetId())
			case free > 0:
				free--
				ids = append(ids, row.GetTask().GetId())
			}
		}
	}
	return ids, retryAt, err
}

// retryTime is when a task that was deferred may be sent again. One that is
// further off than any deferral is from before the clock was set back.
func retryTime(row *serverv1.TaskRow, now time.Time) time.Time {
	if row.GetRetryTime() == nil {
		return time.Time{}
	}
	at := row.GetRetryTime().AsTime()
	if at.Sub(now) > eventlog.MaxRetry {
		return now
	}
	return at
}

// free is how many credits the node has left, and whether a task is held. A held
// task keeps none.
func (s *session) free(v store.View) (free int, held bool, err error) {
	s.mu.Lock()
	free = int(s.credits)
	s.mu.Unlock()
	for after := uint64(0); ; {
		rows, err := v.OpenTasks(s.peer.Node, store.Sent, after, page)
		if err != nil {
			return 0, false, err
		}
		for _, row := range rows {
			after = row.GetTask().GetCreateIndex()
			switch {
			case row.GetTask().GetState() == taskv1.TaskState_TASK_STATE_HELD:
				held = true
			case row.GetTask().GetKind() != kindResolve:
				free--
			}
		}
		if len(rows) < page {
			return free, held, nil
		}
	}
}

// record commits the assignment of tasks that are still in the queue, if s is
// still the node's newest session and its journal is sound. Tasks that left the
// queue are taken out of ids.
func (d *Dispatcher) record(tx *eventlog.Tx, s *session, ids []string) ([]*agentv1.Assignment, error) {
	node, err := tx.Node(s.peer.Node)
	if err != nil {
		return nil, err
	}
	journal, err := tx.Journal(s.peer.Node, s.journalID)
	if err != nil && !errors.Is(err, store.ErrNotFound) {
		return nil, err
	}
	if node.GetSessionEpoch() != s.epoch || node.GetEvicted() || journal.GetForked() {
		return nil, nil
	}
	var out []*agentv1.Assignment
	for _, id := range ids {
		row, err := tx.Task(id)
		if err != nil {
			return nil, err
		}
		if row.GetTask().GetState() != taskv1.TaskState_TASK_STATE_QUEUED {
			continue
		}
		env, err := tx.Envelope(row.GetEnvelopeSha256())
		if err != nil {
			return nil, err
		}
		assignment := uuid.NewString()
		err = tx.Append(d.cfg.Actor, &auditv1.LogEntry{Entry: &auditv1.LogEntry_TaskAssigned{TaskAssigned: &auditv1.TaskAssigned{
			TaskId: id, Node: s.peer.Node, AssignmentId: assignment, JournalId: s.journalID,
			SessionEpoch: s.epoch, Generation: s.generation,
		}}})
		if err != nil {
			return nil, err
		}
		ids[len(out)] = id
		out = append(out, &agentv1.Assignment{AssignmentId: assignment, Envelope: env, SignedLeaf: row.GetSignedLeaf()})
	}
	return out, nil
}
