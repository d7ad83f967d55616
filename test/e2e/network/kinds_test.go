package network

import (
	"fmt"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protojson"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/test/cluster"
	"github.com/gpuaas/millwright/test/cluster/clustertest"
)

// container is a container.run of the node's own programs. Its starts leave
// lines.
func container(name, digest, grace string) string {
	return fmt.Sprintf(`name: %[1]s
image: {digest: "%[2]s", ociArchive: /opt/image.tar}
argv: [/usr/bin/sh, -c, "trap '' TERM; echo run >> /runs/%[1]s; while :; do sleep 1; done"]
mounts:
%[3]s- {source: /srv/runs, target: /runs}
stopGrace: %[4]s
`, name, digest, cluster.NodePrograms, grace)
}

// hold makes systemd wait for a file of /run in the middle of the start of a
// mount unit, or of its stop.
const hold = `cd /run/systemd/system
printf '[Unit]\nDefaultDependencies=no\nBefore=mnt-start.mount\n[Service]\nType=oneshot\nTimeoutStartSec=infinity\nExecStart=/bin/sh -c "touch /run/begun-start; until test -e /run/go-start; do sleep 0.1; done"\n' > hold-start.service
mkdir mnt-start.mount.requires; ln -s ../hold-start.service mnt-start.mount.requires/
printf '[Unit]\nDefaultDependencies=no\nAfter=mnt-stop.mount\nBindsTo=mnt-stop.mount\n[Service]\nType=oneshot\nRemainAfterExit=yes\nTimeoutStopSec=infinity\nExecStart=/bin/true\nExecStop=/bin/sh -c "touch /run/begun-stop; until test -e /run/go-stop; do sleep 0.1; done"\n' > hold-stop.service
systemctl daemon-reload`

// slowRunc is found before the node's own: it waits for a file of /run before it
// makes the container "start".
const slowRunc = `printf '#!/bin/sh\ncase "$*" in *" create "*start) touch /run/begun-run; until test -e /run/go-run; do sleep 0.1; done;; esac\nexec /usr/sbin/runc "$@"\n' > /usr/local/sbin/runc
chmod 755 /usr/local/sbin/runc`

// cutInEveryKind has a task of each kind in its middle when n1 is cut off for two
// minutes. All of them end meanwhile.
func cutInEveryKind(t *testing.T, c *clustertest.Cluster) {
	const node = "n1"
	lost := prepare(t, c, node)
	stories := []story{
		{kind: "storage.mount", state: succeeded, id: c.Start("storage.mount", node, "target: /mnt/start\nbind: {path: /srv/start}")},
		{kind: "storage.unmount", state: succeeded, id: c.Start("storage.unmount", node, "target: /mnt/stop")},
		{kind: "system.command", state: failed, reason: "COMMAND_EXIT", id: c.Start("system.command", node, gated("command"))},
	}
	_, digest := cluster.EmptyImage("a test")
	stories = append(stories, story{kind: "container.run", state: succeeded, id: c.Start("container.run", node, container("start", digest, "1s"))})
	for _, file := range []string{"/run/begun-start", "/run/begun-stop", "/root/runs-command", "/run/begun-run"} {
		awaitFile(c, node, file)
	}
	stories = append(stories, story{kind: "container.stop", state: succeeded, id: c.Start("container.stop", node, "name: stop")})
	for _, s := range stories {
		c.Await(s.id, running)
	}
	stories = append(stories, resolveInFlight(t, c, node, lost))
	n := c.Machine(node)
	from := time.Now()
	if err := n.Cut(t.Context()); err != nil {
		t.Fatal(err)
	}
	c.Sh(node, "systemctl kill --kill-whom=main --signal=CONT millwrightd.service")
	bothNotice(t, c, node)
	c.Sh(node, "touch /run/go-start /run/go-stop /run/go-command /run/go-run")
	for _, s := range stories {
		endsOnNode(c, node, s.id, s.state)
	}
	ended := time.Now()
	if left := cutFor - time.Since(from); left > 0 {
		c.Sh(node, fmt.Sprintf("sleep %.1f", left.Seconds()))
	} else {
		t.Errorf("the tasks took %s to end on the node", time.Since(from))
	}
	untouched(t, c, stories)
	healed := time.Now()
	if err := n.Heal(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := c.WaitConnected(t.Context(), node); err != nil {
		t.Fatal(err)
	}
	for _, s := range stories {
		told(t, c, s, ended, healed)
	}
	if task := c.End(lost); task.GetState() != taskv1.TaskState_TASK_STATE_ABANDONED {
		t.Errorf("the held task is %s after its resolve", task.GetState())
	}
	effects(t, c, node)
}

// prepare makes on the node what the tasks need, and returns a held task.
func prepare(t *testing.T, c *clustertest.Cluster, node string) (lost string) {
	t.Helper()
	archive, digest := cluster.EmptyImage("a test")
	if err := c.Machine(node).WriteFile(t.Context(), "/opt/image.tar", archive, 0o644); err != nil {
		t.Fatal(err)
	}
	c.Sh(node, "set -e; mkdir -p /srv/start /srv/stop /srv/runs\n"+hold+"\n"+slowRunc)
	lost = c.Start("system.command", node, `argv: [/bin/sh, -c, "echo run >> /root/runs-lost; exec sleep 600"]`)
	for _, task := range []*taskv1.Task{
		c.Do("storage.mount", node, "target: /mnt/stop\nbind: {path: /srv/stop}"),
		c.Do("container.run", node, container("stop", digest, "30s")),
	} {
		if task.GetState() != succeeded {
			t.Fatalf("%s ended as %s %s: %s", task.GetKind(), task.GetState(), task.GetReason(), task.GetMessage())
		}
	}
	c.Sh(node, "systemctl start hold-stop.service; until test -s /root/runs-lost; do sleep 0.1; done; systemctl kill --kill-whom=main --signal=KILL 'millwright-task-"+lost+"-*'")
	c.Await(lost, held)
	return lost
}

// resolveInFlight stops the agent's process and makes a task.resolve, which then
// lies in the agent's socket, unread.
func resolveInFlight(t *testing.T, c *clustertest.Cluster, node, lost string) story {
	t.Helper()
	c.Sh(node, "systemctl kill --kill-whom=main --signal=STOP millwrightd.service")
	out, err := c.Millctl(t.Context(), "task", "resolve", lost, "--as", "abandon", "--reason", "a test", "-o", "json")
	var made taskv1.CreateTasksResponse
	if err == nil {
		err = protojson.Unmarshal([]byte(out.Stdout), &made)
	}
	if err != nil || len(made.GetTasks()) != 1 {
		t.Fatalf("task resolve: %v\n%s", err, out.Stdout)
	}
	// Port 7443 is 1D13; the last word of the fifth field is what was not read.
	c.Sh(node, `for i in $(seq 40); do awk '$3 ~ /:1D13$/ && $4 == "01" && $5 !~ /:00000000$/ {n++} END {exit !n}' /proc/net/tcp /proc/net/tcp6 && exit 0; sleep 0.05; done; cat /proc/net/tcp; exit 1`)
	return story{kind: "task.resolve", id: made.GetTasks()[0].GetId(), state: succeeded, sentAgain: true}
}

// effects asks that everything happened once, and is as the tasks say.
func effects(t *testing.T, c *clustertest.Cluster, node string) {
	t.Helper()
	for file, want := range map[string]string{
		"/root/runs-command": "1", "/root/runs-lost": "1", "/srv/runs/start": "1", "/srv/runs/stop": "1",
	} {
		if got := lines(c, node, file); got != want {
			t.Errorf("%s has %s lines, want %s", file, got, want)
		}
	}
	c.Sh(node, `set -e
test "$(grep -c ' /mnt/start ' /proc/self/mountinfo)" = 1; ! grep -q ' /mnt/stop ' /proc/self/mountinfo
test "$(ctr -n millwright tasks ls -q)" = start; test "$(ctr -n millwright containers ls -q)" = start
test -z "$(systemctl list-units --all --no-legend --plain 'millwright-task-*')"; test -z "$(systemctl --failed --no-legend --plain)"
test "$(systemctl show -P NRestarts millwrightd.service)" = 0`)
}

// cutInReboot cuts n2 off once its reboot has begun. It boots, and says so when
// the network is back.
func cutInReboot(t *testing.T, c *clustertest.Cluster) {
	const node = "n2"
	c.Sh(node, `printf '[Service]\nType=oneshot\nExecStart=/bin/sh -c "echo boot >> /root/boots"\n[Install]\nWantedBy=multi-user.target\n' > /etc/systemd/system/boots.service
systemctl enable --quiet boots.service`)
	n := c.Machine(node)
	before, err := n.BootID(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	id := c.Start("system.reboot", node, "reason: a test", "--allow-impact", "reboot")
	c.Await(id, running)
	from := time.Now()
	if err := n.Cut(t.Context()); err != nil {
		t.Fatal(err)
	}
	within(t, time.Minute, "the node has booted again", func() (string, bool) {
		now, err := n.BootID(t.Context())
		return fmt.Sprint(now, err), err == nil && now != before
	})
	if err := n.WaitRunning(t.Context()); err != nil {
		t.Fatal(err)
	}
	s := story{kind: "system.reboot", id: id, state: succeeded, boots: 1}
	endsOnNode(c, node, id, s.state)
	ended := time.Now()
	c.Sh(node, fmt.Sprintf("sleep %.1f", max(cutFor-time.Since(from), 0).Seconds()))
	untouched(t, c, []story{s})
	serverSees(t, c, node, from)
	healed := time.Now()
	if err := n.Heal(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := c.WaitConnected(t.Context(), node); err != nil {
		t.Fatal(err)
	}
	told(t, c, s, ended, healed)
	if boots := lines(c, node, "/root/boots"); boots != "1" {
		t.Errorf("the node booted %s times", boots)
	}
}
