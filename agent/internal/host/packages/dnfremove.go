package packages

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/gpuaas/millwright/agent/internal/crash"
	"github.com/gpuaas/millwright/agent/internal/host/files"
	"github.com/gpuaas/millwright/tasks/host"
)

// RemovePackages implements host.PackageController. rpm keeps nothing of a package
// that is removed but configuration files that were changed, under other names:
// these go with purge.
func (d *dnf) RemovePackages(ctx context.Context, names []string, purge bool) error {
	if err := checkRPMs(names); err != nil {
		return err
	}
	return d.change(ctx, "remove packages "+strings.Join(names, ", "), d.ready, func() error {
		there, err := d.there(ctx, names)
		if err != nil {
			return err
		}
		if err := d.erase(ctx, there, purge); err != nil {
			return err
		}
		return d.editRecord(func(all map[string]string) {
			for _, n := range names {
				delete(all, n)
			}
		})
	})
}

// erase removes packages that are there, and nothing else.
func (d *dnf) erase(ctx context.Context, list []host.PackageStatus, purge bool) error {
	if len(list) == 0 {
		return nil
	}
	var names, others []string
	for _, p := range list {
		names = append(names, p.Name)
	}
	a, err := d.ask(ctx, question{Remove: names})
	if err != nil {
		return err
	}
	for _, p := range slices.Concat(a.Remove, a.Install, a.Replace) {
		if !slices.Contains(names, p.Name) {
			others = append(others, p.Name)
		}
	}
	if len(others) > 0 {
		return fmt.Errorf("%w: %s would not stay as it is", host.ErrOtherPackages, strings.Join(others, ", "))
	}
	var clean []string
	if purge {
		if clean, err = d.saved(ctx, names); err != nil {
			return err
		}
	}
	if err := crash.Fault("host.packages.remove.before"); err != nil {
		return err
	}
	if err := d.run(ctx, list, d.command("remove", names...), clean, false); err != nil {
		return err
	}
	return crash.Fault("host.packages.remove.after")
}

// saved returns where rpm is going to keep the packages' configuration files that
// were changed, but for those that are there already.
func (d *dnf) saved(ctx context.Context, names []string) ([]string, error) {
	res, err := d.read(ctx, append([]string{d.program("rpm"), "--query", "--configfiles", "--"}, names...)...)
	if err != nil {
		return nil, fmt.Errorf("look for configuration files: %w", err)
	}
	var out []string
	for line := range strings.Lines(string(res.Stdout)) {
		file := strings.TrimSpace(line) + ".rpmsave"
		if _, err := os.Lstat(file); filepath.IsAbs(file) && errors.Is(err, fs.ErrNotExist) {
			out = append(out, file)
		}
	}
	return out, nil
}

// HoldPackages implements host.PackageController.
func (d *dnf) HoldPackages(ctx context.Context, names []string, held bool) error {
	if err := checkRPMs(names); err != nil {
		return err
	}
	verb := "unhold"
	if held {
		verb = "hold"
	}
	return d.change(ctx, verb+" packages "+strings.Join(names, ", "), d.ready, func() error {
		list, err := d.Packages(ctx, names)
		if err != nil {
			return err
		}
		var other []host.PackageStatus
		for _, p := range list {
			if p.State == "" {
				return fmt.Errorf("package %s is not installed: %w", p.Name, host.ErrNoPackage)
			}
			if p.Held != held {
				other = append(other, p)
			}
		}
		if len(other) == 0 {
			return nil
		}
		return d.lock(other, held)
	})
}

// lock writes the plugin's file.
func (d *dnf) lock(list []host.PackageStatus, held bool) error {
	l, err := d.locks()
	if err != nil {
		return err
	}
	if l.file == "" {
		return fmt.Errorf("package %s is missing, which holds versions: install it", versionlock)
	}
	var names []string
	for _, p := range list {
		names = append(names, p.Name)
	}
	lines := l.unlocked(names)
	if held {
		lines = l.locked(list)
	}
	text := strings.Join(lines, "\n")
	if text != "" {
		text += "\n"
	}
	if err := crash.Fault("host.packages.hold.before"); err != nil {
		return err
	}
	if err := files.Replace(l.file, []byte(text), 0o644); err != nil {
		return fmt.Errorf("write what is held: %w", err)
	}
	return crash.Fault("host.packages.hold.after")
}
