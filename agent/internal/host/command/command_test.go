package command_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuaas/millwright/agent/internal/clock"
	"github.com/gpuaas/millwright/agent/internal/host/command"
	"github.com/gpuaas/millwright/agent/internal/host/systemd"
	"github.com/gpuaas/millwright/agent/internal/shim"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks/host"
)

// TestMain makes the test binary the shim.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "shim" {
		os.Exit(shim.Main(os.Args[2:], os.Stderr))
	}
	os.Exit(m.Run())
}

func newRunner(u *units, state string) *command.Runner {
	return command.New(command.Config{
		StateDir: state, Executable: u.exe, Clock: clock.System{}, Systemd: u,
		Logger: slog.New(slog.DiscardHandler),
	})
}

var id = shim.ID{TaskID: "018f-run", Step: 1, Attempt: 1}

func sh(script string, args ...string) host.Command {
	return host.Command{Argv: append([]string{"/bin/sh", "-c", script}, args...)}
}

func eventually(t *testing.T, what string, cond func() bool) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.After(20 * time.Second); !cond(); {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("waited in vain for %s", what)
		}
	}
}

func exists(path string) bool { _, err := os.Stat(path); return err == nil }

// A command runs once, and its outcome is told as often as it is asked for.
func TestRunsOnce(t *testing.T) {
	u, state := newUnits(t), t.TempDir()
	count := filepath.Join(t.TempDir(), "count")
	var first host.Outcome
	for i := range 3 {
		out, err := newRunner(u, state).Run(t.Context(), id, sh(`echo x >> "$0"; echo hello; exit 7`, count))
		if err != nil {
			t.Fatal(err)
		}
		if i == 0 {
			first = out
		}
		if diff := cmp.Diff(first, out); diff != "" || out.ExitCode != 7 || out.Stdout.Total != 6 {
			t.Errorf("outcome %+v\n%s", out, diff)
		}
	}
	if b, err := os.ReadFile(count); err != nil || string(b) != "x\n" || u.starts != 1 {
		t.Errorf("it ran %q times, %v, with %d starts", b, err, u.starts)
	}
}

// An agent that was killed finds the command again, running or ended.
func TestAdopted(t *testing.T) {
	for _, running := range []bool{true, false} {
		t.Run(fmt.Sprintf("running=%v", running), func(t *testing.T) {
			u, state, dir := newUnits(t), t.TempDir(), t.TempDir()
			up, release := filepath.Join(dir, "up"), filepath.Join(dir, "release")
			if err := syscall.Mkfifo(release, 0o600); err != nil {
				t.Fatal(err)
			}
			c := sh(`echo $$ >> "$0"; read x < "$1"; exit 5`, up, release)
			ctx, kill := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			var wg sync.WaitGroup
			wg.Go(func() { _, err := newRunner(u, state).Run(ctx, id, c); ended <- err })
			eventually(t, "the program", func() bool { return exists(up) })
			kill()
			if err := <-ended; !errors.Is(err, context.Canceled) {
				t.Errorf("the first call: %v", err)
			}
			wg.Wait()
			if !running {
				letGo(t, release)
				eventually(t, "its end", func() bool { s, _ := u.Unit(t.Context(), id.Unit()); return s.Active == "inactive" })
			} else {
				// It is let go only when the second agent has seen it running.
				u.asked = make(chan struct{}, 1)
				wg.Go(func() { <-u.asked; letGo(t, release) })
			}
			out, err := newRunner(u, state).Run(t.Context(), id, c)
			wg.Wait()
			if err != nil || out.ExitCode != 5 || u.starts != 1 || out.Invocation != fmt.Sprintf("%032x", 1) {
				t.Errorf("outcome %+v, %v, after %d starts", out, err, u.starts)
			}
		})
	}
}

func letGo(t *testing.T, fifo string) {
	if err := os.WriteFile(fifo, []byte("go\n"), 0); err != nil {
		t.Error(err)
	}
}

// A command whose shim died is unknown, now and ever, and is not run again.
func TestUnknown(t *testing.T) {
	u, state := newUnits(t), t.TempDir()
	up := filepath.Join(t.TempDir(), "up")
	var wg sync.WaitGroup
	wg.Go(func() {
		eventually(t, "the program", func() bool { return exists(up) })
		u.kill(id.Unit())
	})
	c := sh(`echo $$ > "$0"; exec sleep 60`, up)
	for range 2 {
		out, err := newRunner(u, state).Run(t.Context(), id, c)
		if !errors.Is(err, host.ErrOutcomeUnknown) {
			t.Errorf("outcome %+v, %v", out, err)
		}
	}
	wg.Wait()
	if u.starts != 1 {
		t.Errorf("started %d times", u.starts)
	}
}

// With a marker of another boot and no unit, the machine went down meanwhile.
func TestUnknownAfterBoot(t *testing.T) {
	u, state := newUnits(t), t.TempDir()
	dir, err := id.Dir(state)
	if err != nil {
		t.Fatal(err)
	}
	if err := dir.WriteSpec(&taskv1.CommandStep{}); err != nil {
		t.Fatal(err)
	}
	if err := dir.Take(&agentv1.CommandRecord{BootId: "an-earlier-one"}); err != nil {
		t.Fatal(err)
	}
	_, err = newRunner(u, state).Run(t.Context(), id, sh("true"))
	if !errors.Is(err, host.ErrOutcomeUnknown) || !strings.Contains(err.Error(), "an-earlier-one") || !strings.Contains(err.Error(), "went down") {
		t.Errorf("error %v", err)
	}
}

// The marker decides, not the directory: after a crash before the start, the
// command starts.
func TestStartsAfterHalfAStart(t *testing.T) {
	u, state := newUnits(t), t.TempDir()
	dir, err := id.Dir(state)
	if err != nil {
		t.Fatal(err)
	}
	if err := dir.WriteSpec(&taskv1.CommandStep{Argv: []string{"/bin/false"}}); err != nil {
		t.Fatal(err)
	}
	out, err := newRunner(u, state).Run(t.Context(), id, sh("exit 4"))
	if err != nil || out.ExitCode != 4 {
		t.Errorf("outcome %+v, %v", out, err)
	}
}

func TestStop(t *testing.T) {
	u, state := newUnits(t), t.TempDir()
	up := filepath.Join(t.TempDir(), "up")
	ctx, cancel := context.WithCancelCause(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		eventually(t, "the program", func() bool { return exists(up) })
		cancel(fmt.Errorf("cancelled by alice: %w", host.ErrStop))
	})
	out, err := newRunner(u, state).Run(ctx, id, sh(`echo $$ > "$0"; exec sleep 60`, up))
	wg.Wait()
	if err != nil || out.Signal != int(syscall.SIGTERM) {
		t.Errorf("outcome %+v, %v", out, err)
	}
}

// A command that is to stop before it was started never is.
func TestStopBeforeStart(t *testing.T) {
	u, state := newUnits(t), t.TempDir()
	ctx, cancel := context.WithCancelCause(t.Context())
	u.fail = func(verb string) error {
		if verb == "start" {
			cancel(host.ErrStop)
			return context.Canceled
		}
		return nil
	}
	if _, err := newRunner(u, state).Run(ctx, id, sh("true")); !errors.Is(err, host.ErrStop) {
		t.Errorf("error %v", err)
	}
	u.fail = nil
	if _, err := newRunner(u, state).Run(t.Context(), id, sh("true")); err == nil || u.starts != 0 {
		t.Errorf("later: %v, %d starts", err, u.starts)
	}
}

// A start that failed for good is final: the request may still be under way, and
// must not start a command that was reported as failed.
func TestFailedStartIsFinal(t *testing.T) {
	u, state := newUnits(t), t.TempDir()
	u.fail = func(verb string) error {
		if verb == "start" {
			return fmt.Errorf("start: %w", systemd.ErrUnreachable)
		}
		return nil
	}
	_, err := newRunner(u, state).Run(t.Context(), id, sh("true"))
	if !errors.Is(err, systemd.ErrUnreachable) {
		t.Errorf("error %v", err)
	}
	u.fail = nil
	dir, err := id.Dir(state)
	if err != nil {
		t.Fatal(err)
	}
	u.mu.Lock()
	err = u.spawn(id.Unit(), string(dir)) // the late request
	u.mu.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := newRunner(u, state).Run(t.Context(), id, sh("true")); err == nil || !strings.Contains(err.Error(), "does not answer") {
		t.Errorf("later: %v", err)
	}
	if o, err := newRunner(u, state).Output(id, taskv1.Stream_STREAM_STDOUT); err != nil || o.Total != 0 {
		t.Errorf("it ran: %+v, %v", o, err)
	}
}

// While systemd does not answer, the outcome is still found by its file.
func TestResultWithoutSystemd(t *testing.T) {
	u, state := newUnits(t), t.TempDir()
	if _, err := newRunner(u, state).Run(t.Context(), id, sh("exit 3")); err != nil {
		t.Fatal(err)
	}
	u.fail = func(string) error { return systemd.ErrUnreachable }
	out, err := newRunner(u, state).Run(t.Context(), id, sh("exit 3"))
	if err != nil || out.ExitCode != 3 {
		t.Errorf("outcome %+v, %v", out, err)
	}
}

func TestCannotStart(t *testing.T) {
	u, state := newUnits(t), t.TempDir()
	for range 2 {
		_, err := newRunner(u, state).Run(t.Context(), id, host.Command{Argv: []string{"/no/such"}})
		if !errors.Is(err, host.ErrNotStarted) || !errors.Is(err, fs.ErrNotExist) || errors.Is(err, host.ErrOutcomeUnknown) {
			t.Errorf("error %v", err)
		}
	}
	if _, err := newRunner(u, state).Run(t.Context(), shim.ID{TaskID: "../x"}, sh("true")); err == nil {
		t.Error("a task id that leaves the directory was taken")
	}
}

func TestOutput(t *testing.T) {
	u, state := newUnits(t), t.TempDir()
	r := newRunner(u, state)
	if _, err := r.Output(id, taskv1.Stream_STREAM_STDOUT); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("before: %v", err)
	}
	if _, err := r.Run(t.Context(), id, sh(`head -c 2000000 /dev/zero; echo err >&2`)); err != nil {
		t.Fatal(err)
	}
	want := command.Output{Total: 2000000, Head: 1 << 20, Tail: 256 << 10, Ended: true}
	if o, err := r.Output(id, taskv1.Stream_STREAM_STDOUT); err != nil || o != want {
		t.Errorf("output %+v, %v", o, err)
	}
	buf := make([]byte, 16)
	if n, err := r.ReadHead(id, taskv1.Stream_STREAM_STDERR, buf, 1); n != 3 || !errors.Is(err, io.EOF) || string(buf[:n]) != "rr\n" {
		t.Errorf("read %q, %v", buf[:n], err)
	}
	if n, err := r.ReadTail(id, taskv1.Stream_STREAM_STDOUT, buf, 0); n != 16 || err != nil {
		t.Errorf("read %d bytes of the tail, %v", n, err)
	}
	if ids, err := r.List(); err != nil || !cmp.Equal(ids, []shim.ID{id}) {
		t.Errorf("list %v, %v", ids, err)
	}
	for range 2 {
		if err := r.Delete(id.TaskID); err != nil {
			t.Error(err)
		}
	}
	if _, err := r.Output(id, taskv1.Stream_STREAM_STDOUT); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("after the deletion: %v", err)
	}
	if err := r.Delete(".."); err == nil {
		t.Error("a task id that leaves the directory was taken")
	}
}
