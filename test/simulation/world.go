package simulation

import (
	"cmp"
	"context"
	"crypto/sha256"
	"fmt"
	"hash"
	"log/slog"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// world is one schedule: a server, its nodes, what is on the way between them,
// and who waits to be let go on.
type world struct {
	t      *testing.T
	seed   uint64
	rng    *rand.Rand // of the driver
	log    *slog.Logger
	say    func(string) // shows the trace; may be nil
	sum    hash.Hash    // over the trace
	steps  int
	dir    string
	server *server
	nodes  []*node
	ops    *operator
	calm   bool // no more faults
	faults map[string]int
	broken []string // what the model found wrong

	mu      sync.Mutex
	gates   []*gate   // guarded by mu; who waits
	streams []*stream // guarded by mu; all that are not over at both ends
	old     []past    // messages that were delivered, to be delivered again; driver only
}

// past is a message that was delivered.
type past struct {
	node *node
	up   bool
	p    packet
}

// gate is a place at which a process waits until the driver lets it go on.
type gate struct {
	p    *process
	what string
	open chan error // holds one
}

// process is one run of an agent or of the server. One that has died changes
// nothing any more: no commit, no call of its host.
type process struct {
	w      *world
	name   string
	cancel context.CancelFunc
	ended  chan struct{}

	mu   sync.Mutex
	gone bool // guarded by mu
}

func (p *process) dead() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.gone
}

// wait waits at a gate. A process that has died, or dies there, gets an error.
func (p *process) wait(ctx context.Context, what string) error {
	if p.dead() {
		return errDead
	}
	g := &gate{p: p, what: what, open: make(chan error, 1)}
	p.w.mu.Lock()
	p.w.gates = append(p.w.gates, g)
	p.w.mu.Unlock()
	select {
	case err := <-g.open:
		return err
	case <-ctx.Done():
		p.w.mu.Lock()
		p.w.gates = slices.DeleteFunc(p.w.gates, func(o *gate) bool { return o == g })
		p.w.mu.Unlock()
		return ctx.Err()
	}
}

// guard is the guard of a store.
func (p *process) guard(written bool) error {
	what := "commit"
	if written {
		what = "committed"
	}
	p.w.callers(what)
	return p.wait(context.Background(), what)
}

// callers shows, beside the trace, who commits.
func (w *world) callers(what string) {
	if w.say == nil {
		return
	}
	pcs := make([]uintptr, 32)
	frames := runtime.CallersFrames(pcs[:runtime.Callers(3, pcs)])
	var names []string
	for {
		f, more := frames.Next()
		if i := strings.LastIndex(f.Function, "/"); strings.Contains(f.Function, "millwright") {
			names = append(names, f.Function[i+1:])
		}
		if !more {
			break
		}
	}
	w.say(fmt.Sprintf("        %s by %s", what, strings.Join(names, " < ")))
}

// kill lets a process die where it is: whatever it does from now on has no
// effect. It returns once nothing of it runs.
func (w *world) kill(p *process) {
	p.mu.Lock()
	p.gone = true
	p.mu.Unlock()
	w.mu.Lock()
	var waits []*gate
	w.gates = slices.DeleteFunc(w.gates, func(g *gate) bool {
		if g.p == p {
			waits = append(waits, g)
		}
		return g.p == p
	})
	w.mu.Unlock()
	for _, g := range waits {
		g.open <- errDead
	}
	p.cancel()
	<-p.ended
}

func (w *world) newStream(n *node, method string) *stream {
	w.mu.Lock()
	defer w.mu.Unlock()
	n.opened++
	s := &stream{w: w, node: n, name: fmt.Sprintf("%s/%d", n.name, n.opened), method: method, life: n.life,
		toClient: make(chan packet, 4096), toServer: make(chan packet, 4096)}
	w.streams = append(w.streams, s)
	return s
}

// trace adds a line to the history.
func (w *world) trace(format string, args ...any) {
	line := fmt.Sprintf("%s %s", time.Since(epoch).Round(time.Millisecond), fmt.Sprintf(format, args...))
	w.sum.Write([]byte(line + "\n"))
	if w.say != nil {
		w.say(line)
	}
}

// wrong records what must not be.
func (w *world) wrong(format string, args ...any) {
	line := fmt.Sprintf(format, args...)
	w.trace("WRONG %s", line)
	w.broken = append(w.broken, line)
}

// choice is one thing that can happen next.
type choice struct {
	name string
	do   func()
}

// choices lists what can happen next, in an order that does not depend on who
// came first.
func (w *world) choices() []choice {
	w.mu.Lock()
	defer w.mu.Unlock()
	var out []choice
	for _, g := range w.gates {
		out = append(out, choice{g.p.name + ": " + g.what, func() { w.let(g, nil) }})
	}
	w.streams = slices.DeleteFunc(w.streams, func(s *stream) bool { return s.clientGone && s.serverGone })
	for _, s := range w.streams {
		s.mu.Lock()
		if len(s.up) > 0 && !s.node.cutUp {
			p := s.up[0]
			out = append(out, choice{s.name + " up: " + describe(p), func() { w.deliverUp(s) }})
		}
		if len(s.down) > 0 && !s.node.cutDown {
			p := s.down[0]
			out = append(out, choice{s.name + " down: " + describe(p), func() { w.deliverDown(s) }})
		}
		s.mu.Unlock()
	}
	slices.SortStableFunc(out, func(a, b choice) int { return cmp.Compare(a.name, b.name) })
	return out
}

// let lets a process go on, or fail with err.
func (w *world) let(g *gate, err error) {
	w.mu.Lock()
	w.gates = slices.DeleteFunc(w.gates, func(o *gate) bool { return o == g })
	w.mu.Unlock()
	g.open <- err
}

func (w *world) deliverUp(s *stream) {
	s.mu.Lock()
	p := s.up[0]
	s.up = s.up[1:]
	s.mu.Unlock()
	if w.overtaken(s) {
		return
	}
	w.arrive(s, p)
	if p.message != nil {
		w.remember(past{s.node, true, p})
	}
}

// overtaken reports whether a stream is of a life that the server has never
// heard of, while it has heard of a later one. A boot takes longer than anything
// stays in a kernel unread, so that such a first message is lost and not late.
// One of a life that was heard can be late.
func (w *world) overtaken(s *stream) bool {
	n := s.node
	if n.heard[s.life] {
		return false
	}
	for life := range n.heard {
		if life > s.life {
			return true
		}
	}
	n.heard[s.life] = true
	return false
}

// arrive hands a message to the server; the first one opens the stream there.
func (w *world) arrive(s *stream, p packet) {
	if s.server == nil && !s.serverGone {
		w.accept(s)
	}
	if s.serverGone {
		s.clientGone = s.clientGone || p.end != nil
		return
	}
	if p.end != nil {
		s.serverGone = true
		s.server(p.end)
		return
	}
	s.toServer <- p
}

// accept has the server serve a stream, or tells the client that there is none.
func (w *world) accept(s *stream) {
	services := w.server.current()
	if services == nil {
		s.serverGone = true
		_ = s.sendDown(packet{end: errCut})
		return
	}
	handler := services.streams[s.method]
	ctx, cancel := context.WithCancelCause(s.node.peerContext(context.Background()))
	s.server = cancel
	w.server.serving.Go(func() {
		err := handler(&serverStream{s, ctx})
		if err == nil {
			err = errEOF
		}
		_ = s.sendDown(packet{end: err})
		cancel(nil)
	})
}

func (w *world) deliverDown(s *stream) {
	s.mu.Lock()
	p := s.down[0]
	s.down = s.down[1:]
	over := s.hungUp
	s.mu.Unlock()
	if p.end != nil {
		s.clientGone = true
		s.serverGone = true
	}
	if over {
		return // the client has hung up
	}
	s.toClient <- p
	s.welcomed = s.welcomed || strings.HasPrefix(describe(p), "welcome")
	if p.message != nil {
		w.remember(past{s.node, false, p})
	}
}

func (w *world) remember(m past) {
	w.old = append(w.old, m)
	if len(w.old) > 64 {
		w.old = w.old[1:]
	}
}

// cutStream breaks a stream: what is on the way is lost, and each end hears of
// it, or the client does not and has to notice by itself.
func (w *world) cutStream(s *stream, silently bool) {
	s.mu.Lock()
	s.up, s.down = nil, nil
	s.upEnd = true
	s.blackout = true
	over := s.hungUp
	s.mu.Unlock()
	if s.server != nil && !s.serverGone {
		s.server(errCut)
	}
	s.serverGone = true
	if silently && !over {
		return
	}
	s.clientGone = true
	s.toClient <- packet{end: errCut}
}

// settle lets things happen in order until d has passed in which nothing could.
func (w *world) settle(d time.Duration, pick func([]choice) choice) {
	for quiet := time.Duration(0); quiet < d; {
		synctest.Wait()
		all := w.choices()
		if len(all) == 0 {
			time.Sleep(tick)
			quiet += tick
			continue
		}
		w.happen(pick(all))
	}
}

// tick is how far time goes when nothing can happen.
const tick = 500 * time.Millisecond

func (w *world) happen(c choice) {
	w.steps++
	w.trace("%s", c.name)
	// No two timers are set at the same moment, so none end at the same one.
	time.Sleep(time.Duration(1+w.rng.IntN(1000)) * time.Microsecond)
	c.do()
}

func first(all []choice) choice { return all[0] }

var errEOF = status.Error(codes.Aborted, "the server ended the stream")

func newWorld(t *testing.T, seed uint64, dir string, log *slog.Logger, say func(string)) *world {
	return &world{t: t, seed: seed, dir: dir, log: log, say: say, sum: sha256.New(),
		rng: rand.New(rand.NewPCG(seed, 0x5eed)), faults: map[string]int{}}
}
