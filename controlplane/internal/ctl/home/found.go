package home

import (
	"bytes"
	"crypto"
	"crypto/ed25519"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/gpuaas/millwright/pki"
	"github.com/gpuaas/millwright/pki/envelope"
	"github.com/gpuaas/millwright/pki/trustroot"
	nodev1 "github.com/gpuaas/millwright/proto/millwright/node/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// Controller is a program that may sign tasks.
type Controller struct {
	// Name is its name.
	Name string
	// Key is its public key.
	Key ed25519.PublicKey
}

// Founder says who founds a cluster.
type Founder struct {
	// Name is the operator's name.
	Name string
	// TrustDomain is the SPIFFE trust domain of the cluster.
	TrustDomain string
	// Controllers may sign tasks too.
	Controllers []Controller
	// Recovery is where the recovery key is written; empty means recovery.pem in
	// the directory.
	Recovery string
	// Out is where the public parts are written.
	Out string
	// Now is the time of signing.
	Now time.Time
}

// Founded is what was made.
type Founded struct {
	// Cluster is the SHA-256 over the payload of the genesis.
	Cluster [32]byte
	// SigningKeyID is the id of the daily key.
	SigningKeyID string
	// RecoveryKeyID is the id of the recovery key.
	RecoveryKeyID string
	// Recovery is the file of the recovery key.
	Recovery string
}

// Init makes the keys and the genesis of a new cluster in dir, which it makes
// too. The error wraps [ErrExists] when an operator is set up there, and
// fs.ErrExist when a file is in the way; nothing is replaced, and what was made
// before an error is removed.
func Init(dir string, f Founder) (*Founded, error) {
	if _, err := pki.NewID(f.TrustDomain, pki.RoleOperator, f.Name); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	if _, err := os.Lstat(filepath.Join(dir, configFile)); err == nil {
		return nil, fmt.Errorf("%s: %w; for another cluster set MILLWRIGHT_HOME to another directory", dir, ErrExists)
	}
	keys, err := f.found()
	if err != nil {
		return nil, err
	}
	if err := makeDir(dir); err != nil {
		return nil, err
	}
	if f.Recovery == "" {
		f.Recovery = filepath.Join(dir, recoveryFile)
	}
	if err := keys.write(dir, f); err != nil {
		return nil, err
	}
	return &Founded{
		Cluster: keys.genesis.Cluster(), SigningKeyID: keys.signing.KeyID(),
		RecoveryKeyID: keys.recovery.KeyID(), Recovery: f.Recovery,
	}, nil
}

// makeDir makes the directory for its owner alone.
func makeDir(dir string) error {
	if err := os.MkdirAll(dir, dirMode); err != nil {
		return fmt.Errorf("make directory for keys: %w", err)
	}
	info, err := os.Stat(dir)
	if err != nil {
		return fmt.Errorf("make directory for keys: %w", err)
	}
	if info.Mode().Perm()&0o077 != 0 {
		return fmt.Errorf("%s: %w: its mode is %04o, so others can look into it: set it with chmod 700", dir, ErrInvalid, info.Mode().Perm())
	}
	return nil
}

// foundation is what a new cluster stands on.
type foundation struct {
	signing, recovery *envelope.Key
	tls               crypto.Signer
	genesis           *trustroot.Root
}

func (f Founder) found() (*foundation, error) {
	var k foundation
	var err error
	if k.signing, err = envelope.GenerateKey(); err != nil {
		return nil, err
	}
	if k.recovery, err = envelope.GenerateKey(); err != nil {
		return nil, err
	}
	if k.tls, err = pki.GenerateKey(); err != nil {
		return nil, err
	}
	trusted := []*taskv1.TrustKey{
		trustroot.NewKey(f.Name, k.signing.Public(), time.Time{}, taskv1.KeyRole_KEY_ROLE_OPERATOR),
		trustroot.NewKey(f.Name, k.recovery.Public(), time.Time{}, taskv1.KeyRole_KEY_ROLE_RECOVERY),
	}
	for _, c := range f.Controllers {
		trusted = append(trusted, trustroot.NewKey(c.Name, c.Key, time.Time{}, taskv1.KeyRole_KEY_ROLE_CONTROLLER))
	}
	k.genesis, err = trustroot.SignGenesis(trustroot.Genesis{
		TrustDomain: f.TrustDomain, IssuedAt: f.Now, Keys: trusted,
	}, k.recovery, k.signing)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	return &k, nil
}

// file is a file to be made.
type file struct {
	path string
	data []byte
	mode fs.FileMode
}

// write writes all files, or none.
func (k *foundation) write(dir string, f Founder) error {
	files, err := k.files(dir, f)
	if err != nil {
		return err
	}
	for i, file := range files {
		if err := Create(file.path, file.data, file.mode); err != nil {
			for _, made := range files[:i] {
				err = errors.Join(err, os.Remove(made.path))
			}
			return err
		}
	}
	return nil
}

// files are the files, config.yaml last: it is what says that an operator is
// set up.
func (k *foundation) files(dir string, f Founder) ([]file, error) {
	genesis := k.genesis.Chain()[0]
	csr, err := pki.NewRequest(k.tls)
	if err != nil {
		return nil, err
	}
	bundle, err := Encode(&nodev1.FoundingBundle{Version: 1, Genesis: genesis, Operator: f.Name, OperatorCsr: csr})
	if err != nil {
		return nil, err
	}
	genesisJSON, err := Encode(genesis)
	if err != nil {
		return nil, err
	}
	conf, err := yaml.Marshal(config{Version: configVersion, Operator: f.Name})
	if err != nil {
		return nil, fmt.Errorf("encode %s: %w", configFile, err)
	}
	signing, err := k.signing.MarshalPEM()
	if err != nil {
		return nil, err
	}
	recovery, err := k.recovery.MarshalPEM()
	if err != nil {
		return nil, err
	}
	tlsKey, err := pki.MarshalPrivateKey(k.tls)
	if err != nil {
		return nil, err
	}
	return []file{
		{f.Out, bundle, publicMode},
		{f.Recovery, recovery, fileMode},
		{filepath.Join(dir, signingFile), signing, fileMode},
		{filepath.Join(dir, tlsFile), tlsKey, fileMode},
		{filepath.Join(dir, genesisFile), genesisJSON, fileMode},
		{filepath.Join(dir, configFile), conf, fileMode},
	}, nil
}

// ReadPublicKey reads a controller's Ed25519 public key: one PEM block of PKIX,
// as openssl pkey -pubout writes it.
func ReadPublicKey(path string) (ed25519.PublicKey, error) {
	data, err := read(path)
	if err != nil {
		return nil, fmt.Errorf("read public key: %w", err)
	}
	key, err := parsePublicKey(data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w: %w; make it with: openssl pkey -pubout", path, ErrInvalid, err)
	}
	return key, nil
}

func parsePublicKey(data []byte) (ed25519.PublicKey, error) {
	block, rest := pem.Decode(data)
	if block == nil || block.Type != "PUBLIC KEY" || len(bytes.TrimSpace(rest)) > 0 {
		return nil, errors.New("it does not hold exactly one PEM block PUBLIC KEY")
	}
	parsed, err := x509.ParsePKIXPublicKey(block.Bytes)
	if err != nil {
		return nil, err
	}
	key, ok := parsed.(ed25519.PublicKey)
	if !ok {
		return nil, fmt.Errorf("it holds a %T, not an Ed25519 key", parsed)
	}
	return key, nil
}
