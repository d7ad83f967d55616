package health

import (
	"fmt"
	"runtime"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/millwright/agent/internal/health/kernel"
	"github.com/gpuaas/millwright/agent/internal/health/xid"
	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
	healthv1 "github.com/gpuaas/millwright/proto/millwright/health/v1"
)

var begin = time.Date(2026, 11, 28, 12, 0, 0, 0, time.UTC)

var builtin = sync.OnceValues(xid.Builtin)

// script is an engine with a clock of its own.
type script struct {
	*engine
	t    *testing.T
	boot time.Duration
}

func newScript(t *testing.T, change func(*Config)) *script {
	t.Helper()
	table, err := builtin()
	if err != nil {
		t.Fatal(err)
	}
	cfg := Config{BootID: "boot-1", XIDs: table, Period: 10 * time.Second, SlowPeriod: time.Minute}
	if change != nil {
		change(&cfg)
	}
	s := &script{engine: newEngine(cfg), t: t, boot: time.Hour}
	s.restore(Known{}, s.at(0))
	s.status(&gpuv1.DriverStatus{State: gpuv1.DriverState_DRIVER_STATE_OK}, s.at(0))
	return s
}

func (s *script) at(d time.Duration) moment {
	s.boot += d
	return moment{begin.Add(s.boot), s.boot}
}

func (s *script) line(text string) {
	s.t.Helper()
	var p kernel.Parser
	now := s.at(time.Millisecond)
	s.takeLine(s.cursor.Sequence+1, p.Parse(kernel.Record{Text: text}), now, now.boot)
}

func (s *script) event(kind, data uint64) {
	s.takeEvent(&gpuv1.GpuEvent{Uuid: "GPU-a", PciBusId: "0000:c5:00.0", Type: kind, Data: data}, s.at(time.Millisecond))
}

// tell returns the edges that are due, and takes them for durable.
func (s *script) tell() []*healthv1.HealthEdge {
	out := s.edges()
	s.told(out)
	return out
}

// state is one of a condition.
func (s *script) state(key string) healthv1.State { return s.conditions[key].get().GetState() }

func (c *condition) get() *healthv1.Condition {
	if c == nil {
		return nil
	}
	return c.now
}

func (s *script) inventory() *script {
	s.takeInventory(&gpuv1.Inventory{Gpus: []*gpuv1.Gpu{{
		Uuid: proto.String("GPU-a"), PciBusId: proto.String("0000:c5:00.0"), GpuMaxCelsius: proto.Uint32(85), ShutdownCelsius: proto.Uint32(95),
	}}}, s.at(0))
	return s
}

func (s *script) sampled(after time.Duration, change func(*gpuv1.GpuSample)) {
	g := &gpuv1.GpuSample{Uuid: "GPU-a", PciBusId: "0000:c5:00.0", GpuCelsius: proto.Uint32(40), RecoveryAction: proto.Uint32(0), EccUncorrectedVolatile: proto.Uint64(0)}
	if change != nil {
		change(g)
	}
	s.takeSample(&gpuv1.Sample{Tier: gpuv1.Tier_TIER_FAST, Count: proto.Uint32(1), Gpus: []*gpuv1.GpuSample{g}}, s.at(after))
}

func hotter(celsius uint32) func(*gpuv1.GpuSample) {
	return func(g *gpuv1.GpuSample) { g.GpuCelsius = &celsius }
}

// TestEveryXID asks for each number of the table, from a line and from an event,
// the tabled severity and action, in one edge; and for both together, that they
// are one.
func TestEveryXID(t *testing.T) {
	table, err := xid.Builtin()
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range append(table.All(), 61, 999) {
		row := table.Row(n)
		for _, from := range []string{"line", "event", "both", "event first"} {
			s := newScript(t, nil).inventory()
			key := fmt.Sprintf("gpu.xid.%d/GPU-a", n)
			line := fmt.Sprintf("NVRM: Xid (PCI:0000:c5:00): %d, pid=1, name=x, words", n)
			switch from {
			case "line":
				s.line(line)
			case "event":
				s.event(8, uint64(n)) // of the table
			case "both":
				s.line(line)
				s.event(8, uint64(n)) // of the table
			case "event first":
				s.event(8, uint64(n)) // of the table
				s.line(line)
			}
			edges := s.tell()
			if len(edges) != 1 {
				t.Fatalf("XID %d from %s: %d edges, want 1: %v", n, from, len(edges), edges)
			}
			c := edges[0].GetCondition()
			if c.GetKey() != key || c.GetState() != raised || c.GetSeverity() != severityOf(row.Severity) || c.GetAction() != actionOf(row.Action) ||
				c.GetNumber() != uint32(n) || c.GetCount() != 1 || c.GetMeaning() != row.Meaning { // of the table
				t.Errorf("XID %d from %s: %v, want %s and %s", n, from, c, row.Severity, row.Action)
			}
			s.at(time.Minute)
			if more := s.tell(); len(more) != 0 {
				t.Errorf("XID %d from %s: told again: %v", n, from, more)
			}
		}
	}
}

// What the line says decides for NVLink 5, and the driver's own verdict before
// the table.
func TestLineAndDriverDecide(t *testing.T) {
	for _, tc := range []struct {
		line     string
		severity healthv1.Severity
		action   healthv1.Action
	}{
		{"NVRM: Xid (PCI:0000:c5:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 07 (0x1 0x0)", fatal, resetGPU},
		{"NVRM: Xid (PCI:0000:c5:00): 149, NETIR_LINK_EVT Nonfatal XC0 i0 Link 07 (0x1 0x0)", warning, none},
	} {
		s := newScript(t, nil).inventory()
		s.event(8, 149)
		s.line(tc.line)
		if c := s.conditions["gpu.xid.149/GPU-a"].get(); c.GetSeverity() != tc.severity || c.GetAction() != tc.action {
			t.Errorf("%s: %v", tc.line, c)
		}
	}
	s := newScript(t, nil).inventory()
	s.line("NVRM: Xid (PCI:0000:c5:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)")
	if c := s.conditions["gpu.recovery_action/GPU-a"].get(); c.GetState() != raised || c.GetAction() != reboot || c.GetSource() != healthv1.Source_SOURCE_KERNEL_LOG {
		t.Errorf("%v", c)
	}
	s.line("NVRM: Xid (PCI:0000:c5:00): 95, uncontained")
	if c := s.conditions["gpu.xid.95/GPU-a"].get(); c.GetAction() != reboot {
		t.Errorf("the table won over the driver: %v", c)
	}
	s.sampled(time.Second, func(g *gpuv1.GpuSample) { g.RecoveryAction = proto.Uint32(2) })
	s.sampled(time.Second, nil)
	if s.state("gpu.recovery_action/GPU-a") != ok || s.state("gpu.xid.95/GPU-a") != ok {
		t.Error("the driver took it back, and it is still raised")
	}
}

// One XID ends another, a quiet time ends what hurt a program, a boot ends all,
// and what comes back after resets and boots is recommended more for.
func TestHowXIDsEnd(t *testing.T) {
	s := newScript(t, nil).inventory()
	s.event(8, 163)
	s.event(8, 162)
	if s.state("gpu.xid.163/GPU-a") != ok {
		t.Error("162 does not end 163")
	}
	s.event(8, 31)
	s.event(8, 79)
	s.tick(s.at(quiet - time.Second))
	if s.state("gpu.xid.31/GPU-a") != raised {
		t.Error("31 ended too early")
	}
	s.tick(s.at(2 * time.Second))
	if s.state("gpu.xid.31/GPU-a") != ok || s.state("gpu.xid.79/GPU-a") != raised {
		t.Error("31 did not end, or 79 did")
	}
	for i, want := range []healthv1.Action{resetGPU, reboot, hold, hold} {
		s.sampled(time.Second, func(g *gpuv1.GpuSample) { g.EccUncorrectedVolatile = proto.Uint64(5) })
		s.event(8, 95)
		if c := s.conditions["gpu.xid.95/GPU-a"].get(); c.GetAction() != want || int(c.GetAttempts()) != i {
			t.Errorf("time %d: %v, want %v", i, c, want)
		}
		s.sampled(time.Second, nil) // a counter that fell: it was reset
		if s.state("gpu.xid.95/GPU-a") != ok {
			t.Fatal("a reset did not end it")
		}
	}
	s.event(8, 79)
	var known Known
	known.Edges = s.tell()
	known.Cursor = Cursor{"boot-1", 7}
	after := newScript(t, func(c *Config) { c.BootID = "boot-2" })
	after.restore(known, after.at(0))
	edges := after.tell()
	if after.state("gpu.xid.79/GPU-a") != ok || len(edges) != 1 || edges[0].GetCondition().GetReason() != reasonRebooted || edges[0].GetPrevious() != raised {
		t.Errorf("after a boot: %v", edges)
	}
}

// A level is raised above its threshold and not at it, is damped when it comes
// and goes, stale without samples and after the driver fell silent, and never
// well without a look.
func TestLevels(t *testing.T) {
	s := newScript(t, nil).inventory()
	const key = "gpu.temperature/GPU-a"
	for _, step := range []struct {
		celsius  uint32
		state    healthv1.State
		severity healthv1.Severity
		edges    int
	}{{85, ok, degraded, 0}, {86, raised, degraded, 1}, {87, raised, degraded, 0}, {90, raised, fatal, 1}, {86, raised, degraded, 1}, {85, ok, degraded, 1}} {
		s.sampled(10*time.Second, hotter(step.celsius))
		edges := s.tell()
		if c := s.conditions[key].get(); c.GetState() != step.state || c.GetSeverity() != step.severity || len(edges) != step.edges {
			t.Errorf("at %d: %v, %d edges %v", step.celsius, c, len(edges), edges)
		}
	}
	for range 2 {
		s.sampled(10*time.Second, hotter(86))
		s.sampled(10*time.Second, nil)
	}
	if c := s.conditions[key].get(); c.GetState() != raised || !c.GetFlapping() {
		t.Errorf("not damped: %v", c)
	}
	s.tell()
	s.sampled(flapQuiet, nil)
	if c := s.conditions[key].get(); c.GetState() != ok || c.GetFlapping() {
		t.Errorf("damped for ever: %v", c)
	}
	s.sampled(10*time.Second, hotter(86))
	s.tell()
	s.tick(s.at(31 * time.Second))
	if edges := s.tell(); s.state(key) != stale || len(edges) != 1 {
		t.Errorf("not stale: %v, %v", s.conditions[key].get(), edges)
	}
	if r := s.ready(); r.State == ok {
		t.Errorf("ready with stale samples: %v", r)
	}
	s.sampled(time.Second, hotter(86))
	s.tell()
	s.status(&gpuv1.DriverStatus{State: gpuv1.DriverState_DRIVER_STATE_UNRESPONSIVE, Message: "no answer"}, s.at(time.Second))
	if edges := s.tell(); s.state(key) != stale || s.state("node.driver_unresponsive") != raised || s.state("node.library_missing") != unknown || len(edges) != 2 {
		t.Errorf("after silence: %v", edges)
	}
	s.status(&gpuv1.DriverStatus{State: gpuv1.DriverState_DRIVER_STATE_OK}, s.at(time.Second))
	s.sampled(time.Second, nil)
	if edges := s.tell(); s.state(key) != ok || s.state("node.driver_unresponsive") != ok || len(edges) != 2 {
		t.Errorf("not well again: %v", edges)
	}
}

// What cannot be numbered is folded: one edge for each condition, however often
// it changed.
func TestFold(t *testing.T) {
	s := newScript(t, nil).inventory()
	for range 3 {
		s.sampled(10*time.Second, hotter(86))
		s.sampled(10*time.Second+flapQuiet, nil)
		s.sampled(10*time.Second+flapQuiet, nil)
	}
	edges := s.tell()
	if len(edges) != 1 || edges[0].GetFolded() != 5 || edges[0].GetCondition().GetState() != ok || edges[0].GetEdge() != 1 {
		t.Errorf("edges %v", edges)
	}
}

// A storm of lines costs a bounded number of conditions and edges.
func TestStorm(t *testing.T) {
	s := newScript(t, nil).inventory()
	told, bytes := 0, 0
	before := heap()
	for i := range 10_000 {
		s.line(fmt.Sprintf("NVRM: Xid (PCI:0000:c5:00): %d, pid=1, name=x, words", i%2000+1))
		if i%100 == 0 {
			for _, edge := range s.tell() {
				told, bytes = told+1, bytes+proto.Size(edge)
			}
		}
	}
	told += len(s.tell())
	if len(s.conditions) > mostEvents+60 || told > mostEvents+60 {
		t.Errorf("%d conditions and %d edges of 10,000 lines", len(s.conditions), told)
	}
	if grown := heap() - before; grown > 4<<20 || bytes > 128<<10 {
		t.Errorf("10,000 lines cost %d bytes of memory and %d of edges", grown, bytes)
	}
	if c := s.conditions["gpu.events_more/GPU-a"].get(); c.GetCount() < 9000 {
		t.Errorf("what was not told one by one: %v", c)
	}
	if n := proto.Size(s.report(true, 1, s.at(0))); n > 256<<10 {
		t.Errorf("a report of %d bytes", n)
	}
}

// A count that drops is told without an XID, also by the next life.
func TestCount(t *testing.T) {
	s := newScript(t, nil).inventory()
	s.takeSample(&gpuv1.Sample{Count: proto.Uint32(0)}, s.at(time.Second))
	edges := s.tell()
	if s.state("node.gpu_count") != raised || len(edges) != 1 {
		t.Fatalf("%v", edges)
	}
	next := newScript(t, nil)
	next.restore(Known{Edges: edges}, next.at(0))
	next.takeInventory(&gpuv1.Inventory{}, next.at(time.Second))
	if next.state("node.gpu_count") != raised {
		t.Error("the next life forgot the GPU")
	}
	next.inventory()
	if next.state("node.gpu_count") != ok {
		t.Error("it is back, and still missed")
	}
	more := newScript(t, func(c *Config) { c.Expected = 8 }).inventory()
	if more.state("node.gpu_count") != raised {
		t.Error("gpu.expected is not held against the driver")
	}
}

// Pages are retired by GPUs that the fake library does not know.
func TestPages(t *testing.T) {
	s := newScript(t, nil).inventory()
	for _, tc := range []struct {
		corrected, not uint32
		pending        bool
		state          healthv1.State
		severity       healthv1.Severity
	}{{7, 7, false, ok, degraded}, {8, 7, true, raised, degraded}, {31, 31, false, raised, degraded}, {32, 31, false, raised, fatal}, {0, 0, false, ok, degraded}} {
		s.takeSample(&gpuv1.Sample{Tier: gpuv1.Tier_TIER_SLOW, Gpus: []*gpuv1.GpuSample{{
			Uuid: "GPU-a", RetiredPagesCorrected: &tc.corrected, RetiredPagesUncorrected: &tc.not, RetirementPending: &tc.pending,
		}}}, s.at(time.Minute))
		if c := s.conditions["gpu.pages_retired/GPU-a"].get(); c.GetState() != tc.state || c.GetSeverity() != tc.severity {
			t.Errorf("%+v: %v", tc, c)
		}
		if got := s.state("gpu.retirement_pending/GPU-a"); (got == raised) != tc.pending {
			t.Errorf("%+v: pending is %v", tc, got)
		}
	}
}

// The mask of a fabric's health, by the bits of NVML.
func TestFabric(t *testing.T) {
	s := newScript(t, nil).inventory()
	u := func(n uint32) *uint32 { return &n }
	for _, tc := range []struct {
		after  time.Duration
		fabric *gpuv1.Fabric
		state  healthv1.State
		reason string
	}{
		{0, nil, unknown, "NOT_READ"},
		{0, &gpuv1.Fabric{State: 0}, unknown, "NOT_SUPPORTED"},
		{0, &gpuv1.Fabric{State: 2}, unknown, "IN_PROGRESS"},
		{fabricPatience - time.Second, &gpuv1.Fabric{State: 2}, unknown, "IN_PROGRESS"},
		{time.Second, &gpuv1.Fabric{State: 2}, raised, "NOT_COMPLETE"},
		{time.Second, &gpuv1.Fabric{State: 3, HealthSummary: u(1), HealthMask: u(0x1aa)}, ok, "WITHIN_LIMITS"},
		{time.Second, &gpuv1.Fabric{State: 3, Status: 999}, raised, "REGISTRATION_FAILED"},
		{time.Second, &gpuv1.Fabric{State: 3, HealthMask: u(0x1a9)}, raised, "UNHEALTHY"},
		{time.Second, &gpuv1.Fabric{State: 3, HealthMask: u(0x19a)}, raised, "UNHEALTHY"},
		{time.Second, &gpuv1.Fabric{State: 3, HealthMask: u(0x5aa)}, raised, "UNHEALTHY"},
		{time.Second, &gpuv1.Fabric{State: 3, HealthSummary: u(3)}, raised, "LIMITED"},
	} {
		s.takeSample(&gpuv1.Sample{Tier: gpuv1.Tier_TIER_SLOW, Gpus: []*gpuv1.GpuSample{{Uuid: "GPU-a", Fabric: tc.fabric}}}, s.at(tc.after))
		if c := s.conditions["gpu.fabric/GPU-a"].get(); c.GetState() != tc.state || c.GetReason() != tc.reason {
			t.Errorf("%v: %v", tc.fabric, c)
		}
	}
}

// heap is what is in use after all garbage is gone.
func heap() int {
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int(m.HeapAlloc)
}
