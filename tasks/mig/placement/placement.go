// Package placement decides where the instances of a MIG layout go on a GPU,
// before anything on it is touched. A GPU has memory slices and compute slices;
// an instance takes a run of memory slices that begins where its profile
// allows, and as many compute slices as its profile has. The package knows no
// product: the GPU says what its profiles are.
//
// The driver places an instance at the first place that is free, so there the
// order of creation decides whether a layout fits. Here the order does not
// matter: what can be placed at all is placed.
package placement

import (
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"strings"
)

// MaxMemorySlices is how many memory slices a GPU may have here; products of
// today have four or eight.
const MaxMemorySlices = 32

// Profile is a kind of instance that a GPU offers.
type Profile struct {
	ID      int    // the driver's profile id, not NVML's enumeration
	Name    string // for people
	Compute int    // compute slices of one instance
	Memory  int    // memory slices of one instance
	Max     int    // most instances of it on an empty GPU
	Starts  []int  // memory slices at which one may begin
}

// GPU is what a GPU offers.
type GPU struct {
	Compute  int // compute slices in all
	Memory   int // memory slices in all
	Profiles []Profile
}

// Instance is a profile at its place.
type Instance struct {
	Profile int // the profile's ID
	Start   int
}

// Want is a wish for instances of a profile.
type Want struct {
	Profile int
	// Start is where the one instance has to be; -1: wherever it fits.
	Start int
	// Count is how many; with a Start, one.
	Count int
}

// Standing is an instance that is on the GPU now.
type Standing struct {
	Instance
	// Busy instances are in use: of several ways to a layout, the one that
	// keeps more of them is taken.
	Busy bool
	// Incomplete ones lack their compute instance. They take their place like
	// all others, and are never kept.
	Incomplete bool
}

// Plan is how to get from what stands to the layout.
type Plan struct {
	Keep   []int      // indices into what stands, rising
	Remove []int      // indices into what stands, rising
	Create []Instance // by start, then profile
}

// ErrImpossible is what errors wrap that say why a layout cannot be.
var ErrImpossible = errors.New("impossible layout")

// ErrGPU is what errors wrap that say that the description of a GPU makes no
// sense: a driver lied, or was read wrongly.
var ErrGPU = errors.New("description of the GPU")

// Solve finds a plan that keeps as many of the standing instances as any plan
// can: first by the number of busy ones, then by the number of all. Equal
// arguments give equal plans; the order of want and of profiles changes
// nothing. An error that wraps [ErrImpossible] says why there is none.
func Solve(gpu GPU, standing []Standing, want []Want) (Plan, error) {
	s, err := newSolver(gpu, want)
	if err != nil {
		return Plan{}, err
	}
	if err := s.check(); err != nil {
		return Plan{}, err
	}
	if s.place(0, nil) == nil && len(s.open) > 0 {
		return Plan{}, s.noPlace()
	}
	for _, keep := range candidates(standing) {
		if create, ok := s.with(standing, keep); ok {
			return makePlan(standing, keep, create), nil
		}
	}
	return Plan{}, fmt.Errorf("%w: the search came to no end that the empty GPU has", ErrGPU) // cannot be: keeping none is the empty GPU
}

// wish is one instance that is wanted.
type wish struct {
	p     Profile
	start int // -1: anywhere
}

type solver struct {
	gpu  GPU
	byID map[int]Profile
	open []wish // the hardest first
}

func newSolver(gpu GPU, want []Want) (*solver, error) {
	if gpu.Memory < 1 || gpu.Memory > MaxMemorySlices || gpu.Compute < 1 {
		return nil, fmt.Errorf("%w: %d memory slices and %d compute slices", ErrGPU, gpu.Memory, gpu.Compute)
	}
	s := &solver{gpu: gpu, byID: map[int]Profile{}}
	for _, p := range gpu.Profiles {
		if _, twice := s.byID[p.ID]; twice {
			return nil, fmt.Errorf("%w: profile %d is there twice", ErrGPU, p.ID)
		}
		if p.Memory < 1 || p.Memory > gpu.Memory || p.Compute < 0 || p.Compute > gpu.Compute {
			return nil, fmt.Errorf("%w: profile %s takes %d of %d memory slices and %d of %d compute slices", ErrGPU, p.Name, p.Memory, gpu.Memory, p.Compute, gpu.Compute)
		}
		for _, at := range p.Starts {
			if at < 0 || at+p.Memory > gpu.Memory {
				return nil, fmt.Errorf("%w: profile %s begins at %d and takes %d of %d memory slices", ErrGPU, p.Name, at, p.Memory, gpu.Memory)
			}
		}
		p.Starts = slices.Compact(slices.Sorted(slices.Values(p.Starts)))
		s.byID[p.ID] = p
	}
	return s, s.wishes(want)
}

func (s *solver) wishes(want []Want) error {
	for _, w := range want {
		p, ok := s.byID[w.Profile]
		if !ok {
			return fmt.Errorf("%w: the GPU has no profile %d", ErrImpossible, w.Profile)
		}
		n := w.Count
		if w.Start >= 0 {
			if !slices.Contains(p.Starts, w.Start) {
				return fmt.Errorf("%w: a %s cannot begin at memory slice %d, only at %s", ErrImpossible, p.Name, w.Start, list(p.Starts))
			}
			n = 1
		}
		if n < 0 || n > s.gpu.Memory && n > p.Max {
			return fmt.Errorf("%w: %d instances of %s, of which there may be %d", ErrImpossible, n, p.Name, p.Max)
		}
		for range n {
			s.open = append(s.open, wish{p: p, start: w.Start})
		}
	}
	// The hardest first, and always in one order: it bounds the search, and
	// makes it find the same whatever the order of the wishes.
	slices.SortStableFunc(s.open, func(a, b wish) int {
		switch {
		case (a.start >= 0) != (b.start >= 0):
			if a.start >= 0 {
				return -1
			}
			return 1
		case a.p.Memory != b.p.Memory:
			return b.p.Memory - a.p.Memory
		case len(a.p.Starts) != len(b.p.Starts):
			return len(a.p.Starts) - len(b.p.Starts)
		case a.p.ID != b.p.ID:
			return a.p.ID - b.p.ID
		}
		return a.start - b.start
	})
	return nil
}

// check refuses what no placement can mend, in words that say which number is
// too large.
func (s *solver) check() error {
	count := map[int]int{}
	compute := 0
	for _, w := range s.open {
		count[w.p.ID]++
		compute += w.p.Compute
		if count[w.p.ID] > w.p.Max {
			return fmt.Errorf("%w: more than %d of %s, which is all that the GPU can have", ErrImpossible, w.p.Max, w.p.Name)
		}
	}
	if compute > s.gpu.Compute {
		return fmt.Errorf("%w: %s take %d compute slices, and the GPU has %d", ErrImpossible, s.names(), compute, s.gpu.Compute)
	}
	var taken uint32
	for _, w := range s.open {
		if w.start < 0 {
			continue
		}
		m := mask(w.start, w.p.Memory)
		if taken&m != 0 {
			return fmt.Errorf("%w: the %s at memory slice %d lies over another one", ErrImpossible, w.p.Name, w.start)
		}
		taken |= m
	}
	return nil
}

func (s *solver) noPlace() error {
	memory := 0
	for _, w := range s.open {
		memory += w.p.Memory
	}
	if memory > s.gpu.Memory {
		return fmt.Errorf("%w: %s take %d memory slices, and the GPU has %d", ErrImpossible, s.names(), memory, s.gpu.Memory)
	}
	return fmt.Errorf("%w: %s cannot lie beside each other, though %d of %d memory slices would be enough: each may begin only where its profile allows", ErrImpossible, s.names(), memory, s.gpu.Memory)
}

// names lists the wishes, such as "4 x 1g.10gb and 3 x 1g.5gb".
func (s *solver) names() string {
	var order []int
	count := map[int]int{}
	for _, w := range s.open {
		if count[w.p.ID] == 0 {
			order = append(order, w.p.ID)
		}
		count[w.p.ID]++
	}
	parts := make([]string, len(order))
	for i, id := range order {
		parts[i] = fmt.Sprintf("%d x %s", count[id], s.byID[id].Name)
	}
	if len(parts) > 1 {
		parts = append(parts[:len(parts)-2], parts[len(parts)-2]+" and "+parts[len(parts)-1])
	}
	return strings.Join(parts, ", ")
}

// with tries to place the layout so that exactly the instances in keep stay.
func (s *solver) with(standing []Standing, keep uint32) ([]Instance, bool) {
	open := slices.Clone(s.open)
	var taken uint32
	for i, st := range standing {
		if keep&(1<<i) == 0 {
			continue
		}
		p, ok := s.byID[st.Profile]
		if !ok {
			return nil, false
		}
		m := mask(st.Start, p.Memory)
		j := match(open, st.Instance)
		if j < 0 || taken&m != 0 {
			return nil, false
		}
		open = slices.Delete(open, j, j+1)
		taken |= m
	}
	rest := &solver{gpu: s.gpu, byID: s.byID, open: open}
	out := rest.place(taken, nil)
	return out, out != nil || len(open) == 0
}

// match finds the wish that an instance fulfils: one for its place before one
// for any place.
func match(open []wish, in Instance) int {
	wild := -1
	for j, w := range open {
		if w.p.ID != in.Profile {
			continue
		}
		if w.start == in.Start {
			return j
		}
		if w.start < 0 && wild < 0 {
			wild = j
		}
	}
	return wild
}

// place puts the wishes from len(done) on, or returns nil when they do not fit.
// Equal profiles are placed at rising starts, so no arrangement is tried twice.
func (s *solver) place(taken uint32, done []Instance) []Instance {
	if len(done) == len(s.open) {
		return done
	}
	w := s.open[len(done)]
	from := 0
	if n := len(done); n > 0 && w.start < 0 && s.open[n-1].start < 0 && s.open[n-1].p.ID == w.p.ID {
		from = done[n-1].Start + 1
	}
	for _, at := range w.p.Starts {
		m := mask(at, w.p.Memory)
		if at < from || w.start >= 0 && at != w.start || taken&m != 0 {
			continue
		}
		if out := s.place(taken|m, append(done, Instance{Profile: w.p.ID, Start: at})); out != nil {
			return out
		}
	}
	return nil
}

// candidates lists the sets of standing instances that may be kept, the best
// first.
func candidates(standing []Standing) []uint32 {
	n := min(len(standing), 16) // no GPU has as many; what is beyond goes
	var whole, busy uint32
	for i, st := range standing[:n] {
		if !st.Incomplete {
			whole |= 1 << i
			if st.Busy {
				busy |= 1 << i
			}
		}
	}
	var out []uint32
	for set := range uint32(1) << n {
		if set&^whole == 0 {
			out = append(out, set)
		}
	}
	slices.SortFunc(out, func(a, b uint32) int {
		if d := bits.OnesCount32(b&busy) - bits.OnesCount32(a&busy); d != 0 {
			return d
		}
		if d := bits.OnesCount32(b) - bits.OnesCount32(a); d != 0 {
			return d
		}
		return int(a) - int(b)
	})
	return out
}

func makePlan(standing []Standing, keep uint32, create []Instance) Plan {
	p := Plan{Create: slices.Clone(create)}
	for i := range standing {
		if i < 32 && keep&(1<<i) != 0 {
			p.Keep = append(p.Keep, i)
		} else {
			p.Remove = append(p.Remove, i)
		}
	}
	slices.SortFunc(p.Create, func(a, b Instance) int {
		if a.Start != b.Start {
			return a.Start - b.Start
		}
		return a.Profile - b.Profile
	})
	return p
}

func mask(start, size int) uint32 {
	if start < 0 || size < 1 || start+size > MaxMemorySlices {
		return 0
	}
	return (1<<size - 1) << start
}

func list(n []int) string {
	parts := make([]string, len(n))
	for i, v := range n {
		parts[i] = fmt.Sprint(v)
	}
	return strings.Join(parts, ", ")
}
