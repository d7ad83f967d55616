package containerd

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"

	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/pkg/oci"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpuaas/millwright/tasks/host"
)

// edits are what a CDI specification may want of a container. What is not here
// is an error: half of a device is none.
type edits struct {
	Env    []string     `json:"env"`
	Nodes  []deviceNode `json:"deviceNodes"`
	Mounts []cdiMount   `json:"mounts"`
	Hooks  []hook       `json:"hooks"`
}

type deviceNode struct {
	Path        string  `json:"path"`
	HostPath    string  `json:"hostPath"`
	Permissions string  `json:"permissions"`
	Type        string  `json:"type"`  // as the node itself is
	Major       *int64  `json:"major"` // so too
	Minor       *int64  `json:"minor"` // so too
	FileMode    *uint32 `json:"fileMode"`
	UID         *uint32 `json:"uid"`
	GID         *uint32 `json:"gid"`
}

type cdiMount struct {
	HostPath      string   `json:"hostPath"`
	ContainerPath string   `json:"containerPath"`
	Options       []string `json:"options"`
	Type          string   `json:"type"`
}

type hook struct {
	Name    string   `json:"hookName"`
	Path    string   `json:"path"`
	Args    []string `json:"args"`
	Env     []string `json:"env"`
	Timeout *int     `json:"timeout"`
}

// devices returns what gives a container its devices, as they are now.
func (r *Runtime) devices(ctx context.Context, names []string) ([]oci.SpecOpts, error) {
	if len(names) == 0 {
		return nil, nil
	}
	if r.cfg.Devices == nil {
		return nil, fmt.Errorf("devices %v: %w", names, host.ErrGPUUnknown)
	}
	all, err := r.cfg.Devices.CDIEdits(ctx, names)
	if err != nil {
		return nil, err
	}
	var opts []oci.SpecOpts
	for _, raw := range all {
		var e edits
		dec := json.NewDecoder(bytes.NewReader(raw))
		dec.DisallowUnknownFields()
		if err := dec.Decode(&e); err != nil {
			return nil, fmt.Errorf("read what the CDI specification wants for %v: %w", names, err)
		}
		opts = append(opts, e.options()...)
	}
	return opts, nil
}

func (e edits) options() []oci.SpecOpts {
	opts := []oci.SpecOpts{oci.WithEnv(e.Env)}
	for _, n := range e.Nodes {
		from, access := n.HostPath, n.Permissions
		if from == "" {
			from = n.Path
		}
		if access == "" {
			access = "rwm"
		}
		opts = append(opts, oci.WithDevices(from, n.Path, access))
	}
	var mounts []specs.Mount
	for _, m := range e.Mounts {
		kind := m.Type
		if kind == "" {
			kind = "bind"
		}
		mounts = append(mounts, specs.Mount{Type: kind, Source: m.HostPath, Destination: m.ContainerPath, Options: m.Options})
	}
	return append(opts, oci.WithMounts(mounts), func(_ context.Context, _ oci.Client, _ *containers.Container, s *oci.Spec) error {
		for _, h := range e.Hooks {
			if err := h.add(s); err != nil {
				return err
			}
		}
		return nil
	})
}

// add puts a hook where the runtime runs it.
func (h hook) add(s *oci.Spec) error {
	if s.Hooks == nil {
		s.Hooks = &specs.Hooks{}
	}
	to := map[string]*[]specs.Hook{
		"createRuntime": &s.Hooks.CreateRuntime, "createContainer": &s.Hooks.CreateContainer, "startContainer": &s.Hooks.StartContainer,
		"poststart": &s.Hooks.Poststart, "poststop": &s.Hooks.Poststop,
	}[h.Name]
	if to == nil {
		return fmt.Errorf("the CDI specification has a hook %q, which is none that is run here", h.Name)
	}
	*to = append(*to, specs.Hook{Path: h.Path, Args: h.Args, Env: h.Env, Timeout: h.Timeout})
	return nil
}
