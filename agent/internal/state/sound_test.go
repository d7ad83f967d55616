package state_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/gpuaas/millwright/agent/internal/child"
	"github.com/gpuaas/millwright/agent/internal/state"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// looks has cfg note how its file is looked at: "glance" or "whole".
func looks(cfg *state.Config) *[]string {
	var made []string
	cfg.JustJoined = false
	cfg.Inspect = func(_ context.Context, path string, whole bool) (state.Facts, error) {
		if whole {
			made = append(made, "whole")
			return state.InspectFile(path, time.Second)
		}
		made = append(made, "glance")
		return state.GlanceFile(path)
	}
	return &made
}

// TestStartIsFlat counts what is read of the file when the agent starts, by the
// number of done tasks in its history: the pages that are looked at, and those
// that bbolt touches through its map. With forty times the history both stay,
// and without the mark's word they do not.
func TestStartIsFlat(t *testing.T) {
	fetched, touched := map[int]int{}, map[int]int{}
	for _, n := range []int{500, 20_000} {
		cfg := config(t.TempDir(), &fakeClock{now: t0})
		s, err := state.Open(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		fill(t, s, n)
		h := head(t, s)
		update(t, s, func(tx *state.Tx) error { return tx.Acknowledge(h.LastSeq) })
		h = head(t, s)
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(cfg.Dir, "state.db")
		f, err := state.GlanceFile(path)
		if err != nil {
			t.Fatal(err)
		}
		fetched[n] = f.Fetched
		made := looks(&cfg)
		s = open(t, cfg)
		if !slices.Equal(*made, []string{"glance"}) {
			t.Fatalf("looks = %v, want one glance", *made)
		}
		touched[n] = mappedKiB(t, path)
		if got := head(t, s); got != h {
			t.Errorf("opened %+v, want %+v", got, h)
		}
		if kept, there, err := state.Sizes(s); err != nil || kept != there || there[1] == 0 {
			t.Errorf("the sizes are taken for %v, and are %v, %v", kept, there, err)
		}
	}
	t.Logf("pages looked at %v, KiB that bbolt has touched %v", fetched, touched)
	// A tree that is one level deeper, in each of the buckets; a fault maps up to
	// 64 KiB around it.
	if fetched[20_000] > fetched[500]+8 || touched[20_000] > touched[500]+8*64 {
		t.Errorf("with 500 tasks %d pages were looked at and %d KiB touched, with 20,000 %d and %d",
			fetched[500], touched[500], fetched[20_000], touched[20_000])
	}
}

// mappedKiB is how much of a file this process has touched through maps.
func mappedKiB(t *testing.T, path string) (kib int) {
	t.Helper()
	f, err := os.Open("/proc/self/smaps")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close() // it was only read
	mine := false
	for lines := bufio.NewScanner(f); lines.Scan(); {
		fields := strings.Fields(lines.Text())
		switch {
		case strings.Contains(fields[0], "-"):
			mine = fields[len(fields)-1] == path
		case mine && fields[0] == "Rss:":
			n, err := strconv.Atoi(fields[1])
			if err != nil {
				t.Fatal(err)
			}
			kib += n
		}
	}
	if kib == 0 {
		t.Fatalf("%s is not mapped", path)
	}
	return kib
}

// TestTouchedFile changes a file in its place after its agent has closed it. Each
// change is found before anything of the file is used.
func TestTouchedFile(t *testing.T) {
	size := int64(os.Getpagesize())
	for _, tc := range []struct {
		name   string
		change func(t *testing.T, path string)
		kept   bool
	}{
		{"nothing", func(*testing.T, string) {}, true},
		{"a bit in a page of done tasks", func(t *testing.T, path string) { flip(t, path, 5*size+9) }, false},
		{"a page zeroed", func(t *testing.T, path string) { poke(t, path, 6*size, make([]byte, size)) }, false},
		{"cut", func(t *testing.T, path string) { truncate(t, path, 20_000) }, false},
		{"its content anew", func(t *testing.T, path string) { b := read(t, path); truncate(t, path, 0); poke(t, path, 0, b) }, true},
		{"another file with the content", func(t *testing.T, path string) { b := read(t, path); remove(t, path); write(t, path, b) }, true},
		{"the rights", func(t *testing.T, path string) {
			if err := os.Chmod(path, 0o640); err != nil {
				t.Fatal(err)
			}
		}, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			cfg := lived(t)
			made := looks(&cfg)
			afterTick(t, cfg.Dir)
			tc.change(t, filepath.Join(cfg.Dir, "state.db"))
			s := open(t, cfg)
			want := "whole"
			if tc.name == "nothing" {
				want = "glance"
			}
			if !slices.Equal(*made, []string{want}) {
				t.Errorf("looks = %v, want %s", *made, want)
			}
			if kept := head(t, s).LastSeq > 1; kept != tc.kept {
				t.Errorf("the journal goes on: %t, want %t", kept, tc.kept)
			}
		})
	}
}

// afterTick waits until the kernel would give a file another time of change: two
// changes within a tick of its clock have the same one.
func afterTick(t *testing.T, dir string) {
	t.Helper()
	probe := filepath.Join(dir, "..", filepath.Base(dir)+".tick")
	write(t, probe, nil)
	first, err := os.Stat(probe)
	if err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(5 * time.Second); ; {
		write(t, probe, []byte("x"))
		if now, err := os.Stat(probe); err != nil || now.ModTime().After(first.ModTime()) {
			remove(t, probe)
			return
		}
		if time.Now().After(end) {
			t.Fatal("the time of files stands still")
		}
	}
}

func poke(t *testing.T, path string, at int64, b []byte) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	_, err = f.WriteAt(b, at)
	if err := errors.Join(err, f.Close()); err != nil {
		t.Fatal(err)
	}
}

func flip(t *testing.T, path string, at int64) {
	t.Helper()
	poke(t, path, at, []byte{read(t, path)[at] ^ 4})
}

func truncate(t *testing.T, path string, to int64) {
	t.Helper()
	if err := os.Truncate(path, to); err != nil {
		t.Fatal(err)
	}
}

// dieWithState opens the state and ends without closing it, as a kill does; each
// word is done before.
func dieWithState(dir string, words []string) int {
	cfg := config(dir, &fakeClock{now: t0.Add(time.Hour)})
	made := looks(&cfg)
	for _, w := range words {
		if boot, ok := strings.CutPrefix(w, "boot="); ok {
			cfg.BootID = boot
		}
	}
	s, err := state.Open(context.Background(), cfg)
	for _, w := range words {
		switch {
		case err != nil:
		case w == "write":
			err = s.Update(appendEvent("next"))
		case w == "scrub":
			err = s.Scrub(context.Background())
		case w == "close":
			err = s.Close()
		}
	}
	if err != nil {
		fmt.Println(err)
		return 1
	}
	fmt.Print(strings.Join(*made, " "))
	return 0
}

// TestStartAfterKill ends the agent in every way and says how the next one looks
// at the file. What was killed is trusted once, and again only when all of the
// file was looked at meanwhile: a page that kills its reader makes no loop.
func TestStartAfterKill(t *testing.T) {
	cfg := lived(t)
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	runner := child.New(child.Config{Logger: slog.New(slog.DiscardHandler)})
	for i, tc := range []struct {
		words []string
		want  string
	}{
		{[]string{"write"}, "glance"},          // it was closed
		{[]string{"write"}, "glance"},          // killed, for the first time
		{[]string{"write"}, "whole"},           // killed again
		{nil, "glance"},                        // all of it was looked at
		{[]string{"scrub", "write"}, "whole"},  // killed, and nothing was written
		{[]string{"scrub", "write"}, "glance"}, // killed after a look at all of it
		{[]string{"write", "close"}, "glance"},
		{[]string{"boot=boot-b", "write"}, "glance"},          // closed, then booted
		{[]string{"boot=boot-c", "write"}, "whole"},           // the node lost its power
		{[]string{"boot=boot-c", "write", "close"}, "glance"}, // killed
		{[]string{"boot=boot-c", "close"}, "glance"},
	} {
		r, err := runner.Run(t.Context(), child.Spec{Argv: append([]string{exe, "die-with-state", cfg.Dir}, tc.words...), Timeout: time.Minute})
		if err != nil || r.ExitCode != 0 || string(r.Stdout) != tc.want {
			t.Fatalf("start %d: it took a %q, %v, want a %s", i, r.Stdout, err, tc.want)
		}
	}
	s := open(t, config(cfg.Dir, &fakeClock{now: t0.Add(2 * time.Hour)}))
	if err := s.Check(); err != nil {
		t.Error(err)
	}
	if got := openedEvent(t, s).GetJournalOpened().GetReason(); got != taskv1.JournalReason_JOURNAL_REASON_JOINED {
		t.Errorf("the journal began with %v, want the first one", got)
	}
}

// TestUnwrittenIsUnseen fails a commit: the next start looks at all of the file.
func TestUnwrittenIsUnseen(t *testing.T) {
	cfg := lived(t)
	made := looks(&cfg)
	broken := errors.New("the disk says no")
	fail := false
	cfg.Guard = func(written bool) error {
		if fail && written {
			return broken
		}
		return nil
	}
	s, err := state.Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	fail = true
	if err := s.Update(appendEvent("next")); !errors.Is(err, broken) {
		t.Errorf("Update = %v, want %v", err, broken)
	}
	fail = false
	if err := errors.Join(s.Update(appendEvent("next")), s.Close()); err != nil {
		t.Fatal(err)
	}
	open(t, cfg)
	if !slices.Equal(*made, []string{"glance", "whole"}) {
		t.Errorf("looks = %v, want a glance, and the whole after a commit that failed", *made)
	}
}
