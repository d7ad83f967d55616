package ctl

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
	healthv1 "github.com/gpuaas/millwright/proto/millwright/health/v1"
)

func (a *app) gpuCmd() *cobra.Command {
	return group("gpu", "See the GPUs and how they are", a.gpuListCmd(), a.gpuGetCmd())
}

func (a *app) gpuListCmd() *cobra.Command {
	var nodes, states []string
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List all GPUs, by node and index",
		Long: `List all GPUs, by node and index.

A GPU is ok only when its node has said so lately, its driver answers and nothing
worse than info is raised. What is not known is unknown, and what is no longer
known, because the node is away or reports nothing, is stale.`,
		Example: `  millctl gpu list -n gpu-001
  millctl gpu list --state raised,stale,unknown`,
		Args: none(),
		RunE: func(cmd *cobra.Command, args []string) error {
			req := &healthv1.ListGpusRequest{Nodes: nodes}
			for _, s := range states {
				n, err := enumFlag("state", s, healthv1.State(0).Descriptor())
				if err != nil {
					return err
				}
				req.States = append(req.States, healthv1.State(n))
			}
			return a.online(func(ctx context.Context, c *client, _ []string) error {
				return a.listGpus(ctx, c, req)
			})(cmd, args)
		},
	}
	cmd.Flags().StringSliceVarP(&nodes, "node", "n", nil, "only of these nodes")
	cmd.Flags().StringSliceVar(&states, "state", nil, "only in these states: ok, raised, unknown, stale")
	a.outputFlag(cmd, formatName)
	return cmd
}

func (a *app) listGpus(ctx context.Context, c *client, req *healthv1.ListGpusRequest) error {
	whole := &healthv1.ListGpusResponse{}
	for {
		page, err := c.health.ListGpus(ctx, req)
		if err != nil {
			return c.explain(ctx, "list GPUs", err)
		}
		whole.Gpus = append(whole.Gpus, page.GetGpus()...)
		if req.PageToken = page.GetNextPageToken(); req.PageToken == "" {
			break
		}
	}
	switch a.format {
	case formatJSON:
		return a.printJSON(whole)
	case formatName:
		for _, g := range whole.GetGpus() {
			if err := a.write([]byte(gpuName(g) + "\n")); err != nil {
				return err
			}
		}
		return nil
	}
	rows := [][]string{{"NODE", "GPU", "STATE", "SEVERITY", "MODEL", "UUID", "CELSIUS", "WATTS", "BUSY", "WHY"}}
	bad := 0
	for _, g := range whole.GetGpus() {
		if g.GetState() != healthv1.State_STATE_OK {
			bad++
		}
		rows = append(rows, []string{
			g.GetNode(), indexText(g), word(g.GetState()), severityText(g.GetSeverity()), g.GetModel(), g.GetUuid(),
			number(g.GetSample().GetGpuCelsius(), g.GetSample() != nil && g.GetSample().GpuCelsius != nil),
			number(g.GetSample().GetPowerMilliwatts()/1000, g.GetSample() != nil && g.GetSample().PowerMilliwatts != nil),
			percent(g.GetSample()), g.GetReason(),
		})
	}
	if err := table(a.out, rows); err != nil {
		return err
	}
	if bad > 0 {
		a.remark("%d of %d GPUs are not ok; what it means and what to do: millctl gpu get NODE/GPU", bad, len(whole.GetGpus()))
	}
	return nil
}

// gpuName names a GPU so that gpu get finds it.
func gpuName(g *healthv1.GpuHealth) string {
	if g.GetUuid() != "" {
		return g.GetUuid()
	}
	return g.GetNode() + "/" + indexText(g)
}

func indexText(g *healthv1.GpuHealth) string {
	if g.Index == nil {
		return ""
	}
	return strconv.FormatUint(uint64(g.GetIndex()), 10)
}

func severityText(s healthv1.Severity) string {
	if s == healthv1.Severity_SEVERITY_UNSPECIFIED {
		return ""
	}
	return word(s)
}

func number[N uint32 | uint64](n N, known bool) string {
	if !known {
		return ""
	}
	return strconv.FormatUint(uint64(n), 10)
}

// with puts a unit behind what is known.
func with(s, unit string) string {
	if s == "" {
		return ""
	}
	return s + unit
}

func percent(s *gpuv1.GpuSample) string {
	if s == nil || s.GpuUtilizationPercent == nil {
		return ""
	}
	return fmt.Sprintf("%d%%", s.GetGpuUtilizationPercent())
}

func (a *app) gpuGetCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "get GPU",
		Short: "Show one GPU, what is wrong with it and what to do",
		Long: `Show one GPU, what is wrong with it and what to do.

GPU is its UUID, the beginning of one, or NODE/INDEX.`,
		Args: exactly("GPU"),
		RunE: a.online(func(ctx context.Context, c *client, args []string) error {
			resp, err := c.health.GetGpu(ctx, &healthv1.GetGpuRequest{Gpu: args[0]})
			if err != nil {
				return c.explain(ctx, "get GPU "+args[0], err)
			}
			return a.printGpu(resp.GetGpu())
		}),
	}
	a.outputFlag(cmd, formatName)
	return cmd
}

func (a *app) printGpu(g *healthv1.GpuHealth) error {
	switch a.format {
	case formatJSON:
		return a.printJSON(g)
	case formatName:
		return a.write([]byte(gpuName(g) + "\n"))
	}
	var b strings.Builder
	must(table(&b, gpuRows(g)))
	conditionsText(&b, g.GetConditions())
	if lines := gpuNext(g); len(lines) > 0 {
		section(&b, "What to do next")
		for _, line := range lines {
			fmt.Fprintf(&b, "  %s\n", printable(line))
		}
	}
	return a.write([]byte(b.String()))
}

func gpuRows(g *healthv1.GpuHealth) [][]string {
	i, s := g.GetInventory(), g.GetSample()
	memory, sampled := "", ""
	if s != nil && s.MemoryUsedBytes != nil && i.GetMemoryBytes() > 0 {
		memory = fmt.Sprintf("%d of %d MiB used", s.GetMemoryUsedBytes()>>20, i.GetMemoryBytes()>>20)
	}
	if s != nil {
		sampled = join(", ", with(number(s.GetGpuCelsius(), s.GpuCelsius != nil), " C"),
			with(number(s.GetPowerMilliwatts()/1000, s.PowerMilliwatts != nil), " W"), with(percent(s), " busy"))
	}
	rows := [][]string{
		{"GPU", gpuName(g)},
		{"Node", join(", index ", g.GetNode(), indexText(g))},
		{"State", join(": ", word(g.GetState()), g.GetMessage())},
		{"Severity", severityText(g.GetSeverity())},
		{"Model", g.GetModel()},
		{"Serial", i.GetSerial()},
		{"Place", g.GetPciBusId()},
		{"Memory", memory},
		{"Firmware", i.GetVbiosVersion()},
		{"MIG", migText(i)},
		{"Sample", sampled},
		{"Sampled", stamp(g.GetSampleTime())},
		{"Heard", stamp(g.GetReportTime())},
	}
	if g.GetUnknownConditions() > 0 {
		rows = append(rows, []string{"Unknown", fmt.Sprintf("%d conditions, of which the driver says nothing on this GPU", g.GetUnknownConditions())})
	}
	var given [][]string
	for _, r := range rows {
		if r[1] != "" {
			given = append(given, r)
		}
	}
	return given
}

func migText(g *gpuv1.Gpu) string {
	switch {
	case g == nil || g.MigEnabled == nil:
		return ""
	case !g.GetMigEnabled():
		return "off"
	}
	var names []string
	for _, i := range g.GetGpuInstances() {
		names = append(names, i.GetProfile())
	}
	return join(": ", "on", strings.Join(names, ", "))
}
