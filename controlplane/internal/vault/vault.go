// Package vault keeps the values of secrets at rest: each version in a file of
// its own, encrypted with a key of its own, which the server's key encrypts. A
// copy of the files without the server's key tells names and digests, and no
// value.
//
// Both encryptions are AES-256-GCM with a random nonce of 96 bits. Each key of a
// value encrypts once, and the server's key encrypts one key for each version,
// far below the 2^32 that NIST SP 800-38D allows for random nonces. What is
// known of a version is authenticated with both, so that no part of a file can
// be exchanged for that of another.
package vault

import (
	"bytes"
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"google.golang.org/protobuf/proto"

	secretv1 "github.com/gpuaas/millwright/proto/millwright/secret/v1"
	serverv1 "github.com/gpuaas/millwright/proto/millwright/server/v1"

	"github.com/gpuaas/millwright/controlplane/internal/crash"
)

var (
	// ErrNone is wrapped when there is no such secret, or no such version.
	ErrNone = errors.New("no such secret")
	// ErrExists is wrapped when a name has another value already.
	ErrExists = errors.New("the secret has another value")
	// ErrDamaged is wrapped when a file or the key is not what it was.
	ErrDamaged = errors.New("damaged")
)

const (
	keyBytes  = 32
	fileMode  = 0o400
	suffix    = ".secret"
	maxFile   = 1 << 20
	maxSecret = 10000 // versions in all
)

// Vault holds the secrets. It is safe for concurrent use.
type Vault struct {
	dir string
	key []byte

	mu      sync.Mutex
	secrets []*secretv1.Secret // by name and version; guarded by mu
}

// Open opens the vault in dir with the key in keyFile, and makes both when
// neither is there. Secrets without their key are an error: a new key would
// hide that the old one is lost.
func Open(dir, keyFile string) (*Vault, error) {
	v := &Vault{dir: dir}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make directory of secrets: %w", err)
	}
	if err := sweep(dir, filepath.Dir(keyFile)); err != nil {
		return nil, err
	}
	names, err := v.files()
	if err != nil {
		return nil, err
	}
	if v.key, err = readKey(keyFile, len(names) == 0); err != nil {
		return nil, err
	}
	for _, name := range names {
		_, secret, err := v.read(name)
		if err != nil {
			return nil, err
		}
		v.secrets = append(v.secrets, secret)
	}
	v.sort()
	return v, nil
}

// readKey reads the server's key, or makes it when that is allowed.
func readKey(path string, create bool) ([]byte, error) {
	info, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) && create {
		key := make([]byte, keyBytes)
		if _, err := rand.Read(key); err != nil {
			return nil, fmt.Errorf("make key of secrets: %w", err)
		}
		return key, writeNew(path, key)
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("key of secrets %s is not there, and secrets are: %w; bring it back from its own backup, or put all secrets again after moving theirs away", path, ErrDamaged)
	}
	if err != nil {
		return nil, fmt.Errorf("read key of secrets: %w", err)
	}
	if !info.Mode().IsRegular() || info.Mode().Perm()&0o077 != 0 {
		return nil, fmt.Errorf("key of secrets %s has mode %#o: no one but its owner may read it (chmod 0400)", path, info.Mode().Perm())
	}
	key, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read key of secrets: %w", err)
	}
	if len(key) != keyBytes {
		return nil, fmt.Errorf("key of secrets %s has %d bytes, not %d: %w", path, len(key), keyBytes, ErrDamaged)
	}
	return key, nil
}

// Put keeps a value as the next version of a name, or returns the version that
// has it already. Unless rotate is set the name must be new; when it is set, the
// name must be there. Name, salt, sha256 and created_by of what are taken over.
func (v *Vault) Put(what *secretv1.Secret, value []byte, rotate bool) (*secretv1.Secret, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	newest := v.newest(what.GetName())
	switch {
	case newest == nil && rotate:
		return nil, fmt.Errorf("secret %s: %w: put it first", what.GetName(), ErrNone)
	case newest != nil:
		same, err := v.holds(newest, value)
		if err != nil || same {
			return newest, err
		}
		if !rotate {
			return nil, fmt.Errorf("secret %s: %w: rotate it to give it this one", what.GetName(), ErrExists)
		}
	}
	if len(v.secrets) >= maxSecret {
		return nil, fmt.Errorf("there are %d versions of secrets, which is the most: remove old ones", len(v.secrets))
	}
	out := proto.CloneOf(what)
	out.Version, out.Current, out.SizeBytes = newest.GetVersion()+1, false, uint32(len(value)) // at most 64 KiB
	file, err := v.seal(out, value)
	if err != nil {
		return nil, err
	}
	crash.Point("server.secret.before")
	if err := writeNew(filepath.Join(v.dir, fileName(out)), file); err != nil {
		return nil, err
	}
	crash.Point("server.secret.stored")
	v.secrets = append(v.secrets, out)
	v.sort()
	return out, nil
}

// List returns what is known of all versions, by name and version. The newest
// of each name is marked.
func (v *Vault) List() []*secretv1.Secret {
	v.mu.Lock()
	defer v.mu.Unlock()
	out := make([]*secretv1.Secret, len(v.secrets))
	for i, s := range v.secrets {
		out[i] = proto.CloneOf(s)
		out[i].Current = i == len(v.secrets)-1 || v.secrets[i+1].GetName() != s.GetName()
	}
	return out
}

// Value returns the value of the version of a name that has the digest, with
// whatever salt it was made. No such version is an error that wraps [ErrNone]. A
// version that cannot be read is told only when no other one is the right one.
func (v *Vault) Value(name string, salt, sum []byte) ([]byte, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	var bad error
	for _, s := range slices.Backward(v.secrets) { // the newest is asked for most
		if s.GetName() != name {
			continue
		}
		value, err := v.value(s)
		if err != nil {
			bad = errors.Join(bad, err)
			continue
		}
		h := sha256.New()
		h.Write(salt)
		h.Write(value)
		if bytes.Equal(h.Sum(nil), sum) {
			return value, nil
		}
		clear(value)
	}
	if bad != nil {
		return nil, bad
	}
	return nil, fmt.Errorf("secret %s with the digest that was signed: %w", name, ErrNone)
}

// value reads and decrypts a version.
func (v *Vault) value(s *secretv1.Secret) ([]byte, error) {
	file, secret, err := v.read(fileName(s))
	if err != nil {
		return nil, err
	}
	return v.open(file, secret)
}

// Remove removes a name with all its versions, or only those that are not the
// newest, and returns what is gone.
func (v *Vault) Remove(name string, oldOnly bool) ([]*secretv1.Secret, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	newest := v.newest(name)
	if newest == nil {
		return nil, fmt.Errorf("secret %s: %w", name, ErrNone)
	}
	var gone []*secretv1.Secret
	for _, s := range slices.Clone(v.secrets) {
		if s.GetName() != name || oldOnly && s == newest {
			continue
		}
		crash.Point("server.secret.remove.before")
		if err := os.Remove(filepath.Join(v.dir, fileName(s))); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return gone, fmt.Errorf("remove secret %s: %w", name, err)
		}
		crash.Point("server.secret.removed")
		gone = append(gone, s)
		v.secrets = slices.DeleteFunc(v.secrets, func(other *secretv1.Secret) bool { return other == s })
	}
	return gone, syncDir(v.dir)
}

func (v *Vault) newest(name string) *secretv1.Secret {
	var out *secretv1.Secret
	for _, s := range v.secrets {
		if s.GetName() == name {
			out = s
		}
	}
	return out
}

func (v *Vault) sort() {
	slices.SortFunc(v.secrets, func(a, b *secretv1.Secret) int {
		if c := strings.Compare(a.GetName(), b.GetName()); c != 0 {
			return c
		}
		return int(a.GetVersion()) - int(b.GetVersion())
	})
}

// holds reports whether a version has the value, whatever its salt.
func (v *Vault) holds(s *secretv1.Secret, value []byte) (bool, error) {
	have, err := v.value(s)
	if err != nil {
		return false, err
	}
	defer clear(have)
	return bytes.Equal(have, value), nil
}

// seal encrypts a value.
func (v *Vault) seal(secret *secretv1.Secret, value []byte) ([]byte, error) {
	known, err := proto.MarshalOptions{Deterministic: true}.Marshal(secret)
	if err != nil {
		return nil, fmt.Errorf("encode secret %s: %w", secret.GetName(), err)
	}
	key := make([]byte, keyBytes)
	if _, err := rand.Read(key); err != nil {
		return nil, fmt.Errorf("make key of secret %s: %w", secret.GetName(), err)
	}
	defer clear(key)
	wrapped, err := encrypt(v.key, key, known)
	if err != nil {
		return nil, err
	}
	sealed, err := encrypt(key, value, known)
	if err != nil {
		return nil, err
	}
	return proto.Marshal(&serverv1.SecretFile{Secret: known, WrappedKey: wrapped, Sealed: sealed, KeyId: keyID(v.key)})
}

// open decrypts a value and holds it against its digest.
func (v *Vault) open(file *serverv1.SecretFile, secret *secretv1.Secret) ([]byte, error) {
	key, err := decrypt(v.key, file.GetWrappedKey(), file.GetSecret())
	if err != nil {
		return nil, fmt.Errorf("open secret %s version %d: %w", secret.GetName(), secret.GetVersion(), err)
	}
	defer clear(key)
	value, err := decrypt(key, file.GetSealed(), file.GetSecret())
	if err != nil {
		return nil, fmt.Errorf("open secret %s version %d: %w", secret.GetName(), secret.GetVersion(), err)
	}
	return value, nil
}

// read reads a file of the vault, without its value.
func (v *Vault) read(name string) (*serverv1.SecretFile, *secretv1.Secret, error) {
	path := filepath.Join(v.dir, name)
	info, err := os.Lstat(path)
	if err != nil {
		return nil, nil, fmt.Errorf("read secret: %w", err)
	}
	if !info.Mode().IsRegular() || info.Size() > maxFile {
		return nil, nil, fmt.Errorf("read secret %s: %w", path, ErrDamaged)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, nil, fmt.Errorf("read secret: %w", err)
	}
	file, secret := new(serverv1.SecretFile), new(secretv1.Secret)
	if err := errors.Join(proto.Unmarshal(data, file), proto.Unmarshal(file.GetSecret(), secret)); err != nil || fileName(secret) != name {
		return nil, nil, fmt.Errorf("read secret %s: %w: move it away, and put the secret again", path, ErrDamaged)
	}
	if !bytes.Equal(file.GetKeyId(), keyID(v.key)) {
		return nil, nil, fmt.Errorf("read secret %s: it was encrypted with another key: %w; bring that one back, or move the file away and put the secret again", path, ErrDamaged)
	}
	return file, secret, nil
}

func (v *Vault) files() ([]string, error) {
	entries, err := os.ReadDir(v.dir)
	if err != nil {
		return nil, fmt.Errorf("list secrets: %w", err)
	}
	var out []string
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), suffix) && !strings.HasPrefix(e.Name(), ".") {
			out = append(out, e.Name())
		}
	}
	return out, nil
}

func fileName(s *secretv1.Secret) string {
	return fmt.Sprintf("%s.%d%s", s.GetName(), s.GetVersion(), suffix)
}

func keyID(key []byte) []byte {
	sum := sha256.Sum256(key)
	return sum[:8]
}

func encrypt(key, plain, known []byte) ([]byte, error) {
	gcm, err := newGCM(key)
	if err != nil {
		return nil, err
	}
	nonce := make([]byte, gcm.NonceSize())
	if _, err := rand.Read(nonce); err != nil {
		return nil, fmt.Errorf("make nonce: %w", err)
	}
	return gcm.Seal(nonce, nonce, plain, known), nil
}

func decrypt(key, sealed, known []byte) ([]byte, error) {
	gcm, err := newGCM(key)
	if err != nil {
		return nil, err
	}
	if len(sealed) < gcm.NonceSize() {
		return nil, ErrDamaged
	}
	out, err := gcm.Open(nil, sealed[:gcm.NonceSize()], sealed[gcm.NonceSize():], known)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	return out, nil
}

func newGCM(key []byte) (cipher.AEAD, error) {
	block, err := aes.NewCipher(key)
	if err != nil {
		return nil, err
	}
	return cipher.NewGCM(block)
}
