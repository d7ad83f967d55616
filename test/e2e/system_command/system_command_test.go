// Package system_command shows system.command on real nodes.
package system_command

import (
	"strings"
	"testing"

	systemv1 "github.com/gpuaas/millwright/proto/millwright/system/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/test/cluster/clustertest"
)

// slow counts its runs, waits and exits with 7.
const slow = `argv: [/bin/sh, -c, "echo run >> /root/runs; echo begun; sleep 4; echo over; exit 7"]`

func TestCommand(t *testing.T) {
	c := clustertest.Up(t, clustertest.Config{Nodes: 1})
	t.Run("succeeds with its typed result", func(t *testing.T) {
		task := c.Do("system.command", "n1", `argv: [/bin/sh, -c, "echo out; echo err >&2"]`)
		if task.GetState() != taskv1.TaskState_TASK_STATE_SUCCEEDED {
			t.Fatalf("state %s: %s", task.GetState(), task.GetMessage())
		}
		var result systemv1.CommandResult
		if err := task.GetResult().UnmarshalTo(&result); err != nil {
			t.Fatal(err)
		}
		if got := result.GetOutcome().GetStdout().GetTotalBytes(); got != 4 {
			t.Errorf("stdout has %d bytes, want 4", got)
		}
		out, err := c.Millctl(t.Context(), "task", "logs", task.GetId(), "-f")
		if err != nil || !strings.Contains(out.Stdout, "out\n") || !strings.Contains(out.Stdout+out.Stderr, "err\n") {
			t.Errorf("logs = %q %q (%v)", out.Stdout, out.Stderr, err)
		}
	})
	t.Run("agent killed in the middle", func(t *testing.T) {
		id := c.Start("system.command", "n1", slow)
		c.Await(id, taskv1.TaskState_TASK_STATE_RUNNING)
		unit := "millwright-task-" + id + "-0-1.service"
		c.Sh("n1", "until systemctl is-active "+unit+" && test -s /root/runs; do sleep 0.1; done")
		before := c.Sh("n1", "systemctl show -P InvocationID "+unit)
		c.Sh("n1", "systemctl stop millwrightd.service && test $(systemctl show -P InvocationID "+unit+") = "+before)
		c.Sh("n1", "while systemctl is-active "+unit+"; do sleep 0.1; done; systemctl start millwrightd.service")
		task := c.End(id)
		if task.GetState() != taskv1.TaskState_TASK_STATE_FAILED || task.GetReason() != "COMMAND_EXIT" {
			t.Fatalf("state %s reason %s, want failed COMMAND_EXIT", task.GetState(), task.GetReason())
		}
		command := task.GetSteps()[0].GetCommand()
		if command.GetExitCode() != 7 || command.GetInvocationId() != before {
			t.Errorf("exit code %d in %s, want 7 in %s", command.GetExitCode(), command.GetInvocationId(), before)
		}
		if runs := c.Sh("n1", "wc -l < /root/runs"); runs != "1" {
			t.Errorf("it ran %s times, want once", runs)
		}
	})
}
