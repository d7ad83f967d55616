package crash

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	storagev1 "github.com/gpuaas/millwright/proto/millwright/storage/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/test/cluster/clustertest"
)

// kind is a kind of task with an effect that can be counted.
type kind struct {
	name string
	// spec is the task's; label tells its effect from others on the node.
	spec func(label string) string
	// prepare makes what the task needs on the node.
	prepare func(label string) string
	// state, reason and events are how it ends when nothing is lost.
	state  taskv1.TaskState
	reason string
	code   int32            // of a command
	undo   taskv1.UndoState // of one that fails
	events []string         // between STARTED and the end, without steps
	// effect checks what the task did to the node.
	effect func(t testing.TB, c *clustertest.Cluster, k kind, task *taskv1.Task, label string, want expectation)
}

// title tells the kinds of this suite apart.
func (k kind) title() string {
	if k.undo == taskv1.UndoState_UNDO_STATE_COMPLETE {
		return k.name + " broken"
	}
	if k.code != 0 {
		return fmt.Sprintf("%s exit %d", k.name, k.code)
	}
	return k.name
}

// effectFile counts the runs of a command, one line each.
func effectFile(label string) string { return "/root/runs-" + label }

func mountTarget(label string) string { return "/mnt/" + label + "/data" }

// command is a program that succeeds.
func command() kind {
	return kind{
		name: "system.command",
		spec: func(label string) string {
			return fmt.Sprintf(`argv: [/bin/sh, -c, "echo run >> %s; sleep 1; echo out"]`, effectFile(label))
		},
		prepare: func(string) string { return "true" },
		state:   taskv1.TaskState_TASK_STATE_SUCCEEDED,
		effect:  commandEffect,
	}
}

// failing is a program that exits with 7.
func failing() kind {
	k := command()
	k.spec = func(label string) string {
		return fmt.Sprintf(`argv: [/bin/sh, -c, "echo run >> %s; sleep 1; echo out; exit 7"]`, effectFile(label))
	}
	k.state, k.reason, k.code, k.events = taskv1.TaskState_TASK_STATE_FAILED, "COMMAND_EXIT", 7, []string{"UNDOING"}
	k.undo = taskv1.UndoState_UNDO_STATE_NOT_POSSIBLE // what a program did cannot be known
	return k
}

// gated is a failing program that waits for a file of /run.
func gated() kind {
	k := failing()
	k.spec = func(label string) string {
		return fmt.Sprintf(`argv: [/bin/sh, -c, "echo run >> %s; sync; until test -e /run/go-%s; do sleep 0.1; done; echo out; exit 7"]`,
			effectFile(label), label)
	}
	return k
}

func commandEffect(t testing.TB, c *clustertest.Cluster, k kind, task *taskv1.Task, label string, want expectation) {
	t.Helper()
	if want.runs == nil {
		want.runs = []int{1}
	}
	got, err := strconv.Atoi(c.Sh(task.GetNode(), "cat "+effectFile(label)+" 2>/dev/null | wc -l"))
	if err != nil || !slices.Contains(want.runs, got) {
		t.Errorf("it ran %d times, want one of %v (%v)", got, want.runs, err)
	}
	if want.held || want.failed != "" {
		return
	}
	if code := task.GetSteps()[0].GetCommand().GetExitCode(); code != k.code {
		t.Errorf("exit code %d, want %d", code, k.code)
	}
	out, err := c.Millctl(t.Context(), "task", "logs", task.GetId(), "-f")
	if err != nil || !strings.Contains(out.Stdout, "out\n") {
		t.Errorf("its output is %q, want out (%v)", out.Stdout, err)
	}
}

// bind is a mount whose source can be looked into from its other side.
func bind() kind {
	return kind{
		name: "storage.mount",
		spec: func(label string) string {
			return fmt.Sprintf("target: %s\nbind: {path: /srv/%s}", mountTarget(label), label)
		},
		prepare: func(label string) string { return "mkdir -p /srv/" + label },
		state:   taskv1.TaskState_TASK_STATE_SUCCEEDED,
		events:  []string{"INTENT_ACTIVE"},
		effect:  mountEffect,
	}
}

// held is a mount that systemd does not begin before a file of /run is there,
// or the node has booted again.
func held() kind {
	k := bind()
	k.prepare = func(label string) string {
		return fmt.Sprintf(`set -e; mkdir -p /srv/%[1]s; cd /run/systemd/system
cat > hold-%[1]s.service <<'END'
[Unit]
DefaultDependencies=no
Before=mnt-%[1]s-data.mount
[Service]
Type=oneshot
TimeoutStartSec=infinity
ExecStart=/bin/sh -c "touch /run/begun-%[1]s; until test -e /run/go-%[1]s; do sleep 0.1; done"
END
mkdir mnt-%[1]s-data.mount.requires; ln -s ../hold-%[1]s.service mnt-%[1]s-data.mount.requires/
systemctl daemon-reload`, label)
	}
	return k
}

// broken is a mount whose unit needs one that fails: all is undone.
func broken() kind {
	k := bind()
	k.prepare = func(label string) string {
		return fmt.Sprintf(`set -e; mkdir -p /srv/%[1]s; cd /run/systemd/system
unit=$(systemd-escape --path --suffix=mount %[2]s)
printf '[Unit]\nDefaultDependencies=no\n[Service]\nType=oneshot\nExecStart=/bin/false\n' > broken.service
mkdir "$unit.requires"; ln -s ../broken.service "$unit.requires/"
mkdir -p broken.service.d; printf '[Unit]\nBefore=%%s\n' "$unit" > "broken.service.d/%[1]s.conf"
systemctl daemon-reload`, label, mountTarget(label))
	}
	k.state, k.reason, k.events = taskv1.TaskState_TASK_STATE_FAILED, "STEP_FAILED", []string{"UNDOING"}
	k.undo = taskv1.UndoState_UNDO_STATE_COMPLETE
	k.effect = func(_ testing.TB, c *clustertest.Cluster, _ kind, task *taskv1.Task, label string, _ expectation) {
		c.Sh(task.GetNode(), fmt.Sprintf(`set -e; systemctl reset-failed broken.service
! grep -q ' %[1]s ' /proc/self/mountinfo; test ! -e /mnt/%[2]s; test -z "$(ls -A /srv/%[2]s)"
unit=$(systemd-escape --path --suffix=mount %[1]s); test ! -e "/etc/systemd/system/$unit"
test -z "$(find /etc/systemd/system -lname "*$unit")"; ! millwrightd status | grep -q 'mount:%[1]s '`, mountTarget(label), label))
	}
	return k
}

func mountEffect(t testing.TB, c *clustertest.Cluster, _ kind, task *taskv1.Task, label string, _ expectation) {
	t.Helper()
	target := mountTarget(label)
	unit := c.Sh(task.GetNode(), "systemd-escape --path --suffix=mount "+target)
	var result storagev1.MountResult
	if err := task.GetResult().UnmarshalTo(&result); err != nil || result.GetUnit() != unit {
		t.Errorf("result %v, want one with the unit %s (%v)", &result, unit, err)
	}
	// Mounted once, and not once more on top; what is written there is in the source.
	c.Sh(task.GetNode(), fmt.Sprintf(`set -e
n=$(awk '$5 == "%[1]s"' /proc/self/mountinfo | wc -l); test $n = 1 || { echo "mounted $n times" >&2; exit 1; }
echo %[2]s > %[1]s/probe; test "$(cat /srv/%[2]s/probe)" = %[2]s
systemctl is-active --quiet '%[3]s'; systemctl is-enabled --quiet '%[3]s'
test "$(find %[1]s -mindepth 1 ! -name probe)" = ''`, target, label, unit))
}
