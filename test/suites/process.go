package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuaas/millwright/test/testbed"
)

const (
	// lastWords is what the programs of a suite have to print where all their
	// goroutines are, once they were asked to.
	lastWords = 20 * time.Second
	// endWithin bounds the cleaning up after a suite.
	endWithin = time.Minute
)

// shared is a writer for several goroutines. It hides the file under it, so
// that no program inherits that: one that lives on would keep the file open, and
// whoever reads it to the end would wait for that program.
type shared struct {
	mu sync.Mutex
	w  io.Writer
}

// Write writes all of b at once.
func (s *shared) Write(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.w.Write(b)
}

// await runs the command in a process group of its own until it ends, and reads
// its output meanwhile. When ctx ends with errTime, all programs of the group
// are asked for their goroutines and then killed; an interrupt is passed on
// instead. It returns also when a program that left the group holds the output.
func await(ctx context.Context, cmd *exec.Cmd, stderr io.Writer, read func(stdout io.Reader) error) error {
	output, input := io.Pipe()
	cmd.Stdout, cmd.Stderr = input, stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.WaitDelay = lastWords // how long pipes may stay open after the end
	if err := cmd.Start(); err != nil {
		return err
	}
	group := -cmd.Process.Pid
	var side sync.WaitGroup
	var readErr error
	side.Go(func() {
		readErr = read(output)
		_, _ = io.Copy(io.Discard, output) // or the writer would wait for ever
	})
	ended := make(chan struct{})
	side.Go(func() { stop(ctx, group, stderr, ended) })
	side.Go(func() { reap(cmd.Process.Pid, ended) })
	err := cmd.Wait()
	close(ended)
	_ = input.Close()
	_ = syscall.Kill(group, syscall.SIGKILL) // who is left in it
	side.Wait()
	if cause := context.Cause(ctx); cause != nil {
		return errors.Join(cause, readErr)
	}
	return errors.Join(err, readErr)
}

// stop ends a process group when ctx ends before ended is closed.
func stop(ctx context.Context, group int, out io.Writer, ended <-chan struct{}) {
	select {
	case <-ended:
		return
	case <-ctx.Done():
	}
	sig := syscall.SIGINT
	if errors.Is(context.Cause(ctx), errTime) {
		sig = syscall.SIGQUIT
	}
	fmt.Fprintf(out, "=== %v: sending %s to all of its programs\n", context.Cause(ctx), unix.SignalName(sig))
	_ = syscall.Kill(group, sig)
	select {
	case <-ended:
	case <-time.After(lastWords):
		_ = syscall.Kill(group, syscall.SIGKILL)
	}
}

// adoptOrphans makes this process the parent of all that its descendants leave
// behind, also of what left their process group, so that it can be ended.
func adoptOrphans() error {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("become the parent of orphans: %w", err)
	}
	return nil
}

// reap takes leave of the orphans that end while a suite runs, as process 1
// would have. Until then they are zombies, which keep their control groups from
// being removed and hold up whoever waits for their end. The suite's own process
// is waited for elsewhere.
func reap(suite int, ended <-chan struct{}) {
	died := make(chan os.Signal, 1)
	signal.Notify(died, syscall.SIGCHLD)
	defer signal.Stop(died)
	for {
		select {
		case <-ended:
			return
		case <-died:
		case <-time.After(time.Second): // several deaths may be one signal
		}
		for pid := range children(os.Getpid()) {
			if pid != suite {
				_, _ = syscall.Wait4(pid, nil, syscall.WNOHANG, nil) // it lives on, or is gone
			}
		}
	}
}

// endLeft ends the processes that a suite left behind, and after one that was
// not ok also its testbeds.
func endLeft(ctx context.Context, ok bool) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), endWithin)
	defer cancel()
	told := map[int]bool{}
	for ctx.Err() == nil {
		left := children(os.Getpid())
		if len(left) == 0 {
			break
		}
		for pid, name := range left {
			var status syscall.WaitStatus
			if got, err := syscall.Wait4(pid, &status, syscall.WNOHANG, nil); got == pid || err != nil {
				continue // it had ended
			}
			if !told[pid] {
				fmt.Printf("    ending a process that the suite left: %d %s\n", pid, name)
			}
			told[pid] = true
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
		select {
		case <-ctx.Done():
		case <-time.After(20 * time.Millisecond):
		}
	}
	if ok || os.Geteuid() != 0 {
		return
	}
	if err := testbed.Sweep(ctx, slog.New(slog.NewTextHandler(os.Stdout, nil))); err != nil {
		fmt.Printf("    testbeds of a suite that ended badly: %v\n", err)
	}
}

// children returns the processes whose parent is pid, with their names.
func children(pid int) map[int]string {
	files, _ := filepath.Glob("/proc/[0-9]*/stat") // the pattern is right
	out := map[int]string{}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			continue // it has ended
		}
		// The name is in parentheses and may hold anything.
		text := string(b)
		from, to := strings.IndexByte(text, '('), strings.LastIndexByte(text, ')')
		fields := strings.Fields(text[to+1:])
		id, err := strconv.Atoi(filepath.Base(filepath.Dir(f)))
		if err == nil && len(fields) > 1 && fields[1] == strconv.Itoa(pid) {
			out[id] = text[from+1 : to]
		}
	}
	return out
}
