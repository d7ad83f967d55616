package mounts_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuaas/millwright/agent/internal/host/mounts"
	"github.com/gpuaas/millwright/tasks/host"
)

func TestParse(t *testing.T) {
	tests := map[string]struct {
		line string
		want host.Mount
	}{
		"from proc(5)": {
			`36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue`,
			host.Mount{ID: 36, Parent: 35, Dev: "98:0", Root: "/mnt1", Target: "/mnt2", Options: []string{"rw", "noatime"},
				FSType: "ext3", Source: "/dev/root", Super: []string{"rw", "errors=continue"}},
		},
		"no optional field": {
			`1 1 0:1 / / rw - rootfs rootfs rw`,
			host.Mount{ID: 1, Parent: 1, Dev: "0:1", Root: "/", Target: "/", Options: []string{"rw"}, FSType: "rootfs", Source: "rootfs", Super: []string{"rw"}},
		},
		"two optional fields": {
			`2 1 0:2 / /a ro shared:7 master:3 - tmpfs none rw`,
			host.Mount{ID: 2, Parent: 1, Dev: "0:2", Root: "/", Target: "/a", Options: []string{"ro"}, FSType: "tmpfs", Source: "none", Super: []string{"rw"}},
		},
		"escapes": {
			`3 1 0:3 /x\040y /mnt/a\040b\011c\012d\134e\043f rw - fuse.glusterfs gfs:/v\0401 rw`,
			host.Mount{ID: 3, Parent: 1, Dev: "0:3", Root: "/x y", Target: "/mnt/a b\tc\nd\\e#f", Options: []string{"rw"},
				FSType: "fuse.glusterfs", Source: "gfs:/v 1", Super: []string{"rw"}},
		},
		"empty source": {
			`4 1 0:4 / /b rw - tmpfs  rw,size=1k`,
			host.Mount{ID: 4, Parent: 1, Dev: "0:4", Root: "/", Target: "/b", Options: []string{"rw"}, FSType: "tmpfs", Source: "", Super: []string{"rw", "size=1k"}},
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			got, err := mounts.Parse([]byte(tt.line + "\n"))
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff([]host.Mount{tt.want}, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestParseRefuses(t *testing.T) {
	for _, line := range []string{
		"x", "36 35 98:0 / /", "36 35 98:0 / / rw ext3 /dev/root rw", "a 35 98:0 / / rw - ext3 d rw",
		"36 b 98:0 / / rw - ext3 d rw", "36 35 98 / / rw - ext3 d rw", "36 35 9:x / / rw - ext3 d rw", "36 35 98:0 / / rw - ext3 d",
	} {
		if got, err := mounts.Parse([]byte("1 1 0:1 / / rw - t s rw\n" + line)); err == nil || !strings.Contains(err.Error(), "line 2") {
			t.Errorf("%q: %v, %v", line, got, err)
		}
	}
}

func TestAt(t *testing.T) {
	table := []host.Mount{{ID: 1, Target: "/"}, {ID: 2, Target: "/a"}, {ID: 3, Target: "/a"}, {ID: 4, Target: "/b"}}
	if m, ok := mounts.At(table, "/a"); !ok || m.ID != 3 {
		t.Errorf("the last one is seen, got %v %v", m, ok)
	}
	if m, ok := mounts.At(table, "/c"); ok {
		t.Errorf("got %v", m)
	}
}

func FuzzParse(f *testing.F) {
	if b, err := os.ReadFile("/proc/self/mountinfo"); err == nil {
		f.Add(b)
	}
	f.Add([]byte(`3 1 0:3 /x\040y /a\01 rw - t s rw`))
	f.Fuzz(func(t *testing.T, b []byte) {
		got, err := mounts.Parse(b)
		if err != nil {
			return
		}
		for _, m := range got {
			if len(m.Options) == 0 || len(m.Super) == 0 || !strings.Contains(m.Dev, ":") {
				t.Errorf("incomplete mount %+v", m)
			}
		}
	})
}

// The real table of the machine parses, and / is mounted.
func TestRealTable(t *testing.T) {
	table, err := mounts.New(mounts.Config{}).Mounts(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if m, ok := mounts.At(table, "/"); !ok || m.FSType == "" {
		t.Errorf("nothing at /: %v", table)
	}
}

func TestFilesystemKnown(t *testing.T) {
	proc, modules := t.TempDir(), t.TempDir()
	write(t, filepath.Join(proc, "filesystems"), "nodev\ttmpfs\n\text4\nnodev\tfuse\n")
	write(t, filepath.Join(modules, "modules.alias"), "# Aliases\nalias fs-xfs xfs\nalias fs-nfs4 nfs\n")
	tests := []struct {
		fstype, modules string
		want            bool
	}{
		{"tmpfs", modules, true}, {"ext4", modules, true}, {"fuse.glusterfs", modules, true}, {"xfs", modules, true},
		{"nfs4", modules, true}, {"nfs", modules, false}, {"lustre", modules, false},
		{"xfs", filepath.Join(modules, "none"), false}, {"tmpfs", filepath.Join(modules, "none"), true},
	}
	for _, tt := range tests {
		table := mounts.New(mounts.Config{Proc: proc, Modules: tt.modules})
		if got, err := table.FilesystemKnown(t.Context(), tt.fstype); err != nil || got != tt.want {
			t.Errorf("%s: %v, %v", tt.fstype, got, err)
		}
	}
}

func write(t *testing.T, path, data string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(data), 0o600); err != nil {
		t.Fatal(err)
	}
}
