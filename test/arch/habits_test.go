package arch_test

import (
	"go/ast"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const (
	maxFileLines     = 600
	maxFunctionLines = 80
	maxInterface     = 7
)

// carriesContext are the files that may hold a context in a struct, and why.
var carriesContext = map[string]string{
	"controlplane/internal/rpc/intercept/chain.go":    "grpc.ServerStream leaves no other way to hand one on",
	"test/simulation/wire.go":                         "grpc.ClientStream and ServerStream return the context of their call",
	"controlplane/internal/store/boltstore/writer.go": "a request in a queue carries the context of the caller that waits for it",
}

func TestPackagesAreDocumented(t *testing.T) {
	documented := map[string]int{}
	for _, f := range sources(t) {
		if f.test {
			continue
		}
		dir := filepath.Dir(f.path)
		if f.ast.Doc != nil {
			documented[dir]++
		} else {
			documented[dir] += 0
		}
	}
	for dir, n := range documented {
		if n == 0 {
			t.Errorf("%s has no package comment", dir)
		}
	}
}

func TestExportedNamesAreDocumented(t *testing.T) {
	for _, f := range sources(t) {
		if f.test || f.ast.Name.Name == "main" {
			continue
		}
		for _, d := range f.ast.Decls {
			switch d := d.(type) {
			case *ast.FuncDecl:
				if d.Name.IsExported() && d.Doc == nil && receiverExported(d) {
					t.Errorf("%s: %s has no doc comment", f.at(d), d.Name.Name)
				}
			case *ast.GenDecl:
				for _, s := range d.Specs {
					if ts, ok := s.(*ast.TypeSpec); ok && ts.Name.IsExported() && ts.Doc == nil && d.Doc == nil {
						t.Errorf("%s: type %s has no doc comment", f.at(ts), ts.Name.Name)
					}
				}
			}
		}
	}
}

func receiverExported(d *ast.FuncDecl) bool {
	if d.Recv == nil || len(d.Recv.List) == 0 {
		return true
	}
	typ := d.Recv.List[0].Type
	if s, ok := typ.(*ast.StarExpr); ok {
		typ = s.X
	}
	if i, ok := typ.(*ast.IndexExpr); ok {
		typ = i.X
	}
	id, ok := typ.(*ast.Ident)
	return ok && id.IsExported()
}

func TestSizes(t *testing.T) {
	for _, f := range sources(t) {
		if !f.test && f.lines() > maxFileLines {
			t.Errorf("%s has %d lines, at most %d: it holds more than one concern", f.path, f.lines(), maxFileLines)
		}
		ast.Inspect(f.ast, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.FuncDecl:
				if n.Body == nil || f.test {
					return true
				}
				from, to := f.fset.Position(n.Pos()).Line, f.fset.Position(n.End()).Line
				if to-from+1 > maxFunctionLines {
					t.Errorf("%s: %s has %d lines, at most %d", f.at(n), n.Name.Name, to-from+1, maxFunctionLines)
				}
			case *ast.TypeSpec:
				if i, ok := n.Type.(*ast.InterfaceType); ok && i.Methods.NumFields() > maxInterface {
					t.Errorf("%s: interface %s has %d methods, at most %d: say what the user needs", f.at(n), n.Name.Name, i.Methods.NumFields(), maxInterface)
				}
			}
			return true
		})
	}
}

func TestNoHiddenMachinery(t *testing.T) {
	for _, f := range sources(t) {
		ast.Inspect(f.ast, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.FuncDecl:
				if n.Name.Name == "init" && n.Recv == nil {
					t.Errorf("%s: init: say what happens where it happens", f.at(n))
				}
			case *ast.GoStmt:
				if !f.test {
					t.Errorf("%s: a bare go statement: nothing waits for its end; use errgroup or WaitGroup.Go", f.at(n))
				}
			case *ast.StructType:
				for _, field := range n.Fields.List {
					if sel, ok := field.Type.(*ast.SelectorExpr); ok && sel.Sel.Name == "Context" && isName(sel.X, "context") && carriesContext[f.path] == "" {
						t.Errorf("%s: a context in a struct: pass it", f.at(field))
					}
				}
			case *ast.CallExpr:
				if sel, ok := n.Fun.(*ast.SelectorExpr); ok && isName(sel.X, "time") && sel.Sel.Name == "Sleep" && !within(f.path, "test/simulation") { // in a bubble of testing/synctest, where nobody waits
					t.Errorf("%s: time.Sleep: wait for a condition or a timer that the context can end", f.at(n))
				}
			}
			return true
		})
	}
}

func isName(e ast.Expr, name string) bool {
	id, ok := e.(*ast.Ident)
	return ok && id.Name == name
}

func TestNames(t *testing.T) {
	bad := []string{"common", "util", "utils", "helper", "helpers", "manager", "base", "types", "misc", "pkg"}
	for _, p := range packages(t) {
		if slices.Contains(bad, p.Name) {
			t.Errorf("%s: package %s says nothing of what it holds", p.rel(), p.Name)
		}
	}
	for _, f := range sources(t) {
		if name := strings.TrimSuffix(filepath.Base(f.path), ".go"); slices.Contains(bad, name) {
			t.Errorf("%s: the file's name says nothing of what it holds", f.path)
		}
	}
}

func TestTopLevel(t *testing.T) {
	want := []string{
		".ci", ".git", ".github", ".gitignore", ".golangci.yml", "CHANGELOG.md", "LICENSE", "Makefile", "README.md",
		"agent", "bin", "controlplane", "dist", "go.mod", "go.sum", "packaging", "pki", "proto", "tasks", "test",
	}
	entries, err := os.ReadDir(root())
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if !slices.Contains(want, e.Name()) {
			t.Errorf("%s: the top level is fixed", e.Name())
		}
	}
}

// TestMainsAreThin keeps wiring out of the mains.
func TestMainsAreThin(t *testing.T) {
	for _, f := range sources(t) {
		if f.ast.Name.Name == "main" && strings.Contains(f.path, "/cmd/") && !strings.HasPrefix(f.path, "test/") && !f.test && f.lines() > 40 {
			t.Errorf("%s has %d lines: a main only calls the package that does the work", f.path, f.lines())
		}
	}
}
