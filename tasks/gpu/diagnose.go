package gpu

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
	migv1 "github.com/gpuaas/millwright/proto/millwright/mig/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/gpu/selector"
	"github.com/gpuaas/millwright/tasks/host"
	"github.com/gpuaas/millwright/tasks/step"
)

const (
	maxLevel         = 3
	minDCGM, maxDCGM = 5 * time.Second, 6 * time.Hour
	// loads is the level from which on DCGM's diagnosis needs the GPUs for itself.
	loads = 2
	// checkTime is what a plan may take beyond what it waits for.
	checkTime = 10 * time.Minute
	// maxMessage bounds what is said of a check.
	maxMessage = 512
)

// dcgmTimes are how long DCGM's diagnosis may take when the spec does not say, by
// level.
var dcgmTimes = [maxLevel + 1]time.Duration{1: 5 * time.Minute, 2: 20 * time.Minute, 3: time.Hour}

// Diagnose is the kind gpu.diagnose.
type Diagnose struct{}

var (
	_ tasks.Task[*gpuv1.DiagnoseSpec]      = Diagnose{}
	_ tasks.Deadliner[*gpuv1.DiagnoseSpec] = Diagnose{}
)

// DiagnoseInfo describes gpu.diagnose.
func DiagnoseInfo() tasks.Info {
	return tasks.Info{
		Kind: "gpu.diagnose", Revision: 1, Class: tasks.Action,
		PassesHeld: true, // it is what a held task makes one want to know
		Summary:    "find out how GPUs are, by the agent's own checks and DCGM's",
	}
}

// Validate implements [tasks.Task].
func (Diagnose) Validate(s *gpuv1.DiagnoseSpec) error {
	var p tasks.Problems
	if s.GetSelect() != nil {
		selector.Validate(&p, "select.", s.GetSelect())
	}
	if s.GetDcgmLevel() > maxLevel {
		p.Add("dcgm_level", fmt.Sprint(s.GetDcgmLevel()), fmt.Sprintf("must be 1 to %d: leave it out for the agent's own checks alone", maxLevel))
	}
	if s.GetDcgmLevel() == 0 && s.GetDcgmTimeout() != nil {
		p.Add("dcgm_timeout", "", "is of a diagnosis by DCGM: say dcgm_level, or leave it out")
	}
	checkSpan(&p, "dcgm_timeout", s.GetDcgmTimeout(), minDCGM, maxDCGM, "that of the level")
	tasks.CheckJobWait(&p, s.GetWaitForJobs())
	return p.Err()
}

// Locks implements [tasks.Task]: the agent's own checks go on beside each other,
// and beside no change of the GPUs.
func (Diagnose) Locks(s *gpuv1.DiagnoseSpec) []tasks.Lock {
	return locks(s.GetSelect(), s.GetDcgmLevel() < loads)
}

// Deadline implements [tasks.Deadliner].
func (Diagnose) Deadline(s *gpuv1.DiagnoseSpec) time.Duration {
	return tasks.JobWait(s.GetWaitForJobs()) + dcgmTime(s) + checkTime
}

func dcgmTime(s *gpuv1.DiagnoseSpec) time.Duration {
	return span(s.GetDcgmTimeout(), dcgmTimes[min(s.GetDcgmLevel(), maxLevel)])
}

// targets are the GPUs that are meant, also those that do not answer. Without a
// driver there are none, which is found out by the first step.
func targets(ctx context.Context, h host.Reader, sel *migv1.GpuSelector) (all, answer []*gpuv1.GpuTarget, err error) {
	whole := sel == nil || sel.GetAll() && proto.Equal(sel, &migv1.GpuSelector{All: true})
	list, err := h.GPUs(ctx)
	switch {
	case whole && (errors.Is(err, host.ErrGPUDriver) || errors.Is(err, host.ErrGPUUnresponsive)), whole && err == nil && len(list) == 0:
		return nil, nil, nil
	case err != nil:
		return nil, nil, err
	}
	chosen, err := selector.Meant(list, sel)
	if err != nil {
		return nil, nil, err
	}
	for _, g := range chosen {
		t := &gpuv1.GpuTarget{Uuid: g.UUID, PciBusId: g.PCI, Index: g.Index, Model: g.Name, Name: nameOf(g)}
		all = append(all, t)
		if g.Problem == "" && g.UUID != "" {
			answer = append(answer, t)
		}
	}
	return all, answer, nil
}

// Plan implements [tasks.Task]. Without dcgmi its diagnosis is left out, and told
// as skipped.
func (Diagnose) Plan(ctx context.Context, h host.Reader, s *gpuv1.DiagnoseSpec) (tasks.Plan, error) {
	all, answer, err := targets(ctx, h, s.GetSelect())
	if err != nil {
		return tasks.Plan{}, err
	}
	p := tasks.Plan{Steps: []tasks.Step{step.CheckGPUs(&gpuv1.GpuCheckStep{Gpus: all, Whole: s.GetSelect() == nil || s.GetSelect().GetAll()})}}
	if s.GetDcgmLevel() == 0 || len(answer) == 0 {
		return p, nil
	}
	program, err := h.FindProgram(ctx, "dcgmi")
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return p, nil
	case err != nil:
		return tasks.Plan{}, err
	}
	wait := tasks.JobWait(s.GetWaitForJobs())
	if s.GetDcgmLevel() >= loads {
		var uuids []string
		for _, t := range answer {
			uuids = append(uuids, t.GetUuid())
		}
		p.Steps = append(p.Steps, step.QuiesceGPU(&migv1.GpuQuiesceStep{Gpus: uuids, Wait: durationpb.New(wait)}))
		p.Disturbs = &tasks.Disturbance{What: "loads GPUs for a diagnosis", Wait: wait}
	}
	p.Steps = append(p.Steps, step.RunDCGM(&gpuv1.GpuDcgmStep{
		Gpus: answer, Program: program, Level: s.GetDcgmLevel(), Timeout: durationpb.New(dcgmTime(s)),
	}))
	return p, nil
}

// Verify implements [tasks.Task]: what was found is what there is.
func (Diagnose) Verify(context.Context, host.Prober, *gpuv1.DiagnoseSpec) error { return nil }

// Result implements [tasks.Task].
func (Diagnose) Result(ctx context.Context, h host.Prober, s *gpuv1.DiagnoseSpec, outs [][]byte) (proto.Message, error) {
	r := &gpuv1.DiagnoseResult{}
	asked := false
	for _, out := range outs {
		if len(out) == 0 {
			continue
		}
		var f gpuv1.GpuFindings
		if err := proto.Unmarshal(out, &f); err != nil {
			return nil, fmt.Errorf("decode findings: %w", err)
		}
		asked = asked || f.GetDcgm()
		if f.GetDcgmVersion() != "" {
			r.DcgmVersion = f.GetDcgmVersion()
		}
		gather(r, &f)
	}
	if s.GetDcgmLevel() > 0 && !asked {
		r.Node = append(r.Node, notAsked(ctx, h))
	}
	worst(r)
	return r, nil
}

// notAsked says why DCGM was not asked.
func notAsked(ctx context.Context, h host.Reader) *gpuv1.GpuCheck {
	c := &gpuv1.GpuCheck{
		Name: "dcgm", Source: gpuv1.CheckSource_CHECK_SOURCE_DCGM, Verdict: gpuv1.Verdict_VERDICT_SKIPPED,
		Reason: "NO_GPU", Message: "no GPU that is meant answers, so that DCGM was not asked",
	}
	if _, err := h.FindProgram(ctx, "dcgmi"); errors.Is(err, fs.ErrNotExist) {
		c.Reason, c.Message = "NOT_INSTALLED", "dcgmi is not on the node: install datacenter-gpu-manager to have its diagnosis"
	}
	return c
}

// gather puts what a step found where it belongs.
func gather(r *gpuv1.DiagnoseResult, f *gpuv1.GpuFindings) {
	for _, one := range f.GetFindings() {
		c := one.GetCheck()
		c.Message = cut(c.GetMessage())
		if one.Gpu == nil || int(one.GetGpu()) >= len(f.GetGpus()) {
			r.Node = append(r.Node, c)
			continue
		}
		t := f.GetGpus()[one.GetGpu()]
		i := slices.IndexFunc(r.GetGpus(), func(g *gpuv1.GpuDiagnosis) bool {
			return g.GetUuid() == t.GetUuid() && g.GetPciBusId() == t.GetPciBusId()
		})
		if i < 0 {
			i = len(r.GetGpus())
			r.Gpus = append(r.Gpus, &gpuv1.GpuDiagnosis{Uuid: t.GetUuid(), PciBusId: t.GetPciBusId(), Index: t.GetIndex(), Model: t.GetModel()})
		}
		r.Gpus[i].Checks = append(r.Gpus[i].Checks, c)
	}
}

func cut(s string) string {
	r := []rune(s)
	return string(r[:min(len(r), maxMessage)])
}

// worst puts the worst check first, and makes of it the verdict of a GPU, and of all.
// One that was skipped says nothing while another has passed.
func worst(r *gpuv1.DiagnoseResult) {
	all := &r.Verdict
	take := func(to *gpuv1.Verdict, list []*gpuv1.GpuCheck) {
		slices.SortStableFunc(list, func(a, b *gpuv1.GpuCheck) int { return rank(b.GetVerdict()) - rank(a.GetVerdict()) })
		for _, v := range []*gpuv1.Verdict{to, all} {
			if len(list) > 0 && rank(list[0].GetVerdict()) > rank(*v) {
				*v = list[0].GetVerdict()
			}
		}
	}
	for _, g := range r.GetGpus() {
		take(&g.Verdict, g.GetChecks())
	}
	var node gpuv1.Verdict
	take(&node, r.GetNode())
	slices.SortStableFunc(r.GetGpus(), func(a, b *gpuv1.GpuDiagnosis) int { return int(a.GetIndex()) - int(b.GetIndex()) })
}

// rank orders verdicts, the worst last.
func rank(v gpuv1.Verdict) int {
	return slices.Index([]gpuv1.Verdict{
		gpuv1.Verdict_VERDICT_UNSPECIFIED, gpuv1.Verdict_VERDICT_SKIPPED, gpuv1.Verdict_VERDICT_PASS,
		gpuv1.Verdict_VERDICT_WARN, gpuv1.Verdict_VERDICT_ERROR, gpuv1.Verdict_VERDICT_FAIL,
	}, v)
}
