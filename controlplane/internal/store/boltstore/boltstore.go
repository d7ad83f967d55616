package boltstore

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	bolt "go.etcd.io/bbolt"
	bolterrors "go.etcd.io/bbolt/errors"

	"github.com/gpuaas/millwright/controlplane/internal/store"
)

var (
	// ErrExists is wrapped by [Create] when the file is there already.
	ErrExists = errors.New("store exists already")
	// ErrNewer is wrapped by [Open] when a newer release wrote the file.
	ErrNewer = errors.New("store was written by a newer release")
	// ErrLocked is wrapped when another process has the file open.
	ErrLocked = errors.New("store is in use by another process")
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
}

// Create makes the file, which must not exist, and opens it.
func Create(path string) (*Store, error) {
	if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
		if err != nil {
			return nil, fmt.Errorf("create store: %w", err)
		}
		return nil, fmt.Errorf("create store %s: %w", path, ErrExists)
	}
	db, err := open(path)
	if err != nil {
		return nil, err
	}
	err = db.Update(func(tx *bolt.Tx) error {
		for _, name := range allBuckets() {
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
	if err != nil {
		return nil, errors.Join(fmt.Errorf("create store %s: %w", path, err), db.Close())
	}
	if err := syncDir(filepath.Dir(path)); err != nil {
		return nil, errors.Join(err, db.Close())
	}
	return newStore(db), nil
}

// Open opens a file that [Create] has made. A missing or empty one is an error
// and not a fresh start: what was in it would be lost silently.
func Open(path string) (*Store, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("open store: %w", err)
	}
	if info.Size() == 0 {
		return nil, fmt.Errorf("open store %s: the file is empty; restore it from a backup", path)
	}
	db, err := open(path)
	if err != nil {
		return nil, err
	}
	if err := db.View(checkSchema); err != nil {
		return nil, errors.Join(fmt.Errorf("open store %s: %w", path, err), db.Close())
	}
	return newStore(db), nil
}

func open(path string) (*bolt.DB, error) {
	db, err := bolt.Open(path, 0o600, &bolt.Options{
		Timeout:        openTimeout,
		NoFreelistSync: true,
		FreelistType:   bolt.FreelistMapType,
	})
	if errors.Is(err, bolterrors.ErrTimeout) {
		err = ErrLocked
	}
	if err != nil {
		return nil, fmt.Errorf("open store %s: %w", path, err)
	}
	return db, nil
}

func newStore(db *bolt.DB) *Store {
	return &Store{db: db, requests: make(chan *request), ended: make(chan struct{})}
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
	for _, name := range allBuckets() {
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
