package placement

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

// a100 is an A100 40GB as its driver describes it (NVIDIA MIG user guide).
func a100() GPU {
	return GPU{Compute: 7, Memory: 8, Profiles: []Profile{
		{ID: 19, Name: "1g.5gb", Compute: 1, Memory: 1, Max: 7, Starts: []int{0, 1, 2, 3, 4, 5, 6}},
		{ID: 20, Name: "1g.5gb+me", Compute: 1, Memory: 1, Max: 1, Starts: []int{0, 1, 2, 3, 4, 5, 6}},
		{ID: 15, Name: "1g.10gb", Compute: 1, Memory: 2, Max: 4, Starts: []int{0, 2, 4, 6}},
		{ID: 14, Name: "2g.10gb", Compute: 2, Memory: 2, Max: 3, Starts: []int{0, 2, 4}},
		{ID: 9, Name: "3g.20gb", Compute: 3, Memory: 4, Max: 2, Starts: []int{0, 4}},
		{ID: 5, Name: "4g.20gb", Compute: 4, Memory: 4, Max: 1, Starts: []int{0}},
		{ID: 0, Name: "7g.40gb", Compute: 7, Memory: 8, Max: 1, Starts: []int{0}},
	}}
}

// a30 is an A30.
func a30() GPU {
	return GPU{Compute: 4, Memory: 4, Profiles: []Profile{
		{ID: 14, Name: "1g.6gb", Compute: 1, Memory: 1, Max: 4, Starts: []int{0, 1, 2, 3}},
		{ID: 21, Name: "1g.6gb+me", Compute: 1, Memory: 1, Max: 1, Starts: []int{0, 1, 2, 3}},
		{ID: 5, Name: "2g.12gb", Compute: 2, Memory: 2, Max: 2, Starts: []int{0, 2}},
		{ID: 6, Name: "2g.12gb+me", Compute: 2, Memory: 2, Max: 1, Starts: []int{0, 2}},
		{ID: 0, Name: "4g.24gb", Compute: 4, Memory: 4, Max: 1, Starts: []int{0}},
	}}
}

func counts(gpu GPU, n ...int) []Want {
	var out []Want
	for i, c := range n {
		if c > 0 {
			out = append(out, Want{Profile: gpu.Profiles[i].ID, Start: -1, Count: c})
		}
	}
	return out
}

// possible decides by trying each order at each place: another way than the
// solver's, and slow. What no order can mend is left out first.
func possible(gpu GPU, n []int, free []bool, compute int) bool {
	need := 0
	for i, p := range gpu.Profiles {
		need += n[i] * p.Compute
	}
	if need > compute {
		return false
	}
	done := true
	for i, p := range gpu.Profiles {
		if n[i] == 0 {
			continue
		}
		done = false
		if n[i] > p.Max || p.Compute > compute {
			return false
		}
		for _, at := range p.Starts {
			ok := true
			for k := at; k < at+p.Memory; k++ {
				ok = ok && free[k]
			}
			if !ok {
				continue
			}
			for k := at; k < at+p.Memory; k++ {
				free[k] = false
			}
			n[i]--
			found := possible(gpu, n, free, compute-p.Compute)
			n[i]++
			for k := at; k < at+p.Memory; k++ {
				free[k] = true
			}
			if found {
				return true
			}
		}
	}
	return done
}

func allFree(gpu GPU) []bool {
	out := make([]bool, gpu.Memory)
	for i := range out {
		out[i] = true
	}
	return out
}

// valid reports what is wrong with a plan for the wishes.
func valid(gpu GPU, standing []Standing, want []Want, plan Plan) error {
	taken := make([]bool, gpu.Memory)
	compute := 0
	have := map[Instance]int{}
	byProfile := map[int]int{}
	put := func(in Instance) error {
		i := slices.IndexFunc(gpu.Profiles, func(p Profile) bool { return p.ID == in.Profile })
		if i < 0 || !slices.Contains(gpu.Profiles[i].Starts, in.Start) {
			return fmt.Errorf("%+v is no place", in)
		}
		for k := in.Start; k < in.Start+gpu.Profiles[i].Memory; k++ {
			if taken[k] {
				return fmt.Errorf("slice %d is taken twice", k)
			}
			taken[k] = true
		}
		compute += gpu.Profiles[i].Compute
		have[in]++
		byProfile[in.Profile]++
		return nil
	}
	for _, i := range plan.Keep {
		if standing[i].Incomplete {
			return fmt.Errorf("an incomplete one is kept")
		}
		if err := put(standing[i].Instance); err != nil {
			return err
		}
	}
	for _, in := range plan.Create {
		if err := put(in); err != nil {
			return err
		}
	}
	if compute > gpu.Compute {
		return fmt.Errorf("%d compute slices", compute)
	}
	total := 0
	wanted := map[int]int{}
	for _, w := range want {
		if w.Start >= 0 {
			if have[Instance{w.Profile, w.Start}] == 0 {
				return fmt.Errorf("nothing at %+v", w)
			}
			wanted[w.Profile]++
			total++
			continue
		}
		wanted[w.Profile] += w.Count
		total += w.Count
	}
	for id, n := range wanted {
		if byProfile[id] != n {
			return fmt.Errorf("%d of profile %d, want %d", byProfile[id], id, n)
		}
	}
	if total != len(plan.Keep)+len(plan.Create) || len(plan.Keep)+len(plan.Remove) != len(standing) {
		return fmt.Errorf("the numbers do not add up: %+v", plan)
	}
	return nil
}

// each calls f with all vectors of counts up to one more than is allowed.
func each(gpu GPU, f func(n []int)) {
	n := make([]int, len(gpu.Profiles))
	var rec func(i int)
	rec = func(i int) {
		if i == len(n) {
			f(n)
			return
		}
		for n[i] = 0; n[i] <= gpu.Profiles[i].Max+1; n[i]++ {
			rec(i + 1)
		}
		n[i] = 0
	}
	rec(0)
}

// TestAllCounts: for each vector of counts the solver finds a layout exactly
// when one exists.
func TestAllCounts(t *testing.T) {
	for _, gpu := range []GPU{a100(), a30()} {
		yes, no := 0, 0
		each(gpu, func(n []int) {
			want := counts(gpu, n...)
			plan, err := Solve(gpu, nil, want)
			can := possible(gpu, slices.Clone(n), allFree(gpu), gpu.Compute)
			switch {
			case err == nil && !can, err != nil && can:
				t.Fatalf("%v: %v, but possible is %v", n, err, can)
			case err != nil && !errors.Is(err, ErrImpossible):
				t.Fatalf("%v: %v", n, err)
			case err == nil:
				yes++
				if err := valid(gpu, nil, want, plan); err != nil {
					t.Fatalf("%v: %v", n, err)
				}
			default:
				no++
			}
		})
		t.Logf("%d layouts that can be, %d that cannot", yes, no)
		if yes == 0 || no == 0 {
			t.Error("one side was never seen")
		}
	}
}

// TestReasons: what cannot be is refused with the number that is too large.
func TestReasons(t *testing.T) {
	gpu := a100()
	for _, test := range []struct {
		want []Want
		text string
	}{
		{counts(gpu, 8), "more than 7 of 1g.5gb"},
		{counts(gpu, 0, 2), "more than 1 of 1g.5gb+me"},
		{counts(gpu, 3, 0, 4), "take 11 memory slices, and the GPU has 8"},
		{counts(gpu, 0, 0, 0, 0, 2, 1), "take 10 compute slices, and the GPU has 7"},
		{counts(gpu, 0, 0, 0, 3, 1), "take 9 compute slices"},
		{[]Want{{Profile: 77, Start: -1, Count: 1}}, "no profile 77"},
		{[]Want{{Profile: 5, Start: 4, Count: 1}}, "4g.20gb cannot begin at memory slice 4, only at 0"},
		{[]Want{{Profile: 9, Start: 0}, {Profile: 14, Start: 2}}, "2g.10gb at memory slice 2 lies over"},
		{[]Want{{Profile: 9, Start: 0}, {Profile: 5, Start: -1, Count: 1}}, "though 8 of 8 memory slices would be enough"},
		{[]Want{{Profile: 19, Start: -1, Count: -1}}, "-1 instances"},
	} {
		_, err := Solve(gpu, nil, test.want)
		if !errors.Is(err, ErrImpossible) || !strings.Contains(err.Error(), test.text) {
			t.Errorf("%+v: %v, want %q", test.want, err, test.text)
		}
	}
}

// TestOrder: 3g and 4g fit only one way round, whatever comes first
// (k8s-test-infra#886; mig-parted#29).
func TestOrder(t *testing.T) {
	gpu := a100()
	want := []Instance{{5, 0}, {9, 4}}
	for _, w := range [][]Want{
		{{Profile: 9, Start: -1, Count: 1}, {Profile: 5, Start: -1, Count: 1}},
		{{Profile: 5, Start: -1, Count: 1}, {Profile: 9, Start: -1, Count: 1}},
	} {
		plan, err := Solve(gpu, nil, w)
		if err != nil || !slices.Equal(plan.Create, want) {
			t.Errorf("%+v: %+v, %v", w, plan, err)
		}
	}
	rng := rand.New(rand.NewPCG(1, 2))
	all := counts(gpu, 2, 1, 0, 2)
	first, err := Solve(gpu, nil, all)
	if err != nil {
		t.Fatal(err)
	}
	for range 50 {
		rng.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
		rng.Shuffle(len(gpu.Profiles), func(i, j int) { gpu.Profiles[i], gpu.Profiles[j] = gpu.Profiles[j], gpu.Profiles[i] })
		if plan, err := Solve(gpu, nil, all); err != nil || !slices.Equal(plan.Create, first.Create) {
			t.Fatalf("another order gives %+v, %v, not %+v", plan, err, first)
		}
	}
}

// TestKeeps: as much as can stay stays, the busy first, and what is incomplete
// never.
func TestKeeps(t *testing.T) {
	gpu := a100()
	for _, test := range []struct {
		name     string
		standing []Standing
		want     []Want
		plan     Plan
	}{
		{
			"already so", []Standing{{Instance: Instance{9, 4}}, {Instance: Instance{9, 0}}},
			counts(gpu, 0, 0, 0, 0, 2), Plan{Keep: []int{0, 1}},
		},
		{
			"only free slices", []Standing{{Instance: Instance{9, 4}, Busy: true}},
			counts(gpu, 0, 0, 0, 2, 1), Plan{Keep: []int{0}, Create: []Instance{{14, 0}, {14, 2}}},
		},
		{
			"the one that is not busy goes", []Standing{{Instance: Instance{9, 0}}, {Instance: Instance{9, 4}, Busy: true}},
			counts(gpu, 0, 0, 0, 0, 1, 0), Plan{Keep: []int{1}, Remove: []int{0}},
		},
		{
			"in the way", []Standing{{Instance: Instance{9, 0}, Busy: true}},
			counts(gpu, 0, 0, 0, 0, 1, 1), Plan{Remove: []int{0}, Create: []Instance{{5, 0}, {9, 4}}},
		},
		{
			"incomplete", []Standing{{Instance: Instance{19, 0}, Incomplete: true}},
			counts(gpu, 1), Plan{Remove: []int{0}, Create: []Instance{{19, 0}}},
		},
		{
			"nothing is wanted", []Standing{{Instance: Instance{19, 0}}, {Instance: Instance{77, 3}}},
			nil, Plan{Remove: []int{0, 1}},
		},
		{
			"a wish for a place is met by what stands there",
			[]Standing{{Instance: Instance{19, 3}}, {Instance: Instance{19, 5}}},
			[]Want{{Profile: 19, Start: 5}, {Profile: 19, Start: -1, Count: 1}}, Plan{Keep: []int{0, 1}},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			plan, err := Solve(gpu, test.standing, test.want)
			if err != nil {
				t.Fatal(err)
			}
			if fmt.Sprint(plan) != fmt.Sprint(test.plan) {
				t.Errorf("got %+v, want %+v", plan, test.plan)
			}
		})
	}
}

// TestKeepsMost holds the plan against each set that could be kept, for random
// layouts.
func TestKeepsMost(t *testing.T) {
	gpu := a100()
	rng := rand.New(rand.NewPCG(3, 4))
	layout := func() []Want {
		for {
			n := make([]int, len(gpu.Profiles))
			for range 1 + rng.IntN(5) {
				n[rng.IntN(len(n))]++
			}
			if w := counts(gpu, n...); possible(gpu, n, allFree(gpu), gpu.Compute) {
				return w
			}
		}
	}
	for range 300 {
		now, err := Solve(gpu, nil, layout())
		if err != nil {
			t.Fatal(err)
		}
		var standing []Standing
		for _, in := range now.Create {
			standing = append(standing, Standing{Instance: in, Busy: rng.IntN(3) == 0, Incomplete: rng.IntN(6) == 0})
		}
		want := layout()
		plan, err := Solve(gpu, standing, want)
		if err != nil {
			t.Fatal(err)
		}
		if err := valid(gpu, standing, want, plan); err != nil {
			t.Fatalf("%+v to %+v: %v", standing, want, err)
		}
		score := func(keep []int) int {
			busy := 0
			for _, i := range keep {
				if standing[i].Busy {
					busy++
				}
			}
			return busy*100 + len(keep)
		}
		s, err := newSolver(gpu, want)
		if err != nil {
			t.Fatal(err)
		}
		for set := range uint32(1) << len(standing) {
			var keep []int
			skip := false
			for i := range standing {
				if set&(1<<i) != 0 {
					keep = append(keep, i)
					skip = skip || standing[i].Incomplete
				}
			}
			if _, ok := s.with(standing, set); ok && !skip && score(keep) > score(plan.Keep) {
				t.Fatalf("%+v to %+v keeps %v, and %v could be kept", standing, want, plan.Keep, keep)
			}
		}
	}
}

// TestNonsense: a GPU that describes itself wrongly is an error, not a search
// without an end.
func TestNonsense(t *testing.T) {
	for _, gpu := range []GPU{
		{},
		{Compute: 7, Memory: 99},
		{Compute: 7, Memory: 8, Profiles: []Profile{{ID: 1, Memory: 9}}},
		{Compute: 7, Memory: 8, Profiles: []Profile{{ID: 1, Memory: 4, Starts: []int{6}}}},
		{Compute: 7, Memory: 8, Profiles: []Profile{{ID: 1, Memory: 1}, {ID: 1, Memory: 1}}},
		{Compute: 7, Memory: 8, Profiles: []Profile{{ID: 1, Memory: 1, Compute: 8}}},
	} {
		if _, err := Solve(gpu, nil, nil); !errors.Is(err, ErrGPU) {
			t.Errorf("%+v: %v", gpu, err)
		}
	}
}

func FuzzSolve(f *testing.F) {
	f.Add([]byte{0, 1, 2, 3}, []byte{4, 5})
	f.Fuzz(func(t *testing.T, have, wish []byte) {
		gpu := a100()
		var standing []Standing
		for _, b := range have[:min(len(have), 10)] {
			standing = append(standing, Standing{Instance: Instance{gpu.Profiles[int(b)%7].ID, int(b>>3) % 8}, Busy: b&64 != 0, Incomplete: b&128 != 0})
		}
		var want []Want
		for _, b := range wish[:min(len(wish), 10)] {
			want = append(want, Want{Profile: gpu.Profiles[int(b)%7].ID, Start: int(b>>3)%10 - 1, Count: 1})
		}
		plan, err := Solve(gpu, standing, want)
		if err != nil {
			return
		}
		if err := valid(gpu, standing, want, plan); err != nil {
			t.Fatal(err)
		}
	})
}
