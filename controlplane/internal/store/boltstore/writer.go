package boltstore

import (
	"context"
	"fmt"
	"runtime/debug"

	bolt "go.etcd.io/bbolt"

	"github.com/gpuaas/millwright/controlplane/internal/crash"
	"github.com/gpuaas/millwright/controlplane/internal/store"
)

// request is one decision that waits for the writer.
type request struct {
	ctx    context.Context // of the caller that waits for done
	decide store.Decide
	done   chan error // holds one
}

// Update implements [store.Writer].
func (s *Store) Update(ctx context.Context, decide store.Decide) error {
	r := &request{ctx: ctx, decide: decide, done: make(chan error, 1)}
	select {
	case s.requests <- r:
	case <-s.ended:
		return store.ErrClosed
	case <-ctx.Done():
		return ctx.Err()
	}
	// The writer has it: what decide captured belongs to the writer until then.
	return <-r.done
}

// Run carries out writes until ctx ends, and then those that it has taken.
func (s *Store) Run(ctx context.Context) error {
	defer close(s.ended)
	group := make([]*request, 0, maxGroup)
	for {
		select {
		case <-ctx.Done():
			return nil
		case r := <-s.requests:
			group = s.gather(append(group[:0], r))
		}
		s.commit(group)
		clear(group)
	}
}

// gather adds all that waits now; it does not wait for more.
func (s *Store) gather(group []*request) []*request {
	for len(group) < maxGroup {
		select {
		case r := <-s.requests:
			group = append(group, r)
		default:
			return group
		}
	}
	return group
}

// commit carries a group out in one transaction. A decision that is refused
// gets its own error and has written nothing; a transaction that fails fails
// for all.
func (s *Store) commit(group []*request) {
	results := make([]error, len(group))
	wrote := false
	err := s.db.Update(func(tx *bolt.Tx) error {
		for i, r := range group {
			writes, err := prepare(tx, r)
			if err != nil {
				results[i] = err
				continue
			}
			wrote = wrote || len(writes) > 0
			for _, w := range writes {
				if err := w.do(tx); err != nil {
					return err
				}
			}
		}
		crash.Point("server.store.before")
		if !wrote {
			return nil
		}
		return s.guard(false)
	})
	if err == nil {
		crash.Point("server.store.committed")
	}
	if err == nil && wrote {
		err = s.guard(true)
	}
	if wrote || err != nil {
		s.outcome(err)
	}
	for i, r := range group {
		if err != nil && results[i] == nil {
			results[i] = fmt.Errorf("commit to store: %w: %w", store.ErrUnwritable, err)
		}
		r.done <- results[i]
	}
}

// prepare runs the decision and encodes its change. A decision that panics is
// refused: the node or caller whose bytes caused it must not stop the others.
func prepare(tx *bolt.Tx, r *request) (writes []write, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic in a decision: %v\n%s", p, debug.Stack())
		}
	}()
	if err := r.ctx.Err(); err != nil {
		return nil, err
	}
	change, err := r.decide(view{tx})
	if err != nil || change == nil {
		return nil, err
	}
	return encode(view{tx}, change)
}

// write is one put, or a delete when the value is nil.
type write struct {
	bucket, key, value []byte
}

func (w write) do(tx *bolt.Tx) error {
	if w.value == nil {
		return tx.Bucket(w.bucket).Delete(w.key)
	}
	return tx.Bucket(w.bucket).Put(w.key, w.value)
}
