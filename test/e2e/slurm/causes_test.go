package slurm

import (
	"strings"
	"testing"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/test/cluster/clustertest"
)

// footprint is all of a node that a join changes: files, units, and the device
// directory's mode. The journal of munge and slurmd is not part of it.
const footprint = `cd /etc; find munge default/millwright-slurmd systemd/system slurm -printf '%p %m %u %l\n' 2>/dev/null | sort
sha256sum munge/munge.key; systemctl is-enabled munge slurmd; systemctl is-active munge slurmd; pgrep -x slurmd; ls /run/slurm 2>/dev/null; true`

// causes damages a node in one way after the other. Each join fails with its
// plain reason, and leaves the node and the controller as they were.
func causes(t *testing.T, c *clustertest.Cluster) {
	for _, tc := range []struct {
		name, damage, reason, words, mend string
	}{
		{"wrong key", "cp -p " + mungeKey + " /root/key; head -c 128 /dev/urandom > " + mungeKey, "MUNGE_KEY_REFUSED", "munge key is not the cluster's", "cat /root/key > " + mungeKey},
		{"key that others can read", "chmod 644 " + mungeKey, "MUNGE_KEY_MODE", "0644", "chmod 400 " + mungeKey},
		{"munged down", "mv /usr/sbin/munged /usr/sbin/munged.real; printf '#!/bin/sh\\nexit 1\\n' > /usr/sbin/munged; chmod 755 /usr/sbin/munged", "MUNGE_DOWN", "munged does not run", "mv /usr/sbin/munged.real /usr/sbin/munged"},
		{
			"clock of munged off by 10 minutes",
			"mkdir -p /run/systemd/system/munge.service.d; printf '[Service]\\nEnvironment=LD_PRELOAD=/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1 FAKETIME=-10m FAKETIME_NO_CACHE=1\\n' > /run/systemd/system/munge.service.d/clock.conf; systemctl daemon-reload",
			"CLOCK_OFF", "munged's clock is -10m", "rm -r /run/systemd/system/munge.service.d; systemctl daemon-reload",
		},
		{"device missing", "rm /dev/mwgpu1", "SLURM_DEVICE_MISSING", "/dev/mwgpu1", "systemd-tmpfiles --create /etc/tmpfiles.d/gpus.conf"},
		{
			"skipped by ConditionPathExists",
			"mkdir -p /run/systemd/system/slurmd.service.d; printf '[Unit]\\nConditionPathExists=/etc/absent\\n' > /run/systemd/system/slurmd.service.d/zz-site.conf; systemctl daemon-reload",
			"SLURM_SKIPPED", "zz-site.conf", "rm -r /run/systemd/system/slurmd.service.d; systemctl daemon-reload",
		},
		{
			// A stand-in for a newer slurmd: the real one, which says that it is newer.
			"version newer than the controller",
			"mv /usr/sbin/slurmd /usr/sbin/slurmd.real; printf '#!/bin/sh\\ntest \"$1\" = -V && echo slurm 23.11.4 && exit\\nexec /usr/sbin/slurmd.real \"$@\"\\n' > /usr/sbin/slurmd; chmod 755 /usr/sbin/slurmd",
			"SLURM_VERSION", "23.11.4", "mv /usr/sbin/slurmd.real /usr/sbin/slurmd",
		},
	} {
		c.Sh("n3", tc.damage)
		fails(t, c, tc.name, "slurm.join", "n3", strings.ReplaceAll(join(2), "[slurm]", "[slurm:6817]"), tc.reason, tc.words)
		c.Sh("n3", tc.mend)
	}
	// A key that comes with the join, and is not the cluster's: the one before is
	// back, and munged runs with it, as the join at the end shows.
	c.Put("foreign-key", []byte(strings.Repeat("a key of another cluster ", 4)))
	fails(t, c, "wrong key that comes with it", "slurm.join", "n3", join(2)+"munge_key: {name: foreign-key}\n", "MUNGE_KEY_REFUSED", "munge key is not the cluster's")
	// Nothing listens at that port, as when the controller is down.
	fails(t, c, "controller down", "slurm.join", "n3", strings.ReplaceAll(join(2), "[slurm]", "[slurm:7]"), "SLURM_CONTROLLER_DOWN", "slurm:7")
	// Mended, the node joins.
	succeed(t, c.Do("slurm.join", "n3", join(2)))
	idle(t, c, "n3")
	isMember(t, c, "n3", "gpu:h100:2")
}

// fails carries out a task that fails, and compares the node and what the
// controller has of it with what was before.
func fails(t *testing.T, c *clustertest.Cluster, name, kind, node, spec, reason, words string) {
	t.Helper()
	known := func() string { return c.Sh("slurm", "sinfo --noheader -N -n "+node+" -o %N") }
	before, had := c.Sh(node, footprint), known()
	task := c.Do(kind, node, spec)
	if task.GetState() != taskv1.TaskState_TASK_STATE_FAILED || task.GetReason() != reason || task.GetUndo() != taskv1.UndoState_UNDO_STATE_COMPLETE {
		t.Errorf("%s: %s %s, undo %s: %s", name, task.GetState(), task.GetReason(), task.GetUndo(), task.GetMessage())
	}
	if !strings.Contains(task.GetMessage(), words) {
		t.Errorf("%s: the message does not say %q: %s", name, words, task.GetMessage())
	}
	t.Logf("%s: %s: %s", name, task.GetReason(), task.GetMessage())
	if after := c.Sh(node, footprint); after != before {
		t.Errorf("%s: undone, the node is\n%s\nbefore:\n%s", name, after, before)
	}
	if has := known(); has != had {
		t.Errorf("%s: the controller has %q, before %q", name, has, had)
	}
}

// static joins as a node whose slurm.conf entry has more GPUs than there are. The
// controller keeps it as invalid afterwards, until it registers with that count:
// that is the controller's own word, and no task's to take back.
func static(t *testing.T, c *clustertest.Cluster) {
	spec := "controllers: [slurm]\nstatic: {gres: [{name: gpu, type: h100, count: 4}]}\n"
	fails(t, c, "resources counted otherwise", "slurm.join", "n4", spec, "SLURM_GRES", "gres/gpu count reported lower than configured (2 < 4)")
	two := strings.ReplaceAll(spec, "count: 4", "count: 2")
	succeed(t, c.Do("slurm.join", "n5", two))
	idle(t, c, "n5")
	isMember(t, c, "n5", "gpu:h100:2")
	nothing(t, c, "n5", two)
	succeed(t, c.Do("slurm.leave", "n5", "{}"))
	if got := c.Sh("slurm", "scontrol show node n5 | grep -o 'Reason=mw:leave'"); got != "Reason=mw:leave" {
		t.Errorf("left, the controller has %q of it", got)
	}
	fails(t, c, "a node of slurm.conf as a dynamic one", "slurm.join", "n5", join(2), "SLURM_NOT_REGISTERED", "join it as a static one")
	succeed(t, c.Do("slurm.join", "n5", two))
	idle(t, c, "n5")
	fails(t, c, "resources other than asked for", "slurm.join", "n4", two, "SLURM_GRES", "")
}
