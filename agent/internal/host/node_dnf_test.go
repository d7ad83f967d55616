//go:build millwright_node

package nodehost_test

import (
	"context"
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

// rpm is a package that a test builds. Its scripts are of rpm's own language: they
// need no package that brings a shell.
type rpm struct {
	name, version, requires, conflicts string
	files                              map[string]string // by path
	post, preun                        string
}

// runProgram runs a program, which must succeed.
func runProgram(t testing.TB, argv ...string) string {
	t.Helper()
	out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", strings.Join(argv, " "), err, out)
	}
	return string(out)
}

// build builds the package below dir and returns its file.
func (r rpm) build(t testing.TB, dir string) string {
	t.Helper()
	top := t.TempDir()
	spec := fmt.Sprintf("Name: %s\nVersion: %s\nRelease: 1\nSummary: test\nLicense: none\nBuildArch: noarch\nAutoReqProv: no\n", r.name, r.version)
	if r.requires != "" {
		spec += "Requires: " + r.requires + "\n"
	}
	if r.conflicts != "" {
		spec += "Conflicts: " + r.conflicts + "\n"
	}
	spec += "%description\ntest\n%install\nmkdir -p %{buildroot}/etc\necho setting > %{buildroot}/etc/" + r.name + ".conf\n"
	list := "%files\n%config(noreplace) /etc/" + r.name + ".conf\n"
	for path, text := range r.files {
		spec += fmt.Sprintf("mkdir -p %%{buildroot}%s\nprintf '%s' > %%{buildroot}%s\n", filepath.Dir(path), text, path)
		list += path + "\n"
	}
	if r.post != "" {
		spec += "%post -p <lua>\n" + r.post + "\n"
	}
	if r.preun != "" {
		spec += "%preun -p <lua>\n" + r.preun + "\n"
	}
	file := filepath.Join(top, "test.spec")
	need(t, os.WriteFile(file, []byte(spec+list), 0o644))
	runProgram(t, "rpmbuild", "-bb", "--quiet", "--define", "_topdir "+top, "--define", "_rpmdir "+dir, "--define", "__os_install_post %{nil}",
		"--define", "_rpmfilename %{NAME}-%{VERSION}.rpm", file)
	return filepath.Join(dir, r.name+"-"+r.version+".rpm")
}

const dpkg = "/var/lib/dpkg"

// dnfNode makes the node one of rpm and dnf for as long as the test runs: what
// dpkg has installed is out of sight, and packages are the only ones that a
// source offers.
func dnfNode(t testing.TB, packages ...rpm) {
	t.Helper()
	need(t, os.MkdirAll("/run/no-dpkg", 0o755))
	need(t, unix.Mount("/run/no-dpkg", dpkg, "", unix.MS_BIND, ""))
	t.Cleanup(func() { need(t, unix.Unmount(dpkg, unix.MNT_DETACH)) })
	dir, err := os.MkdirTemp("/opt", "mwrepo")
	need(t, err)
	const list = "/etc/yum.repos.d/mwtest.repo"
	t.Cleanup(func() {
		for _, p := range []string{list, dir} {
			if err := os.RemoveAll(p); err != nil {
				t.Error(err)
			}
		}
		runProgram(t, "dnf", "clean", "all")
	})
	for _, p := range packages {
		p.build(t, dir)
	}
	// Debian's dnf comes with a plugin that has a repository of its own.
	runProgram(t, "sed", "-i", "s/^enabled.*/enabled = 0/", "/etc/dnf/plugins/local.conf")
	runProgram(t, "rpm", "--initdb")
	runProgram(t, "createrepo_c", "--quiet", dir)
	need(t, os.MkdirAll(filepath.Dir(list), 0o755))
	need(t, os.WriteFile(list, []byte("[mwtest]\nname=test\nbaseurl=file://"+dir+"\ngpgcheck=0\n"), 0o644))
	runProgram(t, "dnf", "makecache")
}

func oneRPM(name string) host.PackageSet {
	return host.PackageSet{Packages: []host.Package{{Name: name, Version: "1.0-1", Architecture: "noarch"}}}
}

// The real rpm and dnf pass the suite that dpkg and apt pass.
func TestDNFSuite(t *testing.T) {
	needNode(t)
	dnfNode(t, rpm{name: "mwtest-base", version: "1.0"}, rpm{name: "mwtest-tool", version: "1.0", requires: "mwtest-base"},
		rpm{name: "mwtest-tool", version: "1.1", requires: "mwtest-base"}, rpm{name: "mwtest-rival", version: "1.0", conflicts: "mwtest-base"})
	local, err := os.MkdirTemp("/opt", "mwlocal")
	must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(local) }) // the node goes after the tests
	n := newNode(t, t.TempDir())
	hosttest.RunPackages(t, hosttest.Env{
		ForStep: n.ForStep, Prober: n.Prober, Dir: t.TempDir(),
		Packages: hosttest.Packages{
			Local: rpm{name: "mwtest-local", version: "2.0", requires: "mwtest-base"}.build(t, local), Release: "-1", Erased: true,
		},
	})
	if m, err := n.Prober().PackageManager(t.Context()); err != nil || m != (host.PackageManager{Name: host.DNF}) {
		t.Errorf("PackageManager = %+v, %v", m, err)
	}
}

// What is held stays when everything else is upgraded, and what was changed of
// its configuration goes when it is purged.
func TestDNFHeld(t *testing.T) {
	needNode(t)
	h := newHost(t)
	dnfNode(t, rpm{name: "mwtest-held", version: "1.0"}, rpm{name: "mwtest-held", version: "1.1"},
		rpm{name: "mwtest-free", version: "1.0"}, rpm{name: "mwtest-free", version: "1.1"})
	purge(t, h, "mwtest-held", "mwtest-free")
	must(t, h.InstallPackages(t.Context(), host.PackageSet{Packages: append(oneRPM("mwtest-held").Packages, oneRPM("mwtest-free").Packages...)}))
	must(t, h.HoldPackages(t.Context(), []string{"mwtest-held"}, true))
	runProgram(t, "dnf", "--assumeyes", "upgrade")
	list, err := h.Packages(t.Context(), []string{"mwtest-held", "mwtest-free"})
	if err != nil || list[0].Version != "1.0-1" || !list[0].Held || !list[0].Ours || list[1].Version != "1.1-1" || list[1].Held || list[1].Ours {
		t.Errorf("upgraded, the packages are %+v, %v", list, err)
	}
	must(t, os.WriteFile("/etc/mwtest-held.conf", []byte("changed\n"), 0o644))
	must(t, h.HoldPackages(t.Context(), []string{"mwtest-held"}, false))
	must(t, h.RemovePackages(t.Context(), []string{"mwtest-held"}, true))
	if exists("/etc/mwtest-held.conf") || exists("/etc/mwtest-held.conf.rpmsave") {
		t.Error("purged, the package has left its configuration")
	}
}

// A package does not start its service; the control shows that its script would.
// A service that was started since is stopped when the package goes.
func TestRPMStartsNoService(t *testing.T) {
	needNode(t)
	h := newHost(t)
	const unit = "mwtest-rsvc.service"
	dnfNode(t, rpm{name: "mwtest-rsvc", version: "1.0", files: map[string]string{
		"/usr/lib/systemd/system/" + unit: "[Service]\\nExecStart=/bin/sleep 1000\\n[Install]\\nWantedBy=multi-user.target\\n",
	}, post: `os.execute("systemctl daemon-reload; systemctl enable --now ` + unit + `")`, preun: `os.execute("systemctl disable --now ` + unit + `")`})
	purge(t, h, "mwtest-rsvc")
	must(t, h.InstallPackages(t.Context(), oneRPM("mwtest-rsvc")))
	if u, err := h.Unit(t.Context(), unit); err != nil || u.Load != "loaded" || u.Active != "inactive" || u.Enabled != "enabled" {
		t.Errorf("after the installation: %+v, %v", u, err)
	}
	must(t, h.StartUnit(t.Context(), unit))
	must(t, h.RemovePackages(t.Context(), []string{"mwtest-rsvc"}, true))
	if u, err := h.Unit(t.Context(), unit); err != nil || u.Active == "active" {
		t.Errorf("after the removal: %+v, %v", u, err)
	}
	runProgram(t, "dnf", "--assumeyes", "install", "mwtest-rsvc")
	if u, err := h.Unit(t.Context(), unit); err != nil || u.Active != "active" {
		t.Errorf("installed by hand the service does not start, so the test shows nothing: %+v, %v", u, err)
	}
}

// Another program that holds rpm's lock, or dnf's, is waited for, and named when
// that takes too long.
func TestRPMLocked(t *testing.T) {
	needNode(t)
	dnfNode(t, rpm{name: "mwtest-lock", version: "1.0"})
	exe, err := os.Executable()
	must(t, err)
	n := nodehost.New(nodehost.Config{
		StateDir: t.TempDir(), Executable: exe, Clock: clock.System{},
		Logger: slog.New(slog.NewTextHandler(t.Output(), nil)), PackageLockWait: time.Second,
	})
	t.Cleanup(func() { must(t, n.Close(context.Background())) })
	h := n.ForStep(taskID(t), 0)
	purge(t, h, "mwtest-lock")
	refused := func(pid int) {
		t.Helper()
		err := h.InstallPackages(t.Context(), oneRPM("mwtest-lock"))
		if !errors.Is(err, host.ErrPackagesLocked) || !strings.Contains(err.Error(), fmt.Sprintf("process %d", pid)) {
			t.Errorf("install while it is locked: %v; the lock is held by process %d", err, pid)
		}
	}
	lock := holdLock(t, filepath.Join(strings.TrimSpace(runProgram(t, "rpm", "--eval", "%{_dbpath}")), ".rpm.lock"))
	refused(lock.Process.Pid)
	_ = lock.Process.Kill() // it has a deadline besides
	_ = lock.Wait()         // it was killed
	const pidFile = "/var/lib/dnf/rpmdb_lock.pid"
	must(t, os.WriteFile(pidFile, []byte(fmt.Sprint(os.Getpid())), 0o644))
	refused(os.Getpid())
	must(t, os.WriteFile(pidFile, []byte(fmt.Sprint(lock.Process.Pid)), 0o644)) // of one that is gone
	must(t, h.InstallPackages(t.Context(), oneRPM("mwtest-lock")))
}

// A transaction outlives the call that started it. Killed half way, its package is
// not taken to be installed, and the next call rolls it back and begins anew.
func TestTransactionIsFound(t *testing.T) {
	needNode(t)
	state := t.TempDir()
	h := newNode(t, state).ForStep(taskID(t), 0)
	flag, runs := filepath.Join(t.TempDir(), "go on"), filepath.Join(t.TempDir(), "runs")
	dnfNode(t, rpm{name: "mwtest-slow", version: "1.0", post: `local f = io.open("` + runs + `", "a"); f:write("run\n"); f:close()
while not posix.access("` + flag + `", "f") do posix.sleep(1) end`})
	purge(t, h, "mwtest-slow")
	begin := func() {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		ended := make(chan error, 1)
		before := lines(runs)
		go func() { ended <- h.InstallPackages(ctx, oneRPM("mwtest-slow")) }()
		eventually(t, "the script to run", func() bool { return lines(runs) > before })
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("a call that was interrupted: %v", err)
		}
	}
	begin()
	systemctl(t, "kill", "--signal=KILL", "--kill-who=all", "millwright-packages.service")
	eventually(t, "the end of the unit", func() bool { return systemctl(t, "is-active", "millwright-packages.service") == "failed" })
	if got := runProgram(t, "rpm", "-q", "mwtest-slow"); !strings.Contains(got, "mwtest-slow-1.0-1") {
		t.Fatalf("rpm has no package that was killed in its script: %s: the test shows nothing", got)
	}
	if list, err := h.Packages(t.Context(), []string{"mwtest-slow"}); err != nil || list[0].State != "half-configured" || list[0].Ours {
		t.Fatalf("a killed dnf left %+v, %v", list, err)
	}
	begin()
	second := newNode(t, state).ForStep(taskID(t), 0)
	ended := make(chan error, 1)
	go func() { ended <- second.InstallPackages(t.Context(), oneRPM("mwtest-slow")) }()
	must(t, os.WriteFile(flag, nil, 0o600))
	must(t, <-ended)
	if list, err := h.Packages(t.Context(), []string{"mwtest-slow"}); err != nil || list[0].State != "installed" || !list[0].Ours {
		t.Errorf("packages %+v, %v", list, err)
	}
	if n := lines(runs); n != 2 {
		t.Errorf("the script ran %d times, want 2: at first, and after it was rolled back", n)
	}
}

// A script that fails in the middle leaves what rpm says, and no more than was
// planned; a file that the site wants signed is refused by the site's own rule.
func TestDNFFails(t *testing.T) {
	needNode(t)
	h := newHost(t)
	dnfNode(t, rpm{name: "mwtest-good", version: "1.0"})
	purge(t, h, "mwtest-good", "mwtest-unsigned")
	file := rpm{name: "mwtest-unsigned", version: "1.0"}.build(t, t.TempDir())
	_, f, err := h.ReadPackage(t.Context(), file)
	must(t, err)
	set := oneRPM("mwtest-unsigned")
	set.Files = []host.PackageFile{f}
	conf, err := os.ReadFile("/etc/dnf/dnf.conf")
	must(t, err)
	t.Cleanup(func() { must(t, os.WriteFile("/etc/dnf/dnf.conf", conf, 0o644)) })
	must(t, os.WriteFile("/etc/dnf/dnf.conf", append(conf, "localpkg_gpgcheck=1\n"...), 0o644))
	if err := h.InstallPackages(t.Context(), set); err == nil || !strings.Contains(err.Error(), "is not signed") {
		t.Errorf("an unsigned file where the site wants a signature: %v", err)
	}
	if list, err := h.Packages(t.Context(), []string{"mwtest-unsigned"}); err != nil || list[0].State != "" {
		t.Errorf("refused, the package is %+v, %v", list, err)
	}
	must(t, os.WriteFile("/etc/dnf/dnf.conf", conf, 0o644))
	must(t, h.InstallPackages(t.Context(), set))
}
