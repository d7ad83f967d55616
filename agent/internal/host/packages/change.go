package packages

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/gpuaas/millwright/agent/internal/crash"
	"github.com/gpuaas/millwright/tasks/host"
)

// ready waits until no other program holds the package database, and finishes
// what one has left.
func (a *apt) ready(ctx context.Context) error {
	err := a.untilFree(ctx, func() (int, error) {
		return holder(filepath.Join(a.cfg.Database, "lock-frontend"), filepath.Join(a.cfg.Database, "lock"))
	})
	if err != nil {
		return err
	}
	return a.repair(ctx)
}

// repair finishes what an interrupted dpkg left half done: until then apt does
// nothing at all.
func (a *apt) repair(ctx context.Context) error {
	broken, err := a.interrupted(ctx)
	if err != nil || broken == "" {
		return err
	}
	a.cfg.Logger.WarnContext(ctx, "an interrupted dpkg is finished", "found", broken)
	if err := crash.Fault("host.packages.repair.before"); err != nil {
		return err
	}
	if err := a.run(ctx, append([]string{"/usr/bin/dpkg"}, append(conffiles(""), "--configure", "--pending")...)); err != nil {
		return fmt.Errorf("finish an interrupted dpkg (%s): %w", broken, err)
	}
	return crash.Fault("host.packages.repair.after")
}

// interrupted says what a dpkg that was interrupted has left, or nothing.
func (a *apt) interrupted(ctx context.Context) (string, error) {
	updates, err := os.ReadDir(filepath.Join(a.cfg.Database, "updates"))
	if err != nil {
		return "", fmt.Errorf("look for an interrupted dpkg: %w", err)
	}
	for _, u := range updates {
		if strings.Trim(u.Name(), "0123456789") == "" {
			return "updates that are not in its database", nil
		}
	}
	res, err := a.read(ctx, "/usr/bin/dpkg-query", "--show", "--showformat=${Package}\\t${db:Status-Status}\\n")
	if err != nil {
		return "", fmt.Errorf("look for an interrupted dpkg: %w", err)
	}
	for line := range strings.Lines(string(res.Stdout)) {
		name, state, _ := strings.Cut(strings.TrimSpace(line), "\t")
		switch state {
		case "unpacked", "half-configured", "triggers-awaited", "triggers-pending":
			return name + " is " + state, nil
		}
	}
	return "", nil
}

// InstallPackages implements host.PackageController.
func (a *apt) InstallPackages(ctx context.Context, set host.PackageSet) error {
	return a.change(ctx, "install packages", a.ready, func() error {
		missing, err := a.missing(ctx, set)
		if err != nil || len(missing) == 0 {
			return err
		}
		defer a.deleteCopies()
		own, err := a.copied(set, ".deb")
		if err != nil {
			return err
		}
		words, err := a.arguments(ctx, own)
		if err != nil {
			return err
		}
		if err := a.allowed(ctx, set, words); err != nil {
			return err
		}
		if err := a.recordBrought(missing); err != nil {
			return err
		}
		if err := crash.Fault("host.packages.install.before"); err != nil {
			return err
		}
		argv := append(aptGet(a.cfg.LockWait), "--no-install-recommends", "--no-remove", "install", "--")
		if err := a.run(ctx, append(argv, words...)); err != nil {
			return err
		}
		return crash.Fault("host.packages.install.after")
	})
}

// missing returns those of set that are not installed in their versions.
func (a *apt) missing(ctx context.Context, set host.PackageSet) ([]host.PackageStatus, error) {
	names := make([]string, 0, len(set.Packages))
	for _, p := range set.Packages {
		names = append(names, p.Name)
	}
	have, err := a.Packages(ctx, names)
	if err != nil {
		return nil, err
	}
	var out []host.PackageStatus
	for i, p := range set.Packages {
		if have[i].State == installed && have[i].Version == p.Version {
			continue
		}
		st := have[i]
		st.Version = p.Version
		out = append(out, st)
	}
	return out, nil
}

// allowed refuses what would change more than set says. It asks right before the
// change, since the sources may offer something else than when it was planned.
func (a *apt) allowed(ctx context.Context, set host.PackageSet, words []string) error {
	c, err := a.simulate(ctx, "install", words)
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

// recordBrought makes durable which packages are about to be brought to where
// there was none.
func (a *apt) recordBrought(missing []host.PackageStatus) error {
	return a.editRecord(func(all map[string]string) {
		for _, p := range missing {
			if p.State == "" || p.State == "config-files" {
				all[p.Name] = p.Version
			}
		}
	})
}

// RemovePackages implements host.PackageController.
func (a *apt) RemovePackages(ctx context.Context, names []string, purge bool) error {
	if err := checkAll(names); err != nil {
		return err
	}
	return a.change(ctx, "remove packages "+strings.Join(names, ", "), a.ready, func() error {
		there, err := a.there(ctx, names, purge)
		if err != nil {
			return err
		}
		if err := a.purge(ctx, there, purge); err != nil {
			return err
		}
		return a.editRecord(func(all map[string]string) {
			for _, n := range names {
				delete(all, n)
			}
		})
	})
}

// there returns those of names of which there is something to remove.
func (a *apt) there(ctx context.Context, names []string, purge bool) ([]string, error) {
	list, err := a.Packages(ctx, names)
	if err != nil {
		return nil, err
	}
	var out []string
	for _, p := range list {
		if p.State != "" && (purge || p.State != "config-files") {
			out = append(out, p.Name)
		}
	}
	return out, nil
}

func (a *apt) purge(ctx context.Context, names []string, purge bool) error {
	if len(names) == 0 {
		return nil
	}
	verb := "remove"
	if purge {
		verb = "purge"
	}
	c, err := a.simulate(ctx, verb, names)
	if err != nil {
		return err
	}
	var others []string
	for _, p := range slices.Concat(c.Remove, c.Install, c.Replace) {
		if !slices.Contains(names, p.Name) {
			others = append(others, p.Name)
		}
	}
	if len(others) > 0 {
		return fmt.Errorf("%w: %s would not stay as it is", host.ErrOtherPackages, strings.Join(others, ", "))
	}
	if err := crash.Fault("host.packages.remove.before"); err != nil {
		return err
	}
	if err := a.run(ctx, append(append(aptGet(a.cfg.LockWait), verb, "--"), names...)); err != nil {
		return err
	}
	return crash.Fault("host.packages.remove.after")
}

// HoldPackages implements host.PackageController.
func (a *apt) HoldPackages(ctx context.Context, names []string, held bool) error {
	if err := checkAll(names); err != nil {
		return err
	}
	verb := "unhold"
	if held {
		verb = "hold"
	}
	return a.change(ctx, verb+" packages "+strings.Join(names, ", "), a.ready, func() error {
		list, err := a.Packages(ctx, names)
		if err != nil {
			return err
		}
		var other []string
		for _, p := range list {
			if p.State == "" {
				return fmt.Errorf("package %s is not installed: %w", p.Name, host.ErrNoPackage)
			}
			if p.Held != held {
				other = append(other, p.Name)
			}
		}
		if len(other) == 0 {
			return nil
		}
		if err := crash.Fault("host.packages.hold.before"); err != nil {
			return err
		}
		if err := a.run(ctx, append([]string{"/usr/bin/apt-mark", verb, "--"}, other...)); err != nil {
			return err
		}
		return crash.Fault("host.packages.hold.after")
	})
}

// aptGet is how apt-get is called to change something. It takes nobody's
// configuration file away, and removes nothing that is not named.
func aptGet(lockWait time.Duration) []string {
	argv := []string{"/usr/bin/apt-get", "--yes", "--quiet", fmt.Sprintf("-oDPkg::Lock::Timeout=%d", int(lockWait.Seconds())),
		"-oDpkg::Use-Pty=0", "-oAPT::Get::AutomaticRemove=false"}
	return append(argv, conffiles("-oDpkg::Options::=")...)
}

// conffiles are the options by which dpkg asks nobody and keeps what was
// changed by hand.
func conffiles(prefix string) []string {
	return []string{prefix + "--force-confdef", prefix + "--force-confold"}
}
