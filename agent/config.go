package agent

import (
	"context"
	"log/slog"
	"net"
	"time"

	"github.com/gpuaas/millwright/agent/internal/clock"
	"github.com/gpuaas/millwright/agent/internal/gpu"
	"github.com/gpuaas/millwright/agent/internal/health/xid"
	"github.com/gpuaas/millwright/agent/internal/session"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
)

// Hosts are the node, as tasks see it.
type Hosts interface {
	// ForStep returns the host of one step of a task.
	ForStep(taskID string, step uint32) host.Host
	// Prober returns the host for plans and checks.
	Prober() host.Prober
}

// SecretTaker is a [Hosts] that gets the values of secrets from the agent, as the
// machine itself does.
type SecretTaker interface {
	TakeSecrets(fetch func(ctx context.Context, taskID, reference string) ([]byte, error))
}

// Conn is a connection to the control plane.
type Conn = session.Conn

// Config is what an agent needs. Fields without "optional" must be set.
type Config struct {
	// StateDir holds the journal, the identity and the commands' files.
	StateDir string
	// RunDir holds the local socket. Empty: there is none.
	RunDir string
	// PolicyFile is the node's own policy.
	PolicyFile string
	// JoinFile is the join bundle, read while the node has no identity.
	JoinFile string
	// Executable is the absolute path of millwrightd, which is also the shim
	// and the probe child.
	Executable string
	// Version is the agent's version.
	Version string
	// Registry knows the kinds.
	Registry *tasks.Registry
	// Logger takes all that is logged.
	Logger *slog.Logger

	// Server replaces the address in the join bundle; optional.
	Server string
	// SocketGroup may read over the local socket; optional.
	SocketGroup string
	// Labels are told to the control plane; optional.
	Labels map[string]string
	// OutputBytesPerSecond is the pace of the outputs; optional, 256 KiB.
	OutputBytesPerSecond int
	// OutputRetention is how long outputs are kept that the server never
	// acknowledged; optional, 7 days.
	OutputRetention time.Duration
	// RebootsMost is how many reboots tasks may ask for within RebootsWithin; 0
	// with 0: none.
	RebootsMost   int
	RebootsWithin time.Duration
	// ScrubAfter is how long after its start the agent looks at all of its journal
	// for the first time; optional, a minute.
	ScrubAfter time.Duration
	// GPUMode is whether the GPUs are asked; optional, off.
	GPUMode gpu.Mode
	// GPUProgram is the absolute path of millwright-gpu; unset with GPUMode off.
	GPUProgram string
	// GPULibrary is the NVML library; optional, the system's.
	GPULibrary string
	// GPUPeriod is how often the GPUs are looked at, and the longest pause after
	// which a driver that could not be asked is asked again; optional, 10 s.
	GPUPeriod time.Duration
	// GPUSlowPeriod is how often the values are read that change slowly or cost
	// more; optional, a minute.
	GPUSlowPeriod time.Duration
	// GPUExpected is how many GPUs the node should have; optional, as many as the
	// PCI bus has and as there were.
	GPUExpected int
	// XIDs are the operator's own words on XIDs; optional.
	XIDs []xid.Override
	// KernelLog is the kernel's log, in which errors of GPUs are looked for;
	// optional, none.
	KernelLog string
	// Clock tells the time; optional, the machine's.
	Clock clock.Clock
	// Synchronised says whether the kernel knows its clock to be right; optional,
	// the machine's word, and false with another clock.
	Synchronised func() bool
	// Hosts are what tasks act upon; optional, this machine.
	Hosts Hosts
	// Dial makes the connections to the control plane; optional.
	Dial func(ctx context.Context, address string) (net.Conn, error)
	// Connect makes the connections of sessions in place of Dial, TLS and gRPC;
	// optional. Simulations deliver messages by hand with it.
	Connect func(server string) (Conn, error)
	// Guard is asked before the journal is written, and again when that is
	// durable and nobody has heard of it; optional. An error fails the write, as
	// a disk would. Simulations let a process die there.
	Guard func(written bool) error
	// Jitter returns a time between 0 and d, by which pauses between sessions
	// differ; optional, random.
	Jitter func(d time.Duration) time.Duration
	// Notify tells the service manager of a change, as sd_notify does; optional.
	Notify func(state string)
	// Watchdog is how often the service manager wants a sign of life; optional,
	// 0 for never.
	Watchdog time.Duration
}

func (c Config) withDefaults() Config {
	if c.Clock == nil {
		c.Clock, c.Synchronised = clock.System{}, clock.System{}.Synchronised
	}
	if c.Synchronised == nil {
		c.Synchronised = func() bool { return false }
	}
	if c.Dial == nil {
		d := &net.Dialer{Timeout: 20 * time.Second}
		c.Dial = func(ctx context.Context, address string) (net.Conn, error) { return d.DialContext(ctx, "tcp", address) }
	}
	if c.ScrubAfter == 0 {
		c.ScrubAfter = time.Minute
	}
	if c.GPUMode == "" {
		c.GPUMode = gpu.Off
	}
	if c.GPUPeriod == 0 {
		c.GPUPeriod = 10 * time.Second
	}
	if c.GPUSlowPeriod == 0 {
		c.GPUSlowPeriod = max(time.Minute, c.GPUPeriod)
	}
	if c.Notify == nil {
		c.Notify = func(string) {}
	}
	return c
}
