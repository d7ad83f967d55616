// Package storage_scratch shows storage.scratch, and storage.mount of a disk, on
// real nodes with loop disks.
package storage_scratch

import (
	"context"
	"os/exec"
	"strings"
	"testing"
	"time"

	storagev1 "github.com/gpuaas/millwright/proto/millwright/storage/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/test/cluster/clustertest"
)

const (
	target = "/scratch"
	// xfs wants 300 MB at least.
	size = "320M"
)

func spec(file, more string) string {
	return "target: " + target + "\ndisk: {loop_file: " + file + more + "}\nfilesystem: SCRATCH_FILESYSTEM_XFS\n"
}

func TestScratch(t *testing.T) {
	c := clustertest.Up(t, clustertest.Config{Nodes: 3})
	for _, n := range []string{"n1", "n2", "n3"} {
		equip(t, c, n)
	}
	t.Run("nodes", func(t *testing.T) {
		t.Run("life", func(t *testing.T) {
			t.Parallel()
			life(t, c.With(t))
		})
		t.Run("refused", func(t *testing.T) {
			t.Parallel()
			refused(t, c.With(t))
		})
		t.Run("device", func(t *testing.T) {
			t.Parallel()
			device(t, c.With(t))
		})
	})
}

// disks is what a boot does here in place of a kernel that finds disks and a udev
// that links their file systems: each file of /srv is a loop device, if it is
// not one yet.
const disks = `#!/bin/sh
test -e /dev/loop-control || mknod /dev/loop-control c 10 237
for i in $(seq 0 63); do test -e /dev/loop$i || mknod /dev/loop$i b 7 $i; done
mkdir -p /dev/disk/by-uuid /dev/disk/by-id
while :; do
	for f in /srv/*.img; do
		test -n "$(losetup -j $f)" || losetup --find $f
		dev=$(losetup -j $f | head -n1 | cut -d: -f1)
		ln -sfn $dev /dev/disk/by-id/file-$(basename $f .img)
		uuid=$(blkid -p -s UUID -o value $dev)
		for l in /dev/disk/by-uuid/*; do
			test "$(readlink $l)" != $dev || test "${l##*/}" = "$uuid" || rm $l
		done
		test -z "$uuid" || test -e /dev/disk/by-uuid/$uuid || ln -s $dev /dev/disk/by-uuid/$uuid
	done
	touch /run/disks
	sleep 0.2
done
`

// wait stands in front of mount(8), for what systemd does where it knows devices,
// which is not in a container: it waits for the link.
const wait = `#!/bin/sh
for a; do case $a in /dev/disk/by-*/*) for i in $(seq 50); do test -e $a && break; sleep 0.1; done;; esac; done
exec /usr/bin/mount.real "$@"
`

// equip gives a node its stand-ins. What they leave in the kernel goes before the
// testbed does.
func equip(t *testing.T, c *clustertest.Cluster, name string) {
	t.Helper()
	if err := c.Machine(name).WriteFile(t.Context(), "/root/disks", []byte(disks), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := c.Machine(name).WriteFile(t.Context(), "/root/mount", []byte(wait), 0o755); err != nil {
		t.Fatal(err)
	}
	// The name of the file tells the loop devices of this test from all others.
	c.Sh(name, `truncate -s `+size+` /srv/`+name+`-scratch.img
mv /usr/bin/mount /usr/bin/mount.real; mv /root/mount /usr/bin/mount
printf '[Unit]\nDefaultDependencies=no\nBefore=millwrightd.service\n[Service]\nExecStart=/root/disks\nExecStartPost=/bin/sh -c "until test -e /run/disks; do sleep 0.1; done"\n[Install]\nWantedBy=sysinit.target\n' > /etc/systemd/system/disks.service
systemctl daemon-reload; systemctl enable --now disks`)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), time.Minute)
		defer cancel()
		_, _ = c.Machine(name).Exec(ctx, "sh", "-c", "systemctl stop disks; umount "+target+" /mnt/ext4 /mnt/xfs") // it may be off, or not mounted
		for line := range strings.Lines(output(ctx, "losetup", "--list", "--noheadings", "--output", "NAME,BACK-FILE")) {
			if dev, file, _ := strings.Cut(strings.TrimSpace(line), " "); strings.Contains(file, "/srv/"+name+"-") {
				_ = exec.CommandContext(ctx, "losetup", "--detach", dev).Run()
			}
		}
	})
}

func output(ctx context.Context, argv ...string) string {
	out, _ := exec.CommandContext(ctx, argv[0], argv[1:]...).Output()
	return string(out)
}

func succeed(t *testing.T, task *taskv1.Task) *taskv1.Task {
	t.Helper()
	if task.GetState() != taskv1.TaskState_TASK_STATE_SUCCEEDED {
		t.Fatalf("%s is %s: %s: %s", task.GetKind(), task.GetState(), task.GetReason(), task.GetMessage())
	}
	return task
}

// mounted waits until the scratch is, with what its file says. After a boot the
// agent gives systemd two minutes before it sees to an intent itself.
func mounted(c *clustertest.Cluster, node, says string) {
	c.Sh(node, `for i in $(seq 2400); do grep -q ' `+target+` xfs ' /proc/mounts && break; sleep 0.1; done
grep ' `+target+` xfs ' /proc/mounts && test "$(cat `+target+`/file 2>/dev/null)" = "`+says+`"`)
}

func life(t *testing.T, c *clustertest.Cluster) {
	const file = "/srv/n1-scratch.img"
	task := succeed(t, c.Do("storage.scratch", "n1", spec(file, "")))
	var r storagev1.ScratchResult
	if err := task.GetResult().UnmarshalTo(&r); err != nil || r.GetFstype() != "xfs" || r.GetCapacityBytes() < 200<<20 || r.GetUuid() == "" {
		t.Errorf("result %v (%v)", &r, err)
	}
	if got := c.Sh("n1", "blkid -p -s UUID -o value "+r.GetDevice()); got != r.GetUuid() {
		t.Errorf("the disk has the UUID %s, and the result says %s", got, r.GetUuid())
	}
	c.Sh("n1", "echo kept > "+target+"/file; sync")
	if task := succeed(t, c.Do("storage.scratch", "n1", spec(file, ""))); len(task.GetPlan().GetSteps()) != 0 {
		t.Errorf("a second task plans %v", task.GetPlan())
	}
	reboot(t, c, "n1", "")
	mounted(c, "n1", "kept")
	// The machine was stopped and started elsewhere: the disk is empty.
	c.Sh("n1", `printf '#!/bin/sh\nset -e\nrm -f /srv/n1-scratch.img\ntruncate -s `+size+` /srv/n1-scratch.img\nlosetup -j /srv/n1-scratch.img | cut -d: -f1 | xargs -r losetup -d\nsed -i /empty/d /root/disks\n' > /root/empty; chmod 755 /root/empty
sed -i '2i test ! -e /root/empty || /root/empty # empty' /root/disks`)
	reboot(t, c, "n1", "degraded: scratch.mount ")
	mounted(c, "n1", "")
	if got := c.Sh("n1", "blkid -p -s UUID -o value $(losetup -j "+file+" | cut -d: -f1)"); got != r.GetUuid() {
		t.Errorf("made anew, the disk has the UUID %s, before %s", got, r.GetUuid())
	}
	succeed(t, c.Do("storage.unmount", "n1", "target: "+target+"\n"))
	if got := c.Sh("n1", "grep -c ' "+target+" ' /proc/mounts || true; ls /etc/systemd/system/scratch.mount 2>/dev/null || true"); got != "0" {
		t.Errorf("unmounted, the node has %q", got)
	}
}

// reboot boots a node; degraded is why it may come up without all of its units.
func reboot(t *testing.T, c *clustertest.Cluster, node, degraded string) {
	t.Helper()
	if err := c.Machine(node).Reboot(t.Context()); err != nil && (degraded == "" || !strings.Contains(err.Error(), degraded)) {
		t.Fatal(err)
	}
	if err := c.WaitConnected(t.Context(), node); err != nil {
		t.Fatal(err)
	}
}

// contents tells what a disk holds by all of its bytes.
func contents(c *clustertest.Cluster, file string) string { return c.Sh("n2", "sync; sha256sum "+file) }

// refused: a disk that holds or is anything else is not touched.
func refused(t *testing.T, c *clustertest.Cluster) {
	const file = "/srv/n2-scratch.img"
	dev := c.Sh("n2", "losetup -j "+file+" | cut -d: -f1")
	for _, tc := range []struct{ name, damage, words, mend string }{
		{"a file system", "mkfs.ext4 -q " + dev, "it holds ext4", "wipefs -aq " + dev},
		{"a partition table", `printf '\000\000\002\000\203\377\377\377\001\000\000\000\001\000\000\000' | dd of=` + dev + ` bs=1 seek=446 conv=notrunc status=none; printf '\125\252' | dd of=` + dev + ` bs=1 seek=510 conv=notrunc status=none`, "it holds dos", "wipefs -aq " + dev},
		{"a mount", "mkfs.ext4 -q " + dev + "; mkdir -p /elsewhere; mount -o ro " + dev + " /elsewhere", "it is mounted on /elsewhere", "umount /elsewhere; wipefs -aq " + dev},
		{"another file", "true", "no disk in file /srv/none.img is there", "true"},
	} {
		c.Sh("n2", tc.damage+"; sync")
		of := file
		if tc.name == "another file" {
			of = "/srv/none.img"
		}
		before := contents(c, file)
		task := c.Do("storage.scratch", "n2", spec(of, ""))
		if task.GetState() != taskv1.TaskState_TASK_STATE_REFUSED || !strings.Contains(task.GetMessage(), tc.words) {
			t.Errorf("%s: %s: %s", tc.name, task.GetState(), task.GetMessage())
		}
		if after := contents(c, file); after != before {
			t.Errorf("%s: the disk holds %s, before %s", tc.name, after, before)
		}
		c.Sh("n2", tc.mend)
	}
	succeed(t, c.Do("storage.scratch", "n2", spec(file, "")))
	mounted(c, "n2", "")
}
