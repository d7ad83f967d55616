// Package look looks at the store of a server before it is opened, in a process
// of its own. A damaged page can make bbolt run in circles, ask for any amount of
// memory, or fault in a goroutine of its own; that process has a limit of time and
// memory, and its death is a finding. It is the only program that a control plane
// runs, and it is the server's own.
package look

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuaas/millwright/controlplane/internal/store/boltstore"
)

// program is what the process calls itself: some executables are several programs.
const program = "millwright-server"

// Command is the hidden command of millwright-server that [Main] is.
const Command = "verify-store"

// The exit codes of the process that looks. A fault or a panic ends it with 2.
const (
	exitSound   = 0
	exitOther   = 1
	exitDied    = 2
	exitDamaged = 3
	exitLocked  = 4
	exitNewer   = 5
)

const (
	// room is the address space, in bytes, that the process has beside four times
	// the size of the file: the Go runtime alone reserves more than 1 GiB.
	room = 3 << 30
	// damagedAsks is the memory, in bytes, beside four times the size of the file
	// that no sound file makes a reader ask for.
	damagedAsks = 512 << 20
	// slowest is how many bytes of a sound file are looked at in a second, on the
	// slowest machine.
	slowest = 16 << 20
	// anyway is how long a file of no size may take.
	anyway = time.Minute
)

// Main looks at the store that is its only argument and returns the exit code; why
// goes to stderr, for [InAnotherProcess].
func Main(args []string, stderr io.Writer) int {
	if len(args) != 1 || !filepath.IsAbs(args[0]) {
		_, _ = fmt.Fprintf(stderr, "usage: %s FILE", Command) // there is nobody else to tell
		return exitOther
	}
	err := limitSelf(args[0])
	if err == nil {
		err = boltstore.Check(args[0])
	}
	code := exitSound
	switch {
	case err == nil:
		return code
	case errors.Is(err, boltstore.ErrDamaged):
		code = exitDamaged
	case errors.Is(err, boltstore.ErrLocked):
		code = exitLocked
	case errors.Is(err, boltstore.ErrNewer):
		code = exitNewer
	default:
		code = exitOther
	}
	_, _ = io.WriteString(stderr, err.Error()) // there is nobody else to tell
	return code
}

// within is how long a look at the file may take.
func within(path string) (time.Duration, uint64) {
	info, err := os.Stat(path)
	if err != nil {
		return anyway, 0 // whoever opens it says why
	}
	return anyway + time.Duration(info.Size()/slowest)*time.Second, uint64(info.Size()) // a file has no negative size
}

func limitSelf(path string) error {
	long, size := within(path)
	for _, l := range []struct {
		resource int
		most     uint64
	}{{unix.RLIMIT_AS, room + 4*size}, {unix.RLIMIT_CPU, uint64(long / time.Second)}, {unix.RLIMIT_CORE, 0}} {
		var now unix.Rlimit
		if err := unix.Getrlimit(l.resource, &now); err != nil {
			return fmt.Errorf("read limit %d of the process: %w", l.resource, err)
		}
		now.Cur = min(now.Max, l.most)
		// A service that may not do it is limited by its unit.
		if err := unix.Setrlimit(l.resource, &now); err != nil && !errors.Is(err, unix.EPERM) {
			return fmt.Errorf("limit the process that looks at %s: %w", path, err)
		}
	}
	return nil
}

// InAnotherProcess returns what looks at a store in a process of its own;
// executable is a millwright-server. Its error wraps what [boltstore.Check]'s
// does; a process that died on the file, or needed more than a sound file does,
// makes it [boltstore.ErrDamaged]. One that was killed, or lacked memory, says
// nothing about the file.
func InAnotherProcess(executable string) func(ctx context.Context, path string) error {
	return func(ctx context.Context, path string) error {
		path, err := filepath.Abs(path)
		if err != nil {
			return fmt.Errorf("look at store: %w", err)
		}
		long, size := within(path)
		ctx, cancel := context.WithTimeout(ctx, long+anyway)
		defer cancel()
		var said bytes.Buffer
		cmd := exec.CommandContext(ctx, executable, Command, path)
		cmd.Args[0] = program
		cmd.Dir, cmd.Env, cmd.Stderr, cmd.WaitDelay = "/", []string{}, &capped{&said}, time.Second
		return judge(cmd.Run(), cmd.ProcessState, said.String(), size)
	}
}

func judge(err error, ended *os.ProcessState, said string, size uint64) error {
	if ended == nil {
		return fmt.Errorf("look at the store in another process: %w", err)
	}
	if st, ok := ended.Sys().(syscall.WaitStatus); ok && st.Signaled() {
		switch st.Signal() {
		case unix.SIGBUS, unix.SIGSEGV, unix.SIGABRT, unix.SIGILL, unix.SIGFPE, unix.SIGXCPU:
			return died(st.Signal().String())
		default:
			return fmt.Errorf("look at the store in another process: it was ended: %s", st.Signal())
		}
	}
	first, _, _ := strings.Cut(strings.TrimSpace(said), "\n")
	switch ended.ExitCode() {
	case exitSound:
		return nil
	case exitDamaged:
		return as(boltstore.ErrDamaged, first)
	case exitLocked:
		return as(boltstore.ErrLocked, first)
	case exitNewer:
		return as(boltstore.ErrNewer, first)
	case exitDied:
		if starved(said, size) {
			return fmt.Errorf("look at the store in another process: %s", first)
		}
		return died(first)
	}
	return errors.New(first)
}

func died(of string) error {
	return fmt.Errorf("%w: the process that read it died: %s", boltstore.ErrDamaged, of)
}

// starved reports whether a Go program ended for want of memory or threads, and
// not because it asked for more than any sound file makes it ask for.
func starved(said string, size uint64) bool {
	if strings.Contains(said, "failed to create new OS thread") {
		return true
	}
	_, rest, found := strings.Cut(said, "runtime: out of memory: ")
	if !found {
		return strings.Contains(said, "cannot allocate memory")
	}
	var ask, used uint64
	if _, err := fmt.Sscanf(rest, "cannot allocate %d-byte block (%d in use)", &ask, &used); err != nil {
		return true
	}
	return ask < damagedAsks+4*size && ask+used < damagedAsks+4*size
}

// told is an error of the other process.
type told struct {
	kind error
	said string
}

func as(kind error, said string) error { return &told{kind, said} }

// Error is what the other process said.
func (t *told) Error() string { return t.said }

// Unwrap returns the kind of error that it was there.
func (t *told) Unwrap() error { return t.kind }

// capped keeps the first 64 KiB.
type capped struct{ buf *bytes.Buffer }

// Write never fails.
func (c *capped) Write(p []byte) (int, error) {
	c.buf.Write(p[:min(len(p), 64<<10-c.buf.Len())])
	return len(p), nil
}
