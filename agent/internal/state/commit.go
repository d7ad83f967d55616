package state

import (
	"errors"
	"fmt"
	"time"

	bolt "go.etcd.io/bbolt"
	berrors "go.etcd.io/bbolt/errors"

	"github.com/gpuaas/millwright/agent/internal/crash"
)

// maxGroup bounds a commit, so that its callers wait for little else.
const maxGroup = 512

// change is one caller of Update.
type change struct {
	fn func(*Tx) error
	// apart is done in the turn of this caller, behind the commit; optional.
	apart func() error
	err   error
	turn  chan bool // true: commit for those behind; false: it is done
}

// Update makes what fn writes durable, all or nothing, before it returns. When
// fn returns an error nothing of it is written and the error is returned as it
// is; when the disk refuses, the error wraps [ErrWrite].
//
// fn runs in another caller's goroutine, together with the changes of others.
// It must not block, nor call the store. What it reads includes the changes
// that were before it and its own.
func (s *Store) Update(fn func(*Tx) error) error {
	return s.enqueue(&change{fn: fn, turn: make(chan bool, 1)}, false)
}

// enqueue waits in line. The first in line commits for all behind it, and then
// hands the line over.
func (s *Store) enqueue(c *change, closing bool) error {
	s.mu.Lock()
	if s.closed && !closing {
		s.mu.Unlock()
		return ErrClosed
	}
	s.closed = s.closed || closing
	s.queue = append(s.queue, c)
	lead := !s.busy
	s.busy = true
	s.mu.Unlock()
	if !lead && !<-c.turn {
		return c.err
	}

	s.mu.Lock()
	group := s.queue[:min(len(s.queue), maxGroup)]
	s.queue = s.queue[len(group):]
	s.mu.Unlock()

	s.commit(group)
	for _, c := range group {
		if c.apart != nil {
			c.err = c.apart()
		}
	}

	s.mu.Lock()
	if len(s.queue) > 0 {
		s.queue[0].turn <- true
	} else {
		s.busy, s.queue = false, nil
	}
	s.mu.Unlock()
	for _, other := range group {
		if other != c {
			other.turn <- false
		}
	}
	return c.err
}

// commit makes one transaction of the group. c.err of each is set.
func (s *Store) commit(group []*change) {
	var grown sizes
	wrote := false
	var last head
	err := s.db.Update(func(btx *bolt.Tx) error {
		if err := s.asLeft(btx); err != nil {
			return err
		}
		for _, c := range group {
			tx := newTx(btx, s.cfg)
			if c.err = tx.run(c.fn); c.err != nil {
				continue
			}
			s.condemned = s.condemned || tx.condemned
			s.issued = latest(s.issued, tx.issued)
			if tx.clockReset {
				s.issued, s.clockReset = time.Time{}, true
			}
			wrote = wrote || tx.dirty() || tx.condemned || tx.marked
			if err := tx.flush(); err != nil {
				return err
			}
			grown.add(tx.grown)
		}
		if !wrote {
			return errNothing
		}
		var err error
		if last, err = newTx(btx, s.cfg).head(); err != nil {
			return err
		}
		if err := s.InPlace(); err != nil {
			return err
		}
		crash.Point("state.commit.before")
		s.noteFreePages()
		return s.cfg.Guard(false)
	})
	if errors.Is(err, errNothing) {
		return
	}
	if err == nil {
		crash.Point("state.commit.written")
		s.growing = grown
		err = errors.Join(s.raiseMark(), s.cfg.Guard(true))
		s.growing = sizes{}
		s.grew(grown, last.seq) // it is durable, whatever became of the mark
	}
	if err != nil {
		s.sound = false // what the disk made of it is seen by the next start
		for _, c := range group {
			if c.err == nil {
				c.err = fmt.Errorf("%w: %w", ErrWrite, err)
			}
		}
		return
	}
	crash.Point("state.commit.marked")
}

// errNothing rolls a transaction back in which no one wrote.
var errNothing = errors.New("nothing to write")

// View calls fn with what is durable. It must be quick: a view that lasts keeps
// old pages from being used again.
func (s *Store) View(fn func(*Tx) error) error {
	err := view(s.db, fn)
	if errors.Is(err, berrors.ErrDatabaseNotOpen) {
		return ErrClosed
	}
	return err
}

func view(db *bolt.DB, fn func(*Tx) error) error {
	return db.View(func(btx *bolt.Tx) error { return fn(newTx(btx, Config{})) })
}
