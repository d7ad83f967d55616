package secrets_test

import (
	"context"
	"crypto/sha256"
	"errors"
	"os"
	"os/user"
	"path/filepath"
	"testing"

	"github.com/gpuaas/millwright/agent/internal/host/files"
	"github.com/gpuaas/millwright/agent/internal/host/secrets"
	"github.com/gpuaas/millwright/tasks/host"
)

// server gives one value, whatever was signed.
type server struct{ value string }

func (s server) Fetch(context.Context, string, string) ([]byte, error) { return []byte(s.value), nil }

func secret(value string) host.Secret {
	salt := []byte("0123456789abcdef")
	sum := sha256.Sum256(append(append([]byte(nil), salt...), value...))
	return host.Secret{Name: "key", Salt: salt, SHA256: sum[:]}
}

func wanted(t *testing.T, value string) host.SecretFile {
	t.Helper()
	me, err := user.Current()
	if err != nil {
		t.Fatal(err)
	}
	group, err := user.LookupGroupId(me.Gid)
	if err != nil {
		t.Fatal(err)
	}
	return host.SecretFile{Secret: secret(value), Mode: 0o400, User: me.Username, Group: group.Name}
}

// TestSwapped gives the node values that are not the one that was signed. It
// writes none, and keeps nothing of what was there.
func TestSwapped(t *testing.T) {
	dir := t.TempDir()
	file, kept := filepath.Join(dir, "key"), filepath.Join(dir, "kept")
	if err := os.WriteFile(file, []byte("before"), 0o400); err != nil {
		t.Fatal(err)
	}
	for name, value := range map[string]string{
		"another value": "evil", "nothing": "", "a part": "signed-valu", "more": "signed-value\n", "too much": string(make([]byte, host.MaxSecret+1)),
	} {
		store := secrets.New(secrets.Config{Dir: kept, Files: files.New(), Fetcher: server{value}})
		err := store.Write(t.Context(), secrets.Step{TaskID: "t", Step: 1}, file, wanted(t, "signed-value"))
		if !errors.Is(err, host.ErrSecretWrong) {
			t.Errorf("%s: %v, want it refused", name, err)
		}
		if b, err := os.ReadFile(file); err != nil || string(b) != "before" {
			t.Errorf("%s: the file holds %q, %v", name, b, err)
		}
		if _, err := os.Lstat(kept); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: something was kept of a file that was not touched: %v", name, err)
		}
	}
}

// TestRestore writes the value that was signed, puts back what was there, also
// when the write was made twice, and leaves nothing behind.
func TestRestore(t *testing.T) {
	dir := t.TempDir()
	file, kept := filepath.Join(dir, "key"), filepath.Join(dir, "kept")
	if err := os.WriteFile(file, []byte("before"), 0o640); err != nil {
		t.Fatal(err)
	}
	store := secrets.New(secrets.Config{Dir: kept, Files: files.New(), Fetcher: server{"signed-value"}})
	at := secrets.Step{TaskID: "t", Step: 1}
	for range 2 {
		if err := store.Write(t.Context(), at, file, wanted(t, "signed-value")); err != nil {
			t.Fatal(err)
		}
	}
	is(t, file, "signed-value", 0o400)
	if err := store.Restore(t.Context(), at, file); err != nil {
		t.Fatal(err)
	}
	is(t, file, "before", 0o640)
	if ids, err := store.Kept(); err != nil || len(ids) != 1 {
		t.Errorf("kept of %v, %v", ids, err)
	}
	if err := store.Forget(t.Context(), "t"); err != nil {
		t.Fatal(err)
	}
	if left, err := os.ReadDir(kept); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

// TestOpenDirectory writes no secret where others could put another file, and
// undoes that by changing nothing.
func TestOpenDirectory(t *testing.T) {
	dir := t.TempDir()
	open := filepath.Join(dir, "open")
	file := filepath.Join(open, "key")
	if err := errors.Join(os.Mkdir(open, 0o700), os.WriteFile(file, []byte("before"), 0o640), os.Chmod(open, 0o777)); err != nil {
		t.Fatal(err)
	}
	store := secrets.New(secrets.Config{Dir: filepath.Join(dir, "kept"), Files: files.New(), Fetcher: server{"signed-value"}})
	at := secrets.Step{TaskID: "t", Step: 1}
	if err := store.Write(t.Context(), at, file, wanted(t, "signed-value")); err == nil {
		t.Error("a secret was written where everyone could replace it")
	}
	if err := store.Restore(t.Context(), at, file); err != nil {
		t.Errorf("undo of a write that was refused: %v", err)
	}
	is(t, file, "before", 0o640)
}

func is(t *testing.T, file, want string, mode os.FileMode) {
	t.Helper()
	b, err := os.ReadFile(file)
	info, statErr := os.Lstat(file)
	if err != nil || statErr != nil || string(b) != want || info.Mode() != mode {
		t.Errorf("%s holds %q (%v, %v), want %q with mode %v", file, b, err, statErr, want, mode)
	}
}
