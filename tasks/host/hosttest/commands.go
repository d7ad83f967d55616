package hosttest

import (
	"context"
	"errors"
	"io/fs"
	"testing"
	"time"

	"github.com/gpuaas/millwright/tasks/host"
)

// Argv are the commands of the suite besides those that count themselves: a
// node in memory has to know how they end.
func Argv() (exit7, sleep []string) {
	return []string{"/bin/sh", "-c", "exit 7"}, []string{"/bin/sleep", "600"}
}

// Counting returns the command that appends a line to a file.
func Counting(file string) []string { return []string{"/bin/sh", "-c", "echo run >> " + file} }

func (e suite) command(t *testing.T) {
	h, ctx, file := e.host(t), t.Context(), e.path("count")
	undo(t, func(ctx context.Context) error { return h.RemoveFile(ctx, file) })
	argv := Counting(file)
	c := host.Command{Argv: argv, Dir: "/", Environment: []string{"A=b c"}, Timeout: time.Minute}
	first, err := h.RunCommand(ctx, c)
	must(t, err)
	boot, err := h.BootID(ctx)
	must(t, err)
	if first.ExitCode != 0 || first.Signal != 0 || first.TimedOut || first.OOMKilled || first.BootID != boot || len(first.Invocation) != 32 {
		t.Errorf("outcome = %+v", first)
	}
	// The same step finds its command again and does not run another.
	again, err := e.host(t).RunCommand(ctx, c)
	if err != nil || again.ExitCode != first.ExitCode || again.Invocation != first.Invocation {
		t.Errorf("again: %+v, %v, want %+v", again, err, first)
	}
	if n := e.Started(t, argv, file); n != 1 {
		t.Errorf("the command of one step ran %d times", n)
	}
	other := e.ForStep(e.taskID(t), 1)
	if _, err := other.RunCommand(ctx, c); err != nil {
		t.Errorf("the command of another step: %v", err)
	}
	if n := e.Started(t, argv, file); n != 2 {
		t.Errorf("the commands of two steps ran %d times", n)
	}
}

func (e suite) failingCommand(t *testing.T) {
	exit7, _ := Argv()
	o, err := e.host(t).RunCommand(t.Context(), host.Command{Argv: exit7})
	if err != nil || o.ExitCode != 7 || o.Signal != 0 {
		t.Errorf("outcome = %+v, %v", o, err)
	}
}

func (e suite) noProgram(t *testing.T) {
	for range 2 {
		_, err := e.host(t).RunCommand(t.Context(), host.Command{Argv: []string{"/no/such/program"}})
		if !errors.Is(err, host.ErrNotStarted) || !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("a missing program: %v", err)
		}
	}
}

func (e suite) stoppedCommand(t *testing.T) {
	_, sleep := Argv()
	c := host.Command{Argv: sleep}
	// An interrupted wait leaves the command running.
	ctx, interrupt := context.WithCancelCause(t.Context())
	soon := time.AfterFunc(300*time.Millisecond, func() { interrupt(errors.New("the agent stops")) })
	defer soon.Stop()
	if _, err := e.host(t).RunCommand(ctx, c); err == nil {
		t.Fatal("an interrupted wait returned an outcome")
	}
	ctx, stop := context.WithCancelCause(t.Context())
	timer := time.AfterFunc(300*time.Millisecond, func() { stop(host.ErrStop) })
	defer timer.Stop()
	o, err := e.host(t).RunCommand(ctx, c)
	if err != nil || o.Signal == 0 {
		t.Errorf("outcome of a stopped command = %+v, %v", o, err)
	}
}
