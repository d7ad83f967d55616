package health

import (
	"fmt"
	"testing"
	"time"

	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
)

// A storm that names ever other places costs no more, and takes nothing from what
// is known of the GPUs.
func TestStormOfPlaces(t *testing.T) {
	s := newScript(t, nil).inventory()
	told := 0
	for i := range 10_000 {
		place := fmt.Sprintf("%04x:%02x:00", i/200, i%200)
		s.line(fmt.Sprintf("NVRM: Xid (PCI:%s): 13, pid=%d, name=x, Graphics SM Warp Exception on (GPC 1, TPC 2): words", place, i))
		s.takeEvent(&gpuv1.GpuEvent{Uuid: fmt.Sprint("GPU-", i), PciBusId: place, Type: 8, Data: 95}, s.at(time.Millisecond))
		if i%100 == 0 {
			told += len(s.tell())
		}
	}
	told += len(s.tell())
	if n := len(s.conditions); n > mostElsewhere+60 || told > mostElsewhere+60 || len(s.gpus) > mostStates {
		t.Errorf("%d conditions, %d edges and %d states of 10,000 places", n, told, len(s.gpus))
	}
	if c := s.conditions["gpu.events_more"].get(); c.GetState() != raised || c.GetCount() < 9000 {
		t.Errorf("what was not told one by one: %v", c)
	}
	s.sampled(10*time.Second, hotter(86))
	s.event(8, 79)
	if s.state("gpu.temperature/GPU-a") != raised || s.state("gpu.xid.79/GPU-a") != raised || s.gpus["GPU-a"] == nil {
		t.Errorf("nothing is known any more of a GPU that is there: %v", s.state("gpu.temperature/GPU-a"))
	}
}
