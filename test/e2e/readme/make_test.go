package readme

import (
	"bytes"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpuaas/millwright/test/cluster/clustertest"
)

func makeIn(t *testing.T, dir, target string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "make", "--no-print-directory", target)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("make %s: %v\n%s", target, err, out)
	}
	return string(out)
}

// TestMakeRuns runs the targets that the README tells developers to run and
// that no other suite runs. `make lint` is not among them: its tool takes longer
// to build than all suites to run.
func TestMakeRuns(t *testing.T) {
	root := clustertest.Root(t)
	help := makeIn(t, root, "help")
	for _, target := range []string{"build", "test", "check", "proto", "lint", "vuln", "demo", "bench"} {
		if !strings.Contains(help, "\n  "+target+" ") {
			t.Errorf("make help does not list %s:\n%s", target, help)
		}
	}
	makeIn(t, root, "check")
	if out := makeIn(t, root, "bench"); !strings.Contains(out, "ns/op") {
		t.Errorf("make bench prints no figures:\n%s", out)
	}
}

// TestMakeProto generates the code of the formats in a copy, and asks that it is
// what the repository has.
func TestMakeProto(t *testing.T) {
	root, dir := clustertest.Root(t), t.TempDir()
	for _, name := range []string{"Makefile", "packaging", "bin"} {
		if err := os.Symlink(filepath.Join(root, name), filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	was := os.DirFS(filepath.Join(root, "proto"))
	if err := os.CopyFS(filepath.Join(dir, "proto"), was); err != nil {
		t.Fatal(err)
	}
	// What is not written again stays empty.
	generated, err := fs.Glob(was, "millwright/*/v1/*.pb.go")
	if err != nil || len(generated) == 0 {
		t.Fatalf("%d generated files (%v)", len(generated), err)
	}
	for _, name := range generated {
		if err := os.Truncate(filepath.Join(dir, "proto", name), 0); err != nil {
			t.Fatal(err)
		}
	}
	makeIn(t, dir, "proto")
	for _, name := range generated {
		want, err1 := fs.ReadFile(was, name)
		got, err2 := os.ReadFile(filepath.Join(dir, "proto", name))
		if err1 != nil || err2 != nil || !bytes.Equal(got, want) {
			t.Errorf("proto/%s is not what make proto generates (%v, %v)", name, err1, err2)
		}
	}
}
