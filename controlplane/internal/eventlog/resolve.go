package eventlog

import (
	"bytes"
	"errors"
	"fmt"

	auditv1 "github.com/gpuaas/millwright/proto/millwright/audit/v1"
	serverv1 "github.com/gpuaas/millwright/proto/millwright/server/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"

	"github.com/gpuaas/millwright/controlplane/internal/store"
)

// ReasonJournalLost is the reason of a task that is held because its node no
// longer has the journal that it was sent to.
const ReasonJournalLost = "JOURNAL_LOST"

// ReasonEventsLost is the reason of a task that is held because its node has
// taken it and the events that say what became of it are gone.
const ReasonEventsLost = "EVENTS_LOST"

// reasonResolved is the reason of a task that a person settled.
const reasonResolved = "RESOLVED"

// resolved settles the task that a succeeded task.resolve names when the node
// cannot say so itself: it has lost the journal that held it, or the events. A task that the
// node still knows is settled by the node's own event.
//
// A task that has ended on its node is not settled there: the node refuses the
// word. That its events are lost is known here alone, so that giving it up is.
func (t *Tx) resolved(row *serverv1.TaskRow, event *taskv1.Event) error {
	done := event.GetFinished().GetState() == taskv1.TaskState_TASK_STATE_SUCCEEDED
	refused := event.GetFinished().GetState() == taskv1.TaskState_TASK_STATE_REFUSED
	if row.GetTask().GetKind() != kindResolve || !done && !refused {
		return nil
	}
	spec := &taskv1.ResolveSpec{}
	if err := row.GetTask().GetSpec().UnmarshalTo(spec); err != nil {
		return fmt.Errorf("decode spec of task %s: %w", row.GetTask().GetId(), err)
	}
	held, err := t.Task(spec.GetTaskId())
	if errors.Is(err, store.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	task := held.GetTask()
	lost := done && task.GetReason() == ReasonJournalLost || task.GetReason() == ReasonEventsLost &&
		(done || spec.GetAs() == taskv1.ResolveAs_RESOLVE_AS_ABANDON)
	if task.GetState() != taskv1.TaskState_TASK_STATE_HELD || !lost ||
		task.GetNode() != row.GetTask().GetNode() || !bytes.Equal(task.GetLeafHash(), spec.GetLeafHash()) {
		return nil
	}
	state := taskv1.TaskState_TASK_STATE_ABANDONED
	if spec.GetAs() == taskv1.ResolveAs_RESOLVE_AS_ACCEPT {
		state = taskv1.TaskState_TASK_STATE_SUCCEEDED
	}
	t.followUps = append(t.followUps, followUp{row.GetTask().GetCreatedBy(), &auditv1.LogEntry{
		Entry: &auditv1.LogEntry_TaskDecided{TaskDecided: &auditv1.TaskDecided{
			TaskId: task.GetId(), Node: task.GetNode(), State: state, Reason: reasonResolved,
			Message: "settled by task " + row.GetTask().GetId(),
		}},
	}})
	return nil
}

// followUp is an entry that another one brings about.
type followUp struct {
	actor string
	entry *auditv1.LogEntry
}
