package step_test

import (
	"errors"
	"strings"
	"testing"

	migv1 "github.com/gpuaas/millwright/proto/millwright/mig/v1"
	"github.com/gpuaas/millwright/tasks"
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
	s := step.CreateMIG(&migv1.MigCreateStep{Change: &migv1.MigChange{Gpu: "GPU-h", Name: "GPU 0", Was: was, To: &migv1.Layout{Enabled: true}}})
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
