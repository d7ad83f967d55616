package health_test

import (
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gpuaas/millwright/agent/internal/health"
	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
	healthv1 "github.com/gpuaas/millwright/proto/millwright/health/v1"
	"github.com/gpuaas/millwright/test/fakenvml"
)

// TestDriver has the driver fail in each way under the real program: the
// condition says what happened, what is no longer known is stale, the node is not
// ready, and all is well again when the cause is gone.
func TestDriver(t *testing.T) {
	node := func(values ...string) func(*bench) error {
		return func(b *bench) error { return b.SetNode(b.t.Context(), values...) }
	}
	fault := func(f ...fakenvml.Fault) func(*bench) error {
		return func(b *bench) error { return b.Faults(f...) }
	}
	for _, tc := range []struct {
		name, code string
		break_     func(*bench) error
		mend       func(*bench) error
		restart    bool // it shows at the next start of the program
	}{
		{"a query hangs", "driver_unresponsive", fault(fakenvml.Fault{Call: "nvmlDeviceGetTemperature", Hang: true}), fault(), false},
		{"Init hangs", "driver_unresponsive", fault(fakenvml.Fault{Call: "nvmlInit_v2", Hang: true}, fakenvml.Fault{Call: "nvmlDeviceGetTemperature", Signal: 9, Times: 1}), fault(), true},
		{"crash", "driver_crashed", fault(fakenvml.Fault{Call: "nvmlDeviceGetTemperature", Signal: 11}), fault(), false},
		{"a symbol is missing", "symbol_missing", fault(fakenvml.Fault{Call: "nvmlDeviceGetTemperature", Exit: 127}), fault(), false},
		{"library and driver differ", "driver_mismatch", node("library_mismatch=1"), node("library_mismatch=0"), true},
		{"driver not loaded", "driver_not_loaded", node("driver_loaded=0"), node("driver_loaded=1"), true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			b := newBench(t, fakenvml.Variant{}, nil, "H100")
			uuid := b.looked().GetInventory().GetGpus()[0].GetUuid()
			if ready := b.Ready(); ready == nil || ready.State != ok {
				t.Fatalf("not ready at the start: %v", ready)
			}
			if err := tc.break_(b); err != nil {
				t.Fatal(err)
			}
			if tc.restart {
				resume, err := b.gpus.Quiesce(t.Context())
				if err == nil {
					resume()
				}
			}
			key := "node." + tc.code
			r := b.await(key, func(r *healthv1.HealthReport) bool { return find(r, key).GetState() == raised })
			if c := find(r, key); c.GetMessage() == "" || c.GetSeverity() != fatal {
				t.Errorf("%v", c)
			}
			if c := find(r, "gpu.temperature/"+uuid); c.GetState() != stale || !strings.Contains(c.GetMessage(), "last known: ok") {
				t.Errorf("%v", c)
			}
			if ready := b.Ready(); ready == nil || ready.State == ok {
				t.Errorf("ready: %v", ready)
			}
			if err := tc.mend(b); err != nil {
				t.Fatal(err)
			}
			r = b.await("well", func(r *healthv1.HealthReport) bool {
				return find(r, key).GetState() == ok && find(r, "gpu.temperature/"+uuid).GetState() == ok
			})
			b.looked()
			if ready := b.Ready(); ready == nil || ready.State != ok {
				t.Errorf("not ready again: %v, %v", ready, r.GetDriver())
			}
		})
	}
}

// TestLogAndEvent has one XID told by the real library's event and by a line of
// the kernel's log: one edge. A line alone is enough for an NVSwitch.
func TestLogAndEvent(t *testing.T) {
	b := newBench(t, fakenvml.Variant{}, nil, "H100", "H100")
	g := b.looked().GetInventory().GetGpus()[1]
	key := "gpu.xid.95/" + g.GetUuid()
	if err := b.XID(t.Context(), 1, 95); err != nil {
		t.Fatal(err)
	}
	b.kernel(fmt.Sprintf("NVRM: Xid (PCI:%s): 95, pid=7, name=train, uncontained", strings.TrimSuffix(g.GetPciBusId(), ".0")),
		"nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 24007, Fatal, Link 44 sourcetrack")
	b.await("switch", func(r *healthv1.HealthReport) bool {
		return find(r, "switch.sxid.24007/0000:05:00").GetState() == raised
	})
	c := find(b.await("XID", func(r *healthv1.HealthReport) bool { return find(r, key).GetState() == raised }), key)
	if c.GetAction() != healthv1.Action_ACTION_RESET_GPU || c.GetSeverity() != fatal {
		t.Errorf("%v", c)
	}
	b.looked()
	b.looked()
	n := 0
	for _, e := range b.journal.all() {
		if e.GetCondition().GetKey() == key {
			n++
		}
	}
	if c := find(b.Report(true), key); n != 1 || c.GetCount() != 1 {
		t.Errorf("%d edges: %v", n, c)
	}
}

// TestStormOfLines writes 10,000 lines into the log at once, and asks what it
// cost.
func TestStormOfLines(t *testing.T) {
	b := newBench(t, fakenvml.Variant{}, nil, "H100", "H100")
	g := b.looked().GetInventory().GetGpus()[1]
	lines := make([]string, 10_000)
	for i := range lines {
		lines[i] = fmt.Sprintf("NVRM: Xid (PCI:%s): %d, pid=7, name=train, words", strings.TrimSuffix(g.GetPciBusId(), ".0"), []int{31, 13, 48, 43}[i%4])
	}
	b.kernel(lines...)
	r := b.await("the last line", func(r *healthv1.HealthReport) bool { return find(r, "gpu.xid.43/"+g.GetUuid()).GetCount() == 2500 })
	if edges := b.journal.all(); len(edges) != 4 {
		t.Errorf("%d edges of 10,000 lines of four kinds", len(edges))
	}
	if len(r.GetConditions()) > 100 {
		t.Errorf("%d conditions", len(r.GetConditions()))
	}
}

// TestFullJournal folds while there is no room, and tells once there is.
func TestFullJournal(t *testing.T) {
	b := newBench(t, fakenvml.Variant{}, nil, "H100")
	b.looked()
	b.journal.mu.Lock()
	b.journal.full = true
	b.journal.mu.Unlock()
	for i := range 6 {
		if err := b.Set(t.Context(), 0, fmt.Sprintf("remap_failure=%d", i%2)); err != nil {
			t.Fatal(err)
		}
		b.looked()
	}
	if edges := b.journal.all(); len(edges) != 0 {
		t.Fatalf("%d edges without room", len(edges))
	}
	b.journal.mu.Lock()
	b.journal.full = false
	b.journal.mu.Unlock()
	b.looked()
	b.looked()
	edges := b.journal.all()
	if len(edges) != 1 || edges[0].GetCondition().GetState() != raised || edges[0].GetFolded() < 4 || edges[0].GetEdge() != 1 {
		t.Errorf("edges %v", edges)
	}
}

// TestCost measures agent and program with 200 us a call and 8 GPUs, and scales
// it to a period of 10 s. The agent is this test, whose memory is more than the
// agent's own.
func TestCost(t *testing.T) {
	const every, slowEach = 500 * time.Millisecond, 6
	b := newBench(t, fakenvml.Variant{}, func(c *health.Config) { c.Period, c.SlowPeriod = every, slowEach*every }, strings.Fields(strings.Repeat("H100 ", 8))...)
	if err := b.Faults(fakenvml.Fault{Latency: 200 * time.Microsecond}); err != nil {
		t.Fatal(err)
	}
	b.looked()
	st, err := b.State(t.Context())
	if err != nil || len(st.Clients) != 1 {
		t.Fatalf("%v, %v", st, err)
	}
	pid := int(st.Clients[0].PID)
	self, theirs, begin := used(t, os.Getpid()), used(t, pid), time.Now()
	cycles, calls, most := 0, map[gpuv1.Tier]uint32{}, map[gpuv1.Tier]uint32{}
	for last := int64(0); cycles < 24; {
		changed := b.Changed()
		if r := b.Report(cycles%slowEach == 0); r.GetSample().GetReadAt().AsTime().UnixNano() != last {
			last = r.GetSample().GetReadAt().AsTime().UnixNano()
			cycles++
			tier, n := r.GetSample().GetTier(), r.GetSample().GetCalls()
			if calls[tier] == 0 || n < calls[tier] {
				calls[tier] = n // a wait for events beside it counts too
			}
			most[tier] = max(most[tier], n)
		}
		<-changed
	}
	// Beside a sample at most the set of events is made: 2 calls for each GPU and 4.
	if calls[gpuv1.Tier_TIER_FAST] != 73 || calls[gpuv1.Tier_TIER_SLOW] != 305 || most[gpuv1.Tier_TIER_FAST] > 73+20 || most[gpuv1.Tier_TIER_SLOW] > 305+20 {
		t.Errorf("calls of a cycle: %v to %v", calls, most)
	}
	if d := time.Since(begin); d < 20*every {
		t.Errorf("24 cycles of %v in %v", every, d)
	}
	self, theirs = used(t, os.Getpid())-self, used(t, pid)-theirs
	share := float64(self+theirs) / float64(cycles) / float64(10*time.Second) * 100
	t.Logf("a cycle takes %v of this process and %v of the program: %.3f %% of a core at 10 s; resident: %d KiB here, %d KiB there",
		self/time.Duration(cycles), theirs/time.Duration(cycles), share, resident(t, os.Getpid()), resident(t, pid))
	if share > 0.5 {
		t.Errorf("%.3f %% of a core", share)
	}
	if kib := resident(t, pid); kib > 24<<10 {
		t.Errorf("the program has %d KiB; with the agent's 40 MiB the budget is 64", kib)
	}
}

// used is the processor time of a process.
func used(t *testing.T, pid int) time.Duration {
	t.Helper()
	if pid == os.Getpid() {
		var u syscall.Rusage
		if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
			t.Fatal(err)
		}
		return time.Duration(u.Utime.Nano() + u.Stime.Nano())
	}
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Fatal(err)
	}
	fields := strings.Fields(string(b[strings.LastIndex(string(b), ")")+1:]))
	var user, system int
	if _, err := fmt.Sscan(fields[11]+" "+fields[12], &user, &system); err != nil {
		t.Fatal(err)
	}
	return time.Duration(user+system) * 10 * time.Millisecond
}

func resident(t *testing.T, pid int) (kib int) {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		fmt.Sscanf(line, "VmRSS: %d", &kib) //nolint:errcheck // most lines are others
	}
	return kib
}

// TestLook: a look has all values read anew, long before it is time, and of a driver
// that hangs nothing is told as well.
func TestLook(t *testing.T) {
	b := newBench(t, fakenvml.Variant{}, func(c *health.Config) { c.SlowPeriod = time.Hour }, "H100")
	b.looked()
	of := func(code string) *healthv1.Condition {
		t.Helper()
		list, err := b.Look(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range list {
			if c.GetCode() == code {
				return c
			}
		}
		t.Fatalf("no %s in %v", code, list)
		return nil
	}
	if c := of("gpu.pcie_width"); c.GetState() != ok {
		t.Errorf("at first: %v", c)
	}
	if err := b.Set(t.Context(), 0, "pcie_width=8"); err != nil {
		t.Fatal(err)
	}
	if c := of("gpu.pcie_width"); c.GetState() != raised {
		t.Errorf("a narrow link: %v", c)
	}
	if err := b.Faults(fakenvml.Fault{Call: "nvmlDeviceGetTemperature", Hang: true}); err != nil {
		t.Fatal(err)
	}
	b.await("the driver hangs", func(r *healthv1.HealthReport) bool { return find(r, "node.driver_unresponsive").GetState() == raised })
	if c := of("gpu.pcie_width"); c.GetState() != stale {
		t.Errorf("while the driver hangs: %v", c)
	}
}
