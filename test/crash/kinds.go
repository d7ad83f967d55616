package main

import (
	"context"
	"fmt"
	"slices"
	"strings"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// story is a kind of task in one of the ways in which it can go. Every kind of
// the registry has one at least; a test asks that.
type story struct {
	kind, variant string
	// action says that the effect cannot be checked, only counted.
	action bool
	// spec is the task's. Labels are letters and digits.
	spec func(label string) string
	// prepare makes on the node what the task needs.
	prepare func(label string) string
	// setup does what needs the whole cluster, before anything is armed.
	setup func(context.Context, *trial) error
	// create makes the task and returns its id; nil: the kind with its spec.
	create func(context.Context, *trial) (string, error)
	// during does something while the task goes on.
	during func(context.Context, *trial) error
	// custom comes before the task; it can do anything.
	custom func(context.Context, *trial) error
	// facts prints what can be seen of the effect on the node.
	facts func(label string) string
	// state, reason and undo are how it ends when nothing happens.
	state  taskv1.TaskState
	reason string
	undo   taskv1.UndoState
	// first is a point at which the agent, or the shim, is killed before, so that
	// the one that matters comes in what follows.
	first string
	// idle says that a command never starts.
	idle bool
	// boots says that the node boots anew in the middle of it.
	boots bool
	// own says that it needs a server of its own, as it does something to it, or
	// that it is slow: only what no other story comes by is struck in it.
	own bool
	// slow says that it takes long: points that say nothing about the task are
	// left to other stories.
	slow bool
	// strikes begins the names of points that are struck in it although another
	// story comes by them, and although it is slow or has a server of its own.
	strikes string
	// ways are the right ways to end after an injury, where the model of the class
	// is not the whole of it; clean is how it ends without one.
	ways func(i injury, clean end) []end
	// loses ends the facts of a node before it that an undo may not bring back: a
	// mount whose connection to its daemon was ended and that is still in use
	// cannot be mounted again.
	loses string
}

func (s story) title() string { return strings.TrimSpace(s.kind + " " + s.variant) }

// does is the kind of its task.
func (s story) does() string {
	if s.custom != nil {
		return "system.command"
	}
	return s.kind
}

const (
	succeeded = taskv1.TaskState_TASK_STATE_SUCCEEDED
	failed    = taskv1.TaskState_TASK_STATE_FAILED
	cancelled = taskv1.TaskState_TASK_STATE_CANCELLED
	refused   = taskv1.TaskState_TASK_STATE_REFUSED
	held      = taskv1.TaskState_TASK_STATE_HELD

	complete    = taskv1.UndoState_UNDO_STATE_COMPLETE
	notPossible = taskv1.UndoState_UNDO_STATE_NOT_POSSIBLE
	notNeeded   = taskv1.UndoState_UNDO_STATE_NOT_NEEDED
)

func stories() []story {
	return slices.Concat(mounts(), disks(), containers(), commands(), reboots(), secrets(), slurm(), settling(), vault(), health(), migs(), members())
}

// mounts are storage.mount and storage.unmount.
func mounts() []story {
	bind := story{
		kind: "storage.mount", facts: mountFacts, state: succeeded,
		spec:    func(l string) string { return fmt.Sprintf("target: /mnt/%[1]s/data\nbind: {path: /srv/%[1]s}", l) },
		prepare: func(l string) string { return "mkdir -p /srv/" + l },
	}
	again := bind
	again.variant, again.first = "after a kill", "host.unit.start.after"
	broken := bind
	broken.variant, broken.state, broken.undo = "that fails", failed, complete
	broken.prepare = func(l string) string {
		return fmt.Sprintf(`mkdir -p /srv/%[1]s; cd /run/systemd/system
printf '[Unit]\nDefaultDependencies=no\nBefore=mnt-%[1]s-data.mount\n[Service]\nType=oneshot\nExecStart=/bin/false\n' > broken-%[1]s.service
mkdir mnt-%[1]s-data.mount.requires; ln -s ../broken-%[1]s.service mnt-%[1]s-data.mount.requires/
systemctl daemon-reload`, l)
	}
	waits := bind
	waits.variant = "that waits"
	waits.prepare = func(l string) string {
		return fmt.Sprintf(`mkdir -p /srv/%[1]s; cd /run/systemd/system
printf '[Unit]\nDefaultDependencies=no\nBefore=mnt-%[1]s-data.mount\n[Service]\nType=oneshot\nTimeoutStartSec=60\nExecStart=/bin/sh -c "touch /run/begun-%[1]s; until test -e /run/go-%[1]s; do sleep 0.05; done"\n' > hold-%[1]s.service
mkdir mnt-%[1]s-data.mount.requires; ln -s ../hold-%[1]s.service mnt-%[1]s-data.mount.requires/
systemctl daemon-reload`, l)
	}
	waits.setup = func(ctx context.Context, t *trial) error { // another one has the lock
		if _, err := t.make(ctx, "storage.mount", t.story.spec(t.label)); err != nil {
			return err
		}
		return t.await(ctx, "/run/begun-"+t.label)
	}
	waits.during = func(ctx context.Context, t *trial) error {
		_, err := t.sh(ctx, fmt.Sprintf(`for i in $(seq 60); do millwrightd journal list %s 2>/dev/null | grep -qi waiting && break; sleep 0.05; done; touch /run/go-%s`, t.id, t.label))
		return err
	}
	return append([]story{bind, again, broken, waits}, unmounts(bind)...)
}

// unmounts are storage.unmount of what a bind mount, or s3fs, has mounted.
func unmounts(bind story) []story {
	unmount := story{
		kind: "storage.unmount", facts: mountFacts, state: succeeded, prepare: bind.prepare,
		spec: func(l string) string { return "target: /mnt/" + l + "/data" },
		setup: func(ctx context.Context, t *trial) error {
			return t.done(ctx, "storage.mount", bind.spec(t.label))
		},
	}
	busy := unmount
	busy.variant = "that is in use, lazily"
	busy.spec = func(l string) string { return unmount.spec(l) + "\npolicy: UNMOUNT_POLICY_LAZY" }
	busy.setup = func(ctx context.Context, t *trial) error {
		if err := unmount.setup(ctx, t); err != nil {
			return err
		}
		return uses(ctx, t)
	}
	dead := busy
	dead.variant = "of a bucket that is in use, lazily"
	dead.prepare = func(string) string {
		return fmt.Sprintf("umask 077; echo %s:secret > /etc/crash-s3.key; test -d /sys/fs/fuse/connections/ && mountpoint -q /sys/fs/fuse/connections || mount -t fusectl fusectl /sys/fs/fuse/connections", storeKey)
	}
	dead.loses = "yes"
	dead.facts = func(l string) string {
		return mountFacts(l) + fmt.Sprintf(` answers=$(grep -q " /mnt/%[1]s/data " /proc/self/mountinfo && timeout 5 ls /mnt/%[1]s/data >/dev/null 2>&1 && echo yes)`, l)
	}
	dead.setup = func(ctx context.Context, t *trial) error {
		spec := fmt.Sprintf("target: /mnt/%s/data\ns3: {client: S3_CLIENT_S3FS, bucket: %s, endpoint: 'http://server:%d', key_file: /etc/crash-s3.key, path_style: true}", t.label, storeBucket, storePort)
		if err := t.done(ctx, "storage.mount", spec); err != nil {
			return err
		}
		return uses(ctx, t)
	}
	return []story{unmount, busy, dead}
}

// uses has a process of the node use the mount. The cleanup ends it.
func uses(ctx context.Context, t *trial) error {
	_, err := t.sh(ctx, fmt.Sprintf("systemd-run --quiet --collect --service-type=exec --property=DefaultDependencies=no --unit=busy-%[1]s --working-directory=/mnt/%[1]s/data /bin/sleep 1000", t.label))
	return err
}

// mountFacts tell the mount, its unit, links and directory, what a write left
// behind, and the intent.
func mountFacts(l string) string {
	return fmt.Sprintf(`u=mnt-%[1]s-data.mount; d=/mnt/%[1]s/data; s=/etc/systemd/system
echo mounts=$(awk -v d=$d '$5 == d' /proc/self/mountinfo | wc -l) active=$(systemctl is-active $u) unit=$(ls $s | grep -c "^$u\$") \
 links=$(find $s -lname "*$u" | wc -l) dir=$(find /mnt/%[1]s -xdev 2>/dev/null | wc -l) temporary=$(ls -A $s | grep -c "$u.*tmp") \
 intent=$(millwrightd status | grep -c "mount:$d ")`, l)
}

func runs(l string) string { return "/root/runs-" + l }

// commands are system.command.
func commands() []story {
	script := func(rest string) func(string) string {
		return func(l string) string {
			return fmt.Sprintf(`argv: [/bin/sh, -c, "echo run >> %s; echo out%s"]`, runs(l), strings.ReplaceAll(rest, "LABEL", l))
		}
	}
	good := story{
		kind: "system.command", action: true, state: succeeded, spec: script(""),
		prepare: func(string) string { return "true" },
		facts:   func(l string) string { return "echo runs=$(cat " + runs(l) + " 2>/dev/null | wc -l)" },
	}
	again := good
	again.variant, again.first, again.spec = "after a kill", "host.command.start.after", script("; sleep 0.5")
	bad := good
	bad.variant, bad.spec, bad.state, bad.reason, bad.undo = "that fails", script("; exit 7"), failed, "COMMAND_EXIT", notPossible
	stopped := good
	stopped.variant, stopped.spec, stopped.state, stopped.reason, stopped.undo = "cancelled", script("; exec sleep 60"), cancelled, "CANCELLED", notPossible
	stopped.during = func(ctx context.Context, t *trial) error {
		if err := t.await(ctx, runs(t.label)); err != nil {
			return nil //nolint:nilerr // its shim was killed before: it is held, and not cancelled
		}
		return t.cancel(ctx)
	}
	lost := good
	lost.variant, lost.spec, lost.state, lost.reason = "whose shim is killed", script("; exec sleep 60"), held, "OUTCOME_UNKNOWN"
	lost.during = func(ctx context.Context, t *trial) error {
		if err := t.await(ctx, runs(t.label)); err != nil {
			return nil //nolint:nilerr // it was killed already
		}
		return t.killShim(ctx, t.id)
	}
	denied := good
	denied.idle, denied.variant, denied.state, denied.reason = true, "against the policy", refused, "POLICY_DENIED"
	denied.spec = func(string) string { return "argv: [/sbin/reboot]" }
	never := good
	never.idle, never.variant, never.first = true, "that never starts", "shim.marker.before"
	never.state, never.reason, never.undo = failed, "COMMAND_NOT_STARTED", notNeeded
	return []story{good, again, bad, stopped, lost, denied, never}
}

// settling is task.resolve.
func settling() []story {
	return []story{{
		kind: "task.resolve", state: succeeded, action: true,
		prepare: func(string) string { return "true" },
		facts:   func(l string) string { return "echo runs=$(cat " + runs(l) + " 2>/dev/null | wc -l)" },
		setup: func(ctx context.Context, t *trial) error {
			id, err := t.make(ctx, "system.command", fmt.Sprintf(`argv: [/bin/sh, -c, "echo run >> %s; exec sleep 60"]`, runs(t.label)))
			if err != nil {
				return err
			}
			t.held = id
			if err := t.await(ctx, runs(t.label)); err != nil {
				return err
			}
			if err := t.killShim(ctx, id); err != nil {
				return err
			}
			_, err = t.c.WaitState(ctx, id, patience, held)
			return err
		},
		create: func(ctx context.Context, t *trial) (string, error) { return t.resolve(ctx, t.held) },
	}}
}
