package ctl

import (
	"slices"
	"strings"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// next says what a person can do about a task, one command a line.
func next(t *taskv1.Task) []string {
	id := t.GetId()
	var lines []string
	switch t.GetState() {
	case taskv1.TaskState_TASK_STATE_HELD:
		if t.GetReason() == "JOURNAL_LOST" {
			return append(look(t),
				"on the node, see whether its command still runs: systemctl list-units 'millwright-task-"+id+"-*'",
				"then give the task up: millctl task resolve "+id+" --as abandon --reason '...'",
				"then, if it is still wanted: millctl task retry "+id)
		}
		return append(look(t),
			"look at the node, then settle the task in one of these ways:",
			"millctl task resolve "+id+" --as undo --reason '...'     (undo what can be undone)",
			"millctl task resolve "+id+" --as accept --reason '...'   (what it was to do is done)",
			"millctl task resolve "+id+" --as abandon --reason '...'  (give it up as it is)")
	case taskv1.TaskState_TASK_STATE_FAILED:
		lines = append(look(t), "when the cause is gone: millctl task retry "+id)
	case taskv1.TaskState_TASK_STATE_REFUSED:
		if t.GetReason() == "POLICY_DENIED" {
			lines = append(lines, "let the node's owner allow "+t.GetKind()+" in /etc/millwright/policy.yaml on "+t.GetNode())
		}
		lines = append(lines, "when the cause is gone: millctl task retry "+id)
	case taskv1.TaskState_TASK_STATE_EXPIRED:
		lines = append(lines, "see whether the node is connected: millctl node get "+t.GetNode(),
			"with more time: millctl task retry "+id+" --valid-for 72h")
	case taskv1.TaskState_TASK_STATE_CANCELLED, taskv1.TaskState_TASK_STATE_ABANDONED:
		lines = append(lines, "to run it again: millctl task retry "+id)
	case taskv1.TaskState_TASK_STATE_QUEUED, taskv1.TaskState_TASK_STATE_ASSIGNED:
		lines = append(lines, waiting(t), "follow it: millctl task watch "+id)
	case taskv1.TaskState_TASK_STATE_ACCEPTED, taskv1.TaskState_TASK_STATE_WAITING, taskv1.TaskState_TASK_STATE_RUNNING:
		lines = append(look(t), "follow it: millctl task watch "+id, "stop it: millctl task cancel "+id)
	default: // it succeeded, or waits for people
	}
	return lines
}

// waiting says what can be done for a task that its node has not taken.
func waiting(t *taskv1.Task) string {
	for _, c := range t.GetConditions() {
		if c.GetType() == "Deferred" && c.GetStatus() == taskv1.ConditionStatus_CONDITION_STATUS_TRUE {
			return "the node is asked again by itself; see to the cause on " + t.GetNode() + ": " + strings.TrimSpace(c.GetMessage())
		}
	}
	return "see whether the node is connected: millctl node get " + t.GetNode()
}

// look names the commands that show more of a task than its history.
func look(t *taskv1.Task) []string {
	var lines []string
	hasOutput := slices.ContainsFunc(t.GetSteps(), func(s *taskv1.StepOutcome) bool { return s.GetCommand() != nil })
	if hasOutput || len(t.GetOutputs()) > 0 {
		lines = append(lines, "see its output: millctl task logs "+t.GetId())
	}
	return lines
}
