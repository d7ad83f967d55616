package vault

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	secretv1 "github.com/gpuaas/millwright/proto/millwright/secret/v1"
)

const canary = "canary-0123456789-canary"

func open(t *testing.T, dir string) *Vault {
	t.Helper()
	v, err := Open(filepath.Join(dir, "secrets"), filepath.Join(dir, "secrets.key"))
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func describe(name, value string) *secretv1.Secret {
	salt := []byte("0123456789abcdef")
	sum := sha256.Sum256(append(bytes.Clone(salt), value...))
	return &secretv1.Secret{Name: name, Salt: salt, Sha256: sum[:], CreatedBy: "spiffe://t/operator/a"}
}

func put(t *testing.T, v *Vault, name, value string, rotate bool) *secretv1.Secret {
	t.Helper()
	s, err := v.Put(describe(name, value), []byte(value), rotate)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// TestVault: values come back by their digest, over a restart; versions are kept
// until they are removed; nothing on the disk holds a value.
func TestVault(t *testing.T) {
	dir := t.TempDir()
	v := open(t, dir)
	first := put(t, v, "munge", canary, false)
	if again := put(t, v, "munge", canary, false); again.GetVersion() != 1 {
		t.Errorf("the same value is version %d", again.GetVersion())
	}
	if _, err := v.Put(describe("munge", "other"), []byte("other"), false); !errors.Is(err, ErrExists) {
		t.Errorf("another value: %v", err)
	}
	if _, err := v.Put(describe("s3", "x"), []byte("x"), true); !errors.Is(err, ErrNone) {
		t.Errorf("rotate what is not there: %v", err)
	}
	second := put(t, v, "munge", canary+"2", true)
	v = open(t, dir)
	for _, s := range []struct {
		*secretv1.Secret
		value string
	}{{first, canary}, {second, canary + "2"}} {
		got, err := v.Value("munge", s.GetSalt(), s.GetSha256())
		if err != nil || string(got) != s.value {
			t.Errorf("version %d: %q, %v", s.GetVersion(), got, err)
		}
	}
	if list := v.List(); len(list) != 2 || list[0].GetCurrent() || !list[1].GetCurrent() || list[1].GetVersion() != 2 {
		t.Errorf("list: %v", list)
	}
	if _, err := v.Value("munge", first.GetSalt(), make([]byte, 32)); !errors.Is(err, ErrNone) {
		t.Errorf("another digest: %v", err)
	}
	if _, err := v.Value("s3", first.GetSalt(), first.GetSha256()); !errors.Is(err, ErrNone) {
		t.Errorf("another name: %v", err)
	}
	eachFile(t, dir, func(path string, data []byte) {
		if strings.Contains(string(data), "canary") {
			t.Errorf("%s holds a value", path)
		}
		if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o400 {
			t.Errorf("%s: %v, %v", path, info.Mode(), err)
		}
	})
	if gone, err := v.Remove("munge", true); err != nil || len(gone) != 1 || gone[0].GetVersion() != 1 {
		t.Errorf("remove old ones: %v, %v", gone, err)
	}
	if gone, err := v.Remove("munge", false); err != nil || len(gone) != 1 {
		t.Errorf("remove: %v, %v", gone, err)
	}
	if _, err := v.Remove("munge", false); !errors.Is(err, ErrNone) {
		t.Errorf("remove again: %v", err)
	}
	if v = open(t, dir); len(v.List()) != 0 {
		t.Error("it came back")
	}
}

func eachFile(t *testing.T, dir string, f func(path string, data []byte)) {
	t.Helper()
	n := 0
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		data, err := os.ReadFile(path)
		if err == nil {
			n++
			f(path, data)
		}
		return err
	})
	if err != nil || n < 2 {
		t.Fatalf("%d files, %v", n, err)
	}
}

// TestDamage: a byte of a file or of the key that is another one never gives
// another value, and neither does a file under another name.
func TestDamage(t *testing.T) {
	dir := t.TempDir()
	s := put(t, open(t, dir), "munge", canary, false)
	for _, name := range []string{"secrets/munge.1.secret", "secrets.key"} {
		path := filepath.Join(dir, name)
		good, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for i := range good {
			bad := bytes.Clone(good)
			bad[i] ^= 1
			replace(t, path, bad)
			v, err := Open(filepath.Join(dir, "secrets"), filepath.Join(dir, "secrets.key"))
			if err != nil {
				continue
			}
			if got, err := v.Value("munge", s.GetSalt(), s.GetSha256()); err == nil {
				t.Fatalf("%s with another byte %d gives %q", name, i, got)
			}
		}
		for _, bad := range [][]byte{nil, good[:len(good)/2]} {
			replace(t, path, bad)
			if _, err := Open(filepath.Join(dir, "secrets"), filepath.Join(dir, "secrets.key")); !errors.Is(err, ErrDamaged) {
				t.Errorf("%s with %d bytes: %v", name, len(bad), err)
			}
		}
		replace(t, path, good)
	}
	other := put(t, open(t, dir), "other", "x", false)
	swap := filepath.Join(dir, "secrets/other.1.secret")
	data, err := os.ReadFile(filepath.Join(dir, "secrets/munge.1.secret"))
	if err != nil {
		t.Fatal(err)
	}
	replace(t, swap, data)
	if v, err := Open(filepath.Join(dir, "secrets"), filepath.Join(dir, "secrets.key")); err == nil {
		t.Errorf("a file under another name is taken: %v", v.List())
	}
	_ = other
}

// TestDamagedVersion: an old version that cannot be read keeps no node from the
// newest; asked for itself, it is damaged and not unknown.
func TestDamagedVersion(t *testing.T) {
	dir := t.TempDir()
	v := open(t, dir)
	first := put(t, v, "munge", canary, false)
	second := put(t, v, "munge", canary+"2", true)
	path := filepath.Join(dir, "secrets/munge.1.secret")
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	replace(t, path, data[:len(data)/2])
	if got, err := v.Value("munge", second.GetSalt(), second.GetSha256()); err != nil || string(got) != canary+"2" {
		t.Errorf("the newest: %q, %v", got, err)
	}
	if _, err := v.Value("munge", first.GetSalt(), first.GetSha256()); !errors.Is(err, ErrDamaged) {
		t.Errorf("the damaged one: %v", err)
	}
}

func replace(t *testing.T, path string, data []byte) {
	t.Helper()
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, data, 0o400); err != nil {
		t.Fatal(err)
	}
}

// TestKey: a lost key is told, and is not replaced; one that others can read is
// refused.
func TestKey(t *testing.T) {
	dir := t.TempDir()
	put(t, open(t, dir), "munge", canary, false)
	key := filepath.Join(dir, "secrets.key")
	if err := os.Chmod(key, 0o444); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(filepath.Join(dir, "secrets"), key); err == nil || !strings.Contains(err.Error(), "chmod 0400") {
		t.Errorf("a key that all can read: %v", err)
	}
	if err := os.Remove(key); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(filepath.Join(dir, "secrets"), key); !errors.Is(err, ErrDamaged) {
		t.Errorf("a lost key: %v", err)
	}
	if _, err := os.Stat(key); err == nil {
		t.Error("a new key was made")
	}
}

// TestUnfinished: what a crash left of a write lives no longer than the next
// start, in both directories.
func TestUnfinished(t *testing.T) {
	dir := t.TempDir()
	put(t, open(t, dir), "munge", canary, false)
	for _, sub := range []string{dir, filepath.Join(dir, "secrets")} {
		f, err := os.CreateTemp(sub, unfinished)
		if err != nil {
			t.Fatal(err)
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if list := open(t, dir).List(); len(list) != 1 {
		t.Errorf("secrets %v, want the one", list)
	}
	for _, sub := range []string{dir, filepath.Join(dir, "secrets")} {
		if left, err := filepath.Glob(filepath.Join(sub, ".new-*")); err != nil || len(left) > 0 {
			t.Errorf("left behind: %v, %v", left, err)
		}
	}
}
