package pki_test

import (
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"math/big"
	"net/url"
	"testing"
	"time"

	"github.com/gpuaas/millwright/pki"
)

// issuer is a CA that signs whatever it is asked to.
type issuer struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newIssuer(t *testing.T) *issuer {
	t.Helper()
	key := newKey(t)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1),
		Subject:      pkix.Name{CommonName: "test CA"},
		NotBefore:    time.Now().Add(-2 * time.Hour), NotAfter: time.Now().Add(2 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return &issuer{cert: cert, key: key}
}

// issue signs a leaf for a role after edit changed it, in DER.
func (i *issuer) issue(t *testing.T, role pki.Role, key *ecdsa.PrivateKey, edit func(*x509.Certificate, string)) []byte {
	t.Helper()
	template := &x509.Certificate{
		SerialNumber: big.NewInt(2),
		Subject:      pkix.Name{CommonName: "a"},
		NotBefore:    time.Now().Add(-time.Minute), NotAfter: time.Now().Add(time.Minute),
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageDigitalSignature,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		URIs:                  []*url.URL{{Scheme: "spiffe", Host: "td.test", Path: "/" + string(role) + "/a"}},
	}
	edit(template, string(role))
	der, err := x509.CreateCertificate(rand.Reader, template, i.cert, key.Public(), i.key)
	if err != nil {
		t.Fatal(err)
	}
	return der
}

func (i *issuer) identity(t *testing.T, role pki.Role) *pki.Identity {
	t.Helper()
	key := newKey(t)
	leaf, err := x509.ParseCertificate(i.issue(t, role, key, func(*x509.Certificate, string) {}))
	if err != nil {
		t.Fatal(err)
	}
	id, err := pki.NewIdentity([]*x509.Certificate{leaf, i.cert}, key, []*x509.Certificate{i.cert})
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func (i *issuer) tls(t *testing.T, role pki.Role) pki.TLS {
	t.Helper()
	source := new(pki.Static)
	source.Set(i.identity(t, role))
	return pki.TLS{Source: source, TrustDomain: "td.test"}
}

func newKey(t *testing.T) *ecdsa.PrivateKey {
	t.Helper()
	key, err := pki.GenerateKey()
	if err != nil {
		t.Fatal(err)
	}
	return key
}
