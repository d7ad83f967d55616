package state_test

import (
	"bytes"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpuaas/millwright/agent/internal/child"
	"github.com/gpuaas/millwright/agent/internal/state"
)

// TestRepair damages a real state file in many ways and has what can be read saved
// by a process of its own: either a file comes of it that is sound as a file, or it
// is said that nothing can be saved. The damaged file stays as it was.
func TestRepair(t *testing.T) {
	cfg := lived(t)
	whole := read(t, filepath.Join(cfg.Dir, "state.db"))
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	run := child.New(child.Config{Logger: slog.New(slog.DiscardHandler)}).Run
	sound, err := state.RepairCopy(t.Context(), run, exe, filepath.Join(cfg.Dir, "state.db"), filepath.Join(t.TempDir(), "out"))
	if err != nil || len(sound.Lost) > 0 || sound.Wrong != "" || sound.Records["tasks"] != 16 {
		t.Fatalf("RepairCopy of a sound file = %+v, %v; want all 16 tasks and nothing lost", sound, err)
	}
	saved, partly, nothing := 0, 0, 0
	for i, m := range mutants(whole) {
		if i%4 != 0 { // a process or two for each
			continue
		}
		dir := t.TempDir()
		in, out := filepath.Join(dir, "state.db"), filepath.Join(dir, "out")
		damaged := m.damage(bytes.Clone(whole))
		write(t, in, damaged)
		r, err := state.RepairCopy(t.Context(), run, exe, in, out)
		if !bytes.Equal(read(t, in), damaged) {
			t.Errorf("%s: the damaged file was changed", m.name)
		}
		if err != nil {
			nothing++
			if !errors.Is(err, state.ErrDamaged) {
				t.Errorf("%s: RepairCopy() = %v, want ErrDamaged", m.name, err)
			}
			continue
		}
		if len(r.Lost) == 0 && r.Records["tasks"] == 16 {
			saved++
		} else {
			partly++
		}
		if f, err := state.CheckCopy(t.Context(), run, exe, out); errors.Is(err, state.ErrDamaged) && r.Wrong == "" || f.JournalID != r.Facts.JournalID {
			t.Errorf("%s: the repaired file: %+v, %v", m.name, f, err)
		}
	}
	t.Logf("%d whole, %d in part, %d not at all", saved, partly, nothing)
	if saved == 0 || partly < 10 {
		t.Errorf("%d files were saved whole and %d in part; want some, and at least 10", saved, partly)
	}
}

// TestRepairOverwritesNothing asks that a file that is there stays.
func TestRepairOverwritesNothing(t *testing.T) {
	cfg := lived(t)
	out := filepath.Join(t.TempDir(), "out")
	write(t, out, []byte("mine"))
	run := child.New(child.Config{Logger: slog.New(slog.DiscardHandler)}).Run
	_, err := state.RepairCopy(t.Context(), run, "/bin/false", filepath.Join(cfg.Dir, "state.db"), out)
	if !errors.Is(err, os.ErrExist) || !strings.Contains(err.Error(), out) || string(read(t, out)) != "mine" {
		t.Errorf("RepairCopy() = %v, want that %s exists", err, out)
	}
}
