//go:build millwright_node

package nodehost_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/gpuaas/millwright/agent/internal/shim"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks/host"
)

func sh(script string, args ...string) host.Command {
	return host.Command{Argv: append([]string{"/bin/sh", "-c", script}, args...)}
}

// unitsOf lists the units of a task that systemd knows.
func unitsOf(t *testing.T, task string) string {
	t.Helper()
	return systemctl(t, "list-units", "--all", "--no-legend", "--plain", "millwright-task-"+task+"*")
}

func TestCommand(t *testing.T) {
	needNode(t)
	n, task := newNode(t, t.TempDir()), taskID(t)
	h := n.ForStep(task, 2)
	c := sh(`echo "$PATH|$HOME|$A"; pwd; id -un; echo e >&2; exit 7`)
	c.Dir, c.User, c.Environment = "/tmp", "nobody", []string{"A=b c"}
	out, err := h.RunCommand(t.Context(), c)
	if err != nil || out.ExitCode != 7 || out.Signal != 0 || len(out.Invocation) != 32 || out.Stderr.Total != 2 {
		t.Fatalf("outcome %+v, %v", out, err)
	}
	if boot, err := h.BootID(t.Context()); err != nil || boot != out.BootID {
		t.Errorf("boot %s, %v", out.BootID, err)
	}
	buf := make([]byte, 200)
	k, _ := n.ReadHead(task, 2, taskv1.Stream_STREAM_STDOUT, buf, 0) // io.EOF
	if want := shim.Path + "||b c\n/tmp\nnobody\n"; string(buf[:k]) != want {
		t.Errorf("wrote %q, want %q", buf[:k], want)
	}
	if left := unitsOf(t, task); left != "" {
		t.Errorf("units left: %s", left)
	}
	if again, err := h.RunCommand(t.Context(), c); err != nil || again.Invocation != out.Invocation {
		t.Errorf("again: %+v, %v", again, err)
	}
	if _, err := n.ForStep(task, 3).RunCommand(t.Context(), host.Command{Argv: []string{"/no/such"}}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("missing program: %v", err)
	}
	must(t, n.DeleteCommands(task))
}

// A command goes on without the agent that started it, and is found again, also
// when systemd executed itself again meanwhile.
func TestCommandIsAdopted(t *testing.T) {
	needNode(t)
	state, task, dir := t.TempDir(), taskID(t), t.TempDir()
	up, gate := filepath.Join(dir, "up"), filepath.Join(dir, "gate")
	must(t, syscall.Mkfifo(gate, 0o600))
	c := sh(`echo x >> "$0"; read line < "$1"; exit 9`, up, gate)
	ctx, kill := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		if _, err := newNode(t, state).ForStep(task, 0).RunCommand(ctx, c); !errors.Is(err, context.Canceled) {
			t.Errorf("the first agent: %v", err)
		}
	})
	eventually(t, "the program", func() bool { return exists(up) })
	kill()
	wg.Wait()
	systemctl(t, "daemon-reexec")
	found := &sighting{text: "found running", seen: make(chan struct{})}
	h := loggingNode(t, state, found).ForStep(task, 0)
	unit := shim.ID{TaskID: task, Attempt: 1}.Unit()
	u, err := h.Unit(t.Context(), unit)
	if err != nil || u.Active != "active" {
		t.Fatalf("the unit: %+v, %v", u, err)
	}
	wg.Go(func() {
		select { // it is let go only when the second agent has found it
		case <-found.seen:
		case <-time.After(10 * time.Second):
			t.Error("the second agent has not found it running")
		}
		if err := os.WriteFile(gate, []byte("go\n"), 0); err != nil {
			t.Error(err)
		}
	})
	out, err := h.RunCommand(t.Context(), c)
	wg.Wait()
	if err != nil || out.ExitCode != 9 || out.Invocation != u.Invocation {
		t.Errorf("outcome %+v, %v; the unit was %s", out, err, u.Invocation)
	}
	if b, err := os.ReadFile(up); err != nil || string(b) != "x\n" {
		t.Errorf("it ran %q, %v", b, err)
	}
}

// sighting is a log in which a text is waited for.
type sighting struct {
	text string
	seen chan struct{}
	once sync.Once
}

func (s *sighting) Write(p []byte) (int, error) {
	if strings.Contains(string(p), s.text) {
		s.once.Do(func() { close(s.seen) })
	}
	return len(p), nil
}

// Twenty agents at once start one program.
func TestCommandRacers(t *testing.T) {
	needNode(t)
	state, task, count := t.TempDir(), taskID(t), filepath.Join(t.TempDir(), "count")
	invocations := make([]string, 20)
	var wg sync.WaitGroup
	for i := range invocations {
		h := newNode(t, state).ForStep(task, 0)
		wg.Go(func() {
			out, err := h.RunCommand(t.Context(), sh(`echo x >> "$0"; sleep 0.2`, count))
			if err != nil {
				t.Errorf("racer %d: %v", i, err)
			}
			invocations[i] = out.Invocation
		})
	}
	wg.Wait()
	for _, id := range invocations {
		if id != invocations[0] || id == "" {
			t.Errorf("invocations %v", invocations)
			break
		}
	}
	if b, err := os.ReadFile(count); err != nil || string(b) != "x\n" {
		t.Errorf("it ran %q, %v", b, err)
	}
}

func TestCommandStops(t *testing.T) {
	needNode(t)
	h, up := newHost(t), filepath.Join(t.TempDir(), "up")
	ctx, cancel := context.WithCancelCause(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { eventually(t, "the program", func() bool { return exists(up) }); cancel(host.ErrStop) })
	out, err := h.RunCommand(ctx, sh(`echo > "$0"; exec sleep 1000`, up))
	wg.Wait()
	if err != nil || out.Signal != int(syscall.SIGTERM) {
		t.Errorf("outcome %+v, %v", out, err)
	}
	c := sh("exec sleep 1000")
	c.Timeout = 500 * time.Millisecond
	if out, err := newHost(t).RunCommand(t.Context(), c); err != nil || !out.TimedOut {
		t.Errorf("timeout: %+v, %v", out, err)
	}
}

// The shim is killed: nothing is made up, and how it died is told.
func TestCommandShimDies(t *testing.T) {
	needNode(t)
	task, up := taskID(t), filepath.Join(t.TempDir(), "up")
	h := newNode(t, t.TempDir()).ForStep(task, 0)
	var wg sync.WaitGroup
	wg.Go(func() {
		eventually(t, "the program", func() bool { return exists(up) })
		systemctl(t, "kill", "--kill-who=main", "--signal=KILL", shim.ID{TaskID: task, Attempt: 1}.Unit())
	})
	c := sh(`echo > "$0"; exec sleep 1000`, up)
	for range 2 {
		_, err := h.RunCommand(t.Context(), c)
		if !errors.Is(err, host.ErrOutcomeUnknown) || !strings.Contains(err.Error(), "result signal (killed, KILL)") {
			t.Errorf("error %v", err)
		}
	}
	wg.Wait()
	if left := unitsOf(t, task); left != "" {
		t.Errorf("units left: %s", left)
	}
}

// The kernel kills a command for want of memory: the shim lives and says so.
func TestCommandOutOfMemory(t *testing.T) {
	needNode(t)
	task, up := taskID(t), filepath.Join(t.TempDir(), "up")
	h := newNode(t, t.TempDir()).ForStep(task, 0)
	var wg sync.WaitGroup
	wg.Go(func() {
		eventually(t, "the program", func() bool { return exists(up) })
		systemctl(t, "set-property", "--runtime", shim.ID{TaskID: task, Attempt: 1}.Unit(), "MemoryMax=64M", "MemoryLimit=64M")
		if err := os.WriteFile(up+".go", nil, 0o600); err != nil {
			t.Error(err)
		}
	})
	out, err := h.RunCommand(t.Context(), sh(`echo > "$0"; while ! test -e "$0.go"; do sleep 0.05; done; exec dd if=/dev/zero of=/dev/null bs=300M count=1`, up))
	wg.Wait()
	if err != nil || !out.OOMKilled || out.Signal != int(syscall.SIGKILL) {
		t.Errorf("outcome %+v, %v", out, err)
	}
}

// What a command leaves behind ends with its unit.
func TestCommandLeavesNothing(t *testing.T) {
	needNode(t)
	pidFile := filepath.Join(t.TempDir(), "pid")
	out, err := newHost(t).RunCommand(t.Context(), sh(`sleep 1000 & echo $! > "$0"`, pidFile))
	if err != nil || out.ExitCode != 0 || !out.Stdout.OpenAtEnd {
		t.Errorf("outcome %+v, %v", out, err)
	}
	b, err := os.ReadFile(pidFile)
	must(t, err)
	if exists(fmt.Sprintf("/proc/%s", strings.TrimSpace(string(b)))) {
		t.Error("the process that it left behind runs on")
	}
}

// A shim that cannot begin is an answer, and a final one.
func TestCommandShimCannotBegin(t *testing.T) {
	needNode(t)
	state, task := t.TempDir(), taskID(t)
	n := newNode(t, state)
	dir, err := shim.ID{TaskID: task, Attempt: 1}.Dir(state)
	must(t, err)
	// The room for the result cannot be reserved: the name is a directory's.
	must(t, os.MkdirAll(filepath.Join(string(dir), "stdout.tail"), 0o700))
	_, err = n.ForStep(task, 0).RunCommand(t.Context(), sh("true"))
	if err == nil || errors.Is(err, host.ErrOutcomeUnknown) || !strings.Contains(err.Error(), "before it started the program") {
		t.Errorf("error %v", err)
	}
}
