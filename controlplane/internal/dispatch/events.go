package dispatch

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"

	"google.golang.org/protobuf/proto"

	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	auditv1 "github.com/gpuaas/millwright/proto/millwright/audit/v1"
	serverv1 "github.com/gpuaas/millwright/proto/millwright/server/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"

	"github.com/gpuaas/millwright/controlplane/internal/crash"
	"github.com/gpuaas/millwright/controlplane/internal/eventlog"
	"github.com/gpuaas/millwright/controlplane/internal/store"
)

// events stores a batch of frames and acknowledges what is stored.
func (d *Dispatcher) events(ctx context.Context, s *session, batch *agentv1.EventBatch) error {
	crash.Point("server.events.received")
	b, err := decodeBatch(s, batch)
	if err != nil {
		s.end(protocolError("%v", err))
		return nil
	}
	crash.Point("server.events.before-commit")
	if err := d.cfg.Log.Commit(ctx, b.decide); err != nil {
		return s.stall("store events", err)
	}
	crash.Point("server.events.committed")
	if b.forked {
		s.log.Warn("frame does not fit the journal", "journal", s.journalID, "stored_seq", b.stored)
	}
	s.want(func() {
		s.acked, s.ackDue = b.stored, true
		if b.missing {
			s.resendDue = b.stored + 1
		}
		s.assignDue = s.assignDue || b.freesCredit()
	})
	return d.progress(ctx, s, b.stored)
}

// batch is the decision about frames of one journal.
type batch struct {
	s         *session
	frames    [][]byte
	events    []*taskv1.Event
	gapBefore bool

	stored  uint64 // the last frame that is stored
	missing bool   // a frame before the next one is missing
	forked  bool   // a frame did not fit
}

// freesCredit reports whether a task has ended or is held.
func (b *batch) freesCredit() bool {
	return slices.ContainsFunc(b.events, func(e *taskv1.Event) bool { return e.GetFinished() != nil || e.GetHeld() != nil })
}

func decodeBatch(s *session, m *agentv1.EventBatch) (*batch, error) {
	if s.safe {
		return nil, errors.New("frames in a session in safe mode, which has no journal")
	}
	if m.GetJournalId() != s.journalID {
		return nil, fmt.Errorf("frames of journal %s in a session of journal %s", m.GetJournalId(), s.journalID)
	}
	b := &batch{s: s, frames: m.GetFrames(), gapBefore: m.GetGapBefore(), events: make([]*taskv1.Event, len(m.GetFrames()))}
	for i, frame := range b.frames {
		b.events[i] = &taskv1.Event{}
		if err := proto.Unmarshal(frame, b.events[i]); err != nil {
			return nil, fmt.Errorf("frame %d of the batch: %w", i, err)
		}
		if id := b.events[i].GetJournalId(); id != s.journalID {
			return nil, fmt.Errorf("frame %d of the batch is of journal %s, not %s", i, id, s.journalID)
		}
	}
	return b, nil
}

func (b *batch) decide(tx *eventlog.Tx) error {
	b.missing, b.forked = false, false
	journal, err := tx.Journal(b.s.peer.Node, b.s.journalID)
	if errors.Is(err, store.ErrNotFound) {
		journal, err = &serverv1.JournalRow{Node: b.s.peer.Node, JournalId: b.s.journalID, Generation: b.s.generation}, nil
	}
	if err != nil {
		return err
	}
	tx.PutJournal(journal)
	for i := range b.frames {
		goOn, err := b.frame(tx, journal, i)
		if err != nil {
			return err
		}
		if !goOn {
			break
		}
	}
	b.stored = journal.GetLastSeq()
	return nil
}

// frame judges one frame, and reports whether the next is to be looked at.
func (b *batch) frame(tx *eventlog.Tx, journal *serverv1.JournalRow, i int) (goOn bool, err error) {
	event, frame := b.events[i], b.frames[i]
	next := journal.GetLastSeq() + 1
	switch seq := event.GetSeq(); {
	case seq == 0:
		return false, nil
	case seq < next:
		return true, b.again(tx, journal, seq, frame)
	case seq > next && i == 0 && b.gapBefore:
		if err := b.append(tx, &auditv1.LogEntry{Entry: &auditv1.LogEntry_JournalGap{JournalGap: &auditv1.JournalGap{
			Node: b.s.peer.Node, JournalId: b.s.journalID, FromSeq: next, ToSeq: seq,
		}}}); err != nil {
			return false, err
		}
	case seq > next:
		b.missing = true
		return false, nil
	case !bytes.Equal(event.GetPrevHash(), b.previous(journal, event)):
		return false, b.fork(tx, journal, seq, journal.GetLastSha256(), frame)
	}
	if err := b.append(tx, &auditv1.LogEntry{Entry: &auditv1.LogEntry_NodeFrame{NodeFrame: &auditv1.NodeFrame{
		Node: b.s.peer.Node, Generation: b.s.generation, JournalId: b.s.journalID, Seq: event.GetSeq(), Frame: frame,
	}}}); err != nil {
		return false, err
	}
	sum := sha256.Sum256(frame)
	journal.LastSeq, journal.LastSha256 = event.GetSeq(), sum[:]
	return true, nil
}

// previous is what prev_hash of the next frame must be.
func (b *batch) previous(journal *serverv1.JournalRow, event *taskv1.Event) []byte {
	if journal.GetLastSeq() > 0 {
		return journal.GetLastSha256()
	}
	opened := event.GetJournalOpened()
	return FirstPrevHash(b.s.peer.Node, opened.GetGeneration(), opened.GetPreviousJournalId())
}

// FirstPrevHash is the prev_hash of the first frame of a journal.
func FirstPrevHash(node string, generation uint64, previousJournalID string) []byte {
	sum := sha256.Sum256(fmt.Appendf(nil, "%s\x00%d\x00%s", node, generation, previousJournalID))
	return sum[:]
}

// again compares a frame that was sent once more with what is stored.
func (b *batch) again(tx *eventlog.Tx, journal *serverv1.JournalRow, seq uint64, frame []byte) error {
	stored, err := tx.Frame(store.FrameKey{Node: b.s.peer.Node, JournalID: b.s.journalID, Seq: seq})
	if errors.Is(err, store.ErrNotFound) {
		return nil // it fell into a gap that was recorded
	}
	if err != nil {
		return err
	}
	entry, err := stored.Decode()
	if err != nil {
		return err
	}
	was := entry.GetNodeFrame().GetFrame()
	if bytes.Equal(was, frame) {
		return nil
	}
	sum := sha256.Sum256(was)
	return b.fork(tx, journal, seq, sum[:], frame)
}

// fork records the first frame of a journal that does not fit.
func (b *batch) fork(tx *eventlog.Tx, journal *serverv1.JournalRow, seq uint64, stored, frame []byte) error {
	b.forked = true
	if journal.GetForked() {
		return nil
	}
	journal.Forked = true
	return b.append(tx, &auditv1.LogEntry{Entry: &auditv1.LogEntry_JournalFork{JournalFork: &auditv1.JournalFork{
		Node: b.s.peer.Node, JournalId: b.s.journalID, Seq: seq, StoredSha256: stored, Presented: frame,
	}}})
}

func (b *batch) append(tx *eventlog.Tx, e *auditv1.LogEntry) error { return tx.Append(b.s.peer.ID, e) }
