// Package nodehost is the machine as the agent's tasks see it. It implements
// package host over systemd, the kernel and the shim, and nothing else in the
// agent touches the machine.
package nodehost

import (
	"context"
	"errors"
	"log/slog"
	"path/filepath"
	"time"

	"github.com/gpuaas/millwright/agent/internal/child"
	"github.com/gpuaas/millwright/agent/internal/clock"
	"github.com/gpuaas/millwright/agent/internal/host/command"
	"github.com/gpuaas/millwright/agent/internal/host/containerd"
	"github.com/gpuaas/millwright/agent/internal/host/disks"
	"github.com/gpuaas/millwright/agent/internal/host/files"
	"github.com/gpuaas/millwright/agent/internal/host/gpus"
	"github.com/gpuaas/millwright/agent/internal/host/mounts"
	"github.com/gpuaas/millwright/agent/internal/host/packages"
	"github.com/gpuaas/millwright/agent/internal/host/secrets"
	"github.com/gpuaas/millwright/agent/internal/host/slurm"
	"github.com/gpuaas/millwright/agent/internal/host/systemd"
	"github.com/gpuaas/millwright/agent/internal/shim"
	healthv1 "github.com/gpuaas/millwright/proto/millwright/health/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks/host"
)

// Config is what a [Node] needs.
type Config struct {
	// StateDir holds the commands' directories, below commands/, and those of
	// containers, below containers/, and what is kept of packages, below
	// packages/.
	StateDir string
	// Executable is the absolute path of millwrightd, which serves as the shim
	// and as the probe child. It must be able to start after an upgrade too:
	// /proc/self/exe is not fit.
	Executable string
	// Clock is the agent's clock.
	Clock clock.Clock
	// Logger gets what is worth telling besides the errors returned.
	Logger *slog.Logger
	// Secrets gets the values of secrets; nil: none can be had.
	Secrets secrets.Fetcher
	// ProbeTimeout bounds one probe; unset: 10 s.
	ProbeTimeout time.Duration
	// GPUProgram is the path of millwright-gpu; unset: the GPUs are left alone.
	GPUProgram string
	// GPULibrary is the NVML library; unset: the system's.
	GPULibrary string
	// QuietGPUs ends the program that samples the GPUs until resume is called.
	QuietGPUs func(ctx context.Context) (resume func(), err error)
	// GPUConditions has the GPUs looked at anew, and returns what the health rules
	// say; unset: nobody looks after them.
	GPUConditions func(ctx context.Context) ([]*healthv1.Condition, error)
	// GPUIntents says of each intent that lays GPUs out whether it holds; unset:
	// there are none.
	GPUIntents func(ctx context.Context) ([]host.GPUIntent, error)
	// PackageLockWait is how long other programs may hold the package database;
	// unset: 2 minutes.
	PackageLockWait time.Duration
}

// Node is the machine. It is safe for concurrent use.
type Node struct {
	surface  *surface
	commands *command.Runner
	systemd  *systemd.Conn
	children *child.Runner
}

// New returns the machine on which it runs. It does no I/O: the connection to
// systemd is made when it is first needed, and again whenever it was lost.
func New(cfg Config) *Node {
	if cfg.ProbeTimeout == 0 {
		cfg.ProbeTimeout = 10 * time.Second
	}
	children := child.New(child.Config{Logger: cfg.Logger})
	table := mounts.New(mounts.Config{})
	fs := files.New()
	sd := systemd.New(systemd.Config{
		Logger: cfg.Logger,
		Users:  table.Users,
		Logs:   journal{children}.lastLines,
	})
	set := gpus.New(gpus.Config{
		Program: cfg.GPUProgram, Library: cfg.GPULibrary, Quiesce: cfg.QuietGPUs, Children: children, Files: fs, Find: findProgram,
		Changes: gpus.InUnits(sd, filepath.Join(cfg.StateDir, "gpus")), Conditions: cfg.GPUConditions, Intents: cfg.GPUIntents,
	})
	return &Node{
		systemd:  sd,
		children: children,
		commands: command.New(command.Config{
			StateDir: cfg.StateDir, Executable: cfg.Executable,
			Clock: cfg.Clock, Logger: cfg.Logger, Systemd: sd,
		}),
		surface: &surface{
			Conn: sd, Table: table, files: fs, network: network{children},
			secrets: secrets.New(secrets.Config{Dir: filepath.Join(cfg.StateDir, "secrets"), Files: fs, Fetcher: cfg.Secrets}),
			Set:     disks.New(disks.Config{Children: children, Changes: disks.InUnits(sd), Find: findProgram}),
			Runtime: containerd.New(containerd.Config{
				LogDir: filepath.Join(cfg.StateDir, "containers"), Executable: cfg.Executable, Units: sd, Devices: set,
				Clock: cfg.Clock, Logger: cfg.Logger,
			}),
			Native: packages.New(packages.Config{
				Dir: filepath.Join(cfg.StateDir, "packages"), Children: children, Units: sd,
				Clock: cfg.Clock, Logger: cfg.Logger, LockWait: cfg.PackageLockWait,
			}),
			gpuSet: gpuSet{set},
			Client: slurm.New(slurm.Config{Children: children, Find: findProgram, Clock: cfg.Clock}),
			probe:  prober{children: children, executable: cfg.Executable, timeout: cfg.ProbeTimeout},
		},
	}
}

// ForStep returns the host for a step of a task: its RunCommand runs the one
// command of that step.
func (n *Node) ForStep(taskID string, step uint32) host.Host {
	return stepHost{surface: n.surface, commands: n.commands, id: shim.ID{TaskID: taskID, Step: step, Attempt: 1}}
}

// Forget deletes what the steps of a task have kept of secrets: it has ended.
func (n *Node) Forget(ctx context.Context, taskID string) error {
	return n.surface.secrets.Forget(ctx, taskID)
}

// Kept returns the tasks of which something is kept.
func (n *Node) Kept() ([]string, error) { return n.surface.secrets.Kept() }

// Prober returns the host for plans and checks. It changes nothing.
func (n *Node) Prober() host.Prober {
	return struct{ host.Prober }{n.surface}
}

// Output describes what a stream of a step's command has written until now. It
// is fs.ErrNotExist when the step has no command or its output was deleted.
func (n *Node) Output(taskID string, step uint32, stream taskv1.Stream) (command.Output, error) {
	return n.commands.Output(shim.ID{TaskID: taskID, Step: step, Attempt: 1}, stream)
}

// ReadHead reads into p from the head of a stream, from offset on. Like an
// io.ReaderAt it returns io.EOF with less than len(p) at the present end; while
// the command runs the head may still grow.
func (n *Node) ReadHead(taskID string, step uint32, stream taskv1.Stream, p []byte, offset int64) (int, error) {
	return n.commands.ReadHead(shim.ID{TaskID: taskID, Step: step, Attempt: 1}, stream, p, offset)
}

// ReadTail reads likewise from the tail, which is there once the command has
// ended.
func (n *Node) ReadTail(taskID string, step uint32, stream taskv1.Stream, p []byte, offset int64) (int, error) {
	return n.commands.ReadTail(shim.ID{TaskID: taskID, Step: step, Attempt: 1}, stream, p, offset)
}

// Commands returns the steps that have a command's directory, in any order.
func (n *Node) Commands() ([]shim.ID, error) { return n.commands.List() }

// DeleteCommands deletes the records and the output of all commands of a task.
// It must not be called before the task has ended and its events are durable on
// the server: without its record a command counts as never started. Deleting
// what is not there is no error.
func (n *Node) DeleteCommands(taskID string) error { return n.commands.Delete(taskID) }

// Close ends the connections to systemd and containerd and waits until ctx ends at most for
// children that were killed. Commands and containers go on.
func (n *Node) Close(ctx context.Context) error {
	n.surface.gpuSet.Close()
	n.systemd.Close()
	return errors.Join(n.surface.Runtime.Close(), n.children.Wait(ctx))
}
