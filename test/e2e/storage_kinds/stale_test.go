package storage_kinds

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/test/cluster/clustertest"
)

const lustreSpec = "target: /mnt/lustre\nlustre: {mgs: ['n1@tcp', '10.9.9.9@o2ib1'], filesystem: fs1"

// lnet gives the node what its kernel would have: first the file system without
// the network that it needs, which is refused by its name, then a list of modules
// that names it.
func lnet(t *testing.T, c *clustertest.Cluster, node string) {
	c.Sh(node, kernelKnows)
	refusedFor(t, c.Do("storage.mount", node, lustreSpec+"}\n"), "kernel module lnet is missing")
	c.Sh(node, "mkdir -p /lib/modules/$(uname -r); echo 'extra/lnet.ko.xz:' >> /lib/modules/$(uname -r)/modules.dep")
}

// lustre: its options one by one, and what its helper and its servers may do.
func lustre(t *testing.T, c *clustertest.Cluster, node string) {
	given := func(want string) {
		t.Helper()
		if got := c.Sh(node, "cat /run/standin-lustre"); sorted(got) != sorted(want) {
			t.Errorf("mount.lustre was given %q, want %q", got, want)
		}
	}
	const name = "n1@tcp:10.9.9.9@o2ib1:/fs1 /mnt/lustre -o rw,_netdev,"
	for _, locks := range []struct{ spec, option, was string }{
		{"}\n", "flock", ""}, {", locks: LUSTRE_LOCKS_LOCAL}\n", "localflock", "option localflock: not set"}, {", locks: LUSTRE_LOCKS_NONE}\n", "noflock", "Mount.Options"},
	} {
		if locks.was != "" {
			var all []string
			for _, d := range planOf(t, c.Do("storage.mount", node, lustreSpec+locks.spec, "--plan")).GetDifferences() {
				all = append(all, d.GetSubject()+": "+d.GetHave())
			}
			if got := strings.Join(all, "; "); !strings.Contains(got, locks.was) {
				t.Errorf("the plan for %s says %q, want %q", locks.option, got, locks.was)
			}
		}
		succeed(t, c.Do("storage.mount", node, lustreSpec+locks.spec))
		given(name + locks.option)
	}
	answers(t, c, node, trouble{target: "/mnt/lustre", spec: lustreSpec + ", locks: LUSTRE_LOCKS_NONE}\n", kind: "EIO",
		source: "standin;lustre;n1@tcp:10.9.9.9@o2ib1:/fs1;noflock", want: "input/output error"})
	c.Sh(node, "echo hang > /run/standin-do")
	failed(t, c, node, lustreSpec+"}\n", "timeout")
	c.Sh(node, "rm /run/standin-do; c=$(pgrep -x sleep || true); test -z \"$c\"")
	c.Sh("n1", "systemctl stop standin-988")
	refusedFor(t, c.Do("storage.mount", node, strings.Replace(lustreSpec, ", '10.9.9.9@o2ib1'", "", 1)+"}\n"), "port 988 of n1 does not answer")
}

// failed runs a mount that fails and is undone, in time.
func failed(t *testing.T, c *clustertest.Cluster, node, spec, words string) {
	t.Helper()
	begun := time.Now()
	task := c.Do("storage.mount", node, spec)
	if task.GetState() != taskv1.TaskState_TASK_STATE_FAILED || task.GetUndo() != taskv1.UndoState_UNDO_STATE_COMPLETE || !strings.Contains(task.GetMessage(), words) {
		t.Errorf("%s %s: %s; want %q", task.GetState(), task.GetUndo(), task.GetMessage(), words)
	}
	if took := time.Since(begun); took > 2*time.Minute {
		t.Errorf("it took %v", took)
	}
}

// stale: the server of an NFS mount has another file system now.
func stale(t *testing.T, c *clustertest.Cluster, node string) {
	const spec = "target: /mnt/nfs\nnfs: {server: n1, path: /exp, version: '4.2'}\n"
	succeed(t, c.Do("storage.mount", node, spec))
	source := c.Sh(node, "findmnt -n -o SOURCE /mnt/nfs")
	answers(t, c, node, trouble{target: "/mnt/nfs", spec: spec, kind: "ESTALE", source: source, want: "the mount is stale, its server has another file system now"})
}

// trouble is a mount in whose place one comes that answers with an error.
type trouble struct{ target, spec, kind, source, want string }

// answers puts a file system that answers every request with an error in place of
// a mount, while the agent is away: all else looks as before. The check fails in
// time and says what it is; another task runs meanwhile; it can be unmounted, and
// mounted again.
func answers(t *testing.T, c *clustertest.Cluster, node string, tr trouble) {
	t.Helper()
	binary := filepath.Join(t.TempDir(), "stalefs")
	build := exec.CommandContext(t.Context(), "go", "build", "-trimpath", "-o", binary, "./test/stalefs")
	build.Dir = clustertest.Root(t)
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the stand-in: %v\n%s", err, out)
	}
	data, err := os.ReadFile(binary)
	if err == nil {
		err = c.Machine(node).WriteFile(t.Context(), "/opt/stalefs", data, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	unit := strings.ReplaceAll(strings.Trim(tr.target, "/"), "/", "-") + ".mount"
	c.Sh(node, "systemctl stop millwrightd; umount "+tr.target+"; systemd-run --quiet --unit=stalefs /opt/stalefs "+tr.target+" '"+tr.source+"' "+tr.kind+`
for i in $(seq 300); do grep -q ' `+tr.target+` fuse ' /proc/mounts && systemctl is-active -q `+unit+` && break; sleep 0.1; done
systemctl start millwrightd`)
	if err := c.WaitConnected(t.Context(), node); err != nil {
		t.Fatal(err)
	}
	begun := time.Now()
	id := c.Start("storage.mount", node, tr.spec)
	succeed(t, c.Do("system.command", node, "argv: [/bin/true]"))
	task := c.End(id)
	if task.GetState() != taskv1.TaskState_TASK_STATE_FAILED || !strings.Contains(task.GetMessage(), tr.want) {
		t.Errorf("a mount that answers %s: %s: %s; want %q", tr.kind, task.GetState(), task.GetMessage(), tr.want)
	}
	took := time.Since(begun)
	if took > time.Minute {
		t.Errorf("a mount that answers %s was found after %v", tr.kind, took)
	}
	t.Logf("a mount that answers %s: %v: %s", tr.kind, took.Round(time.Second), task.GetMessage())
	succeed(t, c.Do("storage.unmount", node, "target: "+tr.target+"\n"))
	succeed(t, c.Do("storage.mount", node, tr.spec))
	succeed(t, c.Do("storage.unmount", node, "target: "+tr.target+"\n"))
}
