package state

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"math"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/proto/text"
)

// maxBatchBytes bounds what [Store.Frames] returns at once; a single larger
// frame is returned alone.
const maxBatchBytes = 1 << 20

var (
	keyJournal   = []byte("journal")
	keyHead      = []byte("head")
	keyAcked     = []byte("acked")
	keyBoot      = []byte("boot")
	keyReboots   = []byte("reboots")
	keyForgotten = []byte("forgotten")
)

// head is the last frame.
type head struct {
	seq  uint64
	hash []byte
}

// sizes are kept in memory, since they are asked for at each delivery.
type sizes struct {
	unacked int64 // bytes of frames that are not acknowledged
	kept    int64 // bytes of those that are, and are still kept
	frames  int64 // how many were appended
}

func (s *sizes) add(d sizes) {
	s.unacked += d.unacked
	s.kept += d.kept
	s.frames += d.frames
}

// Head says where the journal stands.
type Head struct {
	// JournalID is the journal's id.
	JournalID string
	// InstanceID tells two hosts under one identity apart.
	InstanceID string
	// FirstSeq is the first frame that is still kept.
	FirstSeq uint64
	// LastSeq is the last frame.
	LastSeq uint64
	// AckedSeq is the last frame that the server has.
	AckedSeq uint64
}

// Journal returns the record about the journal itself.
func (tx *Tx) Journal() (*agentv1.JournalMeta, error) {
	m := new(agentv1.JournalMeta)
	return m, tx.load(bucketMeta, keyJournal, m)
}

func (tx *Tx) putJournal(m *agentv1.JournalMeta) error { return tx.store(bucketMeta, keyJournal, m) }

func (tx *Tx) head() (head, error) {
	return decodeHead(tx.get(bucketMeta, keyHead))
}

func decodeHead(b []byte) (head, error) {
	if len(b) != 8+sha256.Size {
		return head{}, fmt.Errorf("head of the journal has %d bytes: %w", len(b), ErrInvariant)
	}
	return head{seq: binary.BigEndian.Uint64(b), hash: append([]byte(nil), b[8:]...)}, nil
}

func (tx *Tx) putHead(h head) error {
	tx.put(bucketMeta, keyHead, append(number(h.seq), h.hash...))
	return nil
}

func (tx *Tx) acked() uint64 {
	return decodeNumber(tx.get(bucketMeta, keyAcked))
}

func decodeNumber(b []byte) uint64 {
	if len(b) == 8 {
		return binary.BigEndian.Uint64(b)
	}
	return 0
}

// Append numbers, chains and stores an event whose payload is set, and returns
// its seq. The frame is never made again.
func (tx *Tx) Append(ev *taskv1.Event) (uint64, error) {
	meta, err := tx.Journal()
	if err != nil {
		return 0, err
	}
	h, err := tx.head()
	if err != nil {
		return 0, err
	}
	ev.JournalId, ev.Seq, ev.PrevHash = meta.GetJournalId(), h.seq+1, h.hash
	ev.BootId = tx.cfg.BootID
	ev.WallTime = timestamppb.New(tx.cfg.Clock.Now())
	ev.BootTime = durationpb.New(tx.cfg.Clock.Boot())
	frame, err := text.Marshal(ev)
	if err != nil {
		return 0, fmt.Errorf("serialise event %d: %w", ev.GetSeq(), err)
	}
	sum := sha256.Sum256(frame)
	tx.put(bucketFrames, number(ev.GetSeq()), frame)
	tx.grown.add(sizes{unacked: int64(len(frame)), frames: 1})
	return ev.GetSeq(), tx.putHead(head{seq: ev.GetSeq(), hash: sum[:]})
}

// Head says where the journal stands.
func (tx *Tx) Head() (Head, error) {
	meta, err := tx.Journal()
	if err != nil {
		return Head{}, err
	}
	h, err := tx.head()
	if err != nil {
		return Head{}, err
	}
	out := Head{
		JournalID: meta.GetJournalId(), InstanceID: meta.GetInstanceId(),
		FirstSeq: h.seq + 1, LastSeq: h.seq, AckedSeq: tx.acked(),
	}
	err = tx.scan(bucketFrames, nil, nil, func(k, _ []byte) (bool, error) {
		out.FirstSeq = binary.BigEndian.Uint64(k)
		return false, nil
	})
	return out, err
}

// Acknowledge records that the server has all frames up to seq. One that it
// had before is no error; one that was never written is [ErrAckAhead].
func (tx *Tx) Acknowledge(seq uint64) error {
	h, err := tx.head()
	if err != nil {
		return err
	}
	if seq > h.seq {
		return fmt.Errorf("frame %d of %d: %w", seq, h.seq, ErrAckAhead)
	}
	was := tx.acked()
	if seq <= was {
		return nil
	}
	err = tx.scan(bucketFrames, nil, number(was+1), func(k, v []byte) (bool, error) {
		if binary.BigEndian.Uint64(k) > seq {
			return false, nil
		}
		tx.grown.add(sizes{unacked: -int64(len(v)), kept: int64(len(v))})
		return true, nil
	})
	tx.put(bucketMeta, keyAcked, number(seq))
	return err
}

// Frames returns at most limit frames that follow after, in order, and never
// more than 1 MiB of them unless the first is larger. gap says that the frames
// between after and the first one returned are gone for good.
func (tx *Tx) Frames(after uint64, limit int) (frames [][]byte, gap bool, err error) {
	return tx.frames(after, math.MaxUint64, limit)
}

// frames leaves out those that come after last.
func (tx *Tx) frames(after, last uint64, limit int) (frames [][]byte, gap bool, err error) {
	want, bytes := after+1, 0
	err = tx.scan(bucketFrames, nil, number(want), func(k, v []byte) (bool, error) {
		seq := binary.BigEndian.Uint64(k)
		if seq > last {
			return false, nil
		}
		if len(frames) == 0 && seq != want {
			gap = true
		}
		if len(frames) == limit || len(frames) > 0 && bytes+len(v) > maxBatchBytes {
			return false, nil
		}
		frames = append(frames, append([]byte(nil), v...))
		bytes += len(v)
		return true, nil
	})
	return frames, gap, err
}

// NextFrames is [Tx.Frames] of those that are durable, and waits until there are
// some. bbolt shows a commit to readers before it is on the disk, and what the
// control plane has seen must outlive the node's power.
func (s *Store) NextFrames(ctx context.Context, after uint64, limit int) (journalID string, frames [][]byte, gap bool, err error) {
	for {
		changed, durable := s.appended()
		err := s.View(func(tx *Tx) error {
			meta, err := tx.Journal()
			if err != nil {
				return err
			}
			journalID = meta.GetJournalId()
			frames, gap, err = tx.frames(after, durable, limit)
			return err
		})
		if err != nil || len(frames) > 0 {
			return journalID, frames, gap, err
		}
		select {
		case <-ctx.Done():
			return journalID, nil, false, ctx.Err()
		case <-changed:
		}
	}
}

// UnackedBytes is the size of the frames that the server does not have.
func (s *Store) UnackedBytes() int64 {
	s.news.Lock()
	defer s.news.Unlock()
	return s.sizes.unacked
}

// Head is [Tx.Head] as far as it is durable.
func (s *Store) Head() (h Head, err error) {
	_, durable := s.appended()
	err = s.View(func(tx *Tx) error {
		h, err = tx.Head()
		return err
	})
	h.LastSeq = min(h.LastSeq, durable)
	h.FirstSeq = min(h.FirstSeq, h.LastSeq+1)
	return h, err
}

func (s *Store) appended() (changed <-chan struct{}, durable uint64) {
	s.news.Lock()
	defer s.news.Unlock()
	return s.changed, s.durable
}

// grew notes a commit that is durable, up to the frame last.
func (s *Store) grew(d sizes, last uint64) {
	s.news.Lock()
	defer s.news.Unlock()
	s.sizes.add(d)
	s.durable = last
	if d.frames > 0 {
		close(s.changed)
		s.changed = make(chan struct{})
	}
}

// sizes adds up what is kept.
func (tx *Tx) sizes() (sizes, error) {
	var out sizes
	acked := tx.acked()
	err := tx.scan(bucketFrames, nil, nil, func(k, v []byte) (bool, error) {
		if binary.BigEndian.Uint64(k) > acked {
			out.unacked += int64(len(v))
		} else {
			out.kept += int64(len(v))
		}
		return true, nil
	})
	return out, err
}

// Condemn makes the next [Open] set the file aside and begin a new journal,
// because this one is older than what the server has seen of it. The caller
// ends the process.
func (s *Store) Condemn() error {
	return s.Update(func(tx *Tx) error {
		tx.condemned = true
		return nil
	})
}

// ResetClock makes floor the floor, also where it was later, and lets the mark's
// times fall to the high water: root says what time it is.
func (tx *Tx) ResetClock(floor time.Time) error {
	m, err := tx.Journal()
	if err != nil {
		return err
	}
	m.Floor = timestamppb.New(floor)
	tx.clockReset = true
	return tx.putJournal(m)
}

// Mark writes the high-water mark anew, although nothing else is written.
func (tx *Tx) Mark() { tx.marked = true }
