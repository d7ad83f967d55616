// Package controlplane is the server: it wires the store, the event log, the
// sessions of nodes and the services together, founds a server's state and runs
// it.
package controlplane

import (
	"context"
	"log/slog"
	"net"
	"path/filepath"
	"time"

	"google.golang.org/grpc"

	"github.com/gpuaas/millwright/tasks"

	"github.com/gpuaas/millwright/controlplane/internal/store/boltstore"
	"github.com/gpuaas/millwright/controlplane/internal/store/look"
)

// Config is a server. The fields after Logger may be left zero.
type Config struct {
	// StateDir holds all that the server keeps: store.db, ca/, output/ and
	// secrets/.
	StateDir string
	// Listen is the address of the gRPC port, as host:port.
	Listen string
	// HTTPListen is the address of /healthz, /readyz and /metrics, as host:port.
	HTTPListen string
	// AdvertiseAddress is the address that nodes and operators dial, as
	// host:port.
	AdvertiseAddress string
	// Registry knows the kinds.
	Registry *tasks.Registry
	// Logger gets what an operator of the server should know.
	Logger *slog.Logger

	// Executable is the millwright-server that looks at the store before it is
	// opened, in a process of its own; empty means that this process does.
	Executable string
	// Version is the server's version.
	Version string
	// SecretsKeyFile is the key of the secrets at rest, made when there is none and
	// no secret; empty means secrets.key in StateDir. It belongs into another
	// backup than the rest.
	SecretsKeyFile string
	// Heartbeat is how often each side of a session says something; 0 means 15
	// seconds.
	Heartbeat time.Duration
	// Sweep is how often sessions and the queue are looked at; 0 means a second.
	Sweep time.Duration
	// NodeTTL is the life of a node's certificate; 0 means a day.
	NodeTTL time.Duration
	// HealthHistoryAge and HealthHistoryCount bound what is kept of the history of
	// a node's GPU conditions; 0 means 90 days and 10,000 changes. The log keeps
	// all.
	HealthHistoryAge   time.Duration
	HealthHistoryCount int
	// Listener and HTTPListener are used in place of Listen and HTTPListen, and
	// closed.
	Listener, HTTPListener net.Listener
	// Now is the wall clock; nil means the machine's.
	Now func() time.Time
	// Boot is CLOCK_BOOTTIME; nil means the machine's.
	Boot func() time.Duration
	// Local is given the services before the server serves, behind the same
	// interceptors as the port has; nil means nobody is. Simulations call them
	// without a network, and have no local socket either. It must register nothing that outlives the server.
	Local func(Services)
	// Guard is asked before the store is written, and again when that is durable
	// and nobody has heard of it; nil means that all may be written. An error
	// fails the write, as a disk would. Simulations let the process die there.
	Guard func(written bool) error
}

// Services are what a server serves, and what stands before each call.
type Services struct {
	// Register registers all services.
	Register func(grpc.ServiceRegistrar)
	// Unary and Stream judge the caller by the peer of the context.
	Unary  grpc.UnaryServerInterceptor
	Stream grpc.StreamServerInterceptor
}

// look is how the store is looked at before it is opened.
func (c *Config) look(ctx context.Context) boltstore.Option {
	if c.Executable == "" {
		return boltstore.Look(nil)
	}
	other := look.InAnotherProcess(c.Executable)
	return boltstore.Look(func(path string) error { return other(ctx, path) })
}

func (c *Config) storePath() string { return filepath.Join(c.StateDir, "store.db") }

func (c *Config) caDir() string { return filepath.Join(c.StateDir, "ca") }

func (c *Config) secretsDir() string { return filepath.Join(c.StateDir, "secrets") }

func (c *Config) secretsKey() string {
	if c.SecretsKeyFile != "" {
		return c.SecretsKeyFile
	}
	return filepath.Join(c.StateDir, "secrets.key")
}

func (c *Config) outputDir() string { return filepath.Join(c.StateDir, "output") }
