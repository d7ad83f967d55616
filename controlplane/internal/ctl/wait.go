package ctl

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// waitOptions are the flags of commands that may wait for tasks.
type waitOptions struct {
	wait    bool
	timeout time.Duration
}

func (o *waitOptions) flags(cmd *cobra.Command) {
	cmd.Flags().BoolVar(&o.wait, "wait", false, "wait until each task has ended or is held; exit code 3 unless all succeeded")
	cmd.Flags().DurationVar(&o.timeout, "timeout", 0, "how long to wait, for example 10m, then exit with 7; 0: without limit")
}

func (o *waitOptions) check() error {
	if o.timeout < 0 {
		return usagef("--timeout: %s: must not be negative", o.timeout)
	}
	return nil
}

// vigil waits for tasks.
type vigil struct {
	ids     []string                    // in the order given
	state   map[string]taskv1.TaskState // by id
	index   map[string]uint64           // the last log index seen, by id
	pending int                         // tasks that have neither ended nor are held
}

// settled reports whether waiting for a task is over.
func settled(s taskv1.TaskState) bool {
	return terminal(s) || s == taskv1.TaskState_TASK_STATE_HELD
}

func newVigil(tasks []*taskv1.Task) *vigil {
	v := &vigil{state: map[string]taskv1.TaskState{}, index: map[string]uint64{}}
	for _, t := range tasks {
		v.ids = append(v.ids, t.GetId())
		v.learn(t.GetId(), t.GetState(), t.GetUpdateIndex())
	}
	return v
}

// learn takes a state in and reports whether it is news.
func (v *vigil) learn(id string, s taskv1.TaskState, index uint64) bool {
	old, known := v.state[id]
	if known && index <= v.index[id] {
		return false
	}
	if known && !settled(old) {
		v.pending--
	}
	if !settled(s) {
		v.pending++
	}
	v.state[id], v.index[id] = s, index
	return true
}

// wait waits until each of tasks has ended or is held, and tells each change on
// standard error. token is from before the tasks' states were read. It returns
// the tasks as they are then.
func (a *app) wait(ctx context.Context, c *client, token string, tasks []*taskv1.Task, timeout time.Duration) ([]*taskv1.Task, error) {
	waiting := ctx
	if timeout > 0 {
		// Not a deadline: gRPC would tell it to the server, whose answer to it can
		// be here before it is over here.
		var cancel context.CancelCauseFunc
		waiting, cancel = context.WithCancelCause(ctx)
		timer := time.AfterFunc(timeout, func() { cancel(errTimedOut) })
		defer timer.Stop()
		defer cancel(nil)
	}
	v := newVigil(tasks)
	err := a.await(waiting, c, token, v)
	if err != nil {
		if errors.Is(err, errTimedOut) {
			return nil, v.late(timeout)
		}
		if ctx.Err() != nil {
			a.remark("the tasks go on; see them with: millctl task watch %s", v.first())
		}
		return nil, err
	}
	return a.refresh(ctx, c, v.ids)
}

func (a *app) await(ctx context.Context, c *client, token string, v *vigil) error {
	for v.pending > 0 {
		req := &taskv1.WatchTasksRequest{ResumeToken: token, TaskIds: v.ids}
		err := a.watch(ctx, c, req, func(m *taskv1.WatchTasksResponse) error {
			if e := m.GetEvent(); e != nil && !e.GetLate() && v.learn(e.GetTaskId(), e.GetState(), e.GetIndex()) {
				a.remark("%s", eventLine(e))
			}
			if v.pending == 0 {
				return errStop
			}
			return nil
		})
		if !errors.Is(err, errTooOld) {
			return err
		}
		if token, err = c.watchToken(ctx); err != nil {
			return err
		}
		now, err := a.refresh(ctx, c, v.ids)
		if err != nil {
			return err
		}
		v = v.renew(now)
	}
	return nil
}

// renew takes in what was read after the server could not go on; the log may
// have another numbering since.
func (v *vigil) renew(tasks []*taskv1.Task) *vigil {
	*v = *newVigil(tasks)
	return v
}

func (a *app) refresh(ctx context.Context, c *client, ids []string) ([]*taskv1.Task, error) {
	out := make([]*taskv1.Task, len(ids))
	for i, id := range ids {
		resp, err := c.getTask(ctx, id)
		if err != nil {
			return nil, err
		}
		out[i] = resp.GetTask()
	}
	return out, nil
}

func (v *vigil) late(timeout time.Duration) error {
	text := fmt.Sprintf("timed out after %s with %d of %d tasks not ended; they go on", timeout, v.pending, len(v.ids))
	for _, id := range v.ids {
		if !settled(v.state[id]) {
			text += fmt.Sprintf("\n%s is %s", id, word(v.state[id]))
		}
	}
	return &failure{code: exitTimeout, err: errors.New(text + "\nsee them with: millctl task watch " + v.first())}
}

// first names the tasks for a command line, or only the first when there are
// many.
func (v *vigil) first() string {
	if len(v.ids) == 0 {
		return ""
	}
	if len(v.ids) > 1 {
		return v.ids[0] + " ..."
	}
	return v.ids[0]
}

// verdict tells of each task that did not succeed why and what to do next, and
// returns the error for its exit code.
func (a *app) verdict(tasks []*taskv1.Task) error {
	bad := 0
	for _, t := range tasks {
		if t.GetState() == taskv1.TaskState_TASK_STATE_SUCCEEDED {
			continue
		}
		bad++
		a.remark("task %s on %s is %s%s", t.GetId(), t.GetNode(), word(t.GetState()), because(t))
		a.remark("  see its history: millctl task get %s", t.GetId())
		for _, line := range next(t) {
			a.remark("  %s", line)
		}
	}
	if bad > 0 {
		return &failure{code: exitUnsuccess}
	}
	return nil
}

// because is the reason and message of a task's state, after a colon.
func because(t *taskv1.Task) string {
	switch {
	case t.GetReason() == "" && t.GetMessage() == "":
		return ""
	case t.GetReason() == "":
		return ": " + printable(t.GetMessage())
	case t.GetMessage() == "":
		return ": " + printable(t.GetReason())
	}
	return ": " + printable(t.GetReason()) + ": " + printable(t.GetMessage())
}
