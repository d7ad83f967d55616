package step

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/gpuaas/millwright/tasks/host"
)

// GPUGres is what Slurm is told of GPUs: whole ones by their product's first word,
// as gpu:h100:8, and MIG devices by their profile, as gpu:1g.10gb:7. A GPU that
// does not answer is left out. The order is that of the types.
func GPUGres(all []host.GPUState) string {
	count := map[string]int{}
	for _, st := range all {
		if !st.Enabled {
			count[gpuType(st.Name)]++
			continue
		}
		for _, in := range st.Instances {
			p, _ := st.Profile(in.Profile)
			for _, c := range in.Compute {
				name := p.Name
				if c.Slices < p.Slices {
					name = fmt.Sprintf("%dc.%s", c.Slices, name)
				}
				count[strings.ReplaceAll(name, "+", ".")]++
			}
		}
	}
	var out []string
	for _, t := range slices.Sorted(maps.Keys(count)) {
		out = append(out, fmt.Sprintf("gpu:%s:%d", t, count[t]))
	}
	return strings.Join(out, ",")
}

// gpuType is h100 of an NVIDIA H100 80GB HBM3.
func gpuType(name string) string {
	words := strings.FieldsFunc(strings.ToLower(strings.TrimPrefix(name, "NVIDIA ")), func(r rune) bool { return r == ' ' || r == '-' })
	if len(words) == 0 {
		return "gpu"
	}
	return words[0]
}

// GPUStates reads the GPUs of the node that answer.
func GPUStates(ctx context.Context, h host.Reader) ([]host.GPUState, error) {
	list, err := h.GPUs(ctx)
	if err != nil {
		return nil, err
	}
	var out []host.GPUState
	for _, g := range list {
		if g.Problem != "" || g.UUID == "" {
			continue
		}
		st, err := h.GPUState(ctx, g.UUID)
		switch {
		case errors.Is(err, host.ErrGPULost), errors.Is(err, host.ErrGPUUnknown): // it answers no more
		case err != nil:
			return nil, err
		default:
			out = append(out, st)
		}
	}
	return out, nil
}
