package child

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuaas/millwright/tasks/host"
)

// probeSize is how much ProbeWrite writes.
const probeSize = 4096

// ProbeMain is millwrightd probe: it carries out one probe, in the child. Its
// arguments are write, read or capacity, and the directory, or file and a file. It returns the exit
// code: 0, or 1 with the error on stderr as [FormatError] writes it.
func ProbeMain(args []string, stdout, stderr io.Writer) int {
	var err error
	switch {
	case len(args) != 2 || !filepath.IsAbs(args[1]):
		err = errors.New("usage: probe write|read|capacity|file PATH")
	case args[0] == "write":
		err = probeWrite(args[1])
	case args[0] == "read":
		err = probeRead(args[1])
	case args[0] == "file":
		err = probeFile(args[1])
	case args[0] == "capacity":
		var c host.Capacity
		if c, err = probeCapacity(args[1]); err == nil {
			_, err = fmt.Fprintf(stdout, "%d %d\n", c.TotalBytes, c.FreeBytes)
		}
	default:
		err = fmt.Errorf("probe %q: want write, read, file or capacity", args[0])
	}
	if err != nil {
		_, _ = io.WriteString(stderr, FormatError(err)) // there is nobody else to tell
		return 1
	}
	return 0
}

// probeWrite writes a file, syncs it, reads it back and removes it. Its name is
// the node's own, so that it finds what a killed probe left, and so that nodes
// that share the file system do not meet. It writes once, from the beginning, and
// closes before it reads: some object stores can do no more, and a client that
// writes at the close must have done so.
func probeWrite(dir string) (err error) {
	path := filepath.Join(dir, probeName())
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	want := make([]byte, probeSize)
	_, _ = rand.Read(want) // it never fails
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.Remove(path)) }()
	if err := fill(f, want); err != nil {
		return err
	}
	got, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if !bytes.Equal(got, want) {
		return fmt.Errorf("%s: what was read back is not what was written", path)
	}
	return nil
}

// fill writes, syncs and closes f. The read that follows is to come from the file
// system, as far as it lets us.
func fill(f *os.File, data []byte) error {
	_, err := f.Write(data)
	if err == nil {
		err = f.Sync()
	}
	if err == nil {
		_ = unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED) // advice only
	}
	return errors.Join(err, f.Close())
}

func probeName() string {
	id, _ := os.ReadFile("/etc/machine-id") // without it the host name has to do
	name, _ := os.Hostname()                // and without that the machine id
	sum := sha256.Sum256([]byte(name + "\n" + string(id)))
	return fmt.Sprintf(".millwright-probe-%x", sum[:8])
}

func probeRead(dir string) error {
	f, err := os.OpenFile(dir, os.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }() // it was only read
	if _, err = f.Readdirnames(16); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	return nil
}

func probeFile(path string) error {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }() // it was only read
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		return fmt.Errorf("%s is not a regular file", path)
	}
	if err == nil {
		_, err = io.ReadFull(f, make([]byte, probeSize))
	}
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return nil
	}
	return err
}

func probeCapacity(dir string) (host.Capacity, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return host.Capacity{}, &os.PathError{Op: "statfs", Path: dir, Err: err}
	}
	size := uint64(st.Bsize)
	return host.Capacity{TotalBytes: st.Blocks * size, FreeBytes: st.Bavail * size}, nil
}

// Probe runs a probe of executable, which is millwrightd, in a child and returns
// what it wrote. The error is the child's, or that it had to be killed.
func (r *Runner) Probe(ctx context.Context, executable, probe, dir string, timeout time.Duration) (string, error) {
	res, err := r.Run(ctx, Spec{
		Argv: []string{executable, "probe", probe, dir}, Timeout: timeout, Key: "probe " + dir,
	})
	if err != nil {
		return "", fmt.Errorf("probe %s of %s: %w", probe, dir, err)
	}
	if res.ExitCode != 0 {
		return "", fmt.Errorf("probe %s of %s: %w", probe, dir, ParseError(string(res.Stderr)))
	}
	return strings.TrimSpace(string(res.Stdout)), nil
}
