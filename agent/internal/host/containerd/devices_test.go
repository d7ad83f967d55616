package containerd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/pkg/oci"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpuaas/millwright/tasks/host"
)

// known are the devices of a node.
type known map[string]string

func (k known) CDIEdits(_ context.Context, names []string) ([]json.RawMessage, error) {
	var out []json.RawMessage
	for _, n := range names {
		if k[n] == "" {
			return nil, fmt.Errorf("find device %s: it is gone since a change of the GPUs: %w", n, host.ErrGPUUnknown)
		}
		out = append(out, json.RawMessage(k[n]))
	}
	return out, nil
}

// TestDevices: what a CDI specification wants is in the runtime's spec, and what
// is not known here is an error.
func TestDevices(t *testing.T) {
	r := New(Config{Devices: known{
		"gpu=all": `{"env": ["A=b"], "deviceNodes": [{"path": "/dev/nvidia7", "hostPath": "/dev/null", "permissions": "r"}, {"path": "/dev/zero"}],
"mounts": [{"hostPath": "/usr/lib/libcuda.so", "containerPath": "/lib/libcuda.so", "options": ["ro", "rbind"]}],
"hooks": [{"hookName": "createContainer", "path": "/usr/bin/nvidia-cdi-hook", "args": ["nvidia-cdi-hook", "update-ldcache"]}]}`,
		"gpu=odd":  `{"netDevices": []}`,
		"gpu=hook": `{"hooks": [{"hookName": "prestart", "path": "/bin/true"}]}`,
	}})
	made := func(names ...string) (*oci.Spec, error) {
		opts, err := r.devices(t.Context(), names)
		s := &oci.Spec{Process: &specs.Process{}, Linux: &specs.Linux{Resources: &specs.LinuxResources{}}}
		for _, o := range opts {
			if err == nil {
				err = o(t.Context(), nil, &containers.Container{}, s)
			}
		}
		return s, err
	}
	s, err := made("gpu=all")
	if err != nil {
		t.Fatal(err)
	}
	var devices []string
	for _, d := range s.Linux.Devices {
		devices = append(devices, fmt.Sprintf("%s %d:%d", d.Path, d.Major, d.Minor))
	}
	if want := []string{"/dev/nvidia7 1:3", "/dev/zero 1:5"}; !slices.Equal(devices, want) {
		t.Errorf("devices %v, want %v", devices, want)
	}
	var allowed []string
	for _, a := range s.Linux.Resources.Devices {
		allowed = append(allowed, fmt.Sprintf("%t %d:%d %s", a.Allow, *a.Major, *a.Minor, a.Access))
	}
	if want := []string{"true 1:3 r", "true 1:5 rwm"}; !slices.Equal(allowed, want) {
		t.Errorf("allowed %v, want %v", allowed, want)
	}
	if !slices.Contains(s.Process.Env, "A=b") || len(s.Mounts) != 1 || s.Mounts[0].Type != "bind" || s.Mounts[0].Destination != "/lib/libcuda.so" {
		t.Errorf("environment %v, mounts %v", s.Process.Env, s.Mounts)
	}
	if h := s.Hooks.CreateContainer; len(h) != 1 || h[0].Args[1] != "update-ldcache" {
		t.Errorf("hooks %v", s.Hooks)
	}
	for name, want := range map[string]string{"gpu=odd": "netDevices", "gpu=hook": `a hook "prestart"`, "gpu=old": "it is gone since a change of the GPUs"} {
		if _, err := made(name); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", name, err, want)
		}
	}
	if _, err := New(Config{}).devices(t.Context(), []string{"gpu=all"}); !errors.Is(err, host.ErrGPUUnknown) {
		t.Errorf("without GPUs: %v", err)
	}
}
