package main

import (
	"errors"
	"os/exec"
	"path/filepath"
	"testing"
)

func root(t *testing.T) string {
	t.Helper()
	dir, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// TestListIsTrue asks that every guard is where the list says, and that the
// product compiles without it, so that the list does not rot.
func TestListIsTrue(t *testing.T) {
	all, names := mutants(), map[string]bool{}
	if len(all) < 15 {
		t.Errorf("%d guards, want 15 at least", len(all))
	}
	dir, at := t.TempDir(), root(t)
	for _, m := range all {
		if names[m.name] || m.guards == "" || len(m.judge) == 0 || m.old == m.new {
			t.Errorf("%s: named twice, or without a promise, a judge or a change", m.name)
		}
		names[m.name] = true
		overlay, err := m.overlay(at, dir)
		if err != nil {
			t.Error(err)
			continue
		}
		cmd := exec.CommandContext(t.Context(), "go", "build", "-overlay="+overlay, "./"+filepath.Dir(m.file))
		cmd.Dir = at
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%s does not compile: %v\n%s", m.name, err, out)
		}
	}
}

func TestJudgement(t *testing.T) {
	failed := errors.New("exit status 1")
	for _, c := range []struct {
		out  string
		err  error
		want verdict
	}{
		{"ok  \tpkg\t0.1s\n", nil, survived},
		{"FAIL\tpkg [build failed]\nFAIL\n", failed, broken},
		{"--- FAIL: TestA (0.00s)\nFAIL\n", failed, killed},
		{"panic: test timed out after 4m0s\n--- FAIL: TestA\n", failed, late},
		{"go: no such package\n", failed, broken},
	} {
		if got := judgement(c.out, c.err); got != c.want {
			t.Errorf("judgement(%q) = %s, want %s", c.out, got, c.want)
		}
	}
}
