package storage_kinds

import (
	"slices"
	"strings"
	"testing"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/test/cluster/clustertest"
)

// kernelKnows has the node's kernel seem to know the file systems that stand-ins
// are here for, and the other node listen where their servers would.
const kernelKnows = `{ cat /proc/filesystems; printf 'nodev\tnfs4\nnodev\tceph\nnodev\tbeegfs\nnodev\tlustre\n'; } > /run/filesystems
mount --bind /run/filesystems /proc/filesystems`

const serversListen = `for p in 2049 6789 988; do systemd-run --quiet --unit=standin-$p systemd-socket-activate --accept --listen=$p /bin/cat
for i in $(seq 100); do grep -qi ":$(printf %04X $p) " /proc/net/tcp /proc/net/tcp6 && break; sleep 0.1; done; done`

// otherKinds mounts NFS, CephFS, BeeGFS and Lustre through stand-ins for their helpers:
// each is given exactly the options that it should, a second task plans nothing,
// and a helper that misbehaves fails the task, which is undone.
func otherKinds(t *testing.T, c *clustertest.Cluster, node string) {
	c.Sh("n1", serversListen)
	lnet(t, c, node)
	c.Put("ceph-key", []byte("AQDkey==\n"))
	c.Sh(node, "mkdir -p /etc/beegfs; printf 'sysMgmtdHost = n1\\nconnDisableAuthentication = true\\n' > /etc/beegfs/client.conf")
	for _, kind := range []struct{ helper, spec, given string }{
		{"nfs", "target: /mnt/nfs\nnfs: {server: n1, path: /exp, version: '4.2', nconnect: 8}\n",
			"n1:/exp /mnt/nfs -o rw,vers=4.2,nconnect=8,proto=tcp,hard,timeo=600,retrans=2,noresvport,retry=0,_netdev"},
		{"ceph", "target: /mnt/ceph\ncephfs: {monitors: [n1], user: u, key: {name: ceph-key}}\n",
			"n1:/ /mnt/ceph -o rw,name=u,secretfile=/etc/millwright-keys/mnt-ceph.key,ms_mode=prefer-crc,recover_session=clean,_netdev"},
		{"beegfs", "target: /mnt/beegfs\nbeegfs: {config_file: /etc/beegfs/client.conf}\n",
			"beegfs_nodev /mnt/beegfs -o rw,cfgFile=/etc/beegfs/client.conf,_netdev"},
		{"lustre", "target: /mnt/lustre\nlustre: {mgs: ['n1@tcp', '10.9.9.9@o2ib1'], filesystem: fs1, subdirectory: /proj}\n",
			"n1@tcp:10.9.9.9@o2ib1:/fs1/proj /mnt/lustre -o rw,flock,_netdev"},
	} {
		succeed(t, c.Do("storage.mount", node, kind.spec))
		if got := c.Sh(node, "cat /run/standin-"+kind.helper); sorted(got) != sorted(kind.given) {
			t.Errorf("mount.%s was given %q, want %q", kind.helper, got, kind.given)
		}
		if plan := planOf(t, c.Do("storage.mount", node, kind.spec, "--plan")); len(plan.GetSteps()) != 0 {
			t.Errorf("%s: a second task plans %v", kind.helper, plan.GetDifferences())
		}
		succeed(t, c.Do("storage.unmount", node, "target: /mnt/"+kind.helper))
		for _, how := range []string{"refuse", "lie", "die"} {
			c.Sh(node, "echo "+how+" > /run/standin-do")
			if task := c.Do("storage.mount", node, kind.spec); task.GetState() != taskv1.TaskState_TASK_STATE_FAILED || task.GetUndo() != taskv1.UndoState_UNDO_STATE_COMPLETE {
				t.Errorf("mount.%s that does %s: %s %s: %s", kind.helper, how, task.GetState(), task.GetUndo(), task.GetMessage())
			}
		}
		c.Sh(node, "rm /run/standin-do")
	}
	stale(t, c, node)
	lustre(t, c, node)
	if left := c.Sh(node, "umount /proc/filesystems; grep -E 'nfs|ceph|beegfs|lustre' /proc/self/mountinfo; ls /etc/systemd/system | grep -E 'nfs|ceph|beegfs|lustre' || true"); left != "" {
		t.Errorf("left: %s", left)
	}
	c.Sh("n1", "systemctl stop standin-2049 standin-6789")
}

// sorted has the options of a helper's command line in order, without those that
// mount(8) adds and takes as it likes.
func sorted(line string) string {
	words := strings.Fields(line)
	if len(words) == 0 {
		return ""
	}
	options := strings.Split(words[len(words)-1], ",")
	options = slices.DeleteFunc(options, func(o string) bool { return o == "rw" || o == "_netdev" })
	slices.Sort(options)
	return strings.Join(append(words[:len(words)-1], options...), " ")
}
