package packages

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/gpuaas/millwright/agent/internal/child"
	"github.com/gpuaas/millwright/tasks/host"
)

func TestParseStatus(t *testing.T) {
	got, err := parseStatus("munge\t0.5.15-2\tamd64\thold\tinstalled\nlibc6\t2.36\ti386\tdeinstall\tconfig-files\n" +
		"libc6\t2.36\tamd64\tinstall\tinstalled\nlibc6\t1\ti386\tinstall\tunpacked\nslurmd\t\t\tunknown\tnot-installed\n")
	want := map[string]host.PackageStatus{
		"munge": {Package: host.Package{Name: "munge", Version: "0.5.15-2", Architecture: "amd64"}, State: "installed", Held: true},
		"libc6": {Package: host.Package{Name: "libc6", Version: "2.36", Architecture: "amd64"}, State: "installed"},
	}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("parseStatus = %+v, %v", got, err)
	}
	if _, err := parseStatus("rubbish\n"); err == nil {
		t.Error("rubbish was taken")
	}
}

func TestParseMadison(t *testing.T) {
	got := parseMadison(" munge | 0.5.15-2 | http://deb.example.org/debian bookworm/main amd64 Packages\n"+
		" munge | 0.5.14-6 | http://deb.example.org/debian bullseye/main amd64 Packages\n"+
		" munge | 0.5.14-6 | file:/srv ./ Packages\n     munge | 0.5.16-1 | http://deb.example.org/debian trixie/main Sources\n other | 9 | file:/srv ./ Packages\n", "munge")
	if !slices.Equal(got, []string{"0.5.15-2", "0.5.14-6"}) {
		t.Errorf("parseMadison = %q", got)
	}
}

func TestParseSimulation(t *testing.T) {
	c, err := parseSimulation("Reading package lists...\nThe following NEW packages will be installed:\n  munge\n" +
		"Remv rival [1] [site:amd64 ]\nPurg old [2]\n" +
		"Inst libmunge2 (0.5.15-2 Debian:12.6/stable [amd64])\nInst munge [0.5.14-6] (0.5.15-2 Debian:12.6/stable, file:/srv [amd64]) []\n" +
		"Conf munge (0.5.15-2 Debian:12.6/stable [amd64])\n")
	want := host.PackageChange{
		Install: []host.Package{{Name: "libmunge2", Version: "0.5.15-2", Architecture: "amd64"}},
		Replace: []host.Package{{Name: "munge", Version: "0.5.14-6", Architecture: "amd64"}},
		Remove:  []host.Package{{Name: "rival", Version: "1"}, {Name: "old", Version: "2"}},
	}
	if err != nil || !reflect.DeepEqual(c, want) {
		t.Errorf("parseSimulation = %+v, %v", c, err)
	}
	if err := c.Others(); !errors.Is(err, host.ErrOtherPackages) ||
		err.Error() != "other packages would change: munge 0.5.14-6 would get another version, rival 1 would be removed, old 2 would be removed" {
		t.Errorf("Others = %v", err)
	}
	for _, line := range []string{"Inst munge", "Inst munge (0.5.15-2", "Inst munge [1]"} {
		if _, err := parseSimulation(line + "\n"); !errors.Is(err, errSimulation) {
			t.Errorf("%q: %v", line, err)
		}
	}
}

func TestAptError(t *testing.T) {
	for text, want := range map[string]error{
		"E: Unable to locate package munge":                                                  host.ErrNoPackage,
		"E: Version '9' for 'munge' was not found":                                           host.ErrNoPackage,
		"E: Package 'munge' has no installation candidate":                                   host.ErrNoPackage,
		"E: Held packages were changed and -y was used without --allow-change-held-packages": host.ErrOtherPackages,
	} {
		if err := aptError(child.Result{ExitCode: 100, Stderr: []byte(text)}); !errors.Is(err, want) || !strings.Contains(err.Error(), text) {
			t.Errorf("%q: %v", text, err)
		}
	}
	unmet := "The following packages have unmet dependencies:\n slurmd : Depends: libmunge2 but it is not installable\n"
	err := aptError(child.Result{ExitCode: 100, Stdout: []byte("Reading...\n" + unmet), Stderr: []byte("E: Unable to correct problems")})
	if !errors.Is(err, host.ErrNoPackage) || !strings.Contains(err.Error(), "slurmd : Depends: libmunge2 but it is not installable") {
		t.Errorf("unmet: %v", err)
	}
	if err := aptError(child.Result{ExitCode: 100, Stderr: []byte("E: disk full")}); errors.Is(err, host.ErrNoPackage) || errors.Is(err, host.ErrOtherPackages) {
		t.Errorf("another failure: %v", err)
	}
}

// TestCheck refuses words that apt would take for options, files, patterns or
// removals.
func TestCheck(t *testing.T) {
	for name, version := range map[string]string{
		"-oX=y": "", "/etc/passwd": "", "munge-": "", "a": "", "Munge": "", "munge*": "", "": "", "munge": "1 -y", "slurmd": "1;x", "libmunge2": "-1",
	} {
		if err := check(name, version); !errors.Is(err, fs.ErrInvalid) {
			t.Errorf("check(%q, %q) = %v", name, version, err)
		}
	}
	for name, version := range map[string]string{"g++-12": "12.2.0-14", "libmunge2": "", "slurmd": "22.05.8-4+deb12u3", "munge": "1:0.5~rc1"} {
		if err := check(name, version); err != nil {
			t.Errorf("check(%q, %q) = %v", name, version, err)
		}
	}
}

// TestNoManager checks what a node says that has neither dpkg nor rpm, or of rpm
// and dnf only one.
func TestNoManager(t *testing.T) {
	bin := t.TempDir()
	a := New(Config{Children: child.New(child.Config{}), Database: filepath.Join(t.TempDir(), "none"), Bin: bin})
	if err := os.WriteFile(filepath.Join(bin, "rpm"), nil, 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := a.PackageManager(t.Context()); !errors.Is(err, host.ErrNoPackageManager) {
		t.Errorf("PackageManager: %v", err)
	}
	if _, err := a.Packages(t.Context(), []string{"munge"}); !errors.Is(err, host.ErrNoPackageManager) {
		t.Errorf("Packages: %v", err)
	}
	if _, err := a.PackageVersions(t.Context(), "munge"); !errors.Is(err, host.ErrNoPackageManager) {
		t.Errorf("PackageVersions: %v", err)
	}
}

// TestBadRecord checks that a record which cannot be read is an error, and never
// taken for an empty one.
func TestBadRecord(t *testing.T) {
	a := &machine{cfg: Config{Dir: t.TempDir()}}
	if got, err := a.brought(); err != nil || len(got) > 0 {
		t.Errorf("no record: %v, %v", got, err)
	}
	if err := os.WriteFile(a.record(), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := a.brought(); err == nil || !strings.Contains(err.Error(), a.record()) {
		t.Errorf("a bad record: %v", err)
	}
}
