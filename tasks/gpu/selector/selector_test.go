package selector_test

import (
	"strings"
	"testing"

	migv1 "github.com/gpuaas/millwright/proto/millwright/mig/v1"
	"github.com/gpuaas/millwright/tasks/gpu/selector"
	"github.com/gpuaas/millwright/tasks/host"
)

// TestPlaces finds a GPU by each way to write its place, and no other that differs
// in the domain's upper half alone.
func TestPlaces(t *testing.T) {
	list := []host.GPU{{UUID: "GPU-a", PCI: "0000:17:00.0"}, {UUID: "GPU-b", PCI: "10000:17:00.0"}, {UUID: "GPU-c", PCI: "0001:c5:00.0"}}
	for at, want := range map[string]string{
		"17:00.0": "GPU-a", "0000:17:00.0": "GPU-a", "00000000:17:00.0": "GPU-a",
		"00010000:17:00.0": "GPU-b",
		"00000001:C5:00.0": "GPU-c", "0001:c5:00.0": "GPU-c",
	} {
		got, err := selector.Meant(list, &migv1.GpuSelector{PciBusIds: []string{at}})
		if err != nil || len(got) != 1 || got[0].UUID != want {
			t.Errorf("%s: %v, %v, want %s", at, got, err, want)
		}
	}
	if _, err := selector.Meant(list, &migv1.GpuSelector{PciBusIds: []string{"00020000:17:00.0"}}); err == nil || !strings.Contains(err.Error(), "no GPU at 00020000:17:00.0") {
		t.Errorf("a domain that no GPU has: %v", err)
	}
}
