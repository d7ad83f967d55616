package storage_kinds

import (
	"strings"
	"testing"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/test/cluster/clustertest"
)

// attempts kills the agent in the wait between two attempts of a mount that its
// server refuses: the cap counts over all lives of the agent.
func attempts(t *testing.T, c *clustertest.Cluster, node string) {
	c.Sh(node, "echo refuse > /run/standin-do; rm -f /run/standin-calls; systemctl reset-failed mnt-weka.mount 2>/dev/null || true")
	id := c.Start("storage.mount", node, "target: /mnt/weka\nwait: {attempts: 3, back_off: 3s}\nweka: {backends: [n1], filesystem: fast}\n")
	// In the wait: a try that the kill itself cuts off has not failed, and counts for nothing.
	c.Sh(node, `for i in $(seq 600); do journalctl --no-pager -u millwrightd | grep 'step is tried again' | grep -q `+id+` && break; sleep 0.1; done
systemctl kill --signal=KILL millwrightd.service`)
	task := c.End(id)
	if task.GetState() != taskv1.TaskState_TASK_STATE_FAILED || task.GetUndo() != taskv1.UndoState_UNDO_STATE_COMPLETE || !strings.Contains(task.GetMessage(), "access denied by server") {
		t.Errorf("a mount whose server refuses: %s %s: %s", task.GetState(), task.GetUndo(), task.GetMessage())
	}
	if calls := c.Sh(node, "wc -l < /run/standin-calls; systemctl show -P NRestarts millwrightd.service | grep -qx 0 && echo never killed || true"); calls != "3" {
		t.Errorf("three attempts were allowed, and the helper was called so often: %s", calls)
	}
	c.Sh(node, "rm /run/standin-do")
}
