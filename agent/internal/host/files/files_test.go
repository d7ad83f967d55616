package files_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/millwright/agent/internal/host/files"
	"github.com/gpuaas/millwright/tasks/host"
)

func TestWriteAndRead(t *testing.T) {
	f, dir := files.New(), t.TempDir()
	path := filepath.Join(dir, "a.mount")
	old := unix.Umask(0o077)
	defer unix.Umask(old)
	for _, want := range []host.File{{Data: []byte("one"), Mode: 0o644}, {Data: []byte("two!"), Mode: 0o600}, {Data: nil, Mode: 0o444}} {
		if err := f.WriteFile(t.Context(), path, want); err != nil {
			t.Fatal(err)
		}
		got, err := f.ReadFile(t.Context(), path)
		if err != nil || string(got.Data) != string(want.Data) || got.Mode != want.Mode {
			t.Errorf("read %q %v, %v; want %q %v", got.Data, got.Mode, err, want.Data, want.Mode)
		}
	}
	if names, err := f.ReadDir(t.Context(), dir); err != nil || !cmp.Equal(names, []string{"a.mount"}) {
		t.Errorf("left behind: %v, %v", names, err)
	}
}

// What a crash left of an earlier write does not matter, and goes.
func TestLeftoverOfACrash(t *testing.T) {
	f, dir := files.New(), t.TempDir()
	path, temp := filepath.Join(dir, "a"), filepath.Join(dir, ".a.millwright.tmp")
	for name, do := range map[string]func() error{
		"write":  func() error { return f.WriteFile(t.Context(), path, host.File{Data: []byte("x"), Mode: 0o600}) },
		"remove": func() error { return f.RemoveFile(t.Context(), path) },
	} {
		if err := os.WriteFile(temp, []byte("half"), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := do(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := os.Lstat(temp); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: the leftover is there: %v", name, err)
		}
	}
}

// A link at the end of a path is never followed.
func TestSymbolicLinks(t *testing.T) {
	f, dir := files.New(), t.TempDir()
	secret, link := filepath.Join(dir, "secret"), filepath.Join(dir, "link")
	write := func() {
		t.Helper()
		if err := errors.Join(os.WriteFile(secret, []byte("s"), 0o600), os.Symlink(secret, link)); err != nil {
			t.Fatal(err)
		}
	}
	write()
	if got, err := f.ReadFile(t.Context(), link); err == nil {
		t.Errorf("read %q through a link", got.Data)
	}
	info, err := f.Lstat(t.Context(), link)
	if err != nil || info.Mode.Type() != fs.ModeSymlink || info.Target != secret {
		t.Errorf("lstat %v, %v", info, err)
	}
	if err := f.WriteFile(t.Context(), link, host.File{Data: []byte("new"), Mode: 0o600}); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(secret); err != nil || string(b) != "s" {
		t.Errorf("the target has %q, %v", b, err)
	}
	if err := os.Remove(link); err != nil {
		t.Fatal(err)
	}
	write()
	if err := f.RemoveFile(t.Context(), link); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(secret); err != nil {
		t.Errorf("the target is gone: %v", err)
	}
	if err := os.Symlink(dir, link); err != nil {
		t.Fatal(err)
	}
	if err := f.MakeDir(t.Context(), link, 0o755); err == nil {
		t.Error("a link to a directory was taken for a directory")
	}
}

func TestRefused(t *testing.T) {
	f, dir := files.New(), t.TempDir()
	big, pipe := filepath.Join(dir, "big"), filepath.Join(dir, "pipe")
	if err := errors.Join(os.WriteFile(big, make([]byte, files.MaxRead+1), 0o600), unix.Mkfifo(pipe, 0o600)); err != nil {
		t.Fatal(err)
	}
	sub := filepath.Join(dir, "sub")
	if err := f.MakeDir(t.Context(), sub, 0o700); err != nil {
		t.Fatal(err)
	}
	tests := map[string]struct {
		err  error
		want error // nil: any
	}{
		"read missing":        {second(f.ReadFile(t.Context(), filepath.Join(dir, "none"))), fs.ErrNotExist},
		"lstat missing":       {second(f.Lstat(t.Context(), filepath.Join(dir, "none"))), fs.ErrNotExist},
		"list missing":        {second(f.ReadDir(t.Context(), filepath.Join(dir, "none"))), fs.ErrNotExist},
		"read too much":       {second(f.ReadFile(t.Context(), big)), nil},
		"read a pipe":         {second(f.ReadFile(t.Context(), pipe)), nil},
		"read a directory":    {second(f.ReadFile(t.Context(), sub)), nil},
		"write to nowhere":    {f.WriteFile(t.Context(), filepath.Join(dir, "none/x"), host.File{}), fs.ErrNotExist},
		"write a directory":   {f.WriteFile(t.Context(), sub, host.File{}), nil},
		"write relative":      {f.WriteFile(t.Context(), "x", host.File{}), fs.ErrInvalid},
		"write unclean":       {f.WriteFile(t.Context(), dir+"/a/../b", host.File{}), fs.ErrInvalid},
		"write the root":      {f.WriteFile(t.Context(), "/", host.File{}), fs.ErrInvalid},
		"remove a directory":  {f.RemoveFile(t.Context(), sub), nil},
		"make over a file":    {f.MakeDir(t.Context(), big, 0o700), unix.ENOTDIR},
		"make in nowhere":     {f.MakeDir(t.Context(), filepath.Join(dir, "none/x"), 0o700), fs.ErrNotExist},
		"remove a full one":   {f.RemoveDir(t.Context(), dir), unix.ENOTEMPTY},
		"remove file as dir":  {f.RemoveDir(t.Context(), big), unix.ENOTDIR},
		"remove the root dir": {f.RemoveDir(t.Context(), "/"), fs.ErrInvalid},
	}
	for name, tt := range tests {
		if tt.err == nil || (tt.want != nil && !errors.Is(tt.err, tt.want)) {
			t.Errorf("%s: %v", name, tt.err)
		}
	}
	if names, err := f.ReadDir(t.Context(), dir); err != nil || !cmp.Equal(names, []string{"big", "pipe", "sub"}) {
		t.Errorf("left behind: %v, %v", names, err)
	}
}

func second[T any](_ T, err error) error { return err }

// Everything may be done again.
func TestRepeat(t *testing.T) {
	f, dir := files.New(), t.TempDir()
	sub := filepath.Join(dir, "sub")
	for range 2 {
		if err := f.MakeDir(t.Context(), sub, 0o751); err != nil {
			t.Fatal(err)
		}
	}
	if info, err := f.Lstat(t.Context(), sub); err != nil || info.Mode != fs.ModeDir|0o751 {
		t.Errorf("mode %v, %v", info.Mode, err)
	}
	if empty, err := f.DirEmpty(t.Context(), sub); err != nil || !empty {
		t.Errorf("empty %v, %v", empty, err)
	}
	if empty, err := f.DirEmpty(t.Context(), dir); err != nil || empty {
		t.Errorf("empty %v, %v", empty, err)
	}
	for range 2 {
		if err := errors.Join(f.RemoveDir(t.Context(), sub), f.RemoveFile(t.Context(), filepath.Join(sub, "x"))); err != nil {
			t.Fatal(err)
		}
	}
	long := filepath.Join(dir, strings.Repeat("n", 255))
	if err := f.WriteFile(t.Context(), long, host.File{Mode: 0o600}); err != nil {
		t.Errorf("a name of 255 bytes: %v", err)
	}
}

func TestCreateExclusive(t *testing.T) {
	path := filepath.Join(t.TempDir(), "start")
	errs := make([]error, 20)
	var wg sync.WaitGroup
	for i := range errs {
		wg.Go(func() { errs[i] = files.CreateExclusive(path, []byte{byte(i)}, 0o600) })
	}
	wg.Wait()
	winner := -1
	for i, err := range errs {
		switch {
		case err == nil && winner < 0:
			winner = i
		case err == nil:
			t.Errorf("%d and %d won", winner, i)
		case !errors.Is(err, fs.ErrExist):
			t.Errorf("%d: %v", i, err)
		}
	}
	if b, err := os.ReadFile(path); err != nil || len(b) != 1 || int(b[0]) != winner {
		t.Errorf("%v won, the file has %v, %v", winner, b, err)
	}
	if entries, err := os.ReadDir(filepath.Dir(path)); err != nil || len(entries) != 1 {
		t.Errorf("left behind: %v, %v", entries, err)
	}
}
