package system_command

import (
	"testing"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/test/cluster/clustertest"
)

// TestCancel cancels a task in each state in which it can be, as an operator
// does.
func TestCancel(t *testing.T) {
	c := clustertest.Up(t, clustertest.Config{Nodes: 1})
	cancel := func(t *testing.T, id string, code int) {
		t.Helper()
		if out, err := c.Millctl(t.Context(), "task", "cancel", id, "--reason", "a test"); out.Code != code {
			t.Fatalf("task cancel: exit code %d, want %d (%v)", out.Code, code, err)
		}
	}
	ended := func(t *testing.T, id, name, started string, undo taskv1.UndoState) {
		t.Helper()
		if task := c.With(t).End(id); task.GetState() != taskv1.TaskState_TASK_STATE_CANCELLED || task.GetUndo() != undo {
			t.Errorf("task is %s, undo %s: %s; want it cancelled, undo %s", task.GetState(), task.GetUndo(), task.GetMessage(), undo)
		}
		if n := runs(c.With(t), name); n != started {
			t.Errorf("it was started %s times, want %s", n, started)
		}
		cancel(t, id, 6)
	}
	t.Run("running", func(t *testing.T) {
		id := c.With(t).Start("system.command", "n1", effect("running"))
		c.With(t).Sh("n1", "until test -s /root/ran-running; do sleep 0.1; done")
		cancel(t, id, 0)
		ended(t, id, "running", "1", taskv1.UndoState_UNDO_STATE_NOT_POSSIBLE)
		if left := c.With(t).Sh("n1", "pgrep -f go-runnin[g] || true; systemctl list-units --no-legend 'millwright-task-*'"); left != "" {
			t.Errorf("left of it: %s", left)
		}
	})
	t.Run("waiting for its window", func(t *testing.T) {
		id := c.With(t).Start("system.command", "n1", effect("waiting"), "--not-before", "1h")
		c.With(t).Await(id, taskv1.TaskState_TASK_STATE_ACCEPTED, taskv1.TaskState_TASK_STATE_WAITING)
		cancel(t, id, 0)
		ended(t, id, "waiting", "0", taskv1.UndoState_UNDO_STATE_NOT_NEEDED)
	})
	t.Run("queued", func(t *testing.T) {
		c.With(t).Sh("n1", "systemctl stop millwrightd.service")
		id := c.With(t).Start("system.command", "n1", effect("queued"))
		cancel(t, id, 0)
		c.With(t).Sh("n1", "systemctl start millwrightd.service")
		if err := c.WaitConnected(t.Context(), "n1"); err != nil {
			t.Fatal(err)
		}
		ended(t, id, "queued", "0", taskv1.UndoState_UNDO_STATE_NOT_NEEDED)
	})
}
