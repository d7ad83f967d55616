package disks

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpuaas/millwright/agent/internal/child"
	"github.com/gpuaas/millwright/tasks/host"
	"github.com/gpuaas/millwright/tasks/host/hosttest"
)

func newSet(cfg Config) *Set {
	cfg.Children = child.New(child.Config{Logger: slog.New(slog.DiscardHandler)})
	cfg.Changes = direct{cfg.Children}
	cfg.Find = func(_ context.Context, name string) (string, error) { return exec.LookPath(name) }
	return New(cfg)
}

// direct changes disks without systemd, of which these tests know nothing:
// test/e2e/storage_scratch has both.
type direct struct{ children *child.Runner }

func (direct) Idle(context.Context, string) error { return nil }

func (d direct) Change(ctx context.Context, device string, argv []string, limit time.Duration) error {
	res, err := d.children.Run(ctx, child.Spec{Argv: argv, Timeout: limit, Key: device})
	if err == nil && res.ExitCode != 0 {
		err = fmt.Errorf("%s: %w", res.Stderr, errProgram)
	}
	return err
}

// inDir finds programs in one directory only.
func inDir(dir string) func(context.Context, string) (string, error) {
	return func(_ context.Context, name string) (string, error) { return exec.LookPath(filepath.Join(dir, name)) }
}

// tree writes files below a directory.
func tree(t *testing.T, dir string, files map[string]string) {
	t.Helper()
	for name, content := range files {
		p := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

func TestDisksOfTheKernel(t *testing.T) {
	sys, proc := t.TempDir(), t.TempDir()
	tree(t, sys, map[string]string{
		"block/nvme0n1/dev": "259:0\n", "block/nvme0n1/size": "2048\n", "block/nvme0n1/ro": "0\n",
		"block/nvme0n1/device/serial":         "S6X1NA0         \n",
		"block/nvme0n1/nvme0n1p1/partition":   "1\n",
		"block/nvme0n1/nvme0n1p1/dev":         "259:1\n",
		"block/nvme0n1/nvme0n1p1/holders/md0": "",
		"block/sda/dev":                       "8:0\n",
		"block/sda/size":                      "2048\n",
		"block/sda/ro":                        "1\n",
		"block/sda/device/vpd_pg80":           "\x00\x80\x00\x08  WD1234",
		"block/vda/dev":                       "254:0\n",
		"block/vda/size":                      "4096\n",
		"block/vda/ro":                        "0\n",
		"block/vda/serial":                    "virt-1",
		"block/loop3/dev":                     "7:3\n",
		"block/loop3/size":                    "8\n",
		"block/loop3/ro":                      "0\n",
		"block/loop3/loop/backing_file":       "/srv/a.img\n",
		"block/loop4/dev":                     "7:4\n",
		"block/loop4/size":                    "0\n",
		"block/loop4/ro":                      "0\n",
	})
	tree(t, proc, map[string]string{"swaps": "Filename\tType\n/dev/vda  partition 1 0 -2\n"})
	got, err := newSet(Config{Sys: sys, Proc: proc}).Disks(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	want := []host.Disk{
		{Name: "loop3", Dev: "7:3", File: "/srv/a.img", SizeBytes: 4096},
		{Name: "nvme0n1", Dev: "259:0", Serial: "S6X1NA0", SizeBytes: 1 << 20, Holders: []string{"md0"},
			Partitions: []host.DiskPartition{{Name: "nvme0n1p1", Dev: "259:1"}}},
		{Name: "sda", Dev: "8:0", Serial: "WD1234", SizeBytes: 1 << 20, ReadOnly: true},
		{Name: "vda", Dev: "254:0", Serial: "virt-1", SizeBytes: 2 << 20, Swap: true},
	}
	same := func(a, b host.Disk) bool {
		return a.Name == b.Name && a.Dev == b.Dev && a.Serial == b.Serial && a.File == b.File && a.SizeBytes == b.SizeBytes &&
			a.ReadOnly == b.ReadOnly && a.Swap == b.Swap && slices.Equal(a.Holders, b.Holders) && slices.Equal(a.Partitions, b.Partitions)
	}
	if !slices.EqualFunc(got, want, same) {
		t.Errorf("Disks = %+v\nwant    %+v", got, want)
	}
}

// TestLoopDisk puts a real loop device, with the system's own programs, to what
// the disks in memory are put to.
func TestLoopDisk(t *testing.T) {
	name, image := loop(t)
	hosttest.Disks(t, newSet(Config{}), name, image, func(t testing.TB, _ string) func() {
		dir := t.TempDir()
		run(t, "mount", "/dev/"+name, dir)
		return func() { run(t, "umount", dir) }
	})
}

// loop makes a loop device, where the test may.
func loop(t *testing.T) (name, image string) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("loop devices need root")
	}
	image = filepath.Join(t.TempDir(), "disk.img")
	if err := os.WriteFile(image, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(image, 320<<20); err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(t.Context(), "losetup", "--find", "--show", image).CombinedOutput()
	if err != nil {
		t.Fatalf("make a loop device: %v %s", err, out)
	}
	dev := strings.TrimSpace(string(out))
	t.Cleanup(func() { run(t, "losetup", "--detach", dev) })
	return strings.TrimPrefix(dev, "/dev/"), image
}

func run(t testing.TB, argv ...string) {
	t.Helper()
	if out, err := exec.CommandContext(context.WithoutCancel(t.Context()), argv[0], argv[1:]...).CombinedOutput(); err != nil {
		t.Errorf("%v: %v %s", argv, err, out)
	}
}
