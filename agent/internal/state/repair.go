package state

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	bolt "go.etcd.io/bbolt"

	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
)

// maxLost bounds how much of what is lost is told one by one.
const maxLost = 100

// Rescue is what could be saved of a state file.
type Rescue struct {
	// Facts are those of the new file.
	Facts Facts `json:"facts"`
	// Records is how many were saved, by bucket.
	Records map[string]int `json:"records"`
	// Lost are the places that could not be read, at most 100, and LostMore how
	// many there are beyond.
	Lost     []string `json:"lost,omitempty"`
	LostMore int      `json:"lost_more,omitempty"`
	// Wrong is what the records that were saved contradict among themselves.
	Wrong string `json:"wrong,omitempty"`
}

func (r *Rescue) lose(where string) {
	if len(r.Lost) == maxLost {
		r.LostMore++
		return
	}
	r.Lost = append(r.Lost, where)
}

// RepairFile saves all records of the state file at path that can still be read
// into a new file at out, which must not exist, and leaves path as it is. The
// newest root is taken that still leads to a journal; what it does not lead to is
// told. Its error wraps [ErrDamaged] when no journal can be saved.
func RepairFile(path, out string) (*Rescue, error) {
	in, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("repair state file: %w", err)
	}
	defer in.Close() // it was only read
	metas, problems := openPages(in)
	if len(metas) == 0 {
		return nil, fmt.Errorf("repair %s: %w: no root is left: %w", path, ErrDamaged, errors.Join(problems...))
	}
	var failed []error
	for _, meta := range metas {
		r, err := rescue(in, meta, out)
		if err == nil {
			for _, p := range problems {
				r.lose(p.Error())
			}
			for _, e := range failed {
				r.lose("the last commit: " + e.Error())
			}
			return r, nil
		}
		if !errors.Is(err, ErrDamaged) {
			return nil, err
		}
		failed = append(failed, err)
		if err := os.Remove(out); err != nil {
			return nil, fmt.Errorf("repair %s: %w", path, err)
		}
	}
	return nil, fmt.Errorf("repair %s: %w: %w", path, ErrDamaged, errors.Join(failed...))
}

// rescue writes what one root leads to.
func rescue(in *os.File, meta boltMeta, out string) (*Rescue, error) {
	made, err := os.OpenFile(out, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("make the repaired file: %w", err)
	}
	if err := made.Close(); err != nil {
		return nil, fmt.Errorf("make the repaired file: %w", err)
	}
	db, err := openBolt(out, defaultLockTimeout, false)
	if err != nil {
		return nil, err
	}
	r := &Rescue{Records: map[string]int{}}
	err = db.Update(func(tx *bolt.Tx) error { return r.fill(tx, in, meta) })
	if cerr := db.Close(); err == nil && cerr != nil {
		err = fmt.Errorf("close the repaired file: %w", cerr)
	}
	if err != nil {
		return nil, err
	}
	r.Facts, err = CheckFile(out, defaultLockTimeout)
	if errors.Is(err, ErrDamaged) || err != nil && !errors.Is(err, ErrInvariant) {
		return nil, err
	}
	if err != nil {
		r.Wrong = err.Error()
	}
	return r, nil
}

func (r *Rescue) fill(tx *bolt.Tx, in *os.File, meta boltMeta) error {
	for _, name := range buckets {
		if _, err := tx.CreateBucketIfNotExists(name); err != nil {
			return fmt.Errorf("make bucket %s: %w", name, err)
		}
	}
	var failed error
	p := &pageReader{file: in, meta: meta}
	p.record = func(bucket string, k, v []byte) {
		b := tx.Bucket([]byte(bucket))
		if b == nil {
			r.lose(fmt.Sprintf("bucket %q: record %q: there is no such bucket", bucket, k))
			return
		}
		if err := b.Put(bytes.Clone(k), bytes.Clone(v)); err != nil {
			failed = errors.Join(failed, fmt.Errorf("save record %q: %w", k, err))
			return
		}
		r.Records[bucket]++
	}
	p.bad = func(bucket string, err error) error {
		if unavailable(err) {
			return err
		}
		r.lose(fmt.Sprintf("bucket %q: %v", bucket, err))
		return nil
	}
	return errors.Join(p.walk(), failed)
}

// Mark returns the high-water mark in a state directory, nil when there is none.
func Mark(dir string) (*agentv1.JournalMark, error) {
	f, err := os.Open(filepath.Join(dir, markName))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read high-water mark: %w", err)
	}
	defer f.Close() // it was only read
	m := &markFile{file: f}
	var last *agentv1.JournalMark
	for slot := range int64(2) {
		if got := m.read(slot); got != nil && got.GetCounter() > last.GetCounter() {
			last = got
		}
	}
	return last, nil
}
