package fakenvml_test

import (
	"encoding/json"
	"fmt"
	"slices"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// offered is a profile as the library tells it.
type offered struct {
	ID, Slices, Most int
	Size             uint32
	Starts           []uint32
}

// reached is what a GPU can come to, from nothing, by whatever creations and in
// whatever order the library lets happen.
type reached struct {
	Profiles []offered
	Counts   [][]int // of instances, by profile
	Layouts  int
	Problem  string
}

// explore is a walk over all layouts. It knows nothing of slices: that a layout can
// be is known because the library has made it.
type explore struct {
	device nvml.Device
	out    reached
	now    []string
	counts []int
	seen   map[string]bool
	known  map[string]bool
}

func exploreLayouts(d nvml.Device) reply {
	e := &explore{device: d, seen: map[string]bool{}, known: map[string]bool{}}
	e.profiles()
	e.counts = make([]int, len(e.out.Profiles))
	e.visit()
	e.out.Layouts = len(e.seen)
	b, err := json.Marshal(e.out)
	if err != nil {
		e.problem("encode: %v", err)
	}
	return reply{Text: string(b)}
}

func (e *explore) problem(format string, args ...any) {
	if e.out.Problem == "" {
		e.out.Problem = fmt.Sprintf(format, args...)
	}
}

// profiles asks the library for all that it offers, and that it refuses every
// place that it does not name.
func (e *explore) profiles() {
	for number := range nvml.GPU_INSTANCE_PROFILE_COUNT {
		info, r := e.device.GetGpuInstanceProfileInfo(number)
		if r != nvml.SUCCESS {
			continue
		}
		places, r := e.device.GetGpuInstancePossiblePlacements(&info)
		if r != nvml.SUCCESS || len(places) == 0 {
			e.problem("placements of profile %d: %d", info.Id, r)
			continue
		}
		p := offered{ID: int(info.Id), Slices: int(info.SliceCount), Most: int(info.InstanceCount), Size: places[0].Size}
		for _, at := range places {
			p.Starts = append(p.Starts, at.Start)
		}
		for start := range uint32(16) {
			if slices.Contains(p.Starts, start) {
				continue
			}
			if gi, r := e.device.CreateGpuInstanceWithPlacement(&info, &nvml.GpuInstancePlacement{Start: start, Size: p.Size}); r == nvml.SUCCESS {
				e.problem("profile %d was made at %d, which is none of %v", p.ID, start, p.Starts)
				if r := gi.Destroy(); r != nvml.SUCCESS {
					e.problem("it cannot be destroyed: %v", r)
				}
			}
		}
		e.out.Profiles = append(e.out.Profiles, p)
	}
}

// visit notes what is there, and goes on to all that one more instance makes.
func (e *explore) visit() {
	key := fmt.Sprint(slices.Sorted(slices.Values(e.now)))
	if e.seen[key] || e.out.Problem != "" {
		return
	}
	e.seen[key] = true
	if count := fmt.Sprint(e.counts); !e.known[count] {
		e.known[count] = true
		e.out.Counts = append(e.out.Counts, slices.Clone(e.counts))
	}
	for i, p := range e.out.Profiles {
		info := nvml.GpuInstanceProfileInfo{Id: uint32(p.ID)}
		more := false
		for _, start := range p.Starts {
			gi, r := e.device.CreateGpuInstanceWithPlacement(&info, &nvml.GpuInstancePlacement{Start: start, Size: p.Size})
			if r == nvml.ERROR_INSUFFICIENT_RESOURCES {
				continue
			}
			if r != nvml.SUCCESS {
				e.problem("create %d at %d beside %s: %d", p.ID, start, key, r)
				return
			}
			more = true
			e.now = append(e.now, fmt.Sprintf("%d@%d", p.ID, start))
			e.counts[i]++
			e.visit()
			e.counts[i]--
			e.now = e.now[:len(e.now)-1]
			if r := gi.Destroy(); r != nvml.SUCCESS {
				e.problem("destroy %d at %d: %d", p.ID, start, r)
				return
			}
		}
		if left, r := e.device.GetGpuInstanceRemainingCapacity(&info); r != nvml.SUCCESS || (left > 0) != more {
			e.problem("with %s there is room for %d of profile %d (%d), and one more could be made: %t", key, left, p.ID, r, more)
		}
	}
}
