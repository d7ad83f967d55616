package board_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
	healthv1 "github.com/gpuaas/millwright/proto/millwright/health/v1"
	serverv1 "github.com/gpuaas/millwright/proto/millwright/server/v1"

	"github.com/gpuaas/millwright/controlplane/internal/board"
)

// fixture is a board with a clock that tests move.
type fixture struct {
	*board.Board
	boot time.Duration
	n    uint64
}

func newFixture() *fixture {
	f := &fixture{}
	f.Board = board.New(board.Config{
		Now: func() time.Time { return time.Unix(1_800_000_000, 0).Add(f.boot) }, Boot: func() time.Duration { return f.boot },
	})
	f.Entered("n")
	return f
}

func (f *fixture) report(t *testing.T, change func(*healthv1.HealthReport)) {
	t.Helper()
	f.n++
	r := &healthv1.HealthReport{BootId: "b", Number: f.n, ReportTime: timestamppb.New(time.Unix(int64(100*f.n), 0)),
		Driver: &gpuv1.DriverStatus{State: gpuv1.DriverState_DRIVER_STATE_OK}, Period: durationpb.New(10 * time.Second)}
	change(r)
	if err := f.Report("n", r); err != nil {
		t.Fatal(err)
	}
}

func whole(r *healthv1.HealthReport) {
	r.Whole = true
	r.Inventory = &gpuv1.Inventory{Gpus: []*gpuv1.Gpu{{Uuid: proto.String("G")}}}
	r.Sample = &gpuv1.Sample{Tier: gpuv1.Tier_TIER_SLOW, Gpus: []*gpuv1.GpuSample{{Uuid: "G", GpuCelsius: proto.Uint32(40), MemoryCelsius: proto.Uint32(50),
		PcieWidth: proto.Uint32(16), Unknown: []*gpuv1.Unknown{{Field: "power_milliwatts"}, {Field: "pcie_generation"}}}}}
}

func row(state healthv1.State, severity healthv1.Severity, at int64) *serverv1.HealthRow {
	return &serverv1.HealthRow{Node: "n", Condition: &healthv1.Condition{Key: "k/G", GpuUuid: "G", State: state, Severity: severity,
		LastTime: timestamppb.New(time.Unix(at, 0))}}
}

// TestPeriods holds a board against the third period: at its end what is known is
// of now, and not a moment later. Wall clocks have no say.
func TestPeriods(t *testing.T) {
	t.Parallel()
	for period, want := range map[time.Duration]time.Duration{
		10 * time.Second: 30 * time.Second, 0: 3 * time.Second, -time.Hour: 3 * time.Second, 240 * time.Hour: 30 * time.Minute,
	} {
		f := newFixture()
		f.report(t, func(r *healthv1.HealthReport) { whole(r); r.Period = durationpb.New(period) })
		f.boot += want
		if g := f.Gpus("n", nil, false)[0]; g.GetState() != healthv1.State_STATE_OK {
			t.Errorf("a period of %s: %s after %s", period, g.GetState(), want)
		}
		f.boot++
		if g := f.Gpus("n", nil, false)[0]; g.GetState() != healthv1.State_STATE_STALE || g.GetReason() != "REPORTS_MISSING" {
			t.Errorf("a period of %s: %s after more than %s", period, g.GetState(), want)
		}
	}
}

// TestForget: what is left of a node that was evicted is nothing, also when its
// session still brings a report; one that enters again begins anew.
func TestForget(t *testing.T) {
	t.Parallel()
	f := newFixture()
	f.report(t, whole)
	f.Forget("n")
	f.report(t, whole)
	if known := f.Known(); len(known) != 0 {
		t.Errorf("known: %v", known)
	}
	if s := f.Status("n"); s.GetFreshness() != healthv1.Freshness_FRESHNESS_NEVER || len(f.Gpus("n", nil, true)) != 0 {
		t.Errorf("status %v", s)
	}
	f.Entered("n")
	f.report(t, whole)
	if g := f.Gpus("n", nil, false); len(g) != 1 || g[0].GetState() != healthv1.State_STATE_OK {
		t.Errorf("GPUs %v", g)
	}
}

// TestSamplesOfTwoTiers: a fast sample leaves what only the slow one says, and
// takes back what is no longer known.
func TestSamplesOfTwoTiers(t *testing.T) {
	t.Parallel()
	f := newFixture()
	f.report(t, whole)
	f.report(t, func(r *healthv1.HealthReport) {
		r.Sample = &gpuv1.Sample{Tier: gpuv1.Tier_TIER_FAST, Gpus: []*gpuv1.GpuSample{{Uuid: "G", GpuCelsius: proto.Uint32(41),
			PowerMilliwatts: proto.Uint64(7), Unknown: []*gpuv1.Unknown{{Field: "memory_celsius"}}}}}
	})
	s := f.Gpus("n", nil, false)[0].GetSample()
	if s.GetGpuCelsius() != 41 || s.GetPowerMilliwatts() != 7 || s.GetPcieWidth() != 16 || s.MemoryCelsius != nil || len(s.GetUnknown()) != 2 {
		t.Errorf("sample = %v", s)
	}
}

// TestNewerCounts lays changes over a report that was made at 100.
func TestNewerCounts(t *testing.T) {
	t.Parallel()
	const ok, raised, unknown = healthv1.State_STATE_OK, healthv1.State_STATE_RAISED, healthv1.State_STATE_UNKNOWN
	const fatal, info = healthv1.Severity_SEVERITY_FATAL, healthv1.Severity_SEVERITY_INFO
	for name, c := range map[string]struct {
		row  *serverv1.HealthRow
		want healthv1.State
	}{
		"a change after the report":          {row(raised, fatal, 101), raised},
		"a change before it that it dropped": {row(raised, fatal, 99), ok},
		"a change that is for the record":    {row(raised, info, 101), ok},
		"a driver that cannot say":           {row(unknown, fatal, 101), ok},
	} {
		f := newFixture()
		f.report(t, whole)
		g := f.Gpus("n", []*serverv1.HealthRow{c.row}, true)[0]
		if g.GetState() != c.want {
			t.Errorf("%s: %s, want %s", name, g.GetState(), c.want)
		}
		f.Left("n")
		if g := f.Gpus("n", []*serverv1.HealthRow{c.row}, true)[0]; g.GetState() != healthv1.State_STATE_STALE {
			t.Errorf("%s, and the node is away: %s", name, g.GetState())
		}
	}
}

// TestConditionOfTheNode is one of each of its GPUs.
func TestConditionOfTheNode(t *testing.T) {
	t.Parallel()
	f := newFixture()
	f.report(t, func(r *healthv1.HealthReport) {
		whole(r)
		r.Conditions = []*healthv1.Condition{{Key: "node.driver", State: healthv1.State_STATE_RAISED, Severity: healthv1.Severity_SEVERITY_FATAL},
			{Key: "other/H", PciBusId: "0000:01:00.0", State: healthv1.State_STATE_RAISED, Severity: healthv1.Severity_SEVERITY_FATAL}}
	})
	if g := f.Gpus("n", nil, true)[0]; g.GetState() != healthv1.State_STATE_RAISED || len(g.GetConditions()) != 1 {
		t.Errorf("GPU = %v", g)
	}
}

// TestManyParts: a report that is small on the wire and large in memory is not
// taken; the largest that a node would send is.
func TestManyParts(t *testing.T) {
	t.Parallel()
	report := func(gpus, links int) *healthv1.HealthReport {
		r := &healthv1.HealthReport{BootId: "b", Number: 1, Whole: true, Sample: &gpuv1.Sample{}}
		for range gpus {
			g := &gpuv1.GpuSample{}
			for range links {
				g.Nvlinks = append(g.Nvlinks, &gpuv1.NvLinkSample{})
			}
			r.Sample.Gpus = append(r.Sample.Gpus, g)
		}
		for i := range 1024 {
			c := &healthv1.Condition{Key: fmt.Sprint(i)}
			for range 16 {
				c.Details = append(c.Details, &healthv1.Detail{})
			}
			r.Conditions = append(r.Conditions, c)
		}
		return r
	}
	if err := newFixture().Report("n", report(64, 36)); err != nil {
		t.Errorf("a large node: %v", err)
	}
	if err := newFixture().Report("n", report(1, 200_000)); err == nil {
		t.Error("200,000 links of one GPU were taken")
	}
}

// TestManyNames: conditions that each name another GPU do not make a node of a
// thousand GPUs, for lists and metrics.
func TestManyNames(t *testing.T) {
	t.Parallel()
	var rows []*serverv1.HealthRow
	for i := range 1024 {
		id := fmt.Sprint(i)
		rows = append(rows, &serverv1.HealthRow{Node: "n", Condition: &healthv1.Condition{Key: id, GpuUuid: id, State: healthv1.State_STATE_RAISED,
			LastTime: timestamppb.New(time.Unix(1000, 0))}})
	}
	f := newFixture()
	f.report(t, whole)
	if n := len(f.Gpus("n", rows, true)); n != 65 {
		t.Errorf("the node has %d GPUs, want its one and 64 that only conditions name", n)
	}
}

// TestManyConditions: a thousand conditions of a node, each of which is one of
// every GPU, stay an answer that can be sent; the worst is the first of it.
func TestManyConditions(t *testing.T) {
	t.Parallel()
	var rows []*serverv1.HealthRow
	for i := range 1024 {
		c := &healthv1.Condition{Key: fmt.Sprintf("k%04d", i), State: healthv1.State_STATE_RAISED, Severity: healthv1.Severity_SEVERITY_WARNING,
			Meaning: strings.Repeat("x", 512), Message: strings.Repeat("x", 512), LastTime: timestamppb.New(time.Unix(1000, 0))}
		if i == 1023 {
			c.Severity = healthv1.Severity_SEVERITY_FATAL
		}
		rows = append(rows, &serverv1.HealthRow{Node: "n", Condition: c})
	}
	f := newFixture()
	f.report(t, func(r *healthv1.HealthReport) {
		whole(r)
		r.Inventory.Gpus = nil
		for i := range 64 {
			r.Inventory.Gpus = append(r.Inventory.Gpus, &gpuv1.Gpu{Uuid: proto.String(fmt.Sprint(i)), Index: uint32(i)})
		}
	})
	size := 0
	for _, g := range f.Gpus("n", rows, false) {
		size += proto.Size(g)
		if g.GetConditions()[0].GetCondition().GetKey() != "k1023" || g.GetReason() != rows[1023].GetCondition().GetCode() {
			t.Fatalf("GPU %s begins with %s", g.GetUuid(), g.GetConditions()[0].GetCondition().GetKey())
		}
	}
	if size > 4<<20 {
		t.Errorf("the list of one node has %d bytes", size)
	}
}
