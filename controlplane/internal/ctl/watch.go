package ctl

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

func (a *app) taskWatchCmd() *cobra.Command {
	req := &taskv1.WatchTasksRequest{}
	cmd := &cobra.Command{
		Use:   "watch [ID...]",
		Short: "Follow what happens to tasks, one line per change",
		Long: `Follow what happens to tasks, one line per change, over lost connections and
restarts of the server.

With ids it ends when all of these tasks have ended, with exit code 3 unless all
succeeded. Without ids, and with --resume, it goes on until it is interrupted,
which harms nothing.

With -o json each line is one WatchTasksResponse. Its resumeToken, given to
--resume, goes on right after it.`,
		RunE: a.online(func(ctx context.Context, c *client, args []string) error {
			return a.follow(ctx, c, req, args)
		}),
	}
	cmd.Flags().StringSliceVarP(&req.Nodes, "node", "n", nil, "only of these nodes")
	cmd.Flags().StringVar(&req.ResumeToken, "resume", "", "go on after this token, from a line or a list with -o json")
	a.outputFlag(cmd)
	return cmd
}

// follow watches the tasks in ids, or all.
func (a *app) follow(ctx context.Context, c *client, req *taskv1.WatchTasksRequest, ids []string) error {
	if req.GetResumeToken() != "" || len(ids) == 0 {
		return a.followForever(ctx, c, req, ids)
	}
	v, err := a.start(ctx, c, req, ids)
	if err != nil {
		return err
	}
	for !v.ended() {
		req.TaskIds = v.ids
		err := a.watch(ctx, c, req, func(m *taskv1.WatchTasksResponse) error {
			e := m.GetEvent()
			if e != nil && v.learn(e.GetTaskId(), e.GetState(), e.GetIndex()) {
				if err := a.printChange(m); err != nil {
					return err
				}
			}
			if v.ended() {
				return errStop
			}
			return nil
		})
		if errors.Is(err, errTooOld) {
			a.remark("the server can't go on from the last event; what happened in between is in: millctl task history ID")
			req.ResumeToken = ""
			v, err = a.start(ctx, c, req, v.ids)
		}
		if err != nil {
			return err
		}
	}
	return a.judge(ctx, c, v)
}

// followForever watches until it is interrupted.
func (a *app) followForever(ctx context.Context, c *client, req *taskv1.WatchTasksRequest, ids []string) error {
	given := req.GetResumeToken()
	for _, id := range ids {
		whole, err := c.wholeID(ctx, id)
		if err != nil {
			return err
		}
		req.TaskIds = append(req.TaskIds, whole)
	}
	for {
		err := a.watch(ctx, c, req, a.printChange)
		if !errors.Is(err, errTooOld) {
			return err
		}
		if given != "" && req.GetResumeToken() == given {
			return &failure{code: exitConflict, err: fmt.Errorf("--resume: %w: it is too old, or from before the server was restored; list the tasks again and go on from the list's watchToken", errTooOld)}
		}
		a.remark("the server can't go on from the last event; what happened in between is in: millctl task list")
		if req.ResumeToken, err = c.watchToken(ctx); err != nil {
			return err
		}
	}
}

// start reads where the tasks are, and a token from before that.
func (a *app) start(ctx context.Context, c *client, req *taskv1.WatchTasksRequest, ids []string) (*vigil, error) {
	token, err := c.watchToken(ctx)
	if err != nil {
		return nil, err
	}
	req.ResumeToken = token
	tasks, err := a.refresh(ctx, c, ids)
	if err != nil {
		return nil, err
	}
	return newVigil(tasks), nil
}

// ended reports whether all tasks have ended.
func (v *vigil) ended() bool {
	for _, s := range v.state {
		if !terminal(s) {
			return false
		}
	}
	return true
}

// printChange writes one change.
func (a *app) printChange(m *taskv1.WatchTasksResponse) error {
	e := m.GetEvent()
	if e == nil {
		return nil
	}
	if e.GetState() == taskv1.TaskState_TASK_STATE_HELD {
		defer a.remark("task %s is held; see what to do: millctl task get %s", e.GetTaskId(), e.GetTaskId())
	}
	if a.format == formatJSON {
		return a.printJSONLine(m)
	}
	return a.write([]byte(eventLine(e) + "\n"))
}

// judge tells how the tasks ended.
func (a *app) judge(ctx context.Context, c *client, v *vigil) error {
	tasks, err := a.refresh(ctx, c, v.ids)
	if err != nil {
		return err
	}
	for _, t := range tasks {
		if t.GetState() == taskv1.TaskState_TASK_STATE_SUCCEEDED {
			a.remark("task %s on %s is succeeded", t.GetId(), t.GetNode())
		}
	}
	return a.verdict(tasks)
}
