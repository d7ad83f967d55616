package state

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	bolt "go.etcd.io/bbolt"
)

// migrations bring a file from one schema version to the next; the version is
// how many have been applied. They only grow.
var migrations = []func(*bolt.Tx) error{
	func(tx *bolt.Tx) error { // 1: the buckets
		for _, b := range [][]byte{
			bucketMeta, bucketTasks, bucketOpen, bucketOrder, bucketSteps, bucketSeen, bucketForget,
			bucketIntents, bucketFrames, bucketClosing, bucketOutputs,
		} {
			if _, err := tx.CreateBucketIfNotExists(b); err != nil {
				return err
			}
		}
		return nil
	},
}

var (
	keyVersion  = []byte("version")
	errNoSchema = fmt.Errorf("%w: it has no schema version", ErrDamaged)
)

func readVersion(tx *bolt.Tx) (int, error) {
	b := tx.Bucket(bucketMeta)
	if b == nil {
		return 0, errNoSchema
	}
	n, err := strconv.Atoi(string(b.Get(keyVersion)))
	if err != nil || n < 1 {
		return 0, errNoSchema
	}
	return n, nil
}

func writeVersion(tx *bolt.Tx, n int) error {
	return tx.Bucket(bucketMeta).Put(keyVersion, []byte(strconv.Itoa(n)))
}

// checkVersion refuses a file that is newer than newest.
func checkVersion(tx *bolt.Tx, newest int) error {
	have, err := readVersion(tx)
	if err == nil && have > newest {
		err = fmt.Errorf("schema version %d of %s, and this agent knows %d: %w; install the newer agent again",
			have, tx.DB().Path(), newest, ErrNewerSchema)
	}
	return err
}

// migrate brings the file to the newest schema, in one transaction, after it
// has made a copy of it.
func migrate(db *bolt.DB, steps []func(*bolt.Tx) error) error {
	have := 0
	err := db.View(func(tx *bolt.Tx) (err error) {
		have, err = readVersion(tx)
		return err
	})
	if err != nil || have >= len(steps) {
		return err
	}
	if err := backup(db, fmt.Sprintf("%s.v%d.bak", db.Path(), have)); err != nil {
		return err
	}
	return db.Update(func(tx *bolt.Tx) error {
		for i := have; i < len(steps); i++ {
			if err := steps[i](tx); err != nil {
				return fmt.Errorf("migrate state to schema version %d: %w", i+1, err)
			}
		}
		return writeVersion(tx, len(steps))
	})
}

// backup copies the file durably.
func backup(db *bolt.DB, path string) error {
	err := db.View(func(tx *bolt.Tx) error { return tx.CopyFile(path, 0o600) })
	if err != nil {
		return fmt.Errorf("copy state file before migration: %w", err)
	}
	f, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("open copy of the state file: %w", err)
	}
	defer f.Close()
	if err := f.Sync(); err != nil {
		return fmt.Errorf("sync copy of the state file: %w", err)
	}
	return syncDir(filepath.Dir(path))
}
