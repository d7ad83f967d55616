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
	"github.com/gpuaas/millwright/test/testbed"
	"github.com/gpuaas/millwright/test/testbed/testbedtest"
)

// atLeast is the number of tests below which the binary has lost some.
const atLeast = 60

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
