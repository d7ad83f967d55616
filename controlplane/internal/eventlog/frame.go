package eventlog

import (
	"bytes"
	"errors"
	"fmt"
	"strings"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/millwright/pki/envelope"
	auditv1 "github.com/gpuaas/millwright/proto/millwright/audit/v1"
	serverv1 "github.com/gpuaas/millwright/proto/millwright/server/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"

	"github.com/gpuaas/millwright/controlplane/internal/store"
)

const (
	// maxSteps bounds the step numbers that a node may report.
	maxSteps = 1000
	// maxFrame is the largest frame that is carried into its task, in bytes.
	maxFrame = 1 << 20
	// maxTask is how large a task may become by what its node says, in bytes:
	// with what authorised it, it must fit an answer.
	maxTask = 4 << 20
)

// kindResolve is the kind by which a person settles a held task.
const kindResolve = "task.resolve"

// frame carries a node's event into its task. A frame whose payload this
// release does not know is kept as bytes and concerns no task.
func (t *Tx) frame(e *auditv1.LogEntry, f *auditv1.NodeFrame) (*taskv1.TaskEvent, error) {
	size := len(f.GetFrame())
	if size > maxFrame {
		return nil, fmt.Errorf("the event has %d bytes; at most %d are carried into a task", size, maxFrame)
	}
	event := &taskv1.Event{}
	if err := proto.Unmarshal(f.GetFrame(), event); err != nil {
		return nil, fmt.Errorf("decode event: %w", err)
	}
	if event.GetHealth() != nil {
		return nil, t.health(e, f, event)
	}
	kind, id, apply := t.reading(event)
	if id == "" {
		return nil, t.opened(f.GetNode(), event.GetJournalOpened())
	}
	row, err := t.Task(id)
	if errors.Is(err, store.ErrNotFound) && event.GetAccepted() != nil {
		row, err = t.restore(e, event.GetAccepted())
	}
	if err != nil {
		return nil, err
	}
	if row.GetTask().GetNode() != f.GetNode() {
		return nil, fmt.Errorf("task %s belongs to another node", id)
	}
	if err := check(event, row); err != nil {
		return nil, err
	}
	if n := proto.Size(row.GetTask()); n+size > maxTask {
		return nil, fmt.Errorf("task %s has %d bytes already; at most %d are kept of one", id, n, maxTask)
	}
	stays, err := t.staysLost(row.GetTask(), f.GetNode(), event)
	if err != nil {
		return nil, err
	}
	if stays {
		return t.event(e, row, kind, nil), nil
	}
	// Who tells of a task has it: the word of a node whose task was not sent
	// by this server, as after a restore, stands for an assignment.
	row.Generation = f.GetGeneration()
	ev := t.event(e, row, kind, apply)
	if event.GetWallTime() != nil {
		ev.EventTime = event.GetWallTime()
	}
	if event.GetIntentChanged() != nil {
		ev.Late = false // an intent outlives its task by design
	}
	if err := t.settleIntent(row.GetTask(), event); err != nil {
		return nil, err
	}
	return ev, t.resolved(row, event)
}

// staysLost reports whether a task stays held for its lost journal: a stream of
// that journal may be read for a little longer than the node has a new one, and
// what it says of a task that goes on there is over. That a task has ended there
// counts.
func (t *Tx) staysLost(task *taskv1.Task, name string, event *taskv1.Event) (bool, error) {
	lost := task.GetState() == taskv1.TaskState_TASK_STATE_HELD && task.GetReason() == ReasonJournalLost
	if !lost || event.GetFinished() != nil || event.GetIntentChanged() != nil {
		return false, nil
	}
	node, err := t.Node(name)
	if err != nil {
		return false, err
	}
	return node.GetJournalId() != event.GetJournalId(), nil
}

// check refuses an event that says what cannot be.
func check(event *taskv1.Event, row *serverv1.TaskRow) error {
	switch p := event.GetPayload().(type) {
	case *taskv1.Event_Accepted:
		if !bytes.Equal(p.Accepted.GetLeafHash(), row.GetTask().GetLeafHash()) {
			return fmt.Errorf("task %s was accepted with another leaf", row.GetTask().GetId())
		}
	case *taskv1.Event_StepEnded:
		if p.StepEnded.GetStep() >= maxSteps {
			return fmt.Errorf("step %d: at most %d are counted", p.StepEnded.GetStep(), maxSteps)
		}
	case *taskv1.Event_Finished:
		if !store.Terminal(p.Finished.GetState()) {
			return fmt.Errorf("task %s finished as %s, which is no end", row.GetTask().GetId(), p.Finished.GetState())
		}
	}
	return nil
}

// reading returns the type of an event, its task, and what it changes. The id
// is empty when it concerns no task.
func (t *Tx) reading(event *taskv1.Event) (kind, id string, apply func(*serverv1.TaskRow, *taskv1.TaskEvent)) {
	when := event.GetWallTime()
	switch p := event.GetPayload().(type) {
	case *taskv1.Event_Accepted:
		return "ACCEPTED", p.Accepted.GetTaskId(), func(row *serverv1.TaskRow, _ *taskv1.TaskEvent) {
			task := row.GetTask()
			task.AuthorizedBy, task.AcceptTime = p.Accepted.GetAuthorizedBy(), when
			task.JournalId = event.GetJournalId()
			if task.GetState() != taskv1.TaskState_TASK_STATE_RUNNING {
				t.to(task, taskv1.TaskState_TASK_STATE_ACCEPTED)
			}
		}
	case *taskv1.Event_Waiting:
		return "WAITING", p.Waiting.GetTaskId(), func(row *serverv1.TaskRow, ev *taskv1.TaskEvent) {
			t.to(row.GetTask(), taskv1.TaskState_TASK_STATE_WAITING)
			ev.Reason, ev.Message = p.Waiting.GetReason(), p.Waiting.GetMessage()
			t.condition(row.GetTask(), "Waiting", ev.Reason, ev.Message)
		}
	case *taskv1.Event_Planned:
		return "PLANNED", p.Planned.GetTaskId(), func(row *serverv1.TaskRow, ev *taskv1.TaskEvent) {
			row.Task.Plan, row.Task.PlanDigest = p.Planned.GetPlan(), p.Planned.GetPlanDigest()
			if row.Task.State == taskv1.TaskState_TASK_STATE_WAITING {
				t.to(row.GetTask(), taskv1.TaskState_TASK_STATE_ACCEPTED)
			}
			ev.Message = steps(len(p.Planned.GetPlan().GetSteps()))
		}
	case *taskv1.Event_Started:
		return "STARTED", p.Started.GetTaskId(), func(row *serverv1.TaskRow, _ *taskv1.TaskEvent) {
			row.Task.StartTime = when
			t.to(row.GetTask(), taskv1.TaskState_TASK_STATE_RUNNING)
		}
	case *taskv1.Event_StepEnded:
		return "STEP_ENDED", p.StepEnded.GetTaskId(), func(row *serverv1.TaskRow, ev *taskv1.TaskEvent) {
			putStep(row.GetTask(), p.StepEnded.GetStep(), p.StepEnded.GetOutcome())
			ev.Message = stepMessage(row.GetTask(), p.StepEnded)
			ClearConditions(&row.Task.Conditions, "Waiting")
		}
	}
	return t.readingOfEnd(event)
}

// readingOfEnd is reading for what comes late in a task's life.
func (t *Tx) readingOfEnd(event *taskv1.Event) (kind, id string, apply func(*serverv1.TaskRow, *taskv1.TaskEvent)) {
	switch p := event.GetPayload().(type) {
	case *taskv1.Event_StepWaiting:
		return "STEP_WAITING", p.StepWaiting.GetTaskId(), func(row *serverv1.TaskRow, ev *taskv1.TaskEvent) {
			ev.Reason = p.StepWaiting.GetReason()
			ev.Message = fmt.Sprintf("step %d: %s", p.StepWaiting.GetStep(), p.StepWaiting.GetMessage())
			t.condition(row.GetTask(), "Waiting", ev.Reason, ev.Message)
		}
	case *taskv1.Event_Resumed:
		return "RESUMED", p.Resumed.GetTaskId(), func(row *serverv1.TaskRow, ev *taskv1.TaskEvent) {
			ev.Message = fmt.Sprintf("at step %d: %s", p.Resumed.GetStep(), p.Resumed.GetFound())
			if p.Resumed.GetRebooted() {
				ev.Reason = "REBOOTED"
			}
			t.condition(row.GetTask(), "Resumed", ev.Reason, ev.Message)
		}
	case *taskv1.Event_Undoing:
		return "UNDOING", p.Undoing.GetTaskId(), func(row *serverv1.TaskRow, ev *taskv1.TaskEvent) {
			ev.Reason, ev.Message = p.Undoing.GetReason(), p.Undoing.GetMessage()
			ClearConditions(&row.Task.Conditions, "Waiting")
			if row.GetTask().GetState() == taskv1.TaskState_TASK_STATE_HELD { // a person has said so
				t.to(row.GetTask(), taskv1.TaskState_TASK_STATE_RUNNING)
			}
			t.condition(row.GetTask(), "Undoing", ev.Reason, ev.Message)
		}
	case *taskv1.Event_Held:
		return "HELD", p.Held.GetTaskId(), func(row *serverv1.TaskRow, ev *taskv1.TaskEvent) {
			ev.Reason, ev.Message = p.Held.GetReason(), p.Held.GetMessage()
			t.to(row.GetTask(), taskv1.TaskState_TASK_STATE_HELD)
			row.Task.Reason, row.Task.Message = ev.Reason, ev.Message
			putSteps(row.GetTask(), p.Held.GetSteps())
		}
	case *taskv1.Event_Finished:
		f := p.Finished
		return stateWord(f.GetState()), f.GetTaskId(), func(row *serverv1.TaskRow, ev *taskv1.TaskEvent) {
			ev.Reason, ev.Message = f.GetReason(), f.GetMessage()
			t.end(row.GetTask(), f.GetState(), event.GetWallTime(), ev)
			row.Task.Undo, row.Task.Result, row.Task.AssertedBy = f.GetUndo(), f.GetResult(), f.GetAssertedBy()
			if len(f.GetPlanDigest()) > 0 {
				row.Task.PlanDigest = f.GetPlanDigest()
			}
			putSteps(row.GetTask(), f.GetSteps())
		}
	case *taskv1.Event_IntentChanged:
		c := p.IntentChanged
		return "INTENT_" + strings.TrimPrefix(c.GetState().String(), "INTENT_STATE_"), c.GetTaskId(), func(_ *serverv1.TaskRow, ev *taskv1.TaskEvent) {
			ev.Reason, ev.Message = c.GetKey(), c.GetMessage()
		}
	}
	return "", "", nil
}

// to moves a task that has not ended to a state on its node, and drops what was
// true only of an earlier one.
func (t *Tx) to(task *taskv1.Task, state taskv1.TaskState) {
	task.State = state
	task.Reason, task.Message = "", ""
	ClearConditions(&task.Conditions, "Deferred", "Waiting")
}

func putStep(task *taskv1.Task, i uint32, outcome *taskv1.StepOutcome) {
	for uint32(len(task.Steps)) <= i {
		task.Steps = append(task.Steps, &taskv1.StepOutcome{})
	}
	task.Steps[i] = outcome
}

func putSteps(task *taskv1.Task, steps []*taskv1.StepOutcome) {
	if len(steps) <= maxSteps {
		for i, s := range steps {
			putStep(task, uint32(i), s)
		}
	}
}

func stepMessage(task *taskv1.Task, s *taskv1.StepEnded) string {
	words := []string{fmt.Sprintf("step %d", s.GetStep())}
	if steps := task.GetPlan().GetSteps(); int(s.GetStep()) < len(steps) {
		words = append(words, steps[s.GetStep()].GetTitle())
	}
	words = append(words, strings.ToLower(strings.TrimPrefix(s.GetOutcome().GetPhase().String(), "STEP_PHASE_")))
	if c := s.GetOutcome().GetCommand(); c != nil && c.GetSignal() == 0 {
		words = append(words, fmt.Sprintf("exit code %d", c.GetExitCode()))
	} else if c != nil {
		words = append(words, fmt.Sprintf("signal %d", c.GetSignal()))
	}
	if msg := s.GetOutcome().GetError(); msg != "" {
		words = append(words, msg)
	}
	return strings.Join(words, ": ")
}

// opened tells of a journal that began because the one before was lost.
func (t *Tx) opened(node string, o *taskv1.JournalOpened) error {
	if o == nil || o.GetReason() == taskv1.JournalReason_JOURNAL_REASON_JOINED {
		return nil
	}
	return t.loseIntents(node)
}

// restore makes a task known again from what its node accepted.
func (t *Tx) restore(e *auditv1.LogEntry, a *taskv1.TaskAccepted) (*serverv1.TaskRow, error) {
	hash := envelope.LeafHash(a.GetSignedLeaf().GetLeaf())
	if !bytes.Equal(hash[:], a.GetLeafHash()) {
		return nil, fmt.Errorf("restore task %s: its leaf has another hash", a.GetTaskId())
	}
	if err := t.cfg.Verify(a.GetEnvelope(), a.GetSignedLeaf()); err != nil {
		return nil, fmt.Errorf("restore task %s: %w", a.GetTaskId(), err)
	}
	leaf, err := envelope.DecodeLeaf(a.GetSignedLeaf().GetLeaf())
	if err != nil {
		return nil, fmt.Errorf("restore task %s: %w", a.GetTaskId(), err)
	}
	if leaf.GetTaskId() != a.GetTaskId() || leaf.GetNode() != e.GetNodeFrame().GetNode() {
		return nil, fmt.Errorf("restore task %s: its leaf is of task %s and node %s", a.GetTaskId(), leaf.GetTaskId(), leaf.GetNode())
	}
	row, err := t.newTask(e, a.GetSignedLeaf(), t.PutEnvelope(a.GetEnvelope()))
	if err != nil {
		return nil, err
	}
	row.Generation = e.GetNodeFrame().GetGeneration()
	t.RaiseGeneration()
	return row, nil
}

func stateWord(s taskv1.TaskState) string {
	return strings.TrimPrefix(s.String(), "TASK_STATE_")
}

func steps(n int) string {
	if n == 1 {
		return "1 step"
	}
	return fmt.Sprintf("%d steps", n)
}
