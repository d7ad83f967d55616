package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/test/testbed"
)

const agentUnit = "millwrightd.service"

// work is a demo-work that runs on a node.
type work struct {
	d    *demo
	node *testbed.Node
	name string
	id   string // its task
	unit string // its systemd unit
	// invocation is the unit's, at the start.
	invocation string
}

// begin creates the task and returns when its command runs.
func (d *demo) begin(ctx context.Context, n *testbed.Node, name string, code int) (*work, error) {
	ids, err := d.c.Run(ctx, "system.command", n.Name(), workSpec(name, code))
	if err != nil {
		return nil, err
	}
	w := &work{d: d, node: n, name: name, id: ids[0]}
	if _, err := d.c.WaitState(ctx, w.id, taskLimit, taskv1.TaskState_TASK_STATE_RUNNING); err != nil {
		return nil, err
	}
	err = until(ctx, "the command has started", func() error { return w.startedOnce(ctx) })
	if err != nil {
		return nil, err
	}
	res, err := n.Exec(ctx, "systemctl", "list-units", "--plain", "--no-legend", "millwright-task-"+w.id+"-*")
	fields := strings.Fields(string(res.Stdout))
	if err != nil || len(fields) == 0 {
		return nil, fmt.Errorf("no unit of task %s runs on %s: %w", w.id, n.Name(), err)
	}
	w.unit = fields[0]
	w.invocation, err = show1(ctx, n, w.unit, "InvocationID")
	if err == nil && len(w.invocation) != 32 {
		err = fmt.Errorf("InvocationID of %s is %q", w.unit, w.invocation)
	}
	return w, err
}

// startedOnce reads the counter file on the node.
func (w *work) startedOnce(ctx context.Context) error {
	data, err := w.node.ReadFile(ctx, "/var/lib/demo/"+w.name+".count")
	if err != nil {
		return err
	}
	if n := strings.Count(string(data), "\n"); n != 1 {
		return fmt.Errorf("the command of task %s was started %d times, want once", w.id, n)
	}
	return nil
}

// ended checks a finished work: its outcome, its one start, and its unit.
func (w *work) ended(ctx context.Context, code int) error {
	if err := w.d.ended(ctx, w.id, w.name, code); err != nil {
		return err
	}
	outcome, err := w.outcome(ctx)
	if err != nil {
		return err
	}
	if outcome.GetInvocationId() != w.invocation {
		return fmt.Errorf("task %s reports the InvocationID %s, but its command was started in %s", w.id, outcome.GetInvocationId(), w.invocation)
	}
	return w.startedOnce(ctx)
}

func (w *work) outcome(ctx context.Context) (*taskv1.CommandOutcome, error) {
	t, err := w.d.c.Task(ctx, w.id)
	if err != nil {
		return nil, err
	}
	for _, s := range t.GetSteps() {
		if s.GetCommand() != nil {
			return s.GetCommand(), nil
		}
	}
	return nil, fmt.Errorf("task %s has no step with the outcome of a command", w.id)
}

// ended waits for the end of a command's task and checks how it is reported.
func (d *demo) ended(ctx context.Context, id, name string, code int) error {
	t, err := d.c.WaitEnd(ctx, id, taskLimit)
	if err != nil {
		return err
	}
	want, reason := taskv1.TaskState_TASK_STATE_SUCCEEDED, ""
	if code != 0 {
		want, reason = taskv1.TaskState_TASK_STATE_FAILED, "COMMAND_EXIT"
	}
	if t.GetState() != want || t.GetReason() != reason {
		return fmt.Errorf("task %s is %s (%s: %s), want %s %s", id, t.GetState(), t.GetReason(), t.GetMessage(), want, reason)
	}
	outcome, err := (&work{d: d, id: id}).outcome(ctx)
	if err != nil {
		return err
	}
	if got := int(outcome.GetExitCode()); got != code || outcome.GetSignal() != 0 {
		return fmt.Errorf("task %s: %s is reported to have exited %d by signal %d, want %d", id, name, got, outcome.GetSignal(), code)
	}
	return nil
}

// release tells a work to go on.
func release(ctx context.Context, n *testbed.Node, name string) error {
	return n.WriteFile(ctx, "/var/lib/demo/"+name+".go", nil, 0o644)
}

// killAgent kills the agent while a command runs; systemd starts it again.
func (d *demo) killAgent(ctx context.Context) error {
	w, err := d.begin(ctx, d.n1, "steady", 0)
	if err != nil {
		return err
	}
	d.killed = w.id
	pid, err := show1(ctx, d.n1, agentUnit, "MainPID")
	if err != nil {
		return err
	}
	if _, err := d.n1.Exec(ctx, "kill", "-KILL", pid); err != nil {
		return err
	}
	err = until(ctx, "systemd has started the agent again", func() error {
		now, err := show1(ctx, d.n1, agentUnit, "MainPID")
		if err == nil && (now == pid || now == "0") {
			err = fmt.Errorf("its MainPID is %s", now)
		}
		return err
	})
	if err != nil {
		return err
	}
	if err := d.c.WaitConnected(ctx, d.n1.Name()); err != nil {
		return err
	}
	after, err := show1(ctx, d.n1, w.unit, "InvocationID")
	if err != nil {
		return err
	}
	if after != w.invocation {
		return fmt.Errorf("InvocationID of the command's unit: %s before the kill, %q after it", w.invocation, after)
	}
	say("killed with SIGKILL; the command's unit has the same InvocationID before and after: %s", after)
	if err := release(ctx, d.n1, w.name); err != nil {
		return err
	}
	if err := w.ended(ctx, 0); err != nil {
		return err
	}
	say("the new agent adopted the command: it was started once, and succeeded")
	return nil
}

// endWithoutAgent lets a command exit with 7 while nobody watches it.
func (d *demo) endWithoutAgent(ctx context.Context) error {
	w, err := d.begin(ctx, d.n1, "unwatched", 7)
	if err != nil {
		return err
	}
	pid, err := show1(ctx, d.n1, agentUnit, "MainPID")
	if err != nil {
		return err
	}
	if _, err := d.n1.Exec(ctx, "sh", "-c", "kill -KILL "+pid+"; systemctl stop "+agentUnit); err != nil {
		return err
	}
	if err := release(ctx, d.n1, w.name); err != nil {
		return err
	}
	err = until(ctx, "the command has ended", func() error {
		state, err := show1(ctx, d.n1, w.unit, "ActiveState")
		if err == nil && state == "active" {
			err = fmt.Errorf("%s is %s", w.unit, state)
		}
		return err
	})
	if err != nil {
		return err
	}
	if state, err := show1(ctx, d.n1, agentUnit, "ActiveState"); err != nil || state == "active" {
		return fmt.Errorf("the agent is %s, and should have been down: %w", state, err)
	}
	if _, err := d.n1.Exec(ctx, "systemctl", "start", agentUnit); err != nil {
		return err
	}
	if err := w.ended(ctx, 7); err != nil {
		return err
	}
	say("it exited with 7 while the agent was down, and is reported as failed with 7")
	return nil
}

// reboot reboots a node under a command. What became of the command is known
// or held for a person; it is never run again.
func (d *demo) reboot(ctx context.Context) error {
	w, err := d.begin(ctx, d.n2, "interrupted", 0)
	if err != nil {
		return err
	}
	before, err := d.n2.BootID(ctx)
	if err != nil {
		return err
	}
	if err := d.n2.Reboot(ctx); err != nil {
		return err
	}
	after, err := d.n2.BootID(ctx)
	if err != nil || after == before {
		return fmt.Errorf("boot id %s after the reboot, %s before: %w", after, before, err)
	}
	if err := d.c.WaitConnected(ctx, d.n2.Name()); err != nil {
		return err
	}
	t, err := d.c.WaitEnd(ctx, w.id, taskLimit)
	if err != nil {
		return err
	}
	if s := t.GetState(); s != taskv1.TaskState_TASK_STATE_FAILED && s != taskv1.TaskState_TASK_STATE_HELD {
		return fmt.Errorf("the task that the reboot cut short is %s: %s", s, t.GetMessage())
	}
	if err := w.startedOnce(ctx); err != nil {
		return err
	}
	say("n2 is back with a new boot id; its task is told as %s: %s", strings.ToLower(strings.TrimPrefix(t.GetState().String(), "TASK_STATE_")), t.GetMessage())
	say("its command was started once, and not again after the reboot")
	if err := until(ctx, "the volume is mounted after the reboot", func() error { return mounted(ctx, d.n2) }); err != nil {
		return err
	}
	if got, err := d.n2.ReadFile(ctx, "/mnt/shared/hello"); err != nil || string(got) != "from n1" {
		return fmt.Errorf("n2 reads %q of what n1 wrote: %w", got, err)
	}
	say("the volume is mounted on it again, and what n1 wrote is there")
	return nil
}

// show1 returns one property of a unit.
func show1(ctx context.Context, n *testbed.Node, unit, property string) (string, error) {
	res, err := n.Exec(ctx, "systemctl", "show", "--value", "--property="+property, unit)
	return strings.TrimSpace(string(res.Stdout)), err
}

// until polls for something that the nodes do by themselves.
func until(ctx context.Context, what string, check func() error) error {
	ctx, cancel := context.WithTimeout(ctx, taskLimit)
	defer cancel()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		err := check()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait until %s: %w: %w", what, context.Cause(ctx), err)
		case <-tick.C:
		}
	}
}
