package kernel

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Path is the kernel's log.
const Path = "/dev/kmsg"

// again is how long a source that is at its end is left alone: a regular file
// cannot be waited for. /dev/kmsg and pipes are waited for in the kernel.
const again = 100 * time.Millisecond

// Reader reads the kernel's log from its oldest record on. It is not safe for
// concurrent use.
type Reader struct {
	f    *os.File
	buf  []byte
	rest []byte // read, and not yet given out
	last uint64
	any  bool
	lost uint64
}

// Open opens the log at path: [Path], or a file or pipe in the same form.
func Open(path string) (*Reader, error) {
	// Not os.Open: without O_NONBLOCK the runtime cannot wait for a device, and
	// a reader could not be closed.
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	return &Reader{f: os.NewFile(uintptr(fd), path), buf: make([]byte, 16<<10)}, nil
}

// Close ends the reader; a Next that waits returns an error.
func (r *Reader) Close() error { return r.f.Close() }

// Lost is how many records are known to be missed since the first: the kernel
// writes over its oldest ones.
func (r *Reader) Lost() uint64 { return r.lost }

// Next waits for the next record. What is no record is passed over. It returns
// ctx's error once ctx has ended, and otherwise what reading gave.
func (r *Reader) Next(ctx context.Context) (Record, error) {
	_ = r.f.SetReadDeadline(time.Time{}) // of an earlier call that was ended
	stop := context.AfterFunc(ctx, func() {
		_ = r.f.SetReadDeadline(time.Unix(1, 0)) // a regular file has none, and never blocks
	})
	defer stop()
	for {
		if line, ok := r.line(); ok {
			if rec, err := ParseRecord(line); err == nil {
				r.count(rec)
				return rec, nil
			}
			continue
		}
		if err := ctx.Err(); err != nil {
			return Record{}, err
		}
		if err := r.fill(ctx); err != nil {
			if ctx.Err() != nil {
				return Record{}, ctx.Err()
			}
			return Record{}, err
		}
	}
}

func (r *Reader) fill(ctx context.Context) error {
	n, err := r.f.Read(r.buf)
	r.rest = append(r.rest, r.buf[:n]...)
	if len(r.rest) > 2*len(r.buf) { // no line feed in 32 KiB: this is no log
		r.rest = r.rest[:0]
	}
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.EPIPE): // written over since; the sequence tells how many
		return nil
	case errors.Is(err, unix.EINVAL): // a record larger than the buffer is passed over by the kernel
		return nil
	case errors.Is(err, io.EOF):
		t := time.NewTimer(again)
		defer t.Stop()
		select {
		case <-ctx.Done():
		case <-t.C:
		}
		return nil
	}
	return fmt.Errorf("read the kernel's log: %w", err)
}

// line takes the next whole line that begins a record.
func (r *Reader) line() ([]byte, bool) {
	for {
		i := bytes.IndexByte(r.rest, '\n')
		if i < 0 {
			return nil, false
		}
		line := bytes.Clone(r.rest[:i])
		r.rest = r.rest[:copy(r.rest, r.rest[i+1:])]
		if len(line) > 0 && line[0] != ' ' { // a space begins a line of the dictionary
			return line, true
		}
	}
}

func (r *Reader) count(rec Record) {
	if r.any && rec.Sequence > r.last+1 {
		r.lost += rec.Sequence - r.last - 1
	}
	r.any, r.last = true, rec.Sequence
}
