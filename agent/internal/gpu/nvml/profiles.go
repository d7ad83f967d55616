//go:build cgo

package nvml

import (
	"slices"
	"strings"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
)

// attributes are what NVML's enumeration of profiles says besides slices: with
// the media engines (me), with all of them (me.all), with graphics (gfx), and
// without media engines.
var attributes = map[int]struct{ with, without []string }{
	gonvml.GPU_INSTANCE_PROFILE_1_SLICE_REV1:   {with: []string{"me"}},
	gonvml.GPU_INSTANCE_PROFILE_2_SLICE_REV1:   {with: []string{"me"}},
	gonvml.GPU_INSTANCE_PROFILE_1_SLICE_GFX:    {with: []string{"gfx"}},
	gonvml.GPU_INSTANCE_PROFILE_2_SLICE_GFX:    {with: []string{"gfx"}},
	gonvml.GPU_INSTANCE_PROFILE_3_SLICE_GFX:    {with: []string{"gfx"}},
	gonvml.GPU_INSTANCE_PROFILE_4_SLICE_GFX:    {with: []string{"gfx"}},
	gonvml.GPU_INSTANCE_PROFILE_1_SLICE_NO_ME:  {without: []string{"me"}},
	gonvml.GPU_INSTANCE_PROFILE_2_SLICE_NO_ME:  {without: []string{"me"}},
	gonvml.GPU_INSTANCE_PROFILE_1_SLICE_ALL_ME: {with: []string{"me.all"}},
	gonvml.GPU_INSTANCE_PROFILE_2_SLICE_ALL_ME: {with: []string{"me.all"}},
}

// profiles are the GPU instances that a GPU offers, by their id. An error of one
// profile leaves out no other.
func (l *Library) profiles(d *device) []*gpuv1.MigProfile {
	var out []*gpuv1.MigProfile
	for number := range gonvml.GPU_INSTANCE_PROFILE_COUNT {
		info, ret := l.profile(d, number)
		if ret != gonvml.SUCCESS {
			continue // not a profile of this GPU
		}
		name, _ := call(l, "DeviceGetGpuInstanceProfileInfoV", func() (string, gonvml.Return) {
			v2, ret := l.api.DeviceGetGpuInstanceProfileInfoV(d.handle, number).V2()
			return strings.TrimPrefix(text(v2.Name[:]), "MIG "), ret
		})
		p := &gpuv1.MigProfile{
			Id: info.Id, Name: name, Slices: info.SliceCount, MemoryMib: info.MemorySizeMB, Most: info.InstanceCount,
			With: attributes[number].with, Without: attributes[number].without,
		}
		places, ret := call(l, "DeviceGetGpuInstancePossiblePlacements", func() ([]gonvml.GpuInstancePlacement, gonvml.Return) {
			return l.api.DeviceGetGpuInstancePossiblePlacements(d.handle, &info)
		})
		p.Assumed = ret != gonvml.SUCCESS
		for _, at := range places {
			p.Placements = append(p.Placements, &gpuv1.Placement{Start: at.Start, Size: at.Size})
		}
		out = append(out, p)
	}
	assume(out)
	slices.SortFunc(out, func(a, b *gpuv1.MigProfile) int { return int(a.Id) - int(b.Id) })
	return out
}

// profile asks for a profile by NVML's enumeration, which is not its id.
func (l *Library) profile(d *device, number int) (gonvml.GpuInstanceProfileInfo, gonvml.Return) {
	return call(l, "DeviceGetGpuInstanceProfileInfo", func() (gonvml.GpuInstanceProfileInfo, gonvml.Return) {
		return l.api.DeviceGetGpuInstanceProfileInfo(d.handle, number)
	})
}

// assume gives placements to profiles of which the driver told none, as it does
// while MIG mode is off. A GPU has as many memory slices as the next power of two
// from its compute slices on (NVIDIA MIG user guide, "GPU Instance Placement":
// eight for seven, four for four); a profile takes of them what it takes of the
// memory, and begins where a part of its size does. What the driver then says
// counts: a create at a place that is none fails, and nothing was changed.
func assume(all []*gpuv1.MigProfile) {
	var compute uint32
	var memory uint64
	for _, p := range all {
		compute, memory = max(compute, p.Slices), max(memory, p.MemoryMib)
	}
	slices := uint32(1)
	for slices < compute {
		slices *= 2
	}
	for _, p := range all {
		if !p.Assumed || memory == 0 {
			continue
		}
		size := uint32(1)
		for size < slices && uint64(size)*memory*3 < p.MemoryMib*uint64(slices)*2 { // the nearest power of two
			size *= 2
		}
		for start := uint32(0); start+size <= slices && len(p.Placements) < int(most(p, slices, compute, size)); start += size {
			p.Placements = append(p.Placements, &gpuv1.Placement{Start: start, Size: size})
		}
	}
}

// most is how many places a profile has: as many as the compute slices allow,
// whatever its own limit (one with media engines may lie anywhere, and once).
func most(p *gpuv1.MigProfile, slices, compute, size uint32) uint32 {
	if size == slices {
		return 1
	}
	byCompute := compute / max(p.Slices, 1)
	if p.Slices == 1 && size > 1 {
		byCompute = slices / size
	}
	return min(byCompute, slices/size)
}
