package session

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/millwright/agent/internal/crash"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/proto/rpcerr"
)

const (
	// welcomeWithin bounds the time from the dial to the Welcome.
	welcomeWithin = 30 * time.Second
	// endBefore is how long before the certificate's end a session ends.
	endBefore = 2 * time.Second
	// drainWithin is how long a session goes on after a DrainNotice, so that
	// what is under way can be acknowledged.
	drainWithin = 10 * time.Second
	// The bounds of the heartbeat interval, whatever the server says.
	shortestInterval = 50 * time.Millisecond
	longestInterval  = 5 * time.Minute
	usualInterval    = 15 * time.Second
	// freeWork is the room for work that takes no credit: cancels, and words
	// about held tasks, of which there may be many.
	freeWork = 256
)

// stream is one session. Its goroutines belong to the errgroup in run.
type stream struct {
	*Session
	id       Identity
	rpc      agentv1.AgentService_SessionClient
	log      *slog.Logger
	head     Head
	told     []*taskv1.Condition // as the Hello said
	epoch    uint64
	interval time.Duration
	window   *window

	say     chan *agentv1.SessionRequest  // answers, heartbeats, credits: before events
	batches chan *agentv1.SessionRequest  // events, one at a time
	reports chan struct{}                 // a report is wanted: after all else
	work    chan *agentv1.SessionResponse // assignments and cancels, in the server's order
	heard   chan struct{}                 // holds a token after each message of this epoch
	drained chan struct{}                 // closed by the reader at the first DrainNotice
	asked   atomic.Int64                  // nanoseconds that the DrainNotice asks for

	reported bool   // a report was sent; the sender's
	whole    uint64 // the version of the last whole report; the sender's
}

// once dials and keeps one session until it ends.
func (s *Session) once(ctx context.Context, id Identity) ending {
	conn, err := s.dial(id)
	if err != nil {
		return ending{err: err}
	}
	defer conn.Close() //nolint:errcheck // nothing is left to be lost
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)

	late := time.AfterFunc(welcomeWithin, func() { cancel(errNoWelcome) })
	defer late.Stop()
	st, err := s.open(ctx, id, conn)
	late.Stop()
	if err != nil {
		if cause := context.Cause(ctx); cause != nil {
			err = cause
		}
		return ending{err: fmt.Errorf("open session with %s: %w", id.Server, err)}
	}
	err = st.run(ctx, conn)
	return ending{err: err, welcomed: true, asked: time.Duration(st.asked.Load())}
}

func (s *Session) dial(id Identity) (Conn, error) {
	if s.cfg.Connect != nil {
		return s.cfg.Connect(id.Server)
	}
	conn, err := grpc.NewClient("passthrough:///"+id.Server,
		grpc.WithTransportCredentials(credentials.NewTLS(id.TLS)),
		grpc.WithContextDialer(s.cfg.Dial),
		grpc.WithDisableServiceConfig(),
		grpc.WithUserAgent("millwrightd/"+s.cfg.Version),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{
			Time: 30 * time.Second, Timeout: 10 * time.Second, PermitWithoutStream: true,
		}))
	if err != nil {
		return nil, fmt.Errorf("dial %s: %w", id.Server, err)
	}
	return conn, nil
}

// open says Hello and takes the Welcome.
func (s *Session) open(ctx context.Context, id Identity, conn grpc.ClientConnInterface) (*stream, error) {
	head, err := s.cfg.Journal.Head(ctx)
	if err != nil {
		return nil, fmt.Errorf("read journal: %w", err)
	}
	hello, err := s.hello(ctx, id, head)
	if err != nil {
		return nil, err
	}
	rpc, err := agentv1.NewAgentServiceClient(conn).Session(ctx)
	if err != nil {
		return nil, rpcerr.Plain(err)
	}
	sent := s.cfg.Clock.Now()
	if err := rpc.Send(&agentv1.SessionRequest{Message: &agentv1.SessionRequest_Hello{Hello: hello}}); err != nil && !errors.Is(err, io.EOF) {
		return nil, err // after io.EOF Recv has the reason
	}
	crash.Point("session.hello.sent")
	first, err := rpc.Recv()
	if err != nil {
		return nil, rpcerr.Plain(err)
	}
	if bye := first.GetGoodbye(); bye != nil {
		crash.Point("session.goodbye.received")
		return nil, newGoodbye(bye)
	}
	st := &stream{Session: s, id: id, rpc: rpc, head: head, told: hello.GetFacts().GetConditions()}
	if err := st.welcomed(ctx, first, sent); err != nil {
		return nil, err
	}
	return st, nil
}

func (s *Session) hello(ctx context.Context, id Identity, head Head) (*agentv1.Hello, error) {
	boot, err := s.cfg.Node.BootID(ctx)
	if err != nil {
		return nil, fmt.Errorf("read boot id: %w", err)
	}
	unfinished, err := s.cfg.Tasks.Unfinished(ctx)
	if err != nil {
		return nil, fmt.Errorf("read unfinished tasks: %w", err)
	}
	facts := s.cfg.Node.Facts(ctx)
	facts.Conditions = s.cfg.Node.Conditions()
	return &agentv1.Hello{
		MinProtocol: MinProtocol, MaxProtocol: MaxProtocol,
		BootId: boot, JournalId: head.JournalID, LastSeq: head.LastSeq, FirstSeq: head.FirstSeq, AckedSeq: head.AckedSeq,
		AgentVersion: s.cfg.Version, Kinds: s.cfg.Kinds, WallTime: timestamppb.New(s.cfg.Clock.Now()),
		Unfinished: unfinished, Credits: s.cfg.Credits, TrustRootVersion: s.cfg.Trust.Version(),
		Generation: id.Generation, Facts: facts, InstanceId: head.InstanceID,
		SafeMode: s.cfg.SafeMode,
	}, nil
}

// welcomed takes the server's first message.
func (st *stream) welcomed(ctx context.Context, first *agentv1.SessionResponse, sent time.Time) error {
	w := first.GetWelcome()
	crash.Point("session.welcome.received")
	switch {
	case w == nil:
		return fmt.Errorf("%w: its first message is no Welcome", errProtocol)
	case w.GetProtocol() < MinProtocol || w.GetProtocol() > MaxProtocol:
		return fmt.Errorf("%w: it chose revision %d, and this agent speaks %d to %d", errProtocol, w.GetProtocol(), MinProtocol, MaxProtocol)
	case w.GetSessionEpoch() == 0 || w.GetResendFrom() == 0:
		return fmt.Errorf("%w: its Welcome has epoch %d and resend_from %d; both begin at 1", errProtocol, w.GetSessionEpoch(), w.GetResendFrom())
	case w.GetJournalId() != "" && w.GetJournalId() != st.head.JournalID:
		return fmt.Errorf("%w: its Welcome is for journal %s, and ours is %s", errProtocol, w.GetJournalId(), st.head.JournalID)
	}
	has := w.GetResendFrom() - 1
	if has > st.head.LastSeq {
		if err := st.cfg.Journal.Behind(ctx, st.head.JournalID, has); err != nil {
			return fmt.Errorf("begin a new journal, since the server has frame %d and ours ends at %d: %w", has, st.head.LastSeq, err)
		}
		return errJournal
	}
	st.epoch, st.interval = w.GetSessionEpoch(), heartbeatInterval(w)
	st.log = st.Session.log.With("epoch", st.epoch)
	st.window = newWindow(has)
	if has > 0 {
		notify(st.window.news)
	}
	st.say = make(chan *agentv1.SessionRequest)
	st.batches = make(chan *agentv1.SessionRequest)
	st.reports = make(chan struct{})
	st.work = make(chan *agentv1.SessionResponse, int(st.cfg.Credits)+freeWork)
	st.heard = make(chan struct{}, 1)
	st.drained = make(chan struct{})
	st.measure(w, sent)
	if u := w.GetTrustUpdates(); len(u) > 0 {
		if err := st.cfg.Trust.Update(ctx, u); err != nil {
			st.log.WarnContext(ctx, "trust root not updated", "err", err)
		}
	}
	st.log.InfoContext(ctx, "session open", "server", st.id.Server, "server_version", w.GetServerVersion(),
		"resend_from", w.GetResendFrom(), "clock_offset", st.Status().ClockOffset)
	return nil
}

// measure compares the clocks at the middle of the round trip.
func (st *stream) measure(w *agentv1.Welcome, sent time.Time) {
	var offset time.Duration
	if t := w.GetServerTime(); t.CheckValid() == nil && t != nil {
		now := st.cfg.Clock.Now()
		middle := sent.Add(now.Sub(sent) / 2)
		offset = t.AsTime().Sub(middle)
		st.serverTime(t.AsTime(), middle)
	}
	st.opened(st.epoch, offset)
}

func heartbeatInterval(w *agentv1.Welcome) time.Duration {
	d := w.GetHeartbeatInterval().AsDuration()
	if d <= 0 {
		return usualInterval
	}
	return min(max(d, shortestInterval), longestInterval)
}

// run keeps the session until it ends, and returns why.
func (st *stream) run(ctx context.Context, conn Conn) error {
	g, ctx := errgroup.WithContext(ctx)
	// Recv returns only when the stream ends, and the stream ends with the
	// context that opened it, not with the group's.
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	g.Go(func() error { return st.read(ctx) })
	g.Go(func() error { return st.send(ctx) })
	g.Go(func() error { return st.pump(ctx) })
	g.Go(func() error { return st.acknowledge(ctx) })
	g.Go(func() error { return st.perform(ctx) })
	g.Go(func() error { return st.beat(ctx) })
	g.Go(func() error { return st.watch(ctx) })
	g.Go(func() error { return st.report(ctx) })
	if st.cfg.Alongside != nil {
		g.Go(func() error { return st.cfg.Alongside(ctx, conn) })
	}
	return g.Wait()
}

// read hands on what the server says.
func (st *stream) read(ctx context.Context) error {
	for {
		m, err := st.rpc.Recv()
		if errors.Is(err, io.EOF) {
			return errClosed
		}
		if err != nil {
			return rpcerr.Plain(err)
		}
		if m.GetSessionEpoch() != st.epoch {
			st.log.DebugContext(ctx, "message of another epoch ignored", "other_epoch", m.GetSessionEpoch())
			continue
		}
		notify(st.heard)
		if err := st.take(ctx, m); err != nil {
			return err
		}
	}
}

func (st *stream) take(ctx context.Context, m *agentv1.SessionResponse) error {
	switch msg := m.GetMessage().(type) {
	case *agentv1.SessionResponse_Heartbeat:
		crash.Point("session.heartbeat.received")
		if t := msg.Heartbeat.GetServerTime(); t != nil && t.CheckValid() == nil {
			st.serverTime(t.AsTime(), st.cfg.Clock.Now())
		}
	case *agentv1.SessionResponse_Assignment, *agentv1.SessionResponse_Cancel:
		select {
		case st.work <- m:
		default:
			return fmt.Errorf("%w: it sent more work than the %d credits allow, and %d messages that take none", errProtocol, st.cfg.Credits, freeWork)
		}
	case *agentv1.SessionResponse_Ack:
		if msg.Ack.GetJournalId() != st.head.JournalID {
			return nil // of a journal that is no longer written
		}
		return st.acked(ctx, msg.Ack.GetSeq())
	case *agentv1.SessionResponse_Resend:
		if msg.Resend.GetJournalId() != st.head.JournalID {
			return nil
		}
		st.log.InfoContext(ctx, "server asks for frames again", "from_seq", msg.Resend.GetFromSeq())
		return st.window.rewind(msg.Resend.GetFromSeq())
	case *agentv1.SessionResponse_Drain:
		crash.Point("session.drain.received")
		st.drain(ctx, msg.Drain)
	case *agentv1.SessionResponse_Goodbye:
		crash.Point("session.goodbye.received")
		return newGoodbye(msg.Goodbye)
	case *agentv1.SessionResponse_OutputWanted:
		if st.cfg.Wanted != nil {
			st.cfg.Wanted(msg.OutputWanted.GetTaskId())
		}
	case *agentv1.SessionResponse_Welcome:
		return fmt.Errorf("%w: it sent a second Welcome", errProtocol)
	default:
		st.log.DebugContext(ctx, "unknown message ignored") // of a newer server
	}
	return nil
}

// acked takes an acknowledgement, unless it is of a frame that was never made.
func (st *stream) acked(ctx context.Context, seq uint64) error {
	if seq > st.window.last() {
		head, err := st.cfg.Journal.Head(ctx)
		if err != nil {
			return fmt.Errorf("read journal: %w", err)
		}
		if seq > head.LastSeq {
			return fmt.Errorf("%w: it acknowledged frame %d, and the journal ends at %d", errProtocol, seq, head.LastSeq)
		}
	}
	st.window.ack(seq)
	return nil
}

func (st *stream) drain(ctx context.Context, d *agentv1.DrainNotice) {
	st.asked.Store(int64(max(d.GetReconnectAfter().AsDuration(), 0)))
	select {
	case <-st.drained:
	default:
		st.log.InfoContext(ctx, "server will stop", "reconnect_after", d.GetReconnectAfter().AsDuration())
		close(st.drained)
	}
}

// perform carries out what the server asked for, in its order, so that a
// cancel never overtakes its task.
func (st *stream) perform(ctx context.Context) error {
	for {
		var m *agentv1.SessionResponse
		select {
		case <-ctx.Done():
			return ctx.Err()
		case m = <-st.work:
		}
		if ctx.Err() != nil {
			return ctx.Err() // a session that has ended does nothing more, however the select chose
		}
		if c := m.GetCancel(); c != nil {
			crash.Point("session.cancel.received")
			if err := st.cfg.Tasks.Cancel(ctx, c); err != nil {
				st.log.WarnContext(ctx, "task not cancelled", "task_id", c.GetTaskId(), "err", err)
			}
			continue
		}
		crash.Point("session.assignment.received")
		answer := st.cfg.Tasks.Deliver(ctx, m.GetAssignment())
		if answer == nil {
			continue // the session or the agent ends
		}
		crash.Point("session.answer.ready")
		if err := st.tell(ctx, &agentv1.SessionRequest{Message: &agentv1.SessionRequest_Answer{Answer: answer}}); err != nil {
			return err
		}
		crash.Point("session.answer.sent")
	}
}

func (st *stream) tell(ctx context.Context, m *agentv1.SessionRequest) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case st.say <- m:
		return nil
	}
}
