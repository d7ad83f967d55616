package fakehost

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"github.com/gpuaas/millwright/tasks/host"
)

// Result is how a command ends. The zero value is success.
type Result struct {
	ExitCode  int
	Signal    int
	TimedOut  bool
	OOMKilled bool
	// Blocks is set when it only ends when it is stopped, by signal 15.
	Blocks bool
	// Stdout is what it writes.
	Stdout string
}

type commandKey struct {
	task string
	step uint32
}

// command is what the shim's record and the unit of a command say.
type command struct {
	boot    int // in which it was started
	ended   bool
	result  Result
	refused error // it could not be started
	reset   host.GPUReset
	said    error // of a reset
}

func (n *Node) findProgram(name string) (string, error) {
	for _, dir := range []string{"/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"} {
		if e, ok := n.entries[n.key(dir+"/"+name)]; ok && !e.mode.IsDir() {
			return dir + "/" + name, nil
		}
	}
	return "", fmt.Errorf("program %s: %w", name, fs.ErrNotExist)
}

// begin starts the command of a step, unless it ever was.
func (n *Node) begin(k commandKey, c host.Command) *command {
	n.mu.Lock()
	defer n.mu.Unlock()
	if old, ok := n.commands[k]; ok {
		return old
	}
	rec := &command{boot: n.boot, result: n.results[strings.Join(c.Argv, " ")]}
	n.commands[k] = rec
	info, err := n.lstat(n.real(c.Argv[0], true))
	switch {
	case err != nil:
		rec.refused = err
	case info.Mode.Perm()&0o111 == 0:
		rec.refused = fmt.Errorf("start %s: %w", c.Argv[0], fs.ErrPermission)
	case c.User != "" && !n.users[c.User]:
		rec.refused = fmt.Errorf("start %s: user %s: %w", c.Argv[0], c.User, fs.ErrNotExist)
	default:
		n.runs[strings.Join(c.Argv, " ")]++
	}
	return rec
}

// finish waits for the end of a command.
func (n *Node) finish(ctx context.Context, rec *command, c host.Command) (host.Outcome, error) {
	if rec.refused != nil {
		return host.Outcome{}, fmt.Errorf("%w: %w", host.ErrNotStarted, rec.refused)
	}
	n.mu.Lock()
	lost := !rec.ended && rec.boot != n.boot
	blocks := !rec.ended && rec.result.Blocks
	n.mu.Unlock()
	if lost {
		return host.Outcome{}, fmt.Errorf("command %s: %w", c.Argv[0], host.ErrOutcomeUnknown)
	}
	if blocks {
		<-ctx.Done()
		if !errors.Is(context.Cause(ctx), host.ErrStop) {
			return host.Outcome{}, fmt.Errorf("wait for %s: %w", c.Argv[0], context.Cause(ctx))
		}
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if blocks {
		rec.result = Result{Signal: 15}
	}
	rec.ended = true
	r := rec.result
	return host.Outcome{
		ExitCode: r.ExitCode, Signal: r.Signal, TimedOut: r.TimedOut, OOMKilled: r.OOMKilled,
		Invocation: fmt.Sprintf("%032x", rec.boot), BootID: bootID(rec.boot),
	}, nil
}
