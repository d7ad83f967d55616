package arch_test

import (
	"bytes"
	"context"
	"encoding/json"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

const module = "github.com/gpuaas/millwright"

// pkg is what go list says of one package of this module.
type pkg struct {
	ImportPath   string
	Dir          string
	Name         string
	GoFiles      []string
	CgoFiles     []string
	TestGoFiles  []string
	XTestGoFiles []string
	Imports      []string
	TestImports  []string
	XTestImports []string
}

// rel is the package's directory below the root.
func (p pkg) rel() string { return strings.TrimPrefix(strings.TrimPrefix(p.ImportPath, module), "/") }

var root = sync.OnceValue(func() string {
	wd, err := os.Getwd()
	if err != nil {
		panic(err)
	}
	return filepath.Dir(filepath.Dir(wd))
})

var list = sync.OnceValues(func() ([]pkg, error) {
	return goList("./...")
})

func goList(args ...string) ([]pkg, error) {
	cmd := exec.CommandContext(context.Background(), "go", append([]string{"list", "-json"}, args...)...)
	cmd.Dir = root()
	var errs bytes.Buffer
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		return nil, &listError{err, errs.String()}
	}
	var pkgs []pkg
	for d := json.NewDecoder(bytes.NewReader(out)); ; {
		var p pkg
		if err := d.Decode(&p); err == io.EOF {
			return pkgs, nil
		} else if err != nil {
			return nil, err
		}
		pkgs = append(pkgs, p)
	}
}

type listError struct {
	err    error
	stderr string
}

func (e *listError) Error() string { return "go list: " + e.err.Error() + "\n" + e.stderr }

func packages(t *testing.T) []pkg {
	t.Helper()
	pkgs, err := list()
	if err != nil {
		t.Fatal(err)
	}
	if len(pkgs) < 20 {
		t.Fatalf("go list found %d packages; the repository has more", len(pkgs))
	}
	return pkgs
}

// file is one parsed, hand-written Go file.
type file struct {
	path string // below the root
	test bool
	fset *token.FileSet
	ast  *ast.File
}

func (f file) lines() int { return f.fset.File(f.ast.Pos()).LineCount() }

func (f file) at(n ast.Node) string {
	p := f.fset.Position(n.Pos())
	return f.path + ":" + itoa(p.Line)
}

var files = sync.OnceValues(func() ([]file, error) {
	var out []file
	err := filepath.WalkDir(root(), func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && (d.Name() == ".git" || d.Name() == "bin" || d.Name() == "dist" || d.Name() == "testdata") {
			return filepath.SkipDir
		}
		if d.IsDir() || !strings.HasSuffix(p, ".go") || strings.HasSuffix(p, ".pb.go") {
			return nil
		}
		fset := token.NewFileSet()
		a, err := parser.ParseFile(fset, p, nil, parser.ParseComments)
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root(), p)
		if err != nil {
			return err
		}
		out = append(out, file{path: rel, test: strings.HasSuffix(p, "_test.go"), fset: fset, ast: a})
		return nil
	})
	return out, err
})

func sources(t *testing.T) []file {
	t.Helper()
	fs, err := files()
	if err != nil {
		t.Fatal(err)
	}
	return fs
}

func itoa(n int) string {
	b, _ := json.Marshal(n)
	return string(b)
}
