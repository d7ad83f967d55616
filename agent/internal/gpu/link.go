package gpu

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/gpuaas/millwright/agent/internal/gpu/wire"
	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
)

// late is why a link ended: a question had no answer in time.
type late struct {
	what string
	most time.Duration
}

func (l *late) Error() string {
	return fmt.Sprintf("the driver did not answer %s within %v", l.what, l.most)
}

// link is the conversation with one child. Questions of one lane take turns, so
// that a deadline is that of one question. A question without an answer in time
// ends the link, whether or not its caller still waits. Before that it is told
// that there is none yet.
type link struct {
	conn net.Conn
	lane [2]chan struct{} // queries, events; holds a token while one is asked
	// silent is told, with mu held, that a question has no answer yet, and with
	// an empty text that it has one now.
	silent func(lane int, words string)

	mu      sync.Mutex
	next    uint64
	waiting map[uint64]chan *gpuv1.ChildReply // guarded by mu
	late    [2]uint64                         // the question of which silent was told; guarded by mu
	cause   error                             // guarded by mu
	failing string                            // what was asked when it ended; guarded by mu
	asking  [2]string                         // by lane; guarded by mu
	dead    chan struct{}                     // closed with cause set
}

const (
	queries = 0
	events  = 1
)

func newLink(conn net.Conn, silent func(lane int, words string)) *link {
	return &link{
		conn: conn, silent: silent, waiting: map[uint64]chan *gpuv1.ChildReply{}, dead: make(chan struct{}),
		lane: [2]chan struct{}{make(chan struct{}, 1), make(chan struct{}, 1)},
	}
}

// read hands the answers on until the connection ends.
func (l *link) read() {
	for {
		r := &gpuv1.ChildReply{}
		if err := wire.Read(l.conn, r); err != nil {
			if errors.Is(err, wire.ErrFrame) {
				l.fail(&nonsense{"", err.Error()})
				return
			}
			l.fail(fmt.Errorf("millwright-gpu went away: %w", err))
			return
		}
		l.mu.Lock()
		to := l.waiting[r.GetId()]
		delete(l.waiting, r.GetId())
		for lane, id := range l.late {
			if id != 0 && id == r.GetId() {
				l.late[lane] = 0
				l.silent(lane, "")
			}
		}
		l.mu.Unlock()
		if to == nil {
			l.fail(&nonsense{"", fmt.Sprintf("it answered question %d, which was not asked", r.GetId())})
			return
		}
		to <- r // it has room for one
	}
}

// fail ends the link. The first cause counts.
func (l *link) fail(cause error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cause != nil {
		return
	}
	l.cause, l.failing = cause, l.asking[queries]
	var slow *late
	var odd *nonsense
	switch {
	case errors.As(cause, &slow):
		l.failing = slow.what
	case errors.As(cause, &odd) && odd.what != "":
		l.failing = odd.what
	case l.failing == "":
		l.failing = l.asking[events]
	}
	close(l.dead)
}

// notice tells that a question has no answer yet, if that is so.
func (l *link) notice(lane int, id uint64, q question) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cause != nil || l.waiting[id] == nil {
		return
	}
	l.late[lane] = id
	l.silent(lane, fmt.Sprintf("the driver has had %v to answer %s and has not; it is given %v", q.notice, q.what, q.most))
}

// ended is why the link ended, and in which question.
func (l *link) ended() (string, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.failing, l.cause
}

// ask asks a question and waits for its answer.
func (l *link) ask(ctx context.Context, q question) (*gpuv1.ChildReply, error) {
	lane, what, r := q.lane, q.what, q.request
	select {
	case l.lane[lane] <- struct{}{}:
	case <-l.dead:
		return nil, l.gone()
	case <-ctx.Done():
		return nil, fmt.Errorf("ask for %s: %w", what, context.Cause(ctx))
	}
	to := make(chan *gpuv1.ChildReply, 1)
	l.mu.Lock()
	l.next++
	id := l.next
	r.Id = id
	l.waiting[id], l.asking[lane] = to, what
	l.mu.Unlock()
	deadline := time.AfterFunc(q.most, func() { l.fail(&late{what, q.most}) })
	notice := time.AfterFunc(q.notice, func() {
		if q.notice < q.most {
			l.notice(lane, id, q)
		}
	})
	if err := wire.Write(l.conn, r); err != nil {
		l.fail(err)
	}
	answered := make(chan *gpuv1.ChildReply, 1)
	// The turn ends with the answer, not with the caller's patience.
	var turn sync.WaitGroup
	turn.Go(func() {
		defer deadline.Stop()
		defer notice.Stop()
		select {
		case reply := <-to:
			if err := q.sound(reply); err != nil {
				l.fail(err)
				return
			}
			l.mu.Lock()
			l.asking[lane] = ""
			l.mu.Unlock()
			<-l.lane[lane]
			answered <- reply
		case <-l.dead:
		}
	})
	select {
	case reply := <-answered:
		return reply, nil
	case <-l.dead:
		return nil, l.gone()
	case <-ctx.Done():
		return nil, fmt.Errorf("ask for %s: %w", what, context.Cause(ctx))
	}
}

func (l *link) gone() error {
	_, cause := l.ended()
	return fmt.Errorf("%w: %w", errGone, cause)
}

// errGone is wrapped by the error of a question whose link ended.
var errGone = errors.New("millwright-gpu is being replaced")
