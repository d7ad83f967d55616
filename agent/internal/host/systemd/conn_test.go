package systemd_test

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/godbus/dbus/v5"

	"github.com/gpuaas/millwright/agent/internal/host/systemd"
	"github.com/gpuaas/millwright/tasks/host"
)

func newConn(dial func(context.Context) (*dbus.Conn, error), patience time.Duration) *systemd.Conn {
	return systemd.New(systemd.Config{
		Logger: slog.New(slog.DiscardHandler), Dial: dial, Patience: patience, CallTimeout: 100 * time.Millisecond,
	})
}

// A bus that is not there is waited for, for a while.
func TestUnreachable(t *testing.T) {
	dials := 0
	c := newConn(func(context.Context) (*dbus.Conn, error) {
		dials++
		return nil, &fs.PathError{Op: "dial", Path: "/run/dbus/system_bus_socket", Err: syscall.ENOENT}
	}, 200*time.Millisecond)
	if _, err := c.Unit(t.Context(), "a.service"); !errors.Is(err, systemd.ErrUnreachable) || !errors.Is(err, syscall.ENOENT) {
		t.Errorf("error %v", err)
	}
	if dials < 3 {
		t.Errorf("dialled %d times", dials)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := c.Unit(ctx, "a.service"); err == nil || errors.Is(err, systemd.ErrUnreachable) {
		t.Errorf("a call that ended: %v", err)
	}
	c.Close()
	if _, err := c.Unit(t.Context(), "a.service"); !errors.Is(err, os.ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
}

// A bus that does not finish its greeting does not hold the caller for ever.
func TestSilentBus(t *testing.T) {
	c := newConn(func(life context.Context) (*dbus.Conn, error) {
		<-life.Done()
		return nil, life.Err()
	}, 300*time.Millisecond)
	if _, err := c.Unit(t.Context(), "a.service"); !errors.Is(err, systemd.ErrUnreachable) {
		t.Errorf("error %v", err)
	}
}

// Any other error is told at once.
func TestRefused(t *testing.T) {
	c := newConn(func(context.Context) (*dbus.Conn, error) { return nil, syscall.EACCES }, time.Hour)
	if err := c.Reload(t.Context()); !errors.Is(err, syscall.EACCES) || errors.Is(err, systemd.ErrUnreachable) {
		t.Errorf("error %v", err)
	}
}

func TestRunning(t *testing.T) {
	for state, want := range map[string]bool{
		"active": true, "activating": true, "deactivating": true, "reloading": true,
		"inactive": false, "failed": false, "": false,
	} {
		if got := systemd.Running(host.UnitStatus{Active: state}); got != want {
			t.Errorf("%q: %v", state, got)
		}
	}
}
