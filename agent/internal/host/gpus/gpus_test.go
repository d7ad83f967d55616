package gpus_test

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/gpuaas/millwright/agent/internal/child"
	"github.com/gpuaas/millwright/agent/internal/host/files"
	"github.com/gpuaas/millwright/agent/internal/host/gpus"
	"github.com/gpuaas/millwright/tasks/host/hosttest"
	"github.com/gpuaas/millwright/test/fakenvml"
)

// built is where the programs of these tests lie.
const built = "MILLWRIGHT_TEST_BUILT"

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "gpus")
	if err != nil {
		panic(err)
	}
	if err := os.Setenv(built, dir); err != nil {
		panic(err)
	}
	code := m.Run()
	if err := os.RemoveAll(dir); err != nil {
		panic(err)
	}
	os.Exit(code)
}

// program builds the real millwright-gpu.
var program = sync.OnceValues(func() (string, error) {
	path := filepath.Join(os.Getenv(built), "millwright-gpu")
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags", "-extldflags=-Wl,-z,lazy", "-o", path, "github.com/gpuaas/millwright/agent/cmd/millwright-gpu")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=1")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build millwright-gpu: %w\n%s", err, out)
	}
	return path, nil
})

// direct makes changes without systemd, of which these tests know nothing:
// test/e2e/mig has both.
type direct struct {
	children *child.Runner
	idle     error
	runs     atomic.Int32
	marks    []string
}

func (d *direct) Mark(unit string) error {
	d.marks = append(d.marks, unit)
	return nil
}

func (d *direct) Idle(context.Context) error { return d.idle }

func (d *direct) Change(ctx context.Context, _ string, argv, environment []string, limit time.Duration) ([]byte, error) {
	d.runs.Add(1)
	res, err := d.children.Run(ctx, child.Spec{Argv: argv, Timeout: limit, Key: "change", Environment: environment})
	if err == nil && res.ExitCode != 0 {
		err = fmt.Errorf("exit code %d", res.ExitCode)
	}
	return res.Stdout, err
}

// node is a Set before the real program, on a node of test/fakenvml.
type node struct {
	*gpus.Set
	*fakenvml.Node
	changes *direct
	cfg     gpus.Config
	dir     string
	quiet   atomic.Int32 // how often the sampler was sent away
	away    atomic.Bool
}

func newNode(t *testing.T, change func(*gpus.Config), products ...string) *node {
	t.Helper()
	path, err := program()
	if err != nil {
		t.Fatal(err)
	}
	lib, err := fakenvml.Build(t.Context(), fakenvml.Variant{})
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "dev"), 0o755); err != nil {
		t.Fatal(err)
	}
	n := &node{dir: dir}
	if n.Node, err = lib.NewNode(t.Context(), filepath.Join(dir, "state"), products...); err != nil {
		t.Fatal(err)
	}
	if err := n.Command(t.Context(), "nvidia-smi", "-L").Run(); err != nil {
		t.Fatal(err)
	}
	children := child.New(child.Config{Logger: slog.New(slog.DiscardHandler)})
	n.changes = &direct{children: children}
	n.cfg = gpus.Config{
		Program: path, Environment: n.Env(), Children: children, Changes: n.changes, Files: files.New(),
		Dev: filepath.Join(dir, "dev"), CDI: filepath.Join(dir, "cdi", "spec.json"), Minors: filepath.Join(dir, "mig-minors"),
		Find: func(_ context.Context, name string) (string, error) {
			p := filepath.Join(dir, name)
			if _, err := os.Stat(p); err == nil {
				return p, nil
			}
			p = filepath.Join(lib.Dir, name)
			_, err := os.Stat(p)
			return p, err
		},
		Quiesce: func(context.Context) (func(), error) {
			n.quiet.Add(1)
			n.away.Store(true)
			return func() { n.away.Store(false) }, nil
		},
	}
	if change != nil {
		change(&n.cfg)
	}
	n.Set = gpus.New(n.cfg)
	t.Cleanup(n.Close)
	return n
}

func (n *node) state(t *testing.T) *fakenvml.State {
	t.Helper()
	s, err := n.State(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func (n *node) uuid(t *testing.T, i int) string { t.Helper(); return n.state(t).GPUs[i].UUID }

// hold has a process hold a GPU.
func (n *node) hold(t testing.TB, args ...string) (int, func()) {
	t.Helper()
	cmd, err := n.Hold(context.WithoutCancel(t.Context()), 1, args...)
	if err != nil {
		t.Fatal(err)
	}
	return cmd.Process.Pid, func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
}

// TestGPUs puts the real thing before the stand-in of the driver's library, of
// both ages, to what the GPUs in memory are put to.
func TestGPUs(t *testing.T) {
	for _, product := range []string{"A100-80", "H100"} {
		t.Run(product, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, nil, "H100", product)
			hosttest.GPUs(t, n, hosttest.GPUEnv{
				UUID: n.uuid(t, 1),
				Hold: func(t testing.TB) (int, func()) { return n.hold(t) },
				Compute: func(t testing.TB, gi, ci uint32) func() {
					_, release := n.hold(t, "compute", strconv.Itoa(int(gi)), strconv.Itoa(int(ci)))
					return release
				},
			})
			if other := n.state(t).GPUs[0]; other.Values["mig_current"] != 0 || other.Values["mig_pending"] != 0 {
				t.Errorf("the other GPU was changed: %+v", other)
			}
		})
	}
}
