package cli

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
)

func (a *app) gpuCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use: "list", Short: "List the GPUs of this node, or say why the driver cannot be asked", Args: between(0, 0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.ask(cmd.Context(), func(ctx context.Context, c agentv1.LocalServiceClient) error {
				r, err := c.ListGpus(ctx, &agentv1.ListGpusRequest{})
				switch {
				case err != nil:
					return err
				case a.format == "json":
					return a.printJSON(r)
				}
				return a.printGPUs(r)
			})
		},
	}
	a.outputFlag(cmd)
	return group("gpu", "Look at the GPUs of this node", cmd)
}

func (a *app) printGPUs(r *agentv1.ListGpusResponse) error {
	inv := r.GetInventory()
	if inv == nil {
		st := r.GetStatus()
		return a.table([][]string{
			{"driver", strings.ToLower(strings.TrimPrefix(st.GetState().String(), "DRIVER_STATE_"))}, {"why", st.GetMessage()}, {"since", clock(st.GetSince())},
		})
	}
	rows := [][]string{{"GPU", "UUID", "MODEL", "PCI", "MEMORY", "MIG"}}
	for _, g := range inv.GetGpus() {
		memory := orUnknown(g.GetUnknown(), "memory_bytes", fmt.Sprintf("%d MiB", g.GetMemoryBytes()>>20), g.MemoryBytes != nil)
		rows = append(rows, []string{
			fmt.Sprint(g.GetIndex()), orUnknown(g.GetUnknown(), "uuid", g.GetUuid(), g.Uuid != nil), orUnknown(g.GetUnknown(), "model", g.GetModel(), g.Model != nil),
			orUnknown(g.GetUnknown(), "pci_bus_id", g.GetPciBusId(), g.PciBusId != nil), memory, migWord(g),
		})
	}
	if err := a.table(rows); err != nil {
		return err
	}
	return a.say("driver %s, CUDA %s; %d GPUs on the PCI bus\n",
		orUnknown(inv.GetUnknown(), "driver_version", inv.GetDriverVersion(), inv.DriverVersion != nil),
		orUnknown(inv.GetUnknown(), "cuda_version", inv.GetCudaVersion(), inv.CudaVersion != nil), len(inv.GetPciGpus()))
}

// orUnknown is a value, or that it is unknown and why: never a zero that nobody
// said.
func orUnknown(all []*gpuv1.Unknown, field, value string, known bool) string {
	if known {
		return value
	}
	for _, u := range all {
		if u.GetField() == field {
			return "unknown: " + strings.ToLower(strings.ReplaceAll(strings.TrimPrefix(u.GetReason().String(), "UNKNOWN_REASON_"), "_", " "))
		}
	}
	return "unknown"
}

func migWord(g *gpuv1.Gpu) string {
	switch {
	case g.MigEnabled == nil:
		return orUnknown(g.GetUnknown(), "mig_enabled", "", false)
	case g.GetMigEnabled() != g.GetMigPending() && g.MigPending != nil:
		return fmt.Sprintf("%s, %s after a reset", onOff(g.GetMigEnabled()), onOff(g.GetMigPending()))
	case !g.GetMigEnabled():
		return "off"
	}
	var profiles []string
	for _, i := range g.GetGpuInstances() {
		profiles = append(profiles, i.GetProfile())
	}
	return strings.TrimSpace("on " + strings.Join(profiles, ","))
}

func onOff(b bool) string {
	if b {
		return "on"
	}
	return "off"
}
