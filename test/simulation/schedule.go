package simulation

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// outcome is what became of one schedule.
type outcome struct {
	Seed   uint64
	Hash   string // of its history
	Steps  int
	Faults map[string]int
	States map[string]int // of its tasks, at the end
	Broken []string       // what must not be
	// Disturbed says that the machine's time, too, chose who runs.
	Disturbed bool
}

// Limits of one schedule.
const (
	chaosSteps = 120
	// calmFor is how long after the last fault all must have ended, and
	// calmAhead where a node's clock had been set ahead: the node begins nothing
	// until its clock is past all that it has seen, an hour and something later.
	calmFor   = 30 * time.Minute
	calmAhead = 2 * time.Hour
	// auditEach is how many schedules there are for one whose disks are looked at
	// when it is over, which takes as long as the schedule.
	auditEach = 3
)

// play plays the schedule of one seed.
func play(t *testing.T, tp *template, seed uint64, say func(string)) (out outcome) {
	dir := filepath.Join(tp.dir, fmt.Sprintf("seed-%d", seed))
	must(t, os.MkdirAll(dir, 0o700))
	defer func() { _ = os.RemoveAll(dir) }()
	log := slog.New(slog.DiscardHandler)
	if say != nil {
		log = slog.New(slog.NewTextHandler(lines(say), &slog.HandlerOptions{Level: slog.LevelDebug}))
	}
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, seed, dir, log, say)
		w.play(tp)
		if seed%auditEach == 0 {
			w.audit()
		}
		out = outcome{Seed: seed, Hash: fmt.Sprintf("%x", w.sum.Sum(nil)), Steps: w.steps, Faults: w.faults, States: w.ops.states(), Broken: w.broken}
	})
	return out
}

// play lets a schedule happen from its beginning to its end, and judges it.
func (w *world) play(tp *template) {
	w.build(tp)
	w.chaos()
	w.mend()
	w.judge()
	w.end()
}

type lines func(string)

func (l lines) Write(b []byte) (int, error) {
	l("        " + strings.TrimSpace(string(b)))
	return len(b), nil
}

// build starts a server and its nodes from copies of the template.
func (w *world) build(tp *template) {
	time.Sleep(time.Hour) // the template's own time is over by then
	w.server = &server{w: w, dir: w.dir}
	must(w.t, copyDir(filepath.Join(w.dir, "server"), filepath.Join(tp.dir, "server")))
	for i := range 1 + w.rng.IntN(maxNodes) {
		n := &node{w: w, name: nodeName(i), dir: filepath.Join(w.dir, nodeName(i)), peer: tp.nodes[i], boot: time.Now().Add(-time.Minute), heard: map[int]bool{},
			jitter: rand.New(rand.NewPCG(w.seed, uint64(i)))}
		must(w.t, copyDir(n.dir, filepath.Join(tp.dir, n.name)))
		n.machine()
		w.nodes = append(w.nodes, n)
	}
	w.ops = newOperator(w, tp)
	w.server.start()
	for _, n := range w.nodes {
		n.start()
	}
}

// chaos lets things happen, and go wrong, as the dice fall.
func (w *world) chaos() {
	orders := 2 + w.rng.IntN(5)
	if w.rng.IntN(4) > 0 {
		w.settle(time.Second, first)
	}
	begin := w.steps
	for w.steps < begin+chaosSteps {
		synctest.Wait()
		w.watch()
		switch dice := w.rng.IntN(100); {
		case dice < 6 && len(w.ops.orders) < orders:
			t := w.ops.order()
			w.trace("order %s: %s on %s", t.alias, t.kind, t.node.name)
			w.ops.send(t)
			w.steps++
			continue
		case dice < 8:
			w.wantCancel()
			continue
		case dice < 16:
			w.fault()
			w.steps++
			continue
		case dice < 20:
			w.again()
		}
		w.goOn()
	}
}

// goOn lets one thing happen that can, or time pass.
func (w *world) goOn() {
	synctest.Wait()
	all := w.choices()
	if len(all) == 0 || w.rng.IntN(12) == 0 {
		d := []time.Duration{tick, 2 * time.Second, 20 * time.Second}[w.rng.IntN(3)]
		w.steps++
		w.trace("time %s", d)
		time.Sleep(d)
		return
	}
	w.happen(all[w.rng.IntN(len(all))])
}

// watch has the operator look now and then, and repeat what was not answered.
func (w *world) watch() {
	if w.rng.IntN(4) == 0 {
		w.ops.look()
	}
	if open := w.ops.open(); len(open) > 0 && w.rng.IntN(3) == 0 {
		w.ops.send(open[w.rng.IntN(len(open))])
		synctest.Wait()
	}
}

func (w *world) wantCancel() {
	if len(w.ops.orders) == 0 {
		return
	}
	t := w.ops.orders[w.rng.IntN(len(w.ops.orders))]
	t.mu.Lock()
	t.cancel = t.created
	t.mu.Unlock()
	w.trace("cancel %s", t.alias)
	w.ops.send(t)
	synctest.Wait()
}

// again delivers a message once more that was delivered before, on the node's
// stream of now: of the same epoch it is a duplicate, else it is stale.
func (w *world) again() {
	if len(w.old) == 0 {
		return
	}
	m := w.old[w.rng.IntN(len(w.old))]
	for _, s := range w.streams {
		if s.node != m.node || s.method != sessionMethod || s.server == nil || s.serverGone || s.clientGone {
			continue
		}
		s.mu.Lock()
		over := s.hungUp
		s.mu.Unlock()
		if over {
			continue
		}
		w.faults["repeated"]++
		w.trace("again %s up=%v: %s", s.name, m.up, describe(m.p))
		if m.up {
			s.toServer <- m.p
		} else {
			s.toClient <- m.p
		}
		synctest.Wait()
		return
	}
}

const sessionMethod = "/millwright.agent.v1.AgentService/Session"

// machine gives a node what its tasks need.
func (n *node) machine() {
	n.Node = newMachine(n.w)
}

// mend ends all faults: what was cut is whole, what died runs, clocks are
// right. Then all must come to its end.
func (w *world) mend() {
	w.calm = true
	w.trace("calm")
	for _, n := range w.nodes {
		n.cutUp, n.cutDown = false, false
		n.step(0)
		if n.agent == nil {
			n.start()
		}
	}
	if w.server.run == nil {
		w.server.start()
	}
	begin, within := time.Now(), calmFor
	if slices.ContainsFunc(w.nodes, func(n *node) bool { return n.ahead }) {
		within = calmAhead
	}
	for time.Since(begin) < within {
		for _, t := range w.ops.open() {
			w.ops.send(t)
		}
		w.settle(5*time.Second, first)
		w.ops.look()
		if w.quiet() {
			w.trace("quiet after %s", time.Since(begin).Round(time.Second))
			return
		}
		time.Sleep(10 * time.Second)
	}
	left := w.ops.unsettled()
	for _, n := range w.nodes {
		if !w.inSession(n) {
			left = append(left, n.name+" has no session")
		}
	}
	w.wrong("not quiet within %s: %s", within, strings.Join(left, ", "))
}

// quiet reports whether every order has ended or is held, the server has said
// so, and every node has an open session: all that it had to say was delivered.
func (w *world) quiet() bool {
	return len(w.ops.open()) == 0 && len(w.ops.unsettled()) == 0 && !slices.ContainsFunc(w.nodes, func(n *node) bool { return !w.inSession(n) })
}

func (w *world) inSession(n *node) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.ContainsFunc(w.streams, func(s *stream) bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.node == n && s.welcomed && !s.clientGone && !s.serverGone && !s.hungUp
	})
}

// unsettled are the orders that have not ended and are not held, with their
// states.
func (o *operator) unsettled() (out []string) {
	for _, t := range o.orders {
		if t.refused != "" {
			continue
		}
		if s := o.get(t); s == nil || !terminal(s.GetState()) && s.GetState() != heldState {
			out = append(out, t.alias+" "+s.GetState().String())
		}
	}
	return out
}

// end stops all processes.
func (w *world) end() {
	for _, n := range w.nodes {
		w.stopAgent(n)
	}
	if w.server.run != nil {
		w.stopServer(false)
		w.server.run = nil
	}
	w.ops.calls.Wait()
	w.server.wait.Wait()
	w.mu.Lock()
	left := w.streams
	w.mu.Unlock()
	for _, s := range left {
		if s.server != nil {
			s.server(errCut)
		}
	}
	w.server.serving.Wait()
}

// removeAll removes files that may not be there.
func removeAll(paths ...string) error {
	for _, p := range paths {
		if err := os.Remove(p); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}
