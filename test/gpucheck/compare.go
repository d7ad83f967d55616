package main

import (
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"

	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
)

// value is one value of one GPU, as it should stand in a column.
type value struct {
	column string
	ours   string  // empty: unknown
	loose  float64 // how far a number that moves may be off
}

// compare prints each value beside nvidia-smi's, read before and after, and
// returns how many differ. A value that is unknown here must be so there.
func compare(out io.Writer, inv *gpuv1.Inventory, sample *gpuv1.Sample, before, after []map[string]string) (wrong int) {
	if len(inv.GetGpus()) != len(before) || len(before) != len(after) || len(sample.GetGpus()) != len(before) {
		fmt.Fprintf(out, "DIFFERS the number of GPUs: %d, %d, and nvidia-smi has %d\n", len(inv.GetGpus()), len(sample.GetGpus()), len(before))
		return 1
	}
	for i, g := range inv.GetGpus() {
		for _, v := range append(fixed(inv, g), moving(sample.GetGpus()[i])...) {
			a, asked := before[i][v.column]
			if !asked {
				continue // this nvidia-smi does not know the column
			}
			word := "same"
			if !same(v, a) && !same(v, after[i][v.column]) && !between(v, a, after[i][v.column]) {
				word = "DIFFERS"
				wrong++
			}
			fmt.Fprintf(out, "%-8s GPU %d %-40s %q, nvidia-smi %q\n", word, i, v.column, v.ours, a)
		}
	}
	return wrong
}

func fixed(inv *gpuv1.Inventory, g *gpuv1.Gpu) []value {
	return []value{
		{"index", fmt.Sprint(g.GetIndex()), 0}, {"uuid", g.GetUuid(), 0}, {"name", g.GetModel(), 0}, {"serial", g.GetSerial(), 0},
		{"pci.bus_id", g.GetPciBusId(), 0}, {"driver_version", inv.GetDriverVersion(), 0}, {"vbios_version", g.GetVbiosVersion(), 0},
		{"memory.total", number(g.MemoryBytes, 1<<20), 1}, {"mig.mode.current", mode(g.MigEnabled), 0}, {"mig.mode.pending", mode(g.MigPending), 0},
		{"ecc.mode.current", mode(g.EccEnabled), 0}, {"pcie.link.gen.max", number(g.PcieMaxGeneration, 1), 0}, {"pcie.link.width.max", number(g.PcieMaxWidth, 1), 0},
		{"power.min_limit", number(g.PowerLimitMinMilliwatts, 1000), 0.01}, {"power.max_limit", number(g.PowerLimitMaxMilliwatts, 1000), 0.01},
		{"clocks.max.sm", number(g.SmClockMaxMhz, 1), 0}, {"persistence_mode", mode(g.PersistenceMode), 0},
	}
}

func moving(s *gpuv1.GpuSample) []value {
	return []value{
		{"temperature.gpu", number(s.GpuCelsius, 1), 3}, {"temperature.memory", number(s.MemoryCelsius, 1), 3},
		{"enforced.power.limit", number(s.PowerLimitMilliwatts, 1000), 0.01},
		{"ecc.errors.corrected.volatile.total", number(s.EccCorrectedVolatile, 1), 0}, {"ecc.errors.uncorrected.volatile.total", number(s.EccUncorrectedVolatile, 1), 0},
		{"ecc.errors.corrected.aggregate.total", number(s.EccCorrectedAggregate, 1), 0}, {"ecc.errors.uncorrected.aggregate.total", number(s.EccUncorrectedAggregate, 1), 0},
		{"pcie.link.width.current", number(s.PcieWidth, 1), 0}, {"memory.used", number(s.MemoryUsedBytes, 1<<20), 64},
		{"power.draw", number(s.PowerMilliwatts, 1000), 60}, {"clocks.sm", number(s.SmClockMhz, 1), 2000},
	}
}

func number[T uint32 | uint64](n *T, unit float64) string {
	if n == nil {
		return ""
	}
	return strconv.FormatFloat(float64(*n)/unit, 'f', -1, 64)
}

func mode(b *bool) string {
	switch {
	case b == nil:
		return ""
	case *b:
		return "Enabled"
	}
	return "Disabled"
}

func same(v value, theirs string) bool {
	if v.ours == "" {
		return strings.Contains(theirs, "N/A") || strings.Contains(theirs, "Not Supported") || strings.Contains(theirs, "Insufficient") || theirs == "0" && v.column == "serial"
	}
	if v.column == "pci.bus_id" { // theirs has eight digits of domain
		return strings.HasSuffix(strings.ToLower(theirs), v.ours)
	}
	a, err1 := strconv.ParseFloat(v.ours, 64)
	b, err2 := strconv.ParseFloat(theirs, 64)
	if err1 != nil || err2 != nil {
		return strings.EqualFold(v.ours, theirs)
	}
	return math.Abs(a-b) <= v.loose
}

// between is whether a number that moved lies between the two readings.
func between(v value, before, after string) bool {
	a, err1 := strconv.ParseFloat(before, 64)
	b, err2 := strconv.ParseFloat(after, 64)
	n, err3 := strconv.ParseFloat(v.ours, 64)
	return v.loose > 0 && err1 == nil && err2 == nil && err3 == nil && n >= min(a, b) && n <= max(a, b)
}
