//go:build cgo

package nvml

import (
	"bytes"
	"flag"
	"fmt"
	"go/ast"
	"go/format"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write symbols.go")

// TestSymbols compares the table with go-nvml's source: for each function that
// this package uses, every symbol that go-nvml may reach in it. Where go-nvml
// chooses among versions by what the library has, any of them will do.
func TestSymbols(t *testing.T) {
	used := usedFunctions(t)
	src := parseGoNVML(t)
	want := map[string][][]string{}
	for name, handlers := range used {
		groups := src.method("library."+name, nil)
		for _, h := range handlers {
			groups = append(groups, src.handler(name, h)...)
		}
		if want[name] = tidy(groups); len(want[name]) == 0 {
			t.Errorf("%s reaches no symbol: the test does not understand go-nvml any more", name)
		}
	}
	if *update {
		write(t, want)
		return
	}
	for name := range want {
		if !reflect.DeepEqual(symbols[name], want[name]) {
			t.Errorf("%s: the table has %v, go-nvml needs %v; run the test with -update", name, symbols[name], want[name])
		}
	}
	// The driver is let go of by the program's end alone: a Shutdown initialises
	// each GPU anew at the next question.
	for name := range used {
		if strings.Contains(name, "Shutdown") {
			t.Errorf("%s is called", name)
		}
	}
	for name := range symbols {
		if want[name] == nil {
			t.Errorf("%s: in the table, and not used", name)
		}
	}
	// What is known of the library, so that an empty understanding shows.
	if got := fmt.Sprint(want["DeviceGetCount"]); got != "[[nvmlDeviceGetCount nvmlDeviceGetCount_v2]]" {
		t.Errorf("DeviceGetCount: %s", got)
	}
	if got := fmt.Sprint(want["DeviceGetGpuFabricInfoV"]); got != "[[nvmlDeviceGetGpuFabricInfoV]]" {
		t.Errorf("DeviceGetGpuFabricInfoV: %s", got)
	}
}

// usedFunctions are the functions of the library that this package uses, with
// the methods of the handlers that some return. Each must be inside call or get
// with its own name, which is what guards it.
func usedFunctions(t *testing.T) map[string][]string {
	used := map[string][]string{}
	paths, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range paths {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		fset := token.NewFileSet()
		f, err := parser.ParseFile(fset, path, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		consts := constants(f)
		var stack []ast.Node
		ast.Inspect(f, func(n ast.Node) bool {
			if n == nil {
				stack = stack[:len(stack)-1]
				return true
			}
			stack = append(stack, n)
			sel, ok := n.(*ast.SelectorExpr)
			if !ok || !isAPI(sel.X) {
				return true
			}
			name := sel.Sel.Name
			if got := guardedBy(stack, consts); got != name {
				t.Errorf("%s: %s is called under the name %q: a function that the library lacks ends the process", fset.Position(n.Pos()), name, got)
			}
			handlers := used[name]
			if len(stack) > 2 {
				if outer, ok := stack[len(stack)-3].(*ast.SelectorExpr); ok {
					handlers = append(handlers, outer.Sel.Name)
				}
			}
			used[name] = handlers
			return true
		})
	}
	if len(used) < 40 {
		t.Fatalf("found only %d functions", len(used))
	}
	return used
}

func isAPI(e ast.Expr) bool {
	sel, ok := e.(*ast.SelectorExpr)
	return ok && sel.Sel.Name == "api"
}

// guardedBy is the name given to the innermost call or get around a node.
func guardedBy(stack []ast.Node, consts map[string]string) string {
	for _, n := range slices.Backward(stack) {
		c, ok := n.(*ast.CallExpr)
		if !ok {
			continue
		}
		id, ok := c.Fun.(*ast.Ident)
		if !ok {
			continue
		}
		at := map[string]int{"call": 1, "get": 3}[id.Name]
		if at == 0 {
			continue
		}
		switch arg := c.Args[at].(type) {
		case *ast.BasicLit:
			s, _ := strconv.Unquote(arg.Value)
			return s
		case *ast.Ident:
			return consts[arg.Name]
		}
	}
	return ""
}

func constants(f *ast.File) map[string]string {
	out := map[string]string{}
	ast.Inspect(f, func(n ast.Node) bool {
		if s, ok := n.(*ast.ValueSpec); ok && len(s.Names) == 1 && len(s.Values) == 1 {
			if lit, ok := s.Values[0].(*ast.BasicLit); ok && lit.Kind == token.STRING {
				out[s.Names[0].Name], _ = strconv.Unquote(lit.Value)
			}
		}
		return true
	})
	return out
}

// source is go-nvml's source.
type source struct {
	t       *testing.T
	funcs   map[string]*ast.FuncDecl // name, or receiver.name
	choices map[string][]string      // variables that hold one of several functions
}

func parseGoNVML(t *testing.T) *source {
	out, err := exec.CommandContext(t.Context(), "go", "list", "-f", "{{.Dir}}", "github.com/NVIDIA/go-nvml/pkg/nvml").Output()
	if err != nil {
		t.Fatalf("find go-nvml: %v", err)
	}
	paths, err := filepath.Glob(filepath.Join(strings.TrimSpace(string(out)), "*.go"))
	if err != nil {
		t.Fatal(err)
	}
	s := &source{t: t, funcs: map[string]*ast.FuncDecl{}, choices: map[string][]string{}}
	for _, path := range paths {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(f, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.FuncDecl:
				s.funcs[receiver(n)+n.Name.Name] = n
			case *ast.ValueSpec:
				for i, v := range n.Values {
					s.choose(n.Names[i], v)
				}
			case *ast.AssignStmt:
				if n.Tok == token.ASSIGN && len(n.Lhs) == 1 && len(n.Rhs) == 1 {
					s.choose(n.Lhs[0], n.Rhs[0])
				}
			}
			return true
		})
	}
	return s
}

func (s *source) choose(to, from ast.Expr) {
	a, ok1 := to.(*ast.Ident)
	b, ok2 := from.(*ast.Ident)
	if ok1 && ok2 && (strings.HasPrefix(b.Name, a.Name+"_v") || a.Name == b.Name+"Stub") {
		s.choices[a.Name] = append(s.choices[a.Name], b.Name)
	}
}

func receiver(f *ast.FuncDecl) string {
	if f.Recv == nil {
		return ""
	}
	return typeName(f.Recv.List[0].Type) + "."
}

func typeName(e ast.Expr) string {
	if s, ok := e.(*ast.StarExpr); ok {
		e = s.X
	}
	if id, ok := e.(*ast.Ident); ok {
		return id.Name
	}
	return ""
}

// method finds the symbols that a function needs.
func (s *source) method(name string, seen []string) [][]string {
	if name == "library.load" {
		return nil // it opens the library and looks for functions, and calls none
	}
	f := s.funcs[name]
	if f == nil || slices.Contains(seen, name) {
		return nil
	}
	seen = append(seen, name)
	types := map[string]string{}
	if f.Recv != nil && len(f.Recv.List[0].Names) == 1 {
		types[f.Recv.List[0].Names[0].Name] = typeName(f.Recv.List[0].Type)
	}
	for _, p := range f.Type.Params.List {
		for _, id := range p.Names {
			if n := typeName(p.Type); s.isHandle(n) {
				types[id.Name] = "nvml" + n
			}
		}
	}
	var out [][]string
	ast.Inspect(f.Body, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.SelectorExpr:
			x, ok := n.X.(*ast.Ident)
			switch {
			case ok && x.Name == "C" && strings.HasPrefix(n.Sel.Name, "nvml") && !strings.HasSuffix(n.Sel.Name, "_t") && n.Sel.Name[4] <= 'Z':
				out = append(out, []string{n.Sel.Name})
			case ok && types[x.Name] != "":
				out = append(out, s.method(types[x.Name]+"."+n.Sel.Name, seen)...)
			}
			return false
		case *ast.Ident:
			if any := s.choices[n.Name]; any != nil {
				var group []string
				for _, c := range any {
					for _, g := range s.method(c, seen) {
						group = append(group, g...)
					}
				}
				out = append(out, group)
			} else {
				out = append(out, s.method(n.Name, seen)...)
			}
		}
		return true
	})
	return out
}

func (s *source) isHandle(name string) bool {
	return slices.Contains([]string{"Device", "GpuInstance", "ComputeInstance", "EventSet"}, name)
}

// handler finds the symbols of a method of the handler that a function returns.
func (s *source) handler(name, method string) [][]string {
	f := s.funcs["library."+name]
	for _, r := range f.Type.Results.List {
		if n := typeName(r.Type); strings.HasSuffix(n, "Handler") {
			return s.method(n+"."+method, nil)
		}
	}
	return nil
}

func tidy(groups [][]string) [][]string {
	seen := map[string]bool{}
	var out [][]string
	for _, g := range groups {
		slices.Sort(g)
		g = slices.Compact(g)
		if key := strings.Join(g, " "); len(g) > 0 && !seen[key] {
			seen[key] = true
			out = append(out, g)
		}
	}
	slices.SortFunc(out, func(a, b []string) int { return strings.Compare(a[0], b[0]) })
	return out
}

func write(t *testing.T, want map[string][][]string) {
	var b bytes.Buffer
	b.WriteString(`//go:build cgo

package nvml

// symbols is every function that this package uses, with the symbols of the
// library that go-nvml may reach in it: one of each group must be there. A test
// compares it with go-nvml's source, and writes it with -update.
var symbols = map[string][][]string{
`)
	for _, name := range slices.Sorted(maps.Keys(want)) {
		fmt.Fprintf(&b, "\t%q: {", name)
		for _, g := range want[name] {
			b.WriteString("{")
			for i, s := range g {
				if i > 0 {
					b.WriteString(", ")
				}
				fmt.Fprintf(&b, "%q", s)
			}
			b.WriteString("},")
		}
		b.WriteString("},\n")
	}
	b.WriteString("}\n")
	out, err := format.Source(b.Bytes())
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile("symbols.go", out, 0o644); err != nil {
		t.Fatal(err)
	}
}
