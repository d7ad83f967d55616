package child_test

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/gpuaas/millwright/agent/internal/child"
)

// TestMain makes the test binary the probe child.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "probe" {
		os.Exit(child.ProbeMain(os.Args[2:], os.Stdout, os.Stderr))
	}
	os.Exit(m.Run())
}

func newRunner() *child.Runner { return child.New(child.Config{Logger: slog.New(slog.DiscardHandler)}) }

func sh(script string) []string { return []string{"/bin/sh", "-c", script} }

func TestRun(t *testing.T) {
	res, err := newRunner().Run(t.Context(), child.Spec{
		Argv: sh(`echo out; echo "$PATH$SECRET" >&2; exit 3`), Timeout: 10 * time.Second,
	})
	if err != nil || res.ExitCode != 3 || string(res.Stdout) != "out\n" || strings.TrimSpace(string(res.Stderr)) != "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" {
		t.Errorf("%+v, %v", res, err)
	}
	res, err = newRunner().Run(t.Context(), child.Spec{
		Argv: sh(`head -c 1000000 /dev/zero`), Timeout: 10 * time.Second, MaxOutput: 10,
	})
	if err != nil || len(res.Stdout) != 10 {
		t.Errorf("%d bytes, %v", len(res.Stdout), err)
	}
	if _, err = newRunner().Run(t.Context(), child.Spec{Argv: []string{"/no/such"}, Timeout: time.Second}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("missing program: %v", err)
	}
	if _, err = newRunner().Run(t.Context(), child.Spec{Argv: sh("kill -9 $$"), Timeout: time.Second}); err == nil {
		t.Error("a killed program is no result")
	}
}

// A child that does not end is killed with all that it started.
func TestDeadline(t *testing.T) {
	r := newRunner()
	begin := time.Now()
	_, err := r.Run(t.Context(), child.Spec{Argv: sh("sleep 60 & sleep 60"), Timeout: 50 * time.Millisecond, Key: "k"})
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("error %v", err)
	}
	if d := time.Since(begin); d > 5*time.Second {
		t.Errorf("it took %s", d)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	if err := r.Wait(ctx); err != nil {
		t.Errorf("the group lives: %v", err)
	}
	if _, err := r.Run(t.Context(), child.Spec{Argv: sh("true"), Timeout: 5 * time.Second, Key: "k"}); err != nil {
		t.Errorf("the key is not free: %v", err)
	}
}

func TestCancelled(t *testing.T) {
	mine := errors.New("mine")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(mine)
	_, err := newRunner().Run(ctx, child.Spec{Argv: sh("sleep 60"), Timeout: time.Minute, Key: "k"})
	if !errors.Is(err, mine) {
		t.Errorf("error %v", err)
	}
}

// Children with one key run one after the other.
func TestKey(t *testing.T) {
	r, lock := newRunner(), filepath.Join(t.TempDir(), "lock")
	var wg sync.WaitGroup
	for range 5 {
		wg.Go(func() {
			res, err := r.Run(t.Context(), child.Spec{
				Argv: []string{"/bin/sh", "-c", `mkdir "$0" && sleep 0.02 && rmdir "$0"`, lock}, Timeout: 20 * time.Second, Key: "k",
			})
			if err != nil || res.ExitCode != 0 {
				t.Errorf("two at once: %+v, %v", res, err)
			}
		})
	}
	wg.Wait()
}

func TestProbes(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir, r := t.TempDir(), newRunner()
	probe := func(kind, dir string) (string, error) { return r.Probe(t.Context(), exe, kind, dir, 10*time.Second) }
	for range 2 {
		if _, err := probe("write", dir); err != nil {
			t.Error(err)
		}
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 0 {
		t.Errorf("left behind: %v, %v", entries, err)
	}
	if _, err := probe("read", dir); err != nil {
		t.Error(err)
	}
	if out, err := probe("capacity", dir); err != nil || len(strings.Fields(out)) != 2 {
		t.Errorf("%q, %v", out, err)
	}
	for _, kind := range []string{"write", "read", "capacity"} {
		if _, err := probe(kind, filepath.Join(dir, "none")); !errors.Is(err, fs.ErrNotExist) || !errors.Is(err, syscall.ENOENT) {
			t.Errorf("%s of a missing directory: %v", kind, err)
		}
	}
	for _, args := range [][]string{{"erase", dir}, {"read", "relative"}} {
		if _, err := probe(args[0], args[1]); err == nil {
			t.Errorf("%v worked", args)
		}
	}
}

func TestErrorsCrossProcesses(t *testing.T) {
	for _, err := range []error{
		&fs.PathError{Op: "open", Path: "/x", Err: syscall.ENOTCONN}, syscall.EIO, errors.New("ENOENT: not really"), errors.New("plain: words"), errors.New(""),
	} {
		got := child.ParseError(child.FormatError(err))
		var errno, gotNo syscall.Errno
		errors.As(err, &errno)
		errors.As(got, &gotNo)
		if got.Error() != err.Error() || errno != gotNo {
			t.Errorf("%v came back as %v (%d)", err, got, gotNo)
		}
	}
	if got := child.ParseError("anything: else"); got.Error() != "anything: else" {
		t.Errorf("got %v", got)
	}
}
