package mig

import (
	"context"
	"errors"
	"io/fs"
	"slices"

	migv1 "github.com/gpuaas/millwright/proto/millwright/mig/v1"
	"github.com/gpuaas/millwright/tasks/gpu/selector"
	"github.com/gpuaas/millwright/tasks/host"
)

// finder reads the GPUs of one entry.
type finder struct {
	list []host.GPU
	own  bool   // those that are gone or do not answer are left out
	key  string // the intent's
	// missing says what was left out.
	missing error
}

// states reads the GPUs of one entry. Of all GPUs, those without MIG are left out;
// a GPU that is named has to know it. Otherwise nothing is left out because it is
// broken.
func (f *finder) states(ctx context.Context, h host.Reader, l *migv1.GpuLayout) ([]host.GPUState, error) {
	chosen, err := f.meant(ctx, h, l.GetSelect())
	if err != nil {
		return nil, err
	}
	var out []host.GPUState
	for _, g := range chosen {
		if g.Problem != "" || g.UUID == "" {
			if err := f.lacks(unfit("GPU %d (%s at %s) does not answer, and nothing is done to the others: %s", g.Index, g.UUID, g.PCI, g.Problem)); err != nil {
				return nil, err
			}
			continue
		}
		st, err := h.GPUState(ctx, g.UUID)
		switch {
		case errors.Is(err, host.ErrGPULost), errors.Is(err, host.ErrGPUUnknown):
			if err := f.lacks(unfit("GPU %d (%s) cannot be read, and nothing is done to the others: %w", g.Index, g.UUID, err)); err != nil {
				return nil, err
			}
		case err != nil:
			return nil, err
		case st.Capable:
			out = append(out, st)
		case l.GetOff() || l.GetSelect().GetAll() && !selector.ByIndex(l.GetSelect()):
			// It has no MIG, and so none is on.
		default:
			return nil, unfit("GPU %d (%s, %s) has no MIG", g.Index, g.Name, g.UUID)
		}
	}
	return out, nil
}

// lacks notes what is left out, or returns it where nothing may be.
func (f *finder) lacks(err error) error {
	if !f.own {
		return err
	}
	f.missing = errors.Join(f.missing, err)
	return nil
}

// meant finds the GPUs that a selector names.
func (f *finder) meant(ctx context.Context, h host.Reader, sel *migv1.GpuSelector) ([]host.GPU, error) {
	if !f.own {
		return selector.Meant(f.list, sel)
	}
	there, missing := selector.There(f.list, sel)
	f.missing = errors.Join(f.missing, missing)
	if there == nil {
		return nil, nil
	}
	if selector.ByIndex(sel) {
		if err := f.steady(ctx, h); err != nil {
			return nil, err
		}
	}
	return selector.Meant(f.list, there)
}

// steady returns nil when indices mean the GPUs that they meant: each that the
// intent has is there. With one that is gone they may mean others, on which the
// layout would take what nobody asked to be taken.
func (f *finder) steady(ctx context.Context, h host.Reader) error {
	names, err := h.ReadDir(ctx, ownerDir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for _, uuid := range names {
		if slices.ContainsFunc(f.list, func(g host.GPU) bool { return g.UUID == uuid }) {
			continue
		}
		key, err := ownerOf(ctx, h, uuid)
		if err != nil {
			return err
		}
		if key == f.key {
			return unfit("the spec names GPUs by index, and %s, which it gave a layout, is gone: the indices may mean others now: name them by uuids, or remove %s", uuid, ownerFile(uuid))
		}
	}
	return nil
}
