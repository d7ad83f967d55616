package gpu_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/gpuaas/millwright/agent/internal/gpu"
	"github.com/gpuaas/millwright/agent/internal/gpu/gputest"
	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
	"github.com/gpuaas/millwright/test/fakenvml"
)

// node is a Supervisor before the real program on a node of test/fakenvml.
type node struct {
	*bench
	*fakenvml.Node
}

func newNode(t *testing.T, v fakenvml.Variant, products ...string) *node {
	t.Helper()
	path, err := program()
	if err != nil {
		t.Fatal(err)
	}
	lib, err := fakenvml.Build(t.Context(), v)
	if err != nil {
		t.Fatal(err)
	}
	n, err := lib.NewNode(t.Context(), filepath.Join(t.TempDir(), "state"), products...)
	if err != nil {
		t.Fatal(err)
	}
	b := newBench(t, func(c *gpu.Config) {
		c.Program, c.Args, c.Env = path, nil, n.Env()
		c.InitTimeout, c.CallTimeout, c.EventWait = 5*time.Second, 2*time.Second, time.Second
	})
	b.await(ok)
	return &node{b, n}
}

func eight(product string) []string { return strings.Fields(strings.Repeat(product+" ", 8)) }

func (n *node) sample(t *testing.T, tier gpuv1.Tier) *gpuv1.Sample {
	t.Helper()
	s, err := n.Sample(t.Context(), tier)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// A library of each age is asked everything: what it lacks is named, and the
// program lives.
func TestHeaders(t *testing.T) {
	for _, v := range append(fakenvml.Headers(), "") {
		t.Run("header "+v, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, fakenvml.Variant{Header: v}, "H100", "A100-80")
			inv, err := n.Inventory(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			gputest.Whole(t, inv)
			gputest.Whole(t, n.sample(t, gpuv1.Tier_TIER_SLOW))
			if g := inv.GetGpus(); len(g) != 2 || !strings.Contains(g[0].GetModel(), "H100") || g[0].GetMemoryBytes() == 0 || len(inv.GetTopology()) != 1 {
				t.Errorf("inventory %v", inv)
			}
			if _, err := n.Events(t.Context()); v == "" && err != nil {
				t.Error(err)
			}
			if st := n.Status(); st.GetStarts() != 1 {
				t.Errorf("status %v", st)
			}
			t.Logf("lacks %v", inv.GetMissingFunctions())
		})
	}
}

// What the node has is what the sample says, on the GPU that has it.
func TestValues(t *testing.T) {
	n := newNode(t, fakenvml.Variant{}, "H100", "H100")
	if err := n.Set(t.Context(), 1, "temperature=91", "memory_temperature=97", "power_mw=654321", "dbe_volatile=3", "remap_pending=1", "recovery_action=2", "pcie_replay=17", "ns_hw_thermal=12345"); err != nil {
		t.Fatal(err)
	}
	s := n.sample(t, gpuv1.Tier_TIER_FAST)
	g := s.GetGpus()[1]
	got := fmt.Sprint(g.GetGpuCelsius(), g.GetMemoryCelsius(), g.GetPowerMilliwatts(), g.GetEccUncorrectedVolatile(), g.GetRemapPending(), g.GetRecoveryAction(), g.GetPcieReplays(), g.GetThrottleHwThermalNanoseconds())
	if want := "91 97 654321 3 true 2 17 12345"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	if g := s.GetGpus()[0]; g.GetGpuCelsius() == 91 || g.GetRemapPending() || g.GetRecoveryAction() != 0 {
		t.Errorf("the other GPU: %v", g)
	}
}

// A GPU that is lost says so in each value, and is whole again when it is back;
// nothing is restarted.
func TestLost(t *testing.T) {
	n := newNode(t, fakenvml.Variant{}, "H100", "H100")
	if err := n.Set(t.Context(), 1, "lost=1"); err != nil {
		t.Fatal(err)
	}
	s := n.sample(t, gpuv1.Tier_TIER_SLOW)
	gputest.Whole(t, s)
	lost := 0
	for _, u := range s.GetGpus()[1].GetUnknown() {
		if u.GetReason() == gpuv1.UnknownReason_UNKNOWN_REASON_GPU_LOST {
			lost++
		}
	}
	if lost < 30 || s.GetGpus()[0].GpuCelsius == nil || s.GetGpus()[1].GetUuid() == "" {
		t.Errorf("%d values are lost: %v", lost, s)
	}
	if err := n.Set(t.Context(), 1, "lost=0"); err != nil {
		t.Fatal(err)
	}
	if s := n.sample(t, gpuv1.Tier_TIER_FAST); s.GetGpus()[1].GpuCelsius == nil || n.bench.Status().GetStarts() != 1 {
		t.Errorf("sample %v", s)
	}
}

// TestInventory holds links and limits of the inventory against the product's.
func TestInventory(t *testing.T) {
	n := newNode(t, fakenvml.Variant{}, "H100", "H100")
	inv, err := n.Inventory(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	gputest.Whole(t, inv)
	g := inv.GetGpus()[0]
	if len(g.GetNvlinks()) != 18 || g.GetNvlinks()[5].GetRemotePciBusId() != "0000:e1:00.0" || g.GetNvlinks()[5].GetVersion() != 6 ||
		g.GetSmClockMaxMhz() != 1980 || g.GetPowerLimitMinMilliwatts() != 200000 || g.GetPowerLimitMaxMilliwatts() != 700000 || !g.GetInforomValid() {
		t.Errorf("GPU %v", g)
	}
}

func TestEvents(t *testing.T) {
	n := newNode(t, fakenvml.Variant{}, "H100", "H100")
	inv, err := n.Inventory(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	// The set is made by the first question; what happens before is not told.
	var got []*gpuv1.GpuEvent
	begin := time.Now()
	for len(got) == 0 && time.Since(begin) < 20*time.Second {
		if err := n.XID(t.Context(), 1, 79); err != nil {
			t.Fatal(err)
		}
		if got, err = n.Events(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if len(got) == 0 || got[0].GetData() != 79 || got[0].GetType() != 8 || got[0].GetUuid() != inv.GetGpus()[1].GetUuid() || got[0].GetPciBusId() != inv.GetGpus()[1].GetPciBusId() {
		t.Errorf("events %v", got)
	}
}

// Quiesce leaves no client on the node: the library's own word.
func TestNoClient(t *testing.T) {
	n := newNode(t, fakenvml.Variant{}, "H100")
	clients := func() int {
		st, err := n.State(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return len(st.Clients)
	}
	if clients() != 1 {
		t.Fatalf("%d clients", clients())
	}
	resume, err := n.Quiesce(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if clients() != 0 {
		t.Errorf("%d clients hold GPUs", clients())
	}
	resume()
	n.await(ok)
}

// The cost of a period with 8 GPUs and 200 us a call: the number of calls, as
// the library counts them, the processor's time, and the memory.
func TestCost(t *testing.T) {
	n := newNode(t, fakenvml.Variant{}, eight("H100")...)
	if err := n.Faults(fakenvml.Fault{Latency: 200 * time.Microsecond}); err != nil {
		t.Fatal(err)
	}
	for tier, most := range map[gpuv1.Tier]uint32{gpuv1.Tier_TIER_FAST: 1 + 8*9, gpuv1.Tier_TIER_SLOW: 1 + 8*(9+12+18+1)} {
		if err := n.ClearCalls(t.Context()); err != nil {
			t.Fatal(err)
		}
		s := n.sample(t, tier)
		st, err := n.State(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		var counted uint64
		for _, c := range st.Calls {
			counted += c
		}
		if uint64(s.GetCalls()) != counted || s.GetCalls() > most {
			t.Errorf("%v: %d calls, the library counts %d, at most %d are wanted", tier, s.GetCalls(), counted, most)
		}
		t.Logf("%v: %d calls", tier, counted)
	}
	pid := n.pid(t)
	before := ticks(t, pid)
	const periods = 30
	for i := range periods {
		tier := gpuv1.Tier_TIER_FAST
		if i%6 == 0 {
			tier = gpuv1.Tier_TIER_SLOW
		}
		n.sample(t, tier)
	}
	used := time.Duration(ticks(t, pid)-before) * 10 * time.Millisecond / periods
	t.Logf("%v of processor for a period", used)
	if used > 50*time.Millisecond { // 0.5 % of a core of 10 s
		t.Errorf("a period takes %v of processor", used)
	}
}

func (n *node) pid(t *testing.T) int64 {
	t.Helper()
	st, err := n.State(t.Context())
	if err != nil || len(st.Clients) != 1 {
		t.Fatalf("%v, %v", st, err)
	}
	return st.Clients[0].PID
}

// ticks is a process's user and system time in hundredths of a second.
func ticks(t *testing.T, pid int64) (n int) {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Fatal(err)
	}
	fields := strings.Fields(string(b[strings.LastIndex(string(b), ")")+1:]))
	var user, system int
	if _, err := fmt.Sscan(fields[11]+" "+fields[12], &user, &system); err != nil {
		t.Fatal(err)
	}
	return user + system
}
