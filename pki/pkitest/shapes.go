package pkitest

import (
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"net/url"
	"strings"
	"time"
)

// Shape is one of the certificate shapes at the door.
type Shape struct {
	// Name says what is special about it.
	Name string
	// Good says that it is to be let in.
	Good bool
	// Edit gives a good certificate of a peer with the role the shape.
	Edit func(c *x509.Certificate, role string)
}

// domain is the trust domain of a table of shapes.
type domain string

// uris replaces the URI names; ROLE stands for the role that the peer expects,
// and td.test for the trust domain.
func (d domain) uris(list ...string) func(*x509.Certificate, string) {
	return func(c *x509.Certificate, role string) {
		c.URIs = nil
		real := strings.NewReplacer("ROLE", role, "td.test", string(d), "TD.test", strings.ToUpper(string(d)))
		for _, s := range list {
			u, err := url.Parse(real.Replace(s))
			if err != nil {
				panic(err)
			}
			c.URIs = append(c.URIs, u)
		}
	}
}

// Shapes returns the thirty shapes of a certificate of a trust domain. Exactly
// one is good.
func Shapes(trustDomain string) []Shape {
	uris := domain(trustDomain).uris
	good := "spiffe://td.test/ROLE/a"
	now := time.Now()
	return []Shape{
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
			c.URIs = []*url.URL{{Scheme: "SPIFFE", Host: trustDomain, Path: "/" + role + "/a"}}
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

// MoreShapes are those beyond the thirty: a CA of another issuer, roles and
// names outside of the layout.
func MoreShapes(trustDomain string) []Shape {
	uris := domain(trustDomain).uris
	return []Shape{
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
