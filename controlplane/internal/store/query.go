package store

import (
	"fmt"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	auditv1 "github.com/gpuaas/millwright/proto/millwright/audit/v1"
	serverv1 "github.com/gpuaas/millwright/proto/millwright/server/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// TaskQuery says which tasks a page holds. A field that is not set matches all.
type TaskQuery struct {
	Nodes         []string
	States        []taskv1.TaskState
	Kinds         []string
	CreatedAfter  time.Time // at or after
	CreatedBefore time.Time
	Labels        []*taskv1.Label
	Project       string

	// Before is the create index below which the page begins; 0 for the newest.
	Before uint64
	// Limit is the size of the page, at least 1.
	Limit int
	// MaxBytes is about the size of the page in bytes; it holds at least one
	// task where there is one. At least 1.
	MaxBytes int
	// ScanLimit bounds how many tasks are looked at for one page, at least 1. A
	// page may hold fewer tasks than Limit because of it, and still not be the
	// last.
	ScanLimit int
}

// TaskPage is one page.
type TaskPage struct {
	Tasks []*serverv1.TaskRow
	// Next is the Before of the next page; 0 after the last.
	Next uint64
}

// Match reports whether q's filter takes t.
func (q *TaskQuery) Match(t *taskv1.Task) bool {
	created := t.GetCreateTime().AsTime()
	switch {
	case len(q.Nodes) > 0 && !slices.Contains(q.Nodes, t.GetNode()),
		len(q.States) > 0 && !slices.Contains(q.States, t.GetState()),
		len(q.Kinds) > 0 && !slices.Contains(q.Kinds, t.GetKind()),
		q.Project != "" && q.Project != t.GetProject(),
		!q.CreatedAfter.IsZero() && created.Before(q.CreatedAfter),
		!q.CreatedBefore.IsZero() && !created.Before(q.CreatedBefore):
		return false
	}
	for _, want := range q.Labels {
		if !slices.ContainsFunc(t.GetLabels(), func(have *taskv1.Label) bool {
			return have.GetKey() == want.GetKey() && have.GetValue() == want.GetValue()
		}) {
			return false
		}
	}
	return true
}

// Terminal reports whether a task in state s has ended for good.
func Terminal(s taskv1.TaskState) bool {
	switch s {
	case taskv1.TaskState_TASK_STATE_SUCCEEDED, taskv1.TaskState_TASK_STATE_FAILED,
		taskv1.TaskState_TASK_STATE_CANCELLED, taskv1.TaskState_TASK_STATE_REFUSED,
		taskv1.TaskState_TASK_STATE_EXPIRED, taskv1.TaskState_TASK_STATE_ABANDONED:
		return true
	default:
		return false
	}
}

// OpenAs reports among which open tasks one in state s is counted; 0 for none.
func OpenAs(s taskv1.TaskState) Open {
	switch s {
	case taskv1.TaskState_TASK_STATE_QUEUED:
		return Queued
	case taskv1.TaskState_TASK_STATE_ASSIGNED, taskv1.TaskState_TASK_STATE_ACCEPTED,
		taskv1.TaskState_TASK_STATE_WAITING, taskv1.TaskState_TASK_STATE_RUNNING,
		taskv1.TaskState_TASK_STATE_HELD:
		return Sent
	default:
		return 0
	}
}

func decodeEntry(e Entry) (*auditv1.LogEntry, error) {
	m := &auditv1.LogEntry{}
	if err := proto.Unmarshal(e.Bytes, m); err != nil {
		return nil, fmt.Errorf("decode log entry %d: %w", e.Index, err)
	}
	return m, nil
}
