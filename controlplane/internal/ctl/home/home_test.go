package home_test

import (
	"crypto/ed25519"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/gpuaas/millwright/controlplane/internal/ctl/home"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

func TestDir(t *testing.T) {
	tests := []struct {
		name string
		env  map[string]string
		want string
	}{
		{"its own variable", map[string]string{"MILLWRIGHT_HOME": "/m", "XDG_CONFIG_HOME": "/x", "HOME": "/h"}, "/m"},
		{"XDG", map[string]string{"XDG_CONFIG_HOME": "/x", "HOME": "/h"}, "/x/millwright"},
		{"a relative XDG is ignored", map[string]string{"XDG_CONFIG_HOME": "x", "HOME": "/h"}, "/h/.config/millwright"},
		{"the home", map[string]string{"HOME": "/h"}, "/h/.config/millwright"},
		{"nothing", nil, ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := home.Dir(func(k string) string { return tt.env[k] })
			if got != tt.want || (err != nil) != (tt.want == "") {
				t.Errorf("Dir(%v) = %q, %v, want %q", tt.env, got, err, tt.want)
			}
		})
	}
}

func founder(dir string) home.Founder {
	return home.Founder{Name: "alice", TrustDomain: "example.org", Out: filepath.Join(dir, "founding.json"), Now: time.Now()}
}

func TestInit(t *testing.T) {
	dir := t.TempDir()
	f := founder(dir)
	public, _, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	f.Controllers = []home.Controller{{Name: "slurm", Key: public}}
	founded, err := home.Init(filepath.Join(dir, "home"), f)
	if err != nil {
		t.Fatal(err)
	}
	h, err := home.Open(filepath.Join(dir, "home"))
	if err != nil {
		t.Fatal(err)
	}
	if got := h.Root().Cluster(); got != founded.Cluster {
		t.Errorf("the cluster is %x after Open, and was founded as %x", got, founded.Cluster)
	}
	key, err := h.SigningKey()
	if err != nil {
		t.Fatal(err)
	}
	if key.KeyID() != founded.SigningKeyID {
		t.Errorf("SigningKey is %s, want %s", key.KeyID(), founded.SigningKeyID)
	}
	roles := map[taskv1.KeyRole]string{}
	for _, k := range h.Root().Message().GetKeys() {
		for _, r := range k.GetRoles() {
			roles[r] += k.GetName()
		}
	}
	for r, want := range map[taskv1.KeyRole]string{
		taskv1.KeyRole_KEY_ROLE_OPERATOR: "alice", taskv1.KeyRole_KEY_ROLE_RECOVERY: "alice", taskv1.KeyRole_KEY_ROLE_CONTROLLER: "slurm",
	} {
		if roles[r] != want {
			t.Errorf("keys of role %v are of %q, want %q", r, roles[r], want)
		}
	}
	if _, err := home.Init(filepath.Join(dir, "home"), founder(t.TempDir())); !errors.Is(err, home.ErrExists) {
		t.Errorf("a second Init: %v, want ErrExists", err)
	}
}

// TestInitLeavesNothing lets each file be in the way, one after the other.
func TestInitLeavesNothing(t *testing.T) {
	for _, name := range []string{"founding.json", "home/recovery.pem", "home/signing.pem", "home/tls.pem", "home/genesis.json"} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			if err := os.Mkdir(filepath.Join(dir, "home"), 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, name), []byte("mine"), 0o600); err != nil {
				t.Fatal(err)
			}
			if _, err := home.Init(filepath.Join(dir, "home"), founder(dir)); !errors.Is(err, fs.ErrExist) {
				t.Fatalf("Init: %v, want fs.ErrExist", err)
			}
			var left []string
			err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
				if err == nil && !d.IsDir() {
					left = append(left, path)
				}
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
			if len(left) != 1 || left[0] != filepath.Join(dir, name) {
				t.Errorf("left are %v, want only what was in the way", left)
			}
			if data, err := os.ReadFile(filepath.Join(dir, name)); err != nil || string(data) != "mine" {
				t.Errorf("what was in the way is now %q, %v", data, err)
			}
		})
	}
}

func TestOpen(t *testing.T) {
	tests := []struct {
		name, file, text string
		want             error
	}{
		{"no operator", "config.yaml", "", home.ErrNone},
		{"a newer version", "config.yaml", "version: 2\noperator: alice\n", home.ErrInvalid},
		{"an unknown key", "config.yaml", "version: 1\noperator: alice\ncolour: blue\n", home.ErrInvalid},
		{"a bad name", "config.yaml", "version: 1\noperator: Alice!\n", home.ErrInvalid},
		{"not YAML", "config.yaml", "{", home.ErrInvalid},
		{"not a mapping", "config.yaml", "- version\n", home.ErrInvalid},
		{"a damaged genesis", "genesis.json", "{}", home.ErrInvalid},
		{"not JSON", "genesis.json", "{", home.ErrInvalid},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			at := filepath.Join(dir, "home")
			if _, err := home.Init(at, founder(dir)); err != nil {
				t.Fatal(err)
			}
			if tt.text == "" {
				if err := os.Remove(filepath.Join(at, tt.file)); err != nil {
					t.Fatal(err)
				}
			} else if err := os.WriteFile(filepath.Join(at, tt.file), []byte(tt.text), 0o600); err != nil {
				t.Fatal(err)
			}
			if _, err := home.Open(at); !errors.Is(err, tt.want) {
				t.Errorf("Open: %v, want %v", err, tt.want)
			}
		})
	}
}

// TestForeignKey lets the signing key be one that the trust root does not know.
func TestForeignKey(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"a", "b"} {
		f := founder(dir)
		f.Out = filepath.Join(dir, name+".json")
		if _, err := home.Init(filepath.Join(dir, name), f); err != nil {
			t.Fatal(err)
		}
	}
	other, err := os.ReadFile(filepath.Join(dir, "b", "signing.pem"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "a", "signing.pem"), other, 0o600); err != nil {
		t.Fatal(err)
	}
	h, err := home.Open(filepath.Join(dir, "a"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := h.SigningKey(); !errors.Is(err, home.ErrInvalid) {
		t.Errorf("SigningKey: %v, want ErrInvalid", err)
	}
}
