package pki_test

import (
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"math/big"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/gpuaas/millwright/pki"
)

// shape is one of the certificate shapes at the door. Exactly one is good.
type shape struct {
	name string
	ok   bool
	edit func(c *x509.Certificate, role string)
}

// uris replaces the URI names; ROLE stands for the role that the peer expects.
func uris(list ...string) func(*x509.Certificate, string) {
	return func(c *x509.Certificate, role string) {
		c.URIs = nil
		for _, s := range list {
			u, err := url.Parse(strings.ReplaceAll(s, "ROLE", role))
			if err != nil {
				panic(err)
			}
			c.URIs = append(c.URIs, u)
		}
	}
}

func shapes() []shape {
	good := "spiffe://td.test/ROLE/a"
	now := time.Now()
	return []shape{
		{"good", true, func(*x509.Certificate, string) {}},
		{"no URI", false, uris()},
		{"two URIs", false, uris(good, "spiffe://td.test/ROLE/b")},
		{"spiffe and https URI", false, uris(good, "https://x")},
		{"https scheme", false, uris("https://td.test/ROLE/a")},
		{"no path", false, uris("spiffe://td.test")},
		{"path is a slash", false, uris("spiffe://td.test/")},
		{"trailing slash", false, uris(good + "/")},
		{"empty segment", false, uris("spiffe://td.test/ROLE//a")},
		{"dot dot", false, uris("spiffe://td.test/ROLE/../a")},
		{"percent-encoded", false, uris("spiffe://td.test/ROLE/%61")},
		{"bad character", false, uris("spiffe://td.test/ROLE/a@b")},
		{"query", false, uris(good + "?x=1")},
		{"fragment", false, uris(good + "#f")},
		{"userinfo", false, uris("spiffe://u@td.test/ROLE/a")},
		{"port", false, uris("spiffe://td.test:8080/ROLE/a")},
		{"upper-case trust domain", false, uris("spiffe://TD.test/ROLE/a")},
		{"upper-case scheme", false, func(c *x509.Certificate, role string) {
			c.URIs = []*url.URL{{Scheme: "SPIFFE", Host: "td.test", Path: "/" + role + "/a"}}
		}},
		{"other trust domain", false, uris("spiffe://other.test/ROLE/a")},
		{"id of 2100 bytes", false, uris("spiffe://td.test/ROLE/" + strings.Repeat("a", 2100))},
		{"CA flag", false, func(c *x509.Certificate, _ string) { c.IsCA = true }},
		{"keyCertSign", false, func(c *x509.Certificate, _ string) { c.KeyUsage |= x509.KeyUsageCertSign }},
		{"cRLSign", false, func(c *x509.Certificate, _ string) { c.KeyUsage |= x509.KeyUsageCRLSign }},
		{"no digitalSignature", false, func(c *x509.Certificate, _ string) { c.KeyUsage = x509.KeyUsageKeyEncipherment }},
		{"no key usage", false, func(c *x509.Certificate, _ string) { c.KeyUsage = 0 }},
		{"serverAuth only", false, func(c *x509.Certificate, _ string) { c.ExtKeyUsage = c.ExtKeyUsage[:1] }},
		{"codeSigning only", false, func(c *x509.Certificate, _ string) {
			c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageCodeSigning}
		}},
		{"expired", false, func(c *x509.Certificate, _ string) {
			c.NotBefore, c.NotAfter = now.Add(-time.Hour), now.Add(-time.Minute)
		}},
		{"not yet valid", false, func(c *x509.Certificate, _ string) {
			c.NotBefore, c.NotAfter = now.Add(time.Minute), now.Add(time.Hour)
		}},
		{"unknown critical extension", false, func(c *x509.Certificate, _ string) {
			c.ExtraExtensions = []pkix.Extension{{Id: asn1.ObjectIdentifier{1, 2, 3, 4}, Critical: true, Value: []byte{5, 0}}}
		}},
	}
}

// moreShapes are those beyond the thirty: a CA of another issuer, roles and
// names outside of the layout.
func moreShapes() []shape {
	return []shape{
		{"unknown role", false, uris("spiffe://td.test/admin/a")},
		{"role alone", false, uris("spiffe://td.test/ROLE")},
		{"deeper path", false, uris("spiffe://td.test/ROLE/a/b")},
		{"upper-case name", false, uris("spiffe://td.test/ROLE/A")},
		{"name begins with a dash", false, uris("spiffe://td.test/ROLE/-a")},
		{"name of 64 bytes", false, uris("spiffe://td.test/ROLE/" + strings.Repeat("a", 64))},
		{"key usage not critical", false, func(c *x509.Certificate, _ string) {
			c.KeyUsage = 0
			c.ExtraExtensions = []pkix.Extension{{Id: asn1.ObjectIdentifier{2, 5, 29, 15}, Value: []byte{3, 2, 7, 128}}}
		}},
		{"no extended key usage", true, func(c *x509.Certificate, _ string) { c.ExtKeyUsage = nil }},
		{"a DNS name beside", true, func(c *x509.Certificate, _ string) { c.DNSNames = []string{"a.test"} }},
	}
}

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
