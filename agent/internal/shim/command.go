package shim

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/gpuaas/millwright/agent/internal/clock"
	"github.com/gpuaas/millwright/agent/internal/crash"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// command is one run of a program.
type command struct {
	dir   Dir
	spec  *taskv1.CommandStep
	clock clock.Clock
	stop  <-chan os.Signal

	cmd            *exec.Cmd
	stdout, stderr *stream
	totals         *totals

	stopping bool          // SIGTERM was sent
	killAt   time.Duration // by the boot clock, once stopping
	timedOut bool
}

// run starts the program and waits for its end. An error means that the program
// was not started.
func (c *command) run() (*taskv1.CommandOutcome, error) {
	var err error
	if c.stdout, err = openStream(c.dir, taskv1.Stream_STREAM_STDOUT); err != nil {
		return nil, err
	}
	if c.stderr, err = openStream(c.dir, taskv1.Stream_STREAM_STDERR); err != nil {
		return nil, err
	}
	if c.totals, err = openTotals(c.dir.TotalsPath(), c.stdout, c.stderr); err != nil {
		return nil, err
	}
	crash.Point("shim.opened")
	killed := oomKills()
	begin := c.clock.Boot()
	if err := c.start(); err != nil {
		return nil, err
	}
	crash.Point("shim.started")
	var wg sync.WaitGroup
	drained := make(chan struct{}, 2)
	for _, s := range []*stream{c.stdout, c.stderr} {
		wg.Go(func() { s.copy(); drained <- struct{}{} })
	}
	exited := make(chan struct{})
	wg.Go(func() { waitExit(c.cmd.Process.Pid); close(exited) })
	c.watch(exited, begin)
	end := c.clock.Boot()
	_ = c.cmd.Wait() // how it ended is in ProcessState
	crash.Point("shim.exited")
	c.drain(drained)
	wg.Wait()
	outcome := c.outcome(end-begin, oomKills() > killed)
	crash.Point("shim.output.durable")
	return outcome, nil
}

// start starts the program in a process group of its own.
func (c *command) start() error {
	argv := c.spec.GetArgv()
	if len(argv) == 0 || !filepath.IsAbs(argv[0]) {
		return fmt.Errorf("start command: argv[0] must be an absolute path: %w", syscall.EINVAL)
	}
	dir := c.spec.GetWorkingDirectory()
	if dir == "" {
		dir = "/"
	}
	if info, err := os.Stat(dir); err != nil {
		return fmt.Errorf("start command: working directory: %w", err)
	} else if !info.IsDir() {
		return fmt.Errorf("start command: working directory: %w", &fs.PathError{Op: "chdir", Path: dir, Err: syscall.ENOTDIR})
	}
	credential, err := credentialOf(c.spec.GetUser())
	if err != nil {
		return fmt.Errorf("start command: %w", err)
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		return fmt.Errorf("start command: %w", err)
	}
	c.cmd = &exec.Cmd{
		Path: argv[0], Args: argv, Dir: dir,
		Env:         append([]string{"PATH=" + Path}, c.spec.GetEnvironment()...),
		Stdin:       null,
		Stdout:      c.stdout.write,
		Stderr:      c.stderr.write,
		SysProcAttr: &syscall.SysProcAttr{Setpgid: true, Credential: credential},
	}
	err = c.cmd.Start()
	for _, f := range []*os.File{null, c.stdout.write, c.stderr.write} {
		_ = f.Close() // the child has its own
	}
	if err != nil {
		return fmt.Errorf("start command: %w", err)
	}
	return nil
}

// credentialOf looks up the user as whom the program runs; nil for the shim's.
func credentialOf(name string) (*syscall.Credential, error) {
	if name == "" {
		return nil, nil
	}
	u, err := user.Lookup(name)
	var unknown user.UnknownUserError
	if errors.As(err, &unknown) {
		return nil, fmt.Errorf("user %q is not known on this node: %w", name, syscall.ENOENT)
	}
	if err != nil {
		return nil, fmt.Errorf("user %q: %w", name, err)
	}
	groups, err := u.GroupIds()
	if err != nil {
		return nil, fmt.Errorf("groups of user %q: %w", name, err)
	}
	ids := make([]uint32, 0, len(groups)+2)
	for _, s := range append([]string{u.Uid, u.Gid}, groups...) {
		n, err := strconv.ParseUint(s, 10, 32)
		if err != nil {
			return nil, fmt.Errorf("user %q: id %q: %w", name, s, err)
		}
		ids = append(ids, uint32(n))
	}
	return &syscall.Credential{Uid: ids[0], Gid: ids[1], Groups: ids[2:]}, nil
}

// waitExit returns when the process has ended, and leaves it to be reaped, so
// that its id, and that of its group, stays its own until then.
func waitExit(pid int) {
	for {
		err := unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOWAIT, nil)
		if !errors.Is(err, unix.EINTR) {
			return
		}
	}
}

// tick is how often the deadline is looked at and the totals are written.
const tick = time.Second

// watch waits for the end of the program, and stops it when its time is over or
// a signal says so. It alone sends signals, so none is sent after the reaping.
func (c *command) watch(exited <-chan struct{}, begin time.Duration) {
	for {
		timer := time.NewTimer(c.pause(begin))
		select {
		case <-exited:
			timer.Stop()
			return
		case <-c.stop:
			timer.Stop()
			c.terminate()
		case <-timer.C:
		}
		now := c.clock.Boot()
		if limit := c.spec.GetTimeout().AsDuration(); limit > 0 && now-begin >= limit && !c.stopping {
			c.timedOut = true
			c.terminate()
		}
		if c.stopping && now >= c.killAt {
			c.signal(unix.SIGKILL)
		}
		c.totals.write()
	}
}

// pause is the time until there is something to do. The timer stands still
// while the machine is suspended, so it is never set for long.
func (c *command) pause(begin time.Duration) time.Duration {
	next := tick
	if limit := c.spec.GetTimeout().AsDuration(); limit > 0 && !c.stopping {
		next = min(next, begin+limit-c.clock.Boot())
	}
	return max(next, time.Millisecond)
}

func (c *command) terminate() {
	if !c.stopping {
		c.stopping, c.killAt = true, c.clock.Boot()+graceOr(c.spec.GetStopGrace().AsDuration())
		c.signal(unix.SIGTERM)
		c.signal(unix.SIGCONT) // one that is stopped could not end
	}
}

func (c *command) signal(s unix.Signal) {
	_ = unix.Kill(-c.cmd.Process.Pid, s) // the group may be gone
}

// drain waits until both streams have ended. What the program left behind may
// keep them open; then they are given up.
func (c *command) drain(drained <-chan struct{}) {
	timer := time.NewTimer(drainGrace)
	defer timer.Stop()
	for range 2 {
		select {
		case <-drained:
		case <-timer.C:
			c.stdout.giveUp()
			c.stderr.giveUp()
			return
		}
	}
}

// outcome is what is known of the program that was reaped.
func (c *command) outcome(d time.Duration, oom bool) *taskv1.CommandOutcome {
	o := &taskv1.CommandOutcome{
		ExitCode: int32(c.cmd.ProcessState.ExitCode()), // -1 when a signal ended it
		Duration: durationpb.New(d),
		TimedOut: c.timedOut,
		Stdout:   c.stdout.finish(),
		Stderr:   c.stderr.finish(),
	}
	c.totals.finish()
	if ws, ok := c.cmd.ProcessState.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		o.Signal = int32(ws.Signal())
	}
	o.OomKilled = oom && o.ExitCode != 0
	return o
}
