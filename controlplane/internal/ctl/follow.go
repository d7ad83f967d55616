package ctl

import (
	"context"
	"errors"
	"io"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

const (
	firstPause = 200 * time.Millisecond
	lastPause  = 5 * time.Second
)

// errTooOld means that the server can't go on from a resume token: what is
// watched must be read again.
var errTooOld = errors.New("the server can't go on from this resume token")

// errStop is returned by a function that has seen enough.
var errStop = errors.New("seen enough")

// watch calls each for every message from token on, over lost connections and
// restarts of the server, until each returns an error or ctx ends. It returns
// nil for errStop and an error that wraps errTooOld when it can't go on.
func (a *app) watch(ctx context.Context, c *client, req *taskv1.WatchTasksRequest, each func(*taskv1.WatchTasksResponse) error) error {
	return a.persist(ctx, c, "watch tasks", func(heard func()) error {
		return watchOnce(ctx, c, req, func(m *taskv1.WatchTasksResponse) error {
			heard()
			return each(m)
		})
	})
}

// persist calls once, which reads a stream to its end and says when it has heard
// something, over lost connections and restarts of the server. It returns as
// watch does.
func (a *app) persist(ctx context.Context, c *client, doing string, once func(heard func()) error) error {
	pause := firstPause
	for {
		err := once(func() { pause = firstPause })
		var stream *streamError
		switch {
		case errors.Is(err, errStop):
			return nil
		case !errors.As(err, &stream):
			return err
		case ctx.Err() == nil && status.Code(stream.err) == codes.OutOfRange:
			return errTooOld
		case ctx.Err() != nil || !temporary(stream.err):
			return c.explain(ctx, doing, stream.err)
		}
		a.remark("connection to %s is lost (%v); trying again", c.server, why(c, stream.err))
		if !sleep(ctx, pause) {
			return c.explain(ctx, doing, ctx.Err())
		}
		pause = min(2*pause, lastPause)
	}
}

// streamError tells an error of a stream from one of its reader.
type streamError struct{ err error }

func (e *streamError) Error() string { return e.err.Error() }

// watchOnce reads one stream to its end, and moves the token in req forward
// after each message that was handled.
func watchOnce(ctx context.Context, c *client, req *taskv1.WatchTasksRequest, each func(*taskv1.WatchTasksResponse) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.tasks.WatchTasks(ctx, req)
	if err != nil {
		return &streamError{err}
	}
	for {
		m, err := stream.Recv()
		if err != nil {
			return &streamError{err}
		}
		if m.GetResumeToken() != "" {
			req.ResumeToken = m.GetResumeToken()
		}
		if err := each(m); err != nil {
			return err
		}
	}
}

// temporary reports whether a stream that ended so is worth another try.
func temporary(err error) bool {
	if errors.Is(err, io.EOF) {
		return true
	}
	code := status.Code(err)
	return code == codes.Unavailable || code == codes.Aborted || code == codes.ResourceExhausted
}

func why(c *client, err error) error {
	if cause := c.trouble(); cause != nil && status.Code(err) == codes.Unavailable {
		return cause
	}
	if errors.Is(err, io.EOF) {
		return errors.New("the server ended the stream")
	}
	return errors.New(status.Convert(err).Message())
}

// sleep waits and reports whether ctx still lasts.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

// watchToken returns a token from which a watch sees all that happens from now
// on.
func (c *client) watchToken(ctx context.Context) (string, error) {
	resp, err := c.tasks.ListTasks(ctx, &taskv1.ListTasksRequest{PageSize: 1})
	if err != nil {
		return "", c.explain(ctx, "list tasks", err)
	}
	return resp.GetWatchToken(), nil
}

// getTask returns a task by its id or a prefix of it.
func (c *client) getTask(ctx context.Context, id string) (*taskv1.GetTaskResponse, error) {
	if id == "" {
		return nil, usagef("task id is empty; see the ids with: millctl task list")
	}
	resp, err := c.tasks.GetTask(ctx, &taskv1.GetTaskRequest{Id: id})
	if err != nil {
		return nil, c.explain(ctx, "get task "+id, err)
	}
	return resp, nil
}

// terminal reports whether a task has ended.
func terminal(s taskv1.TaskState) bool {
	return s >= taskv1.TaskState_TASK_STATE_SUCCEEDED
}
