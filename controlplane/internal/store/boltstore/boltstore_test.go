package boltstore_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"testing"

	bolt "go.etcd.io/bbolt"

	healthv1 "github.com/gpuaas/millwright/proto/millwright/health/v1"
	serverv1 "github.com/gpuaas/millwright/proto/millwright/server/v1"

	"github.com/gpuaas/millwright/controlplane/internal/store"
	"github.com/gpuaas/millwright/controlplane/internal/store/boltstore"
	"github.com/gpuaas/millwright/controlplane/internal/store/storetest"
)

// run runs the writer of a store; stop ends it and closes the file.
func run(t *testing.T, s *boltstore.Store) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := s.Run(ctx); err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	return func() {
		cancel()
		wg.Wait()
		if err := s.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	}
}

func TestSuite(t *testing.T) {
	t.Parallel()
	storetest.Run(t, func(t *testing.T) (storetest.Store, func() storetest.Store) {
		path := filepath.Join(t.TempDir(), "store.db")
		s, err := boltstore.Create(path)
		if err != nil {
			t.Fatal(err)
		}
		stop := run(t, s)
		t.Cleanup(func() { stop() })
		return s, func() storetest.Store {
			stop()
			s, err := boltstore.Open(path)
			if err != nil {
				t.Fatal(err)
			}
			stop = run(t, s)
			return s
		}
	})
}

// TestOpenOfAnEarlierRelease opens a file that lacks what was added since.
func TestOpenOfAnEarlierRelease(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "store.db")
	s, err := boltstore.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	db, err := bolt.Open(path, 0o600, nil)
	if err != nil {
		t.Fatal(err)
	}
	err = db.Update(func(tx *bolt.Tx) error {
		return errors.Join(tx.DeleteBucket([]byte("health")), tx.DeleteBucket([]byte("changes")))
	})
	if err := errors.Join(err, db.Close()); err != nil {
		t.Fatal(err)
	}
	if s, err = boltstore.Open(path); err != nil {
		t.Fatal(err)
	}
	defer run(t, s)()
	row := &serverv1.HealthRow{Node: "n", Condition: &healthv1.Condition{Key: "k"}}
	if err := s.Update(t.Context(), func(store.View) (*store.Change, error) {
		return &store.Change{Health: []*serverv1.HealthRow{row}}, nil
	}); err != nil {
		t.Fatal(err)
	}
	if err := s.View(t.Context(), func(v store.View) error { _, err := v.Condition(store.HealthKey{Node: "n", Key: "k"}); return err }); err != nil {
		t.Error(err)
	}
}

func TestOpenRefuses(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	good := filepath.Join(dir, "good.db")
	s, err := boltstore.Create(good)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := boltstore.Create(good); !errors.Is(err, boltstore.ErrExists) {
		t.Errorf("Create of a store that is there = %v", err)
	}
	if info, err := os.Stat(good); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode of the file: %v, %v", info.Mode(), err)
	}
	if _, err := boltstore.Open(filepath.Join(dir, "none.db")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("Open of nothing = %v", err)
	}
	empty := filepath.Join(dir, "empty.db")
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := boltstore.Open(empty); err == nil {
		t.Error("an empty file was opened as a fresh store")
	}
	if info, err := os.Stat(empty); err != nil || info.Size() != 0 {
		t.Errorf("the empty file was written to: %v, %v", info, err)
	}
	newer := alter(t, good, filepath.Join(dir, "newer.db"), func(tx *bolt.Tx) error {
		return tx.Bucket([]byte("meta")).Put([]byte("version"), binary.BigEndian.AppendUint64(nil, 2))
	})
	if _, err := boltstore.Open(newer); !errors.Is(err, boltstore.ErrNewer) {
		t.Errorf("Open of a newer store = %v", err)
	}
	foreign := alter(t, good, filepath.Join(dir, "foreign.db"), func(tx *bolt.Tx) error { return tx.DeleteBucket([]byte("meta")) })
	if _, err := boltstore.Open(foreign); err == nil {
		t.Error("another program's file was opened")
	}
	lacking := alter(t, good, filepath.Join(dir, "lacking.db"), func(tx *bolt.Tx) error { return tx.DeleteBucket([]byte("log")) })
	if _, err := boltstore.Open(lacking); err == nil {
		t.Error("a store without a log was opened")
	}
}

func alter(t *testing.T, from, to string, change func(*bolt.Tx) error) string {
	t.Helper()
	data, err := os.ReadFile(from)
	if err == nil {
		err = os.WriteFile(to, data, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	db, err := bolt.Open(to, 0o600, nil)
	if err == nil {
		err = errors.Join(db.Update(change), db.Close())
	}
	if err != nil {
		t.Fatal(err)
	}
	return to
}

func TestUpdateAfterTheEnd(t *testing.T) {
	t.Parallel()
	s, err := boltstore.Create(filepath.Join(t.TempDir(), "store.db"))
	if err != nil {
		t.Fatal(err)
	}
	run(t, s)()
	err = s.Update(t.Context(), func(store.View) (*store.Change, error) { return nil, nil })
	if !errors.Is(err, store.ErrClosed) {
		t.Errorf("Update = %v, want ErrClosed", err)
	}
}

// TestOneRefusalLeavesTheGroup checks that decisions which share a commit stand
// each for itself.
func TestOneRefusalLeavesTheGroup(t *testing.T) {
	t.Parallel()
	s, err := boltstore.Create(filepath.Join(t.TempDir(), "store.db"))
	if err != nil {
		t.Fatal(err)
	}
	const callers = 100
	refused := errors.New("refused")
	results := make([]error, callers)
	var wg sync.WaitGroup
	for i := range callers { // all wait before the writer begins, so that they are one group
		wg.Go(func() {
			results[i] = s.Update(context.Background(), func(v store.View) (*store.Change, error) {
				if i%2 == 1 {
					return nil, refused
				}
				return &store.Change{Entries: []store.Entry{{Index: v.LastIndex() + 1, Bytes: []byte("x")}}}, nil
			})
		})
	}
	stop := run(t, s)
	wg.Wait()
	defer stop()
	for i, err := range results {
		if want := i%2 == 1; errors.Is(err, refused) != want || err != nil != want {
			t.Errorf("caller %d got %v", i, err)
		}
	}
	err = s.View(t.Context(), func(v store.View) error {
		if v.LastIndex() != callers/2 {
			t.Errorf("%d entries, want %d", v.LastIndex(), callers/2)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func BenchmarkUpdate(b *testing.B) {
	s, err := boltstore.Create(filepath.Join(b.TempDir(), "store.db"))
	if err != nil {
		b.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { _ = s.Run(ctx) })
	defer func() {
		cancel()
		wg.Wait()
		_ = s.Close()
	}()
	b.SetParallelism(64)
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			err := s.Update(ctx, func(v store.View) (*store.Change, error) {
				return &store.Change{Entries: []store.Entry{{Index: v.LastIndex() + 1, Bytes: make([]byte, 512)}}}, nil
			})
			if err != nil {
				b.Error(err)
			}
		}
	})
}

// A damaged store is told as such: bbolt itself panics, and a server that panics
// is started again without end.
func TestOpenOfADamagedStore(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "store.db")
	s, err := boltstore.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	stop := run(t, s)
	for i := range uint64(50) {
		entry := store.Entry{Index: i + 1, Bytes: make([]byte, 3000)}
		if err := s.Update(t.Context(), func(store.View) (*store.Change, error) { return &store.Change{Entries: []store.Entry{entry}}, nil }); err != nil {
			t.Fatal(err)
		}
	}
	stop()
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	open := func(data []byte) error {
		t.Helper()
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		s, err := boltstore.Open(path)
		if err == nil {
			err = s.Close()
		}
		return err
	}
	if err := open(good); err != nil {
		t.Fatalf("Open of what is not damaged = %v", err)
	}
	page, damaged := os.Getpagesize(), 0
	for at := 2 * page; at < len(good); at += page { // the first two are the meta pages
		for _, filler := range []byte{0, 0xff} {
			data := bytes.Clone(good)
			copy(data[at:], bytes.Repeat([]byte{filler}, page))
			switch err := open(data); {
			case errors.Is(err, boltstore.ErrDamaged):
				damaged++
			case err != nil:
				t.Errorf("page %d of %#x: Open = %v", at/page, filler, err)
			}
		}
	}
	if damaged < 20 { // the others are free
		t.Errorf("damage was found in %d cases", damaged)
	}
	for _, size := range []int{len(good) / 4, 10 * page} {
		if err := open(good[:size]); !errors.Is(err, boltstore.ErrDamaged) {
			t.Errorf("cut off after %d bytes: Open = %v", size, err)
		}
	}
}

// TestCreateAfterACrash leaves what a crash in the middle of Create leaves, at
// both of its stages.
func TestCreateAfterACrash(t *testing.T) {
	t.Parallel()
	for name, left := range map[string][]byte{"empty": nil, "half": bytes.Repeat([]byte{0xff}, 5000)} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			path := filepath.Join(t.TempDir(), "store.db")
			if err := os.WriteFile(path+".new", left, 0o600); err != nil {
				t.Fatal(err)
			}
			s, err := boltstore.Create(path)
			if err != nil {
				t.Fatal(err)
			}
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			if _, err := os.Stat(path + ".new"); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("the unfinished file is still there: %v", err)
			}
			if s, err = boltstore.Open(path); err != nil {
				t.Fatal(err)
			}
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
		})
	}
}
