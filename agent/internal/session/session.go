// Package session keeps the node's one stream to the control plane: it dials,
// says Hello, hands assignments to the executor and carries the journal's
// frames the other way, in order, until the server has acknowledged them.
//
// A session holds no state that matters. All that must survive is in the
// journal, so that a stream may be cut at any byte: the next one begins where
// the server's Welcome says.
package session

import (
	"context"
	"crypto/tls"
	"errors"
	"log/slog"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/gpuaas/millwright/agent/internal/clock"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	healthv1 "github.com/gpuaas/millwright/proto/millwright/health/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// The revisions of the session protocol that this agent speaks.
const (
	MinProtocol = 1
	MaxProtocol = 1
)

// Identity is what the node proves itself with, and to whom.
type Identity struct {
	// Server is the control plane's address, host:port.
	Server string
	// TLS is the mutual TLS configuration; it checks the server's SVID.
	TLS *tls.Config
	// NotAfter is the end of the node's certificate. The stream ends before it.
	NotAfter time.Time
	// Generation is the node's enrolment generation.
	Generation uint64
	// Replaced is closed once a newer identity is at hand. Nil: never.
	Replaced <-chan struct{}
}

// Identities is where the identity comes from.
type Identities interface {
	// Identity returns the newest identity, and waits until there is one. With an
	// error it returns what is known of it, so that its end can be waited for.
	Identity(ctx context.Context) (Identity, error)
}

// Head says where the journal stands.
type Head struct {
	JournalID  string
	InstanceID string
	FirstSeq   uint64 // the first frame that is still kept
	LastSeq    uint64 // 0: none
	AckedSeq   uint64 // the last frame that the server has said to have
}

// Journal is the outbox.
type Journal interface {
	// Head says where the journal stands.
	Head(ctx context.Context) (Head, error)
	// NextEvents returns at most limit frames that follow after, in order and
	// without a hole, and waits until there are any. gap says that the frames
	// between after and the first one returned are gone for good.
	NextEvents(ctx context.Context, after uint64, limit int) (journalID string, frames [][]byte, gap bool, err error)
	// Ack says that the server has the frames up to seq.
	Ack(ctx context.Context, journalID string, seq uint64) error
	// Behind says that the server has frames up to seq of a journal that ends
	// before: it is an older copy, and a new journal must begin.
	Behind(ctx context.Context, journalID string, seq uint64) error
}

// Tasks is what carries tasks out.
type Tasks interface {
	// Deliver answers an assignment. What it accepts is durable.
	Deliver(ctx context.Context, a *agentv1.Assignment) *agentv1.AssignmentAnswer
	// Cancel asks for a task to be stopped.
	Cancel(ctx context.Context, c *agentv1.CancelRequest) error
	// Unfinished returns the accepted tasks that have not ended.
	Unfinished(ctx context.Context) ([]*agentv1.UnfinishedTask, error)
}

// Trust is the node's copy of the trust root.
type Trust interface {
	// Version is the version of the root, 0 when there is none.
	Version() uint64
	// Update verifies and stores newer roots, oldest first.
	Update(ctx context.Context, updates []*taskv1.Envelope) error
}

// Node says what the node is and how it feels.
type Node interface {
	// BootID returns the kernel's boot id.
	BootID(ctx context.Context) (string, error)
	// Facts returns what the node says of itself, conditions left out.
	Facts(ctx context.Context) *agentv1.NodeFacts
	// Conditions returns what is wrong, or not, in an order that is stable.
	Conditions() []*taskv1.Condition
}

// Health says how the GPUs are. Its reports are sent after all else and may be
// lost.
type Health interface {
	// Changed is closed once there is something newer to report.
	Changed() <-chan struct{}
	// Version changes whenever a report must be whole.
	Version() uint64
	// Report is how the GPUs are now; nil where there is nothing to say.
	Report(whole bool) *healthv1.HealthReport
}

// Config is what a session needs. All fields without "optional" must be set.
type Config struct {
	Identities Identities
	Journal    Journal
	Tasks      Tasks
	Trust      Trust
	Node       Node
	Clock      clock.Clock
	Logger     *slog.Logger
	// Version is the agent's version.
	Version string
	// Kinds are the kinds that the node can carry out.
	Kinds []*agentv1.KindSupport
	// Credits is how many tasks may be accepted and unfinished.
	Credits uint32
	// Alongside is run with the connection for as long as a session lasts;
	// optional. It returns when ctx ends; an error ends the session.
	Alongside func(ctx context.Context, conn grpc.ClientConnInterface) error
	// Wanted is told of a task whose outputs the server lacks; optional. It
	// must not block.
	Wanted func(taskID string)
	// ServerTime is told what the server's clock showed when the node's showed
	// local; optional. It must not block.
	ServerTime func(server, local time.Time)
	// SafeMode is set when the node has no journal to speak of; optional. Then
	// Journal and Tasks are those of no journal.
	SafeMode *agentv1.SafeMode
	// Refused is told when the server did not accept the identity, although it is
	// good by this clock; optional. It must not block.
	Refused func()
	// Health is how the GPUs are; optional, nothing is said of them.
	Health Health
	// Dial makes the connection below TLS; optional.
	Dial func(ctx context.Context, address string) (net.Conn, error)
	// Connect makes a connection in place of Dial, TLS and gRPC; optional.
	Connect func(server string) (Conn, error)
	// Jitter returns a time between 0 and d, by which pauses differ; optional,
	// random.
	Jitter func(d time.Duration) time.Duration
}

// Conn is a connection to the control plane. Close ends its streams.
type Conn interface {
	grpc.ClientConnInterface
	Close() error
}

// Status is how the session is.
type Status struct {
	// Connected says whether a session is open.
	Connected bool
	// Epoch is the epoch of the open session, or of the last.
	Epoch uint64
	// Err says why none is open, in words.
	Err string
	// ClockOffset is the server's clock minus the node's, when last heard.
	ClockOffset time.Duration
}

// Session keeps one stream open. Its methods are safe for concurrent use; Run
// is called once.
type Session struct {
	cfg Config
	log *slog.Logger

	mu     sync.Mutex
	status Status // guarded by mu
}

// New returns a session that does nothing until Run.
func New(cfg Config) *Session {
	if cfg.Dial == nil {
		dialer := &net.Dialer{Timeout: 20 * time.Second}
		cfg.Dial = func(ctx context.Context, address string) (net.Conn, error) {
			return dialer.DialContext(ctx, "tcp", address)
		}
	}
	if cfg.Jitter == nil {
		cfg.Jitter = func(d time.Duration) time.Duration { return rand.N(d) }
	}
	return &Session{cfg: cfg, log: cfg.Logger}
}

// Status returns how the session is.
func (s *Session) Status() Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.status
}

// Run keeps a session open until ctx ends, and returns nil then. No fault of
// the server, the network or the identity ends it.
func (s *Session) Run(ctx context.Context) error {
	defer s.failed(errStopped)
	pause := backoff{jitter: s.cfg.Jitter}
	for ctx.Err() == nil {
		id, err := s.identity(ctx)
		var ended ending
		begun := s.cfg.Clock.Boot()
		if err == nil {
			ended = s.once(ctx, id)
		} else {
			ended = ending{err: err}
		}
		if ctx.Err() != nil {
			return nil
		}
		s.failed(ended.err)
		if err == nil && s.cfg.Refused != nil && refused(ended.err) {
			s.cfg.Refused()
		}
		if ended.welcomed && s.cfg.Clock.Boot()-begun >= steady {
			pause.reset()
		}
		if ended.welcomed && ended.planned() {
			s.log.InfoContext(ctx, "session ends to begin anew", "reason", ended.err.Error())
			continue
		}
		delay := pause.after(ended.retryAfter())
		s.log.WarnContext(ctx, "no session", "server", id.Server, "err", ended.err, "retry_in", delay.Round(time.Millisecond))
		clock.Wait(ctx, delay, id.Replaced)
	}
	return nil
}

var errStopped = errors.New("the agent stops")

func (s *Session) identity(ctx context.Context) (Identity, error) {
	s.mu.Lock()
	if s.status.Err == "" {
		s.status.Err = "the node has no identity yet"
	}
	s.mu.Unlock()
	return s.cfg.Identities.Identity(ctx)
}

func (s *Session) failed(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.status.Connected = false
	s.status.Err = err.Error()
}

func (s *Session) opened(epoch uint64, offset time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.status.Connected, s.status.Epoch, s.status.Err = true, epoch, ""
	s.status.ClockOffset = offset
}

func (s *Session) serverTime(server, local time.Time) {
	s.mu.Lock()
	s.status.ClockOffset = server.Sub(local)
	s.mu.Unlock()
	if s.cfg.ServerTime != nil {
		s.cfg.ServerTime(server, local)
	}
}

// refused reports whether an error is the server's word on the certificate, in
// the handshake or after it.
func refused(err error) bool {
	return status.Code(err) == codes.Unauthenticated || strings.Contains(err.Error(), "remote error: tls:")
}
