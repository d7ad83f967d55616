package taskv1

import (
	"context"
	"fmt"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	serverv1 "github.com/gpuaas/millwright/proto/millwright/server/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/proto/rpcerr"

	"github.com/gpuaas/millwright/controlplane/internal/store"
)

const (
	defaultPage = 100
	maxPage     = 1000
	// maxScan bounds how many tasks one page looks at; a filter that takes few
	// of them gets short pages.
	maxScan = 10_000
	// maxEventBytes bounds the log entries of one page.
	maxEventBytes = 1 << 20
	// maxPageBytes bounds the tasks of one page, so that it fits an answer.
	maxPageBytes = 2 << 20
	maxFilter    = 1000
)

// GetTask returns one task, with what authorised it.
func (s *Service) GetTask(ctx context.Context, req *taskv1.GetTaskRequest) (*taskv1.GetTaskResponse, error) {
	out := &taskv1.GetTaskResponse{}
	var row *serverv1.TaskRow
	err := s.cfg.Reader.View(ctx, func(v store.View) (err error) {
		if row, err = find(v, req.GetId()); err != nil {
			return err
		}
		out.SignedLeaf = row.GetSignedLeaf()
		out.Envelope, err = v.Envelope(row.GetEnvelopeSha256())
		return err
	})
	if err != nil {
		return nil, err
	}
	out.Task, err = s.whole(row)
	return out, err
}

func (s *Service) find(ctx context.Context, id string) (row *serverv1.TaskRow, err error) {
	err = s.cfg.Reader.View(ctx, func(v store.View) (err error) {
		row, err = find(v, id)
		return err
	})
	return row, err
}

// ListTasks returns one page of tasks, the newest first.
func (s *Service) ListTasks(ctx context.Context, req *taskv1.ListTasksRequest) (*taskv1.ListTasksResponse, error) {
	size, err := pageSize(req.GetPageSize())
	if err != nil {
		return nil, err
	}
	query, err := queryOf(req)
	if err != nil {
		return nil, err
	}
	query.Limit, query.MaxBytes, query.ScanLimit = size, maxPageBytes, maxScan
	filter := proto.CloneOf(req)
	filter.PageSize, filter.PageToken = 0, ""
	token, err := parsePageToken(req.GetPageToken(), filter)
	if err != nil {
		return nil, err
	}
	query.Before = token.before
	out := &taskv1.ListTasksResponse{}
	err = s.cfg.Reader.View(ctx, func(v store.View) error {
		if req.GetPageToken() == "" {
			token.watch = watchToken{v.Generation(), v.LastIndex()}
		}
		page, err := v.ListTasks(query)
		if err != nil {
			return err
		}
		for _, row := range page.Tasks {
			out.Tasks = append(out.Tasks, brief(row))
		}
		if token.before = page.Next; page.Next > 0 {
			out.NextPageToken = token.format(filter)
		}
		// The watch goes on from the first page: what changed since, while the
		// others were read, is told again rather than missed.
		out.WatchToken = token.watch.format()
		return nil
	})
	return out, err
}

func queryOf(req *taskv1.ListTasksRequest) (store.TaskQuery, error) {
	q := store.TaskQuery{Nodes: req.GetNodes(), States: req.GetStates(), Kinds: req.GetKinds(), Labels: req.GetLabels(), Project: req.GetProject()}
	var bad []rpcerr.Violation
	for name, n := range map[string]int{"nodes": len(q.Nodes), "states": len(q.States), "kinds": len(q.Kinds), "labels": len(q.Labels)} {
		if n > maxFilter {
			bad = append(bad, rpcerr.Violation{Field: name, Value: fmt.Sprint(n), Rule: fmt.Sprintf("at most %d are allowed", maxFilter)})
		}
	}
	for i, node := range q.Nodes {
		if node == "" || strings.ContainsRune(node, 0) {
			bad = append(bad, rpcerr.Violation{Field: fmt.Sprintf("nodes[%d]", i), Value: clip(node), Rule: "it must be a node's name"})
		}
	}
	for i, state := range q.States {
		if _, known := taskv1.TaskState_name[int32(state)]; !known || state == taskv1.TaskState_TASK_STATE_UNSPECIFIED {
			bad = append(bad, rpcerr.Violation{Field: fmt.Sprintf("states[%d]", i), Value: fmt.Sprint(int32(state)), Rule: "it must be a state that a task can have"})
		}
	}
	for name, at := range map[string]*timestamppb.Timestamp{"created_after": req.GetCreatedAfter(), "created_before": req.GetCreatedBefore()} {
		if at != nil && !at.IsValid() {
			bad = append(bad, rpcerr.Violation{Field: name, Rule: "it must be a valid time"})
		}
	}
	if req.GetCreatedAfter() != nil {
		q.CreatedAfter = req.GetCreatedAfter().AsTime()
	}
	if req.GetCreatedBefore() != nil {
		q.CreatedBefore = req.GetCreatedBefore().AsTime()
	}
	if len(bad) > 0 {
		return q, rpcerr.Invalid("BAD_FILTER", bad...)
	}
	return q, nil
}

func pageSize(n int32) (int, error) {
	switch {
	case n < 0 || n > maxPage:
		return 0, rpcerr.Invalid("MALFORMED", rpcerr.Violation{Field: "page_size", Value: fmt.Sprint(n),
			Rule: fmt.Sprintf("it must be between 1 and %d, or 0 for %d", maxPage, defaultPage)})
	case n == 0:
		return defaultPage, nil
	}
	return int(n), nil
}

// ListTaskEvents returns one page of a task's history, the oldest first.
func (s *Service) ListTaskEvents(ctx context.Context, req *taskv1.ListTaskEventsRequest) (*taskv1.ListTaskEventsResponse, error) {
	size, err := pageSize(req.GetPageSize())
	if err != nil {
		return nil, err
	}
	filter := &taskv1.ListTaskEventsRequest{Id: req.GetId()}
	token, err := parsePageToken(req.GetPageToken(), filter)
	if err != nil {
		return nil, err
	}
	out := &taskv1.ListTaskEventsResponse{}
	err = s.cfg.Reader.View(ctx, func(v store.View) error {
		row, err := find(v, req.GetId())
		if err != nil {
			return err
		}
		entries, err := v.TaskEntries(row.GetTask().GetId(), token.before, size, maxEventBytes)
		if err != nil || len(entries) == 0 {
			return err
		}
		for _, e := range entries {
			ev, err := eventOf(e)
			if err != nil {
				return err
			}
			out.Events = append(out.Events, ev)
		}
		token.before = entries[len(entries)-1].Index + 1
		rest, err := v.TaskEntries(row.GetTask().GetId(), token.before, 1, 1)
		if len(rest) > 0 {
			out.NextPageToken = token.format(filter)
		}
		return err
	})
	return out, err
}

// eventOf is what an entry means for its task, with the node's own event.
func eventOf(e store.Entry) (*taskv1.TaskEvent, error) {
	entry, err := e.Decode()
	if err != nil {
		return nil, err
	}
	ev := e.Event
	if frame := entry.GetNodeFrame(); frame != nil {
		ev.NodeEvent = &taskv1.Event{}
		if err := proto.Unmarshal(frame.GetFrame(), ev.NodeEvent); err != nil {
			return nil, fmt.Errorf("decode frame of log entry %d: %w", e.Index, err)
		}
	}
	return ev, nil
}

func outOfRange(format string, args ...any) error {
	return rpcerr.New(codes.OutOfRange, "RESUME_TOKEN", format+"; list again, and watch from the token of that list", args...)
}
