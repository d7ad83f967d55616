package systemd

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"
	"time"

	sd "github.com/coreos/go-systemd/v22/dbus"
	sdunit "github.com/coreos/go-systemd/v22/unit"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/millwright/agent/internal/clock"
	"github.com/gpuaas/millwright/agent/internal/crash"
	"github.com/gpuaas/millwright/agent/internal/host/files"
	"github.com/gpuaas/millwright/tasks/host"
)

// ErrUnitExists is wrapped by the error of [Conn.StartTransient] when a unit of
// that name is there already.
var ErrUnitExists = errors.New("the unit exists already")

// Reload implements host.UnitController.
func (c *Conn) Reload(ctx context.Context) error {
	if err := crash.Fault("host.reload.before"); err != nil {
		return err
	}
	err := c.call(ctx, c.cfg.ReloadTimeout, func(ctx context.Context, l *link) error { return l.ReloadContext(ctx) })
	if err != nil {
		return fmt.Errorf("reload systemd: %w", err)
	}
	return crash.Fault("host.reload.after")
}

// Reboot implements host.Rebooter. The job cannot be replaced by the start of
// some unit, and a second request joins the first.
func (c *Conn) Reboot(ctx context.Context, reason string) error {
	c.cfg.Logger.WarnContext(ctx, "the node is rebooted", "reason", reason)
	err := c.call(ctx, c.cfg.CallTimeout, func(ctx context.Context, l *link) error {
		_, err := l.StartUnitContext(ctx, "reboot.target", "replace-irreversibly", nil)
		return err
	})
	if err != nil {
		return fmt.Errorf("reboot the node: %w", err)
	}
	return nil
}

// StartUnit implements host.UnitController.
func (c *Conn) StartUnit(ctx context.Context, name string) error {
	begin := clock.System{}.Now() // by the clock of the journal
	c.resetFailed(ctx, name)
	if err := crash.Fault("host.unit.start.before"); err != nil {
		return err
	}
	result, err := c.job(ctx, name, func(ctx context.Context, l *link, done chan<- string) error {
		_, err := l.StartUnitContext(ctx, name, "replace", done)
		return err
	})
	if err := crash.Fault("host.unit.start.after"); err != nil {
		return err
	}
	switch e := busError(err); {
	case e == errNoUnit:
		return fmt.Errorf("start %s: %w", name, host.ErrNoUnit)
	case strings.HasPrefix(e, "org.freedesktop.systemd1."):
		return fmt.Errorf("start %s: %w: %w", name, host.ErrJob, err)
	case err != nil:
		return fmt.Errorf("start %s: %w", name, err)
	}
	u, err := c.unit(ctx, name)
	if err != nil {
		return fmt.Errorf("start %s: %w", name, err)
	}
	if started(name, u, result) {
		return nil
	}
	c.reap(ctx, name, u)
	return c.jobError(ctx, begin, "start", name, result, u)
}

// reap kills what a mount that failed has left behind: the server of a FUSE file
// system may live on in the unit's control group without a mount.
func (c *Conn) reap(ctx context.Context, name string, u unit) {
	if !strings.HasSuffix(name, ".mount") || Running(u.UnitStatus) {
		return
	}
	// Mostly there is nothing to kill, which is an error too.
	_ = c.call(ctx, c.cfg.CallTimeout, func(ctx context.Context, l *link) error {
		return l.KillUnitWithTarget(ctx, name, sd.All, int32(unix.SIGKILL))
	})
}

// started reports whether a start got there. A service that runs to its end is
// inactive afterwards.
func started(name string, u unit, result string) bool {
	if u.Active == "active" || u.Active == "reloading" {
		return true
	}
	return strings.HasSuffix(name, ".service") && u.Active == "inactive" && u.Result == "success" &&
		u.ConditionMet && (result == "done" || result == "")
}

// StopUnit implements host.UnitController. It asks who uses a mount before it
// stops its unit: systemd would stop the services that require the mount with
// it, so that it is not in use any more when it is unmounted.
func (c *Conn) StopUnit(ctx context.Context, name string) error {
	begin := clock.System{}.Now() // by the clock of the journal
	if busy := c.busy(ctx, name); busy != nil {
		return fmt.Errorf("stop %s: %w", name, busy)
	}
	c.resetFailed(ctx, name)
	if err := crash.Fault("host.unit.stop.before"); err != nil {
		return err
	}
	result, err := c.job(ctx, name, func(ctx context.Context, l *link, done chan<- string) error {
		_, err := l.StopUnitContext(ctx, name, "replace", done)
		return err
	})
	if err := crash.Fault("host.unit.stop.after"); err != nil {
		return err
	}
	if busError(err) == errNoUnit {
		return nil
	}
	if err != nil {
		return fmt.Errorf("stop %s: %w", name, err)
	}
	u, err := c.unit(ctx, name)
	if err != nil {
		return fmt.Errorf("stop %s: %w", name, err)
	}
	if !Running(u.UnitStatus) {
		return nil
	}
	if busy := c.busy(ctx, name); busy != nil {
		return fmt.Errorf("stop %s: %w", name, busy)
	}
	return c.jobError(ctx, begin, "stop", name, result, u)
}

// busy returns an error that names the users of a mount unit's mount point, or
// nil.
func (c *Conn) busy(ctx context.Context, name string) error {
	escaped, ok := strings.CutSuffix(name, ".mount")
	if !ok {
		return nil
	}
	where := sdunit.UnitNamePathUnescape(escaped)
	users, _ := c.cfg.Users(ctx, where) // where they are not known, the error of the job is told
	if len(users) == 0 {
		return nil
	}
	var who []string
	for _, u := range users[:min(len(users), 5)] {
		if u.PID == 0 {
			who = append(who, u.How)
			continue
		}
		who = append(who, fmt.Sprintf("process %d (%s) by its %s", u.PID, u.Command, u.How))
	}
	if more := len(users) - len(who); more > 0 {
		who = append(who, fmt.Sprintf("and %d more", more))
	}
	return fmt.Errorf("%s: %w: %s", where, host.ErrBusy, strings.Join(who, ", "))
}

// resetFailed forgets a failure, which would otherwise stick to the next
// attempt. That it cannot is no reason not to try.
func (c *Conn) resetFailed(ctx context.Context, name string) {
	_ = c.call(ctx, c.cfg.CallTimeout, func(ctx context.Context, l *link) error {
		return l.ResetFailedUnitContext(ctx, name)
	})
}

// ResetFailed forgets the failure of a unit, if there is one.
func (c *Conn) ResetFailed(ctx context.Context, name string) { c.resetFailed(ctx, name) }

// SetUnitEnabled implements host.UnitController. The links are durable when it
// returns; systemd is not reloaded for them.
func (c *Conn) SetUnitEnabled(ctx context.Context, name string, enabled bool) error {
	verb, before, after := "disable", "host.unit.disable.before", "host.unit.disable.after"
	if enabled {
		verb, before, after = "enable", "host.unit.enable.before", "host.unit.enable.after"
	}
	if err := crash.Fault(before); err != nil {
		return err
	}
	var links []string
	err := c.call(ctx, c.cfg.CallTimeout, func(ctx context.Context, l *link) (err error) {
		links, err = setEnabled(ctx, l, name, enabled)
		return err
	})
	if !enabled && (busError(err) == errNoFile || busError(err) == errNoUnitFile || busError(err) == errNoUnit) {
		err = nil
	}
	if err != nil {
		return fmt.Errorf("%s unit %s: %w", verb, name, err)
	}
	for _, path := range links {
		for _, dir := range []string{filepath.Dir(path), filepath.Dir(filepath.Dir(path))} {
			if err := files.SyncDir(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return fmt.Errorf("%s unit %s: %w", verb, name, err)
			}
		}
	}
	return crash.Fault(after)
}

func setEnabled(ctx context.Context, l *link, name string, enabled bool) (links []string, err error) {
	if !enabled {
		changes, err := l.DisableUnitFilesContext(ctx, []string{name}, false)
		for _, ch := range changes {
			links = append(links, ch.Filename)
		}
		return links, err
	}
	_, changes, err := l.EnableUnitFilesContext(ctx, []string{name}, false, true)
	for _, ch := range changes {
		links = append(links, ch.Filename)
	}
	return links, err
}

// StartTransient starts a transient unit and waits until its start job has
// ended. The error wraps [ErrUnitExists] when the name is taken.
func (c *Conn) StartTransient(ctx context.Context, name string, properties []sd.Property) error {
	result, err := c.job(ctx, name, func(ctx context.Context, l *link, done chan<- string) error {
		_, err := l.StartTransientUnitContext(ctx, name, "fail", properties, done)
		return err
	})
	if busError(err) == errUnitExists {
		return fmt.Errorf("start %s: %w", name, ErrUnitExists)
	}
	if err != nil {
		return fmt.Errorf("start %s: %w", name, err)
	}
	if result != "done" && result != "" {
		return fmt.Errorf("start %s: %w: job result %s", name, host.ErrJob, result)
	}
	return nil
}

// job starts a job and waits for its end: for the signal, or until the unit has
// no job any more, since signals get lost. The result is empty when the signal
// was missed.
func (c *Conn) job(ctx context.Context, name string, start func(context.Context, *link, chan<- string) error) (string, error) {
	// The library sends into the channel under its lock, so there must be room
	// for every attempt.
	done := make(chan string, 1)
	err := c.call(ctx, c.cfg.CallTimeout, func(ctx context.Context, l *link) error {
		done = make(chan string, 1)
		return start(ctx, l, done)
	})
	if err != nil {
		return "", err
	}
	pause := 500 * time.Millisecond
	for {
		timer := time.NewTimer(pause)
		select {
		case result := <-done:
			timer.Stop()
			return result, nil
		case <-ctx.Done():
			timer.Stop()
			return "", context.Cause(ctx)
		case <-timer.C:
		}
		u, err := c.unit(ctx, name)
		if err != nil {
			return "", err
		}
		if !u.job {
			return "", nil
		}
		pause = min(2*pause, 2*time.Second)
	}
}

// jobError tells why a unit is not where it should be.
func (c *Conn) jobError(ctx context.Context, begin time.Time, verb, name, result string, u unit) error {
	var b strings.Builder
	fmt.Fprintf(&b, "it is %s (%s)", u.Active, u.Sub)
	if u.Load != "loaded" {
		fmt.Fprintf(&b, ", load state %s", u.Load)
	}
	if u.Result != "" {
		fmt.Fprintf(&b, ", Result=%s", u.Result)
	}
	if result != "" && result != "done" {
		fmt.Fprintf(&b, ", job %s", result)
	}
	if !u.ConditionMet && verb == "start" {
		b.WriteString(", a condition of the unit may not hold")
	}
	if lines := c.cfg.Logs(ctx, name, begin); len(lines) > 0 {
		fmt.Fprintf(&b, "; its last log lines: %s", strings.Join(lines, " | "))
	}
	return fmt.Errorf("%s %s: %w: %s", verb, name, host.ErrJob, b.String())
}
