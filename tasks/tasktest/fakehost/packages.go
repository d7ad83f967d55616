package fakehost

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strings"

	"github.com/gpuaas/millwright/tasks/host"
)

// packages are those of a node: its database, and what its sources offer.
type packages struct {
	missing   bool // the node has neither dpkg nor rpm
	dnf       bool // it has rpm and dnf
	noHold    bool // dnf's plugin that holds versions is missing
	locked    bool // another program holds the database
	installed map[string]pkg
	offered   map[string][]pkg      // by name, newest first
	brings    map[string][][]string // by name: what is done when it is installed
	owned     map[string][]string   // by name: the entries that came with it
}

// pkg is a package with what it needs: names, and with ! before a name what it
// drives out.
type pkg struct {
	host.Package
	needs []string
	state string
	held  bool
	ours  bool
}

// packageMark begins the content of a file that is a package: its name, version
// and needs follow.
const packageMark = "DEB "

func newPackages() packages {
	return packages{
		installed: map[string]pkg{}, offered: map[string][]pkg{}, brings: map[string][][]string{}, owned: map[string][]string{},
	}
}

func (n *Node) packageManager() (host.PackageManager, error) {
	switch {
	case n.packages.missing:
		return host.PackageManager{}, fmt.Errorf("look for the node's packages: %w", host.ErrNoPackageManager)
	case n.packages.noHold:
		return host.PackageManager{Name: host.DNF, HoldNeeds: "python3-dnf-plugin-versionlock"}, nil
	case n.packages.dnf:
		return host.PackageManager{Name: host.DNF}, nil
	}
	return host.PackageManager{Name: host.Apt}, nil
}

func (n *Node) packageStatus(names []string) ([]host.PackageStatus, error) {
	if n.packages.missing {
		return nil, fmt.Errorf("read packages: %w", host.ErrNoPackageManager)
	}
	var out []host.PackageStatus
	for _, name := range names {
		p := n.packages.installed[name]
		p.Name = name
		out = append(out, host.PackageStatus{Package: p.Package, State: p.state, Held: p.held, Ours: p.ours})
	}
	return out, nil
}

func (n *Node) packageVersions(name string) []string {
	var out []string
	for _, p := range n.packages.offered[name] {
		out = append(out, p.Version)
	}
	return out
}

func (n *Node) readPackage(path string) (pkg, host.PackageFile, error) {
	f, err := n.readFile(path)
	if err != nil {
		return pkg{}, host.PackageFile{}, err
	}
	words, ok := strings.CutPrefix(string(f.Data), packageMark)
	fields := strings.Fields(words)
	if !ok || len(fields) < 2 {
		return pkg{}, host.PackageFile{}, fmt.Errorf("package file %s: no package: %w", path, fs.ErrInvalid)
	}
	sum := sha256.Sum256(f.Data)
	return n.newPkg(fields), host.PackageFile{Path: path, SHA256: sum[:]}, nil
}

func (n *Node) newPkg(fields []string) pkg {
	arch := "amd64"
	if n.packages.dnf {
		arch = "x86_64"
	}
	return pkg{Package: host.Package{Name: fields[0], Version: fields[1], Architecture: arch}, needs: fields[2:], state: "installed"}
}

// resolve returns all that an installation of set brings, and what it changes.
func (n *Node) resolvePackages(set host.PackageSet) (map[string]pkg, host.PackageChange, error) {
	files := map[string]pkg{}
	for _, f := range set.Files {
		p, have, err := n.readPackage(f.Path)
		if err != nil {
			return nil, host.PackageChange{}, err
		}
		if !bytes.Equal(have.SHA256, f.SHA256) {
			return nil, host.PackageChange{}, fmt.Errorf("package file %s has another digest: %w", f.Path, fs.ErrInvalid)
		}
		files[p.Name] = p
	}
	for _, w := range set.Packages {
		if old := n.packages.installed[w.Name]; old.state == host.InstalledTwice {
			return nil, host.PackageChange{}, fmt.Errorf("package %s is installed in the versions %s: %w", w.Name, old.Version, host.ErrOtherPackages)
		}
	}
	brought, change := map[string]pkg{}, host.PackageChange{}
	var queue []host.Package
	queue = append(queue, set.Packages...)
	for len(queue) > 0 {
		want := queue[0]
		queue = queue[1:]
		old := n.packages.installed[want.Name]
		if _, ok := brought[want.Name]; ok || old.state == "installed" && (want.Version == "" || want.Version == old.Version) {
			continue
		}
		p, ok := n.candidate(files, want)
		if !ok {
			return nil, change, fmt.Errorf("package %s %s: %w", want.Name, want.Version, host.ErrNoPackage)
		}
		brought[p.Name] = p
		if old.state == "installed" {
			change.Replace = append(change.Replace, old.Package)
		} else {
			change.Install = append(change.Install, p.Package)
		}
		for _, need := range p.needs {
			if other, not := strings.CutPrefix(need, "!"); !not {
				queue = append(queue, host.Package{Name: need})
			} else if o, ok := n.packages.installed[other]; ok {
				change.Remove = append(change.Remove, o.Package)
			}
		}
	}
	slices.SortFunc(change.Install, func(a, b host.Package) int { return cmp.Compare(a.Name, b.Name) })
	return brought, change, nil
}

func (n *Node) candidate(files map[string]pkg, want host.Package) (pkg, bool) {
	list := n.packages.offered[want.Name]
	if f, ok := files[want.Name]; ok {
		list = []pkg{f}
	}
	for _, p := range list {
		if want.Version == "" || p.Version == want.Version {
			return p, true
		}
	}
	return pkg{}, false
}

func (n *Node) changeable() error {
	if n.packages.missing {
		return fmt.Errorf("change packages: %w", host.ErrNoPackageManager)
	}
	if n.packages.locked {
		program := "apt-get"
		if n.packages.dnf {
			program = "dnf"
		}
		return fmt.Errorf("change packages: %w by process 4711 (%s)", host.ErrPackagesLocked, program)
	}
	return nil
}

func (n *Node) installPackages(set host.PackageSet) error {
	if err := n.changeable(); err != nil {
		return err
	}
	brought, change, err := n.resolvePackages(set)
	if err != nil {
		return err
	}
	if err := change.Others(); err != nil {
		return err
	}
	for _, p := range change.Install {
		if !slices.ContainsFunc(set.Packages, func(w host.Package) bool { return w.Name == p.Name }) {
			return fmt.Errorf("install: %w: %s would be installed", host.ErrOtherPackages, p.Name)
		}
	}
	for name, p := range brought {
		old := n.packages.installed[name]
		p.held, p.ours = old.held, old.ours || old.state != "installed"
		n.packages.installed[name] = p
		if old.state != "installed" {
			if err := n.unpack(name); err != nil {
				return err
			}
		}
	}
	return nil
}

// unpack puts what a package brings onto the node. A user of the system that a
// package made stays when it goes, as with Debian's.
func (n *Node) unpack(name string) error {
	was := maps.Clone(n.entries)
	for _, words := range n.packages.brings[name] {
		if err := n.do(words[0], words[1:]); err != nil {
			return err
		}
	}
	for k := range n.entries {
		if _, ok := was[k]; !ok {
			n.packages.owned[name] = append(n.packages.owned[name], k)
		}
	}
	return nil
}

// unpacked takes it away again.
func (n *Node) unpacked(name string) {
	for _, k := range n.packages.owned[name] {
		delete(n.entries, k)
	}
	delete(n.packages.owned, name)
}

func (n *Node) removePackages(names []string, purge bool) error {
	if err := n.changeable(); err != nil {
		return err
	}
	for name, p := range n.packages.installed {
		if slices.Contains(names, name) || p.state != "installed" {
			continue
		}
		for _, need := range p.needs {
			if slices.Contains(names, need) {
				return fmt.Errorf("remove %s: %w: %s needs it", need, host.ErrOtherPackages, name)
			}
		}
	}
	for _, name := range names {
		p, ok := n.packages.installed[name]
		if !ok {
			continue
		}
		n.unpacked(name)
		if purge || n.packages.dnf { // rpm keeps nothing of a package
			delete(n.packages.installed, name)
			continue
		}
		p.state, p.ours, p.held = "config-files", false, false
		n.packages.installed[name] = p
	}
	return nil
}

func (n *Node) holdPackages(names []string, held bool) error {
	if err := n.changeable(); err != nil {
		return err
	}
	for _, name := range names {
		p, ok := n.packages.installed[name]
		if !ok {
			return fmt.Errorf("hold %s: %w", name, host.ErrNoPackage)
		}
		if n.packages.noHold && p.held != held {
			return fmt.Errorf("hold %s: the plugin is missing that holds versions", name)
		}
		p.held = held
		n.packages.installed[name] = p
	}
	return nil
}

// doPackages carries out the verbs of a script that are about packages.
func (n *Node) doPackages(verb string, a []string) error {
	if least, _ := arity(verb); least > 0 && len(a) < 2 {
		return errors.New("want a name and a version")
	}
	switch verb {
	case "nodpkg":
		n.packages.missing = true
	case "dpkglock":
		n.packages.locked = true
	case "dnf":
		n.packages.dnf = true
	case "noversionlock":
		n.packages.noHold = true
	case "offer":
		n.packages.offered[a[0]] = append([]pkg{n.newPkg(a)}, n.packages.offered[a[0]]...)
	case "package":
		p := n.newPkg(a)
		p.needs = nil
		for _, w := range a[2:] {
			switch w {
			case "held":
				p.held = true
			case "config-files", host.InstalledTwice:
				p.state = w
			default:
				p.needs = append(p.needs, w)
			}
		}
		n.packages.installed[a[0]] = p
	case "brings":
		n.packages.brings[a[0]] = append(n.packages.brings[a[0]], a[1:])
	case "deb":
		if len(a) < 3 {
			return errors.New("want a path, a name and a version")
		}
		return n.doFile("file", []string{a[0], "0644", packageMark + strings.Join(a[1:], " ")})
	}
	return nil
}

// dumpPackages describes the package database.
func (n *Node) dumpPackages() []string {
	var lines []string
	for _, name := range slices.Sorted(maps.Keys(n.packages.installed)) {
		p := n.packages.installed[name]
		line := "package " + name + " " + p.Version + " " + p.state
		if p.held {
			line += " held"
		}
		lines = append(lines, line)
	}
	return lines
}

func (v *view) PackageManager(ctx context.Context) (host.PackageManager, error) {
	return call(ctx, v, Op{Name: "PackageManager"}, v.n.packageManager)
}

func (v *view) Packages(ctx context.Context, names []string) ([]host.PackageStatus, error) {
	return call(ctx, v, Op{Name: "Packages", Object: strings.Join(names, " ")}, func() ([]host.PackageStatus, error) { return v.n.packageStatus(names) })
}

func (v *view) PackageVersions(ctx context.Context, name string) ([]string, error) {
	return call(ctx, v, Op{Name: "PackageVersions", Object: name}, func() ([]string, error) { return v.n.packageVersions(name), nil })
}

func (v *view) ReadPackage(ctx context.Context, path string) (host.Package, host.PackageFile, error) {
	type both struct {
		p host.Package
		f host.PackageFile
	}
	b, err := call(ctx, v, Op{Name: "ReadPackage", Object: path}, func() (both, error) {
		p, f, err := v.n.readPackage(path)
		return both{p.Package, f}, err
	})
	return b.p, b.f, err
}

func (v *view) ResolvePackages(ctx context.Context, set host.PackageSet) (host.PackageChange, error) {
	return call(ctx, v, Op{Name: "ResolvePackages"}, func() (host.PackageChange, error) {
		_, change, err := v.n.resolvePackages(set)
		return change, err
	})
}

func (v *view) InstallPackages(ctx context.Context, set host.PackageSet) error {
	return change(ctx, v, "InstallPackages", "", func() error { return v.n.installPackages(set) })
}

func (v *view) RemovePackages(ctx context.Context, names []string, purge bool) error {
	return change(ctx, v, "RemovePackages", strings.Join(names, " "), func() error { return v.n.removePackages(names, purge) })
}

func (v *view) HoldPackages(ctx context.Context, names []string, held bool) error {
	return change(ctx, v, "HoldPackages", strings.Join(names, " "), func() error { return v.n.holdPackages(names, held) })
}
