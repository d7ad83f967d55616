package session

import (
	"context"
	"fmt"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/millwright/agent/internal/crash"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

const (
	// readFrames is how many frames are read at once.
	readFrames = 64
	// batchBytes is the size from which a batch takes no further frame.
	batchBytes = 256 << 10
)

// pump sends the journal's frames in order, as far as the window allows.
func (st *stream) pump(ctx context.Context) error {
	for {
		p, read, done, err := st.window.next(ctx)
		if err != nil {
			return err
		}
		journalID, frames, gap, err := st.cfg.Journal.NextEvents(read, p.after, readFrames)
		rewound := read.Err() != nil
		done()
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case rewound:
			continue
		case err != nil:
			return fmt.Errorf("read frames after %d: %w", p.after, err)
		case journalID != st.head.JournalID:
			return errJournal
		}
		if err := st.sendFrames(ctx, p, frames, gap); err != nil {
			return err
		}
	}
}

func (st *stream) sendFrames(ctx context.Context, p position, frames [][]byte, gap bool) error {
	last := p.after
	if gap && len(frames) > 0 {
		var first taskv1.Event
		if err := proto.Unmarshal(frames[0], &first); err != nil {
			return fmt.Errorf("decode the frame that follows a gap after %d: %w", p.after, err)
		}
		st.log.WarnContext(ctx, "frames are gone that the server never had", "from_seq", p.after+1, "to_seq", first.GetSeq()-1)
		last = first.GetSeq() - 1
	}
	for len(frames) > 0 {
		n, size := batch(frames)
		last += uint64(n)
		if !st.window.add(p, last, size) {
			return nil
		}
		b := &agentv1.EventBatch{JournalId: st.head.JournalID, Frames: frames[:n], GapBefore: gap}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case st.batches <- &agentv1.SessionRequest{Message: &agentv1.SessionRequest_Events{Events: b}}:
		}
		crash.Point("session.events.sent")
		frames, gap = frames[n:], false
	}
	return nil
}

// batch returns how many of the frames go together, at least one, and their size.
func batch(frames [][]byte) (n, size int) {
	for _, f := range frames {
		if n > 0 && size+len(f) > batchBytes {
			break
		}
		n++
		size += len(f)
	}
	return n, size
}

// acknowledge makes durable what the server has. Only the newest counts, so
// that a slow disk never holds the reader up.
func (st *stream) acknowledge(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-st.window.news:
		}
		if ctx.Err() != nil {
			return ctx.Err() // a session that has ended does nothing more, however the select chose
		}
		crash.Point("session.ack.received")
		seq := st.window.acknowledged()
		if err := st.cfg.Journal.Ack(ctx, st.head.JournalID, seq); err != nil && ctx.Err() == nil {
			// The next one repeats it. A full disk must not cut the session.
			st.log.WarnContext(ctx, "acknowledgement not recorded", "seq", seq, "err", err)
		}
	}
}
