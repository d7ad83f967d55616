package step_test

import (
	"errors"
	"strings"
	"testing"

	migv1 "github.com/gpuaas/millwright/proto/millwright/mig/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
	"github.com/gpuaas/millwright/tasks/step"
	"github.com/gpuaas/millwright/tasks/tasktest/fakehost"
)

// TestQuarantine: a GPU that cannot be brought back is marked, with why, and the
// mark goes when it could be.
func TestQuarantine(t *testing.T) {
	n := fakehost.New()
	if err := n.Do("dir /run\ngpu add H100 GPU-h\ngpu mig GPU-h on\ngpu broken GPU-h 9 0"); err != nil {
		t.Fatal(err)
	}
	was := &migv1.Layout{Enabled: true, Instances: []*migv1.LayoutInstance{{ProfileId: 9, Name: "3g.40gb", Compute: []*migv1.LayoutCompute{{Slices: 3}}}}}
	change := &migv1.MigChange{Gpu: "GPU-h", Name: "GPU 0", Was: was, To: &migv1.Layout{Enabled: true}}
	s := step.CreateMIG(&migv1.MigCreateStep{Change: change})
	h := n.Hosts(nil).ForStep("t", 0)
	err := s.Undo(t.Context(), h, nil)
	var r *tasks.ReasonError
	if !errors.As(err, &r) || r.Reason != tasks.ReasonMIGRoom {
		t.Fatalf("undo: %v", err)
	}
	f, err := h.ReadFile(t.Context(), step.QuarantineMark+"GPU-h")
	if err != nil || !strings.Contains(string(f.Data), "GPU 0 could not be brought back to 3g.40gb at 0") {
		t.Fatalf("mark %q, %v", f.Data, err)
	}
	if err := n.Do("gpu well GPU-h"); err != nil {
		t.Fatal(err)
	}
	if err := s.Undo(t.Context(), h, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := h.Lstat(t.Context(), step.QuarantineMark+"GPU-h"); err == nil {
		t.Error("the mark is still there")
	}
}

// TestFirstStepBringsBack: where the plan's first step does, the undo of a change
// marks the GPU and says no more, once; the first step fails with why, and brings
// the GPU back when it can.
func TestFirstStepBringsBack(t *testing.T) {
	n := fakehost.New()
	if err := n.Do("dir /run\ngpu add H100 GPU-h\ngpu mig GPU-h on\ngpu add H100 GPU-i\ngpu mig GPU-i on\ngpu lose GPU-h"); err != nil {
		t.Fatal(err)
	}
	was := &migv1.Layout{Enabled: true, Instances: []*migv1.LayoutInstance{{ProfileId: 9, Name: "3g.40gb", Compute: []*migv1.LayoutCompute{{Slices: 3}}}}}
	var changes []*migv1.MigChange
	for _, uuid := range []string{"GPU-h", "GPU-i"} {
		changes = append(changes, &migv1.MigChange{Gpu: uuid, Name: uuid, Was: was, To: &migv1.Layout{Enabled: true}, FirstBringsBack: true})
	}
	first := step.PublishGPU(&migv1.GpuPublishStep{Phase: migv1.PublishPhase_PUBLISH_PHASE_BEFORE, Gpus: changes})
	h := n.Hosts(nil).ForStep("t", 0)
	if err := first.Undo(t.Context(), h, nil); err != nil {
		t.Errorf("a GPU that was lost untouched: %v", err)
	}
	for range 2 {
		if err := step.CreateMIG(&migv1.MigCreateStep{Change: changes[0]}).Undo(t.Context(), h, nil); err != nil {
			t.Fatalf("undo of a change: %v", err)
		}
	}
	if err := first.Undo(t.Context(), h, nil); !errors.Is(err, host.ErrGPULost) || !strings.Contains(err.Error(), "GPU-h could not be brought back to 3g.40gb at 0") {
		t.Fatalf("undo of the first step: %v", err)
	}
	if got := n.Layouts()["GPU-i"].Instances; len(got) != 1 {
		t.Errorf("the other GPU has %v", got)
	}
	if err := n.Do("gpu well GPU-h"); err != nil {
		t.Fatal(err)
	}
	if err := first.Undo(t.Context(), h, nil); err != nil {
		t.Fatal(err)
	}
	if got := n.Layouts()["GPU-h"].Instances; len(got) != 1 {
		t.Errorf("it has %v", got)
	}
	if _, err := h.Lstat(t.Context(), step.QuarantineMark+"GPU-h"); err == nil {
		t.Error("the mark is still there")
	}
}
