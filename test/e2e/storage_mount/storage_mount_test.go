// Package storage_mount shows storage.mount and storage.unmount on real nodes.
package storage_mount

import (
	"fmt"
	"strings"
	"testing"

	storagev1 "github.com/gpuaas/millwright/proto/millwright/storage/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/test/cluster"
	"github.com/gpuaas/millwright/test/cluster/clustertest"
)

const (
	target = "/mnt/mill-wright"
	unit   = `mnt-mill\x2dwright.mount`
	volume = "target: " + target + "\nglusterfs: {servers: [storage], volume: v1}\n"
)

func TestGlusterfs(t *testing.T) {
	c := clustertest.Up(t, clustertest.Config{Nodes: 2, Storage: true})
	first := mountBoth(t, c)
	t.Run("a native unit of its own", func(t *testing.T) { nativeUnit(t, c, first) })
	t.Run("data crosses nodes", func(t *testing.T) {
		c.Sh("n1", "echo from-n1 > "+target+"/f")
		if got := c.Sh("n2", "cat "+target+"/f"); got != "from-n1" {
			t.Errorf("n2 reads %q", got)
		}
		if left := c.Sh("n1", "ls -A "+target); left != "f" {
			t.Errorf("the volume holds %q besides what was written: a probe did not clean up", left)
		}
	})
	t.Run("a second task plans nothing", func(t *testing.T) {
		task := succeed(t, c, c.Do("storage.mount", "n1", volume))
		if n := len(task.GetPlan().GetSteps()); n != 0 {
			t.Errorf("it planned %d steps: %v", n, task.GetPlan())
		}
	})
	t.Run("survives the agent", func(t *testing.T) {
		before := c.Sh("n1", "grep ' "+target+" ' /proc/self/mountinfo; systemctl show -P InvocationID "+quoted(unit))
		c.Sh("n1", "systemctl kill -s KILL millwrightd.service; systemctl restart millwrightd.service")
		after := c.Sh("n1", "grep ' "+target+" ' /proc/self/mountinfo; systemctl show -P InvocationID "+quoted(unit))
		if before != after {
			t.Errorf("mount before\n%s\nafter\n%s", before, after)
		}
	})
	t.Run("drift is named", func(t *testing.T) { drift(t, c) })
	t.Run("busy", func(t *testing.T) { busy(t, c) })
	t.Run("a mount that hangs", func(t *testing.T) { hung(t, c) })
	t.Run("stands after a reboot", func(t *testing.T) {
		if err := c.Machine("n2").Reboot(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := c.WaitConnected(t.Context(), "n2"); err != nil {
			t.Fatal(err)
		}
		c.Sh("n2", "for i in $(seq 300); do grep -q ' "+target+" ' /proc/self/mountinfo && break; sleep 0.1; done; cat "+target+"/f")
		task := succeed(t, c, c.Do("storage.mount", "n2", volume, "--plan"))
		if n := len(plan(t, task).GetSteps()); n != 0 {
			t.Errorf("after the reboot it plans %v", plan(t, task))
		}
	})
	t.Run("unmount", func(t *testing.T) {
		succeed(t, c, c.Do("storage.unmount", "n1", "target: "+target))
		if out := c.Sh("n1", "grep ' "+target+" ' /proc/self/mountinfo || ls /etc/systemd/system | grep mill..wright || true"); out != "" {
			t.Errorf("left: %s", out)
		}
		again := succeed(t, c, c.Do("storage.unmount", "n1", "target: "+target))
		if n := len(again.GetPlan().GetSteps()); n != 0 {
			t.Errorf("a second unmount plans %v", again.GetPlan())
		}
	})
}

// mountBoth mounts on two nodes with one signature.
func mountBoth(t *testing.T, c *clustertest.Cluster) *taskv1.Task {
	ids, err := c.Run(t.Context(), "storage.mount", "n1,n2", volume)
	if err != nil || len(ids) != 2 {
		t.Fatalf("run on two nodes: %v %v", ids, err)
	}
	first, second := succeed(t, c, c.End(ids[0])), succeed(t, c, c.End(ids[1]))
	if !first.GetIssuedAt().AsTime().Equal(second.GetIssuedAt().AsTime()) || first.GetNode() == second.GetNode() {
		t.Errorf("two tasks of one signature: %v and %v", first, second)
	}
	return first
}

func nativeUnit(t *testing.T, c *clustertest.Cluster, task *taskv1.Task) {
	var result storagev1.MountResult
	if err := task.GetResult().UnmarshalTo(&result); err != nil {
		t.Fatal(err)
	}
	if result.GetUnit() != unit || result.GetFstype() != "fuse.glusterfs" || !strings.Contains(result.GetSource(), "storage:/v1") || result.GetCapacityBytes() == 0 {
		t.Errorf("result %v", &result)
	}
	if got := c.Sh("n1", "systemctl is-enabled "+quoted(unit)+"; systemctl show -P ActiveState -P FragmentPath "+quoted(unit)); !strings.HasPrefix(got, "enabled\n") || !strings.Contains(got, "active") || !strings.Contains(got, "/etc/systemd/system/") {
		t.Errorf("unit: %s", got)
	}
	// The FUSE daemon must not be the agent's child, or it dies with it.
	cgroup := c.Sh("n1", "cat /proc/$(pgrep -x glusterfs | head -1)/cgroup")
	if strings.Contains(cgroup, "millwrightd.service") || !strings.Contains(cgroup, ".mount") {
		t.Errorf("the daemon runs in %s", cgroup)
	}
}

func drift(t *testing.T, c *clustertest.Cluster) {
	for _, tc := range []struct {
		name, damage, subject, have, want string
	}{
		{"remounted read only", "mount -i -o remount,ro " + target, "mount " + target, "ro", "rw"},
		{"unmounted from outside", "umount " + target, "mount " + target, "nothing", "storage:/v1"},
		{"unit edited", "sed -i 's/^Options=.*/Options=_netdev,log-level=DEBUG/' /etc/systemd/system/" + quoted(unit) + "; systemctl daemon-reload", unit, "", ""},
		{"drop-in added", "mkdir -p /etc/systemd/system/" + quoted(unit+".d") + "; printf '[Mount]\\nTimeoutSec=7\\n' > /etc/systemd/system/" + quoted(unit+".d") + "/x.conf; systemctl daemon-reload", unit, "x.conf", ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c.Sh("n1", "set -e; systemctl stop millwrightd.service; "+tc.damage+"; systemctl start millwrightd.service")
			task := succeed(t, c, c.Do("storage.mount", "n1", volume, "--plan"))
			if n := len(plan(t, task).GetDifferences()); n != 1 || !named(plan(t, task), tc.subject, tc.have, tc.want) {
				t.Errorf("the plan names %d differences, want it alone: %v", n, plan(t, task).GetDifferences())
			}
			if tc.name == "drop-in added" {
				c.Sh("n1", "rm -r /etc/systemd/system/"+quoted(unit+".d")+"; systemctl daemon-reload")
			}
			succeed(t, c, c.Do("storage.mount", "n1", volume))
			c.Sh("n1", "echo again > "+target+"/f && grep ' "+target+" ' /proc/self/mountinfo")
			if after := plan(t, succeed(t, c, c.Do("storage.mount", "n1", volume, "--plan"))); len(after.GetSteps()) != 0 {
				t.Errorf("mended, it still plans %v", after)
			}
		})
	}
}

func busy(t *testing.T, c *clustertest.Cluster) {
	c.Sh("n1", "systemd-run --unit=holder --working-directory="+target+" /bin/sleep 600; until systemctl is-active holder.service; do sleep 0.1; done")
	pid := c.Sh("n1", "systemctl show -P MainPID holder.service")
	task := c.Do("storage.unmount", "n1", "target: "+target)
	if task.GetState() != taskv1.TaskState_TASK_STATE_FAILED && task.GetState() != taskv1.TaskState_TASK_STATE_REFUSED {
		t.Fatalf("unmount of a busy mount is %s", task.GetState())
	}
	if !strings.Contains(task.GetMessage(), pid) || !strings.Contains(task.GetMessage(), "sleep") {
		t.Errorf("the message names neither pid %s nor its command: %s", pid, task.GetMessage())
	}
	c.Sh("n1", "test -s "+target+"/f; grep -q ' "+target+" ' /proc/self/mountinfo; systemctl is-enabled "+quoted(unit)+"; systemctl stop holder.service")
	if after := plan(t, succeed(t, c, c.Do("storage.mount", "n1", volume, "--plan"))); len(after.GetSteps()) != 0 {
		t.Errorf("the refused unmount left something to do: %v", after)
	}
}

// hung stops the daemon that serves the mount, so that every access to it
// hangs: the probe ends by its deadline, and nothing else waits for it.
func hung(t *testing.T, c *clustertest.Cluster) {
	c.Sh("n1", "pkill -STOP -x glusterfs")
	id := c.Start("storage.mount", "n1", volume)
	other := c.Do("system.command", "n1", "argv: [/bin/true]")
	succeed(t, c, other)
	if early, err := c.Task(t.Context(), id); err != nil || cluster.Terminal(early.GetState()) {
		t.Errorf("while the mount hangs the task is %s (%v)", early.GetState(), err)
	}
	task := c.End(id)
	if task.GetState() != taskv1.TaskState_TASK_STATE_FAILED || !strings.Contains(task.GetMessage(), target) {
		t.Errorf("%s: %s", task.GetState(), task.GetMessage())
	}
	c.Sh("n1", "pkill -CONT -x glusterfs; millwrightd status >/dev/null")
	succeed(t, c, c.Do("storage.mount", "n1", volume))
}

// TestPreconditions shows what Plan refuses, with no step begun.
func TestPreconditions(t *testing.T) {
	c := clustertest.Up(t, clustertest.Config{Nodes: 1})
	c.Sh("n1", "mkdir -p /srv/real /srv/data /mnt/taken; ln -s /srv/real /mnt/link; mount -t tmpfs foreign /mnt/taken")
	before := c.Sh("n1", "cat /proc/self/mountinfo | cut -d' ' -f5- | sort; find /etc/systemd/system | sort")
	for _, tc := range []struct{ name, spec, want string }{
		{"symbolic link", "target: /mnt/link\nbind: {path: /srv/data}", "/mnt/link"},
		{"below a symbolic link", "target: /mnt/link/sub\nbind: {path: /srv/data}", "/mnt/link"},
		{"in use", "target: /mnt/taken\nbind: {path: /srv/data}", "/mnt/taken"},
		{"no source", "target: /mnt/new\nbind: {path: /srv/absent}", "/srv/absent"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			task := c.Do("storage.mount", "n1", tc.spec)
			if task.GetState() != taskv1.TaskState_TASK_STATE_REFUSED || task.GetReason() != "PRECONDITION" {
				t.Fatalf("%s %s: %s", task.GetState(), task.GetReason(), task.GetMessage())
			}
			if !strings.Contains(task.GetMessage(), tc.want) {
				t.Errorf("the message does not name %s: %s", tc.want, task.GetMessage())
			}
		})
	}
	if after := c.Sh("n1", "cat /proc/self/mountinfo | cut -d' ' -f5- | sort; find /etc/systemd/system | sort"); after != before {
		t.Errorf("refused tasks changed the node:\n%s\nbefore:\n%s", after, before)
	}
	t.Run("a failed mount is undone", func(t *testing.T) {
		task := c.Do("storage.mount", "n1", "target: /mnt/gone\nwait: {attempts: 2, back_off: 1s}\nglusterfs: {servers: [n1], volume: absent}")
		if task.GetState() != taskv1.TaskState_TASK_STATE_FAILED || task.GetUndo() != taskv1.UndoState_UNDO_STATE_COMPLETE {
			t.Fatalf("%s, undo %s: %s", task.GetState(), task.GetUndo(), task.GetMessage())
		}
		if after := c.Sh("n1", "cat /proc/self/mountinfo | cut -d' ' -f5- | sort; find /etc/systemd/system | sort; ls -d /mnt/gone 2>/dev/null || true"); after != before {
			t.Errorf("undone, the node is\n%s\nbefore:\n%s", after, before)
		}
	})
}

func succeed(t *testing.T, _ *clustertest.Cluster, task *taskv1.Task) *taskv1.Task {
	t.Helper()
	if task.GetState() != taskv1.TaskState_TASK_STATE_SUCCEEDED {
		t.Fatalf("task %s is %s: %s: %s", task.GetId(), task.GetState(), task.GetReason(), task.GetMessage())
	}
	return task
}

// plan returns the plan that a task in mode plan has as its result.
func plan(t *testing.T, task *taskv1.Task) *taskv1.Plan {
	t.Helper()
	var p taskv1.Plan
	if err := task.GetResult().UnmarshalTo(&p); err != nil {
		t.Fatal(err)
	}
	return &p
}

func named(p *taskv1.Plan, subject, have, want string) bool {
	for _, d := range p.GetDifferences() {
		h, w := d.GetHave(), d.GetWant()
		if h == "" {
			h = "nothing"
		}
		if strings.Contains(d.GetSubject(), subject) && strings.Contains(h, have) && strings.Contains(w, want) {
			return true
		}
	}
	return false
}

func quoted(s string) string { return fmt.Sprintf("'%s'", s) }
