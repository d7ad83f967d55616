package controlplane_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/millwright/controlplane"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
	healthv1 "github.com/gpuaas/millwright/proto/millwright/health/v1"
	nodev1 "github.com/gpuaas/millwright/proto/millwright/node/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

const (
	ok      = healthv1.State_STATE_OK
	raised  = healthv1.State_STATE_RAISED
	stale   = healthv1.State_STATE_STALE
	unknown = healthv1.State_STATE_UNKNOWN
)

func (w *world) health() healthv1.HealthServiceClient { return healthv1.NewHealthServiceClient(w.conn) }

func (w *world) gpu(name string) *healthv1.GpuHealth {
	w.t.Helper()
	resp, err := w.health().GetGpu(w.ctx(), &healthv1.GetGpuRequest{Gpu: name})
	if err != nil {
		w.t.Fatalf("GetGpu(%s): %v", name, err)
	}
	return resp.GetGpu()
}

func (w *world) waitGpu(name string, want healthv1.State) *healthv1.GpuHealth {
	w.t.Helper()
	var g *healthv1.GpuHealth
	w.eventually(fmt.Sprintf("GPU %s is %s", name, want), func() bool {
		resp, err := w.health().GetGpu(w.ctx(), &healthv1.GetGpuRequest{Gpu: name})
		if err != nil && status.Code(err) != codes.NotFound { // it is not reported yet
			w.t.Fatalf("GetGpu(%s): %v", name, err)
		}
		g = resp.GetGpu()
		return g.GetState() == want
	})
	return g
}

func (w *world) changes(node string) []*healthv1.HealthChange {
	w.t.Helper()
	var out []*healthv1.HealthChange
	for token := ""; ; {
		resp, err := w.health().ListHealthChanges(w.ctx(), &healthv1.ListHealthChangesRequest{Node: node, PageSize: 2, PageToken: token})
		if status.Code(err) == codes.OutOfRange {
			out, token = nil, "" // what came next was trimmed meanwhile: anew, as the server says
			continue
		}
		if err != nil {
			w.t.Fatalf("ListHealthChanges(%s): %v", node, err)
		}
		out = append(out, resp.GetChanges()...)
		if token = resp.GetNextPageToken(); token == "" {
			return out
		}
	}
}

func uuid8(node string, i int) string { return fmt.Sprintf("GPU-%s-%d", node, i) }

// ecc is the condition of one GPU in a state, told now.
func ecc(node string, gpu int, state healthv1.State) *healthv1.Condition {
	c := &healthv1.Condition{
		Key: "gpu.ecc_uncorrected/" + uuid8(node, gpu), Code: "gpu.ecc_uncorrected", GpuUuid: uuid8(node, gpu), State: state,
		Severity: healthv1.Severity_SEVERITY_DEGRADED, Reason: "COUNTED", Title: "uncorrected ECC errors", Message: "2 since the driver was loaded",
		Meaning: "memory of the GPU gave wrong data", Action: healthv1.Action_ACTION_NONE, Since: timestamppb.Now(), LastTime: timestamppb.Now(),
	}
	if state == raised {
		c.Action = healthv1.Action_ACTION_RESET_GPU
	}
	return c
}

// wholeReport is a report of a node with two GPUs, with conditions.
func (h *host) wholeReport(number uint64, conditions ...*healthv1.Condition) *healthv1.HealthReport {
	r := h.smallReport(number)
	r.Whole = true
	r.Inventory = &gpuv1.Inventory{DriverVersion: proto.String("580.95.05")}
	for i := range 2 {
		r.Inventory.Gpus = append(r.Inventory.Gpus, &gpuv1.Gpu{Index: uint32(i), Uuid: proto.String(uuid8(h.node, i)), Model: proto.String("H100")})
	}
	r.Conditions = conditions
	return r
}

func (h *host) smallReport(number uint64) *healthv1.HealthReport {
	r := &healthv1.HealthReport{
		BootId: h.boot, Number: number, ReportTime: timestamppb.Now(), Period: durationpb.New(time.Minute),
		Driver: &gpuv1.DriverStatus{State: gpuv1.DriverState_DRIVER_STATE_OK},
		Sample: &gpuv1.Sample{ReadAt: timestamppb.Now(), Tier: gpuv1.Tier_TIER_FAST},
	}
	for i := range 2 {
		r.Sample.Gpus = append(r.Sample.Gpus, &gpuv1.GpuSample{Index: uint32(i), Uuid: uuid8(h.node, i), GpuCelsius: proto.Uint32(uint32(40 + number))})
	}
	return r
}

func (h *host) tell(r *healthv1.HealthReport) {
	h.w.t.Helper()
	h.send(&agentv1.SessionRequest{Message: &agentv1.SessionRequest_Health{Health: r}})
}

// edge puts a change into the journal, without sending it.
func (h *host) edge(n uint64, c *healthv1.Condition) {
	h.emit(&taskv1.Event{Payload: &taskv1.Event_Health{Health: &healthv1.HealthEdge{Condition: c, Edge: n}}})
}

func TestGpusAreListed(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.join("n1")
	h.connect()
	h.tell(h.wholeReport(1, ecc("n1", 0, ok), ecc("n1", 1, ok)))
	g := w.waitGpu("n1/1", ok)
	if g.GetUuid() != uuid8("n1", 1) || g.GetModel() != "H100" || g.GetSample().GetGpuCelsius() != 41 || len(g.GetConditions()) != 1 {
		t.Errorf("GPU = %v", g)
	}
	h.tell(h.smallReport(3))
	w.eventually("the sample of a small report counts", func() bool { return w.gpu("GPU-n1-0").GetSample().GetGpuCelsius() == 43 })
	h.tell(h.smallReport(2)) // comes late
	h.tell(h.wholeReport(4, ecc("n1", 0, raised), ecc("n1", 1, ok)))
	g = w.waitGpu("n1/0", raised)
	if g.GetReason() != "gpu.ecc_uncorrected" || g.GetAction() != healthv1.Action_ACTION_RESET_GPU || g.GetSeverity() != healthv1.Severity_SEVERITY_DEGRADED || g.GetSample().GetGpuCelsius() != 44 {
		t.Errorf("GPU = %v", g)
	}
	list, err := w.health().ListGpus(w.ctx(), &healthv1.ListGpusRequest{States: []healthv1.State{raised}})
	if err != nil || len(list.GetGpus()) != 1 || list.GetGpus()[0].GetUuid() != uuid8("n1", 0) || len(list.GetGpus()[0].GetConditions()) != 1 {
		t.Errorf("ListGpus(raised) = %v, %v", list, err)
	}
	for name, want := range map[string]codes.Code{"n1/7": codes.NotFound, "n9/0": codes.NotFound, "GPU-n1": codes.FailedPrecondition, "GPU-x": codes.NotFound, "n1/x": codes.InvalidArgument} {
		if _, err := w.health().GetGpu(w.ctx(), &healthv1.GetGpuRequest{Gpu: name}); status.Code(err) != want {
			t.Errorf("GetGpu(%s) = %v, want %s", name, err, want)
		}
	}
}

// TestOldReportsAreDropped sends reports in a wrong order: what came last is not
// what counts.
func TestOldReportsAreDropped(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.join("n1")
	h.connect()
	h.tell(h.wholeReport(9, ecc("n1", 0, ok)))
	h.tell(h.wholeReport(8, ecc("n1", 0, raised)))
	h.tell(h.smallReport(10))
	w.waitGpu("n1/0", ok)
	w.eventually("the last report counts", func() bool { return w.gpu("n1/0").GetSample().GetGpuCelsius() == 50 })
	if g := w.gpu("n1/0"); g.GetState() != ok {
		t.Errorf("an older report was taken: %v", g)
	}
	boot := h.boot
	h.boot = "another-boot"
	h.tell(h.wholeReport(1, ecc("n1", 0, raised)))
	w.waitGpu("n1/0", raised)
	h.boot = boot
}

// TestSilentNodeIsStale lets reports end in each way: nothing is shown as well.
func TestSilentNodeIsStale(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.join("n1")
	h.conditions = []*taskv1.Condition{{Type: "GPUReady", Status: taskv1.ConditionStatus_CONDITION_STATUS_TRUE, Reason: "OK"}}
	h.connect()
	r := h.wholeReport(1, ecc("n1", 0, raised), ecc("n1", 1, ok))
	r.Period = durationpb.New(time.Second)
	h.tell(r)
	w.waitGpu("n1/1", ok)
	if c := condition(w.node("n1").GetConditions(), "GPUReady"); c.GetStatus() != taskv1.ConditionStatus_CONDITION_STATUS_TRUE {
		t.Errorf("GPUReady = %v", c)
	}
	g := w.waitGpu("n1/1", stale) // three periods later, with the session still there
	if g.GetReason() != "REPORTS_MISSING" || g.GetConditions()[0].GetCondition().GetState() != stale || g.GetConditions()[0].GetLastState() != ok {
		t.Errorf("GPU = %v", g)
	}
	h.tell(h.smallReport(2))
	w.waitGpu("n1/1", ok)
	h.hangUp()
	g = w.waitGpu("n1/0", stale)
	if g.GetReason() != "NODE_AWAY" || g.GetSeverity() != healthv1.Severity_SEVERITY_DEGRADED || !strings.Contains(g.GetMessage(), "raised when the node last spoke") {
		t.Errorf("GPU = %v", g)
	}
	if c := condition(w.node("n1").GetConditions(), "GPUReady"); c.GetStatus() != taskv1.ConditionStatus_CONDITION_STATUS_UNSPECIFIED || c.GetReason() != "NODE_AWAY" {
		t.Errorf("GPUReady of a node that is away = %v", c)
	}
	h.connect() // and until it has reported again
	if g := w.gpu("n1/1"); g.GetState() != stale {
		t.Errorf("GPU = %v before the first report of the session", g)
	}
	h.tell(h.smallReport(3))
	w.waitGpu("n1/1", ok)
}

// TestDriverThatDoesNotAnswer is no GPU that is well.
func TestDriverThatDoesNotAnswer(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.join("n1")
	h.connect()
	r := h.wholeReport(1)
	r.Driver = &gpuv1.DriverStatus{State: gpuv1.DriverState_DRIVER_STATE_UNRESPONSIVE, Message: "a call did not return"}
	h.tell(r)
	if g := w.waitGpu("n1/0", unknown); g.GetReason() != "DRIVER" || !strings.Contains(g.GetMessage(), "unresponsive") {
		t.Errorf("GPU = %v", g)
	}
}

// TestBadReportsAreNotTaken sends what the format forbids: the session goes on.
func TestBadReportsAreNotTaken(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.join("n1")
	h.connect()
	h.tell(h.wholeReport(1, ecc("n1", 0, ok)))
	w.waitGpu("n1/0", ok)
	long, many := ecc("n1", 0, raised), h.wholeReport(3)
	long.Meaning = strings.Repeat("x", 513)
	for range 65 {
		many.Inventory.Gpus = append(many.Inventory.Gpus, &gpuv1.Gpu{})
	}
	big := h.wholeReport(4, ecc("n1", 0, raised))
	big.XidTable = strings.Repeat("x", 1<<20)
	crowd := h.wholeReport(5)
	for i := range 1025 {
		crowd.Conditions = append(crowd.Conditions, &healthv1.Condition{Key: fmt.Sprint("k", i)})
	}
	for i, r := range []*healthv1.HealthReport{h.wholeReport(2, long), many, big, crowd} {
		h.tell(r)
		h.tell(h.smallReport(uint64(10 + i)))
		w.eventually("the next report counts", func() bool { return w.gpu("n1/0").GetSample().GetGpuCelsius() == uint32(50+i) })
		if g := w.gpu("n1/0"); g.GetState() != ok {
			t.Fatalf("bad report %d was taken: %v", i, g)
		}
	}
}

// TestEdgesOutliveTheServer restarts the server between the changes of a
// condition: each is there once, in its order, and what is raised stays raised.
func TestEdgesOutliveTheServer(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.join("n1")
	h.connect()
	h.edge(1, ecc("n1", 0, raised))
	h.flush(h.lastSeq())
	w.restart()
	g := w.gpu("GPU-n1-0") // of a node that is not back yet
	if g.GetState() != stale || g.GetSeverity() != healthv1.Severity_SEVERITY_DEGRADED || g.Index != nil {
		t.Errorf("GPU after a restart = %v", g)
	}
	h.edge(2, ecc("n1", 0, ok)) // made while the server was away
	h.edge(3, ecc("n1", 1, raised))
	h.connect()
	h.sendFrames(false, h.frames...) // once more, as after an acknowledgement that was lost
	h.acked(h.lastSeq())
	var edges []uint64
	for _, c := range w.changes("n1") {
		edges = append(edges, c.GetEdge().GetEdge())
	}
	if fmt.Sprint(edges) != "[1 2 3]" {
		t.Errorf("the history has the changes %v, want each of [1 2 3] once", edges)
	}
	r := h.wholeReport(1, ecc("n1", 0, ok), ecc("n1", 1, ok))
	r.ReportTime = timestamppb.New(time.Now().Add(-time.Minute)) // made before the changes
	h.tell(r)
	w.waitGpu("n1/1", raised)
	w.waitGpu("n1/0", ok)
	h.tell(h.wholeReport(2)) // a newer one that knows nothing of them
	w.waitGpu("n1/1", ok)
}

// TestJournalThatIsLostTakesItsConditions: the changes are counted anew.
func TestJournalThatIsLostTakesItsConditions(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.join("n1")
	h.connect()
	h.edge(1, ecc("n1", 0, raised))
	h.flush(h.lastSeq())
	h.newJournal()
	h.connect()
	h.edge(1, ecc("n1", 1, raised))
	h.flush(h.lastSeq())
	resp, err := w.health().GetNodeHealth(w.ctx(), &healthv1.GetNodeHealthRequest{Node: "n1"})
	if err != nil || len(resp.GetHealth().GetConditions()) != 1 || resp.GetHealth().GetConditions()[0].GetCondition().GetGpuUuid() != uuid8("n1", 1) {
		t.Errorf("GetNodeHealth = %v, %v", resp, err)
	}
	if n := len(w.changes("n1")); n != 2 {
		t.Errorf("the history has %d changes, want both", n)
	}
}

// TestTooManyConditions makes more of them than a node may have, in one batch.
func TestTooManyConditions(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.join("n1")
	h.connect()
	first := h.lastSeq() + 1
	for i := range 1030 {
		h.edge(1, &healthv1.Condition{Key: fmt.Sprint("k", i), State: raised})
	}
	h.flush(first)
	resp, err := w.health().GetNodeHealth(w.ctx(), &healthv1.GetNodeHealthRequest{Node: "n1"})
	if err != nil || len(resp.GetHealth().GetConditions()) != 1024 {
		t.Errorf("%d conditions are kept, %v", len(resp.GetHealth().GetConditions()), err)
	}
	if condition(w.node("n1").GetConditions(), "EventsNotApplied") == nil {
		t.Error("nobody is told that some were not kept")
	}
}

// healthWatch is a watcher.
type healthWatch struct {
	w      *world
	stream grpc.ServerStreamingClient[healthv1.WatchHealthResponse]
	token  string
}

func (w *world) watchHealth(token string) *healthWatch {
	w.t.Helper()
	stream, err := w.health().WatchHealth(w.ctx(), &healthv1.WatchHealthRequest{ResumeToken: token})
	if err != nil {
		w.t.Fatalf("WatchHealth: %v", err)
	}
	return &healthWatch{w: w, stream: stream, token: token}
}

// next returns the first message that fits.
func (h *healthWatch) next(what string, fits func(*healthv1.WatchHealthResponse) bool) *healthv1.WatchHealthResponse {
	h.w.t.Helper()
	for {
		m, err := h.stream.Recv()
		if err != nil {
			h.w.t.Fatalf("watch before %s: %v", what, err)
		}
		if m.GetResumeToken() != "" {
			h.token = m.GetResumeToken()
		}
		if fits(m) {
			return m
		}
	}
}

func isChange(m *healthv1.WatchHealthResponse) bool { return m.GetChange() != nil }

func TestWatchHealth(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.join("n1")
	h.connect()
	h.tell(h.wholeReport(1, ecc("n1", 0, raised), ecc("n1", 1, ok)))
	w.waitGpu("n1/0", raised)
	watch := w.watchHealth("")
	m := watch.next("the node", func(m *healthv1.WatchHealthResponse) bool { return m.GetNode() != nil })
	if c := m.GetNode().GetConditions(); len(c) != 1 || c[0].GetCondition().GetState() != raised || m.GetResumeToken() != "" {
		t.Errorf("the node at the beginning = %v", m)
	}
	watch.next("the end of the beginning", func(m *healthv1.WatchHealthResponse) bool { return m.GetSnapshotEnd().GetNodes() == 1 })
	h.edge(1, ecc("n1", 0, ok))
	h.flush(h.lastSeq())
	if m := watch.next("a change", isChange); m.GetChange().GetEdge().GetEdge() != 1 || m.GetChange().GetNode() != "n1" {
		t.Errorf("change = %v", m)
	}
	h.hangUp()
	watch.next("that the node is away", func(m *healthv1.WatchHealthResponse) bool {
		return m.GetStatus().GetReason() == "NODE_AWAY" && m.GetStatus().GetFreshness() == healthv1.Freshness_FRESHNESS_STALE
	})
	w.restart()
	h.edge(2, ecc("n1", 0, raised))
	h.edge(3, ecc("n1", 0, ok))
	h.connect()
	watch = w.watchHealth(watch.token)
	for n := range uint64(2) {
		if m := watch.next("what was missed", isChange); m.GetChange().GetEdge().GetEdge() != n+2 {
			t.Errorf("change %v after the token, want edge %d", m, n+2)
		}
	}
	if _, err := w.watchHealth("aDE").stream.Recv(); status.Code(err) != codes.InvalidArgument {
		t.Errorf("a token that is none: %v", err)
	}
}

// TestWatchTokenOfAnotherLog is refused: what is missing cannot be known.
func TestWatchTokenOfAnotherLog(t *testing.T) {
	t.Parallel()
	w, other := newWorld(t), newWorldWith(t, func(*controlplane.Config) {})
	for range 5 {
		other.join(fmt.Sprint("n", len(other.nodeNames())))
	}
	watch := other.watchHealth("")
	watch.next("the end of the beginning", func(m *healthv1.WatchHealthResponse) bool { return m.GetSnapshotEnd() != nil })
	_, err := w.watchHealth(watch.token).stream.Recv()
	if status.Code(err) != codes.OutOfRange {
		t.Errorf("a token that is ahead of the log: %v", err)
	}
}

func (w *world) nodeNames() []*nodev1.Node {
	w.t.Helper()
	resp, err := w.nodes.ListNodes(w.ctx(), &nodev1.ListNodesRequest{})
	if err != nil {
		w.t.Fatal(err)
	}
	return resp.GetNodes()
}
