package secrets_test

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/gpuaas/millwright/agent/internal/host/files"
	"github.com/gpuaas/millwright/agent/internal/host/secrets"
)

// Nothing that a task has kept outlives it, also not what a write that was cut
// off has left under another name: it is an old secret all the same.
func TestForget(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"t1.0", ".t1.1.millwright.tmp", "t2.0", ".t2.0.millwright.tmp"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("none\n"), 0o400); err != nil {
			t.Fatal(err)
		}
	}
	s := secrets.New(secrets.Config{Dir: dir, Files: files.New()})
	for _, want := range [][]string{{"t1", "t2"}, {"t2"}, nil} {
		kept, err := s.Kept()
		slices.Sort(kept)
		if err != nil || !slices.Equal(kept, want) {
			t.Errorf("Kept() = %q, %v, want %q", kept, err, want)
		}
		if len(kept) == 0 {
			break
		}
		if err := s.Forget(t.Context(), kept[0]); err != nil {
			t.Error(err)
		}
	}
	left, err := os.ReadDir(dir)
	if err != nil || len(left) != 0 {
		t.Errorf("%v is left, %v", left, err)
	}
}
