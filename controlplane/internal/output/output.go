// Package output keeps what commands wrote, in capped files beside the
// database: of each stream of each step the head and the tail. What was
// acknowledged is durable.
package output

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"hash/maphash"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"

	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// Limits of what is kept, and of one piece of it.
const (
	// MaxHead is the size of a head.
	MaxHead = 1 << 20
	// MaxTail is the size of a tail.
	MaxTail = 256 << 10
	// MaxPiece is the size of one upload.
	MaxPiece = 16 << 10
	// Reserve is the room on the disk that outputs leave to the database.
	Reserve = 256 << 20
)

var (
	// ErrTooLarge is wrapped when a piece does not fit its part.
	ErrTooLarge = errors.New("output is larger than what is kept of it")
	// ErrNoRoom is wrapped when the rest of the disk is reserved.
	ErrNoRoom = errors.New("the rest of the disk is kept for the database; make room")
)

// stripes is the number of locks that files share.
const stripes = 64

// Key names one stream of one step.
type Key struct {
	TaskID string
	Step   uint32
	Stream taskv1.Stream
}

// Store is a directory of outputs. It is safe for concurrent use, and holds no
// file open between calls.
type Store struct {
	dir     string
	reserve uint64
	seed    maphash.Seed

	locks [stripes]sync.Mutex // each guards the files of some tasks

	mu      sync.Mutex
	changed chan struct{} // guarded by mu; closed, and replaced, at each piece
}

// Open returns the store in dir, which it makes when it is missing. It leaves
// reserve bytes of the disk free.
func Open(dir string, reserve uint64) (*Store, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("open output store: %w", err)
	}
	return &Store{dir: dir, reserve: reserve, seed: maphash.MakeSeed(), changed: make(chan struct{})}, nil
}

// Changed returns a channel that is closed once another piece has come.
func (s *Store) Changed() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.changed
}

// Put appends a piece and returns how much of the part is durable. A piece that
// begins beyond that is not written, and one that ends before it has been
// written already; neither is an error. The task's id must be checked before.
func (s *Store) Put(key Key, part agentv1.OutputPart, offset uint64, data []byte) (received uint64, err error) {
	limit, err := limitOf(part)
	if err != nil {
		return 0, err
	}
	if len(data) > MaxPiece || offset > limit || offset+uint64(len(data)) > limit {
		return 0, fmt.Errorf("%s of %d bytes at %d: %w", part, len(data), offset, ErrTooLarge)
	}
	lock := &s.locks[maphash.String(s.seed, key.TaskID)%stripes]
	lock.Lock()
	received, err = s.put(s.path(key, part), offset, data)
	lock.Unlock()
	if err != nil {
		return 0, fmt.Errorf("store output of task %s: %w", key.TaskID, err)
	}
	s.mu.Lock()
	close(s.changed)
	s.changed = make(chan struct{})
	s.mu.Unlock()
	return received, nil
}

func (s *Store) put(path string, offset uint64, data []byte) (uint64, error) {
	if err := s.room(); err != nil {
		return 0, err
	}
	f, made, err := openPart(path)
	if err != nil {
		return 0, err
	}
	size, err := f.Seek(0, io.SeekEnd)
	if err == nil && offset <= uint64(size) && offset+uint64(len(data)) > uint64(size) {
		var n int
		n, err = f.Write(data[uint64(size)-offset:])
		size += int64(n)
		err = errors.Join(err, f.Sync())
	}
	err = errors.Join(err, f.Close())
	if err == nil && made {
		err = errors.Join(syncDir(filepath.Dir(path)), syncDir(s.dir))
	}
	return uint64(size), err
}

// room returns an error when nothing more may be written.
func (s *Store) room() error {
	var disk unix.Statfs_t
	if err := unix.Statfs(s.dir, &disk); err != nil {
		return fmt.Errorf("look for room on the disk: %w", err)
	}
	if free := disk.Bavail * uint64(disk.Bsize); free < s.reserve {
		return fmt.Errorf("%d bytes are free: %w", free, ErrNoRoom)
	}
	return nil
}

// openPart opens a file for appending, and says whether it is new.
func openPart(path string) (f *os.File, made bool, err error) {
	f, err = os.OpenFile(path, os.O_WRONLY, 0)
	if !errors.Is(err, fs.ErrNotExist) {
		return f, false, err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, false, err
	}
	f, err = os.OpenFile(path, os.O_WRONLY|os.O_CREATE, 0o600)
	return f, true, err
}

// Received returns how much of each part is here.
func (s *Store) Received(key Key) (head, tail uint64, err error) {
	head, err = sizeOf(s.path(key, agentv1.OutputPart_OUTPUT_PART_HEAD))
	if err != nil {
		return 0, 0, err
	}
	tail, err = sizeOf(s.path(key, agentv1.OutputPart_OUTPUT_PART_TAIL))
	return head, tail, err
}

// Read reads from a part at offset into b. It returns 0 where there is no more.
func (s *Store) Read(key Key, part agentv1.OutputPart, offset uint64, b []byte) (int, error) {
	f, err := os.Open(s.path(key, part))
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("read output: %w", err)
	}
	n, err := f.ReadAt(b, int64(offset))
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return n, errors.Join(err, f.Close())
}

// sum is the SHA-256 over a part.
func (s *Store) sum(key Key, part agentv1.OutputPart) ([]byte, error) {
	h := sha256.New()
	f, err := os.Open(s.path(key, part))
	if errors.Is(err, fs.ErrNotExist) {
		return h.Sum(nil), nil
	}
	if err != nil {
		return nil, fmt.Errorf("read output: %w", err)
	}
	_, err = io.Copy(h, f)
	return h.Sum(nil), errors.Join(err, f.Close())
}

func (s *Store) path(key Key, part agentv1.OutputPart) string {
	stream, end := "stdout", "head"
	if key.Stream == taskv1.Stream_STREAM_STDERR {
		stream = "stderr"
	}
	if part == agentv1.OutputPart_OUTPUT_PART_TAIL {
		end = "tail"
	}
	return filepath.Join(s.dir, key.TaskID, fmt.Sprintf("%d.%s.%s", key.Step, stream, end))
}

func limitOf(part agentv1.OutputPart) (uint64, error) {
	switch part {
	case agentv1.OutputPart_OUTPUT_PART_HEAD:
		return MaxHead, nil
	case agentv1.OutputPart_OUTPUT_PART_TAIL:
		return MaxTail, nil
	default:
		return 0, fmt.Errorf("%s is no part of an output", part)
	}
}

func sizeOf(path string) (uint64, error) {
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("read output: %w", err)
	}
	return uint64(info.Size()), nil
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
