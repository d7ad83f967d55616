package packages

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strconv"
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

// changeTime bounds a change: it is not stopped half way for less.
const changeTime = 30 * time.Minute

// machine is what dpkg and rpm have in common: the unit in which packages are
// changed, the record of what was brought, and copies of package files.
type machine struct {
	cfg  Config
	turn chan struct{} // held by the one that changes packages
}

// change calls do for itself alone: after a unit that an earlier call started
// has ended, and ready has prepared the package database.
func (m *machine) change(ctx context.Context, what string, ready func(context.Context) error, do func() error) error {
	select {
	case m.turn <- struct{}{}:
		defer func() { <-m.turn }()
	case <-ctx.Done():
		return fmt.Errorf("%s: %w", what, context.Cause(ctx))
	}
	err := m.untilEnded(ctx)
	if err == nil {
		err = ready(ctx)
	}
	if err == nil {
		err = do()
	}
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}

// inUnit runs the unit to its end.
func (m *machine) inUnit(ctx context.Context, properties []sd.Property) error {
	m.cfg.Units.ResetFailed(ctx, unitName)
	return m.cfg.Units.RunTransient(ctx, unitName, properties)
}

func property(name string, value any) sd.Property {
	return sd.Property{Name: name, Value: dbus.MakeVariant(value)}
}

// unitProperties are those of the unit, whatever it runs.
func unitProperties(commands [][]string, environment ...string) []sd.Property {
	return []sd.Property{
		sd.PropDescription("Millwright changes packages"),
		sd.PropSlice("millwright.slice"),
		sd.PropType("oneshot"),
		systemd.ExecStart(commands...),
		property("Environment", append([]string{"PATH=" + shim.Path, "LC_ALL=C.UTF-8"}, environment...)),
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
func (m *machine) untilEnded(ctx context.Context) error {
	for told := false; ; told = true {
		u, err := m.cfg.Units.Unit(ctx, unitName)
		if err != nil {
			return err
		}
		if !systemd.Running(u) {
			return nil
		}
		if !told {
			m.cfg.Logger.InfoContext(ctx, "a change of packages runs already", "unit", unitName)
		}
		if !clock.Sleep(ctx, pollPause) {
			return fmt.Errorf("wait for %s: %w", unitName, context.Cause(ctx))
		}
	}
}

// untilFree waits until no other program holds the package database. Who does is
// what holds returns, or 0.
func (m *machine) untilFree(ctx context.Context, holds func() (int, error)) error {
	begin := m.cfg.Clock.Boot()
	for {
		pid, err := holds()
		if err != nil || pid == 0 {
			return err
		}
		if m.cfg.Clock.Boot()-begin >= m.cfg.LockWait {
			return fmt.Errorf("%w by process %d (%s) for more than %v: wait for its end, or end it",
				host.ErrPackagesLocked, pid, commandOf(pid), m.cfg.LockWait)
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

// record is the file that says what was brought.
func (m *machine) record() string { return filepath.Join(m.cfg.Dir, "brought.json") }

// brought returns the packages that were brought to where there was none, by
// name, with their versions.
func (m *machine) brought() (map[string]string, error) {
	b, err := os.ReadFile(m.record())
	if errors.Is(err, fs.ErrNotExist) {
		return map[string]string{}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the record of packages: %w", err)
	}
	out := map[string]string{}
	if err := json.Unmarshal(b, &out); err != nil {
		return nil, fmt.Errorf("read the record of packages %s: %w", m.record(), err)
	}
	return out, nil
}

func (m *machine) editRecord(edit func(map[string]string)) error {
	all, err := m.brought()
	if err != nil {
		return err
	}
	was := maps.Clone(all)
	edit(all)
	if maps.Equal(was, all) {
		return nil
	}
	if err := crash.Fault("host.packages.record.before"); err != nil {
		return err
	}
	if err := m.keep(m.record(), all); err != nil {
		return err
	}
	return crash.Fault("host.packages.record.after")
}

// keep writes a file of packages and their versions, durably.
func (m *machine) keep(file string, all map[string]string) error {
	b, err := json.MarshalIndent(all, "", "\t")
	if err != nil {
		return fmt.Errorf("serialise the record of packages: %w", err)
	}
	if err := files.MakeDirs(m.cfg.Dir, 0o700); err != nil {
		return fmt.Errorf("keep the record of packages: %w", err)
	}
	if err := files.Replace(file, append(b, '\n'), 0o600); err != nil {
		return fmt.Errorf("keep the record of packages: %w", err)
	}
	return nil
}

// copies is where package files are copied, so that what is installed is what
// was checked.
func (m *machine) copies() string { return filepath.Join(m.cfg.Dir, "files") }

// copied copies the files of set, whose names then end in suffix, and checks
// them.
func (m *machine) copied(set host.PackageSet, suffix string) (host.PackageSet, error) {
	m.deleteCopies()
	own := host.PackageSet{Packages: set.Packages}
	for _, f := range set.Files {
		to := filepath.Join(m.copies(), fmt.Sprintf("%x", f.SHA256)+suffix)
		if err := copyFile(f, to); err != nil {
			return own, err
		}
		own.Files = append(own.Files, host.PackageFile{Path: to, SHA256: f.SHA256})
	}
	return own, nil
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

func (m *machine) deleteCopies() {
	_ = os.RemoveAll(m.copies()) // the next change does it again
}
