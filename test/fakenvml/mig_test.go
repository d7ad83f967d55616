package fakenvml_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

func migNode(t *testing.T, product string) *client {
	t.Helper()
	n := newNode(t, product)
	must(t, n.Set(t.Context(), 0, "mig_current=1", "mig_pending=1"))
	c := startClient(t, n)
	c.want("init", 0, nil, nvml.SUCCESS)
	return c
}

func TestInstances(t *testing.T) {
	n := newNode(t, "H100")
	c := startClient(t, n)
	c.want("init", 0, nil, nvml.SUCCESS)
	c.want("create-gi", 0, []uint32{19, 0, 1}, nvml.ERROR_NOT_SUPPORTED) // MIG is off
	c.want("set-mig", 0, []uint32{1}, nvml.SUCCESS, 0)
	c.want("create-gi", 0, []uint32{9, 0, 4}, nvml.SUCCESS, 1)
	c.want("create-gi", 0, []uint32{5, 0, 4}, nvml.ERROR_INSUFFICIENT_RESOURCES) // 4g lies at 0 only
	c.want("create-gi", 0, []uint32{19, 0, 2}, nvml.ERROR_INVALID_ARGUMENT)
	c.want("create-ci", 0, []uint32{1, 2}, nvml.SUCCESS, 0)
	c.want("create-ci", 0, []uint32{1, 0}, nvml.ERROR_INSUFFICIENT_RESOURCES)
	c.want("destroy-gi", 0, []uint32{1}, nvml.ERROR_IN_USE)
	c.want("remapped", 0, nil, nvml.ERROR_NOT_SUPPORTED)
	c.want("field", 0, []uint32{nvml.FI_DEV_REMAPPED_PENDING}, nvml.ERROR_NOT_SUPPORTED)
	c.want("set-mig", 0, []uint32{0}, nvml.SUCCESS, int64(nvml.ERROR_IN_USE))
	old := c.ask("mig-device", 0, 0).Text
	holder, err := n.Hold(t.Context(), 0, "compute", "1", "0")
	must(t, err)
	c.want("destroy-ci", 0, []uint32{1, 0}, nvml.ERROR_IN_USE)
	must(t, holder.Process.Kill())
	holder.Wait() //nolint:errcheck // it was killed
	c.want("destroy-ci", 0, []uint32{1, 0}, nvml.SUCCESS)
	c.want("create-ci", 0, []uint32{1, 2}, nvml.SUCCESS, 0)
	if now := c.ask("mig-device", 0, 0).Text; old == now || now == "" {
		t.Errorf("the MIG device made again has the UUID %q, as before", now)
	}
	must(t, n.Reboot(t.Context()))
	s, err := n.State(t.Context())
	must(t, err)
	if len(s.GPUs[0].Instances) != 0 {
		t.Errorf("instances %+v after a reboot", s.GPUs[0].Instances)
	}
}

// model is a second opinion on which instances fit, from the products' tables
// as people print them: strings of memory slices, not bits.
type model struct {
	memory []int // who has each memory slice; -1 is no one
	left   int   // compute slices
	placed []placed
}

type placed struct {
	kind, start int
	id          int64
}

type kind struct {
	id, compute, size, most int
	starts                  []int
}

func kinds(product string) (all []kind, compute, memory int) {
	if product == "A30" {
		return []kind{
			{14, 1, 1, 4, []int{0, 1, 2, 3}}, {21, 1, 1, 1, []int{0, 1, 2, 3}},
			{5, 2, 2, 2, []int{0, 2}}, {6, 2, 2, 1, []int{0, 2}}, {0, 4, 4, 1, []int{0}},
		}, 4, 4
	}
	ones := []int{0, 1, 2, 3, 4, 5, 6}
	return []kind{
		{19, 1, 1, 7, ones}, {20, 1, 1, 1, ones}, {15, 1, 2, 4, []int{0, 2, 4, 6}},
		{14, 2, 2, 3, []int{0, 2, 4}}, {9, 3, 4, 2, []int{0, 4}}, {5, 4, 4, 1, []int{0}}, {0, 7, 8, 1, []int{0}},
	}, 7, 8
}

func (m *model) create(all []kind, which, start int) nvml.Return {
	k := all[which]
	if !slices.Contains(k.starts, start) {
		return nvml.ERROR_INVALID_ARGUMENT
	}
	same := 0
	for _, p := range m.placed {
		if p.kind == which {
			same++
		}
	}
	if same == k.most || k.compute > m.left {
		return nvml.ERROR_INSUFFICIENT_RESOURCES
	}
	for _, owner := range m.memory[start : start+k.size] {
		if owner != -1 {
			return nvml.ERROR_INSUFFICIENT_RESOURCES
		}
	}
	return nvml.SUCCESS
}

func (m *model) fill(k kind, start, owner int) {
	for i := start; i < start+k.size; i++ {
		m.memory[i] = owner
	}
}

func TestRandomInstancesAgreeWithAModel(t *testing.T) {
	for _, product := range []string{"A30", "A100-40", "A100-80", "H100", "H200", "B200", "GH200"} {
		t.Run(product, func(t *testing.T) {
			r := rand.New(rand.NewPCG(5, uint64(len(product))))
			all, compute, memory := kinds(product)
			c := migNode(t, product)
			m := &model{memory: slices.Repeat([]int{-1}, memory), left: compute}
			made := 0
			for step := range 400 {
				if len(m.placed) > 0 && r.IntN(3) == 0 {
					i := r.IntN(len(m.placed))
					p := m.placed[i]
					c.want("destroy-gi", 0, []uint32{uint32(p.id)}, nvml.SUCCESS)
					m.fill(all[p.kind], p.start, -1)
					m.left += all[p.kind].compute
					m.placed = slices.Delete(m.placed, i, i+1)
					continue
				}
				which, start := r.IntN(len(all)), r.IntN(memory)
				want := m.create(all, which, start)
				got := c.ask("create-gi", 0, uint32(all[which].id), uint32(start), uint32(all[which].size))
				if got.Ret != int(want) {
					t.Fatalf("step %d: profile %d at %d beside %v answered %d, want %d", step, all[which].id, start, m.placed, got.Ret, want)
				}
				if want != nvml.SUCCESS {
					continue
				}
				if slices.ContainsFunc(m.placed, func(p placed) bool { return p.id == got.Numbers[0] }) {
					t.Fatalf("step %d: instance id %d is given twice: %v", step, got.Numbers[0], m.placed)
				}
				m.fill(all[which], start, which)
				m.left -= all[which].compute
				m.placed = append(m.placed, placed{which, start, got.Numbers[0]})
				made++
			}
			if made < 20 {
				t.Errorf("only %d instances were made: the walk shows nothing", made)
			}
		})
	}
}

// TestKilledClientsLeaveWholeInstances kills clients in the middle of changes:
// what is there afterwards is a layout that the model allows.
func TestKilledClientsLeaveWholeInstances(t *testing.T) {
	n := newNode(t, "H100")
	must(t, n.Set(t.Context(), 0, "mig_current=1", "mig_pending=1"))
	r := rand.New(rand.NewPCG(6, 6))
	for round := range 15 {
		c := startClient(t, n)
		c.want("init", 0, nil, nvml.SUCCESS)
		for range r.IntN(6) {
			start := uint32(r.IntN(7))
			c.ask("create-gi", 0, 19, start, 1)
			c.ask("destroy-gi", 0, 7+uint32(r.IntN(7)))
		}
		must(t, c.in.Encode(question{Op: "create-gi", Args: []uint32{19, uint32(round % 7), 1}}))
		c.kill()
	}
	s, err := n.State(t.Context())
	must(t, err)
	taken := map[uint32]bool{}
	for _, i := range s.GPUs[0].Instances {
		if i.Profile != "1g.10gb" || i.Size != 1 || i.ID != 7+i.Start || taken[i.Start] {
			t.Errorf("instance %+v is torn, or doubled, in %s", i, fmt.Sprint(s.GPUs[0].Instances))
		}
		taken[i.Start] = true
	}
	c := startClient(t, n)
	c.want("init", 0, nil, nvml.SUCCESS)
	c.want("capacity", 0, []uint32{19}, nvml.SUCCESS, int64(7-len(taken)))
}

// TestProcessesRaceForSlices lets four processes ask for the same places at
// once: each place is given once.
func TestProcessesRaceForSlices(t *testing.T) {
	n := newNode(t, "A100-40")
	must(t, n.Set(t.Context(), 0, "mig_current=1", "mig_pending=1"))
	var clients []*client
	for range 4 {
		c := startClient(t, n)
		c.want("init", 0, nil, nvml.SUCCESS)
		clients = append(clients, c)
	}
	given := make(chan int, len(clients))
	for _, c := range clients {
		go func() {
			mine := 0
			for start := range uint32(7) {
				if r, err := c.try("create-gi", 0, 19, start, 1); err == nil && r.Ret == 0 {
					mine++
				}
			}
			given <- mine
		}()
	}
	total := 0
	for range clients {
		total += <-given
	}
	if total != 7 {
		t.Errorf("four processes were given %d slices of 7", total)
	}
	clients[0].want("capacity", 0, []uint32{19}, nvml.SUCCESS, 0)
}
