package step

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	migv1 "github.com/gpuaas/millwright/proto/millwright/mig/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
)

// MIGOwnerDir has a file for each GPU whose layout belongs to an intent, with the
// intent's key.
const MIGOwnerDir = "/etc/millwright/mig"

// MIGLayout is what stands on a GPU.
func MIGLayout(st host.GPUState) *migv1.Layout {
	out := &migv1.Layout{Enabled: st.Enabled}
	for _, in := range st.Instances {
		p, _ := st.Profile(in.Profile)
		li := &migv1.LayoutInstance{ProfileId: in.Profile, Start: in.Start, Name: p.Name}
		for _, c := range in.Compute {
			li.Compute = append(li.Compute, &migv1.LayoutCompute{Slices: c.Slices, Start: c.Start})
		}
		out.Instances = append(out.Instances, li)
	}
	return out
}

// SameMIGLayout reports whether two layouts are the same at the same places.
func SameMIGLayout(a, b *migv1.Layout) bool {
	return a.GetEnabled() == b.GetEnabled() && slices.EqualFunc(a.GetInstances(), b.GetInstances(), sameInstance)
}

func sameInstance(a, b *migv1.LayoutInstance) bool {
	return a.GetProfileId() == b.GetProfileId() && a.GetStart() == b.GetStart() &&
		slices.EqualFunc(a.GetCompute(), b.GetCompute(), func(x, y *migv1.LayoutCompute) bool { return proto.Equal(x, y) })
}

// DescribeMIGLayout says what a layout is, such as "3g.40gb at 0, 2g.20gb at 4".
func DescribeMIGLayout(l *migv1.Layout) string {
	if !l.GetEnabled() {
		return "MIG off"
	}
	var parts []string
	for _, in := range l.GetInstances() {
		parts = append(parts, DescribeMIGInstance(in))
	}
	if len(parts) == 0 {
		return "MIG on, no instance"
	}
	return strings.Join(parts, ", ")
}

// DescribeMIGInstance says what an instance is and where.
func DescribeMIGInstance(in *migv1.LayoutInstance) string {
	name := in.GetName()
	if name == "" {
		name = fmt.Sprintf("profile %d", in.GetProfileId())
	}
	s := fmt.Sprintf("%s at %d", name, in.GetStart())
	switch n := len(in.GetCompute()); {
	case n == 0:
		s += " without a compute instance"
	case n > 1:
		s += fmt.Sprintf(" in %d compute instances", n)
	}
	return s
}

// gpuError gives an error of a GPU's driver its reason.
func gpuError(name string, err error) error {
	if err == nil {
		return nil
	}
	reason := ""
	switch {
	case errors.Is(err, host.ErrGPUInUse):
		reason = tasks.ReasonGPUInUse
	case errors.Is(err, host.ErrGPULost), errors.Is(err, host.ErrGPUUnknown):
		reason = tasks.ReasonGPULost
	case errors.Is(err, host.ErrGPUUnresponsive), errors.Is(err, host.ErrGPUDriver), errors.Is(err, host.ErrGPUPermission):
		reason = tasks.ReasonGPUDriver
	case errors.Is(err, host.ErrGPUResetRequired):
		reason = tasks.ReasonGPUReset
	case errors.Is(err, host.ErrGPUResources), errors.Is(err, host.ErrGPUUnsupported):
		reason = tasks.ReasonMIGRoom
	default:
		return err
	}
	return reasonError(reason, "%s: %w", name, err)
}

// inUse names who holds a GPU, beside what the driver said.
func inUse(ctx context.Context, h host.Reader, c *migv1.MigChange, err error) error {
	holders, holdErr := h.GPUHolders(ctx, c.GetGpu())
	switch {
	case holdErr != nil:
		return errors.Join(gpuError(c.GetName(), err), holdErr)
	case len(holders) == 0:
		return reasonError(tasks.ReasonGPUInUse, "%s: no process is seen that holds it; persistence mode, or a monitor's leaked handle, can: %w", c.GetName(), err)
	}
	return reasonError(tasks.ReasonGPUInUse, "%s is held by %s: %w", c.GetName(), GPUHolders(holders), err)
}

// GPUHolders names processes that hold a GPU.
func GPUHolders(list []host.GPUHolder) string {
	const most = 5
	var parts []string
	for _, o := range list[:min(len(list), most)] {
		parts = append(parts, fmt.Sprintf("%s (pid %d, %s)", o.Command, o.PID, o.How))
	}
	s := strings.Join(parts, ", ")
	if len(list) > most {
		s += fmt.Sprintf(" and %d more", len(list)-most)
	}
	return s
}

// settleMIG brings a GPU to a layout, from whatever state it is in: it reads the
// GPU, does what is missing and no more, and reads it again. So it may be cut off
// and repeated, also across a reboot or reset, which take all instances and from
// Hopper on the mode.
func settleMIG(ctx context.Context, h host.Host, c *migv1.MigChange, to *migv1.Layout) error {
	st, err := h.GPUState(ctx, c.GetGpu())
	if err != nil {
		return gpuError(c.GetName(), err)
	}
	if st, err = settleMode(ctx, h, c, st, to.GetEnabled()); err != nil {
		return err
	}
	if to.GetEnabled() {
		if err := settleInstances(ctx, h, c, st, to.GetInstances()); err != nil {
			return err
		}
	}
	if c.GetPersistence() && !st.Persistence {
		if err := h.SetGPUPersistence(ctx, c.GetGpu(), true); err != nil {
			return gpuError(c.GetName(), err)
		}
	}
	return checkMIG(ctx, h, c, to)
}

// checkMIG returns nil when a GPU has a layout, at the places, and no mode is
// pending.
func checkMIG(ctx context.Context, h host.Reader, c *migv1.MigChange, to *migv1.Layout) error {
	st, err := h.GPUState(ctx, c.GetGpu())
	if err != nil {
		return gpuError(c.GetName(), err)
	}
	if have := MIGLayout(st); !SameMIGLayout(have, to) {
		return fmt.Errorf("%s has %s, and not %s: %w", c.GetName(), DescribeMIGLayout(have), DescribeMIGLayout(to), tasks.ErrNotSatisfied)
	}
	if st.Capable && st.Pending != st.Enabled {
		return reasonError(tasks.ReasonMIGPending, "%s: MIG mode %s is pending: %w", c.GetName(), onOff(st.Pending), tasks.ErrNotSatisfied)
	}
	return nil
}

func onOff(on bool) string {
	if on {
		return "on"
	}
	return "off"
}

// settleMode makes the MIG mode true, and returns the GPU as it is then.
func settleMode(ctx context.Context, h host.Host, c *migv1.MigChange, st host.GPUState, on bool) (host.GPUState, error) {
	if !st.Capable || st.Enabled == on && st.Pending == on {
		return st, nil
	}
	pending, err := storeMode(ctx, h, c, st, on)
	if err != nil {
		return st, err
	}
	if pending {
		if err := activate(ctx, h, c, st, on); err != nil {
			return st, err
		}
	}
	if st, err = h.GPUState(ctx, c.GetGpu()); err != nil {
		return st, gpuError(c.GetName(), err)
	}
	if st.Enabled != on || st.Pending != on {
		return st, reasonError(tasks.ReasonMIGPending, "%s: the driver said that MIG mode is %s, and it is %s, pending %s: %w",
			c.GetName(), onOff(on), onOff(st.Enabled), onOff(st.Pending), tasks.ErrNotSatisfied)
	}
	return st, nil
}

// storeMode has the driver store the mode, and returns whether it waits for a
// reset. Instances go first: the mode does not change while there are any.
func storeMode(ctx context.Context, h host.Host, c *migv1.MigChange, st host.GPUState, on bool) (pending bool, err error) {
	if st.Enabled != on {
		for _, in := range st.Instances {
			if err := removeInstance(ctx, h, c, in); err != nil {
				return false, err
			}
		}
	}
	act, err := h.SetMIGMode(ctx, c.GetGpu(), on)
	switch {
	case errors.Is(err, host.ErrGPUInUse):
		return false, inUse(ctx, h, c, err)
	case err != nil:
		return false, gpuError(c.GetName(), err)
	case act == host.MIGWaitsForClients:
		return false, inUse(ctx, h, c, fmt.Errorf("set MIG mode %s: %w", onOff(on), host.ErrGPUInUse))
	}
	return act == host.MIGWaitsForReset, nil
}

// activate resets a GPU whose pending MIG mode waits for that: this one alone.
func activate(ctx context.Context, h host.Host, c *migv1.MigChange, st host.GPUState, on bool) error {
	if !c.GetMayReset() {
		return reasonError(tasks.ReasonMIGPending, "%s: MIG mode %s is stored and waits for a reset, which the spec does not allow (allow_reset): %w",
			c.GetName(), onOff(on), tasks.ErrNotSatisfied)
	}
	return resetGPUs(ctx, h, c, st.Persistence, []string{c.GetGpu()})
}

// resetGPUs resets GPUs, with persistence mode off meanwhile: it holds a GPU like
// a process does.
func resetGPUs(ctx context.Context, h host.Host, c *migv1.MigChange, persistence bool, all []string) error {
	if persistence {
		if err := h.SetGPUPersistence(ctx, c.GetGpu(), false); err != nil {
			return gpuError(c.GetName(), err)
		}
	}
	err := h.ResetGPUs(ctx, all)
	switch {
	case errors.Is(err, host.ErrGPUInUse):
		err = inUse(ctx, h, c, err)
	case errors.Is(err, host.ErrGPUUnsupported):
		err = reasonError(tasks.ReasonGPUReset, "%s cannot be reset here, or not alone: of a virtual machine reset it from outside; where NVLink joins it with others nvidia-fabricmanager has to run: %w", c.GetName(), err)
	case err != nil:
		err = gpuError(c.GetName(), err)
	}
	if persistence {
		if onErr := h.SetGPUPersistence(ctx, c.GetGpu(), true); err == nil {
			err = gpuError(c.GetName(), onErr)
		}
	}
	return err
}

// settleInstances removes what is not wanted, then makes what is missing.
func settleInstances(ctx context.Context, h host.Host, c *migv1.MigChange, st host.GPUState, want []*migv1.LayoutInstance) error {
	for _, in := range st.Instances {
		i := slices.IndexFunc(want, func(w *migv1.LayoutInstance) bool {
			return w.GetProfileId() == in.Profile && w.GetStart() == in.Start
		})
		if i < 0 {
			if err := removeInstance(ctx, h, c, in); err != nil {
				return err
			}
			continue
		}
		for _, have := range in.Compute {
			if !slices.ContainsFunc(want[i].GetCompute(), func(w *migv1.LayoutCompute) bool {
				return w.GetSlices() == have.Slices && w.GetStart() == have.Start
			}) {
				if err := removeCompute(ctx, h, c, in.MIGPlace, have.MIGComputePlace); err != nil {
					return err
				}
			}
		}
	}
	for _, w := range want {
		if err := makeInstance(ctx, h, c, st, w); err != nil {
			return err
		}
	}
	return nil
}

func removeInstance(ctx context.Context, h host.Host, c *migv1.MigChange, in host.MIGInstance) error {
	for _, ci := range in.Compute {
		if err := removeCompute(ctx, h, c, in.MIGPlace, ci.MIGComputePlace); err != nil {
			return err
		}
	}
	return busyError(ctx, h, c, h.DestroyGPUInstance(ctx, c.GetGpu(), in.MIGPlace))
}

func removeCompute(ctx context.Context, h host.Host, c *migv1.MigChange, in host.MIGPlace, at host.MIGComputePlace) error {
	return busyError(ctx, h, c, h.DestroyComputeInstance(ctx, c.GetGpu(), in, at))
}

func busyError(ctx context.Context, h host.Reader, c *migv1.MigChange, err error) error {
	if errors.Is(err, host.ErrGPUInUse) {
		return inUse(ctx, h, c, err)
	}
	return gpuError(c.GetName(), err)
}

func makeInstance(ctx context.Context, h host.Host, c *migv1.MigChange, st host.GPUState, w *migv1.LayoutInstance) error {
	at := host.MIGPlace{Profile: w.GetProfileId(), Start: w.GetStart()}
	have, there := st.Instance(at)
	if !there {
		if err := h.CreateGPUInstance(ctx, c.GetGpu(), at); err != nil {
			return gpuError(c.GetName(), err)
		}
	}
	for _, ci := range w.GetCompute() {
		place := host.MIGComputePlace{Slices: ci.GetSlices(), Start: ci.GetStart()}
		if slices.ContainsFunc(have.Compute, func(x host.MIGCompute) bool { return x.MIGComputePlace == place }) {
			continue
		}
		if err := h.CreateComputeInstance(ctx, c.GetGpu(), at, place); err != nil {
			return gpuError(c.GetName(), err)
		}
	}
	return nil
}
