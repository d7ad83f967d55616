package state_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	bolt "go.etcd.io/bbolt"

	"github.com/gpuaas/millwright/agent/internal/state"
)

// TestMigrate brings a file from version 1 to one with two more steps, and
// back it does not go.
func TestMigrate(t *testing.T) {
	cfg := config(t.TempDir(), &fakeClock{now: t0})
	s := open(t, cfg)
	update(t, s, appendEvent("a"))
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(cfg.Dir, "state.db")
	db := openBolt(t, path)
	boom := errors.New("boom")
	make := func(name string, err error) func(*bolt.Tx) error {
		return func(tx *bolt.Tx) error {
			if _, cerr := tx.CreateBucket([]byte(name)); cerr != nil {
				return cerr
			}
			return err
		}
	}
	// A step that fails changes nothing.
	if err := state.Migrate(db, make("two", nil), make("three", boom)); !errors.Is(err, boom) {
		t.Errorf("Migrate with a failing step = %v", err)
	}
	if err := state.Migrate(db, make("two", nil), make("three", nil)); err != nil {
		t.Errorf("Migrate = %v", err)
	}
	if err := state.Migrate(db, make("two", boom), make("three", boom)); err != nil {
		t.Errorf("Migrate of a file that is up to date = %v", err)
	}
	if err := db.View(func(tx *bolt.Tx) error {
		if tx.Bucket([]byte("two")) == nil || tx.Bucket([]byte("three")) == nil {
			t.Error("the steps were not applied")
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	// The copy is of before.
	if err := os.Rename(path+".v1.bak", filepath.Join(cfg.Dir, "copy.db")); err != nil {
		t.Fatal(err)
	}
	old := openBolt(t, filepath.Join(cfg.Dir, "copy.db"))
	if err := old.View(func(tx *bolt.Tx) error {
		if tx.Bucket([]byte("two")) != nil || tx.Bucket([]byte("frames")).Stats().KeyN != 2 {
			t.Error("the copy is not the file of before")
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if err := old.Close(); err != nil {
		t.Fatal(err)
	}
	// An older agent leaves a newer file alone.
	cfg.JustJoined = false
	if _, err := state.Open(t.Context(), cfg); !errors.Is(err, state.ErrNewerSchema) {
		t.Errorf("Open of a newer file = %v, want ErrNewerSchema", err)
	}
	if n := asides(t, cfg.Dir); n != 0 {
		t.Errorf("%d files set aside: a newer file must stay where it is", n)
	}
}

func openBolt(t *testing.T, path string) *bolt.DB {
	t.Helper()
	db, err := bolt.Open(path, 0o600, nil)
	if err != nil {
		t.Fatal(err)
	}
	return db
}
