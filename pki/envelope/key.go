package envelope

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

const (
	keyIDLen   = 32 // 16 bytes in hexadecimal
	maxKeyFile = 4 << 10
	pemType    = "PRIVATE KEY"
)

// Key is an Ed25519 signing key. It never prints its secret part. It is safe
// for concurrent use.
type Key struct {
	private ed25519.PrivateKey
	id      string
}

// GenerateKey returns a new key.
func GenerateKey() (*Key, error) {
	_, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("generate signing key: %w", err)
	}
	return newKey(private), nil
}

func newKey(private ed25519.PrivateKey) *Key {
	public := private.Public().(ed25519.PublicKey)
	return &Key{private: private, id: KeyID(taskv1.KeyType_KEY_TYPE_ED25519, public)}
}

// KeyID returns the id of a public key: the first 16 bytes of SHA-256 over the
// type's number as one byte and the key, in lower-case hexadecimal.
func KeyID(t taskv1.KeyType, public []byte) string {
	h := sha256.New()
	h.Write([]byte{byte(t)})
	h.Write(public)
	return hex.EncodeToString(h.Sum(nil)[:keyIDLen/2])
}

// KeyID returns the key's id.
func (k *Key) KeyID() string { return k.id }

// Public returns a copy of the public part.
func (k *Key) Public() ed25519.PublicKey {
	return append(ed25519.PublicKey(nil), k.private.Public().(ed25519.PublicKey)...)
}

// SignMessage returns the signature over message. It never fails.
func (k *Key) SignMessage(message []byte) ([]byte, error) {
	return ed25519.Sign(k.private, message), nil
}

// String returns the key's id, so that a key that is printed by mistake gives
// nothing away.
func (k *Key) String() string { return "ed25519 key " + k.id }

// GoString is [Key.String].
func (k *Key) GoString() string { return k.String() }

// MarshalPEM returns the key as PKCS #8 in PEM. It is secret.
func (k *Key) MarshalPEM() ([]byte, error) {
	der, err := x509.MarshalPKCS8PrivateKey(k.private)
	if err != nil {
		return nil, fmt.Errorf("encode signing key %s: %w", k.id, err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: pemType, Bytes: der}), nil
}

// ParseKey returns the key in data, which holds one PEM block of PKCS #8 with
// an Ed25519 key and nothing after it.
func ParseKey(data []byte) (*Key, error) {
	block, rest := pem.Decode(data)
	switch {
	case block == nil:
		return nil, fmt.Errorf("signing key: no PEM block; make a key with millctl operator init")
	case block.Type != pemType:
		return nil, fmt.Errorf("signing key: PEM block is %q: want %q (PKCS #8)", block.Type, pemType)
	case len(rest) > 0:
		return nil, fmt.Errorf("signing key: %d bytes follow the PEM block: one key a file", len(rest))
	}
	parsed, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return nil, fmt.Errorf("signing key: %w", err)
	}
	private, ok := parsed.(ed25519.PrivateKey)
	if !ok {
		return nil, fmt.Errorf("signing key: it is a %T: want Ed25519", parsed)
	}
	return newKey(private), nil
}

// WriteKeyFile writes the key to a new file at path with mode 0600, durably.
// It never replaces a file: the error of one that exists satisfies
// errors.Is(err, fs.ErrExist).
func WriteKeyFile(path string, k *Key) error {
	data, err := k.MarshalPEM()
	if err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return fmt.Errorf("create signing key: %w", err)
	}
	_, err = f.Write(data)
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = syncDir(filepath.Dir(path))
	}
	if err != nil {
		return fmt.Errorf("write signing key %s: %w", path, errors.Join(err, os.Remove(path)))
	}
	return nil
}

// ReadKeyFile returns the key in the file at path. It refuses a file that
// others than its owner may read or write, and one that is not a regular file.
func ReadKeyFile(path string) (*Key, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("read signing key: %w", err)
	}
	data, err := readPrivate(f)
	err = errors.Join(err, f.Close())
	if err != nil {
		return nil, fmt.Errorf("read signing key %s: %w", path, err)
	}
	k, err := ParseKey(data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return k, nil
}

func readPrivate(f *os.File) ([]byte, error) {
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !st.Mode().IsRegular() {
		return nil, fmt.Errorf("it is not a regular file: %w", fs.ErrInvalid)
	}
	if perm := st.Mode().Perm(); perm&0o077 != 0 {
		return nil, fmt.Errorf("its mode is %04o, so others can read it: set it with chmod 600: %w", perm, fs.ErrPermission)
	}
	data, err := io.ReadAll(io.LimitReader(f, maxKeyFile+1))
	if err == nil && len(data) > maxKeyFile {
		err = fmt.Errorf("it has more than %d bytes: it is not a signing key", maxKeyFile)
	}
	return data, err
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

func isKeyID(s string) bool {
	if len(s) != keyIDLen {
		return false
	}
	for _, c := range []byte(s) {
		if (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return true
}
