package gpus_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gpuaas/millwright/agent/internal/child"
	"github.com/gpuaas/millwright/tasks/host"
	"github.com/gpuaas/millwright/test/fakenvml"
)

// command runs the one command of a step without a shim: package command has the
// tests of what that promises.
type command struct {
	n       *node
	started chan struct{} // closed when it runs
	said    string
	runs    int
	away    bool // the sampler was away while it ran
}

func newCommand(n *node) *command { return &command{n: n, started: make(chan struct{})} }

func (c *command) Unit() string { return "millwright-task-x.service" }

func (c *command) Run(ctx context.Context, cmd host.Command) (host.Outcome, error) {
	if errors.Is(context.Cause(ctx), host.ErrStop) {
		return host.Outcome{}, host.ErrNotStarted
	}
	c.runs++
	c.away = c.n.away.Load()
	close(c.started)
	res, err := c.n.cfg.Children.Run(ctx, child.Spec{Argv: cmd.Argv, Environment: cmd.Environment, Timeout: cmd.Timeout})
	c.said = string(res.Stdout)
	switch {
	case ctx.Err() != nil:
		return host.Outcome{}, context.Cause(ctx)
	case errors.Is(err, context.DeadlineExceeded):
		return host.Outcome{TimedOut: true, Signal: 9}, nil
	}
	return host.Outcome{ExitCode: res.ExitCode}, err
}

func (c *command) Said() (string, error) { return c.said, nil }

// TestResetOnce: what nvidia-smi says, and does not say, is told as what it is, and
// the sampler is away meanwhile.
func TestResetOnce(t *testing.T) {
	for _, tc := range []struct {
		name    string
		before  func(*testing.T, *node)
		timeout time.Duration
		want    error
		some    bool
		words   string
	}{
		{name: "it is reset", some: true},
		{name: "in use", before: func(t *testing.T, n *node) { must(t, n.Set1(t, "persistence=1")) }, want: host.ErrGPUInUse, words: "in use by another client"},
		{name: "not supported", before: func(t *testing.T, n *node) { must(t, n.Set1(t, "virtualization=1")) }, want: host.ErrGPUUnsupported, words: "not supported"},
		{name: "one of two", before: func(t *testing.T, n *node) { _, release := n.hold(t); t.Cleanup(release) }, want: host.ErrGPUInUse, some: true},
		{name: "it hangs", before: func(t *testing.T, n *node) { must(t, n.Faults(fakenvml.Fault{Call: "nvidia-smi", Hang: true})) }, timeout: time.Second, want: host.ErrGPUUnresponsive, words: "was stopped"},
		{name: "it says nothing known", before: func(t *testing.T, n *node) { must(t, n.Faults(fakenvml.Fault{Call: "nvidia-smi", Return: 3})) }, words: "Unknown Error"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, nil, "H100", "H100", "H100")
			c := newCommand(n)
			if tc.timeout == 0 {
				tc.timeout = time.Minute
			}
			must(t, n.Set1(t, "recovery_action=1"))
			if tc.before != nil {
				tc.before(t, n)
			}
			r, err := n.ResetOnce(t.Context(), c, []string{n.uuid(t, 0), n.uuid(t, 1)}, tc.timeout)
			good := tc.want == nil && tc.words == ""
			if good != (err == nil) || tc.want != nil && !errors.Is(err, tc.want) || r.Some != tc.some || err != nil && !strings.Contains(err.Error(), tc.words) {
				t.Errorf("%+v, %v", r, err)
			}
			if now := n.state(t).GPUs[0].Values["recovery_action"]; (now == 0) != tc.some {
				t.Errorf("afterwards the driver asks for %d", now)
			}
			if c.runs != 1 || !c.away || !slices.Equal(n.changes.marks, []string{c.Unit(), ""}) {
				t.Errorf("%d runs, sampler away %v, marks %v", c.runs, c.away, n.changes.marks)
			}
		})
	}
}

// TestResetIsNotCutOff: a wish to stop keeps a reset from its start, and lets one
// that runs end; the end of the agent leaves it running.
func TestResetIsNotCutOff(t *testing.T) {
	n := newNode(t, nil, "H100")
	uuids := []string{n.uuid(t, 0)}
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(host.ErrStop)
	c := newCommand(n)
	if _, err := n.ResetOnce(ctx, c, uuids, time.Minute); !errors.Is(err, host.ErrNotStarted) || c.runs != 0 {
		t.Errorf("one that is not wanted any more: %v, %d runs", err, c.runs)
	}
	must(t, n.Set1(t, "recovery_action=1"))
	must(t, n.Faults(fakenvml.Fault{Call: "nvidia-smi", Latency: 500 * time.Millisecond}))
	for _, tc := range []struct {
		cause error
		left  bool
	}{{host.ErrStop, false}, {errors.New("the agent ends"), true}} {
		ctx, cancel := context.WithCancelCause(t.Context())
		c := newCommand(n)
		var err error
		var done sync.WaitGroup
		done.Go(func() { _, err = n.ResetOnce(ctx, c, uuids, time.Minute) })
		<-c.started
		cancel(tc.cause)
		done.Wait()
		if tc.left != errors.Is(err, tc.cause) || !tc.left && err != nil {
			t.Errorf("%v in the middle: %v", tc.cause, err)
		}
		if !tc.left && n.state(t).GPUs[0].Values["recovery_action"] != 0 {
			t.Error("it was cut off")
		}
	}
}
