package state

import (
	"context"
	"errors"
	"fmt"
	"io"

	bolt "go.etcd.io/bbolt"
	"google.golang.org/protobuf/proto"

	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
)

// Scrub reads all of the open file and wants it to be whole: each page that
// leads somewhere, each record in its form, and the frames one chain. Its error
// wraps [ErrDamaged] when it is not: the next [Open] then looks at the file as at
// one that nobody vouches for, and sets it aside. The caller closes the store.
// It reads beside the commits, and not through bbolt.
func (s *Store) Scrub(ctx context.Context) error {
	var last uint64
	err := s.View(func(tx *Tx) error {
		last = uint64(tx.bolt.ID())
		return scrub(ctx, tx, s.raw)
	})
	switch {
	case errors.Is(err, ErrDamaged):
		return errors.Join(fmt.Errorf("look at all of the state file: %w", err), s.enqueue(&change{apart: s.distrust, turn: make(chan bool, 1)}, false))
	case err != nil:
		return fmt.Errorf("look at all of the state file: %w", err)
	}
	s.cfg.Logger.DebugContext(ctx, "all of the state file is sound", "transaction", last)
	return s.enqueue(&change{apart: func() error {
		if !s.unseen {
			return nil
		}
		s.unseen = false
		return s.raiseMark()
	}, turn: make(chan bool, 1)}, false)
}

// distrust has the next start look at all of the file.
func (s *Store) distrust() error {
	s.sound = false
	next, ok := proto.Clone(s.mark.last).(*agentv1.JournalMark)
	if !ok || next == nil {
		return nil
	}
	next.Sound = nil
	return s.mark.write(next)
}

func scrub(ctx context.Context, tx *Tx, file io.ReaderAt) error {
	meta, err := tx.Journal()
	if err != nil {
		return fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	h, err := tx.head()
	if err != nil {
		return fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	frames := &chain{meta: meta}
	var bad error
	r := &pageReader{file: file, meta: seenBy(tx.bolt), strict: true, bad: damage, stop: func() error { return context.Cause(ctx) }}
	r.record = func(bucket string, k, v []byte) {
		switch {
		case bucket == string(bucketFrames):
			frames.frame(k, v)
		case bad == nil && !plausible(bucket, k, v):
			bad = wrong("record %s/%x cannot be what was written", bucket, k)
		}
	}
	if err := r.walk(); err != nil {
		return err
	}
	if err := errors.Join(append(frames.end(h), bad)...); err != nil {
		return fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	return nil
}

// seenBy is the meta page of a transaction: none of its pages is written again
// while it lasts.
func seenBy(tx *bolt.Tx) boltMeta {
	size := uint64(tx.DB().Info().PageSize)
	return boltMeta{
		pageSize: size, root: uint64(tx.Cursor().Bucket().RootPage()), pages: uint64(tx.Size()) / size, transaction: uint64(tx.ID()),
	}
}
