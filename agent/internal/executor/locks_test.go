package executor_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuaas/millwright/agent/internal/executor"
	"github.com/gpuaas/millwright/tasks"
)

func TestConflict(t *testing.T) {
	x := func(name string) tasks.Lock { return tasks.Lock{Name: name} }
	s := func(name string) tasks.Lock { return tasks.Lock{Name: name, Shared: true} }
	for _, tc := range []struct {
		a, b tasks.Lock
		want bool
	}{
		{x("mount:/data"), x("mount:/data"), true},
		{x("mount:/data"), x("mount:/data/x"), true},
		{x("mount:/data"), x("mount:/database"), false},
		{x("mount:/data"), x("mount:/other"), false},
		{x("mount:/"), x("mount:/data"), true},
		{x("mount:/"), x("unit:a.service"), false},
		{s("mount:/data"), s("mount:/data"), false},
		{s("mount:/data"), x("mount:/data/x"), true},
		{s("mount:/data"), s("mount:/data/x"), false},
		{x("gpu:*"), x("gpu:3"), true},
		{x("gpu:3"), x("gpu:4"), false},
		{x("gpu:3"), x("gpu:33"), false},
		{x("node"), x("anything"), true},
		{s("node"), s("anything"), false},
		{s("node"), x("anything"), true},
	} {
		for _, pair := range [][2]tasks.Lock{{tc.a, tc.b}, {tc.b, tc.a}} {
			if got := executor.Conflict(pair[0], pair[1]); got != tc.want {
				t.Errorf("%v and %v: conflict = %v, want %v", pair[0], pair[1], got, tc.want)
			}
		}
	}
}

// TestLockFairness lets no stream of shared requests starve an exclusive one:
// those that asked after it wait for its end.
func TestLockFairness(t *testing.T) {
	s, x := tasks.Lock{Name: "a", Shared: true}, tasks.Lock{Name: "a"}
	got := executor.LockTurns([]tasks.Lock{s, s, x, s, s, x}, []int{0, 1, 2, 3, 4})
	// Who was given the locks so far, those that have ended among them.
	want := [][]int{{0, 1}, {0, 1, 2}, {0, 1, 2, 3, 4}, {0, 1, 2, 3, 4}, {0, 1, 2, 3, 4, 5}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("given (-want +got):\n%s", diff)
	}
}
