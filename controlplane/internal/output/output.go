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
	doubt   map[string]int64 // guarded by mu; see put
	changed chan struct{}    // guarded by mu; closed, and replaced, at each piece
}

// Open returns the store in dir, which it makes when it is missing. It leaves
// reserve bytes of the disk free.
func Open(dir string, reserve uint64) (*Store, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("open output store: %w", err)
	}
	if err := syncDir(filepath.Dir(filepath.Clean(dir))); err != nil {
		return nil, fmt.Errorf("open output store: %w", err)
	}
	return &Store{
		dir: dir, reserve: reserve, seed: maphash.MakeSeed(), doubt: map[string]int64{}, changed: make(chan struct{}),
	}, nil
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

// put writes what is new of a piece. When the disk refuses it, what it holds
// beyond the old end is not known: the part is cut there, now or before it is
// used again, and never counted as received.
func (s *Store) put(path string, offset uint64, data []byte) (uint64, error) {
	if err := s.room(); err != nil {
		return 0, err
	}
	f, err := openPart(path)
	if err != nil {
		return 0, err
	}
	size, err := s.settle(path, f)
	if err == nil {
		size, err = s.append(path, f, size, offset, data)
	}
	return uint64(size), errors.Join(err, f.Close())
}

// append writes what is beyond size. What is there already is made durable too:
// a server that was killed may have written it and no more.
func (s *Store) append(path string, f *os.File, size int64, offset uint64, data []byte) (int64, error) {
	begins := size == 0
	var n int
	var err error
	if offset <= uint64(size) && offset+uint64(len(data)) > uint64(size) {
		n, err = f.WriteAt(data[uint64(size)-offset:], size)
	} else {
		begins = true
	}
	if err = errors.Join(err, f.Sync()); err == nil && begins {
		err = errors.Join(syncDir(filepath.Dir(path)), syncDir(s.dir))
	}
	if err == nil {
		return size + int64(n), nil
	}
	s.doubts(path, size)
	_, errCut := s.settle(path, f)
	return size, errors.Join(err, errCut)
}

// doubts notes that a part is not known beyond size.
func (s *Store) doubts(path string, size int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.doubt[path] = size
}

// settle returns the size of a part, of which nothing is in doubt then. The lock
// of its task is held.
func (s *Store) settle(path string, f *os.File) (int64, error) {
	s.mu.Lock()
	size, doubt := s.doubt[path]
	s.mu.Unlock()
	if !doubt {
		info, err := f.Stat()
		if err != nil {
			return 0, err
		}
		return info.Size(), nil
	}
	if err := f.Truncate(size); err != nil {
		return size, err
	}
	if err := f.Sync(); err != nil {
		return size, err
	}
	s.mu.Lock()
	delete(s.doubt, path)
	s.mu.Unlock()
	return size, nil
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

// openPart opens a file to write to, and makes it when it is missing.
func openPart(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if !errors.Is(err, fs.ErrNotExist) {
		return f, err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, err
	}
	return os.OpenFile(path, os.O_WRONLY|os.O_CREATE, 0o600)
}

// Received returns how much of each part is here.
func (s *Store) Received(key Key) (head, tail uint64, err error) {
	head, err = s.sizeOf(s.path(key, agentv1.OutputPart_OUTPUT_PART_HEAD))
	if err != nil {
		return 0, 0, err
	}
	tail, err = s.sizeOf(s.path(key, agentv1.OutputPart_OUTPUT_PART_TAIL))
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

func (s *Store) sizeOf(path string) (uint64, error) {
	s.mu.Lock()
	known, doubt := s.doubt[path]
	s.mu.Unlock()
	if doubt {
		return uint64(known), nil
	}
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
