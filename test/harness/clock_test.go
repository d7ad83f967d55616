package harness_test

import (
	"context"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/gpuaas/millwright/agent"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	systemv1 "github.com/gpuaas/millwright/proto/millwright/system/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/test/harness"
)

// hands are a node's clocks, which a test steps.
type hands struct {
	begun      time.Time
	wall, boot atomic.Int64
}

func newHands() *hands { return &hands{begun: time.Now()} }

// Now is the wall clock.
func (h *hands) Now() time.Time { return time.Now().Round(0).Add(time.Duration(h.wall.Load())) }

// Boot is the time since boot.
func (h *hands) Boot() time.Duration {
	return time.Hour + time.Since(h.begun) + time.Duration(h.boot.Load())
}

func (h *hands) use(c *agent.Config) { c.Clock = h }

const year = 365 * 24 * time.Hour

func run(c *harness.Cluster, n *harness.Node) *taskv1.Task {
	return c.Create(n, "system.command", &systemv1.CommandSpec{Argv: []string{"/usr/bin/true", "once"}})
}

// putOff reports whether the node has put a task off for its clock's sake.
func putOff(c *harness.Cluster, task *taskv1.Task) bool {
	return slices.ContainsFunc(c.Reached(task.GetId(), 0).GetConditions(), func(c *taskv1.Condition) bool {
		return c.GetType() == "Deferred" && c.GetReason() == "CLOCK_UNTRUSTED"
	})
}

// TestClockSteps steps a node's clock while it waits for work. Whatever it is
// given meanwhile it puts off or does, and does it once when the clock is right;
// nothing expires by a wrong clock.
func TestClockSteps(t *testing.T) {
	for _, tt := range []struct {
		name       string
		wall, boot time.Duration
		puts       bool // the node puts tasks off while the clock is so
	}{
		{name: "+1h", wall: time.Hour, puts: true},
		{name: "-1h", wall: -time.Hour, puts: true},
		{name: "+10y", wall: 10 * year, puts: true},
		{name: "-10y", wall: -10 * year, puts: true},
		{name: "8h by the boot clock alone", boot: 8 * time.Hour, puts: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			c := harness.New(t)
			n := c.NewNode("gpu-001")
			if err := n.Do("program /usr/bin/true"); err != nil {
				t.Fatal(err)
			}
			h := newHands()
			n.Start(h.use)
			n.Connected()
			h.wall.Store(int64(tt.wall))
			h.boot.Store(int64(tt.boot))
			task := run(c, n)
			if tt.puts {
				await(t, "the node says that it does not believe its clock", func() bool {
					return n.Status().GetClock().GetDoubt() != ""
				})
				await(t, "the task is put off", func() bool {
					return putOff(c, task) || tt.wall > 24*time.Hour // then it has no session
				})
				if runs := n.Runs("/usr/bin/true", "once"); runs != 0 {
					t.Errorf("it ran %d times by a wrong clock", runs)
				}
			}
			h.wall.Store(0)
			if got := c.Ended(task.GetId()); got.GetState() != taskv1.TaskState_TASK_STATE_SUCCEEDED {
				t.Errorf("it is %s: %s %s", got.GetState(), got.GetReason(), got.GetMessage())
			}
			if runs := n.Runs("/usr/bin/true", "once"); runs != 1 {
				t.Errorf("it ran %d times", runs)
			}
		})
	}
}

// TestBootWithoutClock starts the agent of a node that has joined with a clock
// of 1970. It starts, puts off, and goes on without a restart.
func TestBootWithoutClock(t *testing.T) {
	t.Parallel()
	c := harness.New(t)
	n := c.NewNode("gpu-001")
	if err := n.Do("program /usr/bin/true"); err != nil {
		t.Fatal(err)
	}
	h := newHands()
	stop := n.Start(h.use)
	n.Connected()
	stop()
	h.wall.Store(int64(-time.Duration(time.Now().Unix()) * time.Second))
	n.Start(h.use)
	n.Connected()
	if doubt := n.Status().GetClock().GetDoubt(); !strings.Contains(doubt, "1970") {
		t.Errorf("doubt %q", doubt)
	}
	task := run(c, n)
	await(t, "the task is put off", func() bool { return putOff(c, task) })
	h.wall.Store(0)
	if got := c.Ended(task.GetId()); got.GetState() != taskv1.TaskState_TASK_STATE_SUCCEEDED {
		t.Errorf("it is %s: %s", got.GetState(), got.GetMessage())
	}
}

// TestClockReset lets a node that was cut off believe a clock that is hours
// ahead, sets it right, and has root settle the doubt.
func TestClockReset(t *testing.T) {
	t.Parallel()
	c := harness.New(t)
	n := c.NewNode("gpu-001")
	if err := n.Do("program /usr/bin/true"); err != nil {
		t.Fatal(err)
	}
	h := newHands()
	stop := n.Start(h.use)
	n.Connected()
	stop()
	n.Cut()
	h.wall.Store(int64(6 * time.Hour))
	stop = n.Start(h.use)
	await(t, "the node believes it", func() bool {
		return n.Status().GetClock().GetHighWater().AsTime().After(time.Now().Add(5 * time.Hour))
	})
	stop()
	h.wall.Store(0)
	n.Heal()
	n.Start(h.use)
	n.Connected()
	before := run(c, n)
	await(t, "the task is put off", func() bool { return putOff(c, before) })
	resp := resetClock(t, n)
	if !resp.GetBefore().AsTime().After(resp.GetNow().AsTime().Add(5 * time.Hour)) {
		t.Errorf("the high water was %s before, and is %s", resp.GetBefore().AsTime(), resp.GetNow().AsTime())
	}
	n.Connected()
	if got := c.Ended(before.GetId()); got.GetReason() != "BELOW_FLOOR" {
		t.Errorf("what was signed before is %s %s: want it refused", got.GetState(), got.GetReason())
	}
	after := run(c, n)
	if got := c.Ended(after.GetId()); got.GetState() != taskv1.TaskState_TASK_STATE_SUCCEEDED {
		t.Errorf("what was signed since is %s: %s", got.GetState(), got.GetMessage())
	}
}

func resetClock(t *testing.T, n *harness.Node) *agentv1.ResetClockResponse {
	t.Helper()
	return harness.Ask(n, func(ctx context.Context, c agentv1.LocalServiceClient) (*agentv1.ResetClockResponse, error) {
		return c.ResetClock(ctx, &agentv1.ResetClockRequest{})
	})
}
