package mig

import (
	"context"
	"errors"

	migv1 "github.com/gpuaas/millwright/proto/millwright/mig/v1"
	"github.com/gpuaas/millwright/tasks/gpu/selector"
	"github.com/gpuaas/millwright/tasks/host"
)

// states reads the GPUs of one entry. Of all GPUs, those without MIG are left out;
// a GPU that is named has to know it. Nothing is left out because it is broken.
func states(ctx context.Context, h host.Reader, list []host.GPU, l *migv1.GpuLayout) ([]host.GPUState, error) {
	chosen, err := selector.Meant(list, l.GetSelect())
	if err != nil {
		return nil, err
	}
	var out []host.GPUState
	for _, g := range chosen {
		if g.Problem != "" || g.UUID == "" {
			return nil, unfit("GPU %d (%s at %s) does not answer, and nothing is done to the others: %s", g.Index, g.UUID, g.PCI, g.Problem)
		}
		st, err := h.GPUState(ctx, g.UUID)
		switch {
		case errors.Is(err, host.ErrGPULost), errors.Is(err, host.ErrGPUUnknown):
			return nil, unfit("GPU %d (%s) cannot be read, and nothing is done to the others: %w", g.Index, g.UUID, err)
		case err != nil:
			return nil, err
		case st.Capable:
			out = append(out, st)
		case l.GetOff() || l.GetSelect().GetAll() && len(l.GetSelect().GetIndices())+len(l.GetSelect().GetDriverIndices()) == 0:
			// It has no MIG, and so none is on.
		default:
			return nil, unfit("GPU %d (%s, %s) has no MIG", g.Index, g.Name, g.UUID)
		}
	}
	return out, nil
}
