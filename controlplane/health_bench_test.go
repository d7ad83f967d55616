package controlplane_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/gpuaas/millwright/controlplane"
	healthv1 "github.com/gpuaas/millwright/proto/millwright/health/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// fleetOf is a server with so many connected nodes.
func fleetOf(t testing.TB, n int) (*world, []*host) {
	t.Helper()
	w := newWorldWith(t, func(*controlplane.Config) {})
	w.shut()
	hosts := enrol(t, w, n)
	w.start()
	var group errgroup.Group
	group.SetLimit(32)
	for _, h := range hosts {
		group.Go(func() error {
			h.connect()
			h.tell(h.eightGpus(1))
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	return w, hosts
}

// eightGpus is a whole report as a node with eight GPUs makes it: 25 conditions
// for each.
func (h *host) eightGpus(number uint64) *healthv1.HealthReport {
	r := h.wholeReport(number)
	for i := range 200 {
		c := ecc(h.node, i%8, ok)
		c.Key = fmt.Sprintf("gpu.condition-%d/%s", i/8, c.GetGpuUuid())
		r.Conditions = append(r.Conditions, c)
	}
	return r
}

// edgesSeen lets nodes change a condition, changes of them in all at an even
// rate, while each reports once in a period, and returns how long each change
// took from its node to a client that watches, in order. None may be missing or
// come twice.
func edgesSeen(t testing.TB, w *world, hosts []*host, changes, perSecond int, period time.Duration) []time.Duration {
	t.Helper()
	stream, err := w.health().WatchHealth(t.Context(), &healthv1.WatchHealthRequest{})
	if err != nil {
		t.Fatal(err)
	}
	timer := time.AfterFunc(3*time.Minute, func() { _ = w.conn.Close() }) // no wait without an end
	defer timer.Stop()
	watch := &healthWatch{w: w, stream: stream}
	watch.next("the end of the beginning", func(m *healthv1.WatchHealthResponse) bool { return m.GetSnapshotEnd() != nil })
	var mu sync.Mutex
	sent := map[string]time.Time{} // guarded by mu
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var group errgroup.Group
	every := time.Duration(len(hosts)) * time.Second / time.Duration(perSecond)
	for i, h := range hosts {
		mine := changes / len(hosts)
		if i < changes%len(hosts) {
			mine++
		}
		group.Go(func() error {
			edge := time.NewTimer(every * time.Duration(i) / time.Duration(len(hosts)))
			report := time.NewTimer(period * time.Duration(i) / time.Duration(len(hosts)))
			defer edge.Stop()
			defer report.Stop()
			for number, n := uint64(2), uint64(0); ; {
				select {
				case <-ctx.Done():
					return nil
				case <-report.C:
					h.tell(h.eightGpus(number))
					number++
					report.Reset(period)
				case <-edge.C:
					if n++; n > uint64(mine) {
						continue
					}
					mu.Lock()
					sent[fmt.Sprint(h.node, " ", n)] = time.Now()
					mu.Unlock()
					h.report(&taskv1.Event{Payload: &taskv1.Event_Health{Health: &healthv1.HealthEdge{Condition: ecc(h.node, 0, raised), Edge: n}}})
					edge.Reset(every)
				}
			}
		})
	}
	took := make([]time.Duration, 0, changes)
	for range changes {
		c := watch.next("a change", isChange).GetChange()
		now, key := time.Now(), fmt.Sprint(c.GetNode(), " ", c.GetEdge().GetEdge())
		mu.Lock()
		at, known := sent[key]
		delete(sent, key)
		mu.Unlock()
		if !known {
			t.Fatalf("the change %s came twice, or was never made", key)
		}
		took = append(took, now.Sub(at))
	}
	cancel()
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	slices.Sort(took)
	return took
}

// TestEdgesReachAWatcher lets 50 nodes report, so that each change is told once.
// How soon it is, with 1,000 nodes, make bench measures.
func TestEdgesReachAWatcher(t *testing.T) {
	w, hosts := fleetOf(t, 50)
	took := edgesSeen(t, w, hosts, 200, 50, 5*time.Second)
	if p50, p99 := centile(took, 50), centile(took, 99); p99 > 30*time.Second {
		t.Errorf("a change takes %s at p50 and %s at p99; at most 30s, on a machine that does other work beside, under the race detector: the figure is the bench's", p50, p99)
	}
}

// promisedP99 is how long a change of a condition may take to a client that
// watches, with 1,000 nodes that report.
const promisedP99 = time.Second

// centile is the value below which so many of a hundred lie, of an ordered list.
func centile(ordered []time.Duration, n int) time.Duration {
	return ordered[min(len(ordered)*n/100, len(ordered)-1)]
}

// BenchmarkHealthEdges is how long a change of a condition takes from its node to
// a client that watches, with 1,000 nodes of eight GPUs that each report once in
// ten seconds. It fails when that is more than promised. The floor is the same
// change of a node that is alone.
func BenchmarkHealthEdges(b *testing.B) {
	for b.Loop() {
		alone, one := fleetOf(b, 1)
		floor := edgesSeen(b, alone, one, 100, 50, 10*time.Second)
		alone.shut()
		w, hosts := fleetOf(b, 1000)
		took := edgesSeen(b, w, hosts, 1000, 100, 10*time.Second)
		p50, p99, floor50 := centile(took, 50), centile(took, 99), centile(floor, 50)
		b.ReportMetric(float64(p50.Microseconds())/1000, "p50-ms")
		b.ReportMetric(float64(p99.Microseconds())/1000, "p99-ms")
		b.ReportMetric(float64(floor50.Microseconds())/1000, "floor-p50-ms")
		b.ReportMetric(float64(p50)/float64(floor50), "p50/floor")
		if p99 > promisedP99 {
			b.Errorf("a change takes %v at p99 with 1,000 nodes; at most %v is promised", p99, promisedP99)
		}
		w.shut()
	}
}
