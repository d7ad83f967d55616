package health_test

import (
	"testing"
	"time"

	"github.com/gpuaas/millwright/agent/internal/health"
	healthv1 "github.com/gpuaas/millwright/proto/millwright/health/v1"
	"github.com/gpuaas/millwright/test/fakenvml"
)

const (
	ok      = healthv1.State_STATE_OK
	raised  = healthv1.State_STATE_RAISED
	unknown = healthv1.State_STATE_UNKNOWN
	stale   = healthv1.State_STATE_STALE

	info     = healthv1.Severity_SEVERITY_INFO
	warning  = healthv1.Severity_SEVERITY_WARNING
	degraded = healthv1.Severity_SEVERITY_DEGRADED
	fatal    = healthv1.Severity_SEVERITY_FATAL
)

// level is one condition: values below its threshold, at it, worse, and gone.
type level struct {
	code             string
	below, at, worse []string
	severity, more   healthv1.Severity
	action           healthv1.Action
	gone             []string
	leap             time.Duration // until it is seen, and until it is gone
}

func levels() []level {
	const (
		idle    = healthv1.Action_ACTION_RESET_WHEN_IDLE
		reset   = healthv1.Action_ACTION_RESET_GPU
		reboot  = healthv1.Action_ACTION_REBOOT
		replace = healthv1.Action_ACTION_REPLACE
		support = healthv1.Action_ACTION_CONTACT_SUPPORT
		none    = healthv1.Action_ACTION_NONE
		look    = healthv1.Action_ACTION_CHECK_HARDWARE
		cool    = healthv1.Action_ACTION_CHECK_COOLING
	)
	v := func(s ...string) []string { return s }
	return []level{
		{"gpu.recovery_action", v("recovery_action=0"), v("recovery_action=1"), v("recovery_action=2"), fatal, fatal, reset, v("recovery_action=0"), 0},
		{"gpu.row_remap_pending", v("remap_uncorrectable=3"), v("remap_pending=1"), nil, degraded, 0, idle, v("remap_pending=0"), 0},
		{"gpu.row_remap_failed", v("remap_correctable=8"), v("remap_failure=1"), nil, fatal, 0, replace, v("remap_failure=0"), 0},
		{"gpu.spare_rows", v("banks_partial=4"), v("banks_low=1"), v("banks_none=1"), warning, degraded, support, v("banks_low=0", "banks_none=0"), 0},
		{"gpu.ecc_uncorrected_aggregate", v("dbe_aggregate=0"), v("dbe_aggregate=1"), nil, info, 0, none, v("dbe_aggregate=0"), 0},
		{"gpu.ecc_uncorrected", v("sbe_volatile=5"), v("dbe_volatile=1"), nil, degraded, 0, reset, v("dbe_volatile=0"), 0},
		{"gpu.ecc_corrected_rate", v("sbe_volatile=+94"), v("sbe_volatile=+6"), nil, degraded, 0, support, nil, 2 * time.Minute},
		{"gpu.sram_threshold", v("sram_parity=5"), v("sram_threshold=1"), nil, fatal, 0, replace, v("sram_threshold=0"), 0},
		{"gpu.pcie_replays", v("pcie_replay=+7"), v("pcie_replay=+1"), v("pcie_replay=+72"), warning, degraded, look, nil, 11 * time.Minute},
		{"gpu.pcie_errors", v("pcie_correctable=+9"), v("pcie_nonfatal=+1"), nil, degraded, 0, look, nil, 11 * time.Minute},
		{"gpu.pcie_width", v("pcie_width=16"), v("pcie_width=8"), nil, degraded, 0, look, v("pcie_width=16"), 0},
		{"gpu.pcie_generation", v("pcie_generation=1", "utilization_gpu=0"), v("utilization_gpu=50"), nil, degraded, 0, look, v("pcie_generation=5"), 0},
		{"gpu.nvlink_down", v("nvlink_down=0"), v("nvlink_down=4"), nil, fatal, 0, reset, v("nvlink_down=0"), 0},
		{"gpu.nvlink_errors", v("nvlink_crc=+300"), v("nvlink_replay=+1"), nil, warning, 0, look, nil, 2 * time.Minute},
		{"gpu.fabric", v("fabric_summary=1"), v("fabric_summary=3"), v("fabric_summary=2"), degraded, fatal, look, v("fabric_summary=1"), 0},
		{"gpu.hw_thermal_slowdown", v("ns_hw_thermal=+14999000000"), v("ns_hw_thermal=+1000000"), nil, degraded, 0, cool, nil, 6 * time.Minute},
		{"gpu.power_brake", v("ns_power_brake=+14999000000"), v("ns_power_brake=+1000000"), nil, degraded, 0, healthv1.Action_ACTION_CHECK_POWER, nil, 6 * time.Minute},
		{"gpu.sw_thermal_slowdown", v("ns_sw_thermal=+14999000000"), v("ns_sw_thermal=+1000000"), nil, info, 0, none, nil, 6 * time.Minute},
		{"gpu.temperature", v("temperature=87"), v("temperature=88"), v("temperature=101"), degraded, fatal, cool, v("temperature=40"), 0},
		{"gpu.memory_temperature", v("memory_temperature=95"), v("memory_temperature=96"), nil, degraded, 0, cool, v("memory_temperature=40"), 0},
		{"gpu.ecc_mode_pending", v("ecc_pending=1"), v("ecc_pending=0"), nil, degraded, 0, idle, v("ecc_pending=1"), 0},
		{"gpu.mig_mode_pending", v("mig_pending=0"), v("mig_pending=1"), nil, degraded, 0, idle, v("mig_pending=0"), 0},
		{"gpu.lost", v("temperature=41"), v("lost=1"), nil, fatal, 0, reboot, v("lost=0"), 0},
	}
}

// TestConditions has each condition below its threshold, at it, worse, and gone
// again, on one GPU of two: the other stays as it is.
func TestConditions(t *testing.T) {
	b := newBench(t, fakenvml.Variant{}, nil, "H100", "H100")
	set := func(values []string) {
		if len(values) > 0 {
			if err := b.Set(t.Context(), 1, values...); err != nil {
				t.Fatal(err)
			}
		}
	}
	set([]string{"threshold_gpu_max=87", "threshold_shutdown=106", "threshold_mem_max=95"})
	first := b.looked()
	gpus := first.GetInventory().GetGpus()
	set(nil)
	b.clock.by.Add(int64(time.Hour + time.Minute)) // the inventory is read anew
	b.await("the limits", func(r *healthv1.HealthReport) bool { return r.GetInventory().GetGpus()[1].GetGpuMaxCelsius() == 87 })
	for _, l := range levels() {
		key := l.code + "/" + gpus[1].GetUuid()
		b.looked()
		set(l.below)
		if c := find(b.looked(), key); c.GetState() == raised || c == nil {
			t.Errorf("%s below its threshold: %v", l.code, c)
		}
		set(l.at)
		if c := find(b.looked(), key); c.GetState() != raised || c.GetSeverity() != l.severity || c.GetAction() != l.action ||
			c.GetMessage() == "" || c.GetMeaning() == "" || c.GetReason() == "" || c.GetGpuUuid() != gpus[1].GetUuid() {
			t.Errorf("%s at its threshold: %v", l.code, c)
		}
		if set(l.worse); l.worse != nil {
			if c := find(b.looked(), key); c.GetState() != raised || c.GetSeverity() != l.more {
				t.Errorf("%s worse: %v", l.code, c)
			}
		}
		set(l.gone)
		b.clock.by.Add(int64(l.leap))
		r := b.looked()
		if c := find(r, key); c.GetState() != ok {
			t.Errorf("%s gone: %v", l.code, c)
		}
		for _, c := range r.GetConditions() {
			if c.GetGpuUuid() == gpus[0].GetUuid() && c.GetState() == raised {
				t.Errorf("%s: of the other GPU %v", l.code, c)
			}
		}
	}
	seen := map[string]int{}
	for _, e := range b.journal.all() {
		if e.GetCondition().GetState() != stale { // a leap of the clock makes it so
			seen[e.GetCondition().GetCode()]++
		}
	}
	for _, l := range levels() {
		want := 2
		if l.worse != nil {
			want++
		}
		if seen[l.code] != want {
			t.Errorf("%s: %d edges, want %d", l.code, seen[l.code], want)
		}
	}
}

// TestInventoryConditions has those that only the inventory tells.
func TestInventoryConditions(t *testing.T) {
	b := newBench(t, fakenvml.Variant{}, nil, "H100", "H100")
	uuid := b.looked().GetInventory().GetGpus()[1].GetUuid()
	if err := b.Set(t.Context(), 1, "inforom_corrupt=1"); err != nil {
		t.Fatal(err)
	}
	b.clock.by.Add(int64(time.Hour + time.Minute))
	c := find(b.await("infoROM", func(r *healthv1.HealthReport) bool { return find(r, "gpu.inforom/"+uuid).GetState() == raised }), "gpu.inforom/"+uuid)
	if c.GetSeverity() != degraded {
		t.Errorf("%v", c)
	}
	if err := b.Set(t.Context(), 0, "present=0"); err != nil {
		t.Fatal(err)
	}
	r := b.await("count", func(r *healthv1.HealthReport) bool { return find(r, "node.gpu_count").GetState() == raised })
	if ready := b.Ready(); ready == nil || ready.State != raised || find(r, "node.gpu_count").GetSeverity() != fatal {
		t.Errorf("%v", ready)
	}
	if err := b.Set(t.Context(), 0, "present=1"); err != nil {
		t.Fatal(err)
	}
	b.await("count", func(r *healthv1.HealthReport) bool { return find(r, "node.gpu_count").GetState() == ok })
}

// TestUnknown has the driver say that it cannot tell: nothing that depends on it
// is well, and nothing is raised.
func TestUnknown(t *testing.T) {
	b := newBench(t, fakenvml.Variant{}, nil, "H100")
	uuid := b.looked().GetInventory().GetGpus()[0].GetUuid()
	var faults []fakenvml.Fault
	for _, call := range []string{"FieldValues", "Temperature", "RowRemapperHistogram", "SramEccErrorStatus", "CurrPcieLink*", "EccMode", "MigMode", "NvLinkState", "GpuFabricInfo*"} {
		faults = append(faults, fakenvml.Fault{Call: "nvmlDeviceGet" + call, Return: 3})
	}
	if err := b.Faults(faults...); err != nil {
		t.Fatal(err)
	}
	b.looked()
	r := b.looked()
	for _, l := range levels() {
		switch l.code {
		case "gpu.lost": // that is never unknown
			continue
		}
		if c := find(r, l.code+"/"+uuid); c.GetState() != unknown || c.GetReason() != "NOT_SUPPORTED" && c.GetReason() != "NO_LINKS" {
			t.Errorf("%s: %v", l.code, c)
		}
	}
	if err := b.Faults(); err != nil {
		t.Fatal(err)
	}
	b.looked()
	if c := find(b.looked(), "gpu.temperature/"+uuid); c.GetState() != ok {
		t.Errorf("%v", c)
	}
	if edges := b.journal.all(); len(edges) != 0 {
		t.Errorf("not to know was told as %d changes: %v", len(edges), edges[0])
	}
}

// TestEveryRuleIsTried asks that the tables above leave no rule out.
func TestEveryRuleIsTried(t *testing.T) {
	tried := map[string]bool{"gpu.inforom": true} // TestInventoryConditions
	for _, l := range levels() {
		tried[l.code] = true
	}
	elsewhere := map[string]string{
		"gpu.reset_required":         "TestResetRequired",
		"gpu.pages_retired":          "no product of the fake library retires pages: TestPages",
		"gpu.retirement_pending":     "TestPages",
		"gpu.nvlink_recovery_failed": "NVLink 5: TestBlackwell",
	}
	for _, r := range health.Rules() {
		if !tried[r.Code] && elsewhere[r.Code] == "" {
			t.Errorf("%s is tried nowhere", r.Code)
		}
		if r.Title == "" || r.Meaning == "" || r.Threshold == "" || r.Severity == 0 || r.Action == 0 {
			t.Errorf("%s: %+v", r.Code, r)
		}
	}
}

// TestBlackwell has what only NVLink 5 counts.
func TestBlackwell(t *testing.T) {
	b := newBench(t, fakenvml.Variant{}, nil, "B200")
	key := "gpu.nvlink_recovery_failed/" + b.looked().GetInventory().GetGpus()[0].GetUuid()
	b.looked()
	if err := b.Set(t.Context(), 0, "nvlink_recovery_failed=+1"); err != nil {
		t.Fatal(err)
	}
	if c := find(b.looked(), key); c.GetState() != raised || c.GetSeverity() != degraded {
		t.Errorf("%v", c)
	}
	b.clock.by.Add(int64(11 * time.Minute))
	if c := find(b.looked(), key); c.GetState() != ok {
		t.Errorf("%v", c)
	}
}

// TestResetRequired has the driver answer one question with it.
func TestResetRequired(t *testing.T) {
	b := newBench(t, fakenvml.Variant{}, nil, "H100", "H100")
	one := 1
	key := "gpu.reset_required/" + b.looked().GetInventory().GetGpus()[1].GetUuid()
	if err := b.Faults(fakenvml.Fault{Call: "nvmlDeviceGetTemperature", GPU: &one, Return: 16}); err != nil {
		t.Fatal(err)
	}
	b.looked()
	if c := find(b.looked(), key); c.GetState() != raised || c.GetSeverity() != fatal || c.GetAction() != healthv1.Action_ACTION_RESET_GPU {
		t.Errorf("%v", c)
	}
	if err := b.Faults(); err != nil {
		t.Fatal(err)
	}
	b.looked()
	if c := find(b.looked(), key); c.GetState() != ok {
		t.Errorf("%v", c)
	}
}
