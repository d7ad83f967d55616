package hosttest

import (
	"context"
	"errors"
	"io/fs"
	"slices"
	"strings"
	"testing"

	"github.com/gpuaas/millwright/tasks/host"
)

// Packages is what the sources of the node under test offer, besides the node's
// own: mwtest-base 1.0; mwtest-tool 1.0 and 1.1, which need mwtest-base; and
// mwtest-rival 1.0, which cannot be beside mwtest-base. Local is a file with
// mwtest-local 2.0, which needs mwtest-base too. Each has a configuration file.
// None is installed.
type Packages struct {
	Local string
	// Release ends each of these versions, as -1 does for rpm.
	Release string
	// Erased says that nothing stays of a package that is removed, as with rpm.
	Erased bool
}

// RunPackages puts the packages of a node to their part of the suite.
func RunPackages(t *testing.T, env Env) {
	e := suite{Env: env, tag: tag(env.Dir)}
	t.Run("package sources", e.packageSources)
	t.Run("packages", e.packages)
	t.Run("package file", e.packageFile)
}

const (
	base, tool, rival, local = "mwtest-base", "mwtest-tool", "mwtest-rival", "mwtest-local"
)

// pin is a package in a version, which the release ends.
func (e suite) pin(name, version string) host.Package {
	return host.Package{Name: name, Version: e.version(version)}
}

func (e suite) version(v string) string {
	if v == "" {
		return ""
	}
	return v + e.Packages.Release
}

func set(packages ...host.Package) host.PackageSet { return host.PackageSet{Packages: packages} }

// states renders what the node has of packages.
func (e suite) states(t *testing.T, h host.Reader, names ...string) string {
	t.Helper()
	list, err := h.Packages(t.Context(), names)
	must(t, err)
	var out []string
	for _, p := range list {
		s := p.Name + " " + p.State
		if p.State == "installed" {
			s += " " + strings.TrimSuffix(p.Version, e.Packages.Release)
		}
		if p.Held {
			s += " held"
		}
		if p.Ours {
			s += " ours"
		}
		out = append(out, strings.TrimSpace(s))
	}
	return strings.Join(out, ", ")
}

func (e suite) wantStates(t *testing.T, h host.Reader, want string) {
	t.Helper()
	var names []string
	for s := range strings.SplitSeq(want, ", ") {
		names = append(names, strings.Fields(s)[0])
	}
	if got := e.states(t, h, names...); got != want {
		t.Errorf("packages are %s; want %s", got, want)
	}
}

// cleanPackages removes what a part of the suite leaves.
func cleanPackages(t *testing.T, h host.Host) {
	undo(t, func(ctx context.Context) error { return h.RemovePackages(ctx, []string{tool, local, base}, true) })
}

func (e suite) packageSources(t *testing.T) {
	h, ctx := e.host(t), t.Context()
	e.wantStates(t, h, "mwtest-base, mwtest-none")
	if got, err := h.PackageVersions(ctx, tool); err != nil || !slices.Equal(got, []string{e.version("1.1"), e.version("1.0")}) {
		t.Errorf("versions = %q, %v", got, err)
	}
	if got, err := h.PackageVersions(ctx, "mwtest-none"); err != nil || len(got) > 0 {
		t.Errorf("versions of no package = %q, %v", got, err)
	}
	c, err := h.ResolvePackages(ctx, set(e.pin(tool, "1.0")))
	if err != nil || len(c.Install) != 2 || c.Install[0].Name != base || c.Install[0].Version != e.version("1.0") ||
		c.Install[1].Name != tool || c.Install[1].Version != e.version("1.0") || c.Install[1].Architecture == "" || c.Others() != nil {
		t.Errorf("ResolvePackages = %+v, %v", c, err)
	}
	for _, p := range []host.Package{e.pin("mwtest-none", ""), e.pin(tool, "9")} {
		if _, err := h.ResolvePackages(ctx, set(p)); !errors.Is(err, host.ErrNoPackage) {
			t.Errorf("ResolvePackages(%+v): %v", p, err)
		}
	}
}

func (e suite) packages(t *testing.T) {
	h, ctx := e.host(t), t.Context()
	cleanPackages(t, h)
	// What was not planned is not installed.
	if err := h.InstallPackages(ctx, set(e.pin(tool, "1.0"))); !errors.Is(err, host.ErrOtherPackages) || !strings.Contains(err.Error(), base) {
		t.Errorf("install without a dependency: %v", err)
	}
	if err := h.HoldPackages(ctx, []string{tool}, true); !errors.Is(err, host.ErrNoPackage) {
		t.Errorf("hold of no package: %v", err)
	}
	e.wantStates(t, h, "mwtest-base, mwtest-tool")
	for range 2 {
		must(t, h.InstallPackages(ctx, set(e.pin(base, "1.0"), e.pin(tool, "1.0"))))
	}
	e.wantStates(t, h, "mwtest-base installed 1.0 ours, mwtest-tool installed 1.0 ours")
	c, err := h.ResolvePackages(ctx, set(e.pin(tool, "1.1")))
	if err != nil || len(c.Replace) != 1 || c.Replace[0].Version != e.version("1.0") || !errors.Is(c.Others(), host.ErrOtherPackages) {
		t.Errorf("ResolvePackages of another version = %+v, %v", c, err)
	}
	for _, p := range []host.Package{e.pin(tool, "1.1"), e.pin(rival, "1.0")} {
		if err := h.InstallPackages(ctx, set(p)); !errors.Is(err, host.ErrOtherPackages) {
			t.Errorf("install of %s %s: %v", p.Name, p.Version, err)
		}
	}
	if err := h.RemovePackages(ctx, []string{base}, true); !errors.Is(err, host.ErrOtherPackages) || !strings.Contains(err.Error(), tool) {
		t.Errorf("remove what another needs: %v", err)
	}
	for range 2 {
		must(t, h.HoldPackages(ctx, []string{tool}, true))
	}
	e.wantStates(t, h, "mwtest-base installed 1.0 ours, mwtest-tool installed 1.0 held ours, mwtest-rival")
	for range 2 {
		must(t, h.HoldPackages(ctx, []string{tool}, false))
	}
	for range 2 {
		must(t, h.RemovePackages(ctx, []string{tool}, false))
	}
	after := "mwtest-base installed 1.0 ours, mwtest-tool config-files"
	if e.Packages.Erased {
		after = "mwtest-base installed 1.0 ours, mwtest-tool"
	}
	e.wantStates(t, h, after)
	for range 2 {
		must(t, h.RemovePackages(ctx, []string{base, tool}, true))
	}
	e.wantStates(t, h, "mwtest-base, mwtest-tool")
}

func (e suite) packageFile(t *testing.T) {
	h, ctx, path := e.host(t), t.Context(), e.Packages.Local
	cleanPackages(t, h)
	p, f, err := h.ReadPackage(ctx, path)
	if err != nil || p.Name != local || p.Version != e.version("2.0") || p.Architecture == "" || f.Path != path || len(f.SHA256) != 32 {
		t.Fatalf("ReadPackage = %+v, %+v, %v", p, f, err)
	}
	if _, _, err := h.ReadPackage(ctx, e.path("none.deb")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("ReadPackage of no file: %v", err)
	}
	must(t, h.WriteFile(ctx, e.path("rubbish.deb"), host.File{Data: []byte("rubbish"), Mode: 0o644}))
	undo(t, func(ctx context.Context) error { return h.RemoveFile(ctx, e.path("rubbish.deb")) })
	if _, _, err := h.ReadPackage(ctx, e.path("rubbish.deb")); !errors.Is(err, fs.ErrInvalid) {
		t.Errorf("ReadPackage of rubbish: %v", err)
	}
	all := set(e.pin(base, "1.0"), e.pin(local, "2.0"))
	all.Files = []host.PackageFile{{Path: path, SHA256: make([]byte, 32)}}
	if err := h.InstallPackages(ctx, all); !errors.Is(err, fs.ErrInvalid) {
		t.Errorf("install of a file with another digest: %v", err)
	}
	e.wantStates(t, h, "mwtest-base, mwtest-local")
	all.Files[0].SHA256 = f.SHA256
	if c, err := h.ResolvePackages(ctx, all); err != nil || len(c.Install) != 2 {
		t.Errorf("ResolvePackages of a file = %+v, %v", c, err)
	}
	must(t, h.InstallPackages(ctx, all))
	e.wantStates(t, h, "mwtest-base installed 1.0 ours, mwtest-local installed 2.0 ours")
}
