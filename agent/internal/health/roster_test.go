package health

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
)

func inventoryOf(places ...int) *gpuv1.Inventory {
	inv := &gpuv1.Inventory{}
	for i, n := range places {
		inv.Gpus = append(inv.Gpus, &gpuv1.Gpu{Index: uint32(i), Uuid: proto.String(fmt.Sprintf("GPU-%d", n)), PciBusId: proto.String(fmt.Sprintf("0000:%02x:00.0", n))})
	}
	return inv
}

// TestMissingIsNamed: the GPU that is missing is named, by this life and the
// next, and no longer once another stands in its place.
func TestMissingIsNamed(t *testing.T) {
	s := newScript(t, nil)
	s.takeInventory(inventoryOf(1, 2, 3), s.at(time.Second))
	s.takeInventory(inventoryOf(1, 3), s.at(time.Second))
	const name = "missing: GPU-2 (GPU 1 at 0000:02:00.0)"
	edges := s.tell()
	if len(edges) != 1 || !strings.Contains(edges[0].GetCondition().GetMessage(), name) {
		t.Fatalf("edges %v", edges)
	}
	next := newScript(t, nil)
	next.restore(Known{Edges: edges}, next.at(0))
	next.takeInventory(inventoryOf(1, 3), next.at(time.Second))
	if c := next.conditions["node.gpu_count"].get(); c.GetState() != raised || !strings.Contains(c.GetMessage(), name) {
		t.Errorf("the next life: %v", c)
	}
	next.takeInventory(inventoryOf(1, 3, 4), next.at(time.Second))
	next.takeInventory(inventoryOf(1, 4), next.at(time.Second))
	if c := next.conditions["node.gpu_count"].get(); strings.Contains(c.GetMessage(), "GPU-2") || !strings.Contains(c.GetMessage(), "missing: GPU-3") {
		t.Errorf("after it was replaced: %v", c)
	}
	many := newScript(t, nil)
	all := make([]int, 64)
	for i := range all {
		all[i] = i
	}
	many.takeInventory(inventoryOf(all...), many.at(time.Second))
	many.takeInventory(inventoryOf(0), many.at(time.Second))
	if c := many.conditions["node.gpu_count"].get(); len(c.GetDetails()) > 16 || len(c.GetMessage()) > mostText {
		t.Errorf("%d details and %d bytes", len(c.GetDetails()), len(c.GetMessage()))
	}
}
