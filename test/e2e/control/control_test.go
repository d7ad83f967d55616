// Package control shows on real nodes how tasks are stopped, wait for each other,
// reboot their node and are settled by a person.
package control

import (
	"slices"
	"strings"
	"testing"
	"time"

	systemv1 "github.com/gpuaas/millwright/proto/millwright/system/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/test/cluster/clustertest"
)

const (
	running   = taskv1.TaskState_TASK_STATE_RUNNING
	waiting   = taskv1.TaskState_TASK_STATE_WAITING
	held      = taskv1.TaskState_TASK_STATE_HELD
	succeeded = taskv1.TaskState_TASK_STATE_SUCCEEDED
	cancelled = taskv1.TaskState_TASK_STATE_CANCELLED
	refused   = taskv1.TaskState_TASK_STATE_REFUSED
	abandoned = taskv1.TaskState_TASK_STATE_ABANDONED
)

func TestControl(t *testing.T) {
	c := clustertest.Up(t, clustertest.Config{Nodes: 2})
	t.Run("stop grace", func(t *testing.T) { stopGrace(t, c.With(t)) })
	t.Run("lock queue", func(t *testing.T) { lockQueue(t, c.With(t)) })
	t.Run("reboot", func(t *testing.T) { reboot(t, c.With(t)) })
	t.Run("held", func(t *testing.T) { settled(t, c.With(t)) })
}

// stopGrace cancels a command all of whose processes ignore SIGTERM.
func stopGrace(t *testing.T, c *clustertest.Cluster) {
	id := c.Start("system.command", "n1", `argv: [/bin/sh, -c, "trap '' TERM; echo run >> /root/stubborn; (trap '' TERM; while :; do sleep 0.2; done) & while :; do sleep 0.2; done"]
stopGrace: 2s`)
	c.Sh("n1", "until test -s /root/stubborn; do sleep 0.1; done")
	begin := time.Now()
	if _, err := c.Millctl(t.Context(), "task", "cancel", id, "--reason", "a test"); err != nil {
		t.Fatal(err)
	}
	task := c.End(id)
	took := time.Since(begin)
	if task.GetState() != cancelled {
		t.Errorf("the task ended as %s: %s", task.GetState(), task.GetMessage())
	}
	if took < 2*time.Second || took > 20*time.Second {
		t.Errorf("it took %s to stop it, want at least its grace of 2 s and not much more", took)
	}
	t.Logf("stopped after %s", took.Round(10*time.Millisecond))
	if left := strings.TrimSpace(c.Sh("n1", "pgrep -f '[t]rap .* TERM' || true; systemctl list-units --all --no-legend 'millwright-task-*'")); left != "" {
		t.Errorf("left of it: %s", left)
	}
}

// lockQueue has two tasks want one mount point. The unit of the first is held up.
func lockQueue(t *testing.T, c *clustertest.Cluster) {
	c.Sh("n1", `mkdir -p /srv/queue; cd /run/systemd/system
printf '[Unit]\nDefaultDependencies=no\nBefore=mnt-queue.mount\n[Service]\nType=oneshot\nTimeoutStartSec=60\nExecStart=/bin/sh -c "touch /run/begun; until test -e /run/go; do sleep 0.05; done"\n' > hold.service
mkdir mnt-queue.mount.requires; ln -s ../hold.service mnt-queue.mount.requires/
systemctl daemon-reload`)
	const spec = "target: /mnt/queue\nbind: {path: /srv/queue}"
	first := c.Start("storage.mount", "n1", spec)
	c.Sh("n1", "until test -e /run/begun; do sleep 0.1; done")
	second := c.Start("storage.mount", "n1", spec)
	task := c.Await(second, waiting)
	i := slices.IndexFunc(task.GetConditions(), func(one *taskv1.Condition) bool { return one.GetType() == "Waiting" })
	if i < 0 || !strings.Contains(task.GetConditions()[i].GetMessage(), first) || !strings.Contains(task.GetConditions()[i].GetMessage(), "mount:/mnt/queue") {
		t.Errorf("the second task waits with %v, want the lock and the task that has it", task.GetConditions())
	}
	if said := c.Sh("n1", "millwrightd status"); !strings.Contains(said, first) || !strings.Contains(said, second) {
		t.Errorf("millwrightd status = %q, want both tasks", said)
	}
	c.Sh("n1", "touch /run/go")
	for _, id := range []string{first, second} {
		if task := c.End(id); task.GetState() != succeeded {
			t.Errorf("task %s ended as %s: %s", id, task.GetState(), task.GetMessage())
		}
	}
	if n := strings.TrimSpace(c.Sh("n1", "awk '$5 == \"/mnt/queue\"' /proc/self/mountinfo | wc -l")); n != "1" {
		t.Errorf("it is mounted %s times", n)
	}
}

// budget makes the agent allow one reboot, and counts boots.
func budget(c *clustertest.Cluster, node string) {
	c.Sh(node, `printf '[Service]\nType=oneshot\nExecStart=/bin/sh -c "echo boot >> /root/boots"\n[Install]\nWantedBy=multi-user.target\n' > /etc/systemd/system/boots.service
systemctl enable --quiet boots.service
printf 'reboots:\n  most: 1\n  within: 24h\n' >> /etc/millwright/agent.yaml; systemctl restart millwrightd.service`)
}

func reboot(t *testing.T, c *clustertest.Cluster) {
	budget(c, "n1")
	before := strings.TrimSpace(c.Sh("n1", "cat /proc/sys/kernel/random/boot_id"))
	task := c.Do("system.reboot", "n1", "reason: a test", "--allow-impact", "reboot")
	if task.GetState() != succeeded {
		t.Fatalf("the reboot ended as %s: %s", task.GetState(), task.GetMessage())
	}
	if err := c.Machine("n1").WaitRunning(t.Context()); err != nil {
		t.Fatal(err)
	}
	var result systemv1.RebootResult
	if err := task.GetResult().UnmarshalTo(&result); err != nil {
		t.Fatal(err)
	}
	after := strings.TrimSpace(c.Sh("n1", "cat /proc/sys/kernel/random/boot_id"))
	if result.GetBootIdBefore() != before || result.GetBootIdAfter() != after || before == after {
		t.Errorf("result = %v, want the boots %s and %s", &result, before, after)
	}
	second := c.Do("system.reboot", "n1", "reason: again", "--allow-impact", "reboot")
	if second.GetState() != refused || !strings.Contains(second.GetMessage(), "reboot") {
		t.Errorf("a second reboot ended as %s: %s; want it refused by the budget", second.GetState(), second.GetMessage())
	}
	if boots := strings.TrimSpace(c.Sh("n1", "cat /root/boots")); boots != "boot" {
		t.Errorf("the node booted %q, want once", boots)
	}
	c.Sh("n1", "mountpoint /mnt/queue") // the intent of before
}

// settled has two commands held, reboots the node with them, and settles one by a
// signature and one as root.
func settled(t *testing.T, c *clustertest.Cluster) {
	budget(c, "n2")
	if err := c.WaitConnected(t.Context(), "n2"); err != nil {
		t.Fatal(err)
	}
	var ids []string
	for _, name := range []string{"one", "two"} {
		id := c.Start("system.command", "n2", `argv: [/bin/sh, -c, "echo run >> /root/`+name+`; exec sleep 100"]`)
		c.Await(id, running)
		c.Sh("n2", "until test -s /root/"+name+"; do sleep 0.1; done; systemctl kill --kill-whom=main --signal=KILL 'millwright-task-"+id+"-*'")
		if task := c.Await(id, held); task.GetReason() != "OUTCOME_UNKNOWN" {
			t.Errorf("a command whose shim was killed is held with %s", task.GetReason())
		}
		ids = append(ids, id)
	}
	if task := c.Do("system.reboot", "n2", "reason: held tasks do not matter", "--allow-impact", "reboot"); task.GetState() != succeeded {
		t.Fatalf("with held tasks the reboot ended as %s: %s", task.GetState(), task.GetMessage())
	}
	if err := c.Machine("n2").WaitRunning(t.Context()); err != nil {
		t.Fatal(err)
	}
	c.Await(ids[0], held)
	if out, err := c.Millctl(t.Context(), "task", "resolve", ids[0], "--as", "accept", "--reason", "it ran", "--wait"); err != nil {
		t.Errorf("task resolve --as accept: %v\n%s", err, out.Stdout)
	}
	if task := c.Await(ids[0], succeeded); task.GetAssertedBy() == "" {
		t.Errorf("the accepted task says not by whom: %v", task)
	}
	c.Sh("n2", "until millwrightd task resolve "+ids[1]+" --as abandon --reason 'no one needs it'; do sleep 0.5; done")
	if task := c.Await(ids[1], abandoned); !strings.Contains(task.GetAssertedBy(), "root") {
		t.Errorf("the abandoned task was settled by %q, want root on the node", task.GetAssertedBy())
	}
	if runs := strings.Fields(c.Sh("n2", "cat /root/one /root/two /root/boots")); strings.Join(runs, " ") != "run run boot" {
		t.Errorf("runs and boots = %v, want each once", runs)
	}
}
