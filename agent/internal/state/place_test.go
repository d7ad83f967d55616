package state_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpuaas/millwright/agent/internal/state"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// TestMovedAway takes the file, or its mark, away from under the open store, or
// lays another in its place: nothing is told as durable that the next start would
// not find, and all goes on once the file is back.
func TestMovedAway(t *testing.T) {
	for _, name := range []string{"state.db", "state.mark"} {
		for _, other := range []bool{false, true} {
			cfg := config(t.TempDir(), &fakeClock{now: t0})
			s := open(t, cfg)
			path := filepath.Join(cfg.Dir, name)
			before := head(t, s).LastSeq
			rename(t, path, path+".away")
			says := path + " was removed or renamed"
			if other {
				if err := os.WriteFile(path, nil, 0o600); err != nil {
					t.Fatal(err)
				}
				says = "another file lies at " + path
			}
			err := s.Update(appendEvent("refused"))
			if !errors.Is(err, state.ErrWrite) || !errors.Is(err, state.ErrMoved) || !strings.Contains(err.Error(), says) {
				t.Errorf("%s, other %t: Update = %v, want ErrWrite and ErrMoved that say %q", name, other, err, says)
			}
			if err := s.InPlace(); !errors.Is(err, state.ErrMoved) {
				t.Errorf("%s, other %t: InPlace = %v", name, other, err)
			}
			rename(t, path+".away", path)
			update(t, s, appendEvent("later"))
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			if after := head(t, open(t, cfg)).LastSeq; after != before+1 {
				t.Errorf("%s, other %t: the last frame is %d, want %d: the refused is not there and the later is", name, other, after, before+1)
			}
		}
	}
}

func rename(t *testing.T, from, to string) {
	t.Helper()
	if err := os.Rename(from, to); err != nil {
		t.Fatal(err)
	}
}

// TestOlderStateWrittenOver writes an older copy over the file while it is open,
// as cp does: nothing is added to it, the mark is not lowered to it, and the next
// start sets it aside.
func TestOlderStateWrittenOver(t *testing.T) {
	for _, since := range []int{1, 5} {
		cfg := config(t.TempDir(), &fakeClock{now: t0})
		s := open(t, cfg)
		cfg.JustJoined = false
		update(t, s, appendEvent("kept"))
		path := filepath.Join(cfg.Dir, "state.db")
		old := read(t, path)
		for range since {
			update(t, s, appendEvent("seen by the server"))
		}
		before := head(t, s)
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.WriteAt(old, 0); err != nil {
			t.Fatal(err)
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
		for range 2 * since {
			err := s.Update(appendEvent("a number that was given already"))
			if !errors.Is(err, state.ErrWrite) || !errors.Is(err, state.ErrMoved) || !strings.Contains(err.Error(), "older") {
				t.Errorf("Update after %d more = %v, want ErrWrite and ErrMoved that say that it is older", since, err)
			}
		}
		if err := s.Close(); err != nil {
			t.Log(err) // it may say so too
		}
		s = open(t, cfg)
		after := head(t, s)
		if ev := openedEvent(t, s).GetJournalOpened(); after.JournalID == before.JournalID || ev.GetReason() != taskv1.JournalReason_JOURNAL_REASON_ROLLED_BACK {
			t.Errorf("after %d more: journal %s after %s, reason %v", since, after.JournalID, before.JournalID, ev.GetReason())
		}
	}
}
