// Package containerlog keeps what a container writes, in little room. Its
// process is started by the container's shim and lives as long as the container,
// whatever becomes of the agent and of containerd.
//
// A stream is kept in two files, NAME.old and NAME.new, of at most 512 KiB each:
// when the new one is full it takes the place of the old one.
package containerlog

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

const segment = 512 << 10

// The descriptors that a shim gives to its logger.
const (
	fdStdout = 3
	fdStderr = 4
	fdReady  = 5
)

// Main is millwrightd container-log: it takes both streams of a container until
// they end, and keeps them in the directory that its one argument names. It
// returns the exit code.
func Main(args []string, stderr io.Writer) int {
	if len(args) != 1 || !filepath.IsAbs(args[0]) {
		_, _ = fmt.Fprintln(stderr, "usage: container-log DIRECTORY") // there is nobody else to tell
		return 2
	}
	ready := os.NewFile(fdReady, "ready")
	if err := ready.Close(); err != nil {
		_, _ = fmt.Fprintln(stderr, err) // there is nobody else to tell
		return 1
	}
	var wg sync.WaitGroup
	for fd, name := range map[uintptr]string{fdStdout: "stdout", fdStderr: "stderr"} {
		wg.Go(func() { Keep(os.NewFile(fd, name), args[0], name) })
	}
	wg.Wait()
	return 0
}

// Keep reads a stream to its end and keeps it in dir. What cannot be written is
// dropped: a container must not hang on its own output.
func Keep(r io.Reader, dir, name string) {
	var f *os.File
	written := 0
	buf := make([]byte, 32<<10)
	for {
		n, err := r.Read(buf)
		if n > 0 {
			if f == nil || written+n > segment {
				f, written = next(f, dir, name), 0
			}
			if f != nil {
				k, _ := f.Write(buf[:n]) // a full disk costs output, and nothing else
				written += k
			}
		}
		if err != nil {
			break
		}
	}
	if f != nil {
		_ = f.Close() // it is read as far as it was written
	}
}

// next begins a new file, or returns nil when there is no room for one.
func next(full *os.File, dir, name string) *os.File {
	path := filepath.Join(dir, name+".new")
	if full != nil {
		_ = full.Close()                                     // it is read as far as it was written
		_ = os.Rename(path, filepath.Join(dir, name+".old")) // otherwise the new file replaces it
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil
	}
	return f
}

// LastLines returns the last lines of a container's error output, or of its
// output when that is empty: at most n lines of 300 bytes.
func LastLines(dir string, n int) ([]string, error) {
	for _, name := range []string{"stderr", "stdout"} {
		var text string
		for _, part := range []string{".old", ".new"} {
			b, err := os.ReadFile(filepath.Join(dir, name+part))
			if err != nil && !errors.Is(err, fs.ErrNotExist) {
				return nil, fmt.Errorf("read what a container wrote: %w", err)
			}
			text += string(b)
		}
		var lines []string
		for line := range strings.Lines(strings.ToValidUTF8(text, "?")) {
			if line = strings.TrimSpace(line); line != "" {
				lines = append(lines, line[:min(len(line), 300)])
			}
		}
		if len(lines) > 0 {
			return lines[max(0, len(lines)-n):], nil
		}
	}
	return nil, nil
}
