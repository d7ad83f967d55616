package dispatch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"

	"github.com/gpuaas/millwright/controlplane/internal/crash"
	"github.com/gpuaas/millwright/controlplane/internal/store"
)

// reconnectAfter is the shortest time after which a node whose session was
// ended comes back.
const reconnectAfter = time.Second

// session is one stream of a node, from its Welcome on.
type session struct {
	peer      Peer
	epoch     uint64
	journalID string
	// generation is the enrolment generation that the session stands for.
	generation uint64
	// lastSeq is the last frame of the node's journal when it said Hello: until
	// it is stored, nothing is decided about what was assigned before.
	lastSeq uint64
	// behind is set when the node's journal ends before what is stored of it:
	// its state was rolled back, and it is given no work.
	behind bool
	// safe is set when the node is in safe mode: it has no journal to send to,
	// and it is given no work.
	safe bool
	// unfinished are the tasks that the node said it has.
	unfinished []*agentv1.UnfinishedTask
	log        *slog.Logger

	wake chan struct{} // holds one; the sender looks at what is wanted

	mu        sync.Mutex // guards all below
	ready     bool       // the events up to lastSeq are stored
	credits   uint32
	assignDue bool
	retryAt   time.Time // when a deferred task may be sent again; zero for never
	eager     bool      // deferred tasks are sent at once, until the next is deferred
	acked     uint64    // the last frame to acknowledge
	ackDue    bool
	stalled   bool   // the disk did not take something
	resendDue uint64 // the first frame to ask for; 0 for none
	beatDue   bool
	cancels   map[string]struct{} // tasks to cancel
	outputs   map[string]struct{} // tasks whose output is wanted
	sent      map[string]string   // task by assignment, until it was answered
	contact   Contact
	heardAt   time.Duration // by CLOCK_BOOTTIME, as are the two below
	offsetAt  time.Duration // when contact.ClockOffset was measured
	lastSent  time.Duration
	// badReports counts reports that were not taken; the last that was logged
	// came at badReportAt.
	badReports  uint64
	badReportAt time.Duration
	farewell    *agentv1.SessionResponse // the last message; nil while the session lasts
	over        bool                     // nothing more is sent, not even a farewell
	failure     error                    // what the stream ends with
}

// want notes what is wanted and wakes the sender.
func (s *session) want(note func()) {
	s.mu.Lock()
	note()
	s.mu.Unlock()
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// end makes msg the last message. The first end counts.
func (s *session) end(msg *agentv1.SessionResponse) {
	s.want(func() {
		if s.farewell == nil && !s.over {
			s.farewell = msg
		}
	})
}

// fail ends the session without a last message; err is what the stream ends
// with, nil for a good end.
func (s *session) fail(err error) {
	s.want(func() {
		if s.farewell == nil && !s.over {
			s.over, s.failure = true, err
		}
	})
}

// heard notes when the node was heard, and reports whether its word still
// counts. The stream of a session that was ended can last for as long as its
// node reads nothing, since the sender then waits with the farewell.
func (s *session) heard(now time.Time, boot time.Duration) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.contact.LastSeen, s.heardAt = now, boot
	return s.farewell == nil && !s.over
}

// Serve holds a session until it ends. It is called in the stream's own
// goroutine.
func (d *Dispatcher) Serve(peer Peer, stream Stream) error {
	ctx, cancel := context.WithCancel(stream.Context())
	defer cancel()
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	hello := first.GetHello()
	crash.Point("server.hello.received")
	if hello == nil {
		return status.Error(codes.InvalidArgument, "the first message of a session must be a Hello")
	}
	s, welcome, last, err := d.open(ctx, peer, hello)
	if err != nil {
		return err
	}
	if last == nil {
		last = d.enter(s)
	}
	if last != nil {
		return stream.Send(last)
	}
	defer d.leave(s)
	if last, err := d.outdated(ctx, s); err != nil {
		return err
	} else if last != nil {
		return stream.Send(last)
	}
	crash.Point("server.hello.committed")
	if err := stream.Send(s.message(welcome)); err != nil {
		return err
	}
	crash.Point("server.welcome.sent")
	s.log.Info("session opened", "journal", s.journalID, "last_seq", s.lastSeq)
	d.receivers.Go(func() { d.receive(ctx, s, stream) })
	if err := d.send(ctx, s, stream); err != nil {
		s.log.Info("session ended", "err", err)
		return err
	}
	s.log.Info("session ended")
	return nil
}

// send is the sender: it returns when the session is over.
func (d *Dispatcher) send(ctx context.Context, s *session, stream Stream) error {
	for {
		out, assign, over, err := s.collect(d.cfg.Now(), d.cfg.Boot())
		for _, m := range out {
			if err := stream.Send(m); err != nil {
				return err
			}
			sent(m)
		}
		if over {
			return err
		}
		if err := d.sendCancels(ctx, s, stream); err != nil {
			return err
		}
		if assign {
			if err := d.assign(ctx, s, stream); err != nil {
				return err
			}
		}
		select {
		case <-s.wake:
		case <-ctx.Done():
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
}

// sent is the crash point of a message.
func sent(m *agentv1.SessionResponse) {
	switch m.GetMessage().(type) {
	case *agentv1.SessionResponse_Ack:
		crash.Point("server.ack.sent")
	case *agentv1.SessionResponse_Heartbeat:
		crash.Point("server.heartbeat.sent")
	case *agentv1.SessionResponse_Goodbye:
		crash.Point("server.goodbye.sent")
	case *agentv1.SessionResponse_Drain:
		crash.Point("server.drain.sent")
	default:
	}
}

// collect takes what is to be sent now and needs nothing from the store.
func (s *session) collect(now time.Time, boot time.Duration) (out []*agentv1.SessionResponse, assign, over bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.over {
		return nil, false, true, s.failure
	}
	if s.ackDue {
		s.ackDue = false
		out = append(out, s.message(&agentv1.SessionResponse{Message: &agentv1.SessionResponse_Ack{
			Ack: &agentv1.EventAck{JournalId: s.journalID, Seq: s.acked}}}))
	}
	if s.resendDue > 0 {
		out = append(out, s.message(&agentv1.SessionResponse{Message: &agentv1.SessionResponse_Resend{
			Resend: &agentv1.ResendRequest{JournalId: s.journalID, FromSeq: s.resendDue}}}))
		s.resendDue = 0
	}
	if s.farewell != nil {
		s.over = true
		return append(out, s.message(s.farewell)), false, true, nil
	}
	if s.beatDue {
		s.beatDue = false
		out = append(out, s.message(&agentv1.SessionResponse{Message: &agentv1.SessionResponse_Heartbeat{
			Heartbeat: &agentv1.ServerHeartbeat{ServerTime: timestamppb.New(now)}}}))
	}
	for _, id := range slices.Sorted(maps.Keys(s.outputs)) {
		out = append(out, s.message(&agentv1.SessionResponse{Message: &agentv1.SessionResponse_OutputWanted{
			OutputWanted: &agentv1.OutputWanted{TaskId: id}}}))
		delete(s.outputs, id)
	}
	if len(out) > 0 {
		s.lastSent = boot
	}
	assign = s.ready && s.assignDue
	if assign {
		s.assignDue = false
	}
	return out, assign, false, nil
}

// receive is the receiver: it returns when the stream has ended, which is soon
// after the sender has returned.
func (d *Dispatcher) receive(ctx context.Context, s *session, stream Stream) {
	if err := d.progress(ctx, s, 0); err != nil {
		s.fail(err)
		return
	}
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			s.fail(nil)
			return
		}
		if err != nil {
			s.fail(err)
			return
		}
		if m.GetSessionEpoch() != s.epoch {
			continue // of an older stream
		}
		if !s.heard(d.cfg.Now(), d.cfg.Boot()) {
			return
		}
		if err := d.handle(ctx, s, m); err != nil {
			s.fail(err)
			return
		}
	}
}

func (d *Dispatcher) handle(ctx context.Context, s *session, m *agentv1.SessionRequest) error {
	switch p := m.GetMessage().(type) {
	case *agentv1.SessionRequest_Events:
		return d.events(ctx, s, p.Events)
	case *agentv1.SessionRequest_Answer:
		return d.answer(ctx, s, p.Answer)
	case *agentv1.SessionRequest_Heartbeat:
		return d.heartbeat(ctx, s, p.Heartbeat)
	case *agentv1.SessionRequest_Health:
		d.health(s, p.Health)
		return nil
	case *agentv1.SessionRequest_Credits:
		s.want(func() { s.credits, s.assignDue = min(p.Credits.GetCredits(), maxCredits), true })
		return nil
	}
	return status.Error(codes.InvalidArgument, "this message does not belong here in a session")
}

// message gives m the session's epoch.
func (s *session) message(m *agentv1.SessionResponse) *agentv1.SessionResponse {
	m.SessionEpoch = s.epoch
	return m
}

// stall returns nil for a disk that takes nothing now: the session stays, nothing
// is acknowledged, and at a later heartbeat the node is asked again. Any other
// error cuts the session.
func (s *session) stall(doing string, err error) error {
	if !errors.Is(err, store.ErrUnwritable) {
		return unavailable(s, doing, err)
	}
	s.log.Error("nothing can be stored", "doing", doing, "err", err)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stalled = true
	return nil
}

// goOn tries again what a full disk has stopped.
func (d *Dispatcher) goOn(ctx context.Context, s *session) error {
	s.mu.Lock()
	stalled := s.stalled
	s.stalled = false
	s.mu.Unlock()
	if !stalled {
		return nil
	}
	s.want(func() { s.resendDue, s.assignDue = s.acked+1, true })
	return d.progress(ctx, s, 0)
}

// unavailable logs an error of the store and returns what the node is told: to
// come back.
func unavailable(s *session, doing string, err error) error {
	if errors.Is(err, context.Canceled) {
		return status.FromContextError(err).Err()
	}
	s.log.Error("session cut", "doing", doing, "err", err)
	return status.Error(codes.Unavailable, "the server cannot store anything now; come back later")
}

func goodbye(reason, message string, after time.Duration) *agentv1.SessionResponse {
	return &agentv1.SessionResponse{Message: &agentv1.SessionResponse_Goodbye{Goodbye: &agentv1.Goodbye{
		Reason: reason, Message: message, ReconnectAfter: durationpb.New(max(after, reconnectAfter))}}}
}

func superseded() *agentv1.SessionResponse {
	return goodbye("SUPERSEDED", "a newer session of this node was opened", 0)
}

func protocolError(format string, args ...any) *agentv1.SessionResponse {
	return goodbye("PROTOCOL_ERROR", fmt.Sprintf(format, args...), time.Minute)
}

func drainNotice() *agentv1.SessionResponse {
	return &agentv1.SessionResponse{Message: &agentv1.SessionResponse_Drain{Drain: &agentv1.DrainNotice{
		ReconnectAfter: durationpb.New(reconnectAfter)}}}
}
