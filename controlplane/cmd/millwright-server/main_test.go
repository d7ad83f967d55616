package main_test

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// forbidden are the marks of the switches that only test builds have.
var forbidden = []string{"MILLWRIGHT_CRASH", "server.store.committed", "server.create.before", "crash-points"}

// TestReleaseHasNoTestSwitches builds the program as it is released and looks
// for the marks; it builds it with the test tag too, to see that the marks
// would be found.
func TestReleaseHasNoTestSwitches(t *testing.T) {
	release := build(t, "")
	for _, mark := range forbidden {
		if bytes.Contains(release, []byte(mark)) {
			t.Errorf("the released program contains %q", mark)
		}
	}
	marked := build(t, "millwright_crash")
	for _, mark := range forbidden {
		if !bytes.Contains(marked, []byte(mark)) {
			t.Errorf("the program with the test tag does not contain %q: this test sees nothing", mark)
		}
	}
}

func build(t *testing.T, tags string) []byte {
	t.Helper()
	path := filepath.Join(t.TempDir(), "millwright-server")
	cmd := exec.CommandContext(t.Context(), "go", "build", "-trimpath", "-tags", tags, "-o", path, ".")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("go build -tags %q: %v\n%s", tags, err, out)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}
