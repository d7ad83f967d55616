//go:build millwright_node

package nodehost_test

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuaas/millwright/agent/internal/clock"
	nodehost "github.com/gpuaas/millwright/agent/internal/host"
	"github.com/gpuaas/millwright/tasks/host"
	"github.com/gpuaas/millwright/tasks/host/hosttest"
)

// deb is a package that a test builds.
type deb struct {
	name, version, depends, conflicts string
	files                             map[string]string // by path; those below /etc are configuration files
	postinst                          string
}

// build builds the package below dir and returns its file.
func (d deb) build(t testing.TB, dir string) string {
	t.Helper()
	root := filepath.Join(t.TempDir(), d.name)
	control := fmt.Sprintf("Package: %s\nVersion: %s\nArchitecture: all\nMaintainer: test <test@example.org>\nDescription: test\n", d.name, d.version)
	if d.depends != "" {
		control += "Depends: " + d.depends + "\n"
	}
	if d.conflicts != "" {
		control += "Conflicts: " + d.conflicts + "\n"
	}
	all := map[string]string{"/DEBIAN/control": control, "/etc/" + d.name + ".conf": "setting\n", "/DEBIAN/conffiles": "/etc/" + d.name + ".conf\n"}
	for p, text := range d.files {
		all[p] = text
	}
	if d.postinst != "" {
		all["/DEBIAN/postinst"] = "#!/bin/sh\nset -e\n" + d.postinst
	}
	for p, text := range all {
		need(t, os.MkdirAll(filepath.Dir(filepath.Join(root, p)), 0o755))
		need(t, os.WriteFile(filepath.Join(root, p), []byte(text), 0o755))
	}
	file := filepath.Join(dir, d.name+"_"+d.version+"_all.deb")
	if out, err := exec.Command("dpkg-deb", "--build", "--root-owner-group", root, file).CombinedOutput(); err != nil {
		t.Fatalf("build %s: %v\n%s", d.name, err, out)
	}
	return file
}

func need(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// repository makes packages the only source of the node for as long as the test
// runs, and returns its directory.
func repository(t testing.TB, debs ...deb) string {
	t.Helper()
	dir, err := os.MkdirTemp("/opt", "mwrepo")
	need(t, err)
	var index strings.Builder
	for _, d := range debs {
		file := d.build(t, dir)
		data, err := os.ReadFile(file)
		need(t, err)
		fields, err := exec.Command("dpkg-deb", "--field", file).Output()
		need(t, err)
		fmt.Fprintf(&index, "%sFilename: ./%s\nSize: %d\nSHA256: %x\n\n", fields, filepath.Base(file), len(data), sha256.Sum256(data))
	}
	need(t, os.WriteFile(filepath.Join(dir, "Packages"), []byte(index.String()), 0o644))
	const list = "/etc/apt/sources.list.d/mwtest.list"
	need(t, os.WriteFile(list, []byte("deb [trusted=yes] file:"+dir+" ./\n"), 0o644))
	update := func() {
		if out, err := exec.Command("apt-get", "update", "-oDir::Etc::sourcelist="+list, "-oDir::Etc::sourceparts=-").CombinedOutput(); err != nil {
			t.Errorf("apt-get update: %v\n%s", err, out)
		}
	}
	update()
	t.Cleanup(func() {
		for _, p := range []string{list, dir} {
			if err := os.RemoveAll(p); err != nil {
				t.Error(err)
			}
		}
		if _, err := os.Lstat("/usr/sbin/policy-rc.d"); err == nil {
			t.Error("/usr/sbin/policy-rc.d was left on the node")
		}
		if out, err := exec.Command("dpkg", "--audit").CombinedOutput(); err != nil || len(out) > 0 {
			t.Errorf("dpkg --audit: %v\n%s", err, out)
		}
	})
	return dir
}

// suitePackages is what the suite of package hosttest wants.
func suitePackages(t testing.TB) hosttest.Packages {
	t.Helper()
	repository(t, deb{name: "mwtest-base", version: "1.0"}, deb{name: "mwtest-tool", version: "1.0", depends: "mwtest-base"},
		deb{name: "mwtest-tool", version: "1.1", depends: "mwtest-base"}, deb{name: "mwtest-rival", version: "1.0", conflicts: "mwtest-base"})
	dir, err := os.MkdirTemp("/opt", "mwlocal")
	need(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) }) // the node goes after the tests
	return hosttest.Packages{Local: deb{name: "mwtest-local", version: "2.0", depends: "mwtest-base"}.build(t, dir)}
}

func one(name string) host.PackageSet {
	return host.PackageSet{Packages: []host.Package{{Name: name, Version: "1.0"}}}
}

func purge(t *testing.T, h host.Host, names ...string) {
	t.Helper()
	t.Cleanup(func() {
		if err := h.RemovePackages(context.Background(), names, true); err != nil {
			t.Errorf("clean up: %v", err)
		}
	})
}

// startService is what the scripts of Debian's packages do for a service.
const startService = "deb-systemd-helper enable mwtest-svc.service\nsystemctl daemon-reload\ndeb-systemd-invoke start mwtest-svc.service\n"

// A package does not start its service, on a node whose own policy lets it, and
// a service that was started since is stopped when the package goes.
func TestPackageStartsNoService(t *testing.T) {
	needNode(t)
	h := newHost(t)
	service := deb{name: "mwtest-svc", version: "1.0", postinst: startService, files: map[string]string{
		"/lib/systemd/system/mwtest-svc.service": "[Service]\nExecStart=/bin/sleep 1000\n[Install]\nWantedBy=multi-user.target\n",
		"/DEBIAN/prerm":                          "#!/bin/sh\ndeb-systemd-invoke stop mwtest-svc.service\n",
	}}
	dir := repository(t, service)
	purge(t, h, "mwtest-svc")
	must(t, h.InstallPackages(t.Context(), one("mwtest-svc")))
	if u, err := h.Unit(t.Context(), "mwtest-svc.service"); err != nil || u.Load != "loaded" || u.Active != "inactive" {
		t.Errorf("after the installation: %+v, %v", u, err)
	}
	must(t, h.StartUnit(t.Context(), "mwtest-svc.service"))
	must(t, h.RemovePackages(t.Context(), []string{"mwtest-svc"}, true))
	if u, err := h.Unit(t.Context(), "mwtest-svc.service"); err != nil || u.Active == "active" {
		t.Errorf("after the removal: %+v, %v", u, err)
	}
	// The control: installed by hand it does start.
	if out, err := exec.Command("dpkg", "--install", filepath.Join(dir, "mwtest-svc_1.0_all.deb")).CombinedOutput(); err != nil {
		t.Fatalf("dpkg --install: %v\n%s", err, out)
	}
	if u, err := h.Unit(t.Context(), "mwtest-svc.service"); err != nil || u.Active != "active" {
		t.Errorf("installed by hand the service does not start, so the test shows nothing: %+v, %v", u, err)
	}
}

// Another program that holds the package database is waited for, and named when
// that takes too long.
func TestPackagesLocked(t *testing.T) {
	needNode(t)
	repository(t, deb{name: "mwtest-lock", version: "1.0"})
	exe, err := os.Executable()
	must(t, err)
	n := nodehost.New(nodehost.Config{
		StateDir: t.TempDir(), Executable: exe, Clock: clock.System{},
		Logger: slog.New(slog.NewTextHandler(t.Output(), nil)), PackageLockWait: time.Second,
	})
	t.Cleanup(func() { must(t, n.Close(context.Background())) })
	h := n.ForStep(taskID(t), 0)
	purge(t, h, "mwtest-lock")
	lock := holdLock(t, "/var/lib/dpkg/lock-frontend")
	err = h.InstallPackages(t.Context(), one("mwtest-lock"))
	if !errors.Is(err, host.ErrPackagesLocked) || !strings.Contains(err.Error(), fmt.Sprintf("process %d", lock.Process.Pid)) {
		t.Errorf("install while it is locked: %v; the lock is held by process %d", err, lock.Process.Pid)
	}
	_ = lock.Process.Kill() // it has a deadline besides
	_ = lock.Wait()         // it was killed
	must(t, h.InstallPackages(t.Context(), one("mwtest-lock")))
}

// holdLock starts another process that holds the lock, as apt and rpm do: locks of the
// same process are not in one's own way.
func holdLock(t *testing.T, file string) *exec.Cmd {
	t.Helper()
	exe, err := os.Executable()
	must(t, err)
	c := exec.Command(exe, "hold-lock", file)
	out, err := c.StdoutPipe()
	must(t, err)
	must(t, c.Start())
	t.Cleanup(func() { _ = c.Process.Kill() }) // mostly it has ended
	if _, err := out.Read(make([]byte, 1)); err != nil {
		t.Fatalf("the holder of the lock: %v", err)
	}
	return c
}

// lockMain is that process.
func lockMain(file string) int {
	f, err := os.OpenFile(file, os.O_RDWR|os.O_CREATE, 0o640)
	if err != nil {
		return 1
	}
	if err := unix.FcntlFlock(f.Fd(), unix.F_SETLK, &unix.Flock_t{Type: unix.F_WRLCK}); err != nil {
		return 1
	}
	fmt.Println("held")
	<-time.After(time.Minute)
	_ = f.Close() // until here the lock is held
	return 0
}

// What an interrupted dpkg has left is finished first.
func TestInterruptedDpkg(t *testing.T) {
	needNode(t)
	h := newHost(t)
	dir := repository(t, deb{name: "mwtest-half", version: "1.0"}, deb{name: "mwtest-next", version: "1.0"})
	purge(t, h, "mwtest-half", "mwtest-next")
	if out, err := exec.Command("dpkg", "--unpack", filepath.Join(dir, "mwtest-half_1.0_all.deb")).CombinedOutput(); err != nil {
		t.Fatalf("dpkg --unpack: %v\n%s", err, out)
	}
	must(t, os.WriteFile("/var/lib/dpkg/updates/0000", nil, 0o644))
	must(t, h.InstallPackages(t.Context(), one("mwtest-next")))
	list, err := h.Packages(t.Context(), []string{"mwtest-half", "mwtest-next"})
	if err != nil || list[0].State != "installed" || list[1].State != "installed" || list[0].Ours || !list[1].Ours {
		t.Errorf("packages %+v, %v", list, err)
	}
}

// A change outlives the call, and the agent, that started it: another finds it,
// waits for its end and does not start a second one. Killed half way it is
// finished by the next.
func TestPackageChangeIsFound(t *testing.T) {
	needNode(t)
	state := t.TempDir()
	h := newNode(t, state).ForStep(taskID(t), 0)
	flag := filepath.Join(t.TempDir(), "go on")
	runs := filepath.Join(t.TempDir(), "runs")
	repository(t, deb{name: "mwtest-slow", version: "1.0", postinst: "echo run >> '" + runs + "'\nwhile ! test -e '" + flag + "'; do sleep 0.1; done\n"})
	purge(t, h, "mwtest-slow")

	begin := func() {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		ended := make(chan error, 1)
		before := lines(runs)
		go func() { ended <- h.InstallPackages(ctx, one("mwtest-slow")) }()
		eventually(t, "the script to run", func() bool { return lines(runs) > before })
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("a call that was interrupted: %v", err)
		}
	}
	begin()
	systemctl(t, "kill", "--signal=KILL", "--kill-who=all", "millwright-packages.service")
	eventually(t, "the end of the unit", func() bool { return systemctl(t, "is-active", "millwright-packages.service") == "failed" })
	if list, err := h.Packages(t.Context(), []string{"mwtest-slow"}); err != nil || list[0].State != "half-configured" {
		t.Fatalf("a killed dpkg left %+v, %v, so the test shows nothing", list, err)
	}
	// The repair runs the script again, and this call goes too.
	begin()
	second := newNode(t, state).ForStep(taskID(t), 0)
	ended := make(chan error, 1)
	go func() { ended <- second.InstallPackages(t.Context(), one("mwtest-slow")) }()
	must(t, os.WriteFile(flag, nil, 0o600))
	must(t, <-ended)
	if list, err := h.Packages(t.Context(), []string{"mwtest-slow"}); err != nil || list[0].State != "installed" || !list[0].Ours {
		t.Errorf("packages %+v, %v", list, err)
	}
	if n := lines(runs); n != 2 {
		t.Errorf("the script ran %d times, want 2: at first, and when it was finished", n)
	}
}

func lines(file string) int {
	b, _ := os.ReadFile(file) // it is made by the first run
	return strings.Count(string(b), "\n")
}
