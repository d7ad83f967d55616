package health

import (
	"log/slog"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/millwright/agent/internal/clock"
	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
)

// deaf is a journal that nobody asks.
type deaf struct{}

func (deaf) Known() (Known, error) { return Known{}, nil }
func (deaf) Room() bool            { return true }
func (deaf) Tell(Change) error     { return nil }

// TestVersionComesWithWhatItIsOf: a report that was made before the inventory was
// taken does not have it, and so another must follow. The same holds for the
// first look, which finds all well and is no edge.
func TestVersionComesWithWhatItIsOf(t *testing.T) {
	table, err := builtin()
	if err != nil {
		t.Fatal(err)
	}
	m := New(Config{Journal: deaf{}, Clock: clock.System{}, Logger: slog.New(slog.DiscardHandler), BootID: "boot-1", XIDs: table, Period: 1, SlowPeriod: 1})
	m.giveInventory(t.Context(), &gpuv1.Inventory{Gpus: []*gpuv1.Gpu{{Uuid: proto.String("GPU-a"), PciBusId: proto.String("0000:c5:00.0")}}})
	before := m.Version()
	m.take(<-m.in)
	if r := m.Report(true); len(r.GetInventory().GetGpus()) != 1 || m.Version() == before {
		t.Errorf("the inventory is taken, and the version is still %d: %v", before, r)
	}
	before = m.Version()
	celsius := uint32(40)
	m.give(t.Context(), func(e *engine, at moment) bool {
		e.takeSample(&gpuv1.Sample{Tier: gpuv1.Tier_TIER_SLOW, Gpus: []*gpuv1.GpuSample{{Uuid: "GPU-a", GpuCelsius: &celsius}}}, at)
		return false
	})
	m.take(<-m.in)
	if r := m.Report(true); len(r.GetConditions()) == 0 || m.Version() == before {
		t.Errorf("conditions are known, and the version is still %d", before)
	}
	before = m.Version()
	m.give(t.Context(), func(e *engine, at moment) bool {
		e.takeSample(&gpuv1.Sample{Tier: gpuv1.Tier_TIER_SLOW, Gpus: []*gpuv1.GpuSample{{Uuid: "GPU-a", GpuCelsius: &celsius}}}, at)
		return false
	})
	m.take(<-m.in)
	if m.Version() != before {
		t.Error("nothing is new, and the version is another")
	}
}
