package child

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// LongSpec is a program that serves until it is ended.
type LongSpec struct {
	// Argv is the program, as an absolute path, and its arguments.
	Argv []string
	// Env is added to the environment of every child.
	Env []string
}

// Long is a program that serves over a socket. The kernel kills it when the
// process that started it dies.
type Long struct {
	conn net.Conn
	cmd  *exec.Cmd
	said ends
	gone chan struct{} // closed when it was reaped
	err  error         // of Wait; valid once gone is closed
	kill func(pid int) error
}

// Start starts a program whose descriptor 3 is one end of a socket pair; the
// other is [Long.Conn]. Descriptors 0 and 1 are /dev/null, and of what it
// writes to 2 the beginning and the end are kept.
func (r *Runner) Start(s LongSpec) (*Long, error) {
	ours, theirs, err := socketPair()
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", s.Argv[0], err)
	}
	l := &Long{conn: ours, gone: make(chan struct{}), kill: r.cfg.Kill}
	if l.kill == nil {
		l.kill = func(pid int) error { return unix.Kill(-pid, unix.SIGKILL) }
	}
	l.cmd = &exec.Cmd{
		Path: s.Argv[0], Args: s.Argv, Dir: "/", Env: append(environment(), s.Env...),
		Stderr: &l.said, ExtraFiles: []*os.File{theirs}, WaitDelay: time.Second,
		SysProcAttr: &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL},
	}
	started := make(chan error, 1)
	r.reapers.Go(func() {
		// The kernel sends that signal when the thread that forked ends, so the
		// thread stays for as long as the child does.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := l.cmd.Start()
		started <- err
		if err != nil {
			return
		}
		l.err = l.cmd.Wait()
		close(l.gone)
	})
	err = <-started
	if closed := theirs.Close(); err == nil && closed != nil {
		_ = l.Kill()
		err = closed
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start %s: %w", s.Argv[0], err), ours.Close())
	}
	return l, nil
}

// socketPair returns a connection and the file of its other end.
func socketPair() (net.Conn, *os.File, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("make socket pair: %w", err)
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "parent"), os.NewFile(uintptr(fds[1]), "child")
	conn, err := net.FileConn(ours)
	if err = errors.Join(err, ours.Close()); err != nil { // conn has a copy of its own
		return nil, nil, errors.Join(fmt.Errorf("use socket pair: %w", err), theirs.Close())
	}
	return conn, theirs, nil
}

// Conn is the connection to the program. The caller closes it.
func (l *Long) Conn() net.Conn { return l.conn }

// Pid is the program's process id.
func (l *Long) Pid() int { return l.cmd.Process.Pid }

// Gone is closed once the program has ended and was reaped.
func (l *Long) Gone() <-chan struct{} { return l.gone }

// Kill kills the program with all that it started, and does not wait: it may be
// held by the kernel for ever. After the end it does nothing.
func (l *Long) Kill() error {
	select {
	case <-l.gone:
		return nil
	default:
	}
	if err := l.kill(l.Pid()); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("kill process %d: %w", l.Pid(), err)
	}
	return nil
}

// End is how the program ended: its exit code, the signal or -1, and what it
// wrote to descriptor 2. It may be called once Gone is closed.
func (l *Long) End() (code int, signal syscall.Signal, said string) {
	if st, ok := l.cmd.ProcessState.Sys().(syscall.WaitStatus); ok && st.Signaled() {
		return -1, st.Signal(), l.said.String()
	}
	return l.cmd.ProcessState.ExitCode(), -1, l.said.String()
}

// keptEnd is how much of each end of the output is kept.
const keptEnd = 2 << 10

// ends keeps the beginning and the end of what is written to it.
type ends struct {
	mu         sync.Mutex
	head, tail []byte
	cut        bool
}

// Write implements io.Writer. It never fails.
func (e *ends) Write(p []byte) (int, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	n := min(len(p), keptEnd-len(e.head))
	e.head = append(e.head, p[:n]...)
	e.tail = append(e.tail, p[n:]...)
	if over := len(e.tail) - keptEnd; over > 0 {
		e.tail, e.cut = append([]byte(nil), e.tail[over:]...), true
	}
	return len(p), nil
}

// String is what was kept.
func (e *ends) String() string {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.cut {
		return string(e.head) + "\n...\n" + string(e.tail)
	}
	return string(e.head) + string(e.tail)
}
