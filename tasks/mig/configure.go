// Package mig has the kind mig.configure: GPUs partitioned as a spec says, now
// and after each boot.
//
// A plan is worked out whole before anything is touched: the GPUs that are meant,
// the profiles as each GPU itself offers them, the places of the instances, what
// stays. Each step then settles the whole layout that is to stand after it.
package mig

import (
	"context"
	"crypto/sha256"
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	migv1 "github.com/gpuaas/millwright/proto/millwright/mig/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
	"github.com/gpuaas/millwright/tasks/step"
)

// Configure is the kind mig.configure.
type Configure struct{}

var (
	_ tasks.Task[*migv1.ConfigureSpec]      = Configure{}
	_ tasks.Intender[*migv1.ConfigureSpec]  = Configure{}
	_ tasks.Deadliner[*migv1.ConfigureSpec] = Configure{}
	_ tasks.Watcher[*migv1.ConfigureSpec]   = Configure{}
	_ tasks.Restorer[*migv1.ConfigureSpec]  = Configure{}
)

// runTime is what a plan may take beyond what it waits for.
const runTime = 30 * time.Minute

// ConfigureInfo describes mig.configure.
func ConfigureInfo() tasks.Info {
	return tasks.Info{
		Kind: "mig.configure", Revision: 2, Class: tasks.State, Early: true,
		Since:   map[protoreflect.Name]uint32{"skip_absent": 2, "layouts.select.driver_indices": 2},
		Summary: "partition GPUs with MIG, now and after each boot",
	}
}

// Locks implements [tasks.Task]: the GPUs, by name where the spec names them.
func (Configure) Locks(s *migv1.ConfigureSpec) []tasks.Lock {
	var out []tasks.Lock
	for _, l := range s.GetLayouts() {
		if len(l.GetSelect().GetUuids()) == 0 {
			return []tasks.Lock{{Name: "gpu"}}
		}
		for _, u := range l.GetSelect().GetUuids() {
			out = append(out, tasks.Lock{Name: "gpu/" + u})
		}
	}
	return out
}

// Intent implements [tasks.Intender]. A task that selects the same GPUs in the same
// way takes the place of an earlier one; one that selects some of them otherwise
// takes those over by the owner's file.
func (Configure) Intent(s *migv1.ConfigureSpec) (string, tasks.IntentChange) {
	return owner(s), tasks.IntentSet
}

// owner names the intent of a spec.
func owner(s *migv1.ConfigureSpec) string {
	sum := sha256.New()
	for _, l := range s.GetLayouts() {
		b, err := proto.MarshalOptions{Deterministic: true}.Marshal(l.GetSelect())
		if err != nil {
			b = []byte(l.GetSelect().String()) // text that is no UTF-8: Validate refuses it
		}
		fmt.Fprintf(sum, "%d:", len(b))
		sum.Write(b)
	}
	return fmt.Sprintf("mig:%x", sum.Sum(nil)[:6])
}

// Deadline implements [tasks.Deadliner].
func (Configure) Deadline(s *migv1.ConfigureSpec) time.Duration {
	return tasks.JobWait(s.GetWaitForJobs()) + runTime
}

// ForRestore implements [tasks.Restorer].
func (Configure) ForRestore(s *migv1.ConfigureSpec) *migv1.ConfigureSpec {
	out := proto.CloneOf(s)
	out.OnlyOwn = true
	return out
}

// Lost implements [tasks.Watcher]: a reset, or a driver that was loaded again, has
// taken the instances with it, and from Hopper on the mode.
func (Configure) Lost(ctx context.Context, h host.Reader, s *migv1.ConfigureSpec) (bool, error) {
	all, _, err := workOut(ctx, h, s, true) // what is missing has nothing to lose
	if err != nil {
		return false, err
	}
	for _, a := range all {
		if a.to.GetEnabled() && !a.st.Enabled || len(a.to.GetInstances()) > 0 && len(a.st.Instances) == 0 {
			return true, nil
		}
	}
	return false, nil
}

// Verify implements [tasks.Task]. What another task has given a layout since is
// that task's to look after. GPUs that are missing come last: a restore brings back
// what it can, and ends well; for the intent they are an error all the same.
func (Configure) Verify(ctx context.Context, h host.Prober, s *migv1.ConfigureSpec) error {
	all, missing, err := workOut(ctx, h, s, true)
	if err != nil {
		return err
	}
	var uuids []string
	for _, a := range all {
		uuids = append(uuids, a.st.UUID)
		if !a.stands() {
			return fmt.Errorf("%s has %s, and not %s: %w", a.name(), step.DescribeMIGLayout(a.was), step.DescribeMIGLayout(a.to), tasks.ErrNotSatisfied)
		}
	}
	if err := step.CheckCDI(ctx, h, uuids); err != nil || s.GetOnlyOwn() {
		return err
	}
	return missing
}

// Result implements [tasks.Task].
func (Configure) Result(ctx context.Context, h host.Prober, s *migv1.ConfigureSpec, _ [][]byte) (proto.Message, error) {
	all, err := allowed(ctx, h, s)
	if err != nil {
		return nil, err
	}
	out := &migv1.ConfigureResult{CdiPath: host.CDIPath}
	for _, a := range all {
		g := &migv1.ConfiguredGpu{Uuid: a.st.UUID, PciBusId: a.st.PCI, Index: a.st.Index, Model: a.st.Name, MigEnabled: a.st.Enabled}
		for _, in := range a.st.Instances {
			for _, c := range in.Compute {
				g.Devices = append(g.Devices, &migv1.ConfiguredDevice{
					Uuid: c.UUID, Profile: deviceName(a.st, in, c), Start: in.Start, Size: in.Size, CdiName: host.CDIKind + "=" + c.UUID,
				})
			}
		}
		out.Gpus = append(out.Gpus, g)
	}
	return out, nil
}

func deviceName(st host.GPUState, in host.MIGInstance, c host.MIGCompute) string {
	p, _ := st.Profile(in.Profile)
	if c.Slices < p.Slices {
		return fmt.Sprintf("%dc.%s", c.Slices, p.Name)
	}
	return p.Name
}

// unfit returns an error that refuses the task.
func unfit(format string, args ...any) error {
	return fmt.Errorf("%w: %w", fmt.Errorf(format, args...), tasks.ErrPrecondition)
}
