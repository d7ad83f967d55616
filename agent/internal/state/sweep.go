package state

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// What an acknowledged frame, and a task that has ended, are kept for.
const (
	KeepFor   = 7 * 24 * time.Hour
	KeepBytes = 64 << 20
)

// sweepSlice bounds one transaction of a sweep: a large delete makes the free
// list large, and others wait for it.
const sweepSlice = 200

// Sweep forgets what need not be kept any longer at now: acknowledged frames
// that are older than [KeepFor] or beyond [KeepBytes], seen ids that are past
// their time, and tasks that ended longer than KeepFor ago, are acknowledged
// and whose id is forgotten. A frame that is not acknowledged is never dropped.
func (s *Store) Sweep(now time.Time) error {
	for _, sweep := range []func(*Tx, time.Time) (bool, error){s.sweepFrames, sweepSeen, sweepTasks} {
		for more := true; more; {
			err := s.Update(func(tx *Tx) (err error) {
				more, err = sweep(tx, now)
				return err
			})
			if err != nil {
				return fmt.Errorf("sweep state: %w", err)
			}
		}
	}
	return nil
}

func (s *Store) sweepFrames(tx *Tx, now time.Time) (bool, error) {
	s.news.Lock()
	kept := s.sizes.kept
	s.news.Unlock()
	acked, n := tx.acked(), 0
	err := tx.scan(bucketFrames, nil, nil, func(k, v []byte) (bool, error) {
		if n == sweepSlice || binary.BigEndian.Uint64(k) > acked {
			return false, nil
		}
		if kept <= KeepBytes {
			ev := new(taskv1.Event)
			if err := proto.Unmarshal(v, ev); err != nil {
				return false, fmt.Errorf("decode frame %d: %w", binary.BigEndian.Uint64(k), err)
			}
			if now.Sub(ev.GetWallTime().AsTime()) < KeepFor {
				return false, nil
			}
		}
		n++
		kept -= int64(len(v))
		tx.grown.add(sizes{kept: -int64(len(v))})
		tx.delete(bucketFrames, append([]byte(nil), k...))
		return true, nil
	})
	return n == sweepSlice, err
}

func sweepSeen(tx *Tx, now time.Time) (bool, error) {
	n := 0
	err := tx.scan(bucketForget, nil, nil, func(k, _ []byte) (bool, error) {
		if n == sweepSlice || binary.BigEndian.Uint64(k) >= uint64(max(0, now.Unix())) {
			return false, nil
		}
		n++
		tx.put(bucketMeta, keyForgotten, append([]byte(nil), k[:8]...))
		tx.delete(bucketForget, append([]byte(nil), k...))
		tx.delete(bucketSeen, append([]byte(nil), k[8:]...))
		return true, nil
	})
	return n == sweepSlice, err
}

// Forgotten is the latest time by which ids have been forgotten: what was to be
// remembered until then may have run. Only a clock that has been ahead makes it
// later than now.
func (tx *Tx) Forgotten() time.Time {
	if b := tx.get(bucketMeta, keyForgotten); len(b) == 8 {
		return time.Unix(int64(binary.BigEndian.Uint64(b)), 0)
	}
	return time.Time{}
}

func sweepTasks(tx *Tx, now time.Time) (bool, error) {
	n := 0
	err := tx.scan(bucketOrder, nil, nil, func(k, v []byte) (bool, error) {
		if n == sweepSlice {
			return false, nil
		}
		id := string(v)
		rec, err := tx.Task(id)
		if err != nil {
			return false, err
		}
		// The oldest come first: one that stays ends the sweep, unless it has
		// not ended.
		if !Terminal(rec.GetState()) {
			return true, nil
		}
		if _, err := tx.Seen(id); err == nil {
			return false, nil
		} else if !errors.Is(err, ErrNotFound) {
			return false, err
		}
		if !rec.GetAcknowledged() || now.Sub(rec.GetEndTime().AsTime()) < KeepFor {
			return false, nil
		}
		n++
		tx.delete(bucketOrder, append([]byte(nil), k...))
		tx.delete(bucketTasks, []byte(id))
		if err := tx.deleteOutputs(id); err != nil {
			return false, err
		}
		return true, tx.deleteSteps(id)
	})
	return n == sweepSlice, err
}

func (tx *Tx) deleteSteps(taskID string) error {
	return tx.scan(bucketSteps, []byte(taskID+"/"), nil, func(k, _ []byte) (bool, error) {
		tx.delete(bucketSteps, append([]byte(nil), k...))
		return true, nil
	})
}
