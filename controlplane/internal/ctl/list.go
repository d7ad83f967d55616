package ctl

import (
	"context"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/timestamppb"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

const (
	defaultLimit = 100
	maxPage      = 1000
)

// listOptions are the flags of task list.
type listOptions struct {
	nodes, states, kinds, labels []string
	since, until, project        string
	limit, pageSize              int
	pageToken                    string
	all                          bool
}

func (a *app) taskListCmd() *cobra.Command {
	o := &listOptions{}
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List tasks, the newest first",
		Long: `List tasks, the newest first.

Only --limit of them are listed, unless --all is given. Where more are left,
standard error says how to go on, and -o json has their nextPageToken.`,
		Example: `  millctl task list -n gpu-001 --state failed --since 24h
  millctl task list --all -o json`,
		Args: none(),
		RunE: func(cmd *cobra.Command, args []string) error {
			req, err := o.request(a.now())
			if err != nil {
				return err
			}
			return a.online(func(ctx context.Context, c *client, _ []string) error {
				return a.list(ctx, c, req, o)
			})(cmd, args)
		},
	}
	f := cmd.Flags()
	f.StringSliceVarP(&o.nodes, "node", "n", nil, "only of these nodes")
	f.StringSliceVar(&o.states, "state", nil, "only in these states, for example failed,held")
	f.StringSliceVar(&o.kinds, "kind", nil, "only of these kinds")
	f.StringVar(&o.since, "since", "", "only created since: a time such as 2027-01-31T15:04:05Z, or how long ago, such as 24h")
	f.StringVar(&o.until, "until", "", "only created before: a time, or how long ago")
	f.StringArrayVarP(&o.labels, "label", "l", nil, "only with this label, as key=value; repeat the flag for more")
	f.StringVar(&o.project, "project", "", "only of this project")
	f.IntVar(&o.limit, "limit", defaultLimit, "the most tasks to list")
	f.BoolVar(&o.all, "all", false, "list all tasks")
	f.IntVar(&o.pageSize, "page-size", 0, "tasks asked for at once, at most 1000; 0: chosen by the limit")
	f.StringVar(&o.pageToken, "page-token", "", "go on from here; the other flags must be the same")
	a.outputFlag(cmd, formatName)
	return cmd
}

// request checks the flags.
func (o *listOptions) request(now time.Time) (*taskv1.ListTasksRequest, error) {
	if o.limit < 1 {
		return nil, usagef("--limit: %d: must be at least 1; for all tasks use --all", o.limit)
	}
	if o.pageSize < 0 || o.pageSize > maxPage {
		return nil, usagef("--page-size: %d: must be from 0 to %d", o.pageSize, maxPage)
	}
	req := &taskv1.ListTasksRequest{Nodes: o.nodes, Kinds: o.kinds, Project: o.project, PageToken: o.pageToken}
	for _, s := range o.states {
		n, err := enumFlag("state", s, taskv1.TaskState(0).Descriptor())
		if err != nil {
			return nil, err
		}
		req.States = append(req.States, taskv1.TaskState(n))
	}
	var err error
	if req.CreatedAfter, err = ago("since", o.since, now); err != nil {
		return nil, err
	}
	if req.CreatedBefore, err = ago("until", o.until, now); err != nil {
		return nil, err
	}
	if req.Labels, err = labels("label", o.labels); err != nil {
		return nil, err
	}
	return req, nil
}

// ago reads a time, or how long ago it was.
func ago(flag, s string, now time.Time) (*timestamppb.Timestamp, error) {
	if s == "" {
		return nil, nil
	}
	if d, err := time.ParseDuration(s); err == nil {
		return timestamppb.New(now.Add(-d)), nil
	}
	t, err := time.Parse(time.RFC3339, s)
	if err != nil {
		return nil, usagef("--%s: %q: must be a time such as 2027-01-31T15:04:05Z, or how long ago, such as 24h", flag, s)
	}
	return timestamppb.New(t), nil
}

// size is how many tasks to ask for when have are there.
func (o *listOptions) size(have int) int32 {
	n := maxPage
	if o.pageSize > 0 {
		n = o.pageSize
	}
	if !o.all {
		n = min(n, o.limit-have)
	}
	return int32(n)
}

func (a *app) list(ctx context.Context, c *client, req *taskv1.ListTasksRequest, o *listOptions) error {
	whole := &taskv1.ListTasksResponse{}
	for {
		req.PageSize = o.size(len(whole.GetTasks()))
		page, err := c.tasks.ListTasks(ctx, req)
		if err != nil {
			return c.explain(ctx, "list tasks", err)
		}
		whole.Tasks = append(whole.Tasks, page.GetTasks()...)
		whole.NextPageToken = page.GetNextPageToken()
		if whole.WatchToken == "" {
			// The first page's: a watch from there misses nothing of the later ones.
			whole.WatchToken = page.GetWatchToken()
		}
		req.PageToken = page.GetNextPageToken()
		if req.PageToken == "" || !o.all && len(whole.GetTasks()) >= o.limit {
			break
		}
	}
	if err := a.printTasks(whole.GetTasks(), whole); err != nil {
		return err
	}
	if whole.NextPageToken != "" {
		a.remark("there are more; list all with --all, or go on with the same flags and --page-token %s", whole.NextPageToken)
	}
	return nil
}
