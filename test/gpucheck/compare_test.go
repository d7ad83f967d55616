package main

import (
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
)

// The comparison finds what differs: a wrong value, a value where nvidia-smi has
// none, none where it has one, and a GPU too few.
func TestCompare(t *testing.T) {
	smi := func() map[string]string {
		return map[string]string{
			"uuid": "GPU-1", "pci.bus_id": "00000000:C5:00.0", "memory.total": "81559", "mig.mode.current": "Disabled", "temperature.gpu": "41",
			"temperature.memory": "[N/A]", "ecc.errors.uncorrected.volatile.total": "0", "serial": "165",
		}
	}
	run := func(change func(*gpuv1.Gpu, *gpuv1.GpuSample), gpus int) (int, string) {
		g := &gpuv1.Gpu{Uuid: proto.String("GPU-1"), PciBusId: proto.String("0000:c5:00.0"), MemoryBytes: proto.Uint64(81559 << 20), MigEnabled: proto.Bool(false), Serial: proto.String("165")}
		s := &gpuv1.GpuSample{GpuCelsius: proto.Uint32(42), EccUncorrectedVolatile: proto.Uint64(0)}
		change(g, s)
		var out strings.Builder
		n := compare(&out, &gpuv1.Inventory{Gpus: []*gpuv1.Gpu{g}}, &gpuv1.Sample{Gpus: []*gpuv1.GpuSample{s}}, []map[string]string{smi()}[:gpus], []map[string]string{smi()}[:gpus])
		return n, out.String()
	}
	if n, out := run(func(*gpuv1.Gpu, *gpuv1.GpuSample) {}, 1); n != 0 || strings.Count(out, "same") != 8 {
		t.Errorf("%d differ:\n%s", n, out)
	}
	if n, _ := run(func(*gpuv1.Gpu, *gpuv1.GpuSample) {}, 0); n != 1 {
		t.Error("a GPU that nvidia-smi has not was not noticed")
	}
	for name, change := range map[string]func(*gpuv1.Gpu, *gpuv1.GpuSample){
		"uuid":                                  func(g *gpuv1.Gpu, _ *gpuv1.GpuSample) { g.Uuid = proto.String("GPU-2") },
		"pci.bus_id":                            func(g *gpuv1.Gpu, _ *gpuv1.GpuSample) { g.PciBusId = proto.String("0000:c6:00.0") },
		"mig.mode.current":                      func(g *gpuv1.Gpu, _ *gpuv1.GpuSample) { g.MigEnabled = nil },
		"temperature.gpu":                       func(_ *gpuv1.Gpu, s *gpuv1.GpuSample) { s.GpuCelsius = proto.Uint32(0) },
		"temperature.memory":                    func(_ *gpuv1.Gpu, s *gpuv1.GpuSample) { s.MemoryCelsius = proto.Uint32(0) },
		"ecc.errors.uncorrected.volatile.total": func(_ *gpuv1.Gpu, s *gpuv1.GpuSample) { s.EccUncorrectedVolatile = proto.Uint64(1) },
	} {
		if n, out := run(change, 1); n != 1 || !strings.Contains(out, "DIFFERS  GPU 0 "+name) {
			t.Errorf("%s: %d differ:\n%s", name, n, out)
		}
	}
}

func TestUnknownColumn(t *testing.T) {
	if name, ok := unknownColumn(`Field "mig.mode.pending" is not a valid field to query.`); !ok || name != "mig.mode.pending" {
		t.Errorf("%q, %v", name, ok)
	}
	if _, ok := unknownColumn("0, GPU-1\n"); ok {
		t.Error("an answer is no complaint")
	}
}
