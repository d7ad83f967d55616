package fakenvml_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// TestPersistenceHolds: with nobody there, persistence mode alone keeps a GPU
// from being reset.
func TestPersistenceHolds(t *testing.T) {
	n := newNode(t, "A100-80")
	must(t, n.Set(t.Context(), 0, "persistence=1", "mig_pending=1"))
	if err := n.Reset(t.Context(), 0); err == nil {
		t.Error("a GPU in persistence mode was reset")
	}
	must(t, n.Set(t.Context(), 0, "persistence=0"))
	must(t, n.Reset(t.Context(), 0))
	c := startClient(t, n)
	c.want("init", 0, nil, nvml.SUCCESS)
	c.want("mig", 0, nil, nvml.SUCCESS, 1, 1)
}

// TestMonitorHolds: a daemon that only looks keeps a mode from becoming active,
// and the driver does not name it.
func TestMonitorHolds(t *testing.T) {
	n := newNode(t, "H100")
	monitor, err := n.Hold(t.Context(), 0)
	must(t, err)
	c := startClient(t, n)
	c.want("init", 0, nil, nvml.SUCCESS)
	c.want("set-mig", 0, []uint32{1}, nvml.SUCCESS, int64(nvml.ERROR_IN_USE))
	c.want("mig", 0, nil, nvml.SUCCESS, 0, 1)
	must(t, monitor.Process.Kill())
	monitor.Wait() //nolint:errcheck // it was killed
	c.want("set-mig", 0, []uint32{1}, nvml.SUCCESS, 0)
	c.want("mig", 0, nil, nvml.SUCCESS, 1, 1)
}

// TestInertMode: a mode that is taken and never becomes active, whatever is done.
func TestInertMode(t *testing.T) {
	for _, product := range []string{"A100-80", "H100"} {
		n := newNode(t, product)
		must(t, n.Set(t.Context(), 0, "mig_inert=1"))
		c := startClient(t, n)
		c.want("init", 0, nil, nvml.SUCCESS)
		c.want("set-mig", 0, []uint32{1}, nvml.SUCCESS, int64(nvml.ERROR_RESET_REQUIRED))
		c.want("shutdown", 0, nil, nvml.SUCCESS)
		must(t, n.Reset(t.Context(), 0))
		s, err := n.State(t.Context())
		must(t, err)
		if v := s.GPUs[0].Values; v["mig_current"] != 0 {
			t.Errorf("%s: MIG became active: %v", product, v)
		}
	}
}

// TestGone: a GPU that is lost in the middle, and one whose UUID vanishes.
func TestGone(t *testing.T) {
	n := newNode(t, "H100", "H100")
	must(t, n.Set(t.Context(), 0, "mig_current=1", "mig_pending=1"))
	c := startClient(t, n)
	c.want("init", 0, nil, nvml.SUCCESS)
	c.want("create-gi", 0, []uint32{9, 0, 4}, nvml.SUCCESS, 1)
	must(t, n.Set(t.Context(), 0, "lost=1"))
	c.want("create-gi", 0, []uint32{9, 4, 4}, nvml.ERROR_GPU_IS_LOST)
	c.want("create-gi", 1, []uint32{9, 4, 4}, nvml.ERROR_NOT_SUPPORTED) // the other one answers
	must(t, n.Set(t.Context(), 0, "present=0"))
	c.want("count", 0, nil, nvml.SUCCESS, 1)
	c2 := startClient(t, n)
	c2.want("init", 0, nil, nvml.SUCCESS)
	c2.want("create-gi", 1, []uint32{9, 4, 4}, nvml.ERROR_INVALID_ARGUMENT) // there is no second one
}

// TestDeviceNodes: who opens a GPU has its node open, and only that one; a new
// instance has nodes once nvidia-smi has listed the GPUs.
func TestDeviceNodes(t *testing.T) {
	n := newNode(t, "H100", "H100")
	dir := filepath.Dir(n.Env()[1][len("FAKENVML_STATE="):])
	must(t, os.Mkdir(filepath.Join(dir, "dev"), 0o755))
	list := func() {
		t.Helper()
		must(t, n.Command(t.Context(), "nvidia-smi", "-L").Run())
	}
	list()
	holder, err := n.Hold(t.Context(), 1)
	must(t, err)
	var open []string
	fds, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", holder.Process.Pid))
	must(t, err)
	for _, fd := range fds {
		target, _ := os.Readlink(fd)
		open = append(open, target)
	}
	must(t, holder.Process.Kill())
	holder.Wait() //nolint:errcheck // it was killed
	if !slices.Contains(open, filepath.Join(dir, "dev/nvidia1")) || slices.Contains(open, filepath.Join(dir, "dev/nvidia0")) {
		t.Errorf("the holder of GPU 1 has open: %v", open)
	}
	must(t, n.Set(t.Context(), 0, "mig_current=1", "mig_pending=1"))
	c := startClient(t, n)
	c.want("init", 0, nil, nvml.SUCCESS)
	c.want("create-gi", 0, []uint32{9, 0, 4}, nvml.SUCCESS, 1)
	c.want("create-ci", 0, []uint32{1, 2}, nvml.SUCCESS, 0)
	caps := func() int {
		all, err := filepath.Glob(filepath.Join(dir, "dev/nvidia-caps/*"))
		must(t, err)
		return len(all)
	}
	if caps() != 0 {
		t.Error("the nodes were made before anyone asked")
	}
	list()
	b, err := os.ReadFile(filepath.Join(dir, "dev/nvidia-caps/nvidia-cap12"))
	if err != nil || len(b) != 0 || caps() != 2 {
		t.Errorf("the node of instance 1: %v, %d nodes", err, caps())
	}
}
