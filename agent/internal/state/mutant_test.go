package state_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/millwright/agent/internal/child"
	"github.com/gpuaas/millwright/agent/internal/state"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// TestMain makes the test binary the process that looks at a state file, and
// the agent that opens one.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case "verify-state":
			os.Exit(state.VerifyMain(os.Args[2:], os.Stdout, os.Stderr))
		case "hungry-state":
			os.Exit(hungry(os.Args[2], os.Args[3]))
		case "open-state":
			os.Exit(openState(os.Args[2], false))
		case "open-rotten-state":
			os.Exit(openState(os.Args[2], true))
		case "full-state":
			os.Exit(fullState(os.Args[2], os.Args[3] == "reserve"))
		case "die-with-state":
			os.Exit(dieWithState(os.Args[2], os.Args[3:]))
		}
	}
	os.Exit(m.Run())
}

// fate is what became of a damaged state file.
type fate struct {
	Journal string
	Seq     uint64
	Reason  string // of the journal that began, if one did
	Digest  map[string]int
	Late    bool // the damage was found beside the work
	Err     string
}

// openState opens the state as an agent does that finds it at its start, goes
// on with it, and says how it went. With rotten the medium has lost bits of which the
// inode does not tell, and the agent looks at all of the file beside its work.
func openState(dir string, rotten bool) int {
	exe, err := os.Executable()
	if err != nil {
		return 1
	}
	cfg := config(dir, &fakeClock{now: t0.Add(time.Hour)})
	cfg.JustJoined = false
	runner := child.New(child.Config{Logger: slog.New(slog.DiscardHandler)})
	cfg.Inspect = state.InAnotherProcess(runner.Run, exe)
	f := fate{}
	s, err := state.Open(context.Background(), cfg)
	if err == nil && rotten {
		if e := s.Scrub(context.Background()); errors.Is(e, state.ErrDamaged) {
			f.Late = true
			_ = s.Close() // the file is damaged, and the next start says so
			s, err = state.Open(context.Background(), cfg)
		} else if e != nil {
			f.Err = e.Error()
		}
	}
	if err != nil {
		f.Err = err.Error()
	} else {
		f.read(s)
		if err := s.Update(appendEvent("next")); err != nil {
			f.Err = err.Error()
		}
		if err := s.Close(); err != nil {
			f.Err = err.Error()
		}
	}
	if err := json.NewEncoder(os.Stdout).Encode(f); err != nil {
		return 1
	}
	return 0
}

func (f *fate) read(s *state.Store) {
	f.Digest = map[string]int{}
	err := s.View(func(tx *state.Tx) error {
		h, err := tx.Head()
		if err != nil {
			return err
		}
		f.Journal, f.Seq = h.JournalID, h.LastSeq
		frames, _, err := tx.Frames(h.LastSeq-1, 1)
		if err != nil {
			return err
		}
		ev := new(taskv1.Event)
		if err := proto.Unmarshal(frames[0], ev); err != nil {
			return err
		}
		f.Reason = ev.GetJournalOpened().GetReason().String()
		return tx.Tasks(func(id string) (bool, error) {
			rec, err := tx.Task(id)
			f.Digest[rec.GetState().String()]++
			return true, err
		})
	})
	if err == nil {
		err = s.Check()
	}
	if err != nil {
		f.Err = err.Error()
	}
}

// mutant is a way to damage a state file.
type mutant struct {
	name   string
	damage func(b []byte) []byte
}

// mutants are all the ways for a file: cut at each page, each page zeroed, and
// a bit flipped in the first 64 bytes of each page, at every third byte and in
// the count of its records.
func mutants(db []byte) (all []mutant) {
	size := os.Getpagesize()
	for page := range len(db) / size {
		if page > 3 && bytes.Count(db[page*size:(page+1)*size], []byte{0}) == size {
			continue // never used
		}
		all = append(all, mutant{fmt.Sprintf("cut at page %d", page), func(b []byte) []byte { return b[:page*size] }},
			mutant{fmt.Sprintf("page %d zeroed", page), func(b []byte) []byte { clear(b[page*size : (page+1)*size]); return b }})
		for at := range 64 {
			if at%3 != 0 && at != 10 { // the count of its records
				continue
			}
			all = append(all, mutant{fmt.Sprintf("bit flipped in page %d at byte %d", page, at), func(b []byte) []byte {
				b[page*size+at] ^= 1 << (at % 8)
				return b
			}})
		}
	}
	return all
}

// lived is a state directory with tasks that have ended and one that runs.
func lived(t *testing.T) state.Config {
	t.Helper()
	cfg := config(t.TempDir(), &fakeClock{now: t0})
	s, err := state.Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	fill(t, s, 12)
	for i := range 4 { // commits one by one, so that both meta pages are in use
		update(t, s, func(tx *state.Tx) error {
			id := fmt.Sprintf("running-%d", i)
			if err := tx.PutSeen(id, &agentv1.SeenRecord{LeafHash: make([]byte, 32)}); err != nil {
				return err
			}
			seq, err := tx.Append(started(id))
			if err != nil {
				return err
			}
			return tx.PutTask(&agentv1.TaskRecord{TaskId: id, AcceptSeq: seq, State: taskv1.TaskState_TASK_STATE_WAITING, Origin: state.OriginTask})
		})
	}
	if err := s.Check(); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	return cfg
}

// TestMutants damages a real state file in each way, and has each opened by a
// process of its own. Whatever the damage: that process lives, and either the
// journal goes on and is the newest and whole, or a new one begins and the
// damaged file is beside it, byte for byte. bbolt alone opens a dozen of them
// without a word and without the last commit: the mark must catch each.
func TestMutants(t *testing.T) { testMutants(t, "open-state") }

// TestRottenMutants has the medium lose the same bits: neither the inode nor the
// mark tells of it. Some of it is found when the file is opened, and the rest by
// the look at all of it that the agent takes beside its work; the end is the same.
func TestRottenMutants(t *testing.T) { testMutants(t, "open-rotten-state") }

func testMutants(t *testing.T, how string) {
	cfg := lived(t)
	db, mark := read(t, filepath.Join(cfg.Dir, "state.db")), read(t, filepath.Join(cfg.Dir, "state.mark"))
	exe := reader(t)
	whole := openFiles(t, exe, how, t.TempDir(), db, mark)
	outcomes := map[string]int{}
	var mu sync.Mutex
	var wg sync.WaitGroup
	next := make(chan mutant)
	for range 3 {
		dir := t.TempDir()
		wg.Go(func() {
			for m := range next {
				damaged := m.damage(bytes.Clone(db))
				what, f := judgeMutant(t, exe, how, filepath.Join(dir, strings.ReplaceAll(m.name, " ", "-")), damaged, mark, whole)
				mu.Lock()
				outcomes[what]++
				if f.Late {
					outcomes["found late"]++
				}
				mu.Unlock()
				if what == "wrong" {
					t.Errorf("%s: %+v", m.name, f)
				}
			}
		})
	}
	for i, m := range mutants(db) {
		if how == "open-state" || i%3 == 0 { // a third of them, for time
			next <- m
		}
	}
	close(next)
	wg.Wait()
	t.Logf("%d pages: %v", len(db)/os.Getpagesize(), outcomes)
	if outcomes["kept"] == 0 || outcomes["JOURNAL_REASON_CORRUPT"] < 20 || outcomes["JOURNAL_REASON_ROLLED_BACK"] < 5 {
		t.Errorf("outcomes = %v, want some kept, many corrupt, and at least 5 silent rollbacks that the mark caught", outcomes)
	}
	if late := outcomes["found late"]; (late > 0) != (how == "open-rotten-state") {
		t.Errorf("%d were found late by %s", late, how)
	}
}

func judgeMutant(t *testing.T, exe, how, dir string, damaged, mark []byte, whole fate) (string, fate) {
	f := openFiles(t, exe, how, dir, damaged, mark)
	aside := asideIs(t, dir, damaged)
	switch {
	case f.Err != "":
		return "wrong", f
	case f.Journal == whole.Journal && f.Seq == whole.Seq && maps.Equal(f.Digest, whole.Digest) && !aside:
		return "kept", f
	case f.Journal != whole.Journal && f.Seq == 1 && aside:
		return f.Reason, f
	}
	return "wrong", f
}

// openFiles has a state directory with these files opened by another process.
func openFiles(t *testing.T, exe, how, dir string, db, mark []byte) (f fate) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, "state.db"), db)
	if mark != nil {
		write(t, filepath.Join(dir, "state.mark"), mark)
	}
	if how == "open-rotten-state" {
		if err := state.Vouch(dir); err != nil {
			t.Error(err)
		}
	}
	r, err := child.New(child.Config{Logger: slog.New(slog.DiscardHandler)}).Run(t.Context(),
		child.Spec{Argv: []string{exe, how, dir}, Timeout: time.Minute})
	if err != nil || r.ExitCode != 0 {
		f.Err = fmt.Sprintf("the agent's process ended with %d, %v: %s", r.ExitCode, err, r.Stderr)
		return f
	}
	if err := json.Unmarshal(r.Stdout, &f); err != nil {
		f.Err = fmt.Sprintf("%v: %s", err, r.Stdout)
	}
	return f
}

// asideIs reports whether exactly one file was set aside, and is what was there.
func asideIs(t *testing.T, dir string, want []byte) bool {
	names, err := filepath.Glob(filepath.Join(dir, "state.db.*"))
	if err != nil || len(names) != 1 {
		return false
	}
	return bytes.Equal(read(t, names[0]), want)
}
