package fakenvml_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestReadme runs the block of the README, in the root of the repository.
func TestReadme(t *testing.T) {
	b, err := os.ReadFile("README.md")
	must(t, err)
	state := filepath.Join(t.TempDir(), "gpus")
	var script strings.Builder
	for line := range strings.Lines(string(b)) {
		if cmd, ok := strings.CutPrefix(line, "    "); ok {
			script.WriteString(strings.ReplaceAll(cmd, "/tmp/gpus", state))
		}
	}
	cmd := exec.CommandContext(t.Context(), "bash", "-e", "-c", script.String())
	cmd.Dir = filepath.Join("..", "..")
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "0, 95\n1, 34\n") || !strings.Contains(string(out), `"dbe_volatile":1`) {
		t.Errorf("the README's commands: %v\n%s", err, out)
	}
}
