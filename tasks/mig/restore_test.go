package mig_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	migv1 "github.com/gpuaas/millwright/proto/millwright/mig/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
	"github.com/gpuaas/millwright/tasks/mig"
	"github.com/gpuaas/millwright/tasks/tasktest/fakehost"
)

// laidOut is a node with GPUs on which a task has made a layout, after a boot.
func laidOut(t *testing.T, gpus int, s *migv1.ConfigureSpec) *fakehost.Node {
	t.Helper()
	n := fakehost.New()
	script := "dir /etc/millwright\ndir /run\n"
	for i := range gpus {
		script += fmt.Sprintf("gpu add H100 GPU-%d\n", i)
	}
	if err := n.Do(script); err != nil {
		t.Fatal(err)
	}
	carry(t, n, s)
	if err := n.Do("reboot"); err != nil {
		t.Fatal(err)
	}
	return n
}

// carry plans a spec, carries it out and verifies it.
func carry(t *testing.T, n *fakehost.Node, s *migv1.ConfigureSpec) {
	t.Helper()
	h := n.Hosts(nil).Prober()
	plan, err := mig.Configure{}.Plan(t.Context(), h, s)
	if err != nil {
		t.Fatalf("plan: %v", err)
	}
	if at, err := forward(t, n, plan); err != nil {
		t.Fatalf("step %d: %v", at, err)
	}
	if err := (mig.Configure{}).Verify(t.Context(), h, s); err != nil {
		t.Fatalf("afterwards: %v", err)
	}
	if _, err := (mig.Configure{}).Result(t.Context(), h, s, nil); err != nil {
		t.Fatalf("result: %v", err)
	}
}

func halves(sel *migv1.GpuSelector) *migv1.ConfigureSpec {
	return &migv1.ConfigureSpec{Layouts: []*migv1.GpuLayout{{Select: sel, Instances: []*migv1.Instances{{Profile: "3g.40gb", Count: 2}}}}}
}

// TestRestoreWithoutOne: a GPU that was taken out, or is lost, keeps the layouts of
// the others from nothing: the restore after a boot brings them back. The intent does
// not hold all the same, and says why.
func TestRestoreWithoutOne(t *testing.T) {
	named := &migv1.GpuSelector{}
	bus := &migv1.GpuSelector{}
	for i := range 8 {
		named.Uuids = append(named.Uuids, fmt.Sprintf("GPU-%d", i))
		bus.PciBusIds = append(bus.PciBusIds, fmt.Sprintf("0000:%02x:00.0", 0x1b+0x0d*i))
	}
	for how, sel := range map[string]*migv1.GpuSelector{"by UUID": named, "by place": bus, "all": {All: true}, "by model": {Models: []string{"H100"}}} {
		for _, trouble := range []string{"lose", "gone"} {
			t.Run(how+", "+trouble, func(t *testing.T) {
				s := halves(sel)
				n := laidOut(t, 8, s)
				if err := n.Do("gpu " + trouble + " GPU-3"); err != nil {
					t.Fatal(err)
				}
				h := n.Hosts(nil).Prober()
				if err := (mig.Configure{}).Verify(t.Context(), h, s); !errors.Is(err, tasks.ErrNotSatisfied) {
					t.Errorf("after the boot the intent says %v, want that there is something to restore", err)
				}
				if lost, err := (mig.Configure{}).Lost(t.Context(), h, s); !lost || err != nil {
					t.Errorf("lost is %v (%v)", lost, err)
				}
				carry(t, n, mig.Configure{}.ForRestore(s))
				for uuid, has := range places(n) {
					if want := map[bool]string{true: "MIG off", false: "3g.40gb at 0, 3g.40gb at 4"}[uuid == "GPU-3"]; has != want {
						t.Errorf("%s has %s, want %s", uuid, has, want)
					}
				}
				if lost, err := (mig.Configure{}).Lost(t.Context(), h, s); lost || err != nil {
					t.Errorf("afterwards lost is %v (%v)", lost, err)
				}
				err := mig.Configure{}.Verify(t.Context(), h, s)
				if nobodyMisses := trouble == "gone" && (how == "all" || how == "by model"); nobodyMisses != (err == nil) || errors.Is(err, tasks.ErrNotSatisfied) {
					t.Errorf("afterwards the intent says %v", err)
				}
				if err != nil && strings.Contains(err.Error(), "GPU-5") {
					t.Errorf("another GPU is named for it: %v", err)
				}
				if _, err := (mig.Configure{}).Plan(t.Context(), h, s); trouble == "lose" && !errors.Is(err, tasks.ErrPrecondition) {
					t.Errorf("a task that names a GPU that is lost is planned: %v", err)
				}
			})
		}
	}
}

// TestRestoreByIndex: after a GPU was taken out, indices mean others. A restore gives
// none of them a layout that is not theirs.
func TestRestoreByIndex(t *testing.T) {
	for how, sel := range map[string]*migv1.GpuSelector{"driver's": {DriverIndices: []uint32{0}}, "of all": {All: true, Indices: []uint32{0}}} {
		t.Run(how, func(t *testing.T) {
			s := halves(sel)
			n := laidOut(t, 2, s)
			h := n.Hosts(nil).Prober()
			if err := n.Do("gpu gone GPU-0"); err != nil {
				t.Fatal(err)
			}
			if _, err := (mig.Configure{}).Plan(t.Context(), h, mig.Configure{}.ForRestore(s)); !errors.Is(err, tasks.ErrPrecondition) || !strings.Contains(err.Error(), "GPU-0") {
				t.Errorf("a restore is planned for another GPU: %v", err)
			}
			if lost, err := (mig.Configure{}).Lost(t.Context(), h, s); lost || err == nil {
				t.Errorf("lost is %v (%v)", lost, err)
			}
			if err := n.Do("gpu well GPU-0"); err != nil {
				t.Fatal(err)
			}
			carry(t, n, mig.Configure{}.ForRestore(s))
			if now := places(n); now["GPU-0"] != "3g.40gb at 0, 3g.40gb at 4" || now["GPU-1"] != "MIG off" {
				t.Errorf("with all there: %v", now)
			}
		})
	}
}

// TestModeIsLost: a driver that was loaded again has lost the mode of a GPU that is to
// have no instance.
func TestModeIsLost(t *testing.T) {
	s := &migv1.ConfigureSpec{Layouts: []*migv1.GpuLayout{{Select: &migv1.GpuSelector{All: true}, Empty: true}}}
	n := laidOut(t, 1, s)
	if lost, err := (mig.Configure{}).Lost(t.Context(), n.Hosts(nil).Prober(), s); !lost || err != nil {
		t.Errorf("lost is %v (%v)", lost, err)
	}
	carry(t, n, mig.Configure{}.ForRestore(s))
	if lost, err := (mig.Configure{}).Lost(t.Context(), n.Hosts(nil).Prober(), s); lost || err != nil {
		t.Errorf("restored, lost is %v (%v)", lost, err)
	}
	if now := places(n); now["GPU-0"] != "MIG on, no instance" {
		t.Errorf("restored: %v", now)
	}
}

// TestAnotherTaskMeanwhile: what another task changes on another GPU while this one
// ends is no fault of this one, which would take its own GPU's layout back for it.
func TestAnotherTaskMeanwhile(t *testing.T) {
	s := halves(&migv1.GpuSelector{Uuids: []string{"GPU-0"}})
	n := laidOut(t, 2, halves(&migv1.GpuSelector{Uuids: []string{"GPU-1"}}))
	h := n.Hosts(nil).Prober()
	plan, err := mig.Configure{}.Plan(t.Context(), h, s)
	if err != nil {
		t.Fatal(err)
	}
	if at, err := forward(t, n, plan); err != nil {
		t.Fatalf("step %d: %v", at, err)
	}
	last := plan.Steps[len(plan.Steps)-1]
	other := "gpu mig GPU-1 on\ngpu instance GPU-1 9 0"
	if err := n.Do(other); err != nil {
		t.Fatal(err)
	}
	if err := last.Verify(t.Context(), h); err != nil {
		t.Errorf("the last step: %v", err)
	}
	if err := (mig.Configure{}).Verify(t.Context(), h, s); err != nil {
		t.Errorf("the task: %v", err)
	}
	// Its own GPU's devices have to be right.
	mine := n.Hosts(nil).ForStep("t", 0)
	in := host.MIGPlace{Profile: 9, Start: 0}
	if err := mine.DestroyComputeInstance(t.Context(), "GPU-0", in, host.MIGComputePlace{Slices: 3}); err != nil {
		t.Fatal(err)
	}
	if err := last.Verify(t.Context(), h); !errors.Is(err, tasks.ErrNotSatisfied) {
		t.Errorf("a device of its own that is gone: %v", err)
	}
}

// TestRestoreLeavesOthers: a GPU to which a newer task has given a layout is that
// task's to restore, and not the older one's.
func TestRestoreLeavesOthers(t *testing.T) {
	older := halves(&migv1.GpuSelector{All: true})
	newer := &migv1.ConfigureSpec{Layouts: []*migv1.GpuLayout{{
		Select: &migv1.GpuSelector{Uuids: []string{"GPU-1"}}, Instances: []*migv1.Instances{{Profile: "1g.10gb", Count: 7}},
	}}}
	n := laidOut(t, 2, older)
	carry(t, n, newer)
	if err := n.Do("reboot"); err != nil {
		t.Fatal(err)
	}
	carry(t, n, mig.Configure{}.ForRestore(older))
	if now := places(n); now["GPU-0"] != "3g.40gb at 0, 3g.40gb at 4" || now["GPU-1"] != "MIG off" {
		t.Errorf("the older one is restored: %v", now)
	}
	if lost, err := (mig.Configure{}).Lost(t.Context(), n.Hosts(nil).Prober(), older); lost || err != nil {
		t.Errorf("the older one has lost something: %v (%v)", lost, err)
	}
	carry(t, n, mig.Configure{}.ForRestore(newer))
	if now := places(n); now["GPU-0"] != "3g.40gb at 0, 3g.40gb at 4" || !strings.HasPrefix(now["GPU-1"], "1g.10gb at 0, ") {
		t.Errorf("both are restored: %v", now)
	}
}

// TestRestoreAsks: a restore asks nobody while it disturbs nobody, as at boot; what
// is in its way has to be waited for.
func TestRestoreAsks(t *testing.T) {
	for name, tc := range map[string]struct {
		script string
		asks   bool
	}{
		"after a boot":       {"", false},
		"an instance stands": {"gpu mig GPU-0 on\ngpu instance GPU-0 19 0", true},
		"a process holds it": {"gpu hold GPU-0 77 train", true},
	} {
		t.Run(name, func(t *testing.T) {
			s := halves(&migv1.GpuSelector{All: true})
			n := laidOut(t, 1, s)
			if err := n.Do(tc.script); err != nil {
				t.Fatal(err)
			}
			plan, err := mig.Configure{}.Plan(t.Context(), n.Hosts(nil).Prober(), mig.Configure{}.ForRestore(s))
			if err != nil || (plan.Disturbs != nil) != tc.asks {
				t.Errorf("the plan asks %+v (%v)", plan.Disturbs, err)
			}
		})
	}
}

// TestSomebodyElse: what somebody has made by hand since the plan, while jobs were
// waited for, ends the task, and neither it nor its undo takes that away.
func TestSomebodyElse(t *testing.T) {
	n := fakehost.New()
	if err := n.Do("dir /etc/millwright\ndir /run\ngpu add H100 GPU-0\ngpu mig GPU-0 on\ngpu instance GPU-0 9 0"); err != nil {
		t.Fatal(err)
	}
	s := &migv1.ConfigureSpec{Layouts: []*migv1.GpuLayout{{Select: &migv1.GpuSelector{All: true}, Instances: []*migv1.Instances{{Profile: "1g.10gb", Count: 7}}}}}
	plan, err := mig.Configure{}.Plan(t.Context(), n.Hosts(nil).Prober(), s)
	if err != nil {
		t.Fatal(err)
	}
	if err := n.Do("gpu instance GPU-0 9 4"); err != nil {
		t.Fatal(err)
	}
	at, err := forward(t, n, plan)
	var why *tasks.ReasonError
	if !errors.As(err, &why) || why.Reason != tasks.ReasonGPUChanged {
		t.Fatalf("step %d: %v, want that somebody has changed it", at, err)
	}
	if at, err := backward(t, n, plan, at); err != nil {
		t.Fatalf("the undo of step %d: %v", at, err)
	}
	if now := places(n); now["GPU-0"] != "3g.40gb at 0, 3g.40gb at 4" {
		t.Errorf("afterwards it has %s", now["GPU-0"])
	}
}
