package health_test

import (
	"fmt"
	"net"
	"sync"
	"syscall"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/millwright/agent/internal/child"
	"github.com/gpuaas/millwright/agent/internal/gpu"
	"github.com/gpuaas/millwright/agent/internal/gpu/serve"
	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
)

// damage is what is wrong with a driver; the zero value is none.
type damage struct {
	hang, crash, undefined string // in what
	refused                gpuv1.DriverState
	unbound                bool // the loader ends each program at its start
	lost, absent           bool // of two GPUs, the second
}

// machine starts stand-ins for millwright-gpu: the real server in this process,
// before a driver whose damage can be set. One of them runs at a time.
type machine struct {
	free chan struct{} // closed: what hangs goes on

	mu     sync.Mutex
	damage damage   // guarded by mu
	runs   *standIn // guarded by mu
}

// set changes the damage; restart ends the program that runs, as the update of a
// driver would.
func (m *machine) set(d damage, restart bool) {
	m.mu.Lock()
	m.damage = d
	p := m.runs
	m.mu.Unlock()
	if restart {
		p.die(0, -1, "")
	}
}

func (m *machine) now() damage {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.damage
}

func (m *machine) start(child.LongSpec) (gpu.Process, error) {
	ours, theirs := net.Pipe()
	p := &standIn{machine: m, conn: ours, far: theirs, gone: make(chan struct{})}
	m.mu.Lock()
	m.runs = p
	m.mu.Unlock()
	if m.now().unbound {
		p.die(127, -1, "millwright-gpu: symbol lookup error: undefined symbol: nvmlDeviceGetName")
		return p, nil
	}
	p.serves.Go(func() {
		if err := serve.Serve(theirs, p); err != nil {
			p.die(1, -1, err.Error())
			return
		}
		p.die(0, -1, "")
	})
	return p, nil
}

// standIn is one program, and the driver in it.
type standIn struct {
	machine   *machine
	conn, far net.Conn
	gone      chan struct{}
	once      sync.Once
	serves    sync.WaitGroup
	code      int
	signal    syscall.Signal
	said      string
}

func (p *standIn) die(code int, signal syscall.Signal, said string) {
	p.once.Do(func() {
		p.code, p.signal, p.said = code, signal, said
		close(p.gone)
		p.far.Close() //nolint:errcheck // it ends
	})
}

func (p *standIn) Conn() net.Conn                     { return p.conn }
func (p *standIn) Pid() int                           { return 7 }
func (p *standIn) Gone() <-chan struct{}              { return p.gone }
func (p *standIn) Kill() error                        { p.die(-1, syscall.SIGKILL, ""); return nil }
func (p *standIn) End() (int, syscall.Signal, string) { return p.code, p.signal, p.said }

// meet has the damage happen at a call.
func (p *standIn) meet(at string) {
	d := p.machine.now()
	switch at {
	case d.hang:
	case d.crash:
		p.die(-1, syscall.SIGSEGV, "")
	case d.undefined:
		p.die(127, -1, "millwright-gpu: symbol lookup error: undefined symbol: nvmlDeviceGetName")
	default:
		return
	}
	select {
	case <-p.gone:
	case <-p.machine.free:
	}
}

func (p *standIn) Start(string) (int, error) {
	p.meet("init")
	if d := p.machine.now(); d.refused != 0 {
		return 0, &serve.Failure{State: d.refused, Message: "the driver refuses"}
	}
	return 2, nil
}

func (p *standIn) gpus() []string {
	if p.machine.now().absent {
		return []string{"GPU-0"}
	}
	return []string{"GPU-0", "GPU-1"}
}

func pciOf(i int) string { return fmt.Sprintf("0000:c%d:00.0", i) }

func (p *standIn) Inventory() (*gpuv1.Inventory, error) {
	p.meet("inventory")
	inv := &gpuv1.Inventory{}
	for i, uuid := range p.gpus() {
		inv.Gpus = append(inv.Gpus, &gpuv1.Gpu{Index: uint32(i), Uuid: proto.String(uuid), PciBusId: proto.String(pciOf(i)), GpuMaxCelsius: proto.Uint32(85)})
	}
	return inv, nil
}

func (p *standIn) Sample(tier gpuv1.Tier) (*gpuv1.Sample, error) {
	p.meet("sample")
	s := &gpuv1.Sample{Tier: tier, Count: proto.Uint32(uint32(len(p.gpus())))}
	for i, uuid := range p.gpus() {
		g := &gpuv1.GpuSample{Index: uint32(i), Uuid: uuid, PciBusId: pciOf(i)}
		if p.machine.now().lost && i == 1 {
			g.Unknown = []*gpuv1.Unknown{{Field: "gpu_celsius", Reason: gpuv1.UnknownReason_UNKNOWN_REASON_GPU_LOST, Code: 15}}
		} else {
			g.GpuCelsius = proto.Uint32(40)
		}
		s.Gpus = append(s.Gpus, g)
	}
	return s, nil
}

func (p *standIn) Wait(most time.Duration) ([]*gpuv1.GpuEvent, error) {
	p.meet("events")
	timer := time.NewTimer(most)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-p.gone:
	}
	return nil, nil
}

func (p *standIn) Calls() uint64 { return 0 }
