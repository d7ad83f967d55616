package state_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpuaas/millwright/agent/internal/state"
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
