// Package ca is the certificate authority inside millwright-server: it issues
// X509-SVIDs for one trust domain. It decides who may call the API, never what
// a node carries out.
package ca

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/gpuaas/millwright/pki"
)

// Lifetimes and limits.
const (
	// DefaultNodeTTL is how long a node's certificate is good by default.
	DefaultNodeTTL = 24 * time.Hour
	// DefaultOperatorTTL is how long an operator's or a controller's is.
	DefaultOperatorTTL = 365 * 24 * time.Hour
	// MaxTTL is the longest life of a certificate.
	MaxTTL = 2 * 365 * 24 * time.Hour
	// Backdate is how long before its making a certificate is good, for clocks
	// that are behind.
	Backdate = time.Minute

	caLife   = 10 * 365 * 24 * time.Hour
	certFile = "ca.pem"
	keyFile  = "ca.key"
)

// Config is what a CA is made with.
type Config struct {
	// TrustDomain is the SPIFFE trust domain.
	TrustDomain string
	// Now is the wall clock; nil means time.Now.
	Now func() time.Time
}

// CA issues certificates. It never changes, and is safe for concurrent use.
type CA struct {
	trustDomain string
	now         func() time.Time
	cert        *x509.Certificate
	key         crypto.Signer
}

// New makes a CA with a new P-256 key, in memory.
func New(cfg Config) (*CA, error) {
	if err := pki.CheckTrustDomain(cfg.TrustDomain); err != nil {
		return nil, fmt.Errorf("make CA: %w", err)
	}
	now := clock(cfg)
	key, err := pki.GenerateKey()
	if err != nil {
		return nil, fmt.Errorf("make CA: %w", err)
	}
	template := &x509.Certificate{
		Subject:               pkix.Name{CommonName: "Millwright CA of " + cfg.TrustDomain},
		NotBefore:             now().Add(-Backdate - time.Minute), // before every leaf's
		NotAfter:              now().Add(caLife),
		IsCA:                  true,
		BasicConstraintsValid: true,
		MaxPathLenZero:        true,
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
		URIs:                  []*url.URL{{Scheme: "spiffe", Host: cfg.TrustDomain}},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("make CA certificate: %w", err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("make CA certificate: %w", err)
	}
	return &CA{trustDomain: cfg.TrustDomain, now: now, cert: cert, key: key}, nil
}

// Create makes a CA and keeps it in dir, which is made with mode 0700. A
// directory that holds a CA is left as it is; the error then satisfies
// errors.Is(err, fs.ErrExist).
func Create(dir string, cfg Config) (*CA, error) {
	ca, err := New(cfg)
	if err != nil {
		return nil, err
	}
	key, err := pki.MarshalPrivateKey(ca.key)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("create CA: %w", err)
	}
	// Without its name the directory is lost with all that is durable in it.
	if err := syncDir(filepath.Dir(filepath.Clean(dir))); err != nil {
		return nil, fmt.Errorf("create CA: %w", err)
	}
	// The key is the file that decides whether there is a CA: it comes last.
	switch _, err := os.Lstat(filepath.Join(dir, keyFile)); {
	case err == nil:
		return nil, fmt.Errorf("create CA in %s: there is one: %w", dir, fs.ErrExist)
	case !errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("create CA: %w", err)
	}
	if err := os.Remove(filepath.Join(dir, certFile)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("create CA: %w", err)
	}
	if err := create(filepath.Join(dir, certFile), pki.MarshalCertificates(ca.Roots())); err != nil {
		return nil, fmt.Errorf("create CA: %w", err)
	}
	if err := create(filepath.Join(dir, keyFile), key); err != nil {
		return nil, fmt.Errorf("create CA: %w", err)
	}
	return ca, nil
}

// Load reads the CA in dir. It refuses a key file that others than its owner
// may read.
func Load(dir string, cfg Config) (*CA, error) {
	path := filepath.Join(dir, keyFile)
	st, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("load CA: %w", err)
	}
	if perm := st.Mode().Perm(); perm&0o077 != 0 {
		return nil, fmt.Errorf("load CA: %s has mode %04o, so others can read it: set it with chmod 600: %w", path, perm, fs.ErrPermission)
	}
	key, err := pki.ReadPrivateKey(path)
	if err != nil {
		return nil, fmt.Errorf("load CA: %w", err)
	}
	certs, err := pki.ReadCertificates(filepath.Join(dir, certFile))
	if err != nil {
		return nil, fmt.Errorf("load CA: %w", err)
	}
	ca := &CA{trustDomain: cfg.TrustDomain, now: clock(cfg), cert: certs[0], key: key}
	if err := ca.check(); err != nil {
		return nil, fmt.Errorf("load CA in %s: %w", dir, err)
	}
	return ca, nil
}

func (c *CA) check() error {
	public, ok := c.cert.PublicKey.(*ecdsa.PublicKey)
	switch {
	case !ok || !public.Equal(c.key.Public()):
		return fmt.Errorf("%s is not the certificate of the key in %s", certFile, keyFile)
	case !c.cert.IsCA || len(c.cert.URIs) != 1 || c.cert.URIs[0].Host != c.trustDomain:
		return fmt.Errorf("%s is not a CA certificate of trust domain %s", certFile, c.trustDomain)
	}
	return nil
}

// Request says what to issue.
type Request struct {
	// ID is whose certificate it is; it must be of the CA's trust domain.
	ID pki.ID
	// PublicKey is the holder's ECDSA P-256 key, as [pki.RequestKey] returns it.
	PublicKey *ecdsa.PublicKey
	// TTL is how long it is good; at most [MaxTTL] and the CA's own life.
	TTL time.Duration
	// Generation is the enrolment generation of a node, which
	// [pki.Generation] reads from the certificate; 0 for others.
	Generation uint64
}

// Issue returns a certificate chain, the leaf first and the CA's own last, so
// that a host which only knows the CA's hash can verify it.
func (c *CA) Issue(r Request) ([]*x509.Certificate, error) {
	if r.ID.TrustDomain != c.trustDomain {
		return nil, fmt.Errorf("issue certificate for %s: its trust domain is not %s", r.ID, c.trustDomain)
	}
	if _, err := pki.NewID(r.ID.TrustDomain, r.ID.Role, r.ID.Name); err != nil {
		return nil, fmt.Errorf("issue certificate: %w", err)
	}
	if r.PublicKey == nil || r.TTL <= 0 || r.TTL > MaxTTL {
		return nil, fmt.Errorf("issue certificate for %s: key is missing, or life of %s is not between 0 and %s", r.ID, r.TTL, MaxTTL)
	}
	now := c.now()
	if !now.Before(c.cert.NotAfter) {
		return nil, fmt.Errorf("issue certificate for %s: the CA ended at %s", r.ID, c.cert.NotAfter.Format(time.RFC3339))
	}
	notAfter := now.Add(r.TTL)
	if notAfter.After(c.cert.NotAfter) {
		notAfter = c.cert.NotAfter
	}
	subject := pkix.Name{CommonName: r.ID.Name, OrganizationalUnit: []string{string(r.ID.Role)}}
	if r.Generation > 0 {
		subject.SerialNumber = strconv.FormatUint(r.Generation, 10)
	}
	template := &x509.Certificate{
		Subject:               subject,
		NotBefore:             now.Add(-Backdate),
		NotAfter:              notAfter,
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageDigitalSignature,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		URIs:                  []*url.URL{r.ID.URL()},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, c.cert, r.PublicKey, c.key)
	if err != nil {
		return nil, fmt.Errorf("issue certificate for %s: %w", r.ID, err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("issue certificate for %s: %w", r.ID, err)
	}
	return []*x509.Certificate{leaf, c.cert}, nil
}

// Roots returns the CA certificates of the trust domain.
func (c *CA) Roots() []*x509.Certificate { return []*x509.Certificate{c.cert} }

// SHA256 is the hash over the DER of the CA certificate, which join bundles pin.
func (c *CA) SHA256() [sha256.Size]byte { return sha256.Sum256(c.cert.Raw) }

// TrustDomain is the SPIFFE trust domain.
func (c *CA) TrustDomain() string { return c.trustDomain }

func clock(cfg Config) func() time.Time {
	if cfg.Now == nil {
		return time.Now
	}
	return cfg.Now
}

// create writes a new file with mode 0600, durably and whole or not at all.
func create(path string, data []byte) error {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-*")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name()) //nolint:errcheck // it is gone when all went well
	_, err = f.Write(data)
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := os.Link(f.Name(), path); err != nil { // unlike a rename, it replaces nothing
		return err
	}
	return syncDir(filepath.Dir(path))
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
