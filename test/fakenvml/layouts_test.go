package fakenvml_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpuaas/millwright/tasks/mig/placement"
)

// TestSolverAgreesWithTheLibrary holds the solver of mig.configure against the
// library's own check of what fits, for each product and each vector of counts up
// to one more than a profile may have. The two share no code and no table: one
// decides over bits of memory slices, the other has made each layout, one creation
// after the other, in C. What the solver places, the library makes, in the order of
// the plan and in the opposite one; and from any layout to any other the library
// does what the plan says.
func TestSolverAgreesWithTheLibrary(t *testing.T) {
	for _, product := range []string{"A30", "A100-40", "A100-80", "H100", "H200", "B200", "GH200"} {
		t.Run(product, func(t *testing.T) {
			c := migNode(t, product)
			var lib reached
			if err := json.Unmarshal([]byte(c.ask("explore", 0).Text), &lib); err != nil || lib.Problem != "" {
				t.Fatal(err, lib.Problem)
			}
			s := &solved{client: c, lib: lib, gpu: placement.GPU{}, can: map[string]bool{}}
			for _, n := range lib.Counts {
				s.can[fmt.Sprint(n)] = true
			}
			s.describe()
			s.all(make([]int, len(lib.Profiles)), 0)
			t.Logf("%d layouts; of %d vectors of counts %d are possible", lib.Layouts, s.asked, len(lib.Counts))
			if s.asked <= len(lib.Counts) || len(s.plans) != len(lib.Counts) {
				t.Errorf("%d of %d vectors, %d of them with a plan: one side was never seen", len(lib.Counts), s.asked, len(s.plans))
			}
			s.changes()
		})
	}
}

// solved is the solver beside a client of the library.
type solved struct {
	*client
	lib   reached
	gpu   placement.GPU
	can   map[string]bool // vectors that the library has made
	asked int
	plans [][]placement.Instance
	wants [][]placement.Want
}

// describe is the GPU as mig.configure describes it to the solver: from what the
// library offers.
func (s *solved) describe() {
	for _, p := range s.lib.Profiles {
		q := placement.Profile{ID: p.ID, Name: fmt.Sprint(p.ID), Compute: p.Slices, Memory: int(p.Size), Max: p.Most}
		for _, at := range p.Starts {
			q.Starts = append(q.Starts, int(at))
			s.gpu.Memory = max(s.gpu.Memory, int(at+p.Size))
		}
		s.gpu.Compute = max(s.gpu.Compute, p.Slices)
		s.gpu.Profiles = append(s.gpu.Profiles, q)
	}
}

// all holds each vector of counts against the library.
func (s *solved) all(n []int, i int) {
	s.t.Helper()
	if i < len(n) {
		for n[i] = 0; n[i] <= s.lib.Profiles[i].Most+1; n[i]++ {
			s.all(n, i+1)
		}
		n[i] = 0
		return
	}
	s.asked++
	var want []placement.Want
	for j, count := range n {
		if count > 0 {
			want = append(want, placement.Want{Profile: s.lib.Profiles[j].ID, Start: -1, Count: count})
		}
	}
	plan, err := placement.Solve(s.gpu, nil, want)
	switch can := s.can[fmt.Sprint(n)]; {
	case err != nil && !errors.Is(err, placement.ErrImpossible):
		s.t.Fatalf("%v: %v", n, err)
	case (err == nil) != can:
		s.t.Fatalf("%v of %+v: the solver says %v, and that the library has made it is %t", n, s.lib.Profiles, err, can)
	case err != nil:
		return
	}
	s.plans, s.wants = append(s.plans, plan.Create), append(s.wants, want)
	s.make(plan.Create, nil)
	back := slices.Clone(plan.Create)
	slices.Reverse(back)
	s.make(back, nil)
}

// make has the library make instances beside those of have, by their places, and
// takes all away again.
func (s *solved) make(create []placement.Instance, have map[placement.Instance]uint32) {
	s.t.Helper()
	ids := []uint32{}
	for _, id := range have {
		ids = append(ids, id)
	}
	for _, in := range create {
		ids = append(ids, s.create(in))
	}
	for _, id := range ids {
		s.want("destroy-gi", 0, []uint32{id}, nvml.SUCCESS)
	}
}

func (s *solved) create(in placement.Instance) uint32 {
	s.t.Helper()
	i := slices.IndexFunc(s.lib.Profiles, func(p offered) bool { return p.ID == in.Profile })
	r := s.ask("create-gi", 0, uint32(in.Profile), uint32(in.Start), s.lib.Profiles[i].Size)
	if r.Ret != int(nvml.SUCCESS) {
		s.t.Fatalf("the library does not make %+v of a plan: %d", in, r.Ret)
	}
	return uint32(r.Numbers[0])
}

// changes goes from one layout to another, as the plan says.
func (s *solved) changes() {
	s.t.Helper()
	r := rand.New(rand.NewPCG(7, uint64(len(s.plans))))
	for range 200 {
		from, to := s.plans[r.IntN(len(s.plans))], s.wants[r.IntN(len(s.wants))]
		have := map[placement.Instance]uint32{}
		var standing []placement.Standing
		for _, in := range from {
			have[in] = s.create(in)
			standing = append(standing, placement.Standing{Instance: in})
		}
		plan, err := placement.Solve(s.gpu, standing, to)
		if err != nil {
			s.t.Fatalf("from %+v to %+v: %v", from, to, err)
		}
		for _, i := range plan.Remove {
			s.want("destroy-gi", 0, []uint32{have[from[i]]}, nvml.SUCCESS)
			delete(have, from[i])
		}
		s.make(plan.Create, have)
	}
}
