package storage_kinds

import (
	"fmt"
	"testing"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/test/cluster/clustertest"
	"github.com/gpuaas/millwright/test/s3store"
)

// bucketHelper is a stand-in for a client of S3: it writes down what it is given,
// with the variable that names its key, does what a file of the node says, and
// mounts the bucket for real, with s3fs under the client's name.
const bucketHelper = `cat > /sbin/mount.%[1]s <<'EOF'
#!/bin/sh
# A stand-in for mount.%[1]s.
echo $AWS_SHARED_CREDENTIALS_FILE "$@" > /run/standin-%[1]s
case $(cat /run/standin-do 2>/dev/null) in
refuse) echo "mount.%[1]s: access denied by server" >&2; exit 32;;
lie) exit 0;;
die) kill -KILL $$;;
esac
exec s3fs models "$2" -o %[2]s,passwd_file=/etc/standin-s3.key,url=http://server:%[3]d,use_path_request_style
EOF
printf '#!/bin/sh\n' > /usr/bin/%[1]s; chmod 755 /sbin/mount.%[1]s /usr/bin/%[1]s`

// buckets mounts S3 by mount-s3 and rclone, through stand-ins: each is given what
// it should, the bucket is there, a second task plans nothing, and a client that
// misbehaves fails the task, which is undone.
func buckets(t *testing.T, c *clustertest.Cluster, node string) {
	const port = 9001
	store := s3store.New("models", "standin")
	defer serve(t, store, fmt.Sprintf("%s:%d", c.Bed().Address(), port))()
	c.Put("mount-s3-key", []byte("[default]\naws_access_key_id = a\naws_secret_access_key = b\n"))
	c.Sh(node, "umask 077; echo standin:secret > /etc/standin-s3.key; printf '[store]\\ntype = s3\\n' > /etc/rclone.conf; chmod 400 /etc/rclone.conf")
	for _, client := range []struct{ name, shown, spec, given string }{
		{"mount-s3", "fsname=mountpoint-s3",
			"target: /mnt/mount-s3\ns3: {client: S3_CLIENT_MOUNT_S3, bucket: models, endpoint: 'http://server:9001', region: eu-central-1, path_style: true, key: {name: mount-s3-key}}\n",
			"/etc/millwright-keys/mnt-mount+2ds3.key s3://models /mnt/mount-s3 -o rw,allow-other,allow-delete,endpoint-url=http://server:9001,region=eu-central-1,force-path-style,_netdev"},
		{"rclone", "fsname=store:models,subtype=rclone",
			"target: /mnt/rclone\ns3: {client: S3_CLIENT_RCLONE, bucket: models, remote: store, key_file: /etc/rclone.conf}\n",
			"store:models /mnt/rclone -o rw,allow_other,args2env,config=/etc/rclone.conf,vfs-cache-mode=writes,vfs-write-back=0s,contimeout=5s,timeout=10s,low-level-retries=1,_netdev"},
	} {
		c.Sh(node, fmt.Sprintf(bucketHelper, client.name, client.shown, port))
		for _, how := range []string{"refuse", "lie", "die"} {
			c.Sh(node, "echo "+how+" > /run/standin-do")
			if task := c.Do("storage.mount", node, client.spec); task.GetState() != taskv1.TaskState_TASK_STATE_FAILED || task.GetUndo() != taskv1.UndoState_UNDO_STATE_COMPLETE {
				t.Errorf("mount.%s that does %s: %s %s: %s", client.name, how, task.GetState(), task.GetUndo(), task.GetMessage())
			}
		}
		c.Sh(node, "rm /run/standin-do")
		succeed(t, c.Do("storage.mount", node, client.spec))
		if got := c.Sh(node, "cat /run/standin-"+client.name); sorted(got) != sorted(client.given) {
			t.Errorf("mount.%s was given %q, want %q", client.name, got, client.given)
		}
		c.Sh(node, "echo hello > /mnt/"+client.name+"/"+client.name)
		if got, ok := store.Has(client.name); !ok || got != "hello\n" {
			t.Errorf("%s: the store has %q %v", client.name, got, ok)
		}
		if plan := planOf(t, c.Do("storage.mount", node, client.spec, "--plan")); len(plan.GetSteps()) != 0 {
			t.Errorf("%s: a second task plans %v", client.name, plan.GetDifferences())
		}
		succeed(t, c.Do("storage.unmount", node, "target: /mnt/"+client.name))
	}
	if left := c.Sh(node, "ls -A /etc/millwright-keys; grep -E 's3|rclone' /proc/self/mountinfo; ls /etc/systemd/system | grep -E 's3|rclone' || true"); left != "" {
		t.Errorf("left: %s", left)
	}
}
