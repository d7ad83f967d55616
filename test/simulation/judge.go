package simulation

import (
	"context"
	"errors"
	"fmt"
	"strings"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

const heldState = taskv1.TaskState_TASK_STATE_HELD

var errHost = errors.New("the dice say no")

// restored forgets what only the lost part of the server's store can know. The
// operator makes the calls again.
func (o *operator) restored() {
	clear(o.told)
	for _, t := range o.orders {
		t.mu.Lock()
		t.created = false
		t.mu.Unlock()
	}
}

// states counts the states of the orders.
func (o *operator) states() map[string]int {
	out := map[string]int{}
	for _, t := range o.orders {
		out[t.end]++
	}
	return out
}

// judge holds what the server says against what happened to the nodes.
func (w *world) judge() {
	for _, t := range w.ops.orders {
		task := w.ops.get(t)
		t.end = strings.TrimPrefix(task.GetState().String(), "TASK_STATE_")
		if t.refused != "" {
			t.end = "REFUSED_AT_CREATION"
		}
		late := w.judgeHistory(t)
		w.judgeOrder(t, task, late)
	}
}

// judgeOrder judges one task. late says that its node had a word on it after
// the server had ended it.
func (w *world) judgeOrder(t *order, task *taskv1.Task, late bool) {
	n := t.node
	runs := 0
	if t.argv != nil {
		runs = n.Runs(t.argv...)
	}
	if runs > 1 {
		w.wrong("%s ran %d times", t.alias, runs)
	}
	if task == nil {
		if t.refused == "" {
			w.wrong("%s is not known at the end", t.alias)
		} else if runs > 0 && !w.server.restored {
			w.wrong("%s was refused (%s), and ran", t.alias, t.refused)
		}
		return
	}
	w.trace("%s %s: %s %s", t.alias, t.kind, t.end, task.GetReason())
	switch task.GetState() {
	case taskv1.TaskState_TASK_STATE_SUCCEEDED:
		if t.argv != nil && task.GetAssertedBy() == "" && runs != 1 {
			w.wrong("%s has succeeded, and ran %d times", t.alias, runs)
		}
		if (t.exits != 0 || t.blocks) && task.GetAssertedBy() == "" {
			w.wrong("%s has succeeded, and cannot", t.alias)
		}
	case taskv1.TaskState_TASK_STATE_REFUSED, taskv1.TaskState_TASK_STATE_EXPIRED:
		// A server that was restored does not know what it has assigned since the
		// copy was made, and may end it before the node has said so; then the
		// history tells.
		if runs != 0 && (!w.server.restored || !late) {
			w.wrong("%s is %s, and ran", t.alias, t.end)
		}
	case taskv1.TaskState_TASK_STATE_HELD:
		if !n.rebooted && !n.lost && !n.failed && !w.server.restored {
			w.wrong("%s is held (%s: %s), and nothing happened that it could be held for", t.alias, task.GetReason(), task.GetMessage())
		}
	default:
	}
}

// judgeHistory follows the states of a task through its history, and reports
// whether the node had a late word.
func (w *world) judgeHistory(t *order) (late bool) {
	if t.refused != "" {
		return false
	}
	r, err := w.ops.client.ListTaskEvents(context.Background(), &taskv1.ListTaskEventsRequest{Id: t.id, PageSize: 500})
	if err != nil {
		if !w.server.restored {
			w.wrong("history of %s: %v", t.alias, err)
		}
		return false
	}
	var ended taskv1.TaskState
	accepts := map[string]bool{}
	for _, e := range r.GetEvents() {
		late = late || e.GetLate()
		if ended != 0 && e.GetState() != ended {
			w.wrong("%s was %s, and then %s (%s)", t.alias, ended, e.GetState(), e.GetType())
		}
		if terminal(e.GetState()) {
			ended = e.GetState()
		}
		if e.GetType() == "ACCEPTED" && !e.GetLate() {
			accepts[fmt.Sprint(e.GetIndex())] = true
		}
	}
	if len(accepts) > 1 && !t.node.lost {
		w.wrong("%s was accepted %d times", t.alias, len(accepts))
	}
	return late
}
