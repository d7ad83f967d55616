package fakehost_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/gpuaas/millwright/tasks/host"
	"github.com/gpuaas/millwright/tasks/host/hosttest"
	"github.com/gpuaas/millwright/tasks/tasktest/fakehost"
)

func do(t testing.TB, n *fakehost.Node, script string) {
	t.Helper()
	if err := n.Do(script); err != nil {
		t.Fatal(err)
	}
}

func TestConformance(t *testing.T) {
	n := fakehost.New()
	exit7, sleep := hosttest.Argv()
	do(t, n, "program /bin/sh\nprogram /bin/true\nprogram /bin/false\nprogram /bin/sleep\ndir /srv/test-dir\ndir /etc/munge\ndir /usr/lib/systemd/system")
	do(t, n, "result exit=1 /bin/false\nresult exit=7 "+strings.Join(exit7, " ")+"\nresult block "+strings.Join(sleep, " "))
	digest := "sha256:" + strings.Repeat("a", 64)
	do(t, n, "archive /opt/image.tar "+digest+"\nends exit=3 /program exit 3")
	do(t, n, "offer mwtest-base 1.0\noffer mwtest-tool 1.0 mwtest-base\noffer mwtest-tool 1.1 mwtest-base\noffer mwtest-rival 1.0 !mwtest-base\n"+
		"deb /opt/local.deb mwtest-local 2.0 mwtest-base")
	was := n.Dump()
	hosts := n.Hosts(nil)
	hosttest.Run(t, hosttest.Env{
		ForStep: hosts.ForStep, Prober: hosts.Prober, Dir: "/srv/test-dir",
		Link: func(t testing.TB, target, link string) { do(t, n, fmt.Sprintf("link %s %s", link, target)) },
		Occupy: func(t testing.TB, dir string) (int, func()) {
			do(t, n, "busy "+dir+" 4711 /bin/bash")
			return 4711, func() { do(t, n, "idle "+dir) }
		},
		Started:  func(_ testing.TB, argv []string, _ string) int { return n.Runs(argv...) },
		Image:    func(testing.TB) (string, string) { return "/opt/image.tar", digest },
		Packages: hosttest.Packages{Local: "/opt/local.deb"},
		Slurm:    func(t testing.TB) host.SlurmRef { return slurmOn(t, n) },
	})
	if got := n.Dump(); !strings.HasPrefix(got, was) || strings.Contains(strings.TrimPrefix(got, was), "file") {
		t.Errorf("the suite left\n%s\nof\n%s", got, was)
	}
}

// TestDNF puts a node with rpm and dnf to the part of the suite about packages.
func TestDNF(t *testing.T) {
	n := fakehost.New()
	do(t, n, "dir /srv/test-dir\ndnf\noffer mwtest-base 1.0-1\noffer mwtest-tool 1.0-1 mwtest-base\noffer mwtest-tool 1.1-1 mwtest-base\n"+
		"offer mwtest-rival 1.0-1 !mwtest-base\ndeb /opt/local.rpm mwtest-local 2.0-1 mwtest-base")
	hosts := n.Hosts(nil)
	hosttest.RunPackages(t, hosttest.Env{
		ForStep: hosts.ForStep, Prober: hosts.Prober, Dir: "/srv/test-dir",
		Packages: hosttest.Packages{Local: "/opt/local.rpm", Release: "-1", Erased: true},
	})
}

// slurmOn makes the node one of a cluster.
func slurmOn(t testing.TB, n *fakehost.Node) host.SlurmRef {
	t.Helper()
	was := []string{"/usr/sbin/munged", "/usr/sbin/slurmd", "/usr/lib/systemd/system/munge.service", "/etc/munge/munge.key"}
	do(t, n, "slurm controller ctl:6817 22.05.8\nslurm static node1 IDLE\nprogram /usr/sbin/munged\nprogram /usr/sbin/slurmd\n"+
		`file /usr/lib/systemd/system/munge.service 0644 "[Service]\nExecStart=/usr/sbin/munged\n"`+"\nfile /etc/munge/munge.key 0600 key\n")
	h := n.Hosts(nil).ForStep("slurm", 0)
	if err := h.StartUnit(t.Context(), "munge.service"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		do(t, n, "slurm gone\nremove "+strings.Join(was, "\nremove "))
	})
	return host.SlurmRef{Servers: []string{"ctl"}}
}

func TestDisks(t *testing.T) {
	n := fakehost.New()
	do(t, n, "loop loop9 /srv/disk.img\nprogram /usr/sbin/mkfs.ext4")
	h := n.Hosts(nil).ForStep("t", 0)
	hosttest.Disks(t, h, "loop9", "/srv/disk.img", func(t testing.TB, uuid string) func() {
		do(t, n, fmt.Sprintf("file /etc/systemd/system/data.mount 0644 %q", "[Mount]\nWhat=/dev/disk/by-uuid/"+uuid+"\nWhere=/data\nType=ext4\n"))
		if err := h.StartUnit(t.Context(), "data.mount"); err != nil {
			t.Fatal(err)
		}
		return func() { do(t, n, "umount /data") }
	})
}

// TestReboot checks what a reboot does to files, mounts and commands.
func TestReboot(t *testing.T) {
	n := fakehost.New()
	unit := func(where, what string) string {
		return fmt.Sprintf("file /etc/systemd/system/%s.mount 0644 %q\n", strings.ReplaceAll(where[1:], "/", "-"),
			"[Mount]\nWhat="+what+"\nWhere="+where+"\nType=none\nOptions=bind\n[Install]\nWantedBy=remote-fs.target\n")
	}
	do(t, n, "program /bin/job\nresult block /bin/job\ndir /srv/a\ndir /mnt/on\ndir /mnt/off\nfile /run/x 0644 gone\n"+
		unit("/mnt/on", "/srv/a")+unit("/mnt/off", "/srv/a")+"enable mnt-on.mount\nmount /mnt/hand tmpfs tmpfs")
	boot := n.BootID()
	killed := n.Hosts(func(_ context.Context, op fakehost.Op) error {
		if op.Phase == fakehost.During {
			return errors.New("killed")
		}
		return nil
	})
	if _, err := killed.ForStep("t", 0).RunCommand(t.Context(), host.Command{Argv: []string{"/bin/job"}}); err == nil {
		t.Fatal("the killed process got an outcome")
	}
	n.Reboot()
	if n.BootID() == boot {
		t.Error("the boot id is the same")
	}
	dump := n.Dump()
	for text, want := range map[string]bool{"mount /mnt/on ": true, "mount /mnt/off ": false, "mount /mnt/hand ": false, "gone": false} {
		if strings.Contains(dump, text) != want {
			t.Errorf("after a reboot %q is there: %v\n%s", text, !want, dump)
		}
	}
	_, err := n.Hosts(nil).ForStep("t", 0).RunCommand(t.Context(), host.Command{Argv: []string{"/bin/job"}})
	if !errors.Is(err, host.ErrOutcomeUnknown) || n.Started() != 1 {
		t.Errorf("command of the boot before: %v, started %d", err, n.Started())
	}
}

// TestGPUs puts GPUs of both ages to what the real ones are put to.
func TestGPUs(t *testing.T) {
	for _, product := range []string{"A100-80", "H100"} {
		t.Run(product, func(t *testing.T) {
			n := fakehost.New()
			do(t, n, "gpu add H100 GPU-other\ngpu add "+product+" GPU-a")
			was := n.Dump()
			hosttest.GPUs(t, n.Hosts(nil).ForStep("task", 0), hosttest.GPUEnv{
				UUID: "GPU-a",
				Hold: func(t testing.TB) (int, func()) {
					do(t, n, "gpu hold GPU-a 4711 /usr/bin/monitor")
					return 4711, func() { do(t, n, "gpu free GPU-a") }
				},
				Compute: func(t testing.TB, _, _ uint32) func() {
					do(t, n, "gpu hold GPU-a 4712 /usr/bin/train 9 4")
					return func() { do(t, n, "gpu free GPU-a") }
				},
			})
			if got := n.Dump(); got != was {
				t.Errorf("the suite left\n%s\nof\n%s", got, was)
			}
		})
	}
}
