package hosttest

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/gpuaas/millwright/tasks/host"
)

// GPUHost are the parts of a host that have to do with GPUs.
type GPUHost interface {
	host.DeviceReader
	host.DeviceWriter
}

// GPUEnv is one idle GPU of seven compute slices, in a fresh state.
type GPUEnv struct {
	// UUID is its own.
	UUID string
	// Hold has a process hold the GPU until it is released.
	Hold func(t testing.TB) (pid int, release func())
	// Compute has a process compute on the first compute instance of a GPU
	// instance until it is released.
	Compute func(t testing.TB, gi, ci uint32) (release func())
}

// GPUs puts a host to the suite of GPUs. The GPU is as it was afterwards.
func GPUs(t *testing.T, h GPUHost, env GPUEnv) {
	g := gpuSuite{T: t, h: h, env: env}
	g.look()
	g.modeOn()
	g.instances()
	g.computes()
	g.containers()
	g.modeOff()
}

type gpuSuite struct {
	*testing.T
	h   GPUHost
	env GPUEnv
}

func (g gpuSuite) is(what string, err, want error) {
	g.Helper()
	if !errors.Is(err, want) || want == nil && err != nil {
		g.Errorf("%s: %v, want %v", what, err, want)
	}
}

func (g gpuSuite) state() host.GPUState {
	g.Helper()
	s, err := g.h.GPUState(g.Context(), g.env.UUID)
	must(g.T, err)
	return s
}

var (
	halfLow  = host.MIGPlace{Profile: 9, Start: 0}
	halfHigh = host.MIGPlace{Profile: 9, Start: 4}
	nowhere  = host.MIGPlace{Profile: 5, Start: 4}
	small    = host.MIGPlace{Profile: 19, Start: 1}
	whole    = host.MIGComputePlace{Slices: 3, Start: 0}
	second   = host.MIGComputePlace{Slices: 1, Start: 1}
)

func (g gpuSuite) look() {
	ctx := g.Context()
	all, err := g.h.GPUs(ctx)
	must(g.T, err)
	i := slices.IndexFunc(all, func(x host.GPU) bool { return x.UUID == g.env.UUID })
	if i < 0 || all[i].PCI == "" || all[i].Name == "" || all[i].Minor < 0 || all[i].Device == 0 || all[i].Problem != "" {
		g.Fatalf("%s is not among %+v", g.env.UUID, all)
	}
	_, err = g.h.GPUState(ctx, "GPU-00000000-none")
	g.is("a GPU that is not there", err, host.ErrGPUUnknown)
	s := g.state()
	if s.GPU != all[i] || !s.Capable || s.Enabled || s.Pending || s.Persistence || s.Virtual || s.Recovery != host.GPURecoveryNone || len(s.Instances) > 0 {
		g.Errorf("the fresh GPU is %+v", s)
	}
	for id, starts := range map[uint32][]uint32{0: {0}, 5: {0}, 9: {0, 4}, 14: {0, 2, 4}, 15: {0, 2, 4, 6}, 19: {0, 1, 2, 3, 4, 5, 6}, 20: {0, 1, 2, 3, 4, 5, 6}} {
		if p, ok := s.Profile(id); !ok || !slices.Equal(p.Starts, starts) || p.Slices == 0 || p.MemoryMB == 0 || p.Max == 0 || !p.Assumed {
			g.Errorf("with MIG mode off profile %d is %+v (%v), want it at %v", id, p, ok, starts)
		}
	}
	if p, _ := s.Profile(20); !slices.Equal(p.With, []string{"me"}) {
		g.Errorf("profile 20 has the attributes %v", p.With)
	}
	g.is("an instance with MIG mode off", g.h.CreateGPUInstance(ctx, g.env.UUID, halfLow), host.ErrGPUUnsupported)
}

// modeOn switches the mode on, past a holder, and on Ampere through a reset that
// persistence mode and a holder prevent.
func (g gpuSuite) modeOn() {
	ctx, uuid := g.Context(), g.env.UUID
	pid, release := g.env.Hold(g)
	held, err := g.h.GPUHolders(ctx, uuid)
	if err != nil || !slices.ContainsFunc(held, func(x host.GPUHolder) bool { return x.PID == pid && x.Command != "" && x.How != "" }) {
		g.Errorf("process %d is not among the holders %+v (%v)", pid, held, err)
	}
	g.mode(true, host.MIGWaitsForClients)
	g.is("a reset of a GPU that is held", g.h.ResetGPUs(ctx, []string{uuid}), host.ErrGPUInUse)
	release()
	if held, err = g.h.GPUHolders(ctx, uuid); err != nil || len(held) > 0 {
		g.Errorf("nobody holds the GPU, and these do: %+v (%v)", held, err)
	}
	if s := g.state(); s.Enabled || !s.Pending {
		g.Errorf("the mode that waits for clients is %v, pending %v", s.Enabled, s.Pending)
	}
	if g.state().Resetless {
		g.mode(true, host.MIGActive)
	} else {
		g.mode(true, host.MIGWaitsForReset)
		for range 2 {
			must(g.T, g.h.SetGPUPersistence(ctx, uuid, true))
		}
		g.is("a reset in persistence mode", g.h.ResetGPUs(ctx, []string{uuid}), host.ErrGPUInUse)
		if s := g.state(); !s.Persistence || s.Enabled {
			g.Errorf("persistence %v, MIG %v", s.Persistence, s.Enabled)
		}
		must(g.T, g.h.SetGPUPersistence(ctx, uuid, false))
		must(g.T, g.h.ResetGPUs(ctx, []string{uuid}))
	}
	g.mode(true, host.MIGActive)
	s := g.state()
	if p, _ := s.Profile(9); !s.Enabled || !s.Pending || p.Assumed {
		g.Errorf("MIG %v, pending %v, profile %+v", s.Enabled, s.Pending, p)
	}
	g.is("a reset of a GPU that is not there", g.h.ResetGPUs(ctx, []string{"GPU-none"}), host.ErrGPUUnknown)
}

func (g gpuSuite) mode(on bool, want host.MIGActivation) {
	g.Helper()
	if got, err := g.h.SetMIGMode(g.Context(), g.env.UUID, on); err != nil || got != want {
		g.Errorf("set MIG mode to %v: %q (%v), want %q", on, got, err, want)
	}
}

func (g gpuSuite) instances() {
	ctx, uuid := g.Context(), g.env.UUID
	for range 2 {
		must(g.T, g.h.CreateGPUInstance(ctx, uuid, halfHigh))
	}
	s := g.state()
	if i, ok := s.Instance(halfHigh); !ok || len(s.Instances) != 1 || len(i.Compute) > 0 || i.Size != 4 {
		g.Errorf("instances %+v, want one without a compute instance", s.Instances)
	}
	g.is("an instance where its profile has no place", g.h.CreateGPUInstance(ctx, uuid, nowhere), host.ErrGPUUnsupported)
	must(g.T, g.h.CreateGPUInstance(ctx, uuid, halfLow))
	g.is("an instance over another", g.h.CreateGPUInstance(ctx, uuid, small), host.ErrGPUResources)
	if s := g.state(); len(s.Instances) != 2 || s.Instances[0].MIGPlace != halfLow {
		g.Errorf("instances %+v", s.Instances)
	}
}

func (g gpuSuite) computes() {
	ctx, uuid := g.Context(), g.env.UUID
	for range 2 {
		must(g.T, g.h.CreateComputeInstance(ctx, uuid, halfHigh, whole))
	}
	g.is("a compute instance over another", g.h.CreateComputeInstance(ctx, uuid, halfHigh, second), host.ErrGPUResources)
	must(g.T, g.h.CreateComputeInstance(ctx, uuid, halfLow, second))
	g.is("a compute instance in none", g.h.CreateComputeInstance(ctx, uuid, small, second), host.ErrGPUUnknown)
	s := g.state()
	high, _ := s.Instance(halfHigh)
	low, _ := s.Instance(halfLow)
	if len(high.Compute) != 1 || high.Compute[0].MIGComputePlace != whole || !strings.HasPrefix(high.Compute[0].UUID, "MIG-") ||
		len(low.Compute) != 1 || low.Compute[0].MIGComputePlace != second || low.Compute[0].UUID == high.Compute[0].UUID {
		g.Fatalf("compute instances %+v and %+v", high.Compute, low.Compute)
	}
	release := g.env.Compute(g, high.ID, high.Compute[0].ID)
	g.is("a compute instance in use", g.h.DestroyComputeInstance(ctx, uuid, halfHigh, whole), host.ErrGPUInUse)
	g.busy(halfHigh)
	release()
	g.busy()
	g.is("a GPU instance with a compute instance", g.h.DestroyGPUInstance(ctx, uuid, halfHigh), host.ErrGPUInUse)
	g.mode(false, host.MIGWaitsForClients)
	g.mode(true, host.MIGActive)
}

// busy asks that a process computes on these GPU instances, and on no other.
func (g gpuSuite) busy(want ...host.MIGPlace) {
	for _, i := range g.state().Instances {
		if i.Busy != slices.Contains(want, i.MIGPlace) {
			g.Errorf("instance %+v: busy is %v", i.MIGPlace, i.Busy)
		}
	}
}

func (g gpuSuite) containers() {
	ctx, uuid := g.Context(), g.env.UUID
	var names []string
	for _, i := range g.state().Instances {
		names = append(names, host.CDIKind+"="+i.Compute[0].UUID)
	}
	before, err := g.h.CDI(ctx)
	if err != nil || before.Current || !slices.Contains(before.Stale, uuid) {
		g.Errorf("before the specification is there it is %+v (%v), want it stale for %s", before, err, uuid)
	}
	_, err = g.h.ResolveCDI(ctx, names[1])
	g.is("a device before the specification has it", err, host.ErrGPUUnknown)
	for range 2 {
		must(g.T, g.h.WriteCDI(ctx))
	}
	c, err := g.h.CDI(ctx)
	if err != nil || !c.Current || len(c.Stale) > 0 || !slices.Contains(c.Devices, names[0]) || !slices.Contains(c.Devices, names[1]) || slices.Contains(c.Devices, host.CDIKind+"="+uuid) {
		g.Errorf("the specification is %+v (%v), want it to have %v", c, err, names)
	}
	nodes, err := g.h.ResolveCDI(ctx, names[1])
	if err != nil || len(nodes) == 0 {
		g.Errorf("%s has the nodes %v (%v)", names[1], nodes, err)
	}
	for range 2 {
		must(g.T, g.h.DestroyComputeInstance(ctx, uuid, halfHigh, whole))
	}
	if c, err = g.h.CDI(ctx); err != nil || c.Current || !slices.Equal(c.Stale, []string{uuid}) {
		g.Errorf("with a device too many the specification is %+v (%v), want it stale for %s alone", c, err, uuid)
	}
	for _, words := range []string{"the driver does not", "gone since a change"} {
		_, err = g.h.ResolveCDI(ctx, names[1])
		if !errors.Is(err, host.ErrGPUUnknown) || !strings.Contains(err.Error(), words) {
			g.Errorf("a stale device: %v, want %q in it", err, words)
		}
		must(g.T, g.h.WriteCDI(ctx))
	}
	if _, err = g.h.ResolveCDI(ctx, names[0]); err != nil {
		g.Errorf("the device that stayed: %v", err)
	}
	if _, err = g.h.ResolveCDI(ctx, "vendor.example/gpu=0"); !errors.Is(err, host.ErrGPUUnknown) {
		g.Errorf("a device of another kind: %v", err)
	}
}

func (g gpuSuite) modeOff() {
	ctx, uuid := g.Context(), g.env.UUID
	must(g.T, g.h.DestroyComputeInstance(ctx, uuid, halfLow, second))
	for range 2 {
		must(g.T, g.h.DestroyGPUInstance(ctx, uuid, halfLow))
		must(g.T, g.h.DestroyGPUInstance(ctx, uuid, halfHigh))
	}
	if g.state().Resetless {
		must(g.T, g.h.ResetGPUs(ctx, []string{uuid})) // it takes the mode along
	} else {
		g.mode(false, host.MIGWaitsForReset)
		must(g.T, g.h.ResetGPUs(ctx, []string{uuid}))
	}
	if s := g.state(); s.Enabled || s.Pending || len(s.Instances) > 0 {
		g.Errorf("after all, the GPU is %+v", s)
	}
	must(g.T, g.h.WriteCDI(ctx))
	if c, err := g.h.CDI(ctx); err != nil || !c.Current || !slices.Contains(c.Devices, host.CDIKind+"="+uuid) {
		g.Errorf("the specification is %+v (%v), want it to have the GPU", c, err)
	}
}
