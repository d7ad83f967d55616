package cli

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpuaas/millwright/agent/internal/configfile"
	"github.com/gpuaas/millwright/agent/internal/local"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// askWithin bounds a question to the agent.
const askWithin = 10 * time.Second

// ask calls do with a client of the running agent.
func (a *app) ask(ctx context.Context, do func(ctx context.Context, c agentv1.LocalServiceClient) error) error {
	cfg, err := configfile.Load(a.config)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, askWithin)
	defer cancel()
	if err := local.Reach(ctx, cfg.RunDir); err != nil {
		return unreachable(filepath.Join(cfg.RunDir, local.SocketName), err)
	}
	c, stop, err := local.Dial(cfg.RunDir)
	if err != nil {
		return err
	}
	defer stop() //nolint:errcheck // the answer is here
	return answered(do(ctx, c))
}

func unreachable(socket string, err error) error {
	switch {
	case errors.Is(err, fs.ErrPermission):
		return &failure{exitDenied, fmt.Errorf("you may not use %s: be root, or a member of the socket_group of the agent's configuration", socket)}
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ECONNREFUSED):
		return fmt.Errorf("millwrightd does not run on this node (nobody answers at %s); start it with: systemctl restart millwrightd", socket)
	}
	return err
}

// outputFlag adds -o table|json.
func (a *app) outputFlag(cmd *cobra.Command) {
	cmd.Flags().StringVarP(&a.format, "output", "o", "table", "the form of the output: table or json")
	cmd.PreRunE = func(*cobra.Command, []string) error {
		if a.format != "table" && a.format != "json" {
			return usagef("--output: %q: must be table or json", a.format)
		}
		return nil
	}
}

func (a *app) statusCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use: "status", Short: "Say how the agent on this node is", Args: between(0, 0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.ask(cmd.Context(), func(ctx context.Context, c agentv1.LocalServiceClient) error {
				st, err := c.GetStatus(ctx, &agentv1.GetStatusRequest{})
				if err != nil {
					return err
				}
				if a.format == "json" {
					return a.printJSON(st)
				}
				return a.printStatus(st)
			})
		},
	}
	a.outputFlag(cmd)
	return cmd
}

func (a *app) journalCmd() *cobra.Command {
	var unfinished bool
	var limit int32
	cmd := &cobra.Command{
		Use: "list [TASK]", Short: "List the tasks in the node's journal, the newest first; one task with its steps", Args: between(0, 1),
		RunE: func(cmd *cobra.Command, args []string) error {
			r := &agentv1.ListJournalRequest{UnfinishedOnly: unfinished, Limit: limit}
			if len(args) == 1 {
				r.TaskId = args[0]
			}
			return a.ask(cmd.Context(), func(ctx context.Context, c agentv1.LocalServiceClient) error {
				j, err := c.ListJournal(ctx, r)
				switch {
				case err != nil:
					return err
				case a.format == "json":
					return a.printJSON(j)
				case r.GetTaskId() != "":
					return a.printTask(j)
				}
				return a.printTasks(j)
			})
		},
	}
	cmd.Flags().BoolVar(&unfinished, "unfinished", false, "only tasks that have not ended")
	cmd.Flags().Int32Var(&limit, "limit", 100, "at most so many, up to 1000")
	a.outputFlag(cmd)
	return group("journal", "Look at the node's journal", cmd, a.exportCmd(), a.checkStateCmd(), a.repairStateCmd())
}

func (a *app) taskCmd() *cobra.Command {
	var as, reason string
	cmd := &cobra.Command{
		Use: "resolve TASK --as undo|accept|abandon --reason WHY", Args: between(1, 1),
		Short: "Settle a held task by root's word",
		Long: `Settle a task that is held because its outcome cannot be known or its undo failed.

undo undoes its steps, the last first; the task then ends failed and says what
could not be undone, or is held again.
accept counts it as succeeded: a kind with a goal, such as storage.mount, must
pass its check; of system.command you assert that it did what it should.
abandon gives it up as the node is now.`,
		RunE: func(cmd *cobra.Command, args []string) error {
			way, err := local.ParseAs(as)
			if err != nil {
				return usagef("--%w", err)
			}
			if reason == "" {
				return usagef("--reason: missing: say why, for the history")
			}
			return a.ask(cmd.Context(), func(ctx context.Context, c agentv1.LocalServiceClient) error {
				r, err := c.ResolveTask(ctx, &agentv1.ResolveTaskRequest{TaskId: args[0], As: way, Reason: reason})
				if err != nil {
					return err
				}
				if r.GetState() == taskv1.TaskState_TASK_STATE_RUNNING {
					return a.say("task %s is being undone; see it with: millwrightd journal list %s\n", args[0], args[0])
				}
				return a.say("task %s is %s\n", args[0], stateName(r.GetState()))
			})
		},
	}
	cmd.Flags().StringVar(&as, "as", "", "how: undo, accept or abandon")
	cmd.Flags().StringVar(&reason, "reason", "", "why, for the history")
	return group("task", "Settle tasks on the node", cmd)
}
