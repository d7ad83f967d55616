// Package storage_kinds shows storage.mount and storage.unmount of S3 with s3fs,
// and of network file systems with stand-ins for their helpers, on a real node.
package storage_kinds

import (
	"fmt"
	"strings"
	"testing"
	"time"

	storagev1 "github.com/gpuaas/millwright/proto/millwright/storage/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/test/canary"
	"github.com/gpuaas/millwright/test/cluster"
	"github.com/gpuaas/millwright/test/cluster/clustertest"
	"github.com/gpuaas/millwright/test/s3store"
)

const (
	keyID   = "CANARYKEYID"
	keyFile = "/etc/millwright-keys/mnt-my+2dmodels.key"
)

func TestStorageKinds(t *testing.T) {
	c := clustertest.Up(t, clustertest.Config{Nodes: 2, Agent: cluster.Crash})
	t.Run("stories", func(t *testing.T) {
		t.Run("s3fs", func(t *testing.T) { t.Parallel(); s3fs(t, c.With(t)) })
		t.Run("stand-ins", func(t *testing.T) { t.Parallel(); standIns(t, c.With(t)) })
	})
}

func bucket(target string, port int, more string) string {
	return fmt.Sprintf("target: %s\n%ss3: {client: S3_CLIENT_S3FS, bucket: models, endpoint: 'http://server:%d', key: {name: s3-key}, path_style: true}\n", target, more, port)
}

func s3fs(t *testing.T, c *clustertest.Cluster) {
	const node, target, port = "n1", "/mnt/my-models", 9000
	address := fmt.Sprintf("%s:%d", c.Bed().Address(), port)
	s := s3store.New("models", keyID)
	begin := time.Now()
	secret := canary.New("s3-key")
	c.Put("s3-key", []byte(keyID+":"+string(secret.Value)+"\n"))
	spec := bucket(target, port, "")

	refusedFor(t, c.Do("storage.mount", node, spec), fmt.Sprintf("port %d of server", port))
	stop := serve(t, s, address)
	c.Sh(node, "umask 022; echo a:b > /etc/s3.key")
	refusedFor(t, c.Do("storage.mount", node, strings.Replace(spec, "key: {name: s3-key}", "key_file: /etc/s3.key", 1)), "chmod 0400 /etc/s3.key")
	gone := c.Do("storage.mount", node, strings.Replace(spec, "models, endpoint", "no-such-bucket, endpoint", 1))
	if gone.GetState() != taskv1.TaskState_TASK_STATE_FAILED || gone.GetUndo() != taskv1.UndoState_UNDO_STATE_COMPLETE {
		t.Errorf("a bucket that is not there: %s %s: %s", gone.GetState(), gone.GetUndo(), gone.GetMessage())
	}

	if left := c.Sh(node, "ls -A /etc/millwright-keys /var/lib/millwright/secrets 2>/dev/null || true"); strings.Contains(left, "models") {
		t.Errorf("undone, the key is still there: %s", left)
	}

	task := succeed(t, c.Do("storage.mount", node, spec))
	var result storagev1.MountResult
	if err := task.GetResult().UnmarshalTo(&result); err != nil || result.GetSource() != "s3fs#models" || result.GetFstype() != "fuse.s3fs" {
		t.Errorf("result %v %v", &result, err)
	}
	c.Sh(node, "echo hello > "+target+"/f")
	if got, ok := s.Has("f"); !ok || got != "hello\n" {
		t.Errorf("the store has %q %v under f", got, ok)
	}
	if left := s.Names(); len(left) != 1 {
		t.Errorf("the probe left something in the store: %v", left)
	}
	if plan := planOf(t, c.Do("storage.mount", node, spec, "--plan")); len(plan.GetSteps()) != 0 {
		t.Errorf("a second task plans %v", plan.GetDifferences())
	}
	if got := c.Sh(node, "stat -c '%a %U %G' "+keyFile); got != "400 root root" {
		t.Errorf("the key file is %s", got)
	}
	c.Searched(begin, []string{node}, []canary.Canary{secret}, "s3-key in n1:"+keyFile)

	// The daemon dies: the agent sees that without asking, and mounts again.
	pid := c.Sh(node, "pgrep -x s3fs; pkill -KILL -x s3fs")
	c.Sh(node, "for i in $(seq 600); do p=$(pgrep -x s3fs) && [ \"$p\" != "+pid+" ] && test -f "+target+"/f && exit 0; sleep 0.1; done; millwrightd status; exit 1")
	// Somebody unmounts it.
	c.Sh(node, "umount "+target+"; for i in $(seq 600); do test -f "+target+"/f && exit 0; sleep 0.1; done; millwrightd status; exit 1")

	stopped(t, c, node, target, spec)

	// The store goes: the mount stands, and the check finds out.
	stop()
	begun := time.Now()
	down := c.Do("storage.mount", node, spec)
	if down.GetState() != taskv1.TaskState_TASK_STATE_FAILED || !strings.Contains(down.GetMessage(), target) {
		t.Errorf("with the store down: %s: %s", down.GetState(), down.GetMessage())
	}
	t.Logf("with the store down it took %v: %s", time.Since(begun), down.GetMessage())
	un := succeed(t, c.Do("storage.unmount", node, "target: "+target+"\npolicy: UNMOUNT_POLICY_LAZY"))
	t.Logf("unmounted with the store down: %v", un.GetResult())

	// A store that comes later is waited for.
	id := c.Start("storage.mount", node, bucket(target, port, "wait: {attempts: 6, back_off: 1s}\n"))
	c.Await(id, taskv1.TaskState_TASK_STATE_RUNNING)
	serve(t, s, address)
	succeed(t, c.End(id))
	succeed(t, c.Do("storage.unmount", node, "target: "+target))
	if left := c.Sh(node, "for i in $(seq 300); do pgrep -x s3fs >/dev/null || break; sleep 0.1; done; ps -o pid,stat,cgroup,args -C s3fs --no-headers; grep "+target+" /proc/self/mountinfo; ls -A /etc/millwright-keys; ls /etc/systemd/system | grep models || true"); left != "" {
		t.Errorf("left: %s", left)
	}
}

// stopped stops the daemon: the check fails in time, and says that the mount
// hangs; another task on the node runs meanwhile.
func stopped(t *testing.T, c *clustertest.Cluster, node, target, spec string) {
	succeed(t, c.Do("storage.mount", node, spec)) // a restore that goes on has ended
	c.Sh(node, "pkill -STOP -x s3fs")
	id := c.Start("storage.mount", node, spec)
	succeed(t, c.Do("system.command", node, "argv: [/bin/true]"))
	if task := c.End(id); task.GetState() != taskv1.TaskState_TASK_STATE_FAILED || !strings.Contains(task.GetMessage(), "hung") {
		t.Errorf("while the daemon is stopped: %s: %s", task.GetState(), task.GetMessage())
	}
	c.Sh(node, "pkill -CONT -x s3fs; test -f "+target+"/f")
}

// helper is a stand-in for a mount helper: it writes down what it is given, and
// does what a file of the node says: it mounts a tmpfs, refuses, lies, hangs or dies.
const helper = `cat > /sbin/mount.%[1]s <<'EOF'
#!/bin/sh
# A stand-in for mount.%[1]s.
echo "$@" > /run/standin-%[1]s
echo "$@" >> /run/standin-calls
what=$1 where=$2 opts=
shift 2
while [ $# -gt 0 ]; do case $1 in -o) opts=$2; shift 2;; *) shift;; esac; done
case $(cat /run/standin-do 2>/dev/null) in
refuse) echo "mount.%[1]s: access denied by server" >&2; exit 32;;
lie) exit 0;;
hang) exec sleep 1000;;
die) kill -KILL $$;;
esac
shown=$(echo "$opts" | tr , '\n' | grep -E '%[3]s' | tr '\n' ';')
exec mount -i -t tmpfs "standin;%[2]s;$what;${shown%%;}" "$where"
EOF
chmod 755 /sbin/mount.%[1]s`

func standIns(t *testing.T, c *clustertest.Cluster) {
	const node = "n2"
	for _, f := range []struct{ helper, shows, options string }{
		{"lustre", "lustre", "^(local|no)?flock$"}, {"wekafs", "wekafs", "^(read|write)cache$"}, {"ceph", "ceph", "^name="}, {"beegfs", "beegfs", "^cfgFile="}, {"nfs", "nfs4", "^(vers|nconnect|proto)=|^hard$"},
	} {
		c.Sh(node, fmt.Sprintf(helper, f.helper, f.shows, f.options))
	}
	c.Sh(node, "umask 077; echo k > /etc/ceph.key; printf '#!/bin/sh\\n' > /usr/bin/weka; chmod 755 /usr/bin/weka")
	weka := "target: /mnt/weka\nwait: {attempts: 2, back_off: 1s}\nweka: {backends: [n1], filesystem: fast, cores: 2, cache: WEKA_CACHE_READ}\n"
	task := succeed(t, c.Do("storage.mount", node, weka))
	var result storagev1.MountResult
	if err := task.GetResult().UnmarshalTo(&result); err != nil || result.GetFstype() != "wekafs" || result.GetSource() != "n1/fast" {
		t.Errorf("result %v %v", &result, err)
	}
	if got := c.Sh(node, "cat /run/standin-wekafs"); !strings.Contains(got, "n1/fast /mnt/weka") || !strings.Contains(got, "net=udp,num_cores=2,readcache") {
		t.Errorf("mount.wekafs was given %q", got)
	}
	if plan := planOf(t, c.Do("storage.mount", node, weka, "--plan")); len(plan.GetSteps()) != 0 {
		t.Errorf("a second task plans %v", plan.GetDifferences())
	}
	succeed(t, c.Do("storage.unmount", node, "target: /mnt/weka"))
	for _, how := range []string{"refuse", "lie", "die", "hang"} {
		c.Sh(node, "echo "+how+" > /run/standin-do")
		begun := time.Now()
		task := c.Do("storage.mount", node, weka)
		if task.GetState() != taskv1.TaskState_TASK_STATE_FAILED || task.GetUndo() != taskv1.UndoState_UNDO_STATE_COMPLETE {
			t.Errorf("a helper that does %s: %s %s: %s", how, task.GetState(), task.GetUndo(), task.GetMessage())
		}
		t.Logf("a helper that does %s: %v: %s", how, time.Since(begun).Round(time.Second), task.GetMessage())
	}
	buckets(t, c, node)
	attempts(t, c, node)
	if left := c.Sh(node, "pgrep -x sleep; grep weka /proc/self/mountinfo; ls /etc/systemd/system | grep weka || true"); left != "" {
		t.Errorf("left: %s", left)
	}
	// The kernel of this machine knows none of them, and the agent says which.
	for _, tc := range []struct{ spec, want string }{
		{"target: /mnt/n\nnfs: {server: n1, path: /exp, version: '4.2'}", "nfs4"},
		{"target: /mnt/l\nlustre: {mgs: [10.0.0.1@o2ib], filesystem: fs1}", "lustre"},
		{"target: /mnt/c\ncephfs: {monitors: [n1], user: u, key_file: /etc/ceph.key}", "ceph"},
		{"target: /mnt/b\nbeegfs: {}", "beegfs"},
		{"target: /mnt/d\ndevice: {uuid: 0f0e0d0c-1111-4222-8333-444455556666, fstype: ext4}", "/dev/disk/by-uuid/0f0e0d0c-1111-4222-8333-444455556666"},
	} {
		refusedFor(t, c.Do("storage.mount", node, tc.spec), tc.want)
	}
	otherKinds(t, c, node)
	refusedFor(t, c.Do("storage.mount", node, "target: /mnt/w\nweka: {backends: [no-such-host], filesystem: fast}"), "host name no-such-host does not resolve")
}

func refusedFor(t *testing.T, task *taskv1.Task, want string) {
	t.Helper()
	if task.GetState() != taskv1.TaskState_TASK_STATE_REFUSED || !strings.Contains(task.GetMessage(), want) {
		t.Errorf("%s, want it refused for %q: %s", task.GetState(), want, task.GetMessage())
	}
}

func succeed(t *testing.T, task *taskv1.Task) *taskv1.Task {
	t.Helper()
	if task.GetState() != taskv1.TaskState_TASK_STATE_SUCCEEDED {
		t.Fatalf("task %s is %s: %s: %s", task.GetId(), task.GetState(), task.GetReason(), task.GetMessage())
	}
	return task
}

// planOf returns the plan that a task in mode plan has as its result.
func planOf(t *testing.T, task *taskv1.Task) *taskv1.Plan {
	t.Helper()
	var p taskv1.Plan
	if err := succeed(t, task).GetResult().UnmarshalTo(&p); err != nil {
		t.Fatal(err)
	}
	return &p
}
