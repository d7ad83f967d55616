package storage_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	storagev1 "github.com/gpuaas/millwright/proto/millwright/storage/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/all"
	"github.com/gpuaas/millwright/tasks/tasktest/fakehost"
)

// mounted returns a node on which spec was carried out.
func mounted(t *testing.T, spec *storagev1.MountSpec) *fakehost.Node {
	t.Helper()
	n := fakehost.New()
	do(t, n, "program /sbin/mount.glusterfs\nvolume gfs:/v1\ndir /srv/data\nfile /srv/data/f 0644 x")
	k, reg := kind(t)
	p, err := reg.Plan(t.Context(), n.Hosts(nil).Prober(), k, spec)
	if err != nil {
		t.Fatal(err)
	}
	for i, sealed := range p.GetSteps() {
		s, err := reg.Open(sealed)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.Apply(t.Context(), n.Hosts(nil).ForStep("t", uint32(i))); err != nil {
			t.Fatal(err)
		}
	}
	return n
}

func do(t *testing.T, n *fakehost.Node, script string) {
	t.Helper()
	if err := n.Do(script); err != nil {
		t.Fatal(err)
	}
}

func kind(t *testing.T) (*tasks.Kind, *tasks.Registry) {
	t.Helper()
	reg := all.Registry()
	k, err := reg.Kind("storage.mount")
	if err != nil {
		t.Fatal(err)
	}
	return k, reg
}

// TestVerify checks that only a mount that serves counts: mounted proves
// nothing.
func TestVerify(t *testing.T) {
	gfs := gluster("/mnt/data", "v1", "", "gfs")
	readOnly := proto.CloneOf(gfs)
	readOnly.ReadOnly = true
	for _, tc := range []struct {
		name  string
		spec  *storagev1.MountSpec
		drift string
		is    error  // nil: any error
		says  string // empty: no error
	}{
		{"gluster", gfs, "", nil, ""},
		{"read-only gluster", readOnly, "", nil, ""},
		{"bind", bind("/mnt/data", "/srv/data"), "", nil, ""},
		{"tmpfs", tmpfs("/mnt/data", 1<<20, ""), "", nil, ""},
		{"not mounted", gfs, "umount /mnt/data", tasks.ErrNotSatisfied, `want "gfs:/v1 (fuse.glusterfs)"`},
		{"read only by hand", gfs, "remount /mnt/data ro", tasks.ErrNotSatisfied, `option: have "ro", want "rw"`},
		{"writable by hand", readOnly, "remount /mnt/data rw", tasks.ErrNotSatisfied, `option: have "rw", want "ro"`},
		{"not at boot", gfs, "disable mnt-data.mount", tasks.ErrNotSatisfied, "at boot"},
		{"another source", gfs, "umount /mnt/data\nmount /mnt/data fuse.glusterfs gfs:/v2", tasks.ErrNotSatisfied, `source: have "gfs:/v2"`},
		{"a part of the source", bind("/mnt/data", "/srv/data"), "umount /mnt/data\nbind /srv /mnt/data", tasks.ErrNotSatisfied, `have "/srv", want "/srv/data"`},
		{"the client has died", gfs, "lose gfs:/v1", tasks.ErrNotSatisfied, "disconnected"},
		{"another file system on the server", gfs, "stale /mnt/data", tasks.ErrNotSatisfied, "stale"},
		{"no answer", gfs, "hang /mnt/data", context.DeadlineExceeded, "no answer"},
		{"unit file gone", gfs, "remove /etc/systemd/system/mnt-data.mount", tasks.ErrNotSatisfied, "unit mnt-data.mount"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			n := mounted(t, tc.spec)
			do(t, n, tc.drift)
			k, _ := kind(t)
			err := k.Verify(t.Context(), n.Hosts(nil).Prober(), tc.spec)
			switch {
			case tc.says == "" && err != nil:
				t.Errorf("Verify: %v", err)
			case tc.says != "" && (err == nil || !strings.Contains(err.Error(), tc.says)):
				t.Errorf("Verify = %v, want one that says %q", err, tc.says)
			case tc.is != nil && !errors.Is(err, tc.is):
				t.Errorf("Verify = %v, want one that is %v", err, tc.is)
			}
		})
	}
}

// TestPlanNeverAsksTheMount checks that planning works while what is mounted
// hangs: it reads the mount table, and no path below the mount.
func TestPlanNeverAsksTheMount(t *testing.T) {
	gfs := gluster("/mnt/data", "v1", "", "gfs")
	n := mounted(t, gfs)
	do(t, n, "hang /mnt/data")
	k, reg := kind(t)
	p, err := reg.Plan(t.Context(), n.Hosts(nil).Prober(), k, gfs)
	if err != nil || len(p.GetSteps()) != 0 {
		t.Errorf("plan while the mount hangs: %v, %v", p, err)
	}
	do(t, n, "remount /mnt/data ro")
	p, err = reg.Plan(t.Context(), n.Hosts(nil).Prober(), k, gfs)
	if err != nil || len(p.GetDifferences()) != 1 || p.GetDifferences()[0].GetHave() != "ro" {
		t.Errorf("plan while the read-only mount hangs: %v, %v", p.GetDifferences(), err)
	}
	un, err := reg.Kind("storage.unmount")
	if err != nil {
		t.Fatal(err)
	}
	p, err = reg.Plan(t.Context(), n.Hosts(nil).Prober(), un, &storagev1.UnmountSpec{Target: "/mnt/data"})
	if err != nil || len(p.GetSteps()) == 0 {
		t.Errorf("plan to unmount what hangs: %v, %v", p, err)
	}
	// A bind mount of a directory there does not ask it either.
	p, err = reg.Plan(t.Context(), n.Hosts(nil).Prober(), k, bind("/mnt/view", "/mnt/data/sub"))
	if err != nil || len(p.GetSteps()) == 0 {
		t.Errorf("plan to bind what hangs: %v, %v", p, err)
	}
}

func TestResult(t *testing.T) {
	for _, tc := range []struct {
		spec *storagev1.MountSpec
		want *storagev1.MountResult
	}{
		{gluster("/mnt/data", "v1", "", "gfs"), &storagev1.MountResult{
			Unit: "mnt-data.mount", Source: "gfs:/v1", Fstype: "fuse.glusterfs",
			Options: "rw,relatime,user_id=0,group_id=0,allow_other", CapacityBytes: 1 << 40,
		}},
		{tmpfs("/mnt/mill-wright", 5000, ""), &storagev1.MountResult{
			Unit: `mnt-mill\x2dwright.mount`, Source: "tmpfs", Fstype: "tmpfs", Options: "rw,relatime,size=8k,mode=755", CapacityBytes: 8192,
		}},
	} {
		n := mounted(t, tc.spec)
		k, _ := kind(t)
		got, err := k.Result(t.Context(), n.Hosts(nil).Prober(), tc.spec, nil)
		if err != nil {
			t.Fatal(err)
		}
		m, err := got.UnmarshalNew()
		if err != nil || !proto.Equal(m, tc.want) {
			t.Errorf("Result = %v, %v, want %v", m, err, tc.want)
		}
	}
}
