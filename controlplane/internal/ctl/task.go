package ctl

import (
	"context"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

func (a *app) taskCmd() *cobra.Command {
	return group("task", "Create tasks and read their history",
		a.taskRunCmd(), a.taskListCmd(), a.taskGetCmd(), a.taskHistoryCmd(), a.taskWatchCmd(), a.taskLogsCmd(),
		a.taskCancelCmd(), a.taskRetryCmd(), a.taskResolveCmd())
}

// printTasks writes tasks in the form that was asked for; whole is the message
// for -o json.
func (a *app) printTasks(tasks []*taskv1.Task, whole proto.Message) error {
	switch a.format {
	case formatJSON:
		return a.printJSON(whole)
	case formatName:
		for _, t := range tasks {
			if err := a.write([]byte(t.GetId() + "\n")); err != nil {
				return err
			}
		}
		return nil
	}
	rows := [][]string{{"ID", "NODE", "KIND", "STATE", "CREATED", "REASON"}}
	for _, t := range tasks {
		kind := t.GetKind()
		if t.GetMode() == taskv1.Mode_MODE_PLAN {
			kind += " (plan)"
		}
		rows = append(rows, []string{t.GetId(), t.GetNode(), kind, word(t.GetState()), stamp(t.GetCreateTime()), t.GetReason()})
	}
	return table(a.out, rows)
}

// printTask writes one task after something was done to it.
func (a *app) printTask(t *taskv1.Task) error {
	if a.format == formatJSON {
		return a.printJSON(t)
	}
	return a.printTasks([]*taskv1.Task{t}, nil)
}

// eventLine is one event of a task on one line.
func eventLine(e *taskv1.TaskEvent) string {
	parts := []string{stamp(e.GetRecordTime()), e.GetTaskId(), e.GetNode(), word(e.GetState()), e.GetType()}
	for _, s := range []string{e.GetReason(), e.GetMessage()} {
		if s != "" {
			parts = append(parts, printable(s))
		}
	}
	if e.GetLate() {
		parts = append(parts, "(late: the state stays)")
	}
	return strings.Join(parts, "  ")
}

func (a *app) taskCancelCmd() *cobra.Command {
	var reason string
	cmd := &cobra.Command{
		Use:   "cancel ID",
		Short: "Ask for a task to be stopped and undone",
		Long: `Ask for a task to be stopped and undone.

The command returns as soon as the request is recorded. The task's state says
what came of it: a task that ends first is not stopped.`,
		Args: exactly("ID"),
		RunE: a.online(func(ctx context.Context, c *client, args []string) error {
			id, err := c.wholeID(ctx, args[0])
			if err != nil {
				return err
			}
			resp, err := c.tasks.CancelTask(ctx, &taskv1.CancelTaskRequest{Id: id, Reason: reason})
			if err != nil {
				return c.explain(ctx, "cancel task "+id, err)
			}
			if !terminal(resp.GetTask().GetState()) {
				a.remark("asked for; follow it with: millctl task watch %s", id)
			}
			return a.printTask(resp.GetTask())
		}),
	}
	cmd.Flags().StringVar(&reason, "reason", "", "why, for the history")
	a.outputFlag(cmd, formatName)
	return cmd
}

// wholeID returns the id that a prefix stands for. What is as long as an id is
// one.
func (c *client) wholeID(ctx context.Context, id string) (string, error) {
	if len(id) == idLength {
		return id, nil
	}
	resp, err := c.getTask(ctx, id)
	return resp.GetTask().GetId(), err
}

// idLength is the length of a UUID in text.
const idLength = 36
