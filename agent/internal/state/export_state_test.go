package state_test

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/gpuaas/millwright/agent/internal/state"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// exported checks what every export must be, and returns its lines.
func exported(t *testing.T, export func(func(*agentv1.JournalLine) error) error) []*agentv1.JournalLine {
	t.Helper()
	var lines []*agentv1.JournalLine
	if err := export(func(l *agentv1.JournalLine) error { lines = append(lines, l); return nil }); err != nil {
		t.Fatalf("export: %v", err)
	}
	var seq uint64
	var prev []byte
	for i, l := range lines {
		if f := l.GetFrame(); f != nil {
			sum := sha256.Sum256(f.GetBytes())
			if f.GetSeq() != seq+1 || !bytes.Equal(sum[:], f.GetHash()) || seq > 0 && !bytes.Equal(f.GetPrevHash(), prev) || f.GetEvent().GetSeq() != f.GetSeq() {
				t.Errorf("line %d: frame %d does not follow frame %d", i, f.GetSeq(), seq)
			}
			seq, prev = f.GetSeq(), f.GetHash()
		}
		if len(l.GetStep().GetRecord().GetBefore()) > 0 {
			t.Errorf("line %d holds what undo needs", i)
		}
	}
	if h := lines[0].GetHead(); h.GetLastSeq() != seq || h.GetMeta().GetNode() != "gpu-001" {
		t.Errorf("head %v, want that of %d frames", h, seq)
	}
	return lines
}

func TestExport(t *testing.T) {
	dir := t.TempDir()
	s := open(t, config(dir, &fakeClock{now: t0}))
	const tasks = 700 // more than a page
	for i := range tasks {
		id := fmt.Sprintf("task-%03d", i)
		update(t, s, func(tx *state.Tx) error {
			if err := tx.PutTask(&agentv1.TaskRecord{TaskId: id, State: taskv1.TaskState_TASK_STATE_SUCCEEDED}); err != nil {
				return err
			}
			for step := range uint32(2) {
				if err := tx.PutStep(id, step, &agentv1.StepRecord{Before: []byte("secret"), Out: []byte("out")}); err != nil {
					return err
				}
			}
			return appendEvent(id)(tx)
		})
	}
	update(t, s, func(tx *state.Tx) error {
		if err := tx.Acknowledge(5); err != nil {
			return err
		}
		return tx.PutIntent(&agentv1.IntentRecord{Key: "mount:/data", TaskId: "task-000"})
	})
	lines := exported(t, s.Export)
	if want := 1 + (tasks + 1) + 3*tasks + 1; len(lines) != want {
		t.Errorf("%d lines, want %d", len(lines), want)
	}
	if l := lines[len(lines)-1]; l.GetIntent().GetKey() != "mount:/data" || lines[0].GetHead().GetAcknowledgedSeq() != 5 {
		t.Errorf("the last line is %v, the first %v", l, lines[0])
	}

	// A copy says the same, beside the store that has the file.
	before, err := os.ReadFile(state.Path(dir))
	if err != nil {
		t.Fatal(err)
	}
	copied := exported(t, func(emit func(*agentv1.JournalLine) error) error { return state.ExportFile(state.Path(dir), emit) })
	if diff := cmp.Diff(lines, copied, protocmp.Transform()); diff != "" {
		t.Errorf("the export of the file differs (-store +file):\n%s", diff)
	}
	if after, err := os.ReadFile(state.Path(dir)); err != nil || !bytes.Equal(before, after) {
		t.Errorf("the export changed the file (%v)", err)
	}
	stop := errors.New("enough")
	if err := s.Export(func(*agentv1.JournalLine) error { return stop }); !errors.Is(err, stop) {
		t.Errorf("Export() = %v, want the error of emit", err)
	}
}

func TestExportOfNoJournal(t *testing.T) {
	dir := t.TempDir()
	none := func(*agentv1.JournalLine) error { return nil }
	if err := state.ExportFile(filepath.Join(dir, "state.db"), none); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("ExportFile of nothing = %v, want ErrNotExist", err)
	}
	damaged := filepath.Join(dir, "damaged.db")
	if err := os.WriteFile(damaged, bytes.Repeat([]byte("no database "), 4096), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := state.ExportFile(damaged, none); err == nil {
		t.Error("ExportFile of a damaged file = nil, want an error")
	}
}
