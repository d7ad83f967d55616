package envelope_test

import (
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpuaas/millwright/pki"
	"github.com/gpuaas/millwright/pki/envelope"
)

func TestKeyID(t *testing.T) {
	k := newKey(t)
	sum := sha256.Sum256(append([]byte{1}, k.Public()...))
	if want := hex.EncodeToString(sum[:16]); k.KeyID() != want {
		t.Errorf("got %s, want %s", k.KeyID(), want)
	}
}

func TestKeyFile(t *testing.T) {
	k := newKey(t)
	path := filepath.Join(t.TempDir(), "alice.key")
	if err := envelope.WriteKeyFile(path, k); err != nil {
		t.Fatal(err)
	}
	if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", st.Mode(), err)
	}
	again, err := envelope.ReadKeyFile(path)
	if err != nil || again.KeyID() != k.KeyID() {
		t.Fatalf("read: %v, %v", again, err)
	}
	message := []byte("m")
	sig, err := again.SignMessage(message)
	if err != nil || !ed25519.Verify(k.Public(), message, sig) {
		t.Errorf("the key that was read signs otherwise: %v", err)
	}
	if err := envelope.WriteKeyFile(path, newKey(t)); !errors.Is(err, fs.ErrExist) {
		t.Errorf("a key is replaced: %v", err)
	}
	if err := os.Chmod(path, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := envelope.ReadKeyFile(path); !errors.Is(err, fs.ErrPermission) {
		t.Errorf("a key that others can read: %v", err)
	}
	if _, err := envelope.ReadKeyFile(filepath.Dir(path)); err == nil {
		t.Error("a directory is a key")
	}
}

func TestParseKeyRefuses(t *testing.T) {
	good, err := newKey(t).MarshalPEM()
	if err != nil {
		t.Fatal(err)
	}
	ec, err := pki.GenerateKey()
	if err != nil {
		t.Fatal(err)
	}
	wrong, err := pki.MarshalPrivateKey(ec)
	if err != nil {
		t.Fatal(err)
	}
	for name, data := range map[string][]byte{
		"empty":        nil,
		"no PEM":       []byte("key"),
		"two keys":     append(append([]byte(nil), good...), good...),
		"other type":   []byte(strings.ReplaceAll(string(good), "PRIVATE KEY", "PUBLIC KEY")),
		"other curve":  wrong,
		"not PKCS #8":  pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: []byte("x")}),
		"text follows": append(append([]byte(nil), good...), "x"...),
	} {
		if _, err := envelope.ParseKey(data); err == nil {
			t.Errorf("%s: parsed", name)
		}
	}
}

func TestKeyDoesNotPrintItself(t *testing.T) {
	k := newKey(t)
	pemText, err := k.MarshalPEM()
	if err != nil {
		t.Fatal(err)
	}
	block, _ := pem.Decode(pemText)
	seed := block.Bytes[len(block.Bytes)-ed25519.SeedSize:]
	for _, s := range []string{fmt.Sprint(k), fmt.Sprintf("%+v", k), fmt.Sprintf("%#v", k), fmt.Sprintf("%v", []any{k})} {
		if strings.Contains(s, hex.EncodeToString(seed)) || strings.Contains(s, fmt.Sprint(seed)) || //nolint:staticcheck // the decimal form, not the bytes
			!strings.Contains(s, k.KeyID()) {
			t.Errorf("prints as %s", s)
		}
	}
}

func FuzzParseKey(f *testing.F) {
	good, err := newKey(f).MarshalPEM()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Fuzz(func(t *testing.T, data []byte) {
		if k, err := envelope.ParseKey(data); err == nil && len(k.KeyID()) != 32 {
			t.Errorf("id %q", k.KeyID())
		}
	})
}
