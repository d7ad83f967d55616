package ctl

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/gpuaas/millwright/pki/envelope"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// The limits of one request.
const (
	maxLeaves    = 1000
	maxLeafBytes = 4 << 20
)

// signOptions are the flags of commands that sign.
type signOptions struct {
	waitOptions
	notBefore string
	validFor  time.Duration
	requestID string
	reason    string
}

func (o *signOptions) flags(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&o.notBefore, "not-before", "", "the earliest start: a time such as 2027-01-31T15:04:05Z, or a duration from now such as 2h")
	f.DurationVar(&o.validFor, "valid-for", 24*time.Hour, "how long from then on it may start; it must start within 168h (7 days) of now")
	f.StringVar(&o.requestID, "request-id", "", "a UUID of this request, to repeat one whose answer was lost: it creates the tasks at most once")
	f.StringVar(&o.reason, "reason", "", "why, for the history; signed with the task")
	o.waitOptions.flags(cmd)
}

// window checks the flags and returns when the tasks may start.
func (o *signOptions) window(now time.Time) (envelope.Window, error) {
	w := envelope.Window{IssuedAt: now, NotBefore: now}
	if err := o.check(); err != nil {
		return w, err
	}
	if o.notBefore != "" {
		t, err := parseTime("not-before", o.notBefore, now)
		if err != nil {
			return w, err
		}
		w.NotBefore = t
	}
	if o.validFor <= 0 {
		return w, usagef("--valid-for: %s: must be longer than 0", o.validFor)
	}
	w.NotAfter = w.NotBefore.Add(o.validFor)
	if !w.NotAfter.After(now) {
		return w, usagef("--not-before, --valid-for: the window ends at %s, which is over; choose a later one", w.NotAfter.Local().Format(time.RFC3339))
	}
	if last := now.Add(envelope.MaxLife); w.NotAfter.After(last) {
		return w, usagef("--not-before, --valid-for: the window ends at %s; a signature lasts at most 7 days, until %s",
			w.NotAfter.Local().Format(time.RFC3339), last.Local().Format(time.RFC3339))
	}
	if o.requestID == "" {
		o.requestID = uuid.NewString()
	} else if id, err := uuid.Parse(o.requestID); err != nil || id.String() != o.requestID {
		return w, usagef("--request-id: %q: must be a UUID in lower case, for example %s", o.requestID, uuid.NewString())
	}
	return w, nil
}

// parseTime reads a time, or a duration counted from now; a negative one lies
// in the past.
func parseTime(flag, s string, now time.Time) (time.Time, error) {
	if d, err := time.ParseDuration(s); err == nil {
		return now.Add(d), nil
	}
	t, err := time.Parse(time.RFC3339, s)
	if err != nil {
		return time.Time{}, usagef("--%s: %q: must be a time such as 2027-01-31T15:04:05Z, or a duration such as 2h", flag, s)
	}
	return t, nil
}

// newTaskID returns a UUID of version 7.
func newTaskID() (string, error) {
	id, err := uuid.NewV7()
	if err != nil {
		return "", fmt.Errorf("make task id: %w", err)
	}
	return id.String(), nil
}

// labels reads key=value pairs and sorts them.
func labels(flag string, pairs []string) ([]*taskv1.Label, error) {
	var out []*taskv1.Label
	for _, p := range pairs {
		key, value, ok := strings.Cut(p, "=")
		if !ok || key == "" {
			return nil, usagef("--%s: %q: must be key=value", flag, p)
		}
		out = append(out, &taskv1.Label{Key: key, Value: value})
	}
	slices.SortFunc(out, func(a, b *taskv1.Label) int { return cmp.Compare(a.GetKey(), b.GetKey()) })
	for i := 1; i < len(out); i++ {
		if out[i].GetKey() == out[i-1].GetKey() {
			return nil, usagef("--%s: key %q is given twice; keep one", flag, out[i].GetKey())
		}
	}
	return out, nil
}

// submit signs the leaves with one signature and creates the tasks, and waits
// for them when that is asked for.
func (a *app) submit(ctx context.Context, c *client, leaves []*taskv1.TaskLeaf, o *signOptions, w envelope.Window) (*taskv1.CreateTasksResponse, error) {
	req, err := c.sign(leaves, w)
	if err != nil {
		return nil, err
	}
	req.RequestId = o.requestID
	var token string
	if o.wait {
		if token, err = c.watchToken(ctx); err != nil {
			return nil, err
		}
	}
	resp, err := c.tasks.CreateTasks(ctx, req)
	if err != nil {
		return nil, c.uncreated(ctx, err, o.requestID, leaves)
	}
	if resp.GetAlreadyExisted() {
		a.remark("request %s was made before; these are its tasks", o.requestID)
	}
	if o.wait {
		resp.Tasks, err = a.wait(ctx, c, token, resp.GetTasks(), o.timeout)
	}
	return resp, err
}

// conclude prints the tasks that were created; when they were waited for, it
// also judges them.
func (a *app) conclude(resp *taskv1.CreateTasksResponse, waited bool) error {
	if err := a.printTasks(resp.GetTasks(), resp); err != nil || !waited {
		return err
	}
	return a.verdict(resp.GetTasks())
}

// sign makes the request for the leaves.
func (c *client) sign(leaves []*taskv1.TaskLeaf, w envelope.Window) (*taskv1.CreateTasksRequest, error) {
	if len(leaves) > maxLeaves {
		return nil, usagef("%d nodes: one signature covers at most %d here; use several commands", len(leaves), maxLeaves)
	}
	key, err := c.home.SigningKey()
	if err != nil {
		return nil, err
	}
	w.Cluster, w.TrustRootVersion = c.home.Cluster(), c.home.Root().Version()
	env, signed, err := envelope.SignTaskSet(w, leaves, key)
	if err != nil {
		return nil, malformed(err)
	}
	return &taskv1.CreateTasksRequest{Envelope: env, Leaves: signed}, checkSize(signed)
}

// checkSize refuses what would not fit one request.
func checkSize(leaves []*taskv1.SignedLeaf) error {
	size := 0
	for _, l := range leaves {
		size += len(l.GetLeaf())
	}
	if size > maxLeafBytes {
		return usagef("%d tasks have %d bytes in all; one request holds at most %d: name fewer nodes in one command, or make the spec smaller", len(leaves), size, maxLeafBytes)
	}
	return nil
}

// malformed makes a person's mistake of what breaks a rule of the format.
func malformed(err error) error {
	if errors.Is(err, envelope.ErrMalformed) {
		return &failure{code: exitUsage, err: err}
	}
	return err
}

// uncreated explains why no tasks are known to have been created. When the
// answer may have been lost it says how to find out.
func (c *client) uncreated(ctx context.Context, err error, requestID string, leaves []*taskv1.TaskLeaf) error {
	told := c.explainTasks(ctx, "create tasks", err, leaves)
	unknown := []codes.Code{codes.Unavailable, codes.DeadlineExceeded, codes.Canceled, codes.Unknown, codes.Internal}
	if !slices.Contains(unknown, status.Code(err)) {
		return told
	}
	code := exitError
	var f *failure
	if errors.As(told, &f) {
		code = f.code
	}
	return &failure{code: code, err: fmt.Errorf("%w\nif the request did arrive, the tasks exist; repeat the same command with --request-id %s to get them or to create them once", told, requestID)}
}
