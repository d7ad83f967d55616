// Package slurm shows the slurm kinds on real nodes, with a real controller.
package slurm

import (
	"strconv"
	"strings"
	"testing"
	"time"

	slurmv1 "github.com/gpuaas/millwright/proto/millwright/slurm/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/test/canary"
	"github.com/gpuaas/millwright/test/cluster/clustertest"
	"github.com/gpuaas/millwright/test/testbed"
)

// join asks for a dynamic node with so many fake GPUs.
func join(gpus int) string {
	return "controllers: [slurm]\ndynamic:\n  features: [mw]\n  gres: [{name: gpu, type: h100, count: " + strconv.Itoa(gpus) + "}]\n"
}

// keyed asks for the same, and brings the cluster's key.
func keyed(gpus int) string { return join(gpus) + "munge_key: {name: munge-key}\n" }

func reconfigure(gpus int, wait string) string {
	return "node:\n  " + strings.ReplaceAll(strings.TrimSpace(keyed(gpus)), "\n", "\n  ") + "\nwait_for_jobs: " + wait + "\n"
}

func TestSlurm(t *testing.T) {
	c := clustertest.Up(t, clustertest.Config{Nodes: 5, Slurm: true})
	begin := time.Now()
	key, err := c.Machine(testbed.SlurmNode).ReadFile(t.Context(), mungeKey)
	if err != nil {
		t.Fatal(err)
	}
	secret := c.Put("munge-key", key)
	for _, n := range []string{"n1", "n2", "n3", "n4", "n5"} {
		prepare(t, c, n)
	}
	for _, n := range []string{"n3", "n4", "n5"} {
		give(t, c, n, key)
	}
	t.Run("cluster", func(t *testing.T) {
		t.Run("members", func(t *testing.T) {
			t.Parallel()
			members(t, c)
			c.With(t).Searched(begin, []string{"n1", "n2"}, []canary.Canary{secret}, "munge-key in n1:"+mungeKey, "munge-key in n2:"+mungeKey)
			t.Run("leave and join again", func(t *testing.T) { leaves(t, c.With(t)) })
		})
		t.Run("causes", func(t *testing.T) {
			t.Parallel()
			causes(t, c.With(t))
			t.Run("packages", func(t *testing.T) { packages(t, c.With(t)) })
		})
		t.Run("static", func(t *testing.T) {
			t.Parallel()
			static(t, c.With(t))
		})
	})
	t.Run("another key", func(t *testing.T) { rotates(t, c.With(t)) })
}

const mungeKey = "/etc/munge/munge.key"

// prepare gives a node two fake GPUs, which come at each boot as a driver's do.
func prepare(t *testing.T, c *clustertest.Cluster, node string) {
	t.Helper()
	c.Sh(node, `for i in 0 1; do echo "c /dev/mwgpu$i 0666 root root - 1:3"; done > /etc/tmpfiles.d/gpus.conf
systemd-tmpfiles --create /etc/tmpfiles.d/gpus.conf; test -c /dev/mwgpu1`)
}

// give puts the cluster's key on a node by hand.
func give(t *testing.T, c *clustertest.Cluster, node string, key []byte) {
	t.Helper()
	if err := c.Machine(node).WriteFile(t.Context(), mungeKey, key, 0o400); err != nil {
		t.Fatal(err)
	}
	c.Sh(node, "chown munge: "+mungeKey)
}

func succeed(t *testing.T, task *taskv1.Task) *taskv1.Task {
	t.Helper()
	if task.GetState() != taskv1.TaskState_TASK_STATE_SUCCEEDED {
		t.Fatalf("%s of %s is %s: %s: %s", task.GetKind(), task.GetNode(), task.GetState(), task.GetReason(), task.GetMessage())
	}
	return task
}

func members(t *testing.T, all *clustertest.Cluster) {
	c := all.With(t)
	ids, err := c.Run(t.Context(), "slurm.join", "n1,n2", keyed(2))
	if err != nil || len(ids) != 2 {
		t.Fatalf("join two nodes: %v %v", ids, err)
	}
	first, second := succeed(t, c.End(ids[0])), succeed(t, c.End(ids[1]))
	if !first.GetIssuedAt().AsTime().Equal(second.GetIssuedAt().AsTime()) {
		t.Error("two tasks, and not of one signature")
	}
	for _, n := range []string{"n1", "n2"} {
		isMember(t, c, n, "gpu:h100:2")
	}
	var r slurmv1.JoinResult
	if err := first.GetResult().UnmarshalTo(&r); err != nil || r.GetGres() != "gpu:h100:2" || !strings.Contains(r.GetState(), "IDLE") || r.GetVersion() == "" {
		t.Errorf("result %v (%v)", &r, err)
	}
	nothing(t, c, "n1", keyed(2))
	t.Run("stories", func(t *testing.T) {
		t.Run("first", func(t *testing.T) {
			t.Parallel()
			t.Run("drain and resume", func(t *testing.T) { drains(t, all.With(t)) })
			t.Run("reconfigure", func(t *testing.T) { reconfigures(t, all.With(t)) })
			t.Run("gate", func(t *testing.T) { gated(t, all.With(t)) })
		})
		t.Run("second", func(t *testing.T) {
			t.Parallel()
			t.Run("a reboot", func(t *testing.T) { reboots(t, all.With(t)) })
		})
	})
}

// isMember asks the controller, and runs a job that looks for its device.
func isMember(t *testing.T, c *clustertest.Cluster, node, gres string) {
	t.Helper()
	settles(t, c, "slurm", "sinfo --noheader -N -n "+node+" -o '%N %T %G'", node+" idle "+gres)
	if got := c.Sh("slurm", "srun -w "+node+` --gres=gpu:1 -t1 --immediate=20 sh -c 'echo $(hostname) $CUDA_VISIBLE_DEVICES $(test -c /dev/mwgpu$CUDA_VISIBLE_DEVICES && echo there)'`); got != node+" 0 there" {
		t.Errorf("a job on %s says %q", node, got)
	}
}

func nothing(t *testing.T, c *clustertest.Cluster, node, spec string) {
	t.Helper()
	if task := succeed(t, c.Do("slurm.join", node, spec)); len(task.GetPlan().GetSteps()) != 0 {
		t.Errorf("a second join of %s plans %v", node, task.GetPlan().GetDifferences())
	}
}

func drains(t *testing.T, c *clustertest.Cluster) {
	c.Sh("slurm", "scontrol update nodename=n1 state=drain reason='bad fan'")
	for _, kind := range []string{"slurm.drain", "slurm.resume"} {
		if task := c.Do(kind, "n1", "{}"); task.GetState() != taskv1.TaskState_TASK_STATE_REFUSED || !strings.Contains(task.GetMessage(), "bad fan") {
			t.Errorf("%s over an administrator's drain: %s: %s", kind, task.GetState(), task.GetMessage())
		}
	}
	if got := c.Sh("slurm", "sinfo --noheader -R -n n1 -o '%E|%N'"); got != "bad fan|n1" {
		t.Errorf("the administrator's drain is now %q", got)
	}
	c.Sh("slurm", "scontrol update nodename=n1 state=undrain")
	// Whoever runs a job chooses its name, and it can have two lines.
	c.Sh("slurm", `srun -w n1 -t5 --immediate=20 -J "$(printf 'two\nlines|of')" sleep 300 >/dev/null 2>&1 &
for i in $(seq 100); do squeue -h -w n1 -t running -o %A | grep -q . && exit 0; sleep 0.1; done; exit 1`)
	t.Logf("squeue says %q", c.Sh("slurm", "squeue -h -w n1 -o '%i|%u|%T|%e|%j'"))
	var r slurmv1.DrainResult
	task := succeed(t, c.Do("slurm.drain", "n1", "reason: an upgrade in progress\n"))
	if err := task.GetResult().UnmarshalTo(&r); err != nil || r.GetJobs() != 1 {
		t.Errorf("drained with a job on it, the result is %v (%v)", &r, err)
	}
	c.Sh("slurm", "scancel --nodelist=n1 --state=running")
	if got := c.Sh("slurm", "sinfo --noheader -R -n n1 -o '%E|%N'"); got != "mw:drain: an upgrade in progress|n1" {
		t.Errorf("drained, sinfo -R says %q", got)
	}
	nothing(t, c, "n1", keyed(2))
	succeed(t, c.Do("slurm.resume", "n1", "{}"))
	idle(t, c, "n1")
}

// settles waits until a command says what it should: the controller hears of
// the end of a job, of a registration and of a drain a moment after it.
func settles(t *testing.T, c *clustertest.Cluster, machine, command, want string) {
	t.Helper()
	got := c.Sh(machine, `for i in $(seq 300); do got=$(`+command+`); test "$got" = "`+want+`" && break; sleep 0.1; done; echo "$got"`)
	if got != want {
		t.Errorf("%s says %q after half a minute, want %q", command, got, want)
	}
}

// idle waits until the controller has a node without a drain, and has heard it.
func idle(t *testing.T, c *clustertest.Cluster, node string) {
	t.Helper()
	settles(t, c, "slurm", "sinfo --noheader -N -n "+node+" -o %T", "idle")
}

func reconfigures(t *testing.T, c *clustertest.Cluster) {
	if task := c.Do("slurm.join", "n1", keyed(1)); task.GetState() != taskv1.TaskState_TASK_STATE_REFUSED || !strings.Contains(task.GetMessage(), "slurm.reconfigure") {
		t.Errorf("a join with other resources: %s: %s", task.GetState(), task.GetMessage())
	}
	c.Sh("slurm", "srun -w n1 -t5 --immediate=20 -J holder sleep 300 >/dev/null 2>&1 & for i in $(seq 100); do squeue -h -n holder -t running | grep -q . && exit 0; sleep 0.1; done; exit 1")
	task := c.Do("slurm.reconfigure", "n1", reconfigure(1, "1s"))
	if task.GetState() != taskv1.TaskState_TASK_STATE_FAILED || task.GetReason() != "SLURM_JOBS" || task.GetUndo() != taskv1.UndoState_UNDO_STATE_COMPLETE || !strings.Contains(task.GetMessage(), "of root (running") {
		t.Errorf("with a job on it: %s %s, undo %s: %s", task.GetState(), task.GetReason(), task.GetUndo(), task.GetMessage())
	}
	if got := c.Sh("slurm", "squeue -h -n holder -o %T; scontrol show node n1 | grep -c DRAIN || true"); got != "RUNNING\n0" {
		t.Errorf("after that the job and the drain are %q", got)
	}
	c.Sh("slurm", "scancel -n holder")
	succeed(t, c.Do("slurm.reconfigure", "n1", reconfigure(1, "30s")))
	idle(t, c, "n1")
	isMember(t, c, "n1", "gpu:h100:1")
	nothing(t, c, "n1", keyed(1))
}

// reboots: the node comes back by itself, without a task and without a person.
func reboots(t *testing.T, c *clustertest.Cluster) {
	before := c.Sh("slurm", "scontrol show node n2 | grep -o 'SlurmdStartTime=[^ ]*'")
	if err := c.Machine("n2").Reboot(t.Context()); err != nil {
		t.Fatal(err)
	}
	c.Sh("slurm", "for i in $(seq 300); do s=$(scontrol show node n2 | grep -o 'SlurmdStartTime=[^ ]*'); test \"$s\" != "+before+" && exit 0; sleep 0.1; done; exit 1")
	idle(t, c, "n2")
	isMember(t, c, "n2", "gpu:h100:2")
	if err := c.WaitConnected(t.Context(), "n2"); err != nil {
		t.Fatal(err)
	}
	nothing(t, c, "n2", keyed(2))
}

func leaves(t *testing.T, c *clustertest.Cluster) {
	succeed(t, c.Do("slurm.leave", "n2", "{}"))
	if got := c.Sh("slurm", "scontrol show node n2 || true"); !strings.Contains(got, "Node n2 not found") {
		t.Errorf("the controller still has the node: %s", got)
	}
	if got := c.Sh("n2", "pgrep -x slurmd; ls "+mungeKey+" /etc/default/millwright-slurmd /etc/systemd/system/slurmd.service.d/*.conf 2>/dev/null; systemctl is-active munge; systemctl is-enabled slurmd || true"); got != "inactive\ndisabled" {
		t.Errorf("left on the node: %s", got)
	}
	if task := succeed(t, c.Do("slurm.leave", "n2", "{}")); len(task.GetPlan().GetSteps()) != 0 {
		t.Errorf("a second leave plans %v", task.GetPlan())
	}
	succeed(t, c.Do("slurm.join", "n2", keyed(2)))
	idle(t, c, "n2")
	isMember(t, c, "n2", "gpu:h100:2")
}
