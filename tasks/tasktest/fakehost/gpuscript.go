package fakehost

import (
	"errors"
	"fmt"
	"slices"
	"strconv"

	"github.com/gpuaas/millwright/tasks/host"
)

// sevenSlices are the profiles of a GPU of seven compute slices over eight
// memory slices, by the names of a memory class.
func sevenSlices(unit uint64, one, two, four, eight int) []host.MIGProfile {
	name := func(slices, gb int) string { return fmt.Sprintf("%dg.%dgb", slices, gb) }
	each := []uint32{0, 1, 2, 3, 4, 5, 6}
	return []host.MIGProfile{
		{ID: 0, Name: name(7, eight), Slices: 7, MemoryMB: 8 * unit, Max: 1, Starts: []uint32{0}, Size: 8},
		{ID: 5, Name: name(4, four), Slices: 4, MemoryMB: 4 * unit, Max: 1, Starts: []uint32{0}, Size: 4},
		{ID: 9, Name: name(3, four), Slices: 3, MemoryMB: 4 * unit, Max: 2, Starts: []uint32{0, 4}, Size: 4},
		{ID: 14, Name: name(2, two), Slices: 2, MemoryMB: 2 * unit, Max: 3, Starts: []uint32{0, 2, 4}, Size: 2},
		{ID: 15, Name: name(1, two), Slices: 1, MemoryMB: 2 * unit, Max: 4, Starts: []uint32{0, 2, 4, 6}, Size: 2},
		{ID: 19, Name: name(1, one), Slices: 1, MemoryMB: unit, Max: 7, Starts: each, Size: 1},
		{ID: 20, Name: name(1, one) + "+me", Slices: 1, MemoryMB: unit, Max: 1, Starts: each, Size: 1, With: []string{"me"}},
	}
}

// product returns a fresh GPU. Ampere stores its mode; Hopper changes at once.
func product(name string) (*gpu, error) {
	g := &gpu{slices: 7, memory: 8, present: true, broken: map[host.MIGPlace]bool{}, fails: map[string]fault{}}
	g.Capable, g.Recovery = true, host.GPURecoveryNone
	switch name {
	case "A30":
		g.Name, g.Device, g.slices, g.memory = "NVIDIA A30", 0x20b710de, 4, 4
		each := []uint32{0, 1, 2, 3}
		g.Profiles = []host.MIGProfile{
			{ID: 0, Name: "4g.24gb", Slices: 4, MemoryMB: 24192, Max: 1, Starts: []uint32{0}, Size: 4},
			{ID: 5, Name: "2g.12gb", Slices: 2, MemoryMB: 12032, Max: 2, Starts: []uint32{0, 2}, Size: 2},
			{ID: 6, Name: "2g.12gb+me", Slices: 2, MemoryMB: 12032, Max: 1, Starts: []uint32{0, 2}, Size: 2, With: []string{"me"}},
			{ID: 14, Name: "1g.6gb", Slices: 1, MemoryMB: 5952, Max: 4, Starts: each, Size: 1},
			{ID: 21, Name: "1g.6gb+me", Slices: 1, MemoryMB: 5952, Max: 1, Starts: each, Size: 1, With: []string{"me"}},
		}
	case "A100-40":
		g.Name, g.Device, g.Profiles = "NVIDIA A100-SXM4-40GB", 0x20b010de, sevenSlices(4928, 5, 10, 20, 40)
	case "A100-80":
		g.Name, g.Device, g.Profiles = "NVIDIA A100-SXM4-80GB", 0x20b210de, sevenSlices(9856, 10, 20, 40, 80)
	case "H100":
		g.Name, g.Device, g.Resetless, g.Profiles = "NVIDIA H100 80GB HBM3", 0x233010de, true, sevenSlices(10112, 10, 20, 40, 80)
	case "H200":
		g.Name, g.Device, g.Resetless, g.Profiles = "NVIDIA H200", 0x233510de, true, sevenSlices(17792, 18, 35, 71, 141)
	case "B200":
		g.Name, g.Device, g.Resetless, g.Profiles = "NVIDIA B200", 0x290110de, true, sevenSlices(22784, 23, 45, 90, 180)
	case "GH200":
		g.Name, g.Device, g.Resetless, g.Profiles = "NVIDIA GH200 480GB", 0x234210de, true, sevenSlices(12032, 12, 24, 48, 96)
	case "L40S":
		g.Name, g.Device, g.Capable = "NVIDIA L40S", 0x26b910de, false
	default:
		return nil, fmt.Errorf("unknown GPU %s", name)
	}
	return g, nil
}

// doGPU changes a GPU behind the agent's back:
//
//	add PRODUCT UUID: A30, A100-40, A100-80, H100, H200, B200, GH200, L40S
//	pending UUID on|off: a mode that was stored
//	mig UUID on|off                 instance UUID PROFILE START [SLICES|none]
//	hold UUID PID COMMAND [PROFILE START]: a process, on an instance
//	free UUID                       persistence UUID on|off
//	virtual UUID: no reset          inert UUID: no mode becomes active
//	lies UUID: a reset does nothing broken UUID PROFILE START
//	lose UUID                       gone UUID                   deaf UUID
//	well UUID: none of those        stuck UUID: a reset is required
//	link UUID UUID...               recovery UUID ACTION
//	fail UUID METHOD N in_use|unsupported|resources|permission|lost|unresponsive|reset
//	incurable UUID ACTION: what the driver asks for after a reset, too
//	health UUID|node CODE STATE SEVERITY REASON MESSAGE: what the health rules say
//	intent KEY PROBLEM: an intent, and why it does not hold
//	blind: nobody looks after GPUs
//	unload: the driver              reload: it is loaded again
//	publish: the CDI specification
func (n *Node) doGPU(verb string, a []string) error {
	switch {
	case verb == "add" && len(a) == 2:
		g, err := product(a[0])
		if err != nil {
			return err
		}
		i := len(n.gpus.all)
		g.UUID, g.PCI, g.Minor = a[1], fmt.Sprintf("0000:%02x:00.0", 0x1b+0x0d*i), i
		n.gpus.all = append(n.gpus.all, g)
		return nil
	case verb == "unload", verb == "reload":
		n.gpus.unload = verb == "unload"
		for _, g := range n.gpus.all {
			g.anew(g.Resetless)
		}
		return nil
	case verb == "blind":
		n.gpus.blind = true
		return nil
	case verb == "intent" && len(a) == 2:
		n.gpus.wants = append(n.gpus.wants, host.GPUIntent{Key: a[0], Problem: a[1]})
		return nil
	case verb == "health":
		return n.doHealth(a)
	case verb == "publish":
		return n.writeCDI()
	case len(a) == 0:
		return errors.New("want the UUID of a GPU")
	}
	i := slices.IndexFunc(n.gpus.all, func(g *gpu) bool { return g.UUID == a[0] })
	if i < 0 {
		return fmt.Errorf("no GPU %s", a[0])
	}
	g := n.gpus.all[i]
	if len(a) == 1 {
		return g.trouble(verb)
	}
	return n.doOneGPU(g, verb, a[1:])
}

// trouble gives a GPU a fault.
func (g *gpu) trouble(verb string) error {
	switch verb {
	case "free":
		g.holders = nil
	case "virtual":
		g.Virtual = true
	case "inert":
		g.inert = true
	case "lies":
		g.lies = true
	case "lose":
		g.lost = true
	case "gone":
		g.present = false
	case "deaf":
		g.deaf = true
	case "stuck":
		g.stuck, g.Recovery = true, host.GPURecoveryReset
	case "well":
		g.lost, g.deaf, g.stuck, g.present, g.inert, g.lies, g.Virtual = false, false, false, true, false, false, false
		clear(g.broken)
	default:
		return fmt.Errorf("unknown verb %q of a GPU, or not its number of words", verb)
	}
	return nil
}

func (n *Node) doOneGPU(g *gpu, verb string, a []string) error {
	switch verb {
	case "mig":
		g.Enabled, g.Pending = a[0] == "on", a[0] == "on"
	case "pending":
		g.Pending = a[0] == "on"
	case "persistence":
		g.Persistence = a[0] == "on"
	case "recovery":
		g.Recovery = host.GPURecovery(a[0])
	case "incurable":
		g.incurable = host.GPURecovery(a[0])
	case "link":
		g.Linked = slices.Sorted(slices.Values(a))
	case "hold":
		pid, err := strconv.Atoi(a[0])
		if err != nil || len(a) < 2 {
			return errors.New("want hold UUID PID COMMAND")
		}
		h := gpuHolder{GPUHolder: host.GPUHolder{PID: pid, Command: a[1], How: fmt.Sprintf("/dev/nvidia%d", g.Minor)}}
		if len(a) == 4 {
			at, err := place(a[2:])
			if err != nil {
				return err
			}
			h.at, h.How = &at, "/dev/nvidia-caps"
		}
		g.holders = append(g.holders, h)
	case "fail":
		return g.fail(a)
	case "instance", "broken":
		return n.doInstance(g, verb, a)
	default:
		return fmt.Errorf("unknown verb %q of a GPU", verb)
	}
	return nil
}

func (g *gpu) fail(a []string) error {
	if len(a) != 3 {
		return errors.New("want fail UUID METHOD N ERROR")
	}
	times, err := strconv.Atoi(a[1])
	said := map[string]error{
		"in_use": host.ErrGPUInUse, "unsupported": host.ErrGPUUnsupported, "resources": host.ErrGPUResources, "permission": host.ErrGPUPermission,
		"lost": host.ErrGPULost, "unresponsive": host.ErrGPUUnresponsive, "reset": host.ErrGPUResetRequired,
	}[a[2]]
	if said == nil {
		return fmt.Errorf("unknown error %q", a[2])
	}
	g.fails[a[0]] = fault{times, said}
	return err
}

func place(a []string) (host.MIGPlace, error) {
	if len(a) < 2 {
		return host.MIGPlace{}, errors.New("want PROFILE START")
	}
	profile, err := strconv.ParseUint(a[0], 10, 32)
	start, err2 := strconv.ParseUint(a[1], 10, 32)
	return host.MIGPlace{Profile: uint32(profile), Start: uint32(start)}, errors.Join(err, err2)
}

// doInstance makes an instance, with one compute instance of all its slices
// unless others are said, or lets it be impossible to make.
func (n *Node) doInstance(g *gpu, verb string, a []string) error {
	at, err := place(a)
	if err != nil || verb == "broken" {
		g.broken[at] = true
		return err
	}
	if err := n.createGPUInstance(g.UUID, at); err != nil {
		return err
	}
	p, _ := g.Profile(at.Profile)
	slices := uint64(p.Slices)
	switch {
	case len(a) == 3 && a[2] == "none":
		return nil
	case len(a) == 3:
		if slices, err = strconv.ParseUint(a[2], 10, 32); err != nil {
			return err
		}
	}
	return n.createCompute(g.UUID, at, host.MIGComputePlace{Slices: uint32(slices)})
}
