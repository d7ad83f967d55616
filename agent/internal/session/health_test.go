package session_test

import (
	"fmt"
	"sync"
	"testing"

	"github.com/gpuaas/millwright/agent/internal/session"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	healthv1 "github.com/gpuaas/millwright/proto/millwright/health/v1"
)

// gpus are what a node has to say of its GPUs.
type gpus struct {
	mu      sync.Mutex
	changed chan struct{}
	version uint64
	number  uint64
}

func (g *gpus) Changed() <-chan struct{} {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.changed
}

func (g *gpus) Version() uint64 {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.version
}

func (g *gpus) Report(whole bool) *healthv1.HealthReport {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.number++
	return &healthv1.HealthReport{BootId: fmt.Sprint(g.version), Number: g.number, Whole: whole}
}

func (g *gpus) change(version bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if version {
		g.version++
	}
	close(g.changed)
	g.changed = make(chan struct{})
}

func (p *peer) health() *healthv1.HealthReport {
	p.t.Helper()
	return p.recv(func(m *agentv1.SessionRequest) bool { return m.GetHealth() != nil }).GetHealth()
}

// TestHealth asks for a whole report at the beginning of each session and after a
// change, and for a small one after a cycle; and that a session goes on with its
// events meanwhile.
func TestHealth(t *testing.T) {
	s, n, g := serve(t, loopback(t)), newNode(3), &gpus{changed: make(chan struct{})}
	start(t, n, s, func(c *session.Config) { c.Health = g })
	p := s.accept(t)
	p.welcome(1, 1)
	first := p.health()
	if !first.GetWhole() {
		t.Errorf("the first report of a session is %v", first)
	}
	g.change(false)
	if r := p.health(); r.GetWhole() || r.GetNumber() <= first.GetNumber() {
		t.Errorf("after a cycle %v", r)
	}
	g.change(true)
	if r := p.health(); !r.GetWhole() || r.GetBootId() != "1" {
		t.Errorf("after a change %v", r)
	}
	p.end <- nil
	p = s.accept(t)
	p.welcome(2, 1)
	events := false
	p.recv(func(m *agentv1.SessionRequest) bool {
		if r := m.GetHealth(); r != nil && !r.GetWhole() {
			t.Errorf("the first report of the next session is %v", r)
		}
		events = events || m.GetEvents() != nil
		return m.GetHealth() != nil
	})
	if !events {
		p.events()
	}
}
