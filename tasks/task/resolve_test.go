package task_test

import (
	"errors"
	"slices"
	"testing"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/all"
	"github.com/gpuaas/millwright/tasks/task"
	"github.com/gpuaas/millwright/tasks/tasktest"
	"github.com/gpuaas/millwright/tasks/tasktest/fakehost"
)

const id = "01890000-0000-7000-8000-000000000001"

func TestValidate(t *testing.T) {
	hash := make([]byte, 32)
	accept, abandon := taskv1.ResolveAs_RESOLVE_AS_ACCEPT, taskv1.ResolveAs_RESOLVE_AS_ABANDON
	for _, tc := range []struct {
		name string
		spec *taskv1.ResolveSpec
		want []string
	}{
		{"accept", &taskv1.ResolveSpec{TaskId: id, LeafHash: hash, As: accept}, nil},
		{"abandon", &taskv1.ResolveSpec{TaskId: id, LeafHash: hash, As: abandon}, nil},
		{"nothing", &taskv1.ResolveSpec{}, []string{"task_id", "leaf_hash", "as"}},
		{"undo", &taskv1.ResolveSpec{TaskId: id, LeafHash: hash, As: taskv1.ResolveAs_RESOLVE_AS_UNDO}, nil},
		{"undefined", &taskv1.ResolveSpec{TaskId: id, LeafHash: hash, As: 99}, []string{"as"}},
		{"prefix", &taskv1.ResolveSpec{TaskId: id[:8], LeafHash: hash, As: accept}, []string{"task_id"}},
		{"upper case", &taskv1.ResolveSpec{TaskId: "01890000-0000-7000-8000-00000000000A", LeafHash: hash, As: accept}, []string{"task_id"}},
		{"version 4", &taskv1.ResolveSpec{TaskId: "01890000-0000-4000-8000-000000000001", LeafHash: hash, As: accept}, []string{"task_id"}},
		{"short hash", &taskv1.ResolveSpec{TaskId: id, LeafHash: hash[:31], As: accept}, []string{"leaf_hash"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var got []string
			err := task.Resolve{}.Validate(tc.spec)
			if p := (tasks.Problems{}); errors.As(err, &p) {
				for _, q := range p {
					got = append(got, q.Field)
				}
			}
			if !slices.Equal(got, tc.want) {
				t.Errorf("Validate names %q, want %q", got, tc.want)
			}
		})
	}
}

func TestPlansNothing(t *testing.T) {
	reg := all.Registry()
	k, err := reg.Kind(task.KindResolve)
	if err != nil {
		t.Fatal(err)
	}
	spec := &taskv1.ResolveSpec{TaskId: id, LeafHash: make([]byte, 32), As: taskv1.ResolveAs_RESOLVE_AS_ACCEPT}
	p, err := reg.Plan(t.Context(), fakehost.New().Hosts(nil).Prober(), k, spec)
	if err != nil || len(p.GetSteps()) > 0 || len(k.Locks(spec)) > 0 {
		t.Errorf("plan %v, %v, locks %v", p, err, k.Locks(spec))
	}
}

func FuzzResolve(f *testing.F) {
	tasktest.FuzzValidate(f, all.Registry(), task.KindResolve,
		&taskv1.ResolveSpec{TaskId: id, LeafHash: make([]byte, 32), As: taskv1.ResolveAs_RESOLVE_AS_ABANDON})
}
