package gpu

import (
	"fmt"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
	migv1 "github.com/gpuaas/millwright/proto/millwright/mig/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/step"
)

// resetPlan puts the steps of a reset together: what has to be seen before, what
// holds the GPUs, the reset, and what it takes with it.
type resetPlan struct {
	wait        time.Duration
	targets     []*gpuv1.GpuTarget
	differences []tasks.Difference
	before      []tasks.Step
	after       []tasks.Step
}

// target is a GPU as steps know it.
func (c candidate) target() *gpuv1.GpuTarget {
	return &gpuv1.GpuTarget{
		Uuid: c.UUID, PciBusId: c.PCI, Index: c.Index, Model: c.Name, Name: c.name(), Recovery: string(c.Recovery), Instances: uint32(len(c.Instances)),
	}
}

// add plans one GPU.
func (b *resetPlan) add(c candidate) {
	t := c.target()
	b.targets = append(b.targets, t)
	b.differences = append(b.differences, tasks.Difference{Subject: c.name(), Have: "the driver asks for " + t.GetRecovery(), Want: "reset"})
	b.layout(c)
	if c.Persistence {
		b.before = append(b.before, step.PersistGPU(&gpuv1.GpuPersistenceStep{Gpu: t}))
		b.after = append(b.after, step.PersistGPU(&gpuv1.GpuPersistenceStep{Gpu: t, On: true}))
	}
}

// layout plans that a GPU has its MIG layout again. A stored mode of Ampere, which
// a reset makes true, is not taken back.
func (b *resetPlan) layout(c candidate) {
	if !c.Capable || c.unread || !c.Enabled && !c.Pending {
		return
	}
	was := step.MIGLayout(c.GPUState)
	to, stays := was, c.Enabled == c.Pending
	if !c.Resetless && !stays {
		to = &migv1.Layout{Enabled: c.Pending}
	}
	if c.Resetless && !c.Enabled {
		return // what is pending goes with the reset
	}
	change := func(to *migv1.Layout, format string, args ...any) *migv1.MigChange {
		return &migv1.MigChange{
			Gpu: c.UUID, Name: c.name(), To: to, Was: to, Persistence: c.Persistence, What: c.name() + ": " + fmt.Sprintf(format, args...),
		}
	}
	what := "see that it still has %s"
	if stays {
		what += ", and make that again if this is undone"
	}
	b.before = append(b.before, step.InspectMIG(&migv1.MigInspectStep{Change: change(was, what, step.DescribeMIGLayout(was)), Restores: stays}))
	b.after = append(b.after, step.VerifyMIG(&migv1.MigVerifyStep{Change: change(to, "make %s again", step.DescribeMIGLayout(to))}))
}

// steps are all in order.
func (b *resetPlan) steps(reset *gpuv1.GpuResetStep, publish bool) []tasks.Step {
	var uuids []string
	for _, t := range b.targets {
		uuids = append(uuids, t.GetUuid())
	}
	out := []tasks.Step{step.QuiesceGPU(&migv1.GpuQuiesceStep{Gpus: uuids, Wait: durationpb.New(b.wait)})}
	out = slices.Concat(out, b.before, []tasks.Step{step.ResetGPU(reset)}, b.after)
	if publish {
		out = slices.Concat(
			[]tasks.Step{step.PublishGPU(&migv1.GpuPublishStep{Phase: migv1.PublishPhase_PUBLISH_PHASE_BEFORE})}, out,
			[]tasks.Step{step.PublishGPU(&migv1.GpuPublishStep{Phase: migv1.PublishPhase_PUBLISH_PHASE_AFTER, Verifies: uuids})},
		)
	}
	return out
}
