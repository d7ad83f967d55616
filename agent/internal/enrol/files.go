package enrol

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/millwright/agent/internal/crash"
	"github.com/gpuaas/millwright/pki"
	"github.com/gpuaas/millwright/pki/envelope"
	"github.com/gpuaas/millwright/pki/trustroot"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// The files of the identity directory.
const (
	keyFile   = "key.pem"
	caFile    = "ca.pem"
	svidFile  = "svid.pem"
	trustFile = "trust.json"
	nodeFile  = "node.json"

	filesVersion = 1
)

// nodeRecord is node.json: what the node knows of its membership.
type nodeRecord struct {
	Version     int       `json:"version"`
	Node        string    `json:"node"`
	TrustDomain string    `json:"trust_domain"`
	Server      string    `json:"server"`
	Cluster     string    `json:"cluster"`
	Generation  uint64    `json:"generation"`
	Floor       time.Time `json:"floor"`
	JoinTime    time.Time `json:"join_time"`
	// TokenSHA256 tells a bundle that was used from a new one.
	TokenSHA256 string `json:"token_sha256"`
}

// trustRecord is trust.json: the chain of trust roots, each envelope in its
// serialised form.
type trustRecord struct {
	Version int      `json:"version"`
	Chain   [][]byte `json:"chain"`
}

func (r *nodeRecord) cluster() ([]byte, error) {
	b, err := hex.DecodeString(r.Cluster)
	if err != nil || len(b) != sha256.Size {
		return nil, fmt.Errorf("cluster %q: it must be %d hexadecimal digits", r.Cluster, 2*sha256.Size)
	}
	return b, nil
}

func readNode(dir string) (*nodeRecord, error) {
	r := new(nodeRecord)
	if err := readJSON(filepath.Join(dir, nodeFile), r); err != nil {
		return nil, err
	}
	if r.Version != filesVersion {
		return nil, fmt.Errorf("%s: version %d: this agent reads version %d", filepath.Join(dir, nodeFile), r.Version, filesVersion)
	}
	return r, nil
}

// readTrust reads the chain and verifies it against the cluster.
func readTrust(dir string, cluster []byte) (*trustroot.Root, error) {
	path := filepath.Join(dir, trustFile)
	r := new(trustRecord)
	if err := readJSON(path, r); err != nil {
		return nil, err
	}
	if r.Version != filesVersion {
		return nil, fmt.Errorf("%s: version %d: this agent reads version %d", path, r.Version, filesVersion)
	}
	var chain []*taskv1.Envelope
	for i, b := range r.Chain {
		env, err := envelope.Decode(b)
		if err != nil {
			return nil, fmt.Errorf("%s: chain[%d]: %w", path, i, err)
		}
		chain = append(chain, env)
	}
	root, err := trustroot.Open(chain, cluster)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return root, nil
}

func writeTrust(dir string, root *trustroot.Root) error {
	r := trustRecord{Version: filesVersion}
	for _, env := range root.Chain() {
		b, err := proto.MarshalOptions{Deterministic: true}.Marshal(env)
		if err != nil {
			return fmt.Errorf("encode trust root: %w", err)
		}
		r.Chain = append(r.Chain, b)
	}
	return writeJSON(filepath.Join(dir, trustFile), &r)
}

// ensureKey returns the node's key, and makes it, durably, where there is none.
func ensureKey(dir string) (*ecdsa.PrivateKey, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make identity directory: %w", err)
	}
	// A token is spent on the key: it must not be lost with its directory.
	if err := syncDir(filepath.Dir(filepath.Clean(dir))); err != nil {
		return nil, fmt.Errorf("make identity directory: %w", err)
	}
	path := filepath.Join(dir, keyFile)
	signer, err := pki.ReadPrivateKey(path)
	if err == nil {
		key, ok := signer.(*ecdsa.PrivateKey)
		if !ok {
			return nil, fmt.Errorf("%s holds a %T: want ECDSA P-256", path, signer)
		}
		return key, nil
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	key, err := pki.GenerateKey()
	if err != nil {
		return nil, err
	}
	data, err := pki.MarshalPrivateKey(key)
	if err != nil {
		return nil, err
	}
	crash.Point("enrol.key.before")
	if err := writeFile(path, data); err != nil {
		return nil, err
	}
	crash.Point("enrol.key.written")
	return key, nil
}

func readJSON(path string, to any) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	dec := json.NewDecoder(f)
	dec.DisallowUnknownFields()
	if err := dec.Decode(to); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return fmt.Errorf("%s: something follows its end", path)
	}
	return nil
}

func writeJSON(path string, from any) error {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetIndent("", "  ")
	if err := enc.Encode(from); err != nil {
		return fmt.Errorf("encode %s: %w", path, err)
	}
	return writeFile(path, b.Bytes())
}

// writeFile replaces a file, mode 0600, so that after a crash it is as before
// or as asked, and durable once it returns.
func writeFile(path string, data []byte) error {
	dir := filepath.Dir(path)
	f, err := os.CreateTemp(dir, "."+filepath.Base(path)+"-*")
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	_, err = f.Write(data)
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return fmt.Errorf("write %s: %w", path, errors.Join(err, os.Remove(f.Name())))
	}
	if err := syncDir(dir); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
