package health_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/millwright/agent/internal/child"
	"github.com/gpuaas/millwright/agent/internal/clock"
	"github.com/gpuaas/millwright/agent/internal/gpu"
	"github.com/gpuaas/millwright/agent/internal/health"
	"github.com/gpuaas/millwright/agent/internal/health/xid"
	healthv1 "github.com/gpuaas/millwright/proto/millwright/health/v1"
	"github.com/gpuaas/millwright/test/fakenvml"
)

// built is where the tests build millwright-gpu.
const built = "MILLWRIGHT_HEALTH_BUILT"

func TestMain(m *testing.M) { os.Exit(withDir(m)) }

func withDir(m *testing.M) int {
	dir, err := os.MkdirTemp("", "millwright-health")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir) //nolint:errcheck // what stays is in the directory for temporary files
	if err := os.Setenv(built, dir); err != nil {
		panic(err)
	}
	return m.Run()
}

// program builds the real millwright-gpu, as make gpu-child does.
var program = sync.OnceValues(func() (string, error) {
	path := filepath.Join(os.Getenv(built), "millwright-gpu")
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags", "-extldflags=-Wl,-z,lazy", "-o", path, "github.com/gpuaas/millwright/agent/cmd/millwright-gpu")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=1")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build millwright-gpu: %w\n%s", err, out)
	}
	return path, nil
})

// leap is the machine's clock, with leaps.
type leap struct {
	clock.System
	by atomic.Int64
}

func (l *leap) Now() time.Time      { return l.System.Now().Add(time.Duration(l.by.Load())) }
func (l *leap) Boot() time.Duration { return l.System.Boot() + time.Duration(l.by.Load()) }

// memory is a journal in memory, which may be broken or full.
type memory struct {
	mu     sync.Mutex
	known  map[string]*healthv1.HealthEdge
	cursor health.Cursor
	edges  []*healthv1.HealthEdge
	full   bool
	broken bool
}

func (m *memory) Known() (k health.Known, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, e := range m.known {
		k.Edges = append(k.Edges, proto.CloneOf(e))
	}
	k.Cursor = m.cursor
	return k, nil
}

func (m *memory) Room() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return !m.full
}

func (m *memory) Tell(c health.Change) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.broken {
		return errors.New("the disk is full")
	}
	if m.known == nil {
		m.known = map[string]*healthv1.HealthEdge{}
	}
	for _, e := range c.Edges {
		m.known[e.GetCondition().GetKey()] = proto.CloneOf(e)
		m.edges = append(m.edges, proto.CloneOf(e))
	}
	m.cursor = c.Cursor
	return nil
}

func (m *memory) all() []*healthv1.HealthEdge {
	m.mu.Lock()
	defer m.mu.Unlock()
	return append([]*healthv1.HealthEdge(nil), m.edges...)
}

// bench is a Monitor before the real program and a node of test/fakenvml.
type bench struct {
	*health.Monitor
	*fakenvml.Node
	t       *testing.T
	clock   *leap
	journal *memory
	log     string // the kernel's
	lines   int
	gpus    *gpu.Supervisor
}

const period = 200 * time.Millisecond

func newBench(t *testing.T, v fakenvml.Variant, change func(*health.Config), products ...string) *bench {
	t.Helper()
	path, err := program()
	if err != nil {
		t.Fatal(err)
	}
	lib, err := fakenvml.Build(t.Context(), v)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	n, err := lib.NewNode(t.Context(), filepath.Join(dir, "state"), products...)
	if err != nil {
		t.Fatal(err)
	}
	quiet := slog.New(slog.DiscardHandler)
	b := &bench{Node: n, t: t, clock: &leap{}, journal: &memory{}, log: filepath.Join(dir, "kmsg")}
	b.kernel()
	b.gpus = gpu.New(gpu.Config{
		Mode: gpu.On, Program: path, Env: n.Env(), Runner: child.New(child.Config{Logger: quiet}), Logger: quiet, Clock: b.clock,
		InitTimeout: 3 * time.Second, CallTimeout: time.Second, EventWait: time.Second, Pause: period, Sysfs: dir,
	})
	table, err := xid.Builtin()
	if err != nil {
		t.Fatal(err)
	}
	cfg := health.Config{
		Driver: b.gpus, Journal: b.journal, Clock: b.clock, Logger: quiet, BootID: "boot-1", XIDs: table,
		Period: period, SlowPeriod: period, KernelLog: b.log,
	}
	if change != nil {
		change(&cfg)
	}
	b.Monitor = health.New(cfg)
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	for _, run := range []func(context.Context) error{b.gpus.Run, b.Run} {
		running.Go(func() {
			if err := run(ctx); err != nil {
				t.Errorf("run: %v", err)
			}
		})
	}
	t.Cleanup(func() { cancel(); running.Wait() })
	return b
}

// kernel writes lines to the kernel's log.
func (b *bench) kernel(lines ...string) {
	b.t.Helper()
	f, err := os.OpenFile(b.log, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		b.t.Fatal(err)
	}
	defer f.Close()
	var text strings.Builder
	for _, l := range lines {
		b.lines++
		fmt.Fprintf(&text, "4,%d,%d,-;%s\n", b.lines, b.clock.Boot().Microseconds(), l)
	}
	if _, err := f.WriteString(text.String()); err != nil {
		b.t.Fatal(err)
	}
}

// await waits until a whole report fits.
func (b *bench) await(what string, fits func(*healthv1.HealthReport) bool) *healthv1.HealthReport {
	b.t.Helper()
	limit := time.NewTimer(20 * time.Second)
	defer limit.Stop()
	for {
		changed := b.Changed()
		r := b.Report(true)
		if r != nil && fits(r) {
			return r
		}
		select {
		case <-changed:
		case <-limit.C:
			b.t.Fatalf("%s: not within 20 s: %v", what, r)
		}
	}
}

// looked waits for a whole sample that was begun after now.
func (b *bench) looked() *healthv1.HealthReport {
	b.t.Helper()
	now := time.Now() // the program has the clock of the machine
	return b.await("a sample", func(r *healthv1.HealthReport) bool { return r.GetSample().GetReadAt().AsTime().After(now) })
}

func find(r *healthv1.HealthReport, key string) *healthv1.Condition {
	for _, c := range r.GetConditions() {
		if c.GetKey() == key {
			return c
		}
	}
	return nil
}
