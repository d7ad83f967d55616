// Package containerd runs containers through containerd 1.6 or newer, in the
// namespace millwright and nowhere else.
//
// A container's record, labels and snapshot are containerd's, its process is its
// shim's and its control group systemd's, so that it outlives the agent and
// containerd. It is found again by its name and labels. What a crash has left
// half made is cleared away by the next change to the name.
package containerd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/errdefs"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/gpuaas/millwright/agent/internal/clock"
	"github.com/gpuaas/millwright/tasks/host"
)

const (
	namespace   = "millwright"
	snapshotter = "overlayfs"
	runtimeName = "io.containerd.runc.v2"
	// labelRecord has the SHA-256 of a container's record, and marks it as ours.
	labelRecord = "millwright.io/record"
	labelImage  = "millwright.io/image"
	labelGrace  = "millwright.io/stop-grace"
	// labelOOM is set on a container that was seen to run out of memory.
	labelOOM  = "millwright.io/oom"
	extension = "millwright.io/record"

	// patience is how long an operation waits for a containerd that does not
	// answer: it may be starting.
	patience = time.Minute
	again    = 250 * time.Millisecond
	// callTime bounds calls that must end although the caller has gone.
	callTime = 30 * time.Second
)

// Units are systemd's units, as far as a container's scope needs them.
type Units interface {
	// Unit returns the state of a unit.
	Unit(ctx context.Context, name string) (host.UnitStatus, error)
	// StopUnit stops a unit. One that is not there is no error.
	StopUnit(ctx context.Context, name string) error
}

// Devices know the GPUs of the node.
type Devices interface {
	// CDIEdits returns what the CDI specification wants to be done to a container
	// that is to have devices, in order. One that is not there, or not any more, is
	// [host.ErrGPUUnknown].
	CDIEdits(ctx context.Context, names []string) ([]json.RawMessage, error)
}

// Config is what a [Runtime] needs.
type Config struct {
	// Address is containerd's socket; unset: /run/containerd/containerd.sock.
	Address string
	// LogDir has a directory for each container, with what it writes.
	LogDir string
	// Executable is the absolute path of millwrightd, which keeps the output.
	Executable string
	// Units are systemd's.
	Units Units
	// Devices are the GPUs that containers can have; unset: there are none.
	Devices Devices
	// Settle is how long a container is watched until it counts as running;
	// unset: 1 s.
	Settle time.Duration
	// Clock measures the patience with a containerd that is away.
	Clock clock.Clock
	// Logger gets what is worth telling besides the errors returned.
	Logger *slog.Logger
}

// Runtime is containerd. It is safe for concurrent use.
type Runtime struct {
	cfg Config
	// mu guards client.
	mu     sync.Mutex
	client *client.Client
	// images is held while the store of images is changed.
	images sync.Mutex
}

// New returns containerd. It does no I/O: the connection is made when it is first
// needed, and again whenever it was lost.
func New(cfg Config) *Runtime {
	if cfg.Address == "" {
		cfg.Address = "/run/containerd/containerd.sock"
	}
	if cfg.Settle == 0 {
		cfg.Settle = time.Second
	}
	return &Runtime{cfg: cfg}
}

// Close ends the connection. Containers go on.
func (r *Runtime) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.client == nil {
		return nil
	}
	c := r.client
	r.client = nil
	if err := c.Close(); err != nil {
		return fmt.Errorf("close the connection to containerd: %w", err)
	}
	return nil
}

// connect returns the client, which connects by itself again and again.
func (r *Runtime) connect() (*client.Client, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.client == nil {
		c, err := client.New(r.cfg.Address, client.WithTimeout(5*time.Second))
		if err != nil {
			return nil, fmt.Errorf("connect to containerd at %s: %w", r.cfg.Address, err)
		}
		r.client = c
	}
	return r.client, nil
}

// do calls fn, and again while containerd does not answer, as long as patience
// goes. fn must be fit to be repeated after it was done by half.
func (r *Runtime) do(ctx context.Context, what string, fn func(context.Context, *client.Client) error) error {
	c, err := r.connect()
	if err != nil {
		return err
	}
	ctx = namespaces.WithNamespace(ctx, namespace)
	begin := r.cfg.Clock.Boot()
	for {
		err := fn(ctx, c)
		if err == nil {
			return nil
		}
		if !unavailable(err) || ctx.Err() != nil || r.cfg.Clock.Boot()-begin > patience {
			return fmt.Errorf("%s: %w", what, err)
		}
		r.cfg.Logger.WarnContext(ctx, "containerd does not answer", "doing", what, "err", err)
		if !clock.Sleep(ctx, again) {
			return fmt.Errorf("%s: %w: %w", what, context.Cause(ctx), err)
		}
	}
}

// unavailable reports whether an error means that containerd is away, or that
// it went while it worked.
func unavailable(err error) bool {
	return errdefs.IsUnavailable(err) || status.Code(err) == codes.Unavailable || strings.Contains(err.Error(), "ttrpc: closed")
}

// finishing returns a context for what must be done although the caller has
// gone.
func finishing(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), callTime)
}

// lease keeps what is made under the context it returns from containerd's garbage
// collector until release is called. One that a crash has left is taken over.
func lease(ctx context.Context, c *client.Client, name string) (_ context.Context, release func(), err error) {
	l := leases.Lease{ID: "millwright-" + name}
	_, err = c.LeasesService().Create(ctx, leases.WithID(l.ID), leases.WithExpiration(time.Hour))
	if err != nil && !errdefs.IsAlreadyExists(err) {
		return nil, nil, fmt.Errorf("take a lease: %w", err)
	}
	release = func() {
		ctx, cancel := finishing(ctx)
		defer cancel()
		_ = c.LeasesService().Delete(ctx, l) // it expires by itself
	}
	return leases.WithLease(ctx, l.ID), release, nil
}

// scope is the systemd unit that a container's processes are in.
func scope(name string) string { return "millwright-container-" + name + ".scope" }

func (r *Runtime) logDir(name string) string { return filepath.Join(r.cfg.LogDir, name) }

// hostError maps containerd's classes of errors to those of package host.
func hostError(err error) error {
	switch {
	case errdefs.IsNotFound(err):
		return errors.Join(err, fs.ErrNotExist)
	case errdefs.IsAlreadyExists(err):
		return errors.Join(err, fs.ErrExist)
	}
	return err
}
