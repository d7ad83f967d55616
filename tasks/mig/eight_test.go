package mig_test

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	migv1 "github.com/gpuaas/millwright/proto/millwright/mig/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
	"github.com/gpuaas/millwright/tasks/mig"
	"github.com/gpuaas/millwright/tasks/step"
	"github.com/gpuaas/millwright/tasks/tasktest/fakehost"
)

// eight is a node with eight GPUs, each in two halves, and a plan to divide all of
// them otherwise.
func eight(t *testing.T) (*fakehost.Node, tasks.Plan, *migv1.ConfigureSpec) {
	t.Helper()
	n := fakehost.New()
	script := "dir /etc/millwright\ndir /run\n"
	for i := range 8 {
		script += fmt.Sprintf("gpu add H100 GPU-%d\ngpu mig GPU-%[1]d on\ngpu instance GPU-%[1]d 9 0\ngpu instance GPU-%[1]d 9 4\n", i)
	}
	if err := n.Do(script); err != nil {
		t.Fatal(err)
	}
	s := &migv1.ConfigureSpec{Layouts: []*migv1.GpuLayout{{
		Select: &migv1.GpuSelector{All: true}, Instances: []*migv1.Instances{{Profile: "4g.40gb"}, {Profile: "1g.10gb", Count: 3}},
	}}}
	plan, err := mig.Configure{}.Plan(t.Context(), n.Hosts(nil).Prober(), s)
	if err != nil {
		t.Fatal(err)
	}
	return n, plan, s
}

// forward carries a plan out until a step fails, and returns which.
func forward(t *testing.T, n *fakehost.Node, p tasks.Plan) (int, error) {
	t.Helper()
	for i, s := range p.Steps {
		h := n.Hosts(nil).ForStep("t", uint32(i))
		_, err := s.Apply(t.Context(), h)
		if err == nil {
			err = s.Verify(t.Context(), h)
		}
		if err != nil {
			return i, err
		}
	}
	return len(p.Steps) - 1, nil
}

// backward undoes the steps up to one, the last first, until an undo fails, as the
// executor does.
func backward(t *testing.T, n *fakehost.Node, p tasks.Plan, from int) (int, error) {
	t.Helper()
	for i := from; i >= 0; i-- {
		if _, made := p.Steps[i].Args().(interface{ GetPath() string }); made {
			continue // a file or directory, which this is not about
		}
		if err := p.Steps[i].Undo(t.Context(), n.Hosts(nil).ForStep("t", uint32(i)), nil); err != nil {
			return i, err
		}
	}
	return -1, nil
}

// places are what each GPU has.
func places(n *fakehost.Node) map[string]string {
	out := map[string]string{}
	for uuid, st := range n.Layouts() {
		out[uuid] = step.DescribeMIGLayout(step.MIGLayout(st))
	}
	return out
}

// TestOneOfEightIsLost: whichever of eight GPUs is lost in the middle, for good, the
// other seven end as they were. The task is held with that GPU's name, the GPU is in
// quarantine, and once it answers again the undo brings it back too.
func TestOneOfEightIsLost(t *testing.T) {
	for _, when := range []string{"DestroyComputeInstance", "DestroyGPUInstance", "CreateGPUInstance", "CreateComputeInstance"} {
		for lost := range 8 {
			t.Run(fmt.Sprint(when, " of GPU ", lost), func(t *testing.T) {
				n, plan, s := eight(t)
				before := places(n)
				uuid := fmt.Sprintf("GPU-%d", lost)
				if err := n.Do(fmt.Sprintf("gpu fail %s %s 99 lost", uuid, when)); err != nil {
					t.Fatal(err)
				}
				at, err := forward(t, n, plan)
				if !errors.Is(err, host.ErrGPULost) {
					t.Fatalf("step %d: %v, want that the GPU is lost", at, err)
				}
				if err := n.Do("gpu lose " + uuid); err != nil {
					t.Fatal(err)
				}
				stuck, err := backward(t, n, plan, at)
				if stuck != 0 || !errors.Is(err, host.ErrGPULost) || !strings.Contains(err.Error(), uuid) {
					t.Fatalf("the undo ends at step %d: %v, want at the first, with %s", stuck, err, uuid)
				}
				after := places(n)
				for _, other := range slices.Sorted(maps.Keys(before)) {
					if other != uuid && after[other] != before[other] {
						t.Errorf("%s had %s, and has %s", other, before[other], after[other])
					}
				}
				if _, err := n.Hosts(nil).Prober().Lstat(t.Context(), step.QuarantineMark+uuid); err != nil {
					t.Errorf("no mark: %v", err)
				}
				if err := n.Do(fmt.Sprintf("gpu well %s\ngpu fail %[1]s %s 0 lost", uuid, when)); err != nil {
					t.Fatal(err)
				}
				if _, err := (mig.Configure{}).Plan(t.Context(), n.Hosts(nil).Prober(), s); !errors.Is(err, tasks.ErrPrecondition) || !strings.Contains(err.Error(), "quarantine") {
					t.Errorf("another task is planned for a GPU in quarantine: %v", err)
				}
				if at, err := backward(t, n, plan, 0); err != nil {
					t.Fatalf("the undo of step %d, with a GPU that answers: %v", at, err)
				}
				if now := places(n); !maps.Equal(now, before) {
					t.Errorf("at the end: %v, want %v", now, before)
				}
			})
		}
	}
}
