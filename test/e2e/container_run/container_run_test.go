// Package container_run shows container.run and container.stop on real nodes,
// with containerd 1.6 of Debian and 2.4.
package container_run

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	containerv1 "github.com/gpuaas/millwright/proto/millwright/container/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/test/cluster/clustertest"
)

const (
	succeeded = taskv1.TaskState_TASK_STATE_SUCCEEDED
	failed    = taskv1.TaskState_TASK_STATE_FAILED
	refused   = taskv1.TaskState_TASK_STATE_REFUSED

	// newer is the containerd that is built; its version is also the cache's.
	newer = "v2.4.2"
	// left is all that containers leave on a node.
	left = `for w in 'containers ls -q' 'tasks ls -q' 'images ls -q' 'snapshots ls' 'leases ls -q' 'content ls -q'; do echo "$w"; ctr -n millwright $w 2>/dev/null; done
pgrep -a containerd-shim | grep 'namespace millwright'; pgrep -a millwrightd | grep container-log
systemctl list-units --all --no-legend 'millwright-container-*'
find /sys/fs/cgroup -name 'millwright-container-*'; find /run/containerd/io.containerd.runtime.v2.task/millwright /var/lib/millwright/containers -mindepth 1 2>/dev/null | sort; true`
)

// TestContainerRun is the whole story, on one node with each containerd.
func TestContainerRun(t *testing.T) {
	c := clustertest.Up(t, clustertest.Config{Nodes: 2, Agent: "millwright_crash"})
	archive, digest := clustertest.Image(t, "program", program, "runs")
	install(t, c, "n2")
	var side sync.WaitGroup
	for node, version := range map[string]string{"n1": "1.6.", "n2": strings.TrimPrefix(newer, "v")} {
		if got := c.Sh(node, "ctr version 2>/dev/null | grep Version | tail -1"); !strings.Contains(got, version) {
			t.Fatalf("containerd of %s is %s, want %s", node, got, version)
		}
		if err := c.Machine(node).WriteFile(t.Context(), "/opt/image.tar", archive, 0o644); err != nil {
			t.Fatal(err)
		}
		c.Sh(node, "mkdir -p /srv/runs")
		side.Go(func() {
			t.Run("containerd "+version, func(t *testing.T) { story{t, c.With(t), node, digest}.tell() })
		})
	}
	side.Wait()
}

// install builds the newer containerd, once for all runs of the machine, and puts
// it in the place of Debian's on a node.
func install(t *testing.T, c *clustertest.Cluster, node string) {
	t.Helper()
	dir := filepath.Join("/var/cache/millwright-testbed", "containerd-"+newer)
	programs := []string{"containerd", "containerd-shim-runc-v2", "ctr"}
	if _, err := os.Stat(dir); err != nil {
		tmp, err := os.MkdirTemp("/var/cache/millwright-testbed", "tmp-containerd-") //nolint:usetesting // it is renamed, so it must be on the same file system
		if err != nil {
			t.Fatal(err)
		}
		args := []string{"install", "-trimpath", "-ldflags=-s -w"}
		for _, p := range programs {
			args = append(args, "github.com/containerd/containerd/v2/cmd/"+p+"@"+newer)
		}
		build := exec.CommandContext(t.Context(), "go", args...)
		build.Dir, build.Env = tmp, append(os.Environ(), "CGO_ENABLED=0", "GOBIN="+tmp, "GOFLAGS=")
		if out, err := build.CombinedOutput(); err != nil {
			t.Fatalf("build containerd %s: %v: %s", newer, err, out)
		}
		if err := os.Rename(tmp, dir); err != nil && !os.IsExist(err) {
			t.Fatal(err)
		}
	}
	for _, p := range programs {
		b, err := os.ReadFile(filepath.Join(dir, p))
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Machine(node).WriteFile(t.Context(), "/usr/local/bin/"+p, b, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	c.Sh(node, `mkdir -p /etc/systemd/system/containerd.service.d
printf '[Service]\nExecStart=\nExecStart=/usr/local/bin/containerd\n' > /etc/systemd/system/containerd.service.d/new.conf
systemctl daemon-reload; systemctl restart containerd`)
}

type story struct {
	*testing.T
	c            *clustertest.Cluster
	node, digest string
}

func (s story) spec(say, argv string) string {
	return fmt.Sprintf(`name: web
image: {digest: "%s", ociArchive: /opt/image.tar}
argv: [%s]
environment: ["SAY=%s"]
mounts: [{source: /srv/runs, target: /runs}]
network: NETWORK_HOST
resources: {memoryBytes: 67108864, cpuMillis: 500}
`, s.digest, argv, say)
}

func (s story) run(say string) *taskv1.Task {
	s.Helper()
	return s.want(succeeded, s.c.Do("container.run", s.node, s.spec(say, "/program, serve")))
}

func (s story) want(state taskv1.TaskState, task *taskv1.Task) *taskv1.Task {
	s.Helper()
	if task.GetState() != state {
		s.Fatalf("task %s is %s, want %s: %s: %s", task.GetId(), task.GetState(), state, task.GetReason(), task.GetMessage())
	}
	return task
}

// serves checks that exactly one process runs, in the container's own control
// group, and answers; it returns its id.
func (s story) serves(say string) string {
	s.Helper()
	got := s.c.Sh(s.node, `for i in $(seq 300); do python3 -c 'import urllib.request as r; print(r.urlopen("http://127.0.0.1:8099/").read().decode())' 2>/dev/null && break; sleep 0.1; done; pgrep -x program`)
	answer, pid, _ := strings.Cut(got, "\n")
	if answer != say || pid == "" || strings.Contains(pid, "\n") {
		s.Fatalf("it says %q with the processes %q, want %q and one process", answer, pid, say)
	}
	if group := s.c.Sh(s.node, "cat /proc/"+pid+"/cgroup"); !strings.Contains(group, "millwright.slice/millwright-container-web.scope") {
		s.Errorf("it runs in %s", group)
	}
	return pid
}

func (s story) tell() {
	before := s.c.Sh(s.node, left)
	foreign := s.foreign()
	s.refusals(before)
	task := s.run("one")
	var result containerv1.RunResult
	if err := task.GetResult().UnmarshalTo(&result); err != nil {
		s.Fatal(err)
	}
	pid := s.serves("one")
	if fmt.Sprint(result.GetPid()) != pid || result.GetImageDigest() != s.digest || !strings.Contains(result.GetControlGroup(), "millwright-container-web.scope") {
		s.Errorf("result %v, want process %s", &result, pid)
	}
	if again := s.run("one"); len(again.GetPlan().GetSteps()) != 0 {
		s.Errorf("a second run plans %v", again.GetPlan())
	}
	s.c.Sh(s.node, "systemctl restart containerd; systemctl kill -s KILL millwrightd; systemctl restart millwrightd")
	if again := s.run("one"); len(again.GetPlan().GetSteps()) != 0 || s.serves("one") != pid {
		s.Errorf("over restarts of containerd and the agent it is another process, or there is something to do: %v", again.GetPlan())
	}
	if next := s.run("two"); len(next.GetPlan().GetDifferences()) == 0 || s.serves("two") == pid {
		s.Errorf("another spec does not replace it")
	}
	s.endsAtOnce()
	s.crashes()
	s.reboot()
	s.want(succeeded, s.c.Do("container.stop", s.node, "name: web"))
	if after := s.c.Sh(s.node, left); after != before {
		s.Errorf("left:\n%s\nbefore:\n%s", after, before)
	}
	if again := s.want(succeeded, s.c.Do("container.stop", s.node, "name: web")); len(again.GetPlan().GetSteps()) != 0 {
		s.Errorf("a second stop plans %v", again.GetPlan())
	}
	if now := s.c.Sh(s.node, "ctr -n other containers ls -q 2>/dev/null; ctr -n other images ls -q 2>/dev/null"); now != foreign {
		s.Errorf("of others there is now %q, was %q", now, foreign)
	}
}

// foreign makes a container in another namespace.
func (s story) foreign() string {
	return s.c.Sh(s.node, "ctr -n other images import --base-name other.invalid/x /opt/image.tar >/dev/null 2>&1; ctr -n other containers create --rootfs /opt web /bin/true >/dev/null 2>&1; ctr -n other containers ls -q 2>/dev/null; ctr -n other images ls -q 2>/dev/null")
}

func (s story) refusals(before string) {
	bad := strings.Replace(s.spec("x", "/program, serve"), s.digest[:12], "sha256:00000", 1)
	if task := s.want(refused, s.c.Do("container.run", s.node, bad)); !strings.Contains(task.GetMessage(), s.digest) {
		s.Errorf("the message does not name what the archive holds: %s", task.GetMessage())
	}
	if after := s.c.Sh(s.node, left); after != before {
		s.Errorf("a refused digest left:\n%s", after)
	}
}

// endsAtOnce replaces a container by one that ends: it says why, and the old one
// is back.
func (s story) endsAtOnce() {
	task := s.want(failed, s.c.Do("container.run", s.node, s.spec("x", "/program, exit, '3'")))
	if task.GetReason() != "CONTAINER_ENDED" || task.GetUndo() != taskv1.UndoState_UNDO_STATE_COMPLETE ||
		!strings.Contains(task.GetMessage(), "exit code 3") || !strings.Contains(task.GetMessage(), "last words") {
		s.Errorf("%s, undo %s: %s", task.GetReason(), task.GetUndo(), task.GetMessage())
	}
	s.serves("two")
}

// crashes kills the agent, and restarts containerd, between the phases of a task.
func (s story) crashes() {
	n := s.c.Machine(s.node)
	for i, point := range []string{
		"executor.plan.committed", "executor.step.observed", "host.container.remove.stopped", "host.container.remove.deleted",
		"host.container.create.before", "host.container.create.after", "host.container.start.before", "host.container.start.made",
		"host.container.start.after", "executor.step.changed", "executor.step.applied", "executor.step.verified", "executor.finish.before",
	} {
		say := fmt.Sprintf("crash-%d", i)
		s.c.Sh(s.node, "rm -f /srv/runs/starts")
		if err := s.c.Arm(s.Context(), n, point); err != nil {
			s.Fatal(err)
		}
		id := s.c.Start("container.run", s.node, s.spec(say, "/program, serve"))
		s.c.Sh(s.node, "for i in $(seq 600); do test -e /var/lib/millwright-crash/hit-"+point+" && break; sleep 0.05; done; systemctl restart containerd")
		s.want(succeeded, s.c.End(id))
		if !s.c.Hit(s.Context(), n, point) {
			s.Errorf("%s was not reached", point)
		}
		s.serves(say)
		if n := s.c.Sh(s.node, "wc -l < /srv/runs/starts"); n != "1" {
			s.Errorf("killed at %s, it was started %s times", point, n)
		}
	}
}

// reboot expects the container back once, by the intent.
func (s story) reboot() {
	s.c.Sh(s.node, "rm -f /srv/runs/starts")
	if err := s.c.Machine(s.node).Reboot(s.Context()); err != nil {
		s.Fatal(err)
	}
	s.c.Sh(s.node, "for i in $(seq 2400); do pgrep -x program >/dev/null && exit 0; sleep 0.1; done; echo 'it did not come back' >&2; exit 1")
	if n := s.c.Sh(s.node, "sleep 2; wc -l < /srv/runs/starts"); n != "1" {
		s.Errorf("after a reboot it was started %s times", n)
	}
}
