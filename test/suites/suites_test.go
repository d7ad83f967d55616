package main

import (
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// TestEveryPackageIsInASuite asks that no package with tests is left out of
// what `make test` runs.
func TestEveryPackageIsInASuite(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), "go", "list", "-f", "{{if or .TestGoFiles .XTestGoFiles}}{{.ImportPath}}{{end}}", "./...")
	cmd.Dir = "../.."
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	t.Chdir("../..")
	var covered []string
	for _, s := range required {
		pkgs, err := s.expand(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		covered = append(covered, pkgs...)
	}
	all := strings.Fields(string(out))
	if len(all) < 50 {
		t.Fatalf("%d packages with tests", len(all))
	}
	for _, p := range all {
		if !slices.Contains(covered, p) {
			t.Errorf("%s has tests and is in no suite", p)
		}
	}
}

// TestVerdicts keeps the runner honest: what did not run has not passed.
func TestVerdicts(t *testing.T) {
	for _, tc := range []struct {
		suites  int
		results []result
		want    bool
	}{
		{1, []result{{passed: 1}}, true},
		{1, []result{{}}, false},
		{1, []result{{passed: 5, skipped: 1}}, false},
		{1, []result{{passed: 5, failed: 1}}, false},
		{2, []result{{passed: 1}}, false},
		{0, nil, false},
	} {
		if ok, err := report(make([]suite, tc.suites), tc.results); ok != tc.want || err != nil {
			t.Errorf("report of %d suites, %+v = %t, %v; want %t", tc.suites, tc.results, ok, err, tc.want)
		}
	}
}
