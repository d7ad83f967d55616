package mig

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	migv1 "github.com/gpuaas/millwright/proto/millwright/mig/v1"
	"github.com/gpuaas/millwright/tasks/gpu/selector"
	"github.com/gpuaas/millwright/tasks/host"
	"github.com/gpuaas/millwright/tasks/mig/placement"
	"github.com/gpuaas/millwright/tasks/mig/profile"
	"github.com/gpuaas/millwright/tasks/step"
)

// ownerDir has a file for each GPU that a task gave a layout: the intent that it
// belongs to. A boot does not take it away.
const ownerDir = step.MIGOwnerDir

// aim is a GPU with what it has and what it is to have.
type aim struct {
	st    host.GPUState
	was   *migv1.Layout
	to    *migv1.Layout
	gone  []*migv1.LayoutInstance // of was, in the order of their places
	new   []*migv1.LayoutInstance // of to
	owner string                  // whose layout it is now; empty: nobody's
}

func (a *aim) name() string { return fmt.Sprintf("GPU %d (%s, %s)", a.st.Index, a.st.Name, a.st.UUID) }

// stands reports whether there is nothing to do.
func (a *aim) stands() bool {
	return a.st.Enabled == a.to.GetEnabled() && a.st.Pending == a.to.GetEnabled() && len(a.gone) == 0 && len(a.new) == 0
}

// switches reports whether the MIG mode changes.
func (a *aim) switches() bool { return a.st.Enabled != a.to.GetEnabled() }

// aims works out a spec for the node. All that it names has to be there.
func aims(ctx context.Context, h host.Reader, s *migv1.ConfigureSpec) ([]*aim, error) {
	all, missing, err := workOut(ctx, h, s, false)
	return all, errors.Join(err, missing)
}

// allowed works out a spec as a task or a restore has it.
func allowed(ctx context.Context, h host.Reader, s *migv1.ConfigureSpec) ([]*aim, error) {
	if !s.GetOnlyOwn() {
		return aims(ctx, h, s)
	}
	all, _, err := workOut(ctx, h, s, true)
	return all, err
}

// workOut works out a spec for the node. With own, GPUs that another task has given
// a layout since are left out, and so are those that are gone or do not answer:
// what a lost GPU cannot have must not keep the others from having it. missing
// says which these are.
func workOut(ctx context.Context, h host.Reader, s *migv1.ConfigureSpec, own bool) (out []*aim, missing, err error) {
	list, err := h.GPUs(ctx)
	if err != nil {
		return nil, nil, err
	}
	left := 0
	for i, l := range s.GetLayouts() {
		f := finder{list: list, own: own, key: owner(s)}
		found, err := f.states(ctx, h, l)
		if s.GetSkipAbsent() && errors.Is(err, selector.ErrAbsent) {
			left++
			continue
		}
		if err != nil {
			return nil, nil, err
		}
		missing = errors.Join(missing, f.missing)
		for _, st := range found {
			if slices.ContainsFunc(out, func(a *aim) bool { return a.st.UUID == st.UUID }) {
				return nil, nil, unfit("layouts[%d]: GPU %s is named twice: each GPU has one layout", i, st.UUID)
			}
			a := &aim{st: st, was: step.MIGLayout(st)}
			if a.owner, err = ownerOf(ctx, h, st.UUID); err != nil {
				return nil, nil, err
			}
			if own && a.owner != "" && a.owner != owner(s) {
				continue
			}
			if err := a.solve(l, s.GetStrategy()); err != nil {
				return nil, nil, err
			}
			out = append(out, a)
		}
	}
	if left == len(s.GetLayouts()) {
		return nil, nil, unfit("no layout of the spec names a GPU of the node, which has %s", selector.Names(list))
	}
	slices.SortFunc(out, func(a, b *aim) int { return int(a.st.Index) - int(b.st.Index) })
	return out, missing, nil
}

func ownerFile(uuid string) string { return ownerDir + "/" + uuid }

// ownerOf returns the intent to which a GPU's layout belongs.
func ownerOf(ctx context.Context, h host.Reader, uuid string) (string, error) {
	f, err := h.ReadFile(ctx, ownerFile(uuid))
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	return strings.TrimSpace(string(f.Data)), err
}

// solve decides what goes, what stays and what comes.
func (a *aim) solve(l *migv1.GpuLayout, strategy migv1.Strategy) error {
	a.to = &migv1.Layout{Enabled: !l.GetOff()}
	if l.GetOff() {
		a.gone = a.was.GetInstances()
		return nil
	}
	t := newTable(a.st)
	want, err := t.wants(l.GetInstances())
	if err != nil {
		return unfit("%s: %w", a.name(), err)
	}
	standing := t.standing(a.was)
	plan, err := placement.Solve(t.gpu, standing, want)
	if err != nil {
		return unfit("%s: %w", a.name(), err)
	}
	if strategy == migv1.Strategy_STRATEGY_REPLACE && len(plan.Remove)+len(plan.Create) > 0 {
		if plan, err = placement.Solve(t.gpu, nil, want); err != nil {
			return unfit("%s: %w", a.name(), err)
		}
		plan.Remove = everything(len(standing))
	}
	for _, i := range plan.Remove {
		a.gone = append(a.gone, a.was.GetInstances()[i])
	}
	for _, in := range plan.Create {
		a.new = append(a.new, t.instance(in))
	}
	for _, i := range plan.Keep {
		a.to.Instances = append(a.to.Instances, a.was.GetInstances()[i])
	}
	a.to.Instances = sorted(append(a.to.Instances, a.new...))
	return nil
}

func everything(n int) []int {
	out := make([]int, n)
	for i := range out {
		out[i] = i
	}
	return out
}

func sorted(list []*migv1.LayoutInstance) []*migv1.LayoutInstance {
	slices.SortFunc(list, func(a, b *migv1.LayoutInstance) int { return int(a.GetStart()) - int(b.GetStart()) })
	return list
}

// shape is a profile with its compute instances: what the solver takes for one
// profile.
type shape struct {
	p       host.MIGProfile
	compute []*migv1.LayoutCompute
}

// table is a GPU as the solver wants it.
type table struct {
	st     host.GPUState
	gpu    placement.GPU
	shapes []shape
}

func newTable(st host.GPUState) *table {
	t := &table{st: st}
	for _, p := range st.Profiles {
		t.gpu.Compute = max(t.gpu.Compute, int(p.Slices))
		for _, s := range p.Starts {
			t.gpu.Memory = max(t.gpu.Memory, int(s+p.Size))
		}
	}
	return t
}

// id returns the solver's profile for a shape.
func (t *table) id(s shape) int {
	i := slices.IndexFunc(t.shapes, func(o shape) bool {
		return o.p.ID == s.p.ID && slices.EqualFunc(o.compute, s.compute, func(a, b *migv1.LayoutCompute) bool {
			return a.GetSlices() == b.GetSlices() && a.GetStart() == b.GetStart()
		})
	})
	if i >= 0 {
		return i
	}
	t.shapes = append(t.shapes, s)
	p := placement.Profile{ID: len(t.shapes) - 1, Name: s.p.Name, Compute: int(s.p.Slices), Memory: int(s.p.Size), Max: int(s.p.Max)}
	for _, at := range s.p.Starts {
		p.Starts = append(p.Starts, int(at))
	}
	t.gpu.Profiles = append(t.gpu.Profiles, p)
	return p.ID
}

// standing is what is on the GPU now. What lacks a compute instance matches no
// wish, and goes.
func (t *table) standing(was *migv1.Layout) []placement.Standing {
	var out []placement.Standing
	for _, in := range was.GetInstances() {
		p, known := t.st.Profile(in.GetProfileId())
		id := t.id(shape{p: p, compute: in.GetCompute()})
		now, _ := t.st.Instance(host.MIGPlace{Profile: in.GetProfileId(), Start: in.GetStart()})
		out = append(out, placement.Standing{
			Instance: placement.Instance{Profile: id, Start: int(in.GetStart())}, Incomplete: !known || len(in.GetCompute()) == 0, Busy: now.Busy,
		})
	}
	return out
}

func (t *table) instance(in placement.Instance) *migv1.LayoutInstance {
	s := t.shapes[in.Profile]
	return &migv1.LayoutInstance{ProfileId: s.p.ID, Start: uint32(in.Start), Name: s.p.Name, Compute: s.compute}
}

// wants finds the profiles of a layout on this GPU.
func (t *table) wants(list []*migv1.Instances) ([]placement.Want, error) {
	var out []placement.Want
	total := map[uint32]int{}
	for _, in := range list {
		n, err := profile.Parse(in.GetProfile())
		if err != nil {
			return nil, err
		}
		p, err := t.match(n)
		if err != nil {
			return nil, err
		}
		for _, s := range shapes(p, n.Compute, int(max(in.GetCount(), 1))) {
			if s.compute == nil {
				return nil, fmt.Errorf("%s: no compute instance has %d slices", in.GetProfile(), n.Compute)
			}
			w := placement.Want{Profile: t.id(s.shape), Start: -1, Count: s.count}
			if in.Start != nil {
				w.Start = int(in.GetStart())
			}
			out, total[p.ID] = append(out, w), total[p.ID]+s.count
		}
		if total[p.ID] > int(p.Max) {
			return nil, fmt.Errorf("%w: more than %d of %s, which is all that the GPU can have", placement.ErrImpossible, p.Max, p.Name)
		}
	}
	return out, nil
}

// match finds a profile by what it is, not by its text.
func (t *table) match(n profile.Name) (host.MIGProfile, error) {
	var offered []profile.Offered
	for _, p := range t.st.Profiles {
		offered = append(offered, profile.Offered{ID: int(p.ID), Slices: int(p.Slices), MemoryMB: p.MemoryMB, With: p.With, Without: p.Without})
	}
	o, err := profile.Match(n, offered)
	if err != nil {
		return host.MIGProfile{}, err
	}
	p, _ := t.st.Profile(uint32(o.ID))
	return p, nil
}

// many is some GPU instances of one shape.
type many struct {
	shape
	count int
}

// shapes says in which GPU instances so many of a profile are: each with one
// compute instance of all its slices, or filled with those of c slices, the last
// one with the rest.
func shapes(p host.MIGProfile, c, count int) []many {
	if c == 0 {
		return []many{{shape{p, []*migv1.LayoutCompute{{Slices: p.Slices}}}, count}}
	}
	var places []*migv1.LayoutCompute
	apart := map[int]uint32{1: 1, 2: 2, 3: 4, 4: 8, 7: 8}[c] // NVIDIA MIG user guide, compute instance placements
	for at := uint32(0); apart > 0 && at+uint32(c) <= p.Slices; at += apart {
		places = append(places, &migv1.LayoutCompute{Slices: uint32(c), Start: at})
	}
	if len(places) == 0 {
		return []many{{shape{p, nil}, count}}
	}
	var out []many
	if full := count / len(places); full > 0 {
		out = append(out, many{shape{p, places}, full})
	}
	if rest := count % len(places); rest > 0 {
		out = append(out, many{shape{p, places[:rest]}, 1})
	}
	return out
}
