package dispatch

import (
	"bytes"
	"context"
	"maps"
	"slices"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	auditv1 "github.com/gpuaas/millwright/proto/millwright/audit/v1"
	serverv1 "github.com/gpuaas/millwright/proto/millwright/server/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"

	"github.com/gpuaas/millwright/controlplane/internal/crash"
	"github.com/gpuaas/millwright/controlplane/internal/eventlog"
	"github.com/gpuaas/millwright/controlplane/internal/store"
)

// progress makes the session ready once all is stored that the node had when it
// said Hello: only then is it known what became of what was assigned before.
func (d *Dispatcher) progress(ctx context.Context, s *session, stored uint64) error {
	s.mu.Lock()
	waits := s.ready || s.behind || s.safe || max(stored, s.acked) < s.lastSeq
	s.mu.Unlock()
	if waits {
		return nil
	}
	var cancels []string
	crash.Point("server.reconcile.before")
	err := d.cfg.Log.Commit(ctx, func(tx *eventlog.Tx) (err error) {
		cancels, err = d.reconcile(tx, s)
		return err
	})
	if err != nil {
		return s.stall("settle what was assigned", err)
	}
	crash.Point("server.reconcile.committed")
	s.unfinished = nil // settled; a session holds as little as it can
	s.want(func() {
		s.ready, s.assignDue = true, true
		for _, id := range cancels {
			s.cancels[id] = struct{}{}
		}
	})
	return nil
}

// reconcile settles what was assigned in earlier sessions: what the node has is
// accepted, what it has not goes back to the queue. It returns the tasks that
// someone asked to cancel meanwhile.
func (d *Dispatcher) reconcile(tx *eventlog.Tx, s *session) (cancels []string, err error) {
	for after := uint64(0); ; {
		rows, err := tx.OpenTasks(s.peer.Node, store.Sent, after, page)
		if err != nil {
			return nil, err
		}
		for _, row := range rows {
			after = row.GetTask().GetCreateIndex()
			if row.GetTask().GetJournalId() != s.journalID {
				continue
			}
			back := false
			if row.GetTask().GetState() == taskv1.TaskState_TASK_STATE_ASSIGNED && row.GetSessionEpoch() < s.epoch {
				if back, err = d.settle(tx, s, row); err != nil {
					return nil, err
				}
			}
			if !back && row.GetTask().GetCancelRequested() {
				cancels = append(cancels, row.GetTask().GetId())
			}
		}
		if len(rows) < page {
			return cancels, nil
		}
	}
}

// settle decides about one assigned task, and reports whether it went back.
func (d *Dispatcher) settle(tx *eventlog.Tx, s *session, row *serverv1.TaskRow) (back bool, err error) {
	id := row.GetTask().GetId()
	decided := &auditv1.TaskDecided{TaskId: id, Node: s.peer.Node,
		State: taskv1.TaskState_TASK_STATE_QUEUED, Reason: "NOT_ACCEPTED",
		Message: "the session ended before the node accepted it"}
	back = !slices.ContainsFunc(s.unfinished, func(u *agentv1.UnfinishedTask) bool {
		return u.GetTaskId() == id && bytes.Equal(u.GetLeafHash(), row.GetTask().GetLeafHash())
	})
	if !back {
		decided.State, decided.Reason = taskv1.TaskState_TASK_STATE_ACCEPTED, "REPORTED"
		decided.Message = "the node has it, and the event that says so is lost"
	}
	if err := tx.Append(d.cfg.Actor, &auditv1.LogEntry{Entry: &auditv1.LogEntry_TaskDecided{TaskDecided: decided}}); err != nil {
		return false, err
	}
	if !back {
		return false, nil
	}
	return true, cancelQueued(tx, d.cfg.Actor, id)
}

// heartbeat notes that the node is there, and what has changed on it.
func (d *Dispatcher) heartbeat(ctx context.Context, s *session, h *agentv1.Heartbeat) error {
	crash.Point("server.heartbeat.received")
	if h.GetWallTime() != nil {
		offset := h.GetWallTime().AsTime().Sub(d.cfg.Now())
		s.mu.Lock()
		s.contact.ClockOffset, s.offsetAt = offset, d.cfg.Boot()
		s.mu.Unlock()
	}
	if err := d.goOn(ctx, s); err != nil || !h.GetHasConditions() {
		return err
	}
	if err := checkSaid("heartbeat", &agentv1.Heartbeat{Conditions: h.GetConditions()}); err != nil {
		return err
	}
	changed := false
	crash.Point("server.conditions.before")
	err := d.cfg.Log.Commit(ctx, func(tx *eventlog.Tx) error {
		node, err := tx.Node(s.peer.Node)
		if err != nil || node.GetSessionEpoch() != s.epoch {
			return err
		}
		if changed = !sameConditions(node.GetReported(), h.GetConditions()); changed {
			node.Reported = h.GetConditions()
			tx.PutNode(node)
		}
		return nil
	})
	if err != nil {
		return s.stall("store conditions", err)
	}
	crash.Point("server.conditions.committed")
	if changed {
		// What kept the node from taking tasks may be over.
		s.want(func() { s.eager, s.assignDue = true, true })
	}
	return nil
}

func sameConditions(a, b []*taskv1.Condition) bool {
	return proto.Equal(&serverv1.NodeRow{Reported: a}, &serverv1.NodeRow{Reported: b})
}

// sendCancels sends the requests to cancel that are wanted.
func (d *Dispatcher) sendCancels(ctx context.Context, s *session, stream Stream) error {
	s.mu.Lock()
	var ids []string
	if s.ready {
		ids = slices.Sorted(maps.Keys(s.cancels))
		clear(s.cancels)
	}
	s.mu.Unlock()
	for _, id := range ids {
		var row *serverv1.TaskRow
		err := d.cfg.Reader.View(ctx, func(v store.View) (err error) {
			row, err = v.Task(id)
			return err
		})
		if err != nil {
			return unavailable(s, "read a task", err)
		}
		task := row.GetTask()
		if store.OpenAs(task.GetState()) != store.Sent || task.GetJournalId() != s.journalID {
			continue
		}
		if err := stream.Send(s.message(&agentv1.SessionResponse{Message: &agentv1.SessionResponse_Cancel{Cancel: &agentv1.CancelRequest{
			TaskId: id, LeafHash: task.GetLeafHash(), RequestedBy: row.GetCancelBy(), Reason: row.GetCancelReason(),
		}}})); err != nil {
			return err
		}
		crash.Point("server.cancel.sent")
	}
	return nil
}

// seen is the row of a node's last word.
func (s *session) seen() *serverv1.SeenRow {
	s.mu.Lock()
	defer s.mu.Unlock()
	return &serverv1.SeenRow{Node: s.peer.Node, Time: timestamppb.New(s.contact.LastSeen), ClockOffsetMs: s.contact.ClockOffset.Milliseconds()}
}
