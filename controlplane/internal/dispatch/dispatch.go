// Package dispatch holds the sessions of nodes: it hands them work, takes their
// word, and decides what only the server can.
//
// A session has two goroutines, which its stream needs anyway: the one that
// gRPC gave it sends, the other receives. Neither has a timer: one sweep over
// all sessions says when a heartbeat is due, who has gone silent, and whose
// certificate has ended.
//
// Whatever is sent was committed before: an assignment with the journal that it
// goes to, an acknowledgement after the events. The places at which a test may
// kill the server are in package crash.
package dispatch

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	healthv1 "github.com/gpuaas/millwright/proto/millwright/health/v1"
	serverv1 "github.com/gpuaas/millwright/proto/millwright/server/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"

	"github.com/gpuaas/millwright/controlplane/internal/clock"
	"github.com/gpuaas/millwright/controlplane/internal/eventlog"
	"github.com/gpuaas/millwright/controlplane/internal/store"
)

// protocol is the revision of the session protocol that this server speaks.
const protocol = 1

// Log is where decisions are committed.
type Log interface {
	// Commit is [eventlog.Log.Commit].
	Commit(ctx context.Context, decide func(*eventlog.Tx) error) error
}

// Board is told how the GPUs of nodes are.
type Board interface {
	// Entered says that a node has opened a session, and Left that it has none
	// any more.
	Entered(node string)
	Left(node string)
	// Report takes a report, or says why not.
	Report(node string, r *healthv1.HealthReport) error
}

// Config is what a dispatcher needs.
type Config struct {
	// Log commits decisions.
	Log Log
	// Reader reads the store.
	Reader store.Reader
	// Board gets what nodes report of their GPUs; nil means nobody does.
	Board Board
	// TrustUpdates returns the trust roots after a version, the oldest first.
	TrustUpdates func(version uint64) []*taskv1.Envelope
	// Logger gets what an operator of the server should know.
	Logger *slog.Logger
	// Actor is the server's own SPIFFE id.
	Actor string
	// Version is the server's version.
	Version string
	// Heartbeat is how often each side says something; 0 means 15 seconds. A
	// node that says nothing for three of them is cut.
	Heartbeat time.Duration
	// Sweep is how often sessions are looked at; 0 means a second.
	Sweep time.Duration
	// Now is the wall clock; nil means the machine's.
	Now func() time.Time
	// Boot is CLOCK_BOOTTIME; nil means the machine's.
	Boot func() time.Duration
}

// Peer is the node at the other end, by its certificate.
type Peer struct {
	// Node is its name.
	Node string
	// ID is its SPIFFE id.
	ID string
	// Generation is the enrolment generation in its certificate; 0 when it has
	// none, and then the node's own word counts.
	Generation uint64
	// NotAfter is when its certificate ends, and the session with it.
	NotAfter time.Time
}

// Stream is the stream of a session.
type Stream interface {
	Context() context.Context
	Send(*agentv1.SessionResponse) error
	Recv() (*agentv1.SessionRequest, error)
}

// Dispatcher holds the sessions. It is safe for concurrent use.
type Dispatcher struct {
	cfg       Config
	receivers sync.WaitGroup // the receiving goroutines

	mu       sync.Mutex
	sessions map[string]*session          // guarded by mu; by node, the newest of each
	draining bool                         // guarded by mu; no new session is taken
	left     map[string]*serverv1.SeenRow // guarded by mu; last words that are not stored
}

// New returns a dispatcher without sessions.
func New(cfg Config) *Dispatcher {
	if cfg.Heartbeat == 0 {
		cfg.Heartbeat = 15 * time.Second
	}
	if cfg.Sweep == 0 {
		cfg.Sweep = time.Second
	}
	if cfg.Now == nil {
		cfg.Now = clock.Now
	}
	if cfg.Boot == nil {
		cfg.Boot = clock.Boot()
	}
	if cfg.Board == nil {
		cfg.Board = nobody{}
	}
	return &Dispatcher{cfg: cfg, sessions: map[string]*session{}, left: map[string]*serverv1.SeenRow{}}
}

// Wake says that there may be work for a node.
func (d *Dispatcher) Wake(node string) {
	if s := d.session(node); s != nil {
		s.want(func() { s.assignDue = true })
	}
}

// Cancel asks a node to stop a task that it was sent. A node that is away is
// asked when it is back.
func (d *Dispatcher) Cancel(node, taskID string) {
	if s := d.session(node); s != nil {
		s.want(func() { s.cancels[taskID] = struct{}{} })
	}
}

// WantOutput asks a node for what is missing of a task's output, and reports
// whether it has a session.
func (d *Dispatcher) WantOutput(node, taskID string) bool {
	s := d.session(node)
	if s == nil {
		return false
	}
	s.want(func() { s.outputs[taskID] = struct{}{} })
	return true
}

// Cut ends the session of a node, with a Goodbye that says why.
func (d *Dispatcher) Cut(node, reason, message string) {
	if s := d.session(node); s != nil {
		s.end(goodbye(reason, message, 0))
	}
}

// Contact is what is known of a session from its stream alone.
type Contact struct {
	LastSeen    time.Time
	ClockOffset time.Duration // the node's clock minus the server's
}

// Contact returns when a node was last heard, and whether it has a session.
// Without one it is zero once the last word was stored.
func (d *Dispatcher) Contact(node string) (Contact, bool) {
	d.mu.Lock()
	s, row := d.sessions[node], d.left[node]
	d.mu.Unlock()
	switch {
	case s == nil && row == nil:
		return Contact{}, false
	case s == nil:
		return Contact{LastSeen: row.GetTime().AsTime(), ClockOffset: time.Duration(row.GetClockOffsetMs()) * time.Millisecond}, false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.contact, true
}

func (d *Dispatcher) session(node string) *session {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.sessions[node]
}

func (d *Dispatcher) all() []*session {
	d.mu.Lock()
	defer d.mu.Unlock()
	out := make([]*session, 0, len(d.sessions))
	for _, node := range slices.Sorted(maps.Keys(d.sessions)) {
		out = append(out, d.sessions[node])
	}
	return out
}

// enter makes s the session of its node, unless a newer one is there already.
// It returns the last word for s in that case.
func (d *Dispatcher) enter(s *session) *agentv1.SessionResponse {
	d.mu.Lock()
	defer d.mu.Unlock()
	old := d.sessions[s.peer.Node]
	switch {
	case d.draining:
		return drainNotice()
	case old != nil && old.epoch > s.epoch:
		return superseded()
	case old != nil:
		old.end(superseded())
	}
	d.sessions[s.peer.Node] = s
	d.cfg.Board.Entered(s.peer.Node)
	return nil
}

func (d *Dispatcher) leave(s *session) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.sessions[s.peer.Node] == s {
		delete(d.sessions, s.peer.Node)
		d.left[s.peer.Node] = s.seen()
		d.cfg.Board.Left(s.peer.Node)
	}
}

// Drain tells all nodes to come back later, ends their sessions and takes no
// new one.
func (d *Dispatcher) Drain() {
	d.mu.Lock()
	d.draining = true
	d.mu.Unlock()
	for _, s := range d.all() {
		s.end(drainNotice())
	}
}
