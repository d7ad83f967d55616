package boltstore

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	bolt "go.etcd.io/bbolt"
	bolterrors "go.etcd.io/bbolt/errors"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/millwright/controlplane/internal/crash"
	"github.com/gpuaas/millwright/controlplane/internal/store"
)

var (
	// ErrExists is wrapped by [Create] when the file is there already.
	ErrExists = errors.New("store exists already")
	// ErrNewer is wrapped by [Open] when a newer release wrote the file.
	ErrNewer = errors.New("store was written by a newer release")
	// ErrLocked is wrapped when another process has the file open.
	ErrLocked = errors.New("store is in use by another process")
	// ErrDamaged is wrapped by [Open] when the file cannot be read whole.
	ErrDamaged = errors.New("store is damaged; restore it from a backup")
)

const (
	openTimeout = 5 * time.Second
	// maxGroup bounds how many decisions share a commit.
	maxGroup = 512
)

// Store is a store in one file. [Store.Run] must run for writes to be carried
// out. It is safe for concurrent use.
type Store struct {
	db       *bolt.DB
	requests chan *request
	ended    chan struct{} // closed by Run when no more writes are taken
	guard    func(written bool) error
	look     func(path string) error

	mu      sync.Mutex
	problem error // of the last commit that wrote something; guarded by mu
}

// Option changes how a store works.
type Option func(*Store)

// Guard has f asked before each commit, and again when it is durable and nobody
// has heard of it. An error fails the commit. Nil asks nobody.
func Guard(f func(written bool) error) Option {
	return func(s *Store) {
		if f != nil {
			s.guard = f
		}
	}
}

// Look has f look at the file before it is opened, in place of [Check]: a damaged
// file can end the process that reads it. Nil changes nothing.
func Look(f func(path string) error) Option {
	return func(s *Store) {
		if f != nil {
			s.look = f
		}
	}
}

// room is what must be free before a store that could not be written counts as
// writable again: the file grows by 16 MiB at a time.
const room = 32 << 20

func (s *Store) outcome(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.problem = err
}

// Writable returns an error that wraps [store.ErrUnwritable] while the disk does
// not take changes: the last one failed, and there is still no room for another,
// or not even an empty one can be written.
func (s *Store) Writable(ctx context.Context) error {
	if err := s.Update(ctx, func(store.View) (*store.Change, error) { return nil, nil }); err != nil {
		return err
	}
	s.mu.Lock()
	problem := s.problem
	s.mu.Unlock()
	if problem == nil {
		return nil
	}
	var disk unix.Statfs_t
	if err := unix.Statfs(filepath.Dir(s.db.Path()), &disk); err != nil {
		return fmt.Errorf("look for room on the disk: %w: %w", store.ErrUnwritable, err)
	}
	if free := disk.Bavail * uint64(disk.Bsize); free < room {
		return fmt.Errorf("%d bytes are free: %w: %w", free, store.ErrUnwritable, problem)
	}
	return nil
}

// Create makes the file, which must not exist, and opens it. It is made under
// another name and renamed when it is whole, so that a crash leaves none that
// can neither be opened nor made again.
func Create(path string) (*Store, error) {
	if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
		if err != nil {
			return nil, fmt.Errorf("create store: %w", err)
		}
		return nil, fmt.Errorf("create store %s: %w", path, ErrExists)
	}
	unfinished := path + ".new"
	if err := os.Remove(unfinished); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("create store %s: %w", path, err)
	}
	if err := create(unfinished); err != nil {
		return nil, fmt.Errorf("create store %s: %w", path, err)
	}
	if err := os.Rename(unfinished, path); err != nil {
		return nil, fmt.Errorf("create store: %w", err)
	}
	if err := syncDir(filepath.Dir(path)); err != nil {
		return nil, err
	}
	db, err := open(path)
	if err != nil {
		return nil, err
	}
	return newStore(db), nil
}

// create makes a whole file with nothing in it.
func create(path string) error {
	db, err := open(path)
	if err != nil {
		return err
	}
	err = db.Update(func(tx *bolt.Tx) error {
		for _, name := range slices.Concat(firstBuckets(), addedBuckets()) {
			if _, err := tx.CreateBucket(name); err != nil {
				return err
			}
		}
		meta := tx.Bucket(bucketMeta)
		if err := meta.Put(keyGeneration, number(1)); err != nil {
			return err
		}
		return meta.Put(keyVersion, number(schemaVersion))
	})
	return errors.Join(err, db.Close())
}

// Open opens a file that [Create] has made, and has it looked at before. A missing or
// empty one is an error and not a fresh start: what was in it would be lost
// silently.
func Open(path string, options ...Option) (*Store, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("open store: %w", err)
	}
	if info.Size() == 0 {
		return nil, fmt.Errorf("open store %s: the file is empty: %w", path, ErrDamaged)
	}
	s := newStore(nil)
	for _, o := range options {
		o(s)
	}
	if err := s.look(path); err != nil {
		return nil, fmt.Errorf("open store %s: %w", path, err)
	}
	if s.db, err = open(path); err != nil {
		return nil, err
	}
	if err := s.db.View(checkSchema); err != nil {
		return nil, errors.Join(fmt.Errorf("open store %s: %w", path, err), s.db.Close())
	}
	if err := s.add(); err != nil {
		return nil, errors.Join(fmt.Errorf("open store %s: %w", path, err), s.db.Close())
	}
	return s, nil
}

// add makes the buckets that a file of an earlier release lacks. A file that has
// them is not written to.
func (s *Store) add() error {
	lacks := false
	err := s.db.View(func(tx *bolt.Tx) error {
		lacks = slices.ContainsFunc(addedBuckets(), func(name []byte) bool { return tx.Bucket(name) == nil })
		return nil
	})
	if err != nil || !lacks {
		return err
	}
	crash.Point("server.store.before")
	err = s.db.Update(func(tx *bolt.Tx) error {
		for _, name := range addedBuckets() {
			if _, err := tx.CreateBucketIfNotExists(name); err != nil {
				return err
			}
		}
		return nil
	})
	crash.Point("server.store.committed")
	return err
}

func open(path string) (*bolt.DB, error) {
	db, err := bolt.Open(path, 0o600, &bolt.Options{
		Timeout:        openTimeout,
		NoFreelistSync: true,
		FreelistType:   bolt.FreelistMapType,
	})
	if err != nil {
		return nil, fmt.Errorf("open store %s: %w", path, locked(err))
	}
	return db, nil
}

func locked(err error) error {
	if errors.Is(err, bolterrors.ErrTimeout) {
		return ErrLocked
	}
	return err
}

// Check reads every key and accounts for every page, so that damage is told as
// what it is: its error wraps [ErrDamaged], [ErrLocked] or [ErrNewer], or is the
// system's. Opened for writing, bbolt panics at a bad page, also in a goroutine of
// its own; and what it reads of a damaged file may end the process here, too.
func Check(path string) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("%w: %v", ErrDamaged, p)
		}
	}()
	file, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("open store: %w", err)
	}
	defer file.Close() // it was only read
	db, err := bolt.Open(path, 0o600, &bolt.Options{Timeout: openTimeout, ReadOnly: true})
	switch {
	case unavailable(err):
		return locked(err)
	case err != nil:
		return fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	return db.View(func(tx *bolt.Tx) error {
		info, err := os.Stat(path)
		if err != nil {
			return err
		}
		if tx.Size() > info.Size() {
			return fmt.Errorf("%w: it has %d bytes of %d", ErrDamaged, info.Size(), tx.Size())
		}
		if err := inOrder(tx); err != nil {
			return err
		}
		if err := accounted(tx); err != nil {
			return err
		}
		if err := countRecords(tx, file); err != nil {
			return err
		}
		return checkSchema(tx)
	})
}

// unavailable reports whether err says nothing about what is in the file.
func unavailable(err error) bool {
	for _, e := range []error{
		bolterrors.ErrTimeout, fs.ErrPermission, fs.ErrNotExist, unix.EMFILE, unix.ENFILE, unix.ENOMEM, unix.ENOSPC, unix.EROFS,
		unix.EINTR, unix.EIO, unix.ESTALE, unix.EAGAIN,
	} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

func inOrder(tx *bolt.Tx) error {
	return tx.ForEach(func(name []byte, b *bolt.Bucket) error {
		var last []byte
		return b.ForEach(func(k, _ []byte) error {
			if last != nil && bytes.Compare(last, k) >= 0 {
				return fmt.Errorf("%w: key %x follows %x in %s", ErrDamaged, k, last, name)
			}
			last = k
			return nil
		})
	})
}

// accounted wants each page to be used once or free.
func accounted(tx *bolt.Tx) error {
	var first error
	for err := range tx.Check() { // to its end, or its goroutine would stay
		if first == nil {
			first = fmt.Errorf("%w: %w", ErrDamaged, err)
		}
	}
	return first
}

func newStore(db *bolt.DB) *Store {
	return &Store{
		db: db, requests: make(chan *request), ended: make(chan struct{}), guard: func(bool) error { return nil }, look: Check,
	}
}

func checkSchema(tx *bolt.Tx) error {
	meta := tx.Bucket(bucketMeta)
	if meta == nil {
		return errors.New("this is not a store of millwright-server")
	}
	v, err := parseNumber(meta.Get(keyVersion))
	switch {
	case err != nil:
		return fmt.Errorf("schema version: %w", err)
	case v > schemaVersion:
		return fmt.Errorf("schema version %d, this release knows %d: %w", v, schemaVersion, ErrNewer)
	}
	for _, name := range firstBuckets() {
		if tx.Bucket(name) == nil {
			return fmt.Errorf("bucket %s is missing", name)
		}
	}
	return nil
}

// Close closes the file. [Store.Run] must have returned, or never been called.
func (s *Store) Close() error { return s.db.Close() }

// View implements [store.Reader].
func (s *Store) View(ctx context.Context, read func(store.View) error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	return s.db.View(func(tx *bolt.Tx) error { return read(view{tx}) })
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("sync directory: %w", err)
	}
	if err := d.Sync(); err != nil {
		return errors.Join(fmt.Errorf("sync directory %s: %w", dir, err), d.Close())
	}
	return d.Close()
}
