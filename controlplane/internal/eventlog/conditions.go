package eventlog

import (
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// SetCondition puts c into list in place of the one with its type. The time of
// transition is kept while the status stays.
func SetCondition(list *[]*taskv1.Condition, now time.Time, c *taskv1.Condition) {
	c.TransitionTime = timestamppb.New(now)
	for i, old := range *list {
		if old.GetType() == c.GetType() {
			if old.GetStatus() == c.GetStatus() {
				c.TransitionTime = old.GetTransitionTime()
			}
			(*list)[i] = c
			return
		}
	}
	*list = append(*list, c)
}

// ClearConditions takes the conditions of the given types out of list.
func ClearConditions(list *[]*taskv1.Condition, types ...string) {
	*list = slices.DeleteFunc(*list, func(c *taskv1.Condition) bool { return slices.Contains(types, c.GetType()) })
}

func (t *Tx) condition(task *taskv1.Task, kind, reason, message string) {
	SetCondition(&task.Conditions, t.now, &taskv1.Condition{
		Type: kind, Status: taskv1.ConditionStatus_CONDITION_STATUS_TRUE, Reason: reason, Message: message,
	})
}

// condition returns the condition of a type; nil when there is none.
func condition(task *taskv1.Task, kind string) *taskv1.Condition {
	for _, c := range task.GetConditions() {
		if c.GetType() == kind {
			return c
		}
	}
	return nil
}
