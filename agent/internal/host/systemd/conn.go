// Package systemd reaches systemd over the bus. The connection is made when it
// is needed and made again when it was lost: the bus goes away when dbus is
// restarted, and systemd forgets its clients when it executes itself again.
// Every call has a deadline, and a job whose end is not signalled is found to
// have ended by asking for the unit's state.
package systemd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strconv"
	"sync"
	"syscall"
	"time"

	sd "github.com/coreos/go-systemd/v22/dbus"
	"github.com/godbus/dbus/v5"

	"github.com/gpuaas/millwright/tasks/host"
)

// Config is what a [Conn] needs.
type Config struct {
	// Logger is told when the connection was lost.
	Logger *slog.Logger
	// Users names who keeps a mount busy.
	Users func(ctx context.Context, target string) ([]host.Use, error)
	// Logs returns the last lines that were logged by and about a unit.
	Logs func(ctx context.Context, unit string, since time.Time) []string
	// Dial connects to the bus; the connection lives until ctx ends, and is ready
	// for calls. Unset: the system bus, and for root systemd's own socket when
	// there is no bus.
	Dial func(ctx context.Context) (*dbus.Conn, error)
	// CallTimeout bounds one call; unset: 10 s.
	CallTimeout time.Duration
	// ReloadTimeout bounds a reload; unset: 90 s.
	ReloadTimeout time.Duration
	// Patience is how long a call is repeated while the connection fails; unset:
	// 30 s.
	Patience time.Duration
}

// ErrUnreachable is wrapped by the error of a call that found no systemd, or
// got no answer, for as long as the configuration's patience lasts.
var ErrUnreachable = errors.New("systemd does not answer")

// Conn implements host.UnitReader and host.UnitController. It is safe for
// concurrent use.
type Conn struct {
	cfg Config

	mu   sync.Mutex
	link *link
	shut bool
}

// link is one connection with the end of its life.
type link struct {
	*sd.Conn
	bus *dbus.Conn // for calls that the library lacks
	end context.CancelFunc
}

// New returns a Conn that is not connected yet.
func New(cfg Config) *Conn {
	if cfg.Dial == nil {
		cfg.Dial = dialSystem
	}
	for _, d := range []struct {
		have  *time.Duration
		unset time.Duration
	}{{&cfg.CallTimeout, 10 * time.Second}, {&cfg.ReloadTimeout, 90 * time.Second}, {&cfg.Patience, 30 * time.Second}} {
		if *d.have == 0 {
			*d.have = d.unset
		}
	}
	return &Conn{cfg: cfg}
}

func dialSystem(ctx context.Context) (*dbus.Conn, error) {
	bus, err := ready(dbus.SystemBusPrivate(dbus.WithContext(ctx)))
	if err == nil {
		err = bus.Hello()
	}
	if err == nil {
		return bus, nil
	}
	if bus != nil {
		_ = bus.Close() // it did not come up
	}
	if os.Geteuid() != 0 || ctx.Err() != nil {
		return nil, err
	}
	own, err2 := ready(dbus.Dial("unix:path=/run/systemd/private", dbus.WithContext(ctx)))
	if err2 != nil {
		return nil, errors.Join(err, err2)
	}
	return own, nil
}

// ready authenticates a new connection.
func ready(bus *dbus.Conn, err error) (*dbus.Conn, error) {
	if err != nil {
		return nil, err
	}
	if err := bus.Auth([]dbus.Auth{dbus.AuthExternal(strconv.Itoa(os.Getuid()))}); err != nil {
		_ = bus.Close() // it did not come up
		return nil, err
	}
	return bus, nil
}

// Close ends the connection. Calls after it fail.
func (c *Conn) Close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.shut = true
	c.drop()
}

func (c *Conn) drop() {
	if c.link != nil {
		c.link.Close()
		c.link.end()
		c.link = nil
	}
}

// connected returns the connection, making it when there is none that works.
func (c *Conn) connected() (*link, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.shut {
		return nil, fmt.Errorf("connect to systemd: %w", os.ErrClosed)
	}
	if c.link != nil && c.link.Connected() {
		return c.link, nil
	}
	c.drop()
	// The connection outlives the call that makes it, so the call's context is
	// not its own; one that cannot be made in time is ended by hand.
	life, end := context.WithCancel(context.Background())
	late := time.AfterFunc(c.cfg.CallTimeout, end)
	var bus *dbus.Conn
	conn, err := sd.NewConnection(func() (*dbus.Conn, error) {
		one, err := c.cfg.Dial(life)
		if bus == nil {
			bus = one // the first one is that for calls
		}
		return one, err
	})
	if !late.Stop() && err == nil {
		conn.Close()
		err = context.DeadlineExceeded
	}
	if err != nil {
		end()
		return nil, fmt.Errorf("connect to systemd: %w", err)
	}
	c.link = &link{Conn: conn, bus: bus, end: end}
	return c.link, nil
}

// discard drops a connection that failed, unless another caller did so already.
func (c *Conn) discard(l *link, why error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.link == l {
		c.cfg.Logger.Warn("connection to systemd lost", "err", why)
		c.drop()
	}
}

// call does one call with a deadline, and again after a pause for as long as the
// connection is at fault. So whatever do asks of systemd must bear repetition.
func (c *Conn) call(ctx context.Context, limit time.Duration, do func(context.Context, *link) error) error {
	patience := time.NewTimer(c.cfg.Patience)
	defer patience.Stop()
	pause := 20 * time.Millisecond
	for {
		err := c.once(ctx, limit, do)
		if err == nil || ctx.Err() != nil || !connectionFault(err) {
			return err
		}
		wait := time.NewTimer(pause)
		select {
		case <-ctx.Done():
			wait.Stop()
			return err
		case <-patience.C:
			wait.Stop()
			return fmt.Errorf("%w: %w", ErrUnreachable, err)
		case <-wait.C:
		}
		pause = min(2*pause, time.Second)
	}
}

func (c *Conn) once(ctx context.Context, limit time.Duration, do func(context.Context, *link) error) error {
	l, err := c.connected()
	if err != nil {
		return err
	}
	ctx2, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	err = do(ctx2, l)
	if err != nil && ctx.Err() == nil && connectionFault(err) {
		c.discard(l, err)
	}
	return err
}

// connectionFault reports whether the call may succeed over a new connection.
func connectionFault(err error) bool {
	for _, target := range []error{
		dbus.ErrClosed, io.EOF, io.ErrUnexpectedEOF, context.DeadlineExceeded, context.Canceled,
		syscall.EPIPE, syscall.ECONNRESET, syscall.ECONNREFUSED, syscall.ENOENT,
	} {
		if errors.Is(err, target) {
			return true
		}
	}
	switch busError(err) {
	case "org.freedesktop.DBus.Error.NoReply", "org.freedesktop.DBus.Error.Disconnected",
		"org.freedesktop.DBus.Error.NameHasNoOwner", "org.freedesktop.DBus.Error.Timeout",
		"org.freedesktop.DBus.Error.TimedOut", "org.freedesktop.DBus.Error.NoServer",
		"org.freedesktop.DBus.Error.ServiceUnknown":
		return true
	}
	return false
}

// busError is the name of the error that the bus returned, or empty.
func busError(err error) string {
	var e dbus.Error
	if errors.As(err, &e) {
		return e.Name
	}
	return ""
}
