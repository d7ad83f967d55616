package storage_scratch

import (
	"fmt"
	"strings"
	"testing"

	storagev1 "github.com/gpuaas/millwright/proto/millwright/storage/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/test/cluster/clustertest"
)

const (
	ext4UUID = "0f0e0d0c-1111-4222-8333-444455556666"
	xfsUUID  = "0f0e0d0c-1111-4222-8333-444455557777"
	byID     = "/dev/disk/by-id/file-n3-xfs"
)

// deviceSpecs are an ext4 by its UUID and an xfs by a name of its disk.
var deviceSpecs = map[string]string{
	"ext4": "target: /mnt/ext4\ndevice: {uuid: " + ext4UUID + ", fstype: ext4}\n",
	"xfs":  "target: /mnt/xfs\ndevice: {path: " + byID + ", fstype: xfs}\n",
}

// device: disks with file systems of their own are mounted by names that last.
func device(t *testing.T, c *clustertest.Cluster) {
	c.Sh("n3", `systemctl stop disks; truncate -s 64M /srv/n3-ext4.img; truncate -s `+size+` /srv/n3-xfs.img /srv/n3-empty.img
mkfs.ext4 -q -U `+ext4UUID+` /srv/n3-ext4.img; mkfs.xfs -q -m uuid=`+xfsUUID+` /srv/n3-xfs.img; systemctl start disks
for i in $(seq 300); do test -e /dev/disk/by-uuid/`+ext4UUID+` && test -e `+byID+` && test -e /dev/disk/by-id/file-n3-empty && break; sleep 0.1; done`)
	otherContent(t, c)
	for _, kind := range []string{"ext4", "xfs"} {
		task := succeed(t, c.Do("storage.mount", "n3", deviceSpecs[kind]))
		var r storagev1.MountResult
		if err := task.GetResult().UnmarshalTo(&r); err != nil || r.GetFstype() != kind {
			t.Errorf("result %v (%v)", &r, err)
		}
		c.Sh("n3", "echo "+kind+" > /mnt/"+kind+"/file; sync")
		planned(t, c, kind, "")
		driftOf(t, c, kind)
		busy(t, c, kind)
	}
	reboot(t, c, "n3", "")
	kept(c, "ext4", "xfs")
	planned(t, c, "ext4", "")
	planned(t, c, "xfs", "")
	// A disk that is not there does not hold up the boot, nor the other disk; when it
	// comes, the intent mounts it.
	c.Sh("n3", "mv /srv/n3-xfs.img /srv/n3-xfs.gone; sed -i '/^while/i for d in $(losetup -nl -O NAME,BACK-FILE | grep n3-xfs | cut -d\" \" -f1); do losetup -d $d; done' /root/disks")
	reboot(t, c, "n3", "degraded: mnt-xfs.mount ")
	kept(c, "ext4")
	if got := c.Sh("n3", "systemctl is-active multi-user.target; grep -c ' /mnt/xfs ' /proc/mounts || true"); got != "active\n0" {
		t.Errorf("booted without the disk, the node says %q", got)
	}
	if task := c.Do("storage.mount", "n3", deviceSpecs["xfs"]); task.GetState() != taskv1.TaskState_TASK_STATE_REFUSED || !strings.Contains(task.GetMessage(), byID+" is not there") {
		t.Errorf("without the disk: %s: %s", task.GetState(), task.GetMessage())
	}
	c.Sh("n3", "mv /srv/n3-xfs.gone /srv/n3-xfs.img")
	kept(c, "ext4", "xfs")
	for _, kind := range []string{"ext4", "xfs"} {
		succeed(t, c.Do("storage.unmount", "n3", "target: /mnt/"+kind+"\n"))
	}
	if left := c.Sh("n3", "grep ' /mnt/' /proc/mounts; ls /etc/systemd/system | grep '^mnt-.*mount$' || true"); left != "" {
		t.Errorf("unmounted, the node has %s", left)
	}
}

// kept waits until disks are mounted, with what was written to them. After a boot
// the agent gives systemd two minutes before it sees to an intent itself.
func kept(c *clustertest.Cluster, kinds ...string) {
	for _, k := range kinds {
		c.Sh("n3", fmt.Sprintf(`for i in $(seq 2400); do grep -q ' /mnt/%[1]s %[1]s ' /proc/mounts && break; sleep 0.1; done
test "$(cat /mnt/%[1]s/file)" = %[1]s`, k))
	}
}

// planned checks what a plan for a mount says: nothing, or words of a difference.
func planned(t *testing.T, c *clustertest.Cluster, kind, words string) {
	t.Helper()
	var p taskv1.Plan
	if err := succeed(t, c.Do("storage.mount", "n3", deviceSpecs[kind], "--plan")).GetResult().UnmarshalTo(&p); err != nil {
		t.Fatal(err)
	}
	var all []string
	for _, d := range p.GetDifferences() {
		all = append(all, d.GetSubject()+": "+d.GetHave()+", want "+d.GetWant())
	}
	if got := strings.Join(all, "; "); words == "" && got != "" || !strings.Contains(got, words) {
		t.Errorf("the plan for %s says %q, want %q", kind, got, words)
	}
}

// otherContent: a disk with another file system, or none, is refused by the names
// of both.
func otherContent(t *testing.T, c *clustertest.Cluster) {
	for spec, words := range map[string]string{
		"target: /mnt/ext4\ndevice: {uuid: " + ext4UUID + ", fstype: xfs}\n":                     "holds ext4, and device.fstype is xfs",
		"target: /mnt/xfs\ndevice: {path: " + byID + ", fstype: ext4}\n":                         "holds xfs, and device.fstype is ext4",
		"target: /mnt/xfs\ndevice: {path: /dev/disk/by-id/file-n3-empty, fstype: ext4}\n":        "holds no file system, and device.fstype is ext4",
		"target: /mnt/xfs\ndevice: {uuid: 00000000-1111-4222-8333-444455556666, fstype: ext4}\n": "is not there",
		"target: /mnt/xfs\ndevice: {path: /dev/disk/by-id/file-n3-none, fstype: xfs}\n":          "/dev/disk/by-id/file-n3-none is not there",
	} {
		if task := c.Do("storage.mount", "n3", spec); task.GetState() != taskv1.TaskState_TASK_STATE_REFUSED || !strings.Contains(task.GetMessage(), words) {
			t.Errorf("%q: %s: %s; want %q", spec, task.GetState(), task.GetMessage(), words)
		}
	}
}

// driftOf: what somebody changed is named in the plan, and mended.
func driftOf(t *testing.T, c *clustertest.Cluster, kind string) {
	unit := "/etc/systemd/system/mnt-" + kind + ".mount"
	for _, drift := range []struct{ do, words string }{
		{"mount -o remount,ro /mnt/" + kind, "mount /mnt/" + kind + " option: ro, want rw"},
		{"sed -i s/noatime/relatime/ " + unit + "; systemctl daemon-reload", "Mount.Options: "},
		{"mkdir -p " + unit + ".d; printf '[Mount]\\nOptions=nodiratime\\n' > " + unit + ".d/site.conf; systemctl daemon-reload", unit + ".d/site.conf"},
		{"umount /mnt/" + kind + "; mount -t tmpfs other /mnt/" + kind, "source: other"},
	} {
		c.Sh("n3", drift.do)
		planned(t, c, kind, drift.words)
		succeed(t, c.Do("storage.mount", "n3", deviceSpecs[kind]))
		planned(t, c, kind, "")
	}
	kept(c, kind)
}

// busy: an unmount from under somebody fails, and names him.
func busy(t *testing.T, c *clustertest.Cluster, kind string) {
	pid := c.Sh("n3", "systemd-run --quiet --unit=busy --property=WorkingDirectory=/mnt/"+kind+" /bin/sleep 1000; systemctl show -P MainPID busy")
	task := c.Do("storage.unmount", "n3", "target: /mnt/"+kind+"\n")
	if task.GetState() != taskv1.TaskState_TASK_STATE_FAILED || task.GetUndo() != taskv1.UndoState_UNDO_STATE_COMPLETE ||
		!strings.Contains(task.GetMessage(), pid) || !strings.Contains(task.GetMessage(), "/bin/sleep 1000") {
		t.Errorf("unmount of %s while process %s uses it: %s %s: %s", kind, pid, task.GetState(), task.GetUndo(), task.GetMessage())
	}
	c.Sh("n3", "systemctl stop busy")
	kept(c, kind)
}
