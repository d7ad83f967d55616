package packages

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	sd "github.com/coreos/go-systemd/v22/dbus"

	"github.com/gpuaas/millwright/agent/internal/child"
	"github.com/gpuaas/millwright/agent/internal/clock"
	"github.com/gpuaas/millwright/agent/internal/host/files"
	"github.com/gpuaas/millwright/tasks/host"
	"github.com/gpuaas/millwright/tasks/host/hosttest"
)

// units stands in for systemd: it runs the commands of the unit itself.
type units struct {
	status host.UnitStatus
	env    []string // of the last unit
}

func (u *units) Unit(context.Context, string) (host.UnitStatus, error) { return u.status, nil }

func (u *units) ResetFailed(context.Context, string) { u.status = host.UnitStatus{} }

func (u *units) RunTransient(ctx context.Context, name string, properties []sd.Property) error {
	var commands [][]string
	for _, p := range properties {
		switch p.Name {
		case "ExecStart":
			lines := reflect.ValueOf(p.Value.Value())
			for i := range lines.Len() {
				commands = append(commands, lines.Index(i).FieldByName("Args").Interface().([]string))
			}
		case "Environment":
			u.env = p.Value.Value().([]string)
		}
	}
	for _, argv := range commands {
		out, err := exec.CommandContext(ctx, argv[0], argv[1:]...).CombinedOutput()
		if err == nil {
			continue
		}
		u.status = host.UnitStatus{Active: "failed", Result: "signal"}
		if exit := new(exec.ExitError); errors.As(err, &exit) && exit.Exited() {
			u.status.Result = "exit-code"
		}
		return fmt.Errorf("%s: %s: %s: %w", name, u.status.Result, out, host.ErrJob)
	}
	return nil
}

// node is a machine with stand-ins for rpm, dnf and systemd.
type node struct {
	rest
	*files.Files
	*Native
	standIn
	units   *units
	plugins string
}

// rest is what the suite of packages does not ask.
type rest struct{ host.Host }

func newNode(t *testing.T, installed ...fake) node {
	t.Helper()
	n := node{Files: files.New(), standIn: standIn{t.TempDir()}, units: &units{}, plugins: t.TempDir()}
	err := plant(n.dir, fakes{Installed: installed, Offered: []fake{
		{Name: "mwtest-base", Version: "1.0-1", Arch: "noarch"},
		{Name: "mwtest-tool", Version: "1.1-1", Arch: "noarch", Needs: []string{"mwtest-base"}},
		{Name: "mwtest-tool", Version: "1.0-1", Arch: "noarch", Needs: []string{"mwtest-base"}},
		{Name: "mwtest-rival", Version: "1.0-1", Arch: "noarch", Drives: []string{"mwtest-base"}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	n.write(t, filepath.Join(n.plugins, "versionlock.conf"), "[main]\nenabled = 1\nlocklist = "+filepath.Join(n.plugins, "versionlock.list")+"\n")
	n.Native = New(Config{
		Dir: filepath.Join(t.TempDir(), "packages"), Children: child.New(child.Config{}), Units: n.units, Clock: clock.System{},
		Logger: slog.New(slog.NewTextHandler(t.Output(), nil)), Database: filepath.Join(n.dir, "none"), Bin: n.dir, Plugins: n.plugins,
	})
	return n
}

func (n node) write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func (n node) told(t *testing.T, what string) { n.write(t, filepath.Join(n.dir, "do"), what) }

var both = host.PackageSet{Packages: []host.Package{{Name: "mwtest-base", Version: "1.0-1"}, {Name: "mwtest-tool", Version: "1.0-1"}}}

// states are those of the two packages of both.
func (n node) states(t *testing.T) string {
	t.Helper()
	list, err := n.Packages(t.Context(), []string{"mwtest-base", "mwtest-tool"})
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, p := range list {
		out = append(out, strings.TrimSpace(fmt.Sprintf("%s %s", p.State, p.Version)))
	}
	return strings.Join(out, ", ")
}

// TestSuiteOfDNF puts the packages of a node with stand-ins for rpm and dnf to
// the suite. The real ones are put to it in a node.
func TestSuiteOfDNF(t *testing.T) {
	n, dir := newNode(t), t.TempDir()
	local := filepath.Join(dir, "local.rpm")
	n.write(t, local, "RPM mwtest-local 2.0-1 mwtest-base")
	hosttest.RunPackages(t, hosttest.Env{
		ForStep: func(string, uint32) host.Host { return n }, Dir: dir,
		Packages: hosttest.Packages{Local: local, Release: "-1", Erased: true},
	})
	if m, err := n.PackageManager(t.Context()); err != nil || m != (host.PackageManager{Name: host.DNF}) {
		t.Errorf("PackageManager = %+v, %v", m, err)
	}
}

// TestTransactionKilled checks that what a killed transaction has left is not
// taken to be installed, and is rolled back before the next.
func TestTransactionKilled(t *testing.T) {
	n := newNode(t)
	n.told(t, "die")
	if err := n.InstallPackages(t.Context(), both); !errors.Is(err, host.ErrJob) {
		t.Fatalf("a killed transaction: %v", err)
	}
	if got := n.states(t); got != "half-configured 1.0-1, " {
		t.Errorf("a killed transaction left %q", got)
	}
	n.units.status = host.UnitStatus{} // the node was booted
	n.told(t, "")
	if err := n.InstallPackages(t.Context(), both); err != nil {
		t.Fatal(err)
	}
	if got := n.states(t); got != "installed 1.0-1, installed 1.0-1" {
		t.Errorf("afterwards %q", got)
	}
	n.told(t, "die")
	if err := n.RemovePackages(t.Context(), []string{"mwtest-base", "mwtest-tool"}, true); !errors.Is(err, host.ErrJob) {
		t.Fatalf("a killed removal: %v", err)
	}
	if got := n.states(t); got != ", half-configured 1.0-1" {
		t.Errorf("a killed removal left %q", got)
	}
	n.told(t, "")
	if err := n.InstallPackages(t.Context(), both); err != nil { // it is undone
		t.Fatal(err)
	}
	if got := n.states(t); got != "installed 1.0-1, installed 1.0-1" {
		t.Errorf("a removal that was killed and undone left %q", got)
	}
}

// TestTransactionFails checks that one which dnf ends by itself in the middle
// leaves what rpm's database says, and that the rest follows.
func TestTransactionFails(t *testing.T) {
	n := newNode(t)
	for _, tc := range []struct {
		do, left string
		want     error
	}{{"fail", "installed 1.0-1, ", host.ErrJob}, {"locked", "installed 1.0-1, ", host.ErrPackagesLocked}, {"lie", "installed 1.0-1, ", nil}} {
		n.told(t, tc.do)
		if err := n.InstallPackages(t.Context(), both); !errors.Is(err, tc.want) {
			t.Errorf("dnf that does %s: %v", tc.do, err)
		}
		if got := n.states(t); got != tc.left {
			t.Errorf("dnf that does %s left %q", tc.do, got)
		}
	}
	n.told(t, "")
	if err := n.InstallPackages(t.Context(), both); err != nil {
		t.Fatal(err)
	}
	if got := n.states(t); got != "installed 1.0-1, installed 1.0-1" {
		t.Errorf("packages are %q", got)
	}
	if !slices.Contains(n.units.env, offline) {
		t.Errorf("scripts may start services: %q", n.units.env)
	}
	n.told(t, "fail")
	if err := n.RemovePackages(t.Context(), []string{"mwtest-tool", "mwtest-base"}, false); !errors.Is(err, host.ErrJob) {
		t.Errorf("a removal that fails: %v", err)
	}
	if got := n.states(t); got != "installed 1.0-1, " || slices.Contains(n.units.env, offline) {
		t.Errorf("a removal that failed left %q, with %q", got, n.units.env)
	}
}

// TestNotOurs checks that a package which was there is neither ours nor changed,
// and that two versions of one are refused by both their names.
func TestNotOurs(t *testing.T) {
	n := newNode(t, fake{Name: "mwtest-base", Version: "1.0-1", Arch: "noarch"},
		fake{Name: "mwtest-tool", Version: "1.0-1", Arch: "noarch"}, fake{Name: "mwtest-tool", Version: "1.1-1", Arch: "noarch"})
	list, err := n.Packages(t.Context(), []string{"mwtest-base", "mwtest-tool"})
	if err != nil || list[0].Ours || list[0].State != "installed" || list[1].State != host.InstalledTwice || list[1].Version != "1.0-1 and 1.1-1" {
		t.Errorf("Packages = %+v, %v", list, err)
	}
	if err := n.InstallPackages(t.Context(), both); !errors.Is(err, host.ErrOtherPackages) || !strings.Contains(err.Error(), "1.0-1 and 1.1-1") {
		t.Errorf("install beside two versions: %v", err)
	}
}

// TestHolds checks the plugin's file: the site's lines stay, and without the
// plugin it is said what is missing.
func TestHolds(t *testing.T) {
	n := newNode(t, fake{Name: "mwtest-base", Version: "1.0-1", Arch: "noarch"})
	file := filepath.Join(n.plugins, "versionlock.list")
	const site = "# the site's\nkernel-0:5.14.0-427.el9.*\n!mwtest-base-0:0.9-1.*\n"
	n.write(t, file, site)
	for _, held := range []bool{true, true, false, false} {
		if err := n.HoldPackages(t.Context(), []string{"mwtest-base"}, held); err != nil {
			t.Fatal(err)
		}
		want := site
		if held {
			want += lockMark + "\nmwtest-base-0:1.0-1.*\n"
		}
		if b, err := os.ReadFile(file); err != nil || string(b) != want {
			t.Errorf("held %v: %q, %v", held, b, err)
		}
	}
	for _, conf := range []string{"[main]\nenabled = 0\nlocklist = " + file + "\n", "[main]\nenabled = 1\n"} {
		n.write(t, filepath.Join(n.plugins, "versionlock.conf"), conf)
		if m, err := n.PackageManager(t.Context()); err != nil || m.HoldNeeds != versionlock {
			t.Errorf("PackageManager = %+v, %v with %q", m, err, conf)
		}
		if err := n.HoldPackages(t.Context(), []string{"mwtest-base"}, true); err == nil || !strings.Contains(err.Error(), versionlock+" is missing") {
			t.Errorf("hold without the plugin: %v", err)
		}
	}
}

func TestLockedBy(t *testing.T) {
	for line, want := range map[string]string{
		"munge-0:0.5.13-13.el9.*": "munge", "slurm-slurmd-0:22.05.8-1.el9.*": "slurm-slurmd", "munge": "munge", "munge.x86_64": "munge",
		"munge-0.5.13": "munge", "munge-*": "munge", "!munge-0:1-1.*": "", "# munge": "", "": "", "kernel-devel": "kernel-devel",
		"java-11-openjdk-1:11.0.2-1.el9.*": "java-11-openjdk",
	} {
		if got := lockedBy(line); got != want {
			t.Errorf("lockedBy(%q) = %q, want %q", line, got, want)
		}
	}
}

func TestCheckRPM(t *testing.T) {
	for name, version := range map[string]string{"-y": "", "/etc/passwd": "", "munge*": "", "": "", "munge": "1", "slurm": "1-1;x", "slurmd": "1-1-1"} {
		if err := checkRPM(name, version); !errors.Is(err, fs.ErrInvalid) {
			t.Errorf("checkRPM(%q, %q) = %v", name, version, err)
		}
	}
	for name, version := range map[string]string{"munge": "0.5.13-13.el9", "NetworkManager": "1:1.44.0-3.el9_3", "python3.11": "", "gcc-c++": "11~rc1-2^x"} {
		if err := checkRPM(name, version); err != nil {
			t.Errorf("checkRPM(%q, %q) = %v", name, version, err)
		}
	}
}

func TestRefused(t *testing.T) {
	for _, tc := range []struct {
		a    answer
		want error
	}{
		{answer{Missing: "no repository has munge"}, host.ErrNoPackage},
		{answer{Repository: "Cache-only enabled but no cache for 'baseos'"}, host.ErrNoPackage},
		{answer{Problem: "Problem: nothing provides munge-libs needed by munge"}, host.ErrNoPackage},
		{answer{Problem: "Problem: problem with installed package rival-1-1.noarch"}, host.ErrOtherPackages},
		{answer{Problem: "package a conflicts with b provided by b"}, host.ErrOtherPackages},
		{answer{}, nil},
	} {
		if err := tc.a.refused(); !errors.Is(err, tc.want) {
			t.Errorf("%+v: %v", tc.a, err)
		}
	}
	if err := (answer{Error: "disk full"}).refused(); err == nil || errors.Is(err, host.ErrNoPackage) || errors.Is(err, host.ErrOtherPackages) {
		t.Errorf("another failure: %v", err)
	}
}

func TestInterpreter(t *testing.T) {
	file := filepath.Join(t.TempDir(), "dnf")
	for text, want := range map[string]string{
		"#!/usr/libexec/platform-python\nimport sys\n": "/usr/libexec/platform-python", "#!/usr/bin/python3 -s\n": "/usr/bin/python3 -s", "\x7fELF": "", "#!\n": "",
	} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if got, err := interpreter(file); strings.Join(got, " ") != want || (err != nil) != (want == "") {
			t.Errorf("interpreter of %q = %q, %v", text, got, err)
		}
	}
}

func FuzzParseQuery(f *testing.F) {
	f.Add("munge\t0.5.13-13.el9\tx86_64\nmunge\t0.5.13-13.el9\ti686\npackage slurm is not installed\n")
	f.Fuzz(func(t *testing.T, text string) {
		found, err := parseQuery(text, []string{"munge"})
		for name, p := range found {
			if err == nil && (p.Name != name || p.State == "") {
				t.Errorf("%q: %+v", name, p)
			}
		}
	})
}

func FuzzParseAnswer(f *testing.F) {
	f.Add([]byte("x\n{\"versions\": [\"1-1\"]}\n"))
	f.Fuzz(func(t *testing.T, out []byte) {
		if a, err := parseAnswer(out); err == nil {
			_ = a.refused()
		}
	})
}

func FuzzLockedBy(f *testing.F) {
	f.Add("munge-0:0.5.13-13.el9.*")
	f.Fuzz(func(t *testing.T, line string) {
		if name := lockedBy(line); strings.ContainsAny(name, " \t\n") {
			t.Errorf("%q holds %q", line, name)
		}
	})
}
