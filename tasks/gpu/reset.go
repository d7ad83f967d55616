// Package gpu has the kinds gpu.reset and gpu.diagnose: GPUs reset once, with what
// that takes with it made again, and GPUs looked at.
package gpu

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
	migv1 "github.com/gpuaas/millwright/proto/millwright/mig/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/gpu/selector"
	"github.com/gpuaas/millwright/tasks/host"
	"github.com/gpuaas/millwright/tasks/step"
)

const (
	// resetTime is how long nvidia-smi has when the spec does not say.
	resetTime          = 3 * time.Minute
	minReset, maxReset = 5 * time.Second, 15 * time.Minute
	// resetRest is what a plan may take beyond what it waits for.
	resetRest = 30 * time.Minute
)

// Reset is the kind gpu.reset.
type Reset struct{}

var (
	_ tasks.Task[*gpuv1.ResetSpec]      = Reset{}
	_ tasks.Deadliner[*gpuv1.ResetSpec] = Reset{}
)

// ResetInfo describes gpu.reset.
func ResetInfo() tasks.Info {
	return tasks.Info{
		Kind: "gpu.reset", Revision: 1, Class: tasks.Action,
		Impact:  []taskv1.Impact{taskv1.Impact_IMPACT_GPU_RESET},
		Summary: "reset GPUs once, and make again what that takes with it",
	}
}

// Validate implements [tasks.Task].
func (Reset) Validate(s *gpuv1.ResetSpec) error {
	var p tasks.Problems
	selector.Validate(&p, "select.", s.GetSelect())
	checkSpan(&p, "timeout", s.GetTimeout(), minReset, maxReset, resetTime.String())
	tasks.CheckJobWait(&p, s.GetWaitForJobs())
	return p.Err()
}

func checkSpan(p *tasks.Problems, field string, d *durationpb.Duration, least, most time.Duration, without string) {
	if d == nil {
		return
	}
	if err := d.CheckValid(); err != nil || d.AsDuration() < least || d.AsDuration() > most {
		p.Add(field, fmt.Sprintf("%d.%09ds", d.GetSeconds(), d.GetNanos()), fmt.Sprintf("must be from %v to %v: leave it out for %s", least, most, without))
	}
}

// Locks implements [tasks.Task]: the GPUs, by name where the spec names them.
func (Reset) Locks(s *gpuv1.ResetSpec) []tasks.Lock { return locks(s.GetSelect(), false) }

func locks(sel *migv1.GpuSelector, shared bool) []tasks.Lock {
	if len(sel.GetUuids()) == 0 {
		return []tasks.Lock{{Name: "gpu", Shared: shared}}
	}
	var out []tasks.Lock
	for _, u := range sel.GetUuids() {
		out = append(out, tasks.Lock{Name: "gpu/" + u, Shared: shared})
	}
	return out
}

// Deadline implements [tasks.Deadliner].
func (Reset) Deadline(s *gpuv1.ResetSpec) time.Duration {
	return tasks.JobWait(s.GetWaitForJobs()) + resetRest
}

// Plan implements [tasks.Task].
func (Reset) Plan(ctx context.Context, h host.Reader, s *gpuv1.ResetSpec) (tasks.Plan, error) {
	chosen, err := readable(ctx, h, s.GetSelect())
	if err != nil {
		return tasks.Plan{}, err
	}
	meant, err := toReset(chosen, s.GetWhen())
	if err != nil || len(meant) == 0 {
		return tasks.Plan{}, err
	}
	boot, err := h.BootID(ctx)
	if err != nil {
		return tasks.Plan{}, fmt.Errorf("read boot id: %w", err)
	}
	b := resetPlan{wait: tasks.JobWait(s.GetWaitForJobs())}
	for _, st := range meant {
		b.add(st)
	}
	spec, unread := h.CDI(ctx)
	publish := unread != nil || len(spec.Devices) > 0 // one that cannot be read is written anew
	steps := b.steps(&gpuv1.GpuResetStep{Gpus: b.targets, BootId: boot, Timeout: durationpb.New(span(s.GetTimeout(), resetTime))}, publish)
	return tasks.Plan{
		Steps: steps, Differences: b.differences,
		Disturbs: &tasks.Disturbance{What: "resets GPUs", Wait: b.wait},
	}, nil
}

func span(d *durationpb.Duration, without time.Duration) time.Duration {
	if d == nil {
		return without
	}
	return d.AsDuration()
}

// candidate is a GPU that the spec names.
type candidate struct {
	host.GPUState
	// unread says that its layout cannot be read before it is reset.
	unread bool
}

func (c candidate) name() string { return nameOf(c.GPU) }

func nameOf(g host.GPU) string {
	who := g.UUID
	if who == "" {
		who = g.PCI
	}
	return fmt.Sprintf("GPU %d (%s, %s)", g.Index, g.Name, who)
}

// readable reads the GPUs that are meant. One that a reset does not reach refuses
// the task.
func readable(ctx context.Context, h host.Reader, sel *migv1.GpuSelector) ([]candidate, error) {
	list, err := h.GPUs(ctx)
	if err != nil {
		return nil, err
	}
	chosen, err := selector.Meant(list, sel)
	if err != nil {
		return nil, err
	}
	const reboot = "a reset does not reach it: reboot the node (system.reboot)"
	var out []candidate
	for _, g := range chosen {
		if g.Problem != "" || g.UUID == "" {
			return nil, unfit("%s does not answer, and %s: %s", nameOf(g), reboot, g.Problem)
		}
		st, err := h.GPUState(ctx, g.UUID)
		switch {
		case errors.Is(err, host.ErrGPUResetRequired):
			out = append(out, candidate{GPUState: host.GPUState{GPU: g, Recovery: host.GPURecoveryReset}, unread: true})
		case errors.Is(err, host.ErrGPULost), errors.Is(err, host.ErrGPUUnknown):
			return nil, unfit("%s cannot be read, and %s: %w", nameOf(g), reboot, err)
		case err != nil:
			return nil, err
		default:
			out = append(out, candidate{GPUState: st})
		}
	}
	return out, nil
}

// toReset returns those of the GPUs that are reset, with the ones that have to be
// reset along with them.
func toReset(chosen []candidate, when gpuv1.ResetWhen) ([]candidate, error) {
	need := map[string]bool{}
	for _, c := range chosen {
		needs, err := c.needs(when)
		if err != nil {
			return nil, err
		}
		if !needs {
			continue
		}
		if c.Virtual {
			return nil, unfit("%s is seen through a hypervisor, where it cannot be reset: reset it from there, or reboot the node (system.reboot)", c.name())
		}
		need[c.UUID] = true
		if err := c.together(chosen, need); err != nil {
			return nil, err
		}
	}
	return slices.DeleteFunc(chosen, func(c candidate) bool { return !need[c.UUID] }), nil
}

// together adds the GPUs that NVLink joins with one, which before Hopper are reset
// together or not at all.
func (c candidate) together(chosen []candidate, need map[string]bool) error {
	if c.Resetless {
		return nil
	}
	var missing []string
	for _, peer := range c.Linked {
		if !slices.ContainsFunc(chosen, func(o candidate) bool { return o.UUID == peer }) {
			missing = append(missing, peer)
		}
		need[peer] = true
	}
	if len(missing) > 0 {
		return unfit("%s can only be reset together with the GPUs that NVLink joins with it: name these as well: %s", c.name(), strings.Join(missing, ", "))
	}
	return nil
}

// needs reports whether a GPU is to be reset, by the driver's word.
func (c candidate) needs(when gpuv1.ResetWhen) (bool, error) {
	if when == gpuv1.ResetWhen_RESET_WHEN_FORCE {
		return true, nil
	}
	const force = "say when: RESET_WHEN_FORCE to reset it all the same"
	switch c.Recovery {
	case host.GPURecoveryNone:
		return false, nil
	case host.GPURecoveryReset, host.GPURecoveryDrainAndReset:
		return true, nil
	case host.GPURecoveryReboot:
		return false, unfit("the driver asks for a reboot of the node for %s, which a reset does not spare: reboot it (system.reboot), or %s", c.name(), force)
	case host.GPURecoveryDrain:
		return false, unfit("the driver asks that the work on the GPUs that NVLink joins with %s ends, and for no reset: end it, or %s", c.name(), force)
	case host.GPURecoveryUnknown:
		return false, unfit("the driver does not say whether %s needs a reset: it is too old for that: %s", c.name(), force)
	default:
		return false, unfit("the driver asks for something else than a reset for %s: see millctl gpu get, or %s", c.name(), force)
	}
}

// Verify implements [tasks.Task]: its steps have read the GPUs again.
func (Reset) Verify(context.Context, host.Prober, *gpuv1.ResetSpec) error { return nil }

// Result implements [tasks.Task].
func (Reset) Result(ctx context.Context, h host.Prober, s *gpuv1.ResetSpec, outs [][]byte) (proto.Message, error) {
	chosen, err := readable(ctx, h, s.GetSelect())
	if err != nil {
		return nil, err
	}
	by := gpuv1.ResetBy_RESET_BY_UNSPECIFIED
	before := map[string]string{}
	for _, out := range outs {
		var o gpuv1.GpuResetOutcome
		if len(out) == 0 {
			continue
		}
		if err := proto.Unmarshal(out, &o); err != nil {
			return nil, fmt.Errorf("decode outcome of the reset: %w", err)
		}
		by = o.GetBy()
		for _, g := range o.GetGpus() {
			before[g.GetUuid()] = g.GetRecovery()
		}
	}
	res := &gpuv1.ResetResult{}
	for _, c := range chosen {
		g := &gpuv1.ResetGpu{
			Uuid: c.UUID, PciBusId: c.PCI, Index: c.Index, Model: c.Name, RecoveryAfter: string(c.Recovery), RecoveryBefore: before[c.UUID],
		}
		if before[c.UUID] != "" {
			g.ResetBy = by
		}
		if c.Capable {
			g.MigLayout = step.DescribeMIGLayout(step.MIGLayout(c.GPUState))
		}
		res.Gpus = append(res.Gpus, g)
	}
	return res, nil
}

// unfit returns an error that refuses the task.
func unfit(format string, args ...any) error {
	return fmt.Errorf("%w: %w", fmt.Errorf(format, args...), tasks.ErrPrecondition)
}
