package storage_test

import (
	"errors"
	"slices"
	"strings"
	"testing"

	storagev1 "github.com/gpuaas/millwright/proto/millwright/storage/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/all"
	"github.com/gpuaas/millwright/tasks/storage"
	"github.com/gpuaas/millwright/tasks/tasktest"
)

func bind(target, path string) *storagev1.MountSpec {
	return &storagev1.MountSpec{Target: target, Source: &storagev1.MountSpec_Bind{Bind: &storagev1.BindSource{Path: path}}}
}

func tmpfs(target string, size uint64, mode string) *storagev1.MountSpec {
	return &storagev1.MountSpec{Target: target, Source: &storagev1.MountSpec_Tmpfs{Tmpfs: &storagev1.TmpfsSource{SizeBytes: size, Mode: mode}}}
}

func gluster(target, volume, sub string, servers ...string) *storagev1.MountSpec {
	return &storagev1.MountSpec{Target: target, Source: &storagev1.MountSpec_Glusterfs{
		Glusterfs: &storagev1.GlusterfsSource{Servers: servers, Volume: volume, Subdirectory: sub},
	}}
}

// fields returns the fields that have a problem.
func fields(t *testing.T, err error) []string {
	t.Helper()
	if err == nil {
		return nil
	}
	var p tasks.Problems
	if !errors.As(err, &p) {
		t.Fatalf("error %T is not Problems: %v", err, err)
	}
	var out []string
	for _, q := range p {
		if q.Rule == "" || !strings.Contains(q.Rule, ":") {
			t.Errorf("problem %+v does not name a rule and a way out", q)
		}
		out = append(out, q.Field)
	}
	return out
}

func TestMountValidate(t *testing.T) {
	long := strings.Repeat("x", 256)
	for _, tc := range []struct {
		name string
		spec *storagev1.MountSpec
		want []string
	}{
		{"bind", bind("/mnt/data", "/srv/data"), nil},
		{"bind below the same directory", bind("/mnt/data2", "/mnt/data"), nil},
		{"tmpfs", tmpfs("/mnt/x", 4096, ""), nil},
		{"tmpfs with the sticky bit", tmpfs("/mnt/x", 1<<50, "1777"), nil},
		{"gluster", gluster("/usr/local/data", "v-1_x", "/a/b", "gfs-1.example.org", "10.0.0.7"), nil},
		{"home", gluster("/home", "v1", "", "gfs"), nil},
		{"nothing", &storagev1.MountSpec{}, []string{"target", "source"}},
		{"everything at once", gluster("mnt//x", "-v", "sub", "-a", "b_c"),
			[]string{"target", "glusterfs.servers[0]", "glusterfs.servers[1]", "glusterfs.volume", "glusterfs.subdirectory"}},
		{"empty sources", &storagev1.MountSpec{Target: "/mnt/x", Source: &storagev1.MountSpec_Glusterfs{}}, []string{"glusterfs.servers", "glusterfs.volume"}},
		{"bind nothing", bind("/mnt/x", ""), []string{"bind.path"}},
		{"bind on itself", bind("/mnt/x", "/mnt/x"), []string{"bind.path"}},
		{"bind from above", bind("/mnt/x/y", "/mnt/x"), []string{"bind.path"}},
		{"bind from below", bind("/mnt/x", "/mnt/x/y"), []string{"bind.path"}},
		{"bind of the root", bind("/mnt/x", "/"), []string{"bind.path"}},
		{"bind of our state", bind("/mnt/x", "/var/lib/millwright/identity"), []string{"bind.path"}},
		{"bind of what holds our state", bind("/mnt/x", "/var/lib"), []string{"bind.path"}},
		{"bind of what holds keys", bind("/mnt/x", "/etc"), []string{"bind.path"}},
		{"bind of keys", bind("/mnt/x", "/etc/millwright-keys"), []string{"bind.path"}},
		{"bind of what is beside our state", bind("/mnt/x", "/var/lib/containers"), nil},
		{"bind of devices", bind("/mnt/x", "/dev/shm"), []string{"bind.path"}},
		{"tmpfs too small", tmpfs("/mnt/x", 4095, "755"), []string{"tmpfs.size_bytes", "tmpfs.mode"}},
		{"tmpfs too large", tmpfs("/mnt/x", 1<<50+1, "0888"), []string{"tmpfs.size_bytes", "tmpfs.mode"}},
		{"server twice", gluster("/mnt/x", "v", "", "a", "a"), []string{"glusterfs.servers[1]"}},
		{"server with a port", gluster("/mnt/x", "v", "", "a:24007"), []string{"glusterfs.servers[0]"}},
		{"server is IPv6", gluster("/mnt/x", "v", "", "fe80::1"), []string{"glusterfs.servers[0]"}},
		{"17 servers", gluster("/mnt/x", "v", "", strings.Split("abcdefghijklmnopq", "")...), []string{"glusterfs.servers"}},
		{"volume with an option", gluster("/mnt/x", "v,ro", "", "a"), []string{"glusterfs.volume"}},
		{"the snapshots", gluster("/mnt/x", "snaps", "", "a"), []string{"glusterfs.volume"}},
		{"subdirectory with an option", gluster("/mnt/x", "v", "/a,ro", "a"), []string{"glusterfs.subdirectory"}},
		{"subdirectory that climbs", gluster("/mnt/x", "v", "/a/../..", "a"), []string{"glusterfs.subdirectory"}},
		{"specifier", tmpfs("/mnt/%n", 4096, ""), []string{"target"}},
		{"newline", tmpfs("/mnt/x\nWhat=/dev/sda", 4096, ""), []string{"target"}},
		{"space", tmpfs("/mnt/a b", 4096, ""), []string{"target"}},
		{"backslash", tmpfs(`/mnt/a\`, 4096, ""), []string{"target"}},
		{"glob", tmpfs("/mnt/*", 4096, ""), []string{"target"}},
		{"invalid UTF-8", tmpfs("/mnt/\xff", 4096, ""), []string{"target"}},
		{"not ASCII", tmpfs("/mnt/ä", 4096, ""), []string{"target"}},
		{"trailing slash", tmpfs("/mnt/x/", 4096, ""), []string{"target"}},
		{"long part", tmpfs("/mnt/"+long, 4096, ""), []string{"target"}},
		{"long unit name", tmpfs("/mnt/"+strings.Repeat("-", 60), 4096, ""), []string{"target"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if got := fields(t, storage.Mount{}.Validate(tc.spec)); !slices.Equal(got, tc.want) {
				t.Errorf("Validate names %q, want %q", got, tc.want)
			}
		})
	}
}

func TestForbiddenTargets(t *testing.T) {
	for _, target := range []string{
		"/", "/usr", "/usr/share/x", "/usr/local", "/etc", "/etc/x", "/proc", "/proc/x", "/sys", "/sys/fs/x", "/dev", "/dev/shm",
		"/run", "/run/x", "/var", "/var/lib", "/var/run/x", "/boot", "/boot/efi", "/bin", "/sbin/x", "/lib", "/lib64/x", "/root",
		"/tmp", "/var/tmp", "/var/log", "/var/lib/millwright", "/var/lib/millwright/commands", "/var/lib/millwright-server", "/var/lib/systemd/x",
	} {
		for name, err := range map[string]error{
			"mount":   storage.Mount{}.Validate(tmpfs(target, 4096, "")),
			"unmount": storage.Unmount{}.Validate(&storagev1.UnmountSpec{Target: target}),
		} {
			if got := fields(t, err); !slices.Equal(got, []string{"target"}) {
				t.Errorf("%s %s: Validate names %q", name, target, got)
			}
		}
	}
	for _, target := range []string{"/mnt", "/home", "/srv/x", "/opt/x", "/usr/local/x", "/var/lib/x", "/var/lib/millwright2", "/data", "/etcetera", "/runs"} {
		if err := (storage.Mount{}).Validate(tmpfs(target, 4096, "")); err != nil {
			t.Errorf("mount %s: %v", target, err)
		}
	}
}

func TestLocksAndIntents(t *testing.T) {
	key, change := storage.Mount{}.Intent(bind("/mnt/x", "/srv/y"))
	if key != "mount:/mnt/x" || change != tasks.IntentSet {
		t.Errorf("mount: intent %q, %v", key, change)
	}
	key, change = storage.Unmount{}.Intent(&storagev1.UnmountSpec{Target: "/mnt/x"})
	if key != "mount:/mnt/x" || change != tasks.IntentRemove {
		t.Errorf("unmount: intent %q, %v", key, change)
	}
	want := []tasks.Lock{{Name: "mount:/mnt/x"}, {Name: "mount:/srv/y", Shared: true}}
	if got := (storage.Mount{}).Locks(bind("/mnt/x", "/srv/y")); !slices.Equal(got, want) {
		t.Errorf("locks of a bind mount = %v, want %v", got, want)
	}
}

func FuzzMount(f *testing.F) {
	tasktest.FuzzValidate(f, all.Registry(), "storage.mount",
		bind("/mnt/x", "/srv/y"), tmpfs("/mnt/x", 5000, "1777"), gluster("/mnt/x", "v", "/s", "a", "b"))
}

func FuzzUnmount(f *testing.F) {
	tasktest.FuzzValidate(f, all.Registry(), "storage.unmount", &storagev1.UnmountSpec{Target: "/mnt/x"})
}
