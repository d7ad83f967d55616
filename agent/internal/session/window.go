package session

import (
	"context"
	"fmt"
	"sync"
)

// windowBytes bounds what is sent and not acknowledged. One frame may exceed
// it, so that a large one is not stuck.
const windowBytes = 1 << 20

// window is the run of frames between what the server has and what was sent.
type window struct {
	mu      sync.Mutex
	acked   uint64             // guarded by mu, as all below
	sent    uint64             // the last frame handed to the stream
	flight  []span             // sent and not acknowledged, in order
	bytes   int                // their size
	turn    uint64             // rises with each rewind
	rewound context.CancelFunc // ends the read that is under way
	room    chan struct{}      // holds a token after each change
	news    chan struct{}      // holds a token after each acknowledgement
}

type span struct {
	last  uint64
	bytes int
}

// newWindow begins after the frame acked.
func newWindow(acked uint64) *window {
	return &window{acked: acked, sent: acked, room: make(chan struct{}, 1), news: make(chan struct{}, 1)}
}

// position is where the next frames are read from. Its context ends when the
// server asks for earlier ones.
type position struct {
	after uint64
	turn  uint64
}

// next waits until there is room and returns where to go on. The context that
// it returns ends on a rewind; the caller calls done when it has read.
func (w *window) next(ctx context.Context) (p position, read context.Context, done context.CancelFunc, err error) {
	for {
		w.mu.Lock()
		if w.bytes < windowBytes {
			read, done = context.WithCancel(ctx)
			w.rewound = done
			p = position{after: w.sent, turn: w.turn}
			w.mu.Unlock()
			return p, read, done, nil
		}
		w.mu.Unlock()
		select {
		case <-ctx.Done():
			return position{}, nil, nil, ctx.Err()
		case <-w.room:
		}
	}
}

// add records frames as sent, before they are. It returns false when the
// server has asked for earlier ones since p was given out.
func (w *window) add(p position, last uint64, bytes int) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if p.turn != w.turn {
		return false
	}
	w.sent = last
	w.flight = append(w.flight, span{last, bytes})
	w.bytes += bytes
	return true
}

// ack records that the server has the frames up to seq. It may know later ones
// than were sent on this stream: an older stream's frames can be stored late.
func (w *window) ack(seq uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if seq > w.sent {
		w.move(seq)
	}
	if seq <= w.acked {
		return
	}
	w.acked = seq
	for len(w.flight) > 0 && w.flight[0].last <= seq {
		w.bytes -= w.flight[0].bytes
		w.flight = w.flight[1:]
	}
	notify(w.room)
	notify(w.news)
}

// move makes the frame after last the next one. The caller holds mu.
func (w *window) move(last uint64) {
	w.sent, w.flight, w.bytes = last, nil, 0
	w.turn++
	if w.rewound != nil {
		w.rewound()
	}
	notify(w.room)
}

// last is the last frame that was handed to the stream.
func (w *window) last() uint64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.sent
}

// rewind goes back, so that from is the next frame to be sent.
func (w *window) rewind(from uint64) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if from == 0 || from > w.sent+1 {
		return fmt.Errorf("%w: it asked for frame %d again, and %d was the last one sent", errProtocol, from, w.sent)
	}
	w.move(from - 1)
	w.acked = min(w.acked, w.sent)
	return nil
}

// acknowledged is the last frame that the server has.
func (w *window) acknowledged() uint64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.acked
}

func notify(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
