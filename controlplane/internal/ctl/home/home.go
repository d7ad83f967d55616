package home

import (
	"crypto"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/millwright/pki"
	"github.com/gpuaas/millwright/pki/envelope"
	"github.com/gpuaas/millwright/pki/trustroot"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

const (
	configFile   = "config.yaml"
	genesisFile  = "genesis.json"
	signingFile  = "signing.pem"
	tlsFile      = "tls.pem"
	recoveryFile = "recovery.pem"
	contextsDir  = "contexts"

	configVersion = 1
	maxFile       = 1 << 20
)

var (
	// ErrNone is wrapped by [Open] when no operator was set up in the directory.
	ErrNone = errors.New("no operator is set up")
	// ErrExists is wrapped by [Init] when there is one already.
	ErrExists = errors.New("an operator is set up already")
	// ErrNoContext is wrapped when a context is asked for that does not exist.
	ErrNoContext = errors.New("no such context")
	// ErrInvalid is wrapped when a file is not what it should be.
	ErrInvalid = errors.New("not valid")
	// ErrForeign is wrapped by [Home.Add] when a context is for another cluster
	// or another operator.
	ErrForeign = errors.New("not for this operator")
)

// Home is an operator's directory. It is for one goroutine.
type Home struct {
	dir    string
	config config
	root   *trustroot.Root
}

// config is config.yaml.
type config struct {
	// Version is the version of the format.
	Version int `yaml:"version"`
	// Operator is the operator's name.
	Operator string `yaml:"operator"`
	// Context is the name of the current context; empty when there is none.
	Context string `yaml:"context,omitempty"`
}

// Dir returns the directory: $MILLWRIGHT_HOME, or millwright in
// $XDG_CONFIG_HOME or ~/.config.
func Dir(getenv func(string) string) (string, error) {
	if dir := getenv("MILLWRIGHT_HOME"); dir != "" {
		return filepath.Abs(dir)
	}
	if dir := getenv("XDG_CONFIG_HOME"); filepath.IsAbs(dir) {
		return filepath.Join(dir, "millwright"), nil
	}
	if dir := getenv("HOME"); filepath.IsAbs(dir) {
		return filepath.Join(dir, ".config", "millwright"), nil
	}
	return "", errors.New("no directory for keys and contexts: set MILLWRIGHT_HOME or HOME to an absolute path")
}

// Open reads the directory. The error wraps [ErrNone] when it holds no
// operator, and [ErrInvalid] when a file in it was damaged or holds a key that
// it does not know, with the line.
func Open(dir string) (*Home, error) {
	h := &Home{dir: dir}
	data, err := read(filepath.Join(dir, configFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%s: %w; set one up with: millctl operator init", dir, ErrNone)
	}
	if err != nil {
		return nil, err
	}
	if err := h.config.parse(data); err != nil {
		return nil, fmt.Errorf("%s: %w: %w", filepath.Join(dir, configFile), ErrInvalid, err)
	}
	env := &taskv1.Envelope{}
	if err := readMessage(filepath.Join(dir, genesisFile), env); err != nil {
		return nil, err
	}
	if h.root, err = trustroot.OpenGenesis(env); err != nil {
		return nil, fmt.Errorf("%s: %w: %w", filepath.Join(dir, genesisFile), ErrInvalid, err)
	}
	return h, nil
}

func (c *config) parse(data []byte) error {
	var doc yaml.Node
	if err := yaml.Unmarshal(data, &doc); err != nil {
		return err
	}
	known := []string{"context", "operator", "version"}
	if len(doc.Content) == 1 && doc.Content[0].Kind == yaml.MappingNode {
		for i := 0; i < len(doc.Content[0].Content); i += 2 {
			if key := doc.Content[0].Content[i]; !slices.Contains(known, key.Value) {
				return fmt.Errorf("line %d: %s: unknown key; known keys: %s", key.Line, key.Value, strings.Join(known, ", "))
			}
		}
	}
	if err := doc.Decode(c); err != nil {
		return err
	}
	if c.Version != configVersion {
		return fmt.Errorf("version: %d: must be %d; a newer one needs a newer millctl", c.Version, configVersion)
	}
	if err := pki.CheckName(c.Operator); err != nil {
		return fmt.Errorf("operator: %w", err)
	}
	return nil
}

// Dir is the directory.
func (h *Home) Dir() string { return h.dir }

// Root is the trust root as far as this operator knows it.
func (h *Home) Root() *trustroot.Root { return h.root }

// Cluster is the SHA-256 over the payload of the genesis.
func (h *Home) Cluster() []byte {
	c := h.root.Cluster()
	return c[:]
}

// ID is the operator's SPIFFE id.
func (h *Home) ID() (pki.ID, error) {
	return pki.NewID(h.root.TrustDomain(), pki.RoleOperator, h.config.Operator)
}

// SigningKey reads the daily key. It refuses one that others can read and one
// that the trust root does not let sign tasks.
func (h *Home) SigningKey() (*envelope.Key, error) {
	path := filepath.Join(h.dir, signingFile)
	key, err := envelope.ReadKeyFile(path)
	if err != nil {
		return nil, err
	}
	known, ok := h.root.Key(key.KeyID())
	if !ok || !slices.Contains(known.GetRoles(), taskv1.KeyRole_KEY_ROLE_OPERATOR) {
		return nil, fmt.Errorf("%s: %w: key %s is not an operator's key in the trust root", path, ErrInvalid, key.KeyID())
	}
	return key, nil
}

// tlsKey reads the key of the certificate. It refuses one that others can read.
func (h *Home) tlsKey() (crypto.Signer, error) {
	path := filepath.Join(h.dir, tlsFile)
	info, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("read TLS key: %w", err)
	}
	if perm := info.Mode().Perm(); perm&0o077 != 0 {
		return nil, fmt.Errorf("%s: %w: its mode is %04o, so others can read it: set it with chmod 600", path, ErrInvalid, perm)
	}
	return pki.ReadPrivateKey(path)
}

// read reads a small file.
func read(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err != nil {
		return nil, err
	}
	if len(data) > maxFile {
		return nil, fmt.Errorf("%s: %w: larger than %d bytes", path, ErrInvalid, maxFile)
	}
	return data, nil
}

// readMessage reads a file of protojson, strictly.
func readMessage(path string, m proto.Message) error {
	data, err := read(path)
	if err != nil {
		return err
	}
	if err := protojson.Unmarshal(data, m); err != nil {
		return fmt.Errorf("%s: %w: %w", path, ErrInvalid, err)
	}
	return nil
}
