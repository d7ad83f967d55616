package cli_test

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/gpuaas/millwright/agent/internal/cli"
	"github.com/gpuaas/millwright/agent/internal/clock"
	"github.com/gpuaas/millwright/agent/internal/state"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// TestMain makes the test binary the millwrightd that looks at a state file.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "verify-state" {
		os.Exit(cli.Main(context.Background(), "v1.2.3", os.Args[1:], os.Stdout, os.Stderr))
	}
	os.Exit(m.Run())
}

// journalAt makes a journal with a few frames.
func journalAt(t *testing.T, dir string) {
	t.Helper()
	s, err := state.Open(t.Context(), state.Config{
		Dir: dir, Node: "gpu-001", Generation: 1, BootID: "boot", Clock: clock.System{},
		Logger: slog.New(slog.DiscardHandler), JustJoined: true, JoinFloor: time.Now(),
	})
	if err != nil {
		t.Fatal(err)
	}
	for range 5 {
		err := s.Update(func(tx *state.Tx) error {
			_, err := tx.Append(&taskv1.Event{Payload: &taskv1.Event_Started{Started: &taskv1.TaskStarted{TaskId: "t"}}})
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestCheckAndRepair(t *testing.T) {
	dir, config := configured(t)
	journalAt(t, filepath.Join(dir, "state"))
	file, out := filepath.Join(dir, "state", "state.db"), filepath.Join(dir, "repaired.db")
	code, said, errs := run(t, "journal", "check", "--config", config)
	if code != 0 || !strings.Contains(said, "sound") || !strings.Contains(said, "frame 6") || !strings.Contains(said, "not older") || errs != "" {
		t.Errorf("journal check = %d, %q, %q; want it sound with 6 frames", code, said, errs)
	}
	if code, said, _ := run(t, "journal", "check", "-o", "json", file); code != 0 || !strings.Contains(said, `"sound": true`) {
		t.Errorf("journal check -o json = %d, %q", code, said)
	}
	whole, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}

	// With a bit flipped in its newer root the file is sound, and older.
	older := append([]byte(nil), whole...)
	older[newerRoot(whole)*os.Getpagesize()+16+56] ^= 1 // its checksum
	write(t, file, string(older))
	if code, said, errs := run(t, "journal", "check", "--config", config); code != 1 || !strings.Contains(said, "older") || !strings.Contains(errs, "older than what the agent has told") {
		t.Errorf("journal check of an older file = %d, %q, %q", code, said, errs)
	}

	write(t, file, string(whole[:3*os.Getpagesize()]))
	if code, said, errs := run(t, "journal", "check", "--config", config); code != 1 || !strings.Contains(said, "DAMAGED") || !strings.Contains(errs, "journal repair") {
		t.Errorf("journal check of a cut file = %d, %q, %q", code, said, errs)
	}
	write(t, file, string(older))
	code, said, errs = run(t, "journal", "repair", "--config", config, "--out", out)
	if code != 0 || !strings.Contains(said, "saved    5 of frames") || !strings.Contains(said, "lost     meta page") {
		t.Errorf("journal repair = %d, %q, %q; want 5 frames, and the root that is lost", code, said, errs)
	}
	if code, said, errs := run(t, "journal", "export", "--file", out); code != 0 || strings.Count(said, "\n") < 6 {
		t.Errorf("journal export of what was repaired = %d, %q, %q", code, said, errs)
	}
	if code, _, errs := run(t, "journal", "repair", "--config", config, "--out", out); code != 1 || !strings.Contains(errs, "exists") {
		t.Errorf("journal repair over a file = %d, %q; want 1", code, errs)
	}
	if code, _, errs := run(t, "journal", "repair", "--config", config); code != 2 || !strings.Contains(errs, "--out") {
		t.Errorf("journal repair without --out = %d, %q; want 2", code, errs)
	}
}

// newerRoot is the meta page with the higher transaction number.
func newerRoot(b []byte) int {
	size := os.Getpagesize()
	number := func(page int) (n uint64) {
		for i := range 8 {
			n |= uint64(b[page*size+16+48+i]) << (8 * i)
		}
		return n
	}
	if number(1) > number(0) {
		return 1
	}
	return 0
}
