package storage_test

import (
	"errors"
	"testing"

	storagev1 "github.com/gpuaas/millwright/proto/millwright/storage/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/storage"
	"github.com/gpuaas/millwright/tasks/tasktest/fakehost"
)

// TestRestoreErasesNothing: a spec with wipe erases a disk once, for its own task.
// A restore of its intent, on a node that lost the unit and uses the disk for
// something else, is refused.
func TestRestoreErasesNothing(t *testing.T) {
	n := fakehost.New()
	do(t, n, "program /usr/sbin/mkfs.xfs\ndisk nvme0n1 S6X1NA0\nholds nvme0n1 ext4 11111111-2222-4333-8444-555555555555\n")
	h := n.Hosts(nil).ForStep("t", 0)
	spec := &storagev1.ScratchSpec{
		Target: "/scratch", Disk: &storagev1.ScratchDisk{Id: &storagev1.ScratchDisk_Serial{Serial: "S6X1NA0"}, Wipe: true},
	}
	if p, err := (storage.Scratch{}).Plan(t.Context(), h, spec); err != nil || len(p.Steps) == 0 {
		t.Errorf("the task itself: %d steps, %v", len(p.Steps), err)
	}
	if p, err := (storage.Scratch{}).Plan(t.Context(), h, storage.Scratch{}.ForRestore(spec)); !errors.Is(err, tasks.ErrPrecondition) {
		t.Errorf("its restore: %d steps, %v, want it refused", len(p.Steps), err)
	}
	if !spec.GetDisk().GetWipe() {
		t.Error("the spec itself was changed")
	}
}
