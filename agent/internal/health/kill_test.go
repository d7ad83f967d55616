package health

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/millwright/agent/internal/health/kernel"
	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
	healthv1 "github.com/gpuaas/millwright/proto/millwright/health/v1"
)

// tape is what a journal holds: it outlives the engines that write to it.
type tape struct {
	edges  []*healthv1.HealthEdge
	known  map[string]*healthv1.HealthEdge
	cursor Cursor
}

func (p *tape) tell(e *engine, edges []*healthv1.HealthEdge) {
	for _, edge := range edges {
		p.edges = append(p.edges, proto.CloneOf(edge))
		p.known[edge.GetCondition().GetKey()] = proto.CloneOf(edge)
	}
	p.cursor = e.cursor
}

func (p *tape) restore() (k Known) {
	for _, edge := range p.known {
		k.Edges = append(k.Edges, proto.CloneOf(edge))
	}
	k.Cursor = p.cursor
	return k
}

// step is one thing that happens to both engines.
type step struct {
	text    string // a line of the kernel's log
	celsius uint32
	xid     uint64
}

func steps(r *rand.Rand) (out []step) {
	for range 60 {
		switch r.IntN(4) {
		case 0:
			out = append(out, step{text: fmt.Sprintf("NVRM: Xid (PCI:0000:c5:00): %d, words", []int{31, 43, 48, 79, 95, 162, 163}[r.IntN(7)])})
		case 1:
			out = append(out, step{xid: []uint64{31, 48, 79, 95}[r.IntN(4)]})
		default:
			out = append(out, step{celsius: 40 + 50*uint32(r.IntN(2))})
		}
	}
	return out
}

// TestKills has an agent die at random places before and after it wrote, and
// asks of what was told that it is one unbroken story for each condition, that
// nothing is in it twice, and that it ends where the conditions are.
func TestKills(t *testing.T) {
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 5))
		journal := &tape{known: map[string]*healthv1.HealthEdge{}}
		s := newScript(t, nil).inventory()
		lines, kills := []string{}, 0
		start := func() {
			boot := s.boot
			s = newScript(t, nil)
			s.boot = boot
			s.restore(journal.restore(), s.at(time.Second))
			s.inventory()
			for i, text := range lines { // the log is read from its beginning
				var p kernel.Parser
				s.takeLine(uint64(i+1), p.Parse(kernel.Record{Text: text}), s.at(time.Microsecond), s.boot) // an index
			}
		}
		for _, st := range steps(r) {
			switch {
			case st.text != "":
				lines = append(lines, st.text)
				var p kernel.Parser
				s.takeLine(uint64(len(lines)), p.Parse(kernel.Record{Text: st.text}), s.at(time.Second), s.boot)
			case st.xid != 0:
				s.takeEvent(&gpuv1.GpuEvent{Uuid: "GPU-a", PciBusId: "0000:c5:00.0", Type: 8, Data: st.xid}, s.at(time.Second))
			default:
				s.sampled(10*time.Second, hotter(st.celsius))
			}
			edges := s.edges()
			switch r.IntN(8) {
			case 0: // it dies before it has written
				start()
				kills++
			case 1: // and after, before it knows
				journal.tell(s.engine, edges)
				start()
				kills++
			case 2: // the disk refuses
			default:
				journal.tell(s.engine, edges)
				s.told(edges)
			}
		}
		s.sampled(10*time.Second, hotter(40))
		s.sampled(flapQuiet, nil)
		s.sampled(flapQuiet, nil)
		journal.tell(s.engine, s.tell())
		story(t, seed, journal, s.engine)
		if kills == 0 {
			t.Errorf("seed %d: nobody died", seed)
		}
	}
}

func story(t *testing.T, seed uint64, journal *tape, e *engine) {
	t.Helper()
	last := map[string]*healthv1.HealthEdge{}
	for _, edge := range journal.edges {
		c := edge.GetCondition()
		before := last[c.GetKey()]
		if edge.GetEdge() != before.GetEdge()+1 || edge.GetPrevious() != before.GetCondition().GetState() {
			t.Fatalf("seed %d: %s: edge %d from %v follows edge %d, %v", seed, c.GetKey(), edge.GetEdge(), edge.GetPrevious(), before.GetEdge(), before.GetCondition().GetState())
		}
		if b := before.GetCondition(); before != nil && b.GetState() == c.GetState() && b.GetSeverity() == c.GetSeverity() && b.GetAction() == c.GetAction() && edge.GetFolded() == 0 {
			t.Fatalf("seed %d: %s is told twice: %v", seed, c.GetKey(), edge)
		}
		last[c.GetKey()] = edge
	}
	for key, c := range e.conditions {
		told := last[key].GetCondition()
		if (c.now.GetState() == raised || told != nil) && told.GetState() != c.now.GetState() {
			t.Fatalf("seed %d: %s is %v, and was told as %v", seed, key, c.now.GetState(), told.GetState())
		}
	}
}

// TestLogIsReadOnce has a line raise a condition and a reset end it: the next
// life reads the line again, and raises nothing.
func TestLogIsReadOnce(t *testing.T) {
	journal := &tape{known: map[string]*healthv1.HealthEdge{}}
	s := newScript(t, nil).inventory()
	const line, key = "NVRM: Xid (PCI:0000:c5:00): 95, words", "gpu.xid.95/GPU-a"
	s.sampled(time.Second, func(g *gpuv1.GpuSample) { g.EccUncorrectedVolatile = proto.Uint64(5) })
	s.line(line)
	journal.tell(s.engine, s.tell())
	s.sampled(time.Second, nil)
	journal.tell(s.engine, s.tell())
	if s.state(key) != ok {
		t.Fatal("a reset did not end it")
	}
	next := newScript(t, nil)
	next.restore(journal.restore(), next.at(time.Second))
	next.inventory()
	var p kernel.Parser
	next.takeLine(1, p.Parse(kernel.Record{Text: line}), next.at(time.Second), next.boot)
	if next.state(key) != ok {
		t.Error("a line of before the reset raised it again")
	}
	next.takeLine(2, p.Parse(kernel.Record{Text: line}), next.at(time.Second), next.boot)
	if next.state(key) != raised {
		t.Error("a new line raised nothing")
	}
}
