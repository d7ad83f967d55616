package packages

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	sd "github.com/coreos/go-systemd/v22/dbus"

	"github.com/gpuaas/millwright/agent/internal/crash"
	"github.com/gpuaas/millwright/tasks/host"
)

// mark is the file that says what a transaction is about, from before it begins
// until it has ended by itself. rpm lists a package before its scripts have run,
// and for as long as its files are deleted: only this file tells a package that
// is there from one that a killed transaction has left.
func (d *dnf) mark() string { return filepath.Join(d.cfg.Dir, "underway.json") }

// underway returns the packages of a transaction that has not ended by itself,
// with their versions.
func (d *dnf) underway() (map[string]string, error) {
	b, err := os.ReadFile(d.mark())
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read which transaction is under way: %w", err)
	}
	out := map[string]string{}
	if err := json.Unmarshal(b, &out); err != nil {
		return nil, fmt.Errorf("read which transaction is under way from %s: %w", d.mark(), err)
	}
	return out, nil
}

// ready waits until no other program holds the package database, and rolls back
// what a transaction of ours has left that was killed.
func (d *dnf) ready(ctx context.Context) error {
	res, err := d.read(ctx, d.program("rpm"), "--eval", "%{_dbpath}")
	if err != nil {
		return err
	}
	lock := filepath.Join(strings.TrimSpace(string(res.Stdout)), ".rpm.lock")
	err = d.untilFree(ctx, func() (int, error) {
		if pid := pidIn("/var/lib/dnf/rpmdb_lock.pid", "/var/cache/dnf/metadata_lock.pid", "/var/cache/dnf/download_lock.pid"); pid != 0 {
			return pid, nil
		}
		return holder(lock)
	})
	if err != nil {
		return err
	}
	return d.repair(ctx)
}

// pidIn returns the process that is there and named in one of dnf's locks, or 0.
func pidIn(paths ...string) int {
	for _, p := range paths {
		b, _ := os.ReadFile(p) // mostly there is none
		pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
		if err != nil || pid <= 0 {
			continue
		}
		if _, err := os.Stat(filepath.Join("/proc", strconv.Itoa(pid))); err == nil {
			return pid
		}
	}
	return 0
}

// repair removes what a killed transaction of ours has left. Packages that it was
// to install are not there before, so nothing is lost; those that it was to
// remove were to go. Installed over again they would be there twice.
func (d *dnf) repair(ctx context.Context) error {
	half, err := d.underway()
	if err != nil || half == nil {
		return err
	}
	u, err := d.cfg.Units.Unit(ctx, unitName)
	if err != nil {
		return err
	}
	if u.Active == "failed" && u.Result == "exit-code" {
		return d.unmark() // dnf said no, and left everything in order
	}
	names := slices.Sorted(maps.Keys(half))
	d.cfg.Logger.WarnContext(ctx, "an interrupted transaction of dnf is rolled back", "packages", names)
	if err := crash.Fault("host.packages.repair.before"); err != nil {
		return err
	}
	there, err := d.there(ctx, names)
	if err != nil {
		return err
	}
	if len(there) == 0 {
		err = d.unmark()
	} else {
		err = d.erase(ctx, there, false)
	}
	if err != nil {
		return fmt.Errorf("roll back an interrupted transaction (%s): %w", strings.Join(names, ", "), err)
	}
	forget := func(all map[string]string) { maps.DeleteFunc(all, func(n, _ string) bool { return half[n] != "" }) }
	if err := d.editRecord(forget); err != nil {
		return err
	}
	return crash.Fault("host.packages.repair.after")
}

func (d *dnf) unmark() error {
	if err := os.Remove(d.mark()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("end a transaction: %w", err)
	}
	return nil
}

// there returns those of names that rpm has.
func (d *dnf) there(ctx context.Context, names []string) ([]host.PackageStatus, error) {
	list, err := d.Packages(ctx, names)
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(list, func(p host.PackageStatus) bool { return p.State == "" }), nil
}

// command is how dnf is called to change something: it fetches no lists,
// brings nothing that is only recommended, and removes nothing that is not named.
// It is quiet, so that the last that it says is what went wrong.
func (d *dnf) command(verb string, words ...string) []string {
	argv := []string{d.program("dnf"), "--assumeyes", "--quiet", "--best", "--color=never",
		"--setopt=install_weak_deps=False", "--setopt=clean_requirements_on_remove=False",
		"--setopt=exit_on_lock=True", "--setopt=*.metadata_expire=never", verb}
	return append(argv, words...)
}

// offline has the systemctl of a package's scripts do nothing but enable and
// disable. What they would have systemd read, a later step does.
const offline = "SYSTEMD_OFFLINE=1"

// unheard keeps them from starting services by another way: even then "systemctl
// enable --now" starts what it enables, and others speak to systemd over the bus.
func unheard() sd.Property {
	return property("InaccessiblePaths", []string{"-/run/systemd/private", "-/run/dbus/system_bus_socket"})
}

// run runs a transaction about list to its end. When it ends well, the unit ends
// the mark and deletes clean, whether the agent is there or not.
func (d *dnf) run(ctx context.Context, list []host.PackageStatus, argv, clean []string, installs bool) error {
	all := map[string]string{}
	for _, p := range list {
		all[p.Name] = p.Version
	}
	if err := d.keep(d.mark(), all); err != nil {
		return err
	}
	commands := [][]string{argv, append([]string{d.program("rm"), "--force", "--", d.mark()}, clean...)}
	// Where rpm looks for its database below the home directory, as Debian's does, it is root's.
	environment := []string{"HOME=/root", "PYTHONUNBUFFERED=1"}
	var more []sd.Property
	if installs { // removed, services stop
		environment, more = append(environment, offline), append(more, unheard())
	}
	err := d.inUnit(ctx, append(unitProperties(commands, environment...), more...))
	if err == nil {
		return nil
	}
	if u, err2 := d.cfg.Units.Unit(ctx, unitName); err2 == nil && u.Active == "failed" && u.Result == "exit-code" {
		err = errors.Join(err, d.unmark()) // dnf ended by itself, and rpm's database says what there is
	}
	if strings.Contains(err.Error(), "already locked by") || strings.Contains(err.Error(), "transaction lock") {
		return fmt.Errorf("%w: %w", host.ErrPackagesLocked, err)
	}
	return err
}

// InstallPackages implements host.PackageController.
func (d *dnf) InstallPackages(ctx context.Context, set host.PackageSet) error {
	return d.change(ctx, "install packages", d.ready, func() error {
		missing, err := d.missing(ctx, set)
		if err != nil || len(missing) == 0 {
			return err
		}
		defer d.deleteCopies()
		own, err := d.copied(set, ".rpm")
		if err != nil {
			return err
		}
		if err := d.allowed(ctx, own); err != nil {
			return err
		}
		words, err := d.words(ctx, own, missing)
		if err != nil {
			return err
		}
		if err := d.recordBrought(missing); err != nil {
			return err
		}
		if err := crash.Fault("host.packages.install.before"); err != nil {
			return err
		}
		if err := d.run(ctx, missing, d.command("install", words...), nil, true); err != nil {
			return err
		}
		return crash.Fault("host.packages.install.after")
	})
}

// missing returns those of set that are not installed in their versions.
func (d *dnf) missing(ctx context.Context, set host.PackageSet) ([]host.PackageStatus, error) {
	names := make([]string, 0, len(set.Packages))
	for _, p := range set.Packages {
		names = append(names, p.Name)
	}
	have, err := d.Packages(ctx, names)
	if err != nil {
		return nil, err
	}
	var out []host.PackageStatus
	for i, p := range set.Packages {
		if have[i].State == installed && have[i].Version == p.Version {
			continue
		}
		if have[i].State == host.InstalledTwice {
			return nil, fmt.Errorf("package %s is installed in the versions %s, which an interrupted transaction has left: %w", p.Name, have[i].Version, host.ErrOtherPackages)
		}
		have[i].Package = p
		out = append(out, have[i])
	}
	return out, nil
}

// allowed refuses what would change more than set says. It asks right before the
// change, since the lists may have been fetched again since it was planned.
func (d *dnf) allowed(ctx context.Context, set host.PackageSet) error {
	c, err := d.ResolvePackages(ctx, set)
	if err != nil {
		return err
	}
	if err := c.Others(); err != nil {
		return err
	}
	for _, p := range c.Install {
		if !slices.ContainsFunc(set.Packages, func(w host.Package) bool { return w.Name == p.Name && w.Version == p.Version }) {
			return fmt.Errorf("%w: %s %s would be installed, which was not planned", host.ErrOtherPackages, p.Name, p.Version)
		}
	}
	return nil
}

// words are those of dnf install: the files, and what is missing besides, each
// with its epoch, version, release and architecture.
func (d *dnf) words(ctx context.Context, set host.PackageSet, missing []host.PackageStatus) ([]string, error) {
	var words []string
	inFile := map[string]bool{}
	for _, f := range set.Files {
		p, err := d.packageIn(ctx, f.Path)
		if err != nil {
			return nil, err
		}
		inFile[p.Name] = true
		words = append(words, f.Path)
	}
	for _, p := range missing {
		if !inFile[p.Name] {
			words = append(words, nevra(p.Package))
		}
	}
	return words, nil
}

// nevra names one package in one version, as dnf takes it for nothing else.
func nevra(p host.Package) string {
	version, arch := p.Version, ""
	if !strings.Contains(version, ":") {
		version = "0:" + version
	}
	if p.Architecture != "" {
		arch = "." + p.Architecture
	}
	return p.Name + "-" + version + arch
}

// recordBrought makes durable which packages are about to be brought to where
// there was none.
func (d *dnf) recordBrought(missing []host.PackageStatus) error {
	return d.editRecord(func(all map[string]string) {
		for _, p := range missing {
			if p.State == "" {
				all[p.Name] = p.Version
			}
		}
	})
}
