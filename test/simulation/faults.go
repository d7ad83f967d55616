package simulation

import (
	"cmp"
	"os"
	"path/filepath"
	"slices"
	"testing/synctest"
	"time"

	"github.com/gpuaas/millwright/tasks/tasktest/fakehost"
)

// fault is one thing that can go wrong.
type fault struct {
	name   string
	weight int
	do     func(*world) bool // false: it could not happen
}

func faults() []fault {
	return []fault{
		{"stream cut", 10, (*world).cutOne},
		{"line cut", 6, (*world).cutLine},
		{"line healed", 10, (*world).healLine},
		{"agent killed", 10, (*world).killAgent},
		{"agent started", 20, (*world).startAgent},
		{"node rebooted", 3, (*world).reboot},
		{"server killed", 6, (*world).killServer},
		{"server started", 20, (*world).startServer},
		{"host call failed", 8, (*world).failHost},
		{"node clock set", 3, (*world).setClock},
		{"journal lost", 1, (*world).loseJournal},
		{"server copied", 3, (*world).copyServer},
		{"server restored", 1, (*world).restoreServer},
	}
}

// faultNames are the faults that schedules have.
func faultNames() (out []string) {
	for _, f := range faults() {
		out = append(out, f.name)
	}
	return append(out, "repeated")
}

// fault lets one thing go wrong.
func (w *world) fault() {
	all, total := faults(), 0
	for _, f := range all {
		total += f.weight
	}
	dice := w.rng.IntN(total)
	for _, f := range all {
		if dice -= f.weight; dice >= 0 {
			continue
		}
		if f.do(w) {
			w.faults[f.name]++
			w.trace("fault: %s", f.name)
		}
		break
	}
	synctest.Wait()
}

func (w *world) anyNode() *node { return w.nodes[w.rng.IntN(len(w.nodes))] }

func (w *world) cutOne() bool {
	w.mu.Lock()
	streams := append([]*stream(nil), w.streams...)
	w.mu.Unlock()
	if len(streams) == 0 {
		return false
	}
	slices.SortFunc(streams, func(a, b *stream) int { return cmp.Compare(a.name, b.name) })
	s := streams[w.rng.IntN(len(streams))]
	w.trace("cut %s", s.name)
	w.cutStream(s, w.rng.IntN(3) == 0)
	return true
}

func (w *world) cutLine() bool {
	n := w.anyNode()
	way := 1 + w.rng.IntN(3)
	n.cutUp, n.cutDown = way&1 != 0, way&2 != 0
	w.trace("cut line of %s: up=%v down=%v", n.name, n.cutUp, n.cutDown)
	return true
}

func (w *world) healLine() bool {
	for _, n := range w.nodes {
		if n.cutUp || n.cutDown {
			n.cutUp, n.cutDown = false, false
			w.trace("heal line of %s", n.name)
			return true
		}
	}
	return false
}

// forget loses what a node had sent, but for its newest stream: that much may
// have reached the server's kernel before the node was another, unless the line
// is cut.
func (w *world) forget(n *node) {
	w.mu.Lock()
	defer w.mu.Unlock()
	n.life++
	var newest *stream
	for _, s := range w.streams {
		if s.node != n {
			continue
		}
		if newest != nil {
			newest.mu.Lock()
			newest.up = nil
			newest.mu.Unlock()
		}
		newest = s
	}
	if newest != nil && n.cutUp {
		newest.mu.Lock()
		newest.up = nil
		newest.mu.Unlock()
	}
}

// killAgent kills an agent where it stands: in the middle of a commit or of a
// host call, if it waits there.
func (w *world) killAgent() bool {
	n := w.anyNode()
	if n.agent == nil {
		return false
	}
	w.trace("kill agent of %s", n.name)
	w.stopAgent(n)
	if w.rng.IntN(2) == 0 {
		w.trace("start agent of %s", n.name)
		n.start()
	}
	return true
}

func (w *world) startAgent() bool {
	for _, n := range w.nodes {
		if n.agent == nil {
			w.trace("start agent of %s", n.name)
			n.start()
			return true
		}
	}
	return false
}

func (w *world) reboot() bool {
	n := w.anyNode()
	w.trace("reboot %s", n.name)
	w.stopAgent(n)
	w.forget(n)
	n.Reboot()
	n.mu.Lock()
	n.boot = time.Now()
	n.mu.Unlock()
	n.rebooted = true
	n.start()
	return true
}

func (w *world) killServer() bool {
	if w.server.run == nil {
		return false
	}
	w.trace("kill server")
	w.stopServer(w.rng.IntN(3) == 0)
	w.server.run = nil
	if w.rng.IntN(2) == 0 {
		w.trace("start server")
		w.server.start()
	}
	return true
}

func (w *world) startServer() bool {
	if w.server.run != nil {
		return false
	}
	w.trace("start server")
	w.server.start()
	return true
}

// failHost fails a host call that waits, before or after its change.
func (w *world) failHost() bool {
	w.mu.Lock()
	var waits []*gate
	for _, g := range w.gates {
		if g.p != w.server.run && g.what != "commit" && g.what != "committed" {
			waits = append(waits, g)
		}
	}
	w.mu.Unlock()
	if len(waits) == 0 {
		return false
	}
	slices.SortFunc(waits, func(a, b *gate) int { return cmp.Compare(a.p.name+a.what, b.p.name+b.what) })
	g := waits[w.rng.IntN(len(waits))]
	w.trace("fail %s: %s", g.p.name, g.what)
	for _, n := range w.nodes {
		if n.agent == g.p {
			n.failed = true
		}
	}
	w.let(g, errHost)
	return true
}

func (w *world) setClock() bool {
	n := w.anyNode()
	d := []time.Duration{-time.Hour, -10 * time.Minute, 0, 10 * time.Minute, time.Hour}[w.rng.IntN(5)]
	w.trace("clock of %s %s", n.name, d)
	n.step(d)
	n.clockSet, n.ahead = true, n.ahead || d > 0
	return true
}

func (w *world) loseJournal() bool {
	n := w.anyNode()
	w.trace("journal of %s lost", n.name)
	w.stopAgent(n)
	must(w.t, removeAll(filepath.Join(n.dir, "state", "state.db")))
	n.lost = true
	w.forget(n)
	n.start()
	return true
}

// copyServer makes the backup that a later restore takes.
func (w *world) copyServer() bool {
	if w.server.run != nil {
		w.stopServer(false)
		w.server.run = nil
	}
	b, err := os.ReadFile(filepath.Join(w.dir, "server", "store.db"))
	must(w.t, err)
	must(w.t, os.WriteFile(filepath.Join(w.dir, "store.backup"), b, 0o600))
	w.server.backup = true
	w.trace("server copied")
	w.server.start()
	return true
}

func (w *world) restoreServer() bool {
	if !w.server.backup {
		return false
	}
	w.trace("server restored")
	if w.server.run != nil {
		w.stopServer(w.rng.IntN(3) == 0)
	}
	b, err := os.ReadFile(filepath.Join(w.dir, "store.backup"))
	must(w.t, err)
	must(w.t, os.WriteFile(filepath.Join(w.dir, "server", "store.db"), b, 0o600))
	w.server.restored = true
	w.ops.restored()
	w.server.start()
	return true
}

func newMachine(w *world) *fakehost.Node {
	n := fakehost.New()
	must(w.t, n.Do("program /usr/bin/work\n"))
	return n
}
