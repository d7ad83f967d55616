package gpu_test

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuaas/millwright/agent/internal/child"
	"github.com/gpuaas/millwright/agent/internal/clock"
	"github.com/gpuaas/millwright/agent/internal/gpu"
	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
)

const (
	ok           = gpuv1.DriverState_DRIVER_STATE_OK
	unresponsive = gpuv1.DriverState_DRIVER_STATE_UNRESPONSIVE
	crashed      = gpuv1.DriverState_DRIVER_STATE_CRASHED
	noSymbol     = gpuv1.DriverState_DRIVER_STATE_SYMBOL_MISSING
	mismatch     = gpuv1.DriverState_DRIVER_STATE_VERSION_MISMATCH
	noGPUs       = gpuv1.DriverState_DRIVER_STATE_NO_GPUS
	quiesced     = gpuv1.DriverState_DRIVER_STATE_QUIESCED
	unusable     = gpuv1.DriverState_DRIVER_STATE_PROGRAM_UNUSABLE
	off          = gpuv1.DriverState_DRIVER_STATE_OFF
)

func splitWords(s string) []string { return strings.Fields(s) }

// bench is a Supervisor that runs, before a stand-in whose faults can be set.
type bench struct {
	*gpu.Supervisor
	t      *testing.T
	faults string
}

// period is what the pause between two starts grows to.
const period = time.Second

func newBench(t *testing.T, change func(*gpu.Config), faults ...string) *bench {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	b := &bench{t: t, faults: filepath.Join(t.TempDir(), "faults")}
	b.set(faults...)
	log := slog.New(slog.DiscardHandler)
	cfg := gpu.Config{
		Mode: gpu.On, Program: exe, Args: []string{"stand-in", b.faults}, Runner: child.New(child.Config{Logger: log}), Logger: log, Clock: clock.System{},
		InitTimeout: 400 * time.Millisecond, CallTimeout: 400 * time.Millisecond, EventWait: 50 * time.Millisecond, KillWait: 5 * time.Second, Pause: period, Sysfs: t.TempDir(),
	}
	if change != nil {
		change(&cfg)
	}
	b.Supervisor = gpu.New(cfg)
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() {
		if err := b.Run(ctx); err != nil {
			t.Errorf("run: %v", err)
		}
	})
	t.Cleanup(func() { cancel(); running.Wait() })
	return b
}

func (b *bench) set(faults ...string) {
	b.t.Helper()
	if err := os.WriteFile(b.faults, []byte(strings.Join(faults, " ")), 0o600); err != nil {
		b.t.Fatal(err)
	}
}

// await waits for a state and returns its message.
func (b *bench) await(want gpuv1.DriverState) string {
	b.t.Helper()
	return b.awaitStatus(want.String(), func(st *gpuv1.DriverStatus) bool { return st.GetState() == want }).GetMessage()
}

func (b *bench) awaitStatus(what string, done func(*gpuv1.DriverStatus) bool) *gpuv1.DriverStatus {
	b.t.Helper()
	limit := time.NewTimer(20 * time.Second)
	defer limit.Stop()
	for {
		changed := b.Changed()
		st := b.Status()
		if done(st) {
			return st
		}
		select {
		case <-changed:
		case <-limit.C:
			b.t.Fatalf("state %v, want %s", st, what)
		}
	}
}

func TestAsk(t *testing.T) {
	b := newBench(t, nil)
	b.await(ok)
	inv, err := b.Inventory(t.Context())
	if err != nil || inv.GetDriverVersion() != "1.2" {
		t.Errorf("inventory %v, %v", inv, err)
	}
	s, err := b.Sample(t.Context(), gpuv1.Tier_TIER_SLOW)
	if err != nil || s.GetTier() != gpuv1.Tier_TIER_SLOW || s.GetCalls() != 1 {
		t.Errorf("sample %v, %v", s, err)
	}
	if ev, err := b.Events(t.Context()); err != nil || len(ev) != 0 {
		t.Errorf("events %v, %v", ev, err)
	}
	b.set("event")
	if ev, err := b.Events(t.Context()); err != nil || len(ev) != 1 || ev[0].GetData() != 79 {
		t.Errorf("events %v, %v", ev, err)
	}
}

// Each fault is a state with words for as long as it lasts, also over restarts
// in which the driver answers all but the question that it failed on, and is
// over within one period of its end.
func TestFaults(t *testing.T) {
	for _, tc := range []struct {
		fault string
		state gpuv1.DriverState
		words string
		ask   bool // the fault shows in a sample
	}{
		{"hang-init", unresponsive, "initialisation", false},
		{"hang-inventory", unresponsive, "inventory", false},
		{"hang-sample", unresponsive, "fast sample", true},
		{"segv-init", crashed, "while its initialisation was asked: SIGSEGV", false},
		{"segv-sample", crashed, "a fast sample was asked", true},
		{"exit127", noSymbol, "LD_BIND_NOW", false},
		{"undefined-sample", noSymbol, "nvmlDeviceGetName, while a fast sample", true},
		{"mismatch", mismatch, "two versions", false},
		{"none", noGPUs, "knows no GPU", false},
	} {
		t.Run(tc.fault, func(t *testing.T) {
			t.Parallel()
			b := newBench(t, nil)
			if tc.ask {
				b.await(ok)
				b.set(tc.fault)
				if _, err := b.Sample(t.Context(), gpuv1.Tier_TIER_FAST); err == nil {
					t.Error("the sample was answered")
				}
			} else {
				b = newBench(t, nil, tc.fault)
			}
			if words := b.await(tc.state); !strings.Contains(words, tc.words) {
				t.Errorf("message %q, want %q in it", words, tc.words)
			}
			if tc.fault != "none" {
				st := b.Status()
				again := b.awaitStatus("two more starts", func(now *gpuv1.DriverStatus) bool {
					if now.GetState() != tc.state {
						t.Fatalf("the state became %v with the fault there", now)
					}
					return now.GetStarts() >= st.GetStarts()+2
				})
				if !again.GetSince().AsTime().Equal(st.GetSince().AsTime()) {
					t.Error("the same state was given another time")
				}
				_, err := b.Inventory(t.Context())
				if se := (*gpu.StateError)(nil); !errors.As(err, &se) || se.Status.GetState() != tc.state {
					t.Errorf("a question then: %v", err)
				}
			} else {
				return // the driver answers; a GPU that comes is for the next inventory
			}
			b.set()
			begin := time.Now()
			b.await(ok)
			if d := time.Since(begin); d > period+2*time.Second {
				t.Errorf("it was well again after %v", d)
			}
		})
	}
}

func TestProgramMissing(t *testing.T) {
	b := newBench(t, func(c *gpu.Config) { c.Program = "/no/such/millwright-gpu" })
	if words := b.await(unusable); !strings.Contains(words, "/no/such/millwright-gpu cannot be run") || !strings.Contains(words, "install millwright-agent") {
		t.Errorf("message %q", words)
	}
}

func TestModes(t *testing.T) {
	newBench(t, func(c *gpu.Config) { c.Mode = gpu.Off }).await(off)
	auto := newBench(t, func(c *gpu.Config) { c.Mode = gpu.Auto })
	if words := auto.await(noGPUs); !strings.Contains(words, "PCI bus") || auto.Status().GetStarts() != 0 {
		t.Errorf("%v", auto.Status())
	}
	bus := t.TempDir()
	for name, content := range map[string]string{"vendor": "0x10de\n", "class": "0x030200\n"} {
		dir := filepath.Join(bus, "bus/pci/devices/0000:c5:00.0")
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	b := newBench(t, func(c *gpu.Config) { c.Mode, c.Sysfs = gpu.Auto, bus })
	b.await(ok)
	if inv, err := b.Inventory(t.Context()); err != nil || len(inv.GetPciGpus()) != 1 || inv.GetPciGpus()[0] != "0000:c5:00.0" {
		t.Errorf("%v, %v", inv, err)
	}
}

// A process that SIGKILL does not end: a stand-in, whose killing is a no-op
// until the test lets it die.
func TestHeldByTheKernel(t *testing.T) {
	var mu sync.Mutex
	held, pids := true, map[int]bool{}
	kill := func(pid int) error {
		mu.Lock()
		defer mu.Unlock()
		pids[pid] = true
		if held {
			return nil
		}
		return unix.Kill(-pid, unix.SIGKILL)
	}
	b := newBench(t, func(c *gpu.Config) {
		c.Runner, c.KillWait = child.New(child.Config{Logger: c.Logger, Kill: kill}), 100*time.Millisecond
	}, "hang-init", "held")
	st := b.awaitStatus("a stuck process", func(st *gpuv1.DriverStatus) bool { return st.GetStuckPid() != 0 })
	if st.GetState() != unresponsive || !strings.Contains(st.GetMessage(), "the kernel holds it") {
		t.Errorf("status %v", st)
	}
	b.set()
	b.Retry()
	if _, err := b.Quiesce(t.Context()); err == nil || !strings.Contains(err.Error(), "the kernel holds it") {
		t.Errorf("quiesce: %v", err)
	}
	// Several pauses later there is still no second process.
	timer := time.NewTimer(2 * period)
	<-timer.C
	if now := b.Status(); now.GetStarts() != 1 || now.GetState() != unresponsive {
		t.Errorf("status %v", now)
	}
	mu.Lock()
	held = false
	mu.Unlock()
	if err := unix.Kill(int(st.GetStuckPid()), unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	b.await(ok)
	if now := b.Status(); now.GetStuckPid() != 0 {
		t.Errorf("status %v", now)
	}
}

// Quiesce ends the program, also while it hangs, and keeps it so.
func TestQuiesce(t *testing.T) {
	for _, fault := range []string{"", "hang-init", "mismatch"} {
		t.Run(fault, func(t *testing.T) {
			b := newBench(t, func(c *gpu.Config) { c.InitTimeout = time.Minute }, fault)
			if fault == "" {
				b.await(ok)
			}
			resume, err := b.Quiesce(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			second, err := b.Quiesce(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if live := children(t, b.faults); len(live) != 0 {
				t.Errorf("%v live", live)
			}
			b.set()
			resume()
			resume()
			if st := b.Status(); st.GetState() != quiesced {
				t.Errorf("state %v while one still wants quiet", st)
			}
			second()
			b.await(ok)
		})
	}
}

// The program ends with the agent, and when only the socket is closed.
func TestEndsWithTheAgent(t *testing.T) {
	b := newBench(t, nil, "hang-wait")
	b.await(ok)
	r := child.New(child.Config{Logger: slog.New(slog.DiscardHandler)})
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	p, err := r.Start(child.LongSpec{Argv: []string{exe, "stand-in", b.faults}})
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Conn().Close(); err != nil {
		t.Fatal(err)
	}
	select {
	case <-p.Gone():
	case <-time.After(20 * time.Second):
		t.Fatal("it lives on")
	}
	if code, _, said := p.End(); code != 0 {
		t.Errorf("exit code %d: %s", code, said)
	}
}

// children are the processes with an argument.
func children(t *testing.T, arg string) []string {
	t.Helper()
	paths, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, p := range paths {
		if b, err := os.ReadFile(p); err == nil && strings.Contains(string(b), arg) {
			out = append(out, p)
		}
	}
	return out
}
