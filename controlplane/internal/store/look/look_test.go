package look_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/gpuaas/millwright/controlplane/internal/store"
	"github.com/gpuaas/millwright/controlplane/internal/store/boltstore"
	"github.com/gpuaas/millwright/controlplane/internal/store/look"
)

// TestMain makes the test binary the process that looks at a store, and the
// server that opens one.
func TestMain(m *testing.M) {
	if len(os.Args) == 3 {
		switch os.Args[1] {
		case look.Command:
			os.Exit(look.Main(os.Args[2:], os.Stderr))
		case "open-store":
			os.Exit(openStore(os.Args[2]))
		}
	}
	os.Exit(m.Run())
}

// fate is what became of a store that a server opened.
type fate struct {
	Err     string
	Damaged bool
	Last    uint64 // entry of the log
}

// openStore opens a store as a server does, in a process that a fault would end.
func openStore(path string) int {
	exe, err := os.Executable()
	if err != nil {
		return 1
	}
	var f fate
	if f.Last, err = openAt(exe, path); err != nil {
		f.Err, f.Damaged = err.Error(), errors.Is(err, boltstore.ErrDamaged)
	}
	if err := json.NewEncoder(os.Stdout).Encode(f); err != nil {
		return 1
	}
	return 0
}

func openAt(exe, path string) (last uint64, err error) {
	other := look.InAnotherProcess(exe)
	s, err := boltstore.Open(path, boltstore.Look(func(path string) error { return other(context.Background(), path) }))
	if err != nil {
		return 0, err
	}
	err = s.View(context.Background(), func(v store.View) error {
		last = v.LastIndex()
		return nil
	})
	return last, errors.Join(err, s.Close())
}

// TestDamagedStore damages a store in each way and has a server open it. Whatever
// the damage: the server lives and either has all that was committed, or says that
// the store is damaged and changes nothing of it. What a torn meta page hides is
// the last commit, and nothing else: that is what a loss of power leaves.
func TestDamagedStore(t *testing.T) {
	good, entries := filled(t)
	outcomes := map[string]int{}
	dir := t.TempDir()
	for i, m := range mutants(good) {
		path := filepath.Join(dir, fmt.Sprintf("store-%d.db", i))
		damaged := m.damage(bytes.Clone(good))
		if err := os.WriteFile(path, damaged, 0o600); err != nil {
			t.Fatal(err)
		}
		f := opened(t, path)
		now, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		switch {
		case f.Damaged && bytes.Equal(now, damaged) && strings.Contains(f.Err, "backup"):
			outcomes["damaged"]++
		case f.Err == "" && f.Last == entries:
			outcomes["kept"]++
		case f.Err == "" && f.Last == entries-1 && m.meta:
			outcomes["torn"]++
		default:
			t.Errorf("%s: %+v", m.name, f)
		}
	}
	t.Logf("%d pages: %v", len(good)/os.Getpagesize(), outcomes)
	least := 50
	if !flips {
		least = 10
	}
	if outcomes["damaged"] < least || outcomes["kept"] == 0 || flips && outcomes["torn"] == 0 {
		t.Errorf("outcomes = %v, want many damaged, some kept, and the last commit lost with its meta page only", outcomes)
	}
}

// opened has another process open the store.
func opened(t *testing.T, path string) (f fate) {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(t.Context(), exe, "open-store", path).Output()
	if err != nil {
		t.Errorf("the server's process ended: %v", err)
		return f
	}
	if err := json.Unmarshal(out, &f); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return f
}

// filled is a store with some history: its bytes, and how many entries are in it.
func filled(t *testing.T) (good []byte, entries uint64) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "store.db")
	s, err := boltstore.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := s.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	for entries < 12 {
		entries++
		entry := store.Entry{Index: entries, Bytes: make([]byte, 1500)}
		if err := s.Update(ctx, func(store.View) (*store.Change, error) { return &store.Change{Entries: []store.Entry{entry}}, nil }); err != nil {
			t.Fatal(err)
		}
	}
	stop()
	wg.Wait()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if good, err = os.ReadFile(path); err != nil {
		t.Fatal(err)
	}
	return good, entries
}

// mutant is a way to damage a store; meta: one of the two pages that say where
// everything is.
type mutant struct {
	name   string
	meta   bool
	damage func(b []byte) []byte
}

// mutants cut the file at each page, zero each page, and flip bits in the head of
// each page.
func mutants(b []byte) (all []mutant) {
	size := os.Getpagesize()
	all = append(all, mutant{"emptied", false, func([]byte) []byte { return nil }},
		mutant{"both meta pages zeroed", false, func(b []byte) []byte { clear(b[:2*size]); return b }})
	for page := range len(b) / size {
		if bytes.Count(b[page*size:(page+1)*size], []byte{0}) == size {
			continue // never used
		}
		meta := page < 2
		all = append(all, mutant{fmt.Sprintf("cut in page %d", page), false, func(b []byte) []byte { return b[:page*size+size/2] }},
			mutant{fmt.Sprintf("page %d zeroed", page), meta, func(b []byte) []byte { clear(b[page*size : (page+1)*size]); return b }})
		for _, at := range []int{0, 8, 10, 12, 16, 20, 29, 40, 56} {
			if !flips {
				break
			}
			all = append(all, mutant{fmt.Sprintf("bit flipped in page %d at byte %d", page, at), meta, func(b []byte) []byte {
				b[page*size+at] ^= 1 << (at % 8)
				return b
			}})
		}
	}
	return all
}

// TestOthersSay holds what the other process says of a store that is not damaged.
func TestOthersSay(t *testing.T) {
	good, _ := filled(t)
	dir := t.TempDir()
	path := filepath.Join(dir, "store.db")
	if err := os.WriteFile(path, good, 0o600); err != nil {
		t.Fatal(err)
	}
	locked, err := boltstore.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := openAt(exe, path); !errors.Is(err, boltstore.ErrLocked) {
		t.Errorf("a store that another server has = %v", err)
	}
	if err := locked.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := openAt("/bin/false", path); err == nil || errors.Is(err, boltstore.ErrDamaged) {
		t.Errorf("a process that says nothing = %v, want an error, and no word of damage", err)
	}
	if _, err := openAt("/no/such/program", path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a program that is not there = %v", err)
	}
	for script, damaged := range map[string]bool{"kill -9 $$": false, "kill -BUS $$": true, "kill -XCPU $$": true,
		"echo panic: of a reader >&2; exit 2": true, "echo fatal error: cannot allocate memory >&2; exit 2": false,
		"echo 'runtime: out of memory: cannot allocate 99999999999-byte block (1 in use)' >&2; exit 2": true} {
		program := filepath.Join(dir, "program")
		if err := os.WriteFile(program, []byte("#!/bin/sh\n"+script+"\n"), 0o700); err != nil {
			t.Fatal(err)
		}
		if _, err := openAt(program, path); err == nil || errors.Is(err, boltstore.ErrDamaged) != damaged {
			t.Errorf("%s: %v, want damaged: %t", script, err, damaged)
		}
	}
}
