// Package gpus knows the node's GPUs and changes them. NVML is linked by
// millwright-gpu alone: each question here is a run of it that ends with the
// answer, with a deadline. A question that changes a GPU runs in a unit of its
// own, because the driver lets only CAP_SYS_ADMIN do so, which the agent does
// not have, and because it must not end with the agent: half a change is what
// nobody wants. Before it, the program that samples is ended, so that the agent
// itself holds no GPU.
//
// Whoever asked for a change and got no answer knows nothing: the change may
// have been made, or be under way. So every question, also one that only looks,
// first waits until no earlier change runs, and each change leaves what is so
// already as it is.
package gpus

import (
	"context"
	"encoding/base64"
	"fmt"
	"io/fs"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/millwright/agent/internal/child"
	"github.com/gpuaas/millwright/agent/internal/gpu/wire"
	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
	healthv1 "github.com/gpuaas/millwright/proto/millwright/health/v1"
	"github.com/gpuaas/millwright/tasks/host"
)

const (
	lookTimeout   = 45 * time.Second // without persistence mode the driver initialises each GPU first
	changeTimeout = 90 * time.Second
	resetTimeout  = 3 * time.Minute
	// linger is how long the sampler stays away after a change: the next one of
	// the task mostly follows at once.
	linger = 2 * time.Second
	// largest answer of a program.
	largest = 4 << 20
)

// Config says how to ask and where to look.
type Config struct {
	// Program is the path of millwright-gpu; unset: the GPUs are not asked.
	Program string
	// Library is the NVML library; optional, the system's.
	Library string
	// Environment is added to that of the programs; optional. Tests use it.
	Environment []string
	// Children runs what only looks.
	Children *child.Runner
	// Changes runs what changes.
	Changes Changer
	// Find returns the path of a program of the system.
	Find func(ctx context.Context, name string) (string, error)
	// Quiesce ends the program that samples until resume is called; optional.
	Quiesce func(ctx context.Context) (resume func(), err error)
	// Files writes the CDI specification.
	Files Files
	// Proc, Dev and CDI are where processes, device nodes and the specification
	// are; unset: /proc, /dev, and the path that package host has.
	Proc, Dev, CDI string
	// Minors is where the driver numbers the nodes for rights to instances; unset:
	// /proc/driver/nvidia-caps/mig-minors.
	Minors string
	// Timeout bounds a question in place of its own deadline; optional.
	Timeout time.Duration
	// Conditions has the GPUs looked at anew, and returns what the health rules say;
	// unset: nobody looks after them.
	Conditions func(ctx context.Context) ([]*healthv1.Condition, error)
	// Intents says of each intent that lays GPUs out whether it holds; unset: there
	// are none.
	Intents func(ctx context.Context) ([]host.GPUIntent, error)
}

// Files are the parts of the file system that are written.
type Files interface {
	ReadFile(ctx context.Context, path string) (host.File, error)
	WriteFile(ctx context.Context, path string, f host.File) error
	MakeDir(ctx context.Context, path string, mode fs.FileMode) error
}

// Set implements host.DeviceReader and host.DeviceWriter. It is safe for
// concurrent use: questions take turns.
type Set struct {
	cfg   Config
	turn  chan struct{} // holds a token while a question is asked
	quiet quiet
	// writing holds a token while the CDI specification is written.
	writing chan struct{}
}

// New returns the GPUs of the machine. It asks nothing.
func New(cfg Config) *Set {
	for p, unset := range map[*string]string{&cfg.Proc: "/proc", &cfg.Dev: "/dev", &cfg.CDI: host.CDIPath, &cfg.Minors: "/proc/driver/nvidia-caps/mig-minors"} {
		if *p == "" {
			*p = unset
		}
	}
	return &Set{cfg: cfg, turn: make(chan struct{}, 1), writing: make(chan struct{}, 1), quiet: quiet{quiesce: cfg.Quiesce}}
}

// Close lets the sampler come back at once.
func (s *Set) Close() { s.quiet.end() }

// take waits for its turn, and until no earlier change runs.
func (s *Set) take(ctx context.Context) (release func(), err error) {
	if s.cfg.Program == "" {
		return nil, fmt.Errorf("the configuration says gpu.mode: off: %w", host.ErrGPUDriver)
	}
	select {
	case s.turn <- struct{}{}:
	case <-ctx.Done():
		return nil, fmt.Errorf("wait for another question: %w", context.Cause(ctx))
	}
	release = func() { <-s.turn }
	if err := s.cfg.Changes.Idle(ctx); err != nil {
		release()
		return nil, err
	}
	return release, nil
}

func (s *Set) limit(own time.Duration) time.Duration {
	if s.cfg.Timeout > 0 {
		return s.cfg.Timeout
	}
	return own
}

// argv is a run of millwright-gpu for one question.
func (s *Set) argv(r *gpuv1.ChildRequest) ([]string, error) {
	r.Id = 1
	b, err := proto.Marshal(&gpuv1.ChildOnce{Protocol: wire.Protocol, Library: s.cfg.Library, Request: r})
	if err != nil {
		return nil, fmt.Errorf("encode the question: %w", err)
	}
	return []string{s.cfg.Program, "once", base64.RawURLEncoding.EncodeToString(b)}, nil
}

// look asks for GPUs, by a process that ends with its answer.
func (s *Set) look(ctx context.Context, q *gpuv1.ChildLook) ([]*gpuv1.GpuLook, error) {
	release, err := s.take(ctx)
	if err != nil {
		return nil, err
	}
	defer release()
	argv, err := s.argv(&gpuv1.ChildRequest{Ask: &gpuv1.ChildRequest_Look{Look: q}})
	if err != nil {
		return nil, err
	}
	res, err := s.cfg.Children.Run(ctx, child.Spec{
		Argv: argv, Timeout: s.limit(lookTimeout), Key: "gpu", MaxOutput: largest, Environment: s.cfg.Environment,
	})
	if err != nil {
		return nil, ended(ctx, err)
	}
	reply, err := answer(res.Stdout, fmt.Sprintf("it exited with %d: %.300s", res.ExitCode, res.Stderr))
	return reply.GetLooked().GetGpus(), err
}

// GPUs implements host.GPUReader.
func (s *Set) GPUs(ctx context.Context) ([]host.GPU, error) {
	looked, err := s.look(ctx, &gpuv1.ChildLook{})
	if err != nil {
		return nil, fmt.Errorf("list the GPUs: %w", err)
	}
	var out []host.GPU
	for _, l := range looked {
		out = append(out, identity(l))
	}
	return out, nil
}

func identity(l *gpuv1.GpuLook) host.GPU {
	g := l.GetGpu()
	out := host.GPU{
		Index: g.GetIndex(), UUID: g.GetUuid(), PCI: g.GetPciBusId(), Name: g.GetModel(), Device: g.GetPciDeviceId(), Minor: -1,
		Problem: l.GetProblem().GetMessage(),
	}
	if g.MinorNumber != nil {
		out.Minor = int(g.GetMinorNumber())
	}
	return out
}

// GPUState implements host.GPUReader.
func (s *Set) GPUState(ctx context.Context, uuid string) (host.GPUState, error) {
	looked, err := s.look(ctx, &gpuv1.ChildLook{Uuid: uuid, Whole: true})
	if err == nil && len(looked) != 1 {
		err = host.ErrGPUUnknown
	}
	if err != nil {
		return host.GPUState{}, fmt.Errorf("read GPU %s: %w", uuid, err)
	}
	st, err := state(looked[0])
	if err != nil {
		return host.GPUState{}, fmt.Errorf("read GPU %s: %w", uuid, err)
	}
	return st, nil
}

// state is what a whole look says. What could not be read is an error wherever
// less would be another layout.
func state(l *gpuv1.GpuLook) (host.GPUState, error) {
	if p := l.GetProblem(); p != nil {
		return host.GPUState{}, failure(p)
	}
	g := l.GetGpu()
	st := host.GPUState{
		GPU: identity(l), Persistence: g.GetPersistenceMode(), Linked: l.GetLinked(),
		Virtual: l.GetVirtualization() == 1 || l.GetVirtualization() == 2, Recovery: recovery(l),
	}
	for _, u := range g.GetUnknown() {
		switch {
		case u.GetField() == "mig_enabled" && u.GetReason() == gpuv1.UnknownReason_UNKNOWN_REASON_NOT_SUPPORTED:
			return st, nil // it knows no MIG
		case u.GetField() == "mig_enabled", u.GetField() == "gpu_instances":
			return st, unread(u)
		}
	}
	st.Capable, st.Enabled, st.Pending, st.Resetless = true, g.GetMigEnabled(), g.GetMigPending(), g.GetMigResetless()
	for _, p := range l.GetProfiles() {
		st.Profiles = append(st.Profiles, profile(p))
	}
	for _, i := range g.GetGpuInstances() {
		of, err := instance(i)
		if err != nil {
			return st, err
		}
		of.Busy = slices.ContainsFunc(l.GetProcesses(), func(p *gpuv1.GpuProcess) bool {
			return p.GpuInstanceId != nil && p.GetGpuInstanceId() == of.ID
		})
		st.Instances = append(st.Instances, of)
	}
	slices.SortFunc(st.Instances, func(a, b host.MIGInstance) int {
		return (int(a.Start)-int(b.Start))*1000 + int(a.Profile) - int(b.Profile)
	})
	return st, nil
}

func profile(p *gpuv1.MigProfile) host.MIGProfile {
	out := host.MIGProfile{
		ID: p.GetId(), Name: p.GetName(), Slices: p.GetSlices(), MemoryMB: p.GetMemoryMib(), Max: p.GetMost(),
		With: p.GetWith(), Without: p.GetWithout(), Assumed: p.GetAssumed(),
	}
	for _, at := range p.GetPlacements() {
		out.Starts, out.Size = append(out.Starts, at.GetStart()), at.GetSize()
	}
	slices.Sort(out.Starts)
	return out
}

func instance(i *gpuv1.GpuInstance) (host.MIGInstance, error) {
	out := host.MIGInstance{
		MIGPlace: host.MIGPlace{Profile: i.GetProfileId(), Start: i.GetPlacement().GetStart()}, ID: i.GetId(), Size: i.GetPlacement().GetSize(),
	}
	for _, u := range i.GetUnknown() {
		if u.GetField() == "compute_instances" {
			return out, unread(u)
		}
	}
	for _, c := range i.GetComputeInstances() {
		out.Compute = append(out.Compute, host.MIGCompute{
			MIGComputePlace: host.MIGComputePlace{Slices: c.GetPlacement().GetSize(), Start: c.GetPlacement().GetStart()},
			ID:              c.GetId(), Profile: c.GetProfileId(), UUID: c.GetUuid(), Name: c.GetName(),
		})
	}
	slices.SortFunc(out.Compute, func(a, b host.MIGCompute) int { return int(a.Start) - int(b.Start) })
	return out, nil
}

// recovery names the driver's verdict, as nvml.h numbers it.
func recovery(l *gpuv1.GpuLook) host.GPURecovery {
	if l.RecoveryAction == nil {
		return host.GPURecoveryUnknown
	}
	known := []host.GPURecovery{
		host.GPURecoveryNone, host.GPURecoveryReset, host.GPURecoveryReboot, host.GPURecoveryDrain, host.GPURecoveryDrainAndReset,
	}
	if n := int(l.GetRecoveryAction()); n < len(known) {
		return known[n]
	}
	return host.GPURecoveryOther
}
