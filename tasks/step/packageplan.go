package step

import (
	"bytes"
	"cmp"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
)

// PackageWant is a package that a kind needs.
type PackageWant struct {
	Name string
	// Version is the only one that will do; unset: the one that is installed, or
	// else the newest that a source offers.
	Version string
	// File is a file of the node that holds it; unset: it comes from the node's
	// sources.
	File string
	// SHA256 is the digest of the file. Set with it.
	SHA256 []byte
	// Hold asks that its version is held.
	Hold bool
}

// PlanPackages plans what wants ask for: the steps, none when all is there, and
// what differs. All that would be installed with them is frozen in the step. An
// error that wraps [tasks.ErrPrecondition] says what is missing, or which
// package stands in the way: no package that is installed gets another version,
// and none is removed.
func PlanPackages(ctx context.Context, h host.Reader, wants []PackageWant) (tasks.Plan, error) {
	names := make([]string, len(wants))
	for i, w := range wants {
		names[i] = w.Name
	}
	manager, err := h.PackageManager(ctx)
	if errors.Is(err, host.ErrNoPackageManager) {
		return tasks.Plan{}, fmt.Errorf("install %s: %w: %w", strings.Join(names, ", "), err, tasks.ErrPrecondition)
	}
	if err != nil {
		return tasks.Plan{}, err
	}
	p := packagePlanner{h: h, manager: manager, step: &taskv1.PackageInstallStep{Manager: recorded(manager)}}
	have, err := h.Packages(ctx, names)
	if err != nil {
		return tasks.Plan{}, err
	}
	for i, w := range wants {
		if err := p.want(ctx, w, have[i]); err != nil {
			return tasks.Plan{}, err
		}
	}
	if len(p.set.Packages) > 0 {
		if err := p.resolve(ctx); err != nil {
			return tasks.Plan{}, err
		}
	}
	if len(p.differences) == 0 {
		return tasks.Plan{}, nil
	}
	return tasks.Plan{Steps: []tasks.Step{InstallPackages(p.step)}, Differences: p.differences}, nil
}

// recorded is how a step names the package manager for which it was planned:
// apt, which was the only one at first, is not named.
func recorded(m host.PackageManager) string {
	if m.Name == host.Apt {
		return ""
	}
	return m.Name
}

type packagePlanner struct {
	h           host.Reader
	manager     host.PackageManager
	set         host.PackageSet
	step        *taskv1.PackageInstallStep
	differences []tasks.Difference
}

// want adds what one package lacks.
func (p *packagePlanner) want(ctx context.Context, w PackageWant, have host.PackageStatus) error {
	if have.State == installed && w.Version != "" && have.Version != w.Version {
		held := ""
		if have.Held {
			held = ", and held"
		}
		return fmt.Errorf("package %s: version %s is installed%s; want %s: remove it or bring it there, since no installed package is given another version: %w",
			w.Name, have.Version, held, w.Version, tasks.ErrPrecondition)
	}
	if have.State == host.InstalledTwice {
		return fmt.Errorf("package %s: it is installed in the versions %s, which an interrupted transaction has left: dnf remove --duplicates, and dnf check: %w",
			w.Name, have.Version, tasks.ErrPrecondition)
	}
	if w.Hold {
		if !have.Held && p.manager.HoldNeeds != "" {
			return fmt.Errorf("package %s: the package %s is missing, without which no version is held: install it, or set no_hold: %w",
				w.Name, p.manager.HoldNeeds, tasks.ErrPrecondition)
		}
		if !have.Held {
			p.differ("package "+w.Name+" hold", "none", "held")
		}
		p.step.Hold = append(p.step.Hold, w.Name)
	}
	if have.State == installed {
		return nil
	}
	pkg := host.Package{Name: w.Name, Version: w.Version}
	var err error
	if w.File != "" {
		pkg, err = p.file(ctx, w)
	} else {
		pkg.Version, err = p.offered(ctx, w)
	}
	if err != nil {
		return err
	}
	p.set.Packages = append(p.set.Packages, pkg)
	p.differ("package "+w.Name, DescribePackage(have), pkg.Version)
	return nil
}

func (p *packagePlanner) differ(subject, have, want string) {
	p.differences = append(p.differences, tasks.Difference{Subject: subject, Have: have, Want: want})
}

// file reads the package in a file.
func (p *packagePlanner) file(ctx context.Context, w PackageWant) (host.Package, error) {
	pkg, f, err := p.h.ReadPackage(ctx, w.File)
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, fs.ErrInvalid):
		return pkg, fmt.Errorf("package %s: %w: %w", w.Name, err, tasks.ErrPrecondition)
	case err != nil:
		return pkg, err
	case !bytes.Equal(f.SHA256, w.SHA256):
		return pkg, fmt.Errorf("package %s: %s has the SHA-256 %s; want %s: %w", w.Name, w.File,
			hex.EncodeToString(f.SHA256), hex.EncodeToString(w.SHA256), tasks.ErrPrecondition)
	case pkg.Name != w.Name, w.Version != "" && pkg.Version != w.Version:
		return pkg, fmt.Errorf("package %s: %s holds %s %s; want %s: %w", w.Name, w.File, pkg.Name, pkg.Version,
			strings.TrimSpace(w.Name+" "+w.Version), tasks.ErrPrecondition)
	}
	p.set.Files = append(p.set.Files, f)
	p.step.Files = append(p.step.Files, &taskv1.PackageFile{Path: f.Path, Sha256: f.SHA256})
	return pkg, nil
}

// offered returns the version that a source offers.
func (p *packagePlanner) offered(ctx context.Context, w PackageWant) (string, error) {
	versions, err := p.h.PackageVersions(ctx, w.Name)
	switch {
	case errors.Is(err, host.ErrNoPackage): // dnf has no list of an enabled repository
		return "", fmt.Errorf("package %s: %w: %w", w.Name, err, tasks.ErrPrecondition)
	case err != nil:
		return "", err
	case len(versions) == 0:
		return "", fmt.Errorf("package %s: %w: add its source and run %s, or name a file: %w", w.Name, host.ErrNoPackage, p.fetch(), tasks.ErrPrecondition)
	case w.Version == "":
		return versions[0], nil
	case !slices.Contains(versions, w.Version):
		return "", fmt.Errorf("package %s: version %s: %w; they have %s: %w", w.Name, w.Version, host.ErrNoPackage,
			strings.Join(versions, ", "), tasks.ErrPrecondition)
	}
	return w.Version, nil
}

// fetch is the command that fetches the lists of the sources.
func (p *packagePlanner) fetch() string {
	if p.manager.Name == host.DNF {
		return "dnf makecache"
	}
	return "apt-get update"
}

// resolve freezes all that is installed, and refuses what would change others.
func (p *packagePlanner) resolve(ctx context.Context) error {
	names := make([]string, len(p.set.Packages))
	for i, pkg := range p.set.Packages {
		names[i] = pkg.Name
	}
	what := strings.Join(names, ", ")
	change, err := p.h.ResolvePackages(ctx, p.set)
	switch {
	case errors.Is(err, host.ErrNoPackage), errors.Is(err, host.ErrOtherPackages):
		return fmt.Errorf("install %s: %w: %w", what, err, tasks.ErrPrecondition)
	case err != nil:
		return err
	}
	if err := change.Others(); err != nil {
		return fmt.Errorf("install %s: %w: %w", what, err, tasks.ErrPrecondition)
	}
	slices.SortFunc(change.Install, func(a, b host.Package) int { return cmp.Compare(a.Name, b.Name) })
	for _, pkg := range change.Install {
		p.step.Packages = append(p.step.Packages, &taskv1.PackagePin{Name: pkg.Name, Version: pkg.Version, Architecture: pkg.Architecture})
		if !slices.Contains(names, pkg.Name) {
			p.differ("package "+pkg.Name, "not installed", pkg.Version+", which "+what+" needs")
		}
	}
	return nil
}

// PlanRemoval plans the removal of those packages among names that Millwright
// brought: what stood on the node before, or was given another version since,
// stays. files hold some of them, for when the removal is undone.
func PlanRemoval(ctx context.Context, h host.Reader, names []string, files []*taskv1.PackageFile, purge bool) (tasks.Plan, error) {
	manager, err := h.PackageManager(ctx)
	if err != nil {
		return tasks.Plan{}, err
	}
	list, err := h.Packages(ctx, names)
	if err != nil {
		return tasks.Plan{}, err
	}
	args, p := &taskv1.PackageRemoveStep{Files: files, Purge: purge, Manager: recorded(manager)}, tasks.Plan{}
	for _, pkg := range list {
		if !pkg.Ours {
			continue
		}
		args.Packages = append(args.Packages, &taskv1.PackagePin{Name: pkg.Name, Version: pkg.Version, Architecture: pkg.Architecture})
		p.Differences = append(p.Differences, tasks.Difference{Subject: "package " + pkg.Name, Have: DescribePackage(pkg), Want: "not installed"})
	}
	if len(args.GetPackages()) == 0 {
		return tasks.Plan{}, nil
	}
	slices.SortFunc(args.GetPackages(), func(a, b *taskv1.PackagePin) int { return cmp.Compare(a.GetName(), b.GetName()) })
	p.Steps = []tasks.Step{RemovePackages(args)}
	return p, nil
}
