package pki

import (
	"crypto"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"time"
)

// ErrNoIdentity is wrapped by the error of a [Source] that has no identity yet.
var ErrNoIdentity = errors.New("no identity yet")

// A Source gives a program's own identity as it is now. Implementations renew
// it on their own, do no network I/O in Identity, and are safe for concurrent
// use.
type Source interface {
	// Identity returns the identity. Callers do not change it. The error wraps
	// [ErrNoIdentity] when there is none yet.
	Identity() (*Identity, error)
}

// Identity is an X509-SVID with its key and with the CA certificates by which
// peers are judged. It never changes once it was made.
type Identity struct {
	// ID is the SPIFFE id in the leaf.
	ID ID
	// Chain is the certificate chain, the leaf first.
	Chain []*x509.Certificate
	// Key is the leaf's private key.
	Key crypto.Signer
	// Roots are the CA certificates of the trust domain.
	Roots []*x509.Certificate
}

// NewIdentity returns the identity made of the parts. It checks that the leaf
// is strict, belongs to the key, and is signed by one of roots; the time is not
// checked, so that an expired identity can be loaded and shown.
func NewIdentity(chain []*x509.Certificate, key crypto.Signer, roots []*x509.Certificate) (*Identity, error) {
	if len(chain) == 0 || len(roots) == 0 {
		return nil, fmt.Errorf("%w: certificate or CA certificate is missing", ErrCertificate)
	}
	leaf := chain[0]
	id, err := StrictLeaf(leaf)
	if err != nil {
		return nil, err
	}
	public, ok := key.Public().(interface{ Equal(crypto.PublicKey) bool })
	if !ok || !public.Equal(leaf.PublicKey) {
		return nil, fmt.Errorf("%w: %s: the private key is not the certificate's", ErrCertificate, id)
	}
	halfLife := leaf.NotBefore.Add(leaf.NotAfter.Sub(leaf.NotBefore) / 2)
	if _, err := VerifyChain(chain, roots, id.TrustDomain, halfLife); err != nil {
		return nil, err
	}
	return &Identity{ID: id, Chain: chain, Key: key, Roots: roots}, nil
}

// Leaf is the leaf certificate.
func (i *Identity) Leaf() *x509.Certificate { return i.Chain[0] }

// NotBefore is the beginning of the leaf's validity.
func (i *Identity) NotBefore() time.Time { return i.Chain[0].NotBefore }

// NotAfter is the end of the leaf's validity.
func (i *Identity) NotAfter() time.Time { return i.Chain[0].NotAfter }

// TLSCertificate returns the chain as package tls presents it.
func (i *Identity) TLSCertificate() *tls.Certificate {
	cert := &tls.Certificate{PrivateKey: i.Key, Leaf: i.Chain[0]}
	for _, c := range i.Chain {
		cert.Certificate = append(cert.Certificate, c.Raw)
	}
	return cert
}

// Static is a [Source] of an identity that is set by hand. The zero Static has
// none.
type Static struct {
	current atomic.Pointer[Identity]
}

// Set replaces the identity.
func (s *Static) Set(id *Identity) { s.current.Store(id) }

// Identity returns what was set last.
func (s *Static) Identity() (*Identity, error) {
	id := s.current.Load()
	if id == nil {
		return nil, ErrNoIdentity
	}
	return id, nil
}

// Files is a [Source] of an identity in PEM files, for example one that a CA
// outside of Millwright issues.
type Files struct {
	cert, key, ca string
	current       Static
}

// OpenFiles reads an identity from a file with the certificate chain, the leaf
// first, one with the private key in PKCS #8, and one with the CA certificates.
func OpenFiles(certFile, keyFile, caFile string) (*Files, error) {
	f := &Files{cert: certFile, key: keyFile, ca: caFile}
	if err := f.Reload(); err != nil {
		return nil, err
	}
	return f, nil
}

// Reload reads the files again. When they do not hold a valid identity the one
// before stays.
func (f *Files) Reload() error {
	id, err := ReadIdentity(f.cert, f.key, f.ca)
	if err != nil {
		return err
	}
	f.current.Set(id)
	return nil
}

// Identity returns what was read last.
func (f *Files) Identity() (*Identity, error) { return f.current.Identity() }

// ReadIdentity reads an identity from PEM files; see [OpenFiles].
func ReadIdentity(certFile, keyFile, caFile string) (*Identity, error) {
	chain, err := ReadCertificates(certFile)
	if err != nil {
		return nil, err
	}
	key, err := ReadPrivateKey(keyFile)
	if err != nil {
		return nil, err
	}
	roots, err := ReadCertificates(caFile)
	if err != nil {
		return nil, err
	}
	id, err := NewIdentity(chain, key, roots)
	if err != nil {
		return nil, fmt.Errorf("identity in %s: %w", certFile, err)
	}
	return id, nil
}

// ReadCertificates returns the certificates in a PEM file, at least one.
func ReadCertificates(path string) ([]*x509.Certificate, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read certificates: %w", err)
	}
	certs, err := ParseCertificates(data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return certs, nil
}

// ParseCertificates returns the certificates in PEM data, at least one. It
// refuses blocks of another type.
func ParseCertificates(data []byte) ([]*x509.Certificate, error) {
	var certs []*x509.Certificate
	for {
		block, rest := pem.Decode(data)
		if block == nil {
			break
		}
		if block.Type != pemCertificate {
			return nil, fmt.Errorf("%w: PEM block is %q: want %q", ErrCertificate, block.Type, pemCertificate)
		}
		cert, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrCertificate, err)
		}
		certs = append(certs, cert)
		data = rest
	}
	if len(certs) == 0 {
		return nil, fmt.Errorf("%w: no PEM certificate", ErrCertificate)
	}
	return certs, nil
}

// ParseCertificatesDER returns certificates given one by one in DER, at least
// one, as messages carry them.
func ParseCertificatesDER(ders [][]byte) ([]*x509.Certificate, error) {
	var certs []*x509.Certificate
	for i, der := range ders {
		cert, err := x509.ParseCertificate(der)
		if err != nil {
			return nil, fmt.Errorf("%w: certificate %d: %w", ErrCertificate, i, err)
		}
		certs = append(certs, cert)
	}
	if len(certs) == 0 {
		return nil, fmt.Errorf("%w: it is missing", ErrCertificate)
	}
	return certs, nil
}

// MarshalCertificates returns certificates as PEM.
func MarshalCertificates(certs []*x509.Certificate) []byte {
	var b []byte
	for _, c := range certs {
		b = append(b, pem.EncodeToMemory(&pem.Block{Type: pemCertificate, Bytes: c.Raw})...)
	}
	return b
}

// DERs returns certificates one by one in DER, as messages carry them.
func DERs(certs []*x509.Certificate) [][]byte {
	list := make([][]byte, len(certs))
	for i, c := range certs {
		list[i] = c.Raw
	}
	return list
}
