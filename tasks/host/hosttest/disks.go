package hosttest

import (
	"errors"
	"slices"
	"testing"

	"github.com/gpuaas/millwright/tasks/host"
)

// DiskHost are the parts of a host that have to do with disks.
type DiskHost interface {
	host.DiskReader
	host.DiskWriter
}

// Disks puts a host to the suite of disks, on an empty loop disk with file behind
// it. use mounts what is on it until it is released.
func Disks(t *testing.T, h DiskHost, name, file string, use func(t testing.TB, uuid string) (release func())) {
	ctx := t.Context()
	disks, err := h.Disks(ctx)
	if err != nil || !slices.ContainsFunc(disks, func(d host.Disk) bool { return d.Name == name && d.File == file && d.SizeBytes > 0 }) {
		t.Fatalf("disk %s of %s is not among %+v (%v)", name, file, disks, err)
	}
	holds := func(want ...host.Signature) {
		t.Helper()
		got, err := h.Signatures(ctx, name)
		if err != nil || !slices.Equal(got, want) {
			t.Fatalf("the disk holds %+v (%v), want %+v", got, err, want)
		}
	}
	holds()
	var last host.Filesystem
	for _, uuid := range []string{"11111111-1111-4111-8111-111111111111", "22222222-2222-4222-8222-222222222222"} {
		last = host.Filesystem{Type: "ext4", UUID: uuid, Label: "mwscratch"}
		for range 2 {
			must(t, h.MakeFilesystem(ctx, name, last))
			holds(host.Signature(last))
		}
	}
	release := use(t, last.UUID)
	if err := h.WipeDisk(ctx, name); !errors.Is(err, host.ErrBusy) {
		t.Errorf("wipe of a disk in use: %v", err)
	}
	if err := h.MakeFilesystem(ctx, name, last); !errors.Is(err, host.ErrBusy) {
		t.Errorf("a file system on a disk in use: %v", err)
	}
	holds(host.Signature(last))
	release()
	for range 2 {
		must(t, h.WipeDisk(ctx, name))
		holds()
	}
	if _, err := h.Signatures(ctx, "none-such"); err == nil {
		t.Error("signatures of a disk that is not there")
	}
	if err := h.WipeDisk(ctx, "none-such"); err == nil {
		t.Error("a disk was wiped that is not there")
	}
}
