package home

import (
	"bytes"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/gpuaas/millwright/pki"
	nodev1 "github.com/gpuaas/millwright/proto/millwright/node/v1"
)

// Context is a server with the certificate by which it knows the operator.
type Context struct {
	// File is the context file.
	File *nodev1.ContextFile
	// Identity is the operator's identity there. It may have expired.
	Identity *pki.Identity
}

// Current is the name of the current context, empty when there is none.
func (h *Home) Current() string { return h.config.Context }

// Contexts returns the names of the contexts, sorted.
func (h *Home) Contexts() ([]string, error) {
	entries, err := os.ReadDir(filepath.Join(h.dir, contextsDir))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list contexts: %w", err)
	}
	var names []string
	for _, e := range entries {
		if name, ok := strings.CutSuffix(e.Name(), ".json"); ok && pki.CheckName(name) == nil {
			names = append(names, name)
		}
	}
	return names, nil
}

// Context reads a context; empty means the current one. The error wraps
// [ErrNoContext] when there is none, and otherwise is one of [Home.Add].
func (h *Home) Context(name string) (*Context, error) {
	if name == "" {
		name = h.config.Context
	}
	if name == "" {
		return nil, fmt.Errorf("no context is current: %w; add one with: millctl context add FILE, where FILE is what millwright-server init wrote", ErrNoContext)
	}
	if err := h.exists(name); err != nil {
		return nil, err
	}
	path := h.contextPath(name)
	file := &nodev1.ContextFile{}
	if err := readMessage(path, file); err != nil {
		return nil, err
	}
	c, err := h.verify(file)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return c, nil
}

// exists returns an error that wraps [ErrNoContext] and lists the contexts that
// there are, unless there is one of the name.
func (h *Home) exists(name string) error {
	names, err := h.Contexts()
	if err != nil {
		return err
	}
	if !slices.Contains(names, name) {
		return fmt.Errorf("context %q: %w; known contexts: [%s]", name, ErrNoContext, strings.Join(names, ", "))
	}
	return nil
}

func (h *Home) contextPath(name string) string {
	return filepath.Join(h.dir, contextsDir, name+".json")
}

// Add reads the context file at path, verifies that it is for this operator's
// key and this operator's cluster, and stores it, over one of the same name. The
// first one becomes current. The error wraps [ErrInvalid] or [ErrForeign].
func (h *Home) Add(path string) (_ *Context, replaced bool, err error) {
	file := &nodev1.ContextFile{}
	if err := readMessage(path, file); err != nil {
		return nil, false, err
	}
	c, err := h.verify(file)
	if err != nil {
		return nil, false, fmt.Errorf("%s: %w", path, err)
	}
	data, err := Encode(file)
	if err != nil {
		return nil, false, err
	}
	if err := os.MkdirAll(filepath.Join(h.dir, contextsDir), dirMode); err != nil {
		return nil, false, fmt.Errorf("store context %s: %w", file.GetName(), err)
	}
	_, err = os.Lstat(h.contextPath(file.GetName()))
	replaced = err == nil
	if err := replace(h.contextPath(file.GetName()), data); err != nil {
		return nil, false, fmt.Errorf("store context %s: %w", file.GetName(), err)
	}
	if h.config.Context == "" {
		return c, replaced, h.Use(file.GetName())
	}
	return c, replaced, nil
}

// Use makes a context current. The error wraps [ErrNoContext] when there is no
// such one.
func (h *Home) Use(name string) error {
	if err := h.exists(name); err != nil {
		return err
	}
	next := h.config
	next.Context = name
	data, err := yaml.Marshal(next)
	if err != nil {
		return fmt.Errorf("encode %s: %w", configFile, err)
	}
	if err := replace(filepath.Join(h.dir, configFile), data); err != nil {
		return fmt.Errorf("use context %s: %w", name, err)
	}
	h.config = next
	return nil
}

// verify checks a context file against the operator's own keys and genesis.
func (h *Home) verify(f *nodev1.ContextFile) (*Context, error) {
	if f.GetVersion() != 1 {
		return nil, fmt.Errorf("%w: version %d: must be 1; a newer one needs a newer millctl", ErrInvalid, f.GetVersion())
	}
	if err := pki.CheckName(f.GetName()); err != nil {
		return nil, fmt.Errorf("%w: name: %w", ErrInvalid, err)
	}
	if host, port, err := net.SplitHostPort(f.GetServer()); err != nil || host == "" || port == "" {
		return nil, fmt.Errorf("%w: server: %q: must be host:port", ErrInvalid, f.GetServer())
	}
	if f.GetCluster() != hex.EncodeToString(h.Cluster()) {
		return nil, fmt.Errorf("%w: cluster: %q: this operator's cluster is %x; was the server set up from another founding file?", ErrForeign, f.GetCluster(), h.Cluster())
	}
	if f.GetTrustDomain() != h.root.TrustDomain() {
		return nil, fmt.Errorf("%w: trust_domain: %q: the genesis says %q", ErrForeign, f.GetTrustDomain(), h.root.TrustDomain())
	}
	roots, err := pki.ParseCertificatesDER(f.GetCaCertificates())
	if err != nil {
		return nil, fmt.Errorf("%w: ca_certificates: %w", ErrInvalid, err)
	}
	if !pinned(roots, f.GetCaSha256()) {
		return nil, fmt.Errorf("%w: ca_sha256: %q: is the hash of none of ca_certificates", ErrInvalid, f.GetCaSha256())
	}
	id, err := h.identity(f, roots)
	if err != nil {
		return nil, err
	}
	return &Context{File: f, Identity: id}, nil
}

func pinned(roots []*x509.Certificate, hash string) bool {
	return slices.ContainsFunc(roots, func(c *x509.Certificate) bool {
		sum := sha256.Sum256(c.Raw)
		return hex.EncodeToString(sum[:]) == hash
	})
}

func (h *Home) identity(f *nodev1.ContextFile, roots []*x509.Certificate) (*pki.Identity, error) {
	chain, err := pki.ParseCertificatesDER(f.GetOperatorCertificates())
	if err != nil {
		return nil, fmt.Errorf("%w: operator_certificates: %w", ErrInvalid, err)
	}
	key, err := h.tlsKey()
	if err != nil {
		return nil, err
	}
	own, err := pki.KeySHA256(key.Public())
	if err != nil {
		return nil, err
	}
	if theirs, err := pki.KeySHA256(chain[0].PublicKey); err != nil || !bytes.Equal(own[:], theirs[:]) {
		return nil, fmt.Errorf("%w: operator_certificates: the certificate is for another key than %s", ErrForeign, filepath.Join(h.dir, tlsFile))
	}
	id, err := pki.NewIdentity(chain, key, roots)
	if err != nil {
		return nil, fmt.Errorf("%w: operator_certificates: %w", ErrInvalid, err)
	}
	want, err := h.ID()
	if err != nil {
		return nil, err
	}
	if id.ID != want {
		return nil, fmt.Errorf("%w: operator_certificates: the certificate is for %s, and this operator is %s", ErrForeign, id.ID, want)
	}
	return id, nil
}

// TLS returns the configuration to talk to the context's server with. now is
// the wall clock.
func (c *Context) TLS(now func() time.Time) *tls.Config {
	source := &pki.Static{}
	source.Set(c.Identity)
	return pki.TLS{Source: source, TrustDomain: c.File.GetTrustDomain(), Now: now}.Client()
}
