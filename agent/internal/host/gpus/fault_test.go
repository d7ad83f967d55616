package gpus_test

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpuaas/millwright/agent/internal/child"
	"github.com/gpuaas/millwright/agent/internal/clock"
	"github.com/gpuaas/millwright/agent/internal/gpu"
	"github.com/gpuaas/millwright/agent/internal/host/gpus"
	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
	"github.com/gpuaas/millwright/tasks/host"
	"github.com/gpuaas/millwright/test/fakenvml"
)

var (
	half  = host.MIGPlace{Profile: 9, Start: 4}
	other = host.MIGPlace{Profile: 9, Start: 0}
	whole = host.MIGComputePlace{Slices: 3}
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// short makes questions end soon.
func short(c *gpus.Config) { c.Timeout = 1500 * time.Millisecond }

// TestChangeThatFails: whatever becomes of the process that changes, before or
// after the driver has done it, the answer is one of package host, and reading
// again tells the truth; asked for again, the change is made once.
func TestChangeThatFails(t *testing.T) {
	for _, tc := range []struct {
		name  string
		fault fakenvml.Fault
		want  error
	}{
		{"it is killed before", fakenvml.Fault{Call: "nvmlDeviceCreateGpuInstanceWithPlacement", Signal: 9}, host.ErrGPUUnresponsive},
		{"it hangs", fakenvml.Fault{Call: "nvmlDeviceCreateGpuInstanceWithPlacement", Hang: true}, host.ErrGPUUnresponsive},
		{"Init hangs", fakenvml.Fault{Call: "nvmlInit_v2", Hang: true}, host.ErrGPUUnresponsive},
		{"a function is missing after all", fakenvml.Fault{Call: "nvmlDeviceCreateGpuInstanceWithPlacement", Exit: 127}, host.ErrGPUUnresponsive},
		{"it crashes", fakenvml.Fault{Call: "nvmlDeviceGetGpuInstances", Signal: 11}, host.ErrGPUUnresponsive},
		{"the GPU is lost", fakenvml.Fault{Call: "nvmlDeviceCreateGpuInstanceWithPlacement", Return: 15}, host.ErrGPULost},
		{"the GPU is lost before", fakenvml.Fault{Call: "nvmlDeviceGetHandleByUUID", Return: 15}, host.ErrGPULost},
		{"it is in use", fakenvml.Fault{Call: "nvmlDeviceCreateGpuInstanceWithPlacement", Return: 19}, host.ErrGPUInUse},
		{"there is no room", fakenvml.Fault{Call: "nvmlDeviceCreateGpuInstanceWithPlacement", Return: 23}, host.ErrGPUResources},
		{"it is not permitted", fakenvml.Fault{Call: "nvmlDeviceCreateGpuInstanceWithPlacement", Return: 4}, host.ErrGPUPermission},
		{"a reset is required", fakenvml.Fault{Call: "nvmlDeviceCreateGpuInstanceWithPlacement", Return: 16}, host.ErrGPUResetRequired},
		{"the driver is not loaded", fakenvml.Fault{Call: "nvmlInit_v2", Return: 9}, host.ErrGPUDriver},
		{"driver and library differ", fakenvml.Fault{Call: "nvmlInit_v2", Return: 18}, host.ErrGPUDriver},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, short, "H100")
			uuid, ctx := n.uuid(t, 0), t.Context()
			must(t, n.Set1(t, "mig_current=1", "mig_pending=1"))
			must(t, n.CreateGPUInstance(ctx, uuid, other))
			must(t, n.Faults(tc.fault))
			if err := n.CreateGPUInstance(ctx, uuid, half); !errors.Is(err, tc.want) {
				t.Errorf("%v, want %v", err, tc.want)
			}
			must(t, n.Faults())
			s, err := n.GPUState(ctx, uuid)
			if _, there := s.Instance(half); err != nil || there {
				t.Errorf("read again: %+v (%v), want nothing made", s.Instances, err)
			}
			must(t, n.CreateGPUInstance(ctx, uuid, half))
			if s, err = n.GPUState(ctx, uuid); err != nil || len(s.Instances) != 2 {
				t.Errorf("asked for again: %+v (%v)", s.Instances, err)
			}
		})
	}
}

// Set1 sets values of the first GPU.
func (n *node) Set1(t *testing.T, values ...string) error {
	t.Helper()
	return n.Node.Set(t.Context(), 0, values...)
}

// TestAnswerThatNeverCame: the driver has made the change and the process is gone
// before it could say so. Reading again finds it, and once more changes nothing.
func TestAnswerThatNeverCame(t *testing.T) {
	n := newNode(t, nil, "H100")
	uuid, ctx := n.uuid(t, 0), t.Context()
	must(t, n.Set1(t, "mig_current=1", "mig_pending=1"))
	deaf := n.cfg
	deaf.Changes = mute{n.changes}
	set := gpus.New(deaf)
	if err := set.CreateGPUInstance(ctx, uuid, half); !errors.Is(err, host.ErrGPUUnresponsive) {
		t.Errorf("without an answer: %v", err)
	}
	s, err := n.GPUState(ctx, uuid)
	if _, there := s.Instance(half); err != nil || !there {
		t.Fatalf("read again: %+v (%v)", s.Instances, err)
	}
	id := s.Instances[0].ID
	must(t, n.CreateGPUInstance(ctx, uuid, half))
	if s, err = n.GPUState(ctx, uuid); err != nil || len(s.Instances) != 1 || s.Instances[0].ID != id {
		t.Errorf("once more: %+v (%v)", s.Instances, err)
	}
}

// TestNotAwaited: that the caller has left is no word on the driver.
func TestNotAwaited(t *testing.T) {
	n := newNode(t, nil, "H100")
	uuid := n.uuid(t, 0)
	must(t, n.Faults(fakenvml.Fault{Call: "nvmlDeviceSetMigMode", Hang: true}))
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	_, err := n.SetMIGMode(ctx, uuid, true)
	if !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, host.ErrGPUUnresponsive) {
		t.Errorf("%v", err)
	}
}

// mute makes changes and loses their answers.
type mute struct{ *direct }

func (m mute) Change(ctx context.Context, what string, argv, environment []string, limit time.Duration) ([]byte, error) {
	_, _ = m.direct.Change(ctx, what, argv, environment, limit)
	return nil, errors.New("killed")
}

// TestEarlierChange: while the kernel holds the process of an earlier change,
// nothing is asked, and the error says who it is.
func TestEarlierChange(t *testing.T) {
	n := newNode(t, nil, "H100")
	uuid := n.uuid(t, 0)
	n.changes.idle = errors.Join(errors.New("process 17 is held"), host.ErrGPUUnresponsive)
	_, err := n.GPUState(t.Context(), uuid)
	_, err2 := n.SetMIGMode(t.Context(), uuid, true)
	for _, e := range []error{err, err2} {
		if !errors.Is(e, host.ErrGPUUnresponsive) || !strings.Contains(e.Error(), "process 17") {
			t.Errorf("%v", e)
		}
	}
	if n.changes.runs.Load() != 0 {
		t.Error("a change was begun beside it")
	}
}

// TestHangingLook: a look that hangs is an error in time, and the next one is
// answered when the driver is well again.
func TestHangingLook(t *testing.T) {
	n := newNode(t, short, "H100")
	uuid := n.uuid(t, 0)
	must(t, n.Faults(fakenvml.Fault{Call: "nvmlDeviceGetMigMode", Hang: true}))
	if _, err := n.GPUState(t.Context(), uuid); !errors.Is(err, host.ErrGPUUnresponsive) {
		t.Errorf("%v", err)
	}
	must(t, n.Faults())
	if _, err := n.GPUState(t.Context(), uuid); err != nil {
		t.Error(err)
	}
}

// TestPartOfALayout: a layout of which the driver does not tell all is an error.
func TestPartOfALayout(t *testing.T) {
	for _, call := range []string{
		"nvmlDeviceGetMigMode", "nvmlDeviceGetGpuInstances", "nvmlGpuInstanceGetInfo", "nvmlGpuInstanceGetComputeInstances", "nvmlComputeInstanceGetInfo_v2",
	} {
		n := newNode(t, nil, "H100")
		uuid, ctx := n.uuid(t, 0), t.Context()
		must(t, n.Set1(t, "mig_current=1", "mig_pending=1"))
		must(t, n.CreateGPUInstance(ctx, uuid, half))
		must(t, n.CreateComputeInstance(ctx, uuid, half, whole))
		must(t, n.Faults(fakenvml.Fault{Call: call, Return: 999}))
		if s, err := n.GPUState(ctx, uuid); err == nil {
			t.Errorf("%s fails, and the layout is %+v", call, s.Instances)
		}
	}
}

// TestUUIDNotFound: a driver that does not find a UUID is asked for all GPUs
// before it is believed (go-nvml#41); one that vanished is unknown.
func TestUUIDNotFound(t *testing.T) {
	n := newNode(t, nil, "H100", "H100")
	uuid, ctx := n.uuid(t, 0), t.Context()
	must(t, n.Faults(fakenvml.Fault{Call: "nvmlDeviceGetHandleByUUID", Return: 6}))
	if s, err := n.GPUState(ctx, uuid); err != nil || s.UUID != uuid {
		t.Errorf("%+v, %v", s.GPU, err)
	}
	must(t, n.Faults())
	must(t, n.Set1(t, "present=0"))
	if _, err := n.GPUState(ctx, uuid); !errors.Is(err, host.ErrGPUUnknown) {
		t.Errorf("a GPU that vanished: %v", err)
	}
	if all, err := n.GPUs(ctx); err != nil || len(all) != 1 {
		t.Errorf("%+v, %v", all, err)
	}
}

// TestOneOfEight: one GPU is lost; it is told, the others answer and are changed,
// and containers can have them.
func TestOneOfEight(t *testing.T) {
	n := newNode(t, nil, strings.Fields(strings.Repeat("H100 ", 8))...)
	ctx := t.Context()
	must(t, n.Node.Set(ctx, 3, "lost=1"))
	all, err := n.GPUs(ctx)
	if err != nil || len(all) != 8 {
		t.Fatalf("%+v, %v", all, err)
	}
	for i, g := range all {
		if lost := i == 3; (g.Problem != "") != lost {
			t.Errorf("GPU %d: %+v", i, g)
		}
	}
	uuids := n.state(t).GPUs
	if _, err := n.GPUState(ctx, uuids[3].UUID); !errors.Is(err, host.ErrGPULost) {
		t.Errorf("the lost one: %v", err)
	}
	if s, err := n.GPUState(ctx, uuids[4].UUID); err != nil || len(s.Linked) != 6 {
		t.Errorf("another is joined with %v (%v), want the six that answer", s.Linked, err)
	}
	if a, err := n.SetMIGMode(ctx, uuids[4].UUID, true); err != nil || a != host.MIGActive {
		t.Errorf("another: %v %v", a, err)
	}
	must(t, n.WriteCDI(ctx))
	c, err := n.CDI(ctx)
	if err != nil || !c.Current || len(c.Devices) != 6 || slices.Contains(c.Devices, host.CDIKind+"="+uuids[3].UUID) {
		t.Errorf("CDI %+v, %v", c, err)
	}
}

// TestOneThatAnswersNoMore: a GPU that still has a name and is lost to all else keeps
// no other from containers.
func TestOneThatAnswersNoMore(t *testing.T) {
	n := newNode(t, nil, "H100", "H100", "H100")
	gpus := n.state(t).GPUs
	second := 1
	must(t, n.Faults(fakenvml.Fault{GPU: &second, Call: "nvmlDeviceGetMigMode", Return: 15}))
	must(t, n.WriteCDI(t.Context()))
	c, err := n.CDI(t.Context())
	if err != nil || !c.Current || len(c.Devices) != 2 || slices.Contains(c.Devices, host.CDIKind+"="+gpus[1].UUID) {
		t.Errorf("CDI %+v, %v; want the two that answer", c, err)
	}
	if _, err := n.ResolveCDI(t.Context(), host.CDIKind+"="+gpus[2].UUID); err != nil {
		t.Errorf("another: %v", err)
	}
}

// TestVirtualMachine: a reset is refused, and nothing was changed.
func TestVirtualMachine(t *testing.T) {
	n := newNode(t, nil, "A100-80")
	uuid, ctx := n.uuid(t, 0), t.Context()
	must(t, n.Set1(t, "virtualization=1", "recovery_action=4"))
	s, err := n.GPUState(ctx, uuid)
	if err != nil || !s.Virtual || s.Recovery != host.GPURecoveryDrainAndReset {
		t.Errorf("%+v, %v", s, err)
	}
	if err := n.ResetGPUs(ctx, []string{uuid}); !errors.Is(err, host.ErrGPUUnsupported) || !strings.Contains(err.Error(), "not supported") {
		t.Errorf("%v", err)
	}
}

// TestGroup: GPUs that must be reset together are named to nvidia-smi together.
func TestGroup(t *testing.T) {
	n := newNode(t, nil, "A100-80", "A100-80", "A100-80")
	ctx := t.Context()
	for i := range 3 {
		must(t, n.Node.Set(ctx, i, "mig_pending=1"))
		if i < 2 {
			must(t, n.Node.Set(ctx, i, "reset_group=1"))
		}
	}
	all := n.state(t).GPUs
	if err := n.ResetGPUs(ctx, []string{all[0].UUID}); !errors.Is(err, host.ErrGPUUnsupported) {
		t.Errorf("a part: %v", err)
	}
	must(t, n.ResetGPUs(ctx, []string{all[0].UUID, all[1].UUID}))
	all = n.state(t).GPUs
	if all[0].Values["mig_current"] != 1 || all[1].Values["mig_current"] != 1 || all[2].Values["mig_current"] != 0 {
		t.Errorf("%+v", all)
	}
	must(t, n.ResetGPUs(ctx, nil))
	if n.state(t).GPUs[2].Values["mig_current"] != 0 {
		t.Error("to reset none reset all")
	}
}

// TestInertMode: a mode that is taken and never becomes active is never told as
// active.
func TestInertMode(t *testing.T) {
	for _, product := range []string{"A100-80", "H100"} {
		n := newNode(t, nil, product)
		uuid, ctx := n.uuid(t, 0), t.Context()
		must(t, n.Set1(t, "mig_inert=1"))
		for range 2 {
			if a, err := n.SetMIGMode(ctx, uuid, true); err != nil || a != host.MIGWaitsForReset {
				t.Errorf("%s: %v, %v", product, a, err)
			}
			must(t, n.ResetGPUs(ctx, []string{uuid}))
		}
		if s, err := n.GPUState(ctx, uuid); err != nil || s.Enabled {
			t.Errorf("%s: %+v, %v", product, s, err)
		}
	}
}

// TestAssumedPlacements compares what is assumed while MIG mode is off with what
// each product then tells.
func TestAssumedPlacements(t *testing.T) {
	products := []string{"A30", "A100-40", "A100-80", "H100", "H200", "B200", "GH200"}
	n := newNode(t, nil, products...)
	all := n.state(t).GPUs
	for i, product := range products {
		assumed, err := n.GPUState(t.Context(), all[i].UUID)
		must(t, err)
		must(t, n.Node.Set(t.Context(), i, "mig_current=1", "mig_pending=1"))
		told, err := n.GPUState(t.Context(), all[i].UUID)
		must(t, err)
		if len(told.Profiles) < 5 || len(told.Profiles) != len(assumed.Profiles) {
			t.Fatalf("%s: %d profiles, assumed %d", product, len(told.Profiles), len(assumed.Profiles))
		}
		for j, p := range told.Profiles {
			a := assumed.Profiles[j]
			if p.Assumed || !a.Assumed || a.ID != p.ID || a.Size != p.Size || !slices.Equal(a.Starts, p.Starts) {
				t.Errorf("%s %s: assumed %v of %d, the driver tells %v of %d", product, p.Name, a.Starts, a.Size, p.Starts, p.Size)
			}
		}
	}
}

// TestOldLibraries: a driver of any age is looked at and changed as far as it can
// be, and what it lacks is unsupported, and ends no process.
func TestOldLibraries(t *testing.T) {
	for _, v := range fakenvml.Headers() {
		t.Run("header "+v, func(t *testing.T) {
			t.Parallel()
			lib, err := fakenvml.Build(t.Context(), fakenvml.Variant{Header: v})
			must(t, err)
			n := newNode(t, func(c *gpus.Config) {
				c.Library = filepath.Join(lib.Dir, "libnvidia-ml.so.1")
			}, "H100")
			uuid, ctx := n.uuid(t, 0), t.Context()
			if _, err := n.GPUState(ctx, uuid); err != nil {
				t.Error(err)
			}
			if _, err := n.SetMIGMode(ctx, uuid, true); err != nil {
				t.Error(err)
			}
			for _, err := range []error{
				n.CreateGPUInstance(ctx, uuid, half), n.CreateComputeInstance(ctx, uuid, half, whole),
				n.DestroyComputeInstance(ctx, uuid, half, whole), n.DestroyGPUInstance(ctx, uuid, half),
			} {
				if err != nil && !errors.Is(err, host.ErrGPUUnsupported) {
					t.Error(err)
				}
			}
		})
	}
}

// TestSampler runs the agent's own sampler beside: it is away during a change, or
// the mode could not become active, and comes back.
func TestSampler(t *testing.T) {
	n := newNode(t, nil, "H100")
	uuid, ctx := n.uuid(t, 0), t.Context()
	runner := child.New(child.Config{Logger: slog.New(slog.DiscardHandler)})
	s := gpu.New(gpu.Config{
		Mode: gpu.On, Program: n.cfg.Program, Env: n.Env(), Runner: runner, Logger: slog.New(slog.DiscardHandler), Clock: clock.System{}, Pause: time.Second,
	})
	run, stop := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- s.Run(run) }()
	defer func() {
		stop()
		if err := <-done; err != nil {
			t.Errorf("Run() = %v", err)
		}
	}()
	await := func(want gpuv1.DriverState) {
		t.Helper()
		limit, cancel := context.WithTimeout(ctx, 30*time.Second)
		defer cancel()
		for s.Status().GetState() != want {
			changed := s.Changed()
			if s.Status().GetState() == want {
				return
			}
			select {
			case <-changed:
			case <-limit.Done():
				t.Fatalf("the sampler is %v, want %v", s.Status(), want)
			}
		}
	}
	await(gpuv1.DriverState_DRIVER_STATE_OK)
	if _, err := s.Sample(ctx, gpuv1.Tier_TIER_FAST); err != nil {
		t.Fatal(err)
	}
	cfg := n.cfg
	if a, err := gpus.New(withoutQuiet(cfg)).SetMIGMode(ctx, uuid, true); err != nil || a != host.MIGWaitsForClients {
		t.Errorf("beside the sampler: %v, %v: the check shows nothing", a, err)
	}
	cfg.Quiesce = s.Quiesce
	set := gpus.New(cfg)
	if a, err := set.SetMIGMode(ctx, uuid, true); err != nil || a != host.MIGActive {
		t.Errorf("with the sampler away: %v, %v", a, err)
	}
	await(gpuv1.DriverState_DRIVER_STATE_QUIESCED)
	if held, err := set.GPUHolders(ctx, uuid); err != nil || len(held) > 0 {
		t.Errorf("holders %+v, %v", held, err)
	}
	await(gpuv1.DriverState_DRIVER_STATE_OK) // it comes back by itself
	if held, err := set.GPUHolders(ctx, uuid); err != nil || len(held) > 0 {
		t.Errorf("our own sampler counts as a holder: %+v, %v", held, err)
	}
	must(t, set.ResetGPUs(ctx, []string{uuid}))
	set.Close()
	await(gpuv1.DriverState_DRIVER_STATE_OK)
}

func withoutQuiet(c gpus.Config) gpus.Config { c.Quiesce = nil; return c }

// TestQuietWhileChanging: the sampler is sent away once for changes that follow
// each other.
func TestQuietWhileChanging(t *testing.T) {
	n := newNode(t, nil, "H100")
	uuid, ctx := n.uuid(t, 0), t.Context()
	must(t, n.Set1(t, "mig_current=1", "mig_pending=1"))
	must(t, n.CreateGPUInstance(ctx, uuid, half))
	must(t, n.CreateGPUInstance(ctx, uuid, other))
	if got := n.quiet.Load(); got != 1 || !n.away.Load() {
		t.Errorf("sent away %d times, away %v", got, n.away.Load())
	}
	n.Close()
	if n.away.Load() {
		t.Error("it does not come back")
	}
}

// TestOff: with gpu.mode off nothing is asked.
func TestOff(t *testing.T) {
	set := gpus.New(gpus.Config{})
	if _, err := set.GPUs(t.Context()); !errors.Is(err, host.ErrGPUDriver) || !strings.Contains(err.Error(), "gpu.mode: off") {
		t.Errorf("%v", err)
	}
}

// TestGenerator: NVIDIA's own generator is used where it is, for the devices that
// are there; one that it leaves out, and one that fails, keep the old file.
func TestGenerator(t *testing.T) {
	n := newNode(t, nil, "H100", "H100")
	ctx := t.Context()
	a, b := n.uuid(t, 0), n.uuid(t, 1)
	write := func(script string) {
		t.Helper()
		must(t, os.WriteFile(filepath.Join(n.dir, "nvidia-ctk"), []byte("#!/bin/sh\n"+script), 0o755))
	}
	dev := func(name string) string {
		return `{"name":"` + name + `","containerEdits":{"deviceNodes":[{"path":"` + filepath.Join(n.dir, "dev/nvidia") + map[string]string{a: "0", b: "1"}[name] + `"}]}}`
	}
	spec := func(devices ...string) string {
		return `cat <<'E'
{"cdiVersion":"0.5.0","kind":"millwright.dev/gpu","devices":[` + strings.Join(devices, ",") + `],"containerEdits":{"mounts":[{"hostPath":"/lib/libcuda.so.1"}]}}
E
`
	}
	write(`[ "$*" = "cdi generate --format=json --vendor=millwright.dev --class=gpu --device-name-strategy=uuid" ] || exit 9
` + spec(dev(a), dev(b), `{"name":"all","containerEdits":{}}`))
	must(t, n.WriteCDI(ctx))
	file, err := os.ReadFile(n.cfg.CDI)
	if err != nil || !strings.Contains(string(file), "libcuda") || strings.Contains(string(file), `"all"`) || !strings.Contains(string(file), "0.6.0") {
		t.Errorf("%s (%v)", file, err)
	}
	if c, err := n.CDI(ctx); err != nil || !c.Current || len(c.Devices) != 2 {
		t.Errorf("%+v, %v", c, err)
	}
	for _, bad := range []string{spec(dev(a)), "exit 1", "echo '{'", strings.ReplaceAll(spec(dev(a), dev(b)), "millwright.dev/gpu", "nvidia.com/gpu")} {
		write(bad)
		if err := n.WriteCDI(ctx); err == nil {
			t.Errorf("taken: %s", bad)
		}
		if now, err := os.ReadFile(n.cfg.CDI); err != nil || string(now) != string(file) {
			t.Errorf("the file is now %s (%v)", now, err)
		}
	}
}

// TestTornSpecification: half a file is no specification, and is replaced.
func TestTornSpecification(t *testing.T) {
	n := newNode(t, nil, "H100")
	ctx := t.Context()
	must(t, os.Mkdir(filepath.Dir(n.cfg.CDI), 0o755))
	must(t, os.WriteFile(n.cfg.CDI, []byte(`{"cdiVersion": "0.`), 0o644))
	if c, err := n.CDI(ctx); err != nil || c.Current || len(c.Devices) > 0 {
		t.Errorf("%+v, %v", c, err)
	}
	must(t, n.WriteCDI(ctx))
	if c, err := n.CDI(ctx); err != nil || !c.Current {
		t.Errorf("%+v, %v", c, err)
	}
	left, err := os.ReadDir(filepath.Dir(n.cfg.CDI))
	if err != nil || len(left) != 1 {
		t.Errorf("beside it are %v (%v)", left, err)
	}
}

// TestMissingNodes: the nodes of new instances are made; one that cannot be made
// is named, and the old file stays.
func TestMissingNodes(t *testing.T) {
	n := newNode(t, nil, "H100")
	uuid, ctx := n.uuid(t, 0), t.Context()
	must(t, n.WriteCDI(ctx))
	was, err := os.ReadFile(n.cfg.CDI)
	must(t, err)
	must(t, n.Set1(t, "mig_current=1", "mig_pending=1"))
	must(t, n.CreateGPUInstance(ctx, uuid, half))
	must(t, n.CreateComputeInstance(ctx, uuid, half, whole))
	must(t, os.WriteFile(filepath.Join(n.dir, "nvidia-smi"), []byte("#!/bin/sh\n"), 0o755))
	if err := n.WriteCDI(ctx); err == nil || !strings.Contains(err.Error(), "nvidia-cap") {
		t.Errorf("a node that is not made: %v", err)
	}
	if now, err := os.ReadFile(n.cfg.CDI); err != nil || string(now) != string(was) {
		t.Errorf("the file is now %s (%v)", now, err)
	}
	must(t, os.Remove(filepath.Join(n.dir, "nvidia-smi")))
	must(t, n.WriteCDI(ctx))
	c, err := n.CDI(ctx)
	must(t, err)
	nodes, err := n.ResolveCDI(ctx, c.Devices[0])
	if err != nil || len(nodes) != 3 || !strings.HasSuffix(nodes[0], "/nvidia0") {
		t.Errorf("%v has the nodes %v (%v)", c.Devices, nodes, err)
	}
}
