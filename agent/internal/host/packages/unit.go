package packages

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	sd "github.com/coreos/go-systemd/v22/dbus"
	"github.com/godbus/dbus/v5"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/millwright/agent/internal/clock"
	"github.com/gpuaas/millwright/agent/internal/crash"
	"github.com/gpuaas/millwright/agent/internal/host/files"
	"github.com/gpuaas/millwright/agent/internal/host/systemd"
	"github.com/gpuaas/millwright/agent/internal/shim"
	"github.com/gpuaas/millwright/tasks/host"
)

// unitName is the unit in which packages are changed. There is one name, so that
// there is one change.
const unitName = "millwright-packages.service"

// changeTime bounds a change: dpkg is not stopped half way for less.
const changeTime = 30 * time.Minute

// helperPath is where the scripts of packages ask whether a service may be
// started: see policy-rc.d(8) of Debian's invoke-rc.d.
const helperPath = "/usr/sbin/policy-rc.d"

// helper answers that question: a service may be stopped, by the package that is
// removed, and nothing else.
const helper = "#!/bin/sh\nfor word; do [ \"$word\" = stop ] && exit 0; done\nexit 101\n"

// run runs a program that changes packages, to its end.
func (a *Apt) run(ctx context.Context, argv []string) error {
	policy := filepath.Join(a.cfg.Dir, "policy-rc.d")
	if err := files.MakeDirs(a.cfg.Dir, 0o700); err != nil {
		return fmt.Errorf("prepare %s: %w", argv[0], err)
	}
	if err := crash.Fault("host.packages.policy.before"); err != nil {
		return err
	}
	if err := files.Replace(policy, []byte(helper), 0o755); err != nil {
		return fmt.Errorf("prepare %s: %w", argv[0], err)
	}
	if err := crash.Fault("host.packages.policy.after"); err != nil {
		return err
	}
	defer removePlaceholder()
	a.cfg.Units.ResetFailed(ctx, unitName)
	err := a.cfg.Units.RunTransient(ctx, unitName, properties(argv, policy))
	if err != nil && strings.Contains(err.Error(), "Could not get lock") {
		return fmt.Errorf("%w: %w", host.ErrPackagesLocked, err)
	}
	return err
}

// removePlaceholder removes the empty file that systemd makes where it shows the
// helper, on a node that has none. It cannot be run, so that until then nobody
// asks it.
func removePlaceholder() {
	info, err := os.Lstat(helperPath)
	if err == nil && info.Mode().IsRegular() && info.Size() == 0 && info.Mode()&0o111 == 0 {
		_ = os.Remove(helperPath) // it does no harm
	}
}

type bindPath struct {
	Source, Target string
	IgnoreMissing  bool
	Flags          uint64
}

func property(name string, value any) sd.Property {
	return sd.Property{Name: name, Value: dbus.MakeVariant(value)}
}

// properties are those of the unit. Only its own processes see the helper.
func properties(argv []string, policy string) []sd.Property {
	return []sd.Property{
		sd.PropDescription("Millwright changes packages"),
		sd.PropSlice("millwright.slice"),
		sd.PropType("oneshot"),
		systemd.ExecStart(argv),
		property("Environment", []string{
			"PATH=" + shim.Path, "LC_ALL=C.UTF-8", "DEBIAN_FRONTEND=noninteractive", "DEBIAN_PRIORITY=critical",
			"APT_LISTCHANGES_FRONTEND=none", "NEEDRESTART_SUSPEND=1", "UCF_FORCE_CONFFOLD=1",
		}),
		property("BindReadOnlyPaths", []bindPath{{Source: policy, Target: helperPath}}),
		property("StandardInput", "null"),
		property("KillMode", "mixed"),
		property("TimeoutStartUSec", uint64(changeTime.Microseconds())),
		property("OOMPolicy", "continue"),
		property("LimitCORE", uint64(0)),
	}
}

// pollPause is how often it is asked whether a change or a lock has ended.
const pollPause = 200 * time.Millisecond

// untilEnded waits for the end of a change that an earlier call, of this agent or
// the one before it, has started.
func (a *Apt) untilEnded(ctx context.Context) error {
	for told := false; ; told = true {
		u, err := a.cfg.Units.Unit(ctx, unitName)
		if err != nil {
			return err
		}
		if !systemd.Running(u) {
			return nil
		}
		if !told {
			a.cfg.Logger.InfoContext(ctx, "a change of packages runs already", "unit", unitName)
		}
		if !clock.Sleep(ctx, pollPause) {
			return fmt.Errorf("wait for %s: %w", unitName, context.Cause(ctx))
		}
	}
}

// untilUnlocked waits until no other program holds the package database.
func (a *Apt) untilUnlocked(ctx context.Context) error {
	begin := a.cfg.Clock.Boot()
	for {
		pid, err := holder(filepath.Join(a.cfg.Database, "lock-frontend"), filepath.Join(a.cfg.Database, "lock"))
		if err != nil || pid == 0 {
			return err
		}
		if a.cfg.Clock.Boot()-begin >= a.cfg.LockWait {
			return fmt.Errorf("%w by process %d (%s) for more than %v: wait for its end, or end it",
				host.ErrPackagesLocked, pid, commandOf(pid), a.cfg.LockWait)
		}
		if !clock.Sleep(ctx, pollPause) {
			return fmt.Errorf("wait for the package database: %w", context.Cause(ctx))
		}
	}
}

// holder returns the process that holds one of the locks, or 0. It only asks.
func holder(paths ...string) (int, error) {
	for _, p := range paths {
		f, err := os.Open(p)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return 0, fmt.Errorf("ask for the package database's lock: %w", err)
		}
		lock := unix.Flock_t{Type: unix.F_WRLCK}
		err = unix.FcntlFlock(f.Fd(), unix.F_GETLK, &lock)
		_ = f.Close() // it was only asked
		if err != nil {
			return 0, fmt.Errorf("ask for the lock %s: %w", p, err)
		}
		if lock.Type != unix.F_UNLCK {
			return max(1, int(lock.Pid)), nil
		}
	}
	return 0, nil
}

func commandOf(pid int) string {
	b, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "cmdline"))
	if err != nil || len(b) == 0 {
		return "its command is not known"
	}
	return oneLine(bytes.ReplaceAll(b, []byte{0}, []byte(" ")))
}

// copies is where package files are copied, so that what is installed is what
// was checked.
func (a *Apt) copies() string { return filepath.Join(a.cfg.Dir, "files") }

// copied copies the files of set, checks them, and returns the arguments of
// apt-get install.
func (a *Apt) copied(ctx context.Context, set host.PackageSet) ([]string, error) {
	a.deleteCopies()
	own := host.PackageSet{Packages: set.Packages}
	for _, f := range set.Files {
		to := filepath.Join(a.copies(), fmt.Sprintf("%x.deb", f.SHA256))
		if err := copyFile(f, to); err != nil {
			return nil, err
		}
		own.Files = append(own.Files, host.PackageFile{Path: to, SHA256: f.SHA256})
	}
	return a.arguments(ctx, own)
}

func copyFile(f host.PackageFile, to string) error {
	if err := os.MkdirAll(filepath.Dir(to), 0o700); err != nil {
		return fmt.Errorf("copy %s: %w", f.Path, err)
	}
	out, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return fmt.Errorf("copy %s: %w", f.Path, err)
	}
	sum, err := digest(f.Path, out)
	if err = errors.Join(err, out.Close()); err != nil {
		return err
	}
	if !bytes.Equal(sum, f.SHA256) {
		return otherDigest(f.Path, sum, f.SHA256)
	}
	return nil
}

func (a *Apt) deleteCopies() {
	_ = os.RemoveAll(a.copies()) // the next change does it again
}
