// Package child runs programs that may hang: the agent's own probes, readers of
// the system's state, and the one that asks the GPU driver. Each has a process group of its own and a
// cap on its output; short ones have a deadline. One that does not end is killed and not
// waited for: a process that the kernel holds may stay for ever.
package child

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os/exec"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// ErrStuck is returned when a child with the same key was killed and is still
// there. It comes with context.DeadlineExceeded.
var ErrStuck = errors.New("a child that was killed before has not ended")

// SignalError is wrapped by the error of a program that a signal ended.
type SignalError struct {
	Signal syscall.Signal
	State  string // in the kernel's words
}

// Error is the state in the kernel's words.
func (e *SignalError) Error() string { return e.State }

// Config is what a [Runner] needs.
type Config struct {
	// Logger is told when a child is abandoned.
	Logger *slog.Logger
	// Kill ends the process group of a program that Start started; optional,
	// SIGKILL. With another a process can stand in for one that the kernel holds.
	Kill func(pid int) error
}

// environment is that of every child, whatever the agent's own is.
func environment() []string {
	return []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C"}
}

// Spec is a program to run.
type Spec struct {
	// Argv is the program, as an absolute path, and its arguments.
	Argv []string
	// Timeout bounds it.
	Timeout time.Duration
	// Key names what it may hang on: of all children with one key at most one
	// exists. Unset: no such bound.
	Key string
	// MaxOutput is the most that is kept of each stream; unset: 64 KiB.
	MaxOutput int
	// Environment is what it has besides PATH and LC_ALL, as KEY=VALUE.
	Environment []string
	// Input is its standard input; unset: none.
	Input []byte
}

// Result is what a program did that ended by itself.
type Result struct {
	ExitCode       int
	Stdout, Stderr []byte
}

// Runner runs children. It is safe for concurrent use.
type Runner struct {
	cfg     Config
	mu      sync.Mutex
	slots   map[string]*slot
	reapers sync.WaitGroup
}

// slot is the one child of a key.
type slot struct {
	gone  chan struct{} // closed when it was reaped
	stuck chan struct{} // closed when it was abandoned
}

// New returns a Runner.
func New(cfg Config) *Runner { return &Runner{cfg: cfg, slots: map[string]*slot{}} }

// Wait waits until every child has been reaped, or ctx ends.
func (r *Runner) Wait(ctx context.Context) error {
	done := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() { r.reapers.Wait(); close(done) })
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for children: %w", context.Cause(ctx))
	}
}

// Run runs a program to its end. A program that exits with a code other than 0
// is no error. When its time is over, or ctx ends, it is killed, and the error
// wraps context.DeadlineExceeded or the cause of ctx.
func (r *Runner) Run(ctx context.Context, s Spec) (Result, error) {
	if s.MaxOutput == 0 {
		s.MaxOutput = 64 << 10
	}
	ctx, cancel := context.WithTimeout(ctx, s.Timeout)
	defer cancel()
	mine, err := r.claim(ctx, s.Key)
	if err != nil {
		return Result{}, fmt.Errorf("run %s: %w", s.Argv[0], err)
	}
	p, err := r.start(s, mine)
	if err != nil {
		r.release(s.Key, mine)
		return Result{}, fmt.Errorf("run %s: %w", s.Argv[0], err)
	}
	select {
	case <-p.ended:
		return p.result()
	case <-ctx.Done():
	}
	_ = unix.Kill(-p.cmd.Process.Pid, unix.SIGKILL) // it may have ended just now
	return p.afterKill(ctx, mine, r.cfg.Logger)
}

// claim waits until no child has the key.
func (r *Runner) claim(ctx context.Context, key string) (*slot, error) {
	mine := &slot{gone: make(chan struct{}), stuck: make(chan struct{})}
	if key == "" {
		return mine, nil
	}
	for {
		r.mu.Lock()
		other := r.slots[key]
		if other == nil {
			r.slots[key] = mine
		}
		r.mu.Unlock()
		if other == nil {
			return mine, nil
		}
		select {
		case <-other.gone:
		case <-other.stuck:
			return nil, fmt.Errorf("%w: %w", ErrStuck, context.DeadlineExceeded)
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

func (r *Runner) release(key string, s *slot) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.slots[key] == s {
		delete(r.slots, key)
	}
	close(s.gone)
}

// process is a child that was started.
type process struct {
	cmd            *exec.Cmd
	name           string
	stdout, stderr capped
	ended          chan struct{} // closed when it was reaped and its output read
	err            error         // of Wait; valid once ended is closed
}

func (r *Runner) start(s Spec, mine *slot) (*process, error) {
	p := &process{name: s.Argv[0], ended: make(chan struct{})}
	p.stdout.limit, p.stderr.limit = s.MaxOutput, s.MaxOutput
	p.cmd = &exec.Cmd{
		Path: s.Argv[0], Args: s.Argv, Dir: "/",
		Env:         append(environment(), s.Environment...),
		SysProcAttr: &syscall.SysProcAttr{Setpgid: true},
	}
	p.cmd.Stdout, p.cmd.Stderr = &p.stdout, &p.stderr
	if len(s.Input) > 0 {
		p.cmd.Stdin = bytes.NewReader(s.Input)
	}
	p.cmd.WaitDelay = time.Second // for a grandchild that keeps the pipe
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	r.reapers.Go(func() {
		p.err = p.cmd.Wait()
		close(p.ended)
		r.release(s.Key, mine)
	})
	return p, nil
}

func (p *process) result() (Result, error) {
	var exit *exec.ExitError
	if p.err != nil && !errors.As(p.err, &exit) && !errors.Is(p.err, exec.ErrWaitDelay) {
		return Result{}, fmt.Errorf("run %s: %w", p.name, p.err)
	}
	if !p.cmd.ProcessState.Exited() {
		err := &SignalError{State: p.cmd.ProcessState.String()}
		if st, ok := p.cmd.ProcessState.Sys().(syscall.WaitStatus); ok {
			err.Signal = st.Signal()
		}
		return Result{}, fmt.Errorf("run %s: %w", p.name, err)
	}
	return Result{ExitCode: p.cmd.ProcessState.ExitCode(), Stdout: p.stdout.Bytes(), Stderr: p.stderr.Bytes()}, nil
}

// killWait is how long a killed child has to vanish before it is abandoned.
const killWait = 200 * time.Millisecond

func (p *process) afterKill(ctx context.Context, mine *slot, log *slog.Logger) (Result, error) {
	cause := context.Cause(ctx)
	timer := time.NewTimer(killWait)
	defer timer.Stop()
	select {
	case <-p.ended:
		return Result{}, fmt.Errorf("run %s: killed: %w", p.name, cause)
	case <-timer.C:
	}
	close(mine.stuck)
	log.Warn("child abandoned", "program", p.name, "pid", p.cmd.Process.Pid)
	return Result{}, fmt.Errorf("run %s: killed, and it has not ended: %w", p.name, cause)
}

// capped keeps the first bytes that are written to it.
type capped struct {
	buf   bytes.Buffer
	limit int
}

func (c *capped) Write(p []byte) (int, error) {
	c.buf.Write(p[:min(len(p), c.limit-c.buf.Len())])
	return len(p), nil
}

// Bytes returns what was kept.
func (c *capped) Bytes() []byte { return c.buf.Bytes() }
