package slurm

import (
	"context"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	storagev1 "github.com/gpuaas/millwright/proto/millwright/storage/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/test/cluster/clustertest"
)

const gatedNode = "n1"

// hold is a job that looks at a file of the mount all the time and notes when it
// does not find what it had at its beginning, until it is let go. At its end it
// writes when that is, in which boot, and what it noted.
const hold = `#!/bin/sh
cd /; out=/var/lib/held/$1; boot=$(cat /proc/sys/kernel/random/boot_id)
was=$(cat /mnt/data/who); echo begun > $out.begun
until test -e $out.go; do test "$(cat /mnt/data/who)" = "$was" || echo lost >> $out.lost; sleep 0.05; done
echo "$(date +%s%N) $was $boot $(cat /proc/sys/kernel/random/boot_id) $(cat $out.lost 2>/dev/null | wc -l)" > $out.tmp; sync; mv $out.tmp $out.end`

// gated: what disturbs a node waits for the jobs on it, and for nobody else.
func gated(t *testing.T, c *clustertest.Cluster) {
	c.Sh(gatedNode, "mkdir -p /srv/a /srv/b /var/lib/held; echo a > /srv/a/who; echo b > /srv/b/who; cat > /usr/local/bin/hold <<'EOF'\n"+hold+"\nEOF\nchmod 755 /usr/local/bin/hold")
	idle(t, c, gatedNode)
	// Where nothing is mounted nobody is disturbed: no drain may be needed or made.
	succeed(t, c.Do("storage.mount", gatedNode, mountOf("a")))
	remounts(t, c)
	unmountInVain(t, c)
	rebootsGated(t, c)
	foreignDrain(t, c)
}

func mountOf(dir string) string {
	return "target: /mnt/data\nbind: {path: /srv/" + dir + "}\nwait_for_jobs: 100s\n"
}

// holder starts a job on the node and returns its id once it runs.
func holder(t *testing.T, c *clustertest.Cluster, name string) string {
	t.Helper()
	id := c.Sh("slurm", "sbatch --parsable -w "+gatedNode+" -t 10 -J "+name+" -o /dev/null -D / --wrap '/usr/local/bin/hold "+name+"'")
	c.Sh(gatedNode, "for i in $(seq 300); do test -e /var/lib/held/"+name+".begun && exit 0; sleep 0.1; done; exit 1")
	return id
}

// waitsFor waits until a task says that it waits for a job, and the controller
// shows the node as drained by the task's kind.
func waitsFor(t *testing.T, c *clustertest.Cluster, id, kind, job string) {
	t.Helper()
	task, err := c.WaitTask(t.Context(), id, time.Minute, func(k *taskv1.Task) bool {
		for _, w := range k.GetConditions() {
			if w.GetType() == "Waiting" && w.GetReason() == "SLURM_JOBS" && strings.Contains(w.GetMessage(), "job "+job+" of root (running, until ") {
				return true
			}
		}
		return k.GetState() >= taskv1.TaskState_TASK_STATE_SUCCEEDED
	})
	if err != nil || task.GetState() != taskv1.TaskState_TASK_STATE_RUNNING {
		t.Fatalf("%s does not say that it waits for job %s: %v %v", kind, job, task, err)
	}
	settles(t, c, "slurm", "sinfo --noheader -R -n "+gatedNode+" -o %E | grep -c '^mw:"+kind+"-[0-9a-f]*: '", "1")
	settles(t, c, "slurm", "sinfo --noheader -N -n "+gatedNode+" -o %T", "draining")
}

// letGo ends a job, and asks that nothing has disturbed it: it saw its mount all
// the time, ended in the boot in which it began, and the controller calls it
// completed at its first start. It returns when it ended.
func letGo(t *testing.T, c *clustertest.Cluster, id, name, mount string) time.Time {
	t.Helper()
	c.Sh(gatedNode, "touch /var/lib/held/"+name+".go; for i in $(seq 300); do test -e /var/lib/held/"+name+".end && exit 0; sleep 0.1; done; exit 1")
	f := strings.Fields(c.Sh(gatedNode, "cat /var/lib/held/"+name+".end"))
	if len(f) != 5 || f[1] != mount || f[2] != f[3] || f[4] != "0" {
		t.Fatalf("job %s was disturbed: it wrote %v", name, f)
	}
	settles(t, c, "slurm", "scontrol show job "+id+" | grep -o 'JobState=[A-Z]*\\|Restarts=[0-9]*' | xargs", "JobState=COMPLETED Restarts=0")
	ns, err := strconv.ParseInt(f[0], 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return time.Unix(0, ns)
}

// after asks that a step of a task began when a job had ended.
func after(t *testing.T, task *taskv1.Task, stepType string, ended time.Time) {
	t.Helper()
	for i, p := range task.GetPlan().GetSteps() {
		if p.GetType() == stepType {
			if at := task.GetSteps()[i].GetStartTime().AsTime(); at.Before(ended) {
				t.Errorf("%s: step %s began at %v, and the job ended at %v", task.GetKind(), stepType, at, ended)
			}
			return
		}
	}
	t.Errorf("%s: no step %s in %v", task.GetKind(), stepType, task.GetPlan())
}

// remounts: another source for a mount that a job uses. What was signed without
// the drain is refused; the plan names the job.
func remounts(t *testing.T, c *clustertest.Cluster) {
	job := holder(t, c, "first")
	if task := c.Do("storage.mount", gatedNode, mountOf("b")); task.GetState() != taskv1.TaskState_TASK_STATE_REFUSED || task.GetReason() != "IMPACT_NOT_ALLOWED" {
		t.Errorf("signed without the drain: %s %s: %s", task.GetState(), task.GetReason(), task.GetMessage())
	}
	out, err := c.MillctlInput(t.Context(), mountOf("b"), "task", "run", "storage.mount", "-n", gatedNode, "-f", "-", "--plan")
	for _, want := range []string{
		`0  have Slurm drain node n1 as mw:storage\.mount-[0-9a-f]{8}, and wait 1m40s at most for its jobs  \(slurm\.ask\)`,
		`end the drain mw:storage\.mount-[0-9a-f]{8} of node n1  \(slurm\.return\)`,
		`In the way: slurm has node n1 as (MIXED|ALLOCATED)`, `job ` + job + ` of root \(first\) is running, until 20\d\d-`, `It may cause: drain`,
	} {
		if !regexp.MustCompile(want).MatchString(out.Stdout) {
			t.Errorf("the plan has no %q (%v):\n%s", want, err, out.Stdout)
		}
	}
	id := c.Start("storage.mount", gatedNode, mountOf("b"), "--allow-impact", "drain")
	waitsFor(t, c, id, "storage.mount", job)
	ended := letGo(t, c, job, "first", "a")
	task := succeed(t, c.End(id))
	after(t, task, "mount.set", ended)
	if got := c.Sh(gatedNode, "cat /mnt/data/who"); got != "b" {
		t.Errorf("mounted is %q", got)
	}
	idle(t, c, gatedNode)
}

// unmountInVain: the time for the jobs is over, and the node is as it was.
func unmountInVain(t *testing.T, c *clustertest.Cluster) {
	job := holder(t, c, "second")
	task := c.Do("storage.unmount", gatedNode, "target: /mnt/data\nwait_for_jobs: 2s\n", "--allow-impact", "drain")
	if task.GetState() != taskv1.TaskState_TASK_STATE_FAILED || task.GetReason() != "SLURM_JOBS" || task.GetUndo() != taskv1.UndoState_UNDO_STATE_COMPLETE ||
		!strings.Contains(task.GetMessage(), "job "+job+" of root (running") {
		t.Errorf("with a job that stays: %s %s, undo %s: %s", task.GetState(), task.GetReason(), task.GetUndo(), task.GetMessage())
	}
	settles(t, c, "slurm", "scontrol show node "+gatedNode+" | grep -c DRAIN || true", "0")
	letGo(t, c, job, "second", "b")
	// Slurm 22.05 goes on to show a node as mixed whose drain ended under a job,
	// until it has the next one: that this starts is what counts.
}

// rebootsGated: the agent is killed while it waits, and the wait goes on.
func rebootsGated(t *testing.T, c *clustertest.Cluster) {
	job := holder(t, c, "third")
	boot := c.Sh(gatedNode, "cat /proc/sys/kernel/random/boot_id")
	id := c.Start("system.reboot", gatedNode, "reason: a test\nwait_for_jobs: 100s\n", "--allow-impact", "drain,reboot")
	waitsFor(t, c, id, "system.reboot", job)
	c.Sh(gatedNode, "systemctl kill --signal=KILL --kill-whom=main millwrightd; for i in $(seq 300); do systemctl is-active -q millwrightd && exit 0; sleep 0.1; done; exit 1")
	if err := c.WaitConnected(t.Context(), gatedNode); err != nil {
		t.Fatal(err)
	}
	waitsFor(t, c, id, "system.reboot", job)
	ended := letGo(t, c, job, "third", "b")
	task := succeed(t, c.End(id))
	after(t, task, "node.reboot", ended)
	awaitBoot(t, c)
	if got := c.Sh(gatedNode, "cat /proc/sys/kernel/random/boot_id"); got == boot {
		t.Error("the node was not rebooted")
	}
	idle(t, c, gatedNode)
	c.Sh("slurm", "srun -w "+gatedNode+" -t1 --immediate=20 true")
}

func awaitBoot(t *testing.T, c *clustertest.Cluster) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := c.Machine(gatedNode).WaitRunning(ctx); err != nil {
		t.Fatal(err)
	}
}

// foreignDrain: an administrator's drain is used, and stays.
func foreignDrain(t *testing.T, c *clustertest.Cluster) {
	c.Sh("slurm", "scontrol update nodename="+gatedNode+" state=drain reason='bad fan'")
	task := succeed(t, c.Do("storage.unmount", gatedNode, "target: /mnt/data\n", "--allow-impact", "drain"))
	var r storagev1.UnmountResult
	if err := task.GetResult().UnmarshalTo(&r); err != nil || r.GetHow() != "stopped" {
		t.Errorf("result %v (%v)", &r, err)
	}
	if got := c.Sh(gatedNode, "findmnt /mnt/data || true"); got != "" {
		t.Errorf("still mounted: %s", got)
	}
	settles(t, c, "slurm", "sinfo --noheader -R -n "+gatedNode+" -o '%E|%N'", "bad fan|"+gatedNode)
	c.Sh("slurm", "scontrol update nodename="+gatedNode+" state=undrain")
	idle(t, c, gatedNode)
}
