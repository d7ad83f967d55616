// Package agent is the node's side of Millwright: it joins the cluster, keeps a
// session with the control plane, and carries out signed tasks that the node's
// own policy allows. This package wires the parts together.
package agent

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"
	"unicode"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"

	"github.com/gpuaas/millwright/agent/internal/child"
	"github.com/gpuaas/millwright/agent/internal/clock"
	"github.com/gpuaas/millwright/agent/internal/enrol"
	"github.com/gpuaas/millwright/agent/internal/gpu"
	"github.com/gpuaas/millwright/agent/internal/local"
)

// Agent is one node's agent. Run is called once.
type Agent struct {
	cfg  Config
	log  *slog.Logger
	time *clock.HighWater
	gpu  *gpu.Supervisor

	mu      sync.Mutex
	node    *node // what works now; nil while nothing does; guarded by mu
	problem error // why nothing works; guarded by mu
	safe    *safe // safe mode; nil when not in it; guarded by mu
}

// New returns an agent that does nothing until Run.
func New(cfg Config) *Agent {
	cfg = cfg.withDefaults()
	log := cfg.Logger.With("component", "gpu")
	asks := gpu.New(gpu.Config{
		Mode: cfg.GPUMode, Program: cfg.GPUProgram, Library: cfg.GPULibrary, Pause: cfg.GPUPeriod,
		Runner: child.New(child.Config{Logger: log}), Logger: log, Clock: cfg.Clock,
	})
	return &Agent{cfg: cfg, log: cfg.Logger, gpu: asks, time: clock.NewHighWater(cfg.Clock, cfg.Synchronised), problem: errors.New("the agent is starting")}
}

// gpuProgram is what tasks ask the GPUs with; none with gpu.mode off.
func (a *Agent) gpuProgram() string {
	if a.cfg.GPUMode == gpu.Off {
		return ""
	}
	return a.cfg.GPUProgram
}

// Run serves the node until ctx ends, and returns nil then. Commands that run
// are left running, to be found again. A missing identity, an unreachable
// server or a state file that cannot be opened does not end it: it says so on
// the local socket and tries again. An error means that it could not even serve
// that socket.
func (a *Agent) Run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		if a.cfg.RunDir == "" {
			return nil
		}
		return local.New(local.Config{
			Node: (*answers)(a), RunDir: a.cfg.RunDir, Group: a.cfg.SocketGroup, Logger: a.log.With("component", "local"),
			Ready: func() { a.cfg.Notify("READY=1") },
		}).Run(ctx)
	})
	g.Go(func() error { a.serve(ctx); return nil })
	g.Go(func() error {
		a.awaitGPUChange(ctx)
		return a.gpu.Run(ctx)
	})
	g.Go(func() error { a.watchdog(ctx); return nil })
	g.Go(func() error {
		<-ctx.Done()
		a.cfg.Notify("STOPPING=1")
		return nil
	})
	err := g.Wait()
	a.log.Info("agent stopped")
	return err
}

// The pauses between tries at what only a person, or time, can mend.
const (
	lookForBundle = 2 * time.Second
	tryAgain      = 30 * time.Second
	joinAgain     = 2 * time.Minute // it interrupts the work, so not too often
)

// serve joins and then works, again and again, until ctx ends.
func (a *Agent) serve(ctx context.Context) {
	e, joined := a.enrol(ctx)
	replaced := false
	for ctx.Err() == nil {
		err := a.work(ctx, e, joined)
		switch {
		case ctx.Err() != nil:
			return
		case errors.Is(err, errNewJournal):
			a.log.WarnContext(ctx, "a new journal begins, since the server has seen more of this one than is here")
			// A server that always says so must not make a loop of journals.
			if replaced {
				clock.Sleep(ctx, tryAgain)
			}
			replaced = true
		case errors.Is(err, errDamaged):
			a.log.ErrorContext(ctx, "the journal is looked at as a whole", "err", err)
		case errors.Is(err, errClockReset):
			a.log.WarnContext(ctx, "the clock was reset by root: windows and the floor are counted anew")
		case errors.Is(err, errNewBundle):
			a.log.InfoContext(ctx, "there is a new join bundle")
			e, joined = a.enrol(ctx)
		default:
			a.stopped(err)
			a.log.ErrorContext(ctx, "no work can be done", "err", err, "retry_in", tryAgain)
			clock.Sleep(ctx, tryAgain)
		}
	}
}

// enrol returns the node's enrolment, and whether the node joined just now. It
// waits for a bundle that works as long as ctx lasts.
func (a *Agent) enrol(ctx context.Context) (e *enrol.Enrolment, joined bool) {
	cfg := enrol.Config{
		Dir: filepath.Join(a.cfg.StateDir, "identity"), Now: a.time.Now, Boot: a.time.Boot,
		Log: a.log.With("component", "enrol"), Server: a.cfg.Server,
		DialOptions: []grpc.DialOption{grpc.WithContextDialer(a.cfg.Dial)},
	}
	_, err := enrol.Open(cfg)
	joined = errors.Is(err, enrol.ErrNotJoined)
	for ctx.Err() == nil {
		before := stamp(a.cfg.JoinFile)
		e, err = enrol.Ensure(ctx, cfg, a.cfg.JoinFile)
		if err == nil {
			return e, joined
		}
		if ctx.Err() != nil {
			break
		}
		a.stopped(err)
		a.status("waiting: " + err.Error())
		a.log.ErrorContext(ctx, "the node has no identity", "err", err)
		// The same bundle would get the same answer.
		for ctx.Err() == nil && stamp(a.cfg.JoinFile) == before {
			clock.Sleep(ctx, lookForBundle)
		}
	}
	return nil, false
}

// fileStamp tells whether a file was changed.
type fileStamp struct {
	size    int64
	changed time.Time
	missing bool
}

func stamp(path string) fileStamp {
	info, err := os.Stat(path)
	if err != nil {
		return fileStamp{missing: errors.Is(err, fs.ErrNotExist)}
	}
	return fileStamp{size: info.Size(), changed: info.ModTime()}
}

// status tells the service manager in one line how the agent is. The text may
// come from a server, and a line break in it would begin another assignment.
func (a *Agent) status(text string) {
	a.cfg.Notify("STATUS=" + strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return ' '
		}
		return r
	}, text))
}

func (a *Agent) started(n *node) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.node, a.problem = n, nil
}

func (a *Agent) stopped(why error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.node, a.problem = nil, why
}

// current returns what works now, or why nothing does.
func (a *Agent) current() (*node, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.node, a.problem
}

// watchdog tells the service manager that the agent makes progress, as long as
// it does: a journal or a lock that hangs stops the signs of life.
func (a *Agent) watchdog(ctx context.Context) {
	if a.cfg.Watchdog <= 0 {
		return
	}
	for clock.Sleep(ctx, a.cfg.Watchdog/3) {
		if n, _ := a.current(); n != nil {
			if err := n.alive(ctx); err != nil {
				a.log.ErrorContext(ctx, "no sign of life given", "err", err)
				continue
			}
		}
		a.cfg.Notify("WATCHDOG=1")
	}
}
