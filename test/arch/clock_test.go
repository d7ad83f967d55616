package arch_test

import (
	"go/ast"
	"slices"
	"strings"
	"testing"
)

// readsClock are the files of agent and server that may read the machine's clock
// themselves, and why. All others are given a clock, so that a test can set it.
var readsClock = map[string]string{
	"agent/internal/clock/clock.go":        "it is the clock",
	"controlplane/internal/clock/clock.go": "it is the clock",
	"controlplane/internal/ctl/app.go":     "millctl's main gives all commands this clock",
}

// TestClockIsInjected: what decides by a clock that it fetched itself cannot be
// shown to be right when the clock is wrong.
func TestClockIsInjected(t *testing.T) {
	used := map[string]bool{}
	for _, f := range sources(t) {
		if f.test || !strings.HasPrefix(f.path, "agent/") && !strings.HasPrefix(f.path, "controlplane/") {
			continue
		}
		ast.Inspect(f.ast, func(n ast.Node) bool {
			sel, ok := n.(*ast.SelectorExpr)
			if !ok || !isName(sel.X, "time") || !slices.Contains([]string{"Now", "Since", "Until"}, sel.Sel.Name) {
				return true
			}
			if used[f.path] = true; readsClock[f.path] == "" {
				t.Errorf("%s: time.%s: take the clock from the configuration", f.at(n), sel.Sel.Name)
			}
			return true
		})
	}
	for path := range readsClock {
		if !used[path] {
			t.Errorf("%s reads no clock any more: take it from the list", path)
		}
	}
}
