package fakehost

import (
	"fmt"
	"slices"
	"strings"

	"github.com/gpuaas/millwright/tasks/host"
)

// gpu is a GPU with what it hides.
type gpu struct {
	host.GPUState
	slices  uint32 // compute slices in all
	memory  uint32 // memory slices in all
	holders []gpuHolder
	broken  map[host.MIGPlace]bool // instances that cannot be made
	serial  int                    // of MIG devices: no UUID is given twice
	resets  int
	present bool
	lost    bool
	deaf    bool             // a call about it does not return
	fails   map[string]fault // methods that fail, by name
	inert   bool             // no mode ever becomes active
	lies    bool             // a reset says yes and does nothing
	stuck   bool             // the driver does nothing before a reset
	touched bool             // since the last reboot
	// incurable is what the driver asks for again after a reset.
	incurable host.GPURecovery
}

// fault is what a method says so many times, having done nothing.
type fault struct {
	times int
	err   error
}

// gpuHolder is a process that holds a GPU; with an instance, only that blocks.
type gpuHolder struct {
	host.GPUHolder
	at *host.MIGPlace
}

// gpus are a node's GPUs in order, and its CDI specification.
type gpus struct {
	all    []*gpu
	cdi    []string // the specification's devices
	gone   map[string]bool
	health []host.GPUCondition // that the health rules tell
	wants  []host.GPUIntent    // intents that lay GPUs out
	blind  bool                // nobody looks after the GPUs
	unload bool                // the driver cannot be asked
}

func (n *Node) gpu(what, uuid string) (*gpu, error) {
	fail := func(err error) error { return fmt.Errorf("%s %s: %w", what, uuid, err) }
	if n.gpus.unload {
		return nil, fail(host.ErrGPUDriver)
	}
	i := slices.IndexFunc(n.gpus.all, func(g *gpu) bool { return g.present && g.UUID == uuid })
	if i < 0 {
		return nil, fail(host.ErrGPUUnknown)
	}
	g := n.gpus.all[i]
	switch {
	case g.lost:
		return nil, fail(host.ErrGPULost)
	case g.deaf:
		return nil, fail(host.ErrGPUUnresponsive)
	}
	return g, nil
}

// gpuFault is the error that the script wants of a method.
func (n *Node) gpuFault(name, uuid string) error {
	for _, g := range n.gpus.all {
		if f := g.fails[name]; g.UUID == uuid && f.times > 0 {
			g.fails[name] = fault{f.times - 1, f.err}
			return fmt.Errorf("%s of GPU %s: %w", name, uuid, f.err)
		}
	}
	return nil
}

func (n *Node) gpuList() ([]host.GPU, error) {
	if n.gpus.unload {
		return nil, fmt.Errorf("list the GPUs: %w", host.ErrGPUDriver)
	}
	var out []host.GPU
	for _, g := range n.gpus.all {
		if !g.present {
			continue
		}
		of := g.GPU
		of.Index = uint32(len(out))
		if g.lost {
			of.Problem = "the GPU is lost"
		}
		out = append(out, of)
	}
	return out, nil
}

func (n *Node) gpuState(uuid string) (host.GPUState, error) {
	g, err := n.gpu("read GPU", uuid)
	if err != nil {
		return host.GPUState{}, err
	}
	all, err := n.gpuList()
	out := g.GPUState
	for _, of := range all {
		if of.UUID == uuid {
			out.GPU = of
		}
	}
	out.Linked, out.Profiles, out.Instances = slices.Clone(g.Linked), slices.Clone(g.Profiles), cloneInstances(g.Instances)
	for i := range out.Profiles {
		out.Profiles[i].Assumed = !g.Enabled
	}
	for i, in := range out.Instances {
		out.Instances[i].Busy = slices.ContainsFunc(g.holders, func(h gpuHolder) bool { return h.at != nil && *h.at == in.MIGPlace })
	}
	return out, err
}

func cloneInstances(all []host.MIGInstance) []host.MIGInstance {
	all = slices.Clone(all)
	for i := range all {
		all[i].Compute = slices.Clone(all[i].Compute)
	}
	return all
}

func (n *Node) gpuHolders(uuid string) ([]host.GPUHolder, error) {
	g, err := n.gpu("find who holds GPU", uuid)
	if err != nil {
		return nil, err
	}
	var out []host.GPUHolder
	for _, h := range g.holders {
		out = append(out, h.GPUHolder)
	}
	slices.SortStableFunc(out, func(a, b host.GPUHolder) int { return a.PID - b.PID })
	return out, nil
}

func (n *Node) setMIGMode(uuid string, on bool) (host.MIGActivation, error) {
	g, err := n.gpu("set MIG mode of GPU", uuid)
	if g != nil {
		g.touched = true
	}
	switch {
	case err != nil:
		return "", err
	case !g.Capable:
		return "", fmt.Errorf("set MIG mode of GPU %s: %w", uuid, host.ErrGPUUnsupported)
	case g.stuck:
		return "", fmt.Errorf("set MIG mode of GPU %s: %w", uuid, host.ErrGPUResetRequired)
	case g.Enabled == on && g.Pending == on:
		return host.MIGActive, nil
	}
	g.Pending = on
	switch {
	case g.Enabled == on:
		return host.MIGActive, nil
	case len(g.Instances) > 0 || len(g.holders) > 0:
		return host.MIGWaitsForClients, nil
	case !g.Resetless || g.inert:
		return host.MIGWaitsForReset, nil
	}
	g.Enabled = on
	return host.MIGActive, nil
}

// migReady is what instances want.
func (n *Node) migReady(what, uuid string, at host.MIGPlace) (*gpu, int, error) {
	what = fmt.Sprintf("%s %d at %d of GPU", what, at.Profile, at.Start)
	g, err := n.gpu(what, uuid)
	if g != nil {
		g.touched = true
	}
	switch {
	case err != nil:
		return nil, 0, err
	case g.stuck:
		return nil, 0, fmt.Errorf("%s %s: %w", what, uuid, host.ErrGPUResetRequired)
	case !g.Capable || !g.Enabled:
		return nil, 0, fmt.Errorf("%s %s: MIG mode is off: %w", what, uuid, host.ErrGPUUnsupported)
	}
	return g, slices.IndexFunc(g.Instances, func(i host.MIGInstance) bool { return i.MIGPlace == at }), nil
}

func (n *Node) createGPUInstance(uuid string, at host.MIGPlace) error {
	g, i, err := n.migReady("create GPU instance", uuid, at)
	if err != nil || i >= 0 {
		return err
	}
	p, ok := g.Profile(at.Profile)
	if !ok || !slices.Contains(p.Starts, at.Start) {
		return fmt.Errorf("create GPU instance %d at %d of GPU %s: %w", at.Profile, at.Start, uuid, host.ErrGPUUnsupported)
	}
	taken, same := p.Slices, uint32(0)
	over := false
	for _, o := range g.Instances {
		other, _ := g.Profile(o.Profile)
		taken += other.Slices
		over = over || at.Start < o.Start+o.Size && o.Start < at.Start+p.Size
		if o.Profile == at.Profile {
			same++
		}
	}
	if over || taken > g.slices || same >= p.Max || g.broken[at] {
		return fmt.Errorf("create GPU instance %d at %d of GPU %s: %w", at.Profile, at.Start, uuid, host.ErrGPUResources)
	}
	g.Instances = append(g.Instances, host.MIGInstance{MIGPlace: at, ID: g.memory/p.Size - 1 + at.Start/p.Size, Size: p.Size})
	slices.SortFunc(g.Instances, func(a, b host.MIGInstance) int { return int(a.Start) - int(b.Start) })
	return nil
}

func (n *Node) destroyGPUInstance(uuid string, at host.MIGPlace) error {
	g, i, err := n.migReady("destroy GPU instance", uuid, at)
	if err != nil || i < 0 {
		return err
	}
	if len(g.Instances[i].Compute) > 0 {
		return fmt.Errorf("destroy GPU instance %d at %d of GPU %s: %w", at.Profile, at.Start, uuid, host.ErrGPUInUse)
	}
	g.Instances = slices.Delete(g.Instances, i, i+1)
	return nil
}

// computeWidths are the compute instances that there are, by their profile.
var computeWidths = []uint32{1, 2, 3, 4, 7}

func (n *Node) createCompute(uuid string, in host.MIGPlace, at host.MIGComputePlace) error {
	g, i, err := n.migReady("create compute instance in", uuid, in)
	if err != nil {
		return err
	}
	fail := func(err error) error {
		return fmt.Errorf("create compute instance of %d at %d in instance %d at %d of GPU %s: %w", at.Slices, at.Start, in.Profile, in.Start, uuid, err)
	}
	if i < 0 {
		return fail(host.ErrGPUUnknown)
	}
	whole, _ := g.Profile(in.Profile)
	kind := slices.Index(computeWidths, at.Slices)
	if kind < 0 || at.Start+at.Slices > whole.Slices || at.Start%map[uint32]uint32{1: 1, 2: 2, 3: 4, 4: 8, 7: 8}[at.Slices] != 0 {
		return fail(host.ErrGPUUnsupported)
	}
	inst := &g.Instances[i]
	var id uint32
	for _, c := range inst.Compute {
		switch {
		case c.MIGComputePlace == at:
			return nil
		case at.Start < c.Start+c.Slices && c.Start < at.Start+at.Slices:
			return fail(host.ErrGPUResources)
		}
	}
	for slices.ContainsFunc(inst.Compute, func(c host.MIGCompute) bool { return c.ID == id }) {
		id++
	}
	g.serial++
	name := "MIG " + whole.Name
	if at.Slices < whole.Slices {
		name = fmt.Sprintf("MIG %dc.%s", at.Slices, whole.Name)
	}
	inst.Compute = append(inst.Compute, host.MIGCompute{
		MIGComputePlace: at, ID: id, Profile: uint32(kind), Name: name,
		UUID: fmt.Sprintf("MIG-%s-%d", strings.TrimPrefix(uuid, "GPU-"), g.serial),
	})
	slices.SortFunc(inst.Compute, func(a, b host.MIGCompute) int { return int(a.Start) - int(b.Start) })
	return nil
}

func (n *Node) destroyCompute(uuid string, in host.MIGPlace, at host.MIGComputePlace) error {
	g, i, err := n.migReady("destroy compute instance in", uuid, in)
	if err != nil || i < 0 {
		return err
	}
	inst := &g.Instances[i]
	j := slices.IndexFunc(inst.Compute, func(c host.MIGCompute) bool { return c.MIGComputePlace == at })
	if j < 0 {
		return nil
	}
	if slices.ContainsFunc(g.holders, func(h gpuHolder) bool { return h.at != nil && *h.at == in }) {
		return fmt.Errorf("destroy compute instance of %d at %d in instance %d at %d of GPU %s: %w", at.Slices, at.Start, in.Profile, in.Start, uuid, host.ErrGPUInUse)
	}
	inst.Compute = slices.Delete(inst.Compute, j, j+1)
	return nil
}

// anew is what a reset, a reload or a reboot leaves.
func (g *gpu) anew(mode bool) {
	g.Instances, g.stuck, g.Recovery = nil, false, host.GPURecoveryNone
	if g.incurable != "" {
		g.Recovery = g.incurable
	}
	if g.Resetless {
		g.Pending = false
	}
	if mode && !g.inert {
		g.Enabled = g.Pending
	}
}

func (n *Node) resetGPUs(uuids []string) error {
	var all []*gpu
	for _, uuid := range uuids {
		g, err := n.gpu("reset GPU", uuid)
		switch {
		case err != nil:
			return err
		case g.Virtual:
			return fmt.Errorf("reset GPU %s: %w", uuid, host.ErrGPUUnsupported)
		case g.Persistence || len(g.holders) > 0:
			return fmt.Errorf("reset GPU %s: %w", uuid, host.ErrGPUInUse)
		}
		all = append(all, g)
	}
	for _, g := range all {
		if !g.lies {
			g.anew(true)
			g.resets++
			g.touched = true
		}
	}
	return nil
}

// Layouts are what GPUs have, by their UUIDs.
type Layouts map[string]host.GPUState

// Layouts returns what the GPUs have.
func (n *Node) Layouts() Layouts {
	n.mu.Lock()
	defer n.mu.Unlock()
	out := Layouts{}
	for _, g := range n.gpus.all {
		st := g.GPUState
		st.Instances = cloneInstances(st.Instances)
		out[g.UUID] = st
	}
	return out
}

// RestoreGPUs gives the GPUs that nobody has changed since the last reboot these
// layouts, as the agent does where intents want them.
func (n *Node) RestoreGPUs(want Layouts) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, g := range n.gpus.all {
		if w, ok := want[g.UUID]; ok && !g.touched {
			g.Enabled, g.Pending, g.Instances = w.Enabled, w.Pending, cloneInstances(w.Instances)
		}
	}
	if n.gpus.cdi != nil {
		n.gpus.cdi = append([]string{}, n.cdiWanted()...)
	}
}

// rebootGPUs is what a boot does to the GPUs.
func (n *Node) rebootGPUs() {
	n.gpus.cdi, n.gpus.unload = nil, false
	for _, g := range n.gpus.all {
		g.touched = false
		// Persistence mode is nvidia-persistenced's, which is started at boot.
		g.holders, g.lost, g.deaf = nil, false, false
		g.anew(true)
	}
}

// GPUResets returns how often a GPU was reset.
func (n *Node) GPUResets(uuid string) int {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, g := range n.gpus.all {
		if g.UUID == uuid {
			return g.resets
		}
	}
	return 0
}

func (n *Node) dumpGPUs() []string {
	var lines []string
	for _, g := range n.gpus.all {
		line := fmt.Sprintf("gpu %s mig %v pending %v persistence %v", g.UUID, g.Enabled, g.Pending, g.Persistence)
		for _, i := range g.Instances {
			line += fmt.Sprintf(" %d@%d[", i.Profile, i.Start)
			for _, c := range i.Compute {
				line += fmt.Sprintf("%d@%d", c.Slices, c.Start)
			}
			line += "]"
		}
		lines = append(lines, line)
	}
	if wanted := n.cdiWanted(); len(n.gpus.cdi) > 0 && !slices.Equal(n.gpus.cdi, wanted) {
		lines = append(lines, "cdi stale")
	}
	return lines
}

func (n *Node) cdiWanted() []string {
	var out []string
	for _, g := range n.gpus.all {
		if !g.present || g.lost {
			continue
		}
		if !g.Enabled {
			out = append(out, host.CDIKind+"="+g.UUID)
		}
		for _, i := range g.Instances {
			for _, c := range i.Compute {
				out = append(out, host.CDIKind+"="+c.UUID)
			}
		}
	}
	slices.Sort(out)
	return out
}

func (n *Node) writeCDI() error {
	if n.gpus.unload {
		return fmt.Errorf("write the CDI specification: %w", host.ErrGPUDriver)
	}
	for _, d := range n.gpus.cdi {
		if n.gpus.gone == nil {
			n.gpus.gone = map[string]bool{}
		}
		n.gpus.gone[d] = true
	}
	n.gpus.cdi = append([]string{}, n.cdiWanted()...)
	for _, d := range n.gpus.cdi {
		delete(n.gpus.gone, d)
	}
	return nil
}

func (n *Node) resolveCDI(name string) ([]string, error) {
	switch {
	case !slices.Contains(n.gpus.cdi, name) && n.gpus.gone[name]:
		return nil, fmt.Errorf("find device %s: it is gone since a change of the GPUs: %w", name, host.ErrGPUUnknown)
	case !slices.Contains(n.gpus.cdi, name):
		return nil, fmt.Errorf("find device %s: the CDI specification does not have it: %w", name, host.ErrGPUUnknown)
	case !slices.Contains(n.cdiWanted(), name):
		return nil, fmt.Errorf("find device %s: the CDI specification still has it, and the driver does not: %w", name, host.ErrGPUUnknown)
	}
	return []string{"/dev/nvidia0", "/dev/nvidiactl"}, nil
}

func (n *Node) cdi() host.CDISpec {
	out := host.CDISpec{Devices: slices.Clone(n.gpus.cdi), Current: n.gpus.cdi != nil && slices.Equal(n.gpus.cdi, n.cdiWanted())}
	for _, g := range n.gpus.all {
		of := func(all []string) []string {
			return slices.DeleteFunc(slices.Clone(all), func(name string) bool {
				return name != host.CDIKind+"="+g.UUID && !strings.HasPrefix(name, host.CDIKind+"=MIG-"+strings.TrimPrefix(g.UUID, "GPU-")+"-")
			})
		}
		if n.gpus.cdi == nil || !slices.Equal(of(n.gpus.cdi), of(n.cdiWanted())) {
			out.Stale = append(out.Stale, g.UUID)
		}
	}
	return out
}
