package state

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"

	"golang.org/x/sys/unix"
)

const (
	// verifyRoom is the address space, in bytes, that a process that looks at a
	// state file has beside four times the size of the file. bbolt maps mmapSize
	// of it, and the Go runtime reserves more than 1 GiB before it does anything.
	verifyRoom = 3<<30 + mmapSize
	// verifyCPU bounds that process, in seconds of processor time. A sound file
	// takes less than one.
	verifyCPU = 30
	// damagedAsks is the memory, in bytes, that no sound file makes a reader
	// ask for. Whoever fails to get less lacks memory for another reason.
	damagedAsks = 512 << 20
)

// limitSelf bounds the memory and the processor time of this process before it
// opens the file at path: one flipped bit can make a reader ask for more memory
// than the machine has. At cpu seconds of processor time it says so and ends.
func limitSelf(path string, cpu int, stderr io.Writer) error {
	spent, stop := signal.NotifyContext(context.Background(), unix.SIGXCPU)
	context.AfterFunc(spent, func() {
		defer stop()
		_, _ = fmt.Fprintf(stderr, "it used %d s of processor time", cpu) // there is nobody else to tell
		os.Exit(exitDied)
	})
	room := uint64(verifyRoom)
	if fi, err := os.Stat(path); err == nil { // a missing file is found by who opens it
		room += 4 * uint64(fi.Size())
	}
	for _, l := range []struct {
		what     string
		resource int
		most     uint64
	}{{"memory", unix.RLIMIT_AS, room}, {"processor time", unix.RLIMIT_CPU, uint64(cpu)}} {
		var now unix.Rlimit
		if err := unix.Getrlimit(l.resource, &now); err != nil {
			return fmt.Errorf("read the limit of %s: %w", l.what, err)
		}
		now.Cur = min(now.Max, l.most)
		if err := unix.Setrlimit(l.resource, &now); err != nil {
			return fmt.Errorf("limit %s to look at %s: %w", l.what, path, err)
		}
	}
	return nil
}

// askedTooMuch reports whether a Go program ended because it asked for more
// memory than any sound file makes it ask for.
func askedTooMuch(said string) bool {
	const begin = "runtime: out of memory: "
	_, rest, found := strings.Cut(said, begin)
	if !found {
		return false
	}
	var ask, used uint64
	if _, err := fmt.Sscanf(rest, "cannot allocate %d-byte block (%d in use)", &ask, &used); err != nil {
		return false
	}
	return ask >= damagedAsks || used >= damagedAsks || ask+used >= damagedAsks
}
