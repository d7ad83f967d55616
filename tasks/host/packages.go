package host

import (
	"context"
	"errors"
	"fmt"
	"strings"
)

var (
	// ErrNoPackageManager is wrapped by the error of a package verb on a node
	// whose packages are neither those of dpkg and apt nor those of rpm and dnf.
	ErrNoPackageManager = errors.New("the node has neither dpkg and apt nor rpm and dnf")
	// ErrNoPackage is wrapped when no source offers a package, or not in the
	// version that was asked for.
	ErrNoPackage = errors.New("no source of the node offers it")
	// ErrOtherPackages is wrapped when a change would reach packages that were
	// not named: nothing was changed.
	ErrOtherPackages = errors.New("other packages would change")
	// ErrPackagesLocked is wrapped when another program held the lock of the
	// package database for longer than is waited for.
	ErrPackagesLocked = errors.New("the package database is locked")
)

// The names of package managers.
const (
	Apt = "apt" // with dpkg
	DNF = "dnf" // with rpm
)

// PackageManager is what looks after a node's packages.
type PackageManager struct {
	Name string // Apt or DNF
	// HoldNeeds names the package that is missing before a version can be held;
	// empty: none is.
	HoldNeeds string
}

// Package is a package in one version.
type Package struct {
	Name, Version string // as the node's package manager writes them
	Architecture  string // all or noarch, or the node's
}

// PackageFile is a file on the node that holds a package.
type PackageFile struct {
	Path   string
	SHA256 []byte
}

// PackageSet is what is to be installed.
type PackageSet struct {
	// Packages are the packages in their versions.
	Packages []Package
	// Files hold some of them; the others come from the sources of the node.
	Files []PackageFile
}

// PackageStatus is what the package database says of a package.
type PackageStatus struct {
	Package
	// State is dpkg's: installed, config-files, half-installed, unpacked,
	// half-configured, triggers-pending ...; empty when it has nothing of the
	// package. rpm has the first, and half-configured for what a transaction that
	// was killed has left; besides there is [InstalledTwice].
	State string
	// Held says that somebody asked that its version stays as it is.
	Held bool
	// Ours says that [PackageController.InstallPackages] brought it, in this
	// version, where there was none before.
	Ours bool
}

// InstalledTwice is the state of a package that rpm has in more than one version,
// which a transaction that was interrupted leaves. The version names them all.
const InstalledTwice = "installed-twice"

// PackageChange is what an installation would change.
type PackageChange struct {
	Install []Package // by name; dependencies too
	Replace []Package // installed now, and in another version afterwards
	Remove  []Package
}

// PackageReader reads the package database and what the sources offer, as the
// node last fetched their lists. It fetches nothing.
type PackageReader interface {
	// PackageManager returns what looks after the node's packages.
	PackageManager(ctx context.Context) (PackageManager, error)
	// Packages returns the status of packages, in the order of names.
	Packages(ctx context.Context, names []string) ([]PackageStatus, error)
	// PackageVersions returns the versions that the sources offer, newest first;
	// none is no error.
	PackageVersions(ctx context.Context, name string) ([]string, error)
	// ReadPackage returns the package in a file, and the file's digest. A missing
	// file is fs.ErrNotExist; one that is no package wraps fs.ErrInvalid.
	ReadPackage(ctx context.Context, path string) (Package, PackageFile, error)
	// ResolvePackages returns what an installation of set would change: what it
	// depends on too, and nothing that is only recommended.
	ResolvePackages(ctx context.Context, set PackageSet) (PackageChange, error)
}

// PackageController changes the node's packages. One change is made at a time;
// its methods wait a bounded time for other programs that hold the package
// database, and first finish what an interrupted one left half done. What runs
// outlives the agent, and a call that finds it running waits for its end.
// Services are not started or restarted by a package that is installed.
type PackageController interface {
	// InstallPackages installs exactly the packages of set. When something else
	// would be installed, replaced or removed with them, it changes nothing and
	// the error wraps [ErrOtherPackages]. A file whose digest is another is an
	// error that wraps fs.ErrInvalid.
	InstallPackages(ctx context.Context, set PackageSet) error
	// RemovePackages removes exactly the packages named that are there, with
	// their configuration files when purge is set. When another package needs one
	// of them it changes nothing, and the error wraps [ErrOtherPackages].
	RemovePackages(ctx context.Context, names []string, purge bool) error
	// HoldPackages sets or ends the hold of installed packages.
	HoldPackages(ctx context.Context, names []string, held bool) error
}

// Others returns an error that wraps [ErrOtherPackages] and names the installed
// packages that c would replace or remove, or nil when there are none.
func (c PackageChange) Others() error {
	var parts []string
	for _, p := range c.Replace {
		parts = append(parts, p.Name+" "+p.Version+" would get another version")
	}
	for _, p := range c.Remove {
		parts = append(parts, p.Name+" "+p.Version+" would be removed")
	}
	if len(parts) == 0 {
		return nil
	}
	return fmt.Errorf("%w: %s", ErrOtherPackages, strings.Join(parts, ", "))
}
