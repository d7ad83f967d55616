package arch_test

import (
	"go/ast"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var (
	shownByTest = regexp.MustCompile("`([a-z_/0-9]+) (Test[A-Za-z0-9]+)`")
	shownByMake = regexp.MustCompile("`make ([a-z]+)`")
)

// TestPromisesAreShown asks that each line of the table of promises names tests
// or targets that there are.
func TestPromisesAreShown(t *testing.T) {
	readme, err := os.ReadFile(filepath.Join(root(), "agent/README.md"))
	if err != nil {
		t.Fatal(err)
	}
	makefile, err := os.ReadFile(filepath.Join(root(), "Makefile"))
	if err != nil {
		t.Fatal(err)
	}
	known := map[string]bool{}
	for _, f := range sources(t) {
		for _, d := range f.ast.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok && f.test && fn.Recv == nil {
				known[filepath.Dir(f.path)+" "+fn.Name.Name] = true
			}
		}
	}
	lines := 0
	_, table, _ := strings.Cut(string(readme), "| fault |")
	table, _, _ = strings.Cut(table, "\n\n")
	for _, line := range strings.Split(table, "\n")[2:] {
		lines++
		tests, targets := shownByTest.FindAllStringSubmatch(line, -1), shownByMake.FindAllStringSubmatch(line, -1)
		if len(tests)+len(targets) == 0 {
			t.Errorf("nothing shows: %s", line)
		}
		for _, m := range tests {
			if !known[m[1]+" "+m[2]] {
				t.Errorf("there is no %s in %s, which is to show: %s", m[2], m[1], line)
			}
		}
		for _, m := range targets {
			if !strings.Contains(string(makefile), "\n"+m[1]+":") {
				t.Errorf("there is no make %s, which is to show: %s", m[1], line)
			}
		}
	}
	if lines < 15 {
		t.Errorf("the table has %d lines, want at least 15", lines)
	}
}
