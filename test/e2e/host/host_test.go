// Package host runs the node tests of agent/internal/host inside a node.
package host

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpuaas/millwright/test/cluster/clustertest"
	"github.com/gpuaas/millwright/test/fakenvml"
	"github.com/gpuaas/millwright/test/testbed"
	"github.com/gpuaas/millwright/test/testbed/testbedtest"
)

// atLeast is the number of tests below which the binary has lost some.
const atLeast = 71

func TestOnNode(t *testing.T) {
	testbedtest.NeedRoot(t)
	binary := filepath.Join(t.TempDir(), "host.test")
	build := exec.CommandContext(t.Context(), "go", "test", "-c", "-tags", "millwright_node", "-o", binary, "./agent/internal/host")
	build.Dir = clustertest.Root(t)
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("compile the node tests: %v\n%s", err, out)
	}
	data, err := os.ReadFile(binary)
	if err != nil {
		t.Fatal(err)
	}
	bed := testbedtest.Up(t, testbed.Config{Nodes: 1, Storage: true})
	n, err := bed.Node("n1")
	if err != nil {
		t.Fatal(err)
	}
	if err := n.WriteFile(t.Context(), "/opt/host.test", data, 0o755); err != nil {
		t.Fatal(err)
	}
	gpus(t, n)
	result, err := n.Exec(t.Context(), "env", "MILLWRIGHT_NODE_TEST=1", "MILLWRIGHT_TEST_VOLUME=storage:v1", "TMPDIR=/var/tmp",
		"/opt/host.test", "-test.v=test2json", "-test.timeout=10m")
	passed, skipped := count(result.Stdout)
	if err != nil {
		t.Fatalf("the node tests: %v\n%s", err, result.Stdout[max(0, len(result.Stdout)-30000):])
	}
	if len(skipped) > 0 || passed < atLeast {
		t.Errorf("%d passed, want at least %d; skipped: %s", passed, atLeast, strings.Join(skipped, ", "))
	}
	t.Logf("%d tests passed in the node", passed)
}

// gpus gives the node the program that asks the GPUs' driver, and the stand-in
// where a driver's library and programs are.
func gpus(t *testing.T, n *testbed.Node) {
	t.Helper()
	program := filepath.Join(t.TempDir(), "millwright-gpu")
	build := exec.CommandContext(t.Context(), "go", "build", "-trimpath", "-ldflags", "-extldflags=-Wl,-z,lazy", "-o", program, "./agent/cmd/millwright-gpu")
	build.Dir = clustertest.Root(t)
	build.Env = append(os.Environ(), "CGO_ENABLED=1")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build millwright-gpu: %v\n%s", err, out)
	}
	lib, err := fakenvml.Build(t.Context(), fakenvml.Variant{})
	if err != nil {
		t.Fatal(err)
	}
	for from, to := range map[string]string{
		program: "/opt/millwright-gpu",
		filepath.Join(lib.Dir, "libnvidia-ml.so.1"): "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1",
		filepath.Join(lib.Dir, "fakenvml-state"):    "/usr/local/bin/fakenvml-state",
		filepath.Join(lib.Dir, "nvidia-smi"):        "/usr/local/bin/nvidia-smi",
	} {
		b, err := os.ReadFile(from)
		if err == nil {
			err = n.WriteFile(t.Context(), to, b, 0o755)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// count reads the output of the test binary.
func count(out []byte) (passed int, skipped []string) {
	for line := range bytes.Lines(out) {
		s := strings.TrimLeft(string(bytes.TrimPrefix(bytes.TrimSpace(line), []byte{0x16})), " ")
		switch {
		case strings.HasPrefix(s, "--- PASS: "):
			passed++
		case strings.HasPrefix(s, "--- SKIP: "):
			skipped = append(skipped, strings.Fields(s)[2])
		}
	}
	return passed, skipped
}

// TestCount keeps the counting honest.
func TestCount(t *testing.T) {
	passed, skipped := count([]byte("=== RUN   TestA\n\x16--- PASS: TestA (0.00s)\n    --- SKIP: TestB/x (0.00s)\n--- FAIL: TestC\n"))
	if passed != 1 || len(skipped) != 1 || skipped[0] != "TestB/x" {
		b, _ := json.Marshal(skipped)
		t.Errorf("count = %d, %s", passed, b)
	}
}
