package health

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
	healthv1 "github.com/gpuaas/millwright/proto/millwright/health/v1"
)

const (
	// mostNamed bounds how many missing GPUs are named.
	mostNamed = 8
	// detailMissing is the detail that names one.
	detailMissing = "missing"
)

// roster is which GPUs were seen, by UUID, in words that begin with it: the
// driver does not say which one it has lost count of.
type roster map[string]string

// seen takes the GPUs of an inventory.
func (r roster) seen(gpus []*gpuv1.Gpu) {
	for _, g := range gpus {
		if uuid := g.GetUuid(); uuid != "" && (r[uuid] != "" || len(r) < mostGPUs) {
			r[uuid] = cut(fmt.Sprintf("%s (GPU %d at %s)", uuid, g.GetIndex(), g.GetPciBusId()))
		}
	}
}

// restore takes what an earlier life missed.
func (r roster) restore(c *healthv1.Condition) {
	for _, d := range c.GetDetails() {
		if uuid, _, _ := strings.Cut(d.GetValue(), " "); d.GetName() == detailMissing && uuid != "" {
			r[uuid] = d.GetValue()
		}
	}
}

// missing are those that an inventory lacks, in order.
func (r roster) missing(inv *gpuv1.Inventory) []string {
	gone := maps.Clone(r)
	for _, g := range inv.GetGpus() {
		delete(gone, g.GetUuid())
	}
	return slices.Sorted(maps.Values(gone))
}
