package mig_test

import (
	"fmt"
	"testing"

	migv1 "github.com/gpuaas/millwright/proto/millwright/mig/v1"
	"github.com/gpuaas/millwright/tasks/tasktest/fakehost"
)

// TestKeepsWhatIsBusy: of the instances that could stay, those stay on which a process
// computes, wherever they are.
func TestKeepsWhatIsBusy(t *testing.T) {
	for _, busy := range [][]int{{5}, {6, 3}, {1, 4, 5}} {
		t.Run(fmt.Sprint(busy), func(t *testing.T) {
			n := fakehost.New()
			script := "dir /etc/millwright\ndir /run\ngpu add H100 GPU-0\ngpu mig GPU-0 on\n"
			for i := range 7 {
				script += fmt.Sprintf("gpu instance GPU-0 19 %d\n", i)
			}
			for _, at := range busy {
				script += fmt.Sprintf("gpu hold GPU-0 %d train 19 %d\n", 40+at, at)
			}
			if err := n.Do(script); err != nil {
				t.Fatal(err)
			}
			carry(t, n, &migv1.ConfigureSpec{Layouts: []*migv1.GpuLayout{{
				Select: &migv1.GpuSelector{Uuids: []string{"GPU-0"}}, Instances: []*migv1.Instances{{Profile: "1g.10gb", Count: 3}},
			}}})
			st, err := n.Hosts(nil).Prober().GPUState(t.Context(), "GPU-0")
			if err != nil {
				t.Fatal(err)
			}
			left, still := 0, 0
			for _, i := range st.Instances {
				left++
				if i.Busy {
					still++
				}
			}
			if left != 3 || still != len(busy) {
				t.Errorf("%d instances are left, and %d of %d busy ones: %s", left, still, len(busy), places(n)["GPU-0"])
			}
		})
	}
}
