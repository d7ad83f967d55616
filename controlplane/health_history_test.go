package controlplane_test

import (
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/gpuaas/millwright/controlplane"
	healthv1 "github.com/gpuaas/millwright/proto/millwright/health/v1"
)

// TestHistoryIsBounded: of the history of a node's conditions the newest are
// kept, by number and by age; a list that was begun before says that something is
// missing, and so does a new one; what the conditions are, and what a watch has
// not told yet, is not touched.
func TestHistoryIsBounded(t *testing.T) {
	t.Parallel()
	w := newWorldWith(t, func(c *controlplane.Config) {
		c.HealthHistoryCount, c.HealthHistoryAge = 5, 24*time.Hour
	})
	h := w.join("n1")
	h.connect()
	watch := w.watchHealth("")
	watch.next("the end of the beginning", func(m *healthv1.WatchHealthResponse) bool { return m.GetSnapshotEnd() != nil })
	const edges = 12
	for n := range uint64(edges) {
		h.edge(n+1, ecc("n1", int(n%2), raised))
		h.flush(h.lastSeq())
	}
	if got := w.changes("n1"); len(got) != edges {
		t.Fatalf("%d changes before anything is too much", len(got))
	}
	page, err := w.health().ListHealthChanges(w.ctx(), &healthv1.ListHealthChangesRequest{Node: "n1", PageSize: 2})
	if err != nil || page.GetTrimmedIndex() != 0 {
		t.Fatalf("%v, %v", page, err)
	}
	h.hangUp()
	w.restart() // it looks at once
	w.eventually("five are left", func() bool { return len(w.changes("n1")) == 5 })
	got := w.changes("n1")
	if first := got[0].GetEdge().GetEdge(); first != edges-4 {
		t.Errorf("the oldest that is left is edge %d", first)
	}
	_, err = w.health().ListHealthChanges(w.ctx(), &healthv1.ListHealthChangesRequest{Node: "n1", PageSize: 2, PageToken: page.GetNextPageToken()})
	if status.Code(err) != codes.OutOfRange || !strings.Contains(err.Error(), "list anew") {
		t.Errorf("a list that goes on where nothing is any more: %v", err)
	}
	page, err = w.health().ListHealthChanges(w.ctx(), &healthv1.ListHealthChangesRequest{Node: "n1", PageSize: 2})
	if err != nil || page.GetTrimmedIndex() == 0 || page.GetTrimmedIndex() >= got[0].GetIndex() {
		t.Errorf("trimmed through %d, and the oldest is %d: %v", page.GetTrimmedIndex(), got[0].GetIndex(), err)
	}
	watch = w.watchHealth(watch.token)
	for n := range uint64(edges) {
		if m := watch.next("each change, from the log", isChange); m.GetChange().GetEdge().GetEdge() != n+1 {
			t.Fatalf("change %v, want edge %d", m, n+1)
		}
	}
	w.shut()
	w.cfg.HealthHistoryAge = time.Millisecond
	w.start()
	w.eventually("all are too old", func() bool { return len(w.changes("n1")) == 0 })
	resp, err := w.health().GetNodeHealth(w.ctx(), &healthv1.GetNodeHealthRequest{Node: "n1"})
	if err != nil || len(resp.GetHealth().GetConditions()) != 2 || resp.GetHealth().GetConditions()[0].GetLastState() != raised {
		t.Errorf("the conditions themselves: %v, %v", resp, err)
	}
}
