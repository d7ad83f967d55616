//go:build cgo

package nvml

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpuaas/millwright/agent/internal/clock"
	"github.com/gpuaas/millwright/agent/internal/gpu/gputest"
	"github.com/gpuaas/millwright/test/fakenvml"
)

// TestLayout makes a MIG layout on a node of test/fakenvml, and holds the
// inventory against the node's own file. The library is loaded by a process of
// its own: two of them in one would share their symbols.
func TestLayout(t *testing.T) {
	if path := os.Getenv("LAYOUT_STATE"); path != "" {
		layout(t, path)
		return
	}
	lib, err := fakenvml.Build(t.Context(), fakenvml.Variant{})
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "state")
	n, err := lib.NewNode(t.Context(), path, "H100", "A100-80")
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestLayout$", "-test.v")
	cmd.Env = append(append(os.Environ(), n.Env()...), "LAYOUT_STATE="+path, "LAYOUT_LIBRARY="+filepath.Join(lib.Dir, "libnvidia-ml.so.1"))
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}

func layout(t *testing.T, path string) {
	l := New(clock.System{})
	if n, err := l.Start(os.Getenv("LAYOUT_LIBRARY")); err != nil || n != 2 {
		t.Fatalf("%d GPUs, %v", n, err)
	}
	d := l.all()[0].handle
	if active, ret := d.SetMigMode(gonvml.DEVICE_MIG_ENABLE); ret != gonvml.SUCCESS || active != gonvml.SUCCESS {
		t.Fatalf("MIG mode: %v, %v", active, ret)
	}
	for _, p := range []gonvml.GpuInstancePlacement{{Start: 4, Size: 4}, {Start: 0, Size: 1}} {
		id := map[uint32]uint32{4: 9, 1: 19}[p.Size] // the driver's numbers of 3g and 1g
		gi, ret := d.CreateGpuInstanceWithPlacement(&gonvml.GpuInstanceProfileInfo{Id: id}, &p)
		if ret != gonvml.SUCCESS {
			t.Fatalf("instance at %d: %v", p.Start, ret)
		}
		if p.Size == 4 {
			if _, ret := gi.CreateComputeInstance(&gonvml.ComputeInstanceProfileInfo{Id: 2}); ret != gonvml.SUCCESS {
				t.Fatalf("compute instance: %v", ret)
			}
		}
	}
	inv, err := l.Inventory()
	if err != nil {
		t.Fatal(err)
	}
	gputest.Whole(t, inv)
	lib := &fakenvml.Library{Dir: filepath.Dir(os.Getenv("LAYOUT_LIBRARY"))}
	state, err := lib.OpenNode(path).State(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	got, want := inv.GetGpus()[0].GetGpuInstances(), state.GPUs[0].Instances
	if len(got) != 2 || len(want) != 2 || !inv.GetGpus()[0].GetMigEnabled() || len(inv.GetGpus()[1].GetGpuInstances()) != 0 {
		t.Fatalf("%d instances, the node has %d: %v", len(got), len(want), inv.GetGpus()[0])
	}
	found := 0
	for _, g := range got {
		for _, w := range want {
			if g.GetId() != w.ID {
				continue
			}
			found++
			if g.GetPlacement().GetStart() != w.Start || g.GetPlacement().GetSize() != w.Size || g.GetProfile() != w.Profile || len(g.GetComputeInstances()) != len(w.Compute) {
				t.Errorf("%v, the node has %+v", g, w)
			}
			for i, c := range g.GetComputeInstances() {
				if c.GetUuid() != w.Compute[i].UUID || c.GetUuid() == "" || c.GetId() != w.Compute[i].ID {
					t.Errorf("%v, the node has %+v", c, w.Compute[i])
				}
			}
		}
	}
	if found != 2 {
		t.Errorf("%v, the node has %+v", got, want)
	}
}
