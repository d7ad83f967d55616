package packages

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/gpuaas/millwright/tasks/host"
)

// Native implements host.PackageReader and host.PackageController over what the
// node has: dpkg and apt, or rpm and dnf. It looks each time. It is safe for
// concurrent use.
type Native struct {
	apt *apt
	dnf *dnf
}

// New returns the packages of the machine. It does no I/O.
func New(cfg Config) *Native {
	if cfg.LockWait == 0 {
		cfg.LockWait = 2 * time.Minute
	}
	if cfg.Database == "" {
		cfg.Database = "/var/lib/dpkg"
	}
	if cfg.Bin == "" {
		cfg.Bin = "/usr/bin"
	}
	if cfg.Plugins == "" {
		cfg.Plugins = "/etc/dnf/plugins"
	}
	m := &machine{cfg: cfg, turn: make(chan struct{}, 1)}
	return &Native{apt: &apt{m}, dnf: &dnf{m}}
}

// verbs are what each of the two can do.
type verbs interface {
	host.PackageReader
	host.PackageController
}

// own returns the one that looks after the node's packages. A system of packages
// is the node's own when its database says that something is installed: dpkg is
// to be had on nodes of rpm, and the other way round.
func (n *Native) own() (verbs, error) {
	if info, err := os.Stat(filepath.Join(n.apt.cfg.Database, "status")); err == nil && info.Size() > 0 {
		return n.apt, nil
	}
	for _, name := range []string{"rpm", "dnf"} {
		if _, err := os.Stat(n.dnf.program(name)); err != nil {
			return nil, fmt.Errorf("look for the node's packages: %w", host.ErrNoPackageManager)
		}
	}
	return n.dnf, nil
}

// PackageManager implements host.PackageReader.
func (n *Native) PackageManager(ctx context.Context) (host.PackageManager, error) {
	v, err := n.own()
	if err != nil {
		return host.PackageManager{}, err
	}
	return v.PackageManager(ctx)
}

// Packages implements host.PackageReader.
func (n *Native) Packages(ctx context.Context, names []string) ([]host.PackageStatus, error) {
	v, err := n.own()
	if err != nil {
		return nil, err
	}
	return v.Packages(ctx, names)
}

// PackageVersions implements host.PackageReader.
func (n *Native) PackageVersions(ctx context.Context, name string) ([]string, error) {
	v, err := n.own()
	if err != nil {
		return nil, err
	}
	return v.PackageVersions(ctx, name)
}

// ReadPackage implements host.PackageReader.
func (n *Native) ReadPackage(ctx context.Context, path string) (host.Package, host.PackageFile, error) {
	v, err := n.own()
	if err != nil {
		return host.Package{}, host.PackageFile{}, err
	}
	return v.ReadPackage(ctx, path)
}

// ResolvePackages implements host.PackageReader.
func (n *Native) ResolvePackages(ctx context.Context, set host.PackageSet) (host.PackageChange, error) {
	v, err := n.own()
	if err != nil {
		return host.PackageChange{}, err
	}
	return v.ResolvePackages(ctx, set)
}

// InstallPackages implements host.PackageController.
func (n *Native) InstallPackages(ctx context.Context, set host.PackageSet) error {
	v, err := n.own()
	if err != nil {
		return err
	}
	return v.InstallPackages(ctx, set)
}

// RemovePackages implements host.PackageController.
func (n *Native) RemovePackages(ctx context.Context, names []string, purge bool) error {
	v, err := n.own()
	if err != nil {
		return err
	}
	return v.RemovePackages(ctx, names, purge)
}

// HoldPackages implements host.PackageController.
func (n *Native) HoldPackages(ctx context.Context, names []string, held bool) error {
	v, err := n.own()
	if err != nil {
		return err
	}
	return v.HoldPackages(ctx, names, held)
}
