package gpus

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/gpuaas/millwright/agent/internal/child"
	"github.com/gpuaas/millwright/tasks/host"
)

// generate makes the specification, with NVIDIA's generator where it is: that
// one knows the driver's libraries too, which a container needs unless its image
// has those of this very driver. Ours names the device nodes.
func (s *Set) generate(ctx context.Context, want map[string][]string) (*spec, error) {
	program, err := s.cfg.Find(ctx, "nvidia-ctk")
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return s.own(want)
	case err != nil:
		return nil, err
	}
	vendor, class, _ := strings.Cut(host.CDIKind, "/")
	res, err := s.cfg.Children.Run(ctx, child.Spec{
		Argv: []string{program, "cdi", "generate", "--format=json", "--vendor=" + vendor, "--class=" + class, "--device-name-strategy=uuid"},
		// It asks the driver as well, and may hang in it.
		Timeout: s.limit(ctkTimeout), Key: "gpu", MaxOutput: largest, Environment: s.cfg.Environment,
	})
	if err != nil {
		return nil, ended(ctx, err)
	}
	if res.ExitCode != 0 {
		return nil, fmt.Errorf("%s: exit code %d: %.500s", program, res.ExitCode, res.Stderr)
	}
	return checked(res.Stdout, want)
}

// checked takes from what NVIDIA's generator wrote the devices that are wanted,
// without the one that stands for all of them. One that it left out is an error.
func checked(b []byte, want map[string][]string) (*spec, error) {
	out := &spec{}
	if err := json.Unmarshal(b, out); err != nil {
		return nil, fmt.Errorf("what nvidia-ctk wrote: %w: %w", errSpec, err)
	}
	if out.Kind != host.CDIKind {
		return nil, fmt.Errorf("what nvidia-ctk wrote is of kind %q: %w", out.Kind, errSpec)
	}
	out.Devices = slices.DeleteFunc(out.Devices, func(d device) bool { return want[d.Name] == nil })
	for name := range want {
		if !slices.ContainsFunc(out.Devices, func(d device) bool { return d.Name == name }) {
			return nil, fmt.Errorf("nvidia-ctk left out %s, which the driver has: %w", name, errSpec)
		}
	}
	out.Version = max(out.Version, cdiVersion)
	return out, nil
}

// own names the device nodes of each device, and those that all need.
func (s *Set) own(want map[string][]string) (*spec, error) {
	out := &spec{Version: cdiVersion, Kind: host.CDIKind, Devices: []device{}}
	names := make([]string, 0, len(want))
	for name := range want {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		b, err := json.Marshal(edits{Nodes: nodes(want[name])})
		if err != nil {
			return nil, err
		}
		out.Devices = append(out.Devices, device{Name: name, Edits: b})
	}
	var shared []string
	for _, name := range []string{"nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset"} {
		if p := filepath.Join(s.cfg.Dev, name); exists(p) {
			shared = append(shared, p)
		}
	}
	// So that NVIDIA's own runtime, if it is there, adds nothing to it.
	b, err := json.Marshal(edits{Nodes: nodes(shared), Env: []string{"NVIDIA_VISIBLE_DEVICES=void"}})
	out.Edits = b
	return out, err
}

func nodes(paths []string) []node {
	var out []node
	for _, p := range paths {
		out = append(out, node{p})
	}
	return out
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// makeNodes has the nodes made that are missing, as those of new instances are:
// nvidia-smi makes them, through a setuid program that the agent's own children
// may not start.
func (s *Set) makeNodes(ctx context.Context, want map[string][]string) error {
	missing := func() string {
		for _, paths := range want {
			for _, p := range paths {
				if !exists(p) {
					return p
				}
			}
		}
		return ""
	}
	if missing() == "" {
		return nil
	}
	program, err := s.cfg.Find(ctx, "nvidia-smi")
	if err != nil {
		return fmt.Errorf("make %s: %w", missing(), err)
	}
	release, err := s.take(ctx)
	if err != nil {
		return err
	}
	defer release()
	if _, err := s.cfg.Changes.Change(ctx, "make device nodes", []string{program, "-L"}, s.cfg.Environment, s.limit(changeTimeout)); err != nil {
		return fmt.Errorf("make %s: %w", missing(), err)
	}
	if p := missing(); p != "" {
		return fmt.Errorf("%s is not there, and nvidia-smi did not make it: %w", p, fs.ErrNotExist)
	}
	return nil
}
