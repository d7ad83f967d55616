package mig

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	migv1 "github.com/gpuaas/millwright/proto/millwright/mig/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
	"github.com/gpuaas/millwright/tasks/step"
)

// rebootTime is how long a reboot for a GPU's MIG mode may take.
const rebootTime = 10 * time.Minute

// Plan implements [tasks.Task].
func (Configure) Plan(ctx context.Context, h host.Reader, s *migv1.ConfigureSpec) (tasks.Plan, error) {
	all, err := allowed(ctx, h, s)
	if err != nil {
		return tasks.Plan{}, err
	}
	b := &builder{spec: s, all: all}
	for _, a := range all {
		if err := b.add(ctx, h, a); err != nil {
			return tasks.Plan{}, err
		}
	}
	spec, err := h.CDI(ctx)
	if err != nil {
		return tasks.Plan{}, err
	}
	if !spec.Current {
		b.differ("CDI specification", strings.Join(spec.Devices, ", "), "what is on the GPUs")
	}
	if len(b.plan.Differences) == 0 {
		return tasks.Plan{}, nil
	}
	return b.plan, b.assemble(ctx, h)
}

// builder puts a plan together: all that can be refused first, then for all GPUs
// what is taken away, then the modes, then what is made.
type builder struct {
	spec      *migv1.ConfigureSpec
	all       []*aim
	plan      tasks.Plan
	inspect   []tasks.Step
	clear     []tasks.Step
	mode      []tasks.Step
	activate  []tasks.Step
	create    []tasks.Step
	verify    []tasks.Step
	owners    []tasks.Step
	changes   []*migv1.MigChange // back, of each GPU that changes
	quiet     []string           // GPUs that nobody may hold
	busy      bool               // somebody may be disturbed
	grows     bool               // Slurm has to be told of more
	reset     bool
	rebooting []string // why
}

func (b *builder) differ(subject, have, want string) {
	b.plan.Differences = append(b.plan.Differences, tasks.Difference{Subject: subject, Have: have, Want: want})
}

// change is a step's argument; to is a copy that nobody changes.
func (b *builder) change(a *aim, to *migv1.Layout, format string, args ...any) *migv1.MigChange {
	return &migv1.MigChange{
		Gpu: a.st.UUID, Name: a.name(), To: to, Was: a.was, MayReset: b.spec.GetAllowReset(), Persistence: a.st.Persistence, FirstBringsBack: true,
		What: a.name() + ": " + fmt.Sprintf(format, args...),
	}
}

// add plans one GPU.
func (b *builder) add(ctx context.Context, h host.Reader, a *aim) error {
	verify := step.VerifyMIG(&migv1.MigVerifyStep{Change: b.change(a, a.to, "see that it has %s", step.DescribeMIGLayout(a.to))})
	if a.owner != owner(b.spec) {
		b.verify = append(b.verify, verify)
		b.differ("layout of "+a.name()+" at boot", a.owner, owner(b.spec))
		b.owners = append(b.owners, step.WriteFile(&taskv1.WriteFileStep{Path: ownerFile(a.st.UUID), Data: []byte(owner(b.spec) + "\n"), Mode: 0o644}))
	}
	if a.stands() {
		return nil
	}
	if a.owner == owner(b.spec) {
		b.verify = append(b.verify, verify)
	}
	if err := marked(ctx, h, a); err != nil {
		return err
	}
	have := step.DescribeMIGLayout(a.was)
	if a.st.Pending != a.st.Enabled {
		have += " (another mode is pending)"
	}
	b.differ(a.name(), have, step.DescribeMIGLayout(a.to))
	b.inspect = append(b.inspect, step.InspectMIG(&migv1.MigInspectStep{Change: b.change(a, a.was, "see that it still has %s", step.DescribeMIGLayout(a.was))}))
	b.changes = append(b.changes, b.change(a, a.was, "bring it back to %s", step.DescribeMIGLayout(a.was)))
	b.busy = b.busy || len(a.gone) > 0 || a.switches()
	b.grows = b.grows || len(a.new) > 0
	if kept := len(a.was.GetInstances()) - len(a.gone); kept == 0 && (len(a.gone) > 0 || a.switches()) {
		b.quiet = append(b.quiet, a.st.UUID)
	}
	cur := a.was
	for _, in := range a.gone {
		cur = without(cur, in)
		b.clear = append(b.clear, step.ClearMIG(&migv1.MigClearStep{Change: b.change(a, cur, "remove %s", step.DescribeMIGInstance(in))}))
	}
	if a.switches() || a.st.Pending != a.to.GetEnabled() {
		cur = &migv1.Layout{Enabled: a.to.GetEnabled(), Instances: cur.GetInstances()}
		if err := b.switchMode(a, cur); err != nil {
			return err
		}
	}
	for _, in := range a.new {
		cur = &migv1.Layout{Enabled: true, Instances: sorted(append(slices.Clone(cur.GetInstances()), in))}
		b.create = append(b.create, step.CreateMIG(&migv1.MigCreateStep{Change: b.change(a, cur, "make %s", step.DescribeMIGInstance(in))}))
	}
	return nil
}

// marked refuses a GPU that an earlier task could not bring back.
func marked(ctx context.Context, h host.Reader, a *aim) error {
	mark := step.QuarantineMark + a.st.UUID
	f, err := h.ReadFile(ctx, mark)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	}
	return unfit("%s is in quarantine: %s; reboot the node, or remove %s once it is well", a.name(), strings.TrimSpace(string(f.Data)), mark)
}

func without(l *migv1.Layout, in *migv1.LayoutInstance) *migv1.Layout {
	return &migv1.Layout{Enabled: l.GetEnabled(), Instances: slices.DeleteFunc(slices.Clone(l.GetInstances()), func(o *migv1.LayoutInstance) bool {
		return o == in
	})}
}

// switchMode plans the change of a GPU's MIG mode: at once from Hopper on, by a
// reset of this GPU before, and by a reboot where it cannot be reset.
func (b *builder) switchMode(a *aim, to *migv1.Layout) error {
	on := "on"
	if !to.GetEnabled() {
		on = "off"
	}
	if a.st.Resetless || !a.switches() {
		b.mode = append(b.mode, step.SetMIGMode(&migv1.MigModeStep{Change: b.change(a, to, "switch MIG mode %s", on)}))
		return nil
	}
	switch {
	case a.st.Virtual && !b.spec.GetAllowReboot():
		return unfit("%s: MIG mode %s takes a reset, which a virtual machine does not have, or a reboot: set allow_reboot", a.name(), on)
	case a.st.Virtual:
		b.rebooting = append(b.rebooting, a.name())
	case !b.spec.GetAllowReset():
		return unfit("%s: MIG mode %s takes a reset of this GPU: set allow_reset", a.name(), on)
	default:
		b.reset = true
	}
	b.mode = append(b.mode, step.SetMIGMode(&migv1.MigModeStep{Change: b.change(a, to, "store MIG mode %s, which becomes active later", on), Pending: true}))
	how := "reset it, so that MIG mode %s becomes active"
	if a.st.Virtual {
		how = "see that MIG mode %s is active after the reboot"
	}
	b.activate = append(b.activate, step.ActivateMIG(&migv1.MigActivateStep{Change: b.change(a, to, how, on)}))
	return nil
}

// assemble puts the steps in order.
func (b *builder) assemble(ctx context.Context, h host.Reader) error {
	p := &b.plan
	work := len(b.inspect) > 0
	wait := tasks.JobWait(b.spec.GetWaitForJobs())
	p.Steps = append(p.Steps, step.PublishGPU(&migv1.GpuPublishStep{Phase: migv1.PublishPhase_PUBLISH_PHASE_BEFORE, Gpus: b.changes}))
	if len(b.quiet) > 0 {
		p.Steps = append(p.Steps, step.QuiesceGPU(&migv1.GpuQuiesceStep{Gpus: b.quiet, Wait: durationpb.New(wait)}))
	}
	if len(b.owners) > 0 {
		dirs, err := missingDirs(ctx, h, ownerDir)
		if err != nil {
			return err
		}
		p.Steps = slices.Concat(p.Steps, dirs, b.owners)
	}
	p.Steps = slices.Concat(p.Steps, b.inspect, b.clear, b.mode)
	if len(b.rebooting) > 0 {
		boot, err := h.BootID(ctx)
		if err != nil {
			return err
		}
		p.Steps = append(p.Steps, step.Reboot(&taskv1.RebootStep{
			BootId: boot, Reason: "MIG mode of " + strings.Join(b.rebooting, ", "), Timeout: durationpb.New(rebootTime),
		}))
		p.Impact = append(p.Impact, taskv1.Impact_IMPACT_REBOOT)
	}
	if b.reset {
		p.Impact = append(p.Impact, taskv1.Impact_IMPACT_GPU_RESET)
	}
	p.Steps = slices.Concat(p.Steps, b.activate, b.create, b.verify)
	after := &migv1.GpuPublishStep{Phase: migv1.PublishPhase_PUBLISH_PHASE_AFTER}
	for _, a := range b.all {
		after.Verifies = append(after.Verifies, a.st.UUID)
	}
	p.Steps = append(p.Steps, step.PublishGPU(after))
	if !work || !b.busy && !b.grows {
		return nil
	}
	alone, err := b.alone(ctx, h)
	if err != nil || alone {
		return err
	}
	gpus, err := b.afterwards(ctx, h)
	p.Disturbs = &tasks.Disturbance{What: "changes the MIG layout of GPUs", Wait: wait, Reboots: len(b.rebooting) > 0, GPUs: &gpus}
	return err
}

// afterwards is what Slurm is to be told of the node's GPUs.
func (b *builder) afterwards(ctx context.Context, h host.Reader) (string, error) {
	all, err := step.GPUStates(ctx, h)
	for i, st := range all {
		j := slices.IndexFunc(b.all, func(a *aim) bool { return a.st.UUID == st.UUID })
		if j < 0 {
			continue
		}
		to := b.all[j].to
		all[i].Enabled, all[i].Instances = to.GetEnabled(), nil
		for _, in := range to.GetInstances() {
			mi := host.MIGInstance{MIGPlace: host.MIGPlace{Profile: in.GetProfileId(), Start: in.GetStart()}}
			for _, c := range in.GetCompute() {
				mi.Compute = append(mi.Compute, host.MIGCompute{MIGComputePlace: host.MIGComputePlace{Slices: c.GetSlices(), Start: c.GetStart()}})
			}
			all[i].Instances = append(all[i].Instances, mi)
		}
	}
	return step.GPUGres(all), err
}

// missingDirs makes the directories above and at a path that are not there.
func missingDirs(ctx context.Context, h host.Reader, dir string) ([]tasks.Step, error) {
	_, err := h.Lstat(ctx, dir)
	if err == nil || !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	above, err := missingDirs(ctx, h, path.Dir(dir))
	return append(above, step.MakeDir(&taskv1.DirectoryStep{Path: dir, Mode: 0o755})), err
}

// alone reports whether a restore disturbs nobody, as at boot before slurmd is
// started: no instance goes, nobody holds a GPU, and no slurmd runs that could
// start a job. Nobody is asked then, who may not answer yet.
func (b *builder) alone(ctx context.Context, h host.Reader) (bool, error) {
	if !b.spec.GetOnlyOwn() || len(b.clear) > 0 {
		return false, nil
	}
	for _, uuid := range b.quiet {
		holders, err := h.GPUHolders(ctx, uuid)
		if err != nil || len(holders) > 0 {
			return false, err
		}
	}
	u, err := h.Unit(ctx, step.SlurmdUnit)
	return err == nil && u.Active != "active" && u.Active != "activating" && u.Active != "reloading", err
}
