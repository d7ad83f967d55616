package state_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	bolt "go.etcd.io/bbolt"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/millwright/agent/internal/child"
	"github.com/gpuaas/millwright/agent/internal/state"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// inspected has cfg look at its file in another process, as an agent does.
func inspected(t *testing.T, cfg state.Config) state.Config {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	runner := child.New(child.Config{Logger: slog.New(slog.DiscardHandler)})
	cfg.Inspect = state.InAnotherProcess(runner.Run, exe)
	cfg.JustJoined = false
	return cfg
}

// TestUntouchable opens states that say nothing about the journal. Each is an
// error that names what is wrong, and not a byte of the directory changes.
func TestUntouchable(t *testing.T) {
	for _, tc := range []struct {
		name string
		make func(t *testing.T, cfg *state.Config)
		want error
		says []string
	}{
		{"locked by another process", func(t *testing.T, cfg *state.Config) { hold(t, filepath.Join(cfg.Dir, "state.db")) },
			state.ErrLocked, []string{fmt.Sprint("process ", os.Getpid()), "another millwrightd"}},
		{"of a newer agent", func(t *testing.T, cfg *state.Config) { newer(t, filepath.Join(cfg.Dir, "state.db")) },
			state.ErrNewerSchema, []string{"schema version 900", "install the newer agent"}},
		{"on a disk that cannot read", func(_ *testing.T, cfg *state.Config) {
			cfg.Inspect = func(context.Context, string, bool) (state.Facts, error) {
				return state.Verified(child.Result{ExitCode: 1, Stderr: []byte(child.FormatError(&fs.PathError{Op: "read", Path: "state.db", Err: unix.EIO}))}, nil)
			}
		}, unix.EIO, []string{"input/output error"}},
		{"when the process that looks is killed", func(_ *testing.T, cfg *state.Config) {
			cfg.Inspect = func(context.Context, string, bool) (state.Facts, error) {
				return state.Verified(child.Result{}, &child.SignalError{Signal: unix.SIGKILL, State: "signal: killed"})
			}
		}, nil, []string{"killed"}},
		{"when that process has no memory", func(_ *testing.T, cfg *state.Config) {
			cfg.Inspect = func(context.Context, string, bool) (state.Facts, error) {
				return state.Verified(child.Result{ExitCode: 2, Stderr: []byte("fatal error: runtime: out of memory\n\ngoroutine 1")}, nil)
			}
		}, nil, []string{"out of memory"}},
		{"when it takes too long", func(_ *testing.T, cfg *state.Config) {
			cfg.Inspect = func(context.Context, string, bool) (state.Facts, error) {
				return state.Verified(child.Result{}, context.DeadlineExceeded)
			}
		}, context.DeadlineExceeded, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			cfg := inspected(t, lived(t))
			tc.make(t, &cfg)
			before := snapshot(t, cfg.Dir)
			begin := time.Now()
			s, err := state.Open(t.Context(), cfg)
			if err == nil {
				t.Fatal(errors.Join(errors.New("it opened"), s.Close()))
			}
			if tc.want != nil && !errors.Is(err, tc.want) || errors.Is(err, state.ErrDamaged) {
				t.Errorf("Open = %v, want %v", err, tc.want)
			}
			for _, w := range tc.says {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("Open = %v, want it to say %q", err, w)
				}
			}
			if d := time.Since(begin); d > 5*time.Second {
				t.Errorf("it took %v to say so", d)
			}
			for name, b := range snapshot(t, cfg.Dir) {
				if !bytes.Equal(b, before[name]) {
					t.Errorf("%s was changed", name)
				}
			}
		})
	}
}

func snapshot(t *testing.T, dir string) map[string][]byte {
	t.Helper()
	out := map[string][]byte{}
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		out[e.Name()] = read(t, filepath.Join(dir, e.Name()))
	}
	return out
}

// hold locks the file for the length of the test, as another agent does.
func hold(t *testing.T, path string) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		t.Fatal(err)
	}
}

func newer(t *testing.T, path string) {
	t.Helper()
	db, err := bolt.Open(path, 0o600, &bolt.Options{Timeout: time.Second, NoFreelistSync: true})
	if err != nil {
		t.Fatal(err)
	}
	err = db.Update(func(tx *bolt.Tx) error { return tx.Bucket([]byte("meta")).Put([]byte("version"), []byte("900")) })
	if err = errors.Join(err, db.Close()); err != nil {
		t.Fatal(err)
	}
}

// TestMarkLost damages the mark and leaves the file as it is. Without a mark no
// one can say that the file is the newest: a new journal begins and says so,
// unless the file holds nothing yet.
func TestMarkLost(t *testing.T) {
	for _, tc := range []struct {
		name string
		mark []byte // nil: removed
	}{
		{"removed", nil}, {"emptied", []byte{}}, {"zeroed", make([]byte, 1024)}, {"garbage", bytes.Repeat([]byte{0xa5}, 1024)},
		{"cut", []byte("half a slot")},
	} {
		t.Run(tc.name, func(t *testing.T) {
			cfg := inspected(t, lived(t))
			path, db := filepath.Join(cfg.Dir, "state.mark"), read(t, filepath.Join(cfg.Dir, "state.db"))
			remove(t, path)
			if tc.mark != nil {
				write(t, path, tc.mark)
			}
			s := open(t, cfg)
			if h := head(t, s); h.LastSeq != 1 {
				t.Errorf("the journal goes on at frame %d without its mark", h.LastSeq)
			}
			if got := openedEvent(t, s).GetJournalOpened().GetReason(); got != taskv1.JournalReason_JOURNAL_REASON_ROLLED_BACK {
				t.Errorf("reason = %v, want ROLLED_BACK", got)
			}
			if !asideIs(t, cfg.Dir, db) {
				t.Error("the file was not set aside as it was")
			}
		})
	}
	cfg := config(t.TempDir(), &fakeClock{now: t0})
	s := open(t, cfg)
	before := head(t, s)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	remove(t, filepath.Join(cfg.Dir, "state.mark"))
	cfg.JustJoined = false
	if after := head(t, open(t, cfg)); after.JournalID != before.JournalID {
		t.Error("a journal that holds nothing was replaced: the agent may have died before its first mark")
	}
}

// TestSetAsideForEver damages the state again and again: every file that was
// set aside stays, under a name of its own.
func TestSetAsideForEver(t *testing.T) {
	cfg := config(t.TempDir(), &fakeClock{now: t0})
	const times = 12
	for i := range times {
		s := open(t, cfg)
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		cfg.JustJoined = false
		write(t, filepath.Join(cfg.Dir, "state.db"), fmt.Appendf(nil, "damage %d", i))
	}
	open(t, cfg)
	seen := map[string]bool{}
	for name, b := range snapshot(t, cfg.Dir) {
		if strings.HasPrefix(name, "state.db.corrupt") {
			seen[string(b)] = true
		}
	}
	if len(seen) != times {
		t.Errorf("%d of %d files are there: %v", len(seen), times, seen)
	}
}
