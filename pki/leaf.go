package pki

import (
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/rsa"
	"crypto/x509"
	"encoding/asn1"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"
)

// ErrCertificate is wrapped by every error about a certificate, or a chain of
// them, that does not prove an identity.
var ErrCertificate = errors.New("certificate is not acceptable")

const (
	maxChain   = 4    // certificates that a peer may present
	maxRSABits = 4096 // a larger key costs the verifier too much
	minRSABits = 2048
)

// StrictLeaf returns the id in a leaf certificate, or an error that wraps
// [ErrCertificate]. It checks what the X509-SVID specification demands of a
// leaf and libraries let pass: exactly one URI name, in the one spelling of
// Millwright's layout; no CA; a critical key usage with digitalSignature and
// without signing of certificates; both extended usages or none. It does not
// check who issued the certificate or when it is valid: see [VerifyChain].
func StrictLeaf(leaf *x509.Certificate) (ID, error) {
	id, err := leafID(leaf)
	if err != nil {
		return ID{}, fmt.Errorf("%w: %w", ErrCertificate, err)
	}
	if err := checkLeafUse(leaf); err != nil {
		return ID{}, fmt.Errorf("%w: %s: %w", ErrCertificate, id, err)
	}
	return id, nil
}

// leafID reads the id from the bytes of the extension: a URL parser would fold
// several spellings into one.
func leafID(leaf *x509.Certificate) (ID, error) {
	san, ok := extension(leaf, asn1.ObjectIdentifier{2, 5, 29, 17})
	if !ok {
		return ID{}, errors.New("it has no subject alternative name: an SVID has exactly one URI")
	}
	var names []asn1.RawValue
	if rest, err := asn1.Unmarshal(san.Value, &names); err != nil || len(rest) > 0 {
		return ID{}, errors.New("its subject alternative name cannot be read")
	}
	const uri = 6 // GeneralName uniformResourceIdentifier
	names = slices.DeleteFunc(names, func(n asn1.RawValue) bool {
		return n.Class != asn1.ClassContextSpecific || n.Tag != uri
	})
	if len(names) != 1 {
		return ID{}, fmt.Errorf("it has %d URI names: an SVID has exactly one", len(names))
	}
	if len(leaf.RawSubject) <= 2 && !san.Critical {
		return ID{}, errors.New("its subject is empty and its URI name is not critical")
	}
	return ParseID(string(names[0].Bytes))
}

func checkLeafUse(leaf *x509.Certificate) error {
	usage, ok := extension(leaf, asn1.ObjectIdentifier{2, 5, 29, 15})
	both := slices.Contains(leaf.ExtKeyUsage, x509.ExtKeyUsageServerAuth) &&
		slices.Contains(leaf.ExtKeyUsage, x509.ExtKeyUsageClientAuth)
	switch {
	case leaf.IsCA:
		return errors.New("it is a CA: a CA must not be used to authenticate")
	case !ok || !usage.Critical:
		return errors.New("it has no critical key usage")
	case leaf.KeyUsage&(x509.KeyUsageCertSign|x509.KeyUsageCRLSign) != 0:
		return errors.New("its key usage allows signing certificates or revocation lists")
	case leaf.KeyUsage&x509.KeyUsageDigitalSignature == 0:
		return errors.New("its key usage lacks digitalSignature")
	case len(leaf.ExtKeyUsage)+len(leaf.UnknownExtKeyUsage) > 0 && !both:
		return errors.New("its extended key usage lacks serverAuth or clientAuth: it must have both")
	}
	return nil
}

// VerifyChain returns the id that a presented chain, the leaf first, proves at
// a time: the leaf passes [StrictLeaf], is of trustDomain, and is signed by one
// of roots, through the other certificates of the chain where need be. Sizes
// are bounded before any signature is checked. The error wraps
// [ErrCertificate].
func VerifyChain(chain, roots []*x509.Certificate, trustDomain string, now time.Time) (ID, error) {
	if n := len(chain); n == 0 || n > maxChain {
		return ID{}, fmt.Errorf("%w: the chain has %d certificates: 1 to %d are allowed", ErrCertificate, n, maxChain)
	}
	for i, c := range chain {
		if err := checkKeySize(c); err != nil {
			return ID{}, fmt.Errorf("%w: certificate %d of the chain: %w", ErrCertificate, i, err)
		}
	}
	leaf := chain[0]
	id, err := StrictLeaf(leaf)
	if err != nil {
		return ID{}, err
	}
	if id.TrustDomain != trustDomain {
		return ID{}, fmt.Errorf("%w: %s: its trust domain is not %s", ErrCertificate, id, trustDomain)
	}
	opts := x509.VerifyOptions{
		Roots:         x509.NewCertPool(),
		Intermediates: x509.NewCertPool(),
		CurrentTime:   now,
		KeyUsages:     []x509.ExtKeyUsage{x509.ExtKeyUsageAny}, // StrictLeaf has judged the leaf's
	}
	for _, c := range roots {
		opts.Roots.AddCert(c)
	}
	for _, c := range chain[1:] {
		opts.Intermediates.AddCert(c)
	}
	if _, err := leaf.Verify(opts); err != nil {
		return ID{}, fmt.Errorf("%w: %s: %w", ErrCertificate, id, err)
	}
	return id, nil
}

func checkKeySize(c *x509.Certificate) error {
	switch key := c.PublicKey.(type) {
	case *ecdsa.PublicKey, ed25519.PublicKey:
		return nil
	case *rsa.PublicKey:
		if bits := key.N.BitLen(); bits < minRSABits || bits > maxRSABits {
			return fmt.Errorf("its RSA key has %d bits: %d to %d are allowed", bits, minRSABits, maxRSABits)
		}
		return nil
	}
	return fmt.Errorf("its key is a %T: use ECDSA, Ed25519 or RSA", c.PublicKey)
}

type ext struct {
	Critical bool
	Value    []byte
}

func extension(c *x509.Certificate, oid asn1.ObjectIdentifier) (ext, bool) {
	for _, e := range c.Extensions {
		if e.Id.Equal(oid) {
			return ext{Critical: e.Critical, Value: e.Value}, true
		}
	}
	return ext{}, false
}

// Generation returns the enrolment generation that the embedded CA wrote into a
// node's certificate, and 0 where there is none, as in certificates of another
// CA.
func Generation(leaf *x509.Certificate) uint64 {
	n, err := strconv.ParseUint(leaf.Subject.SerialNumber, 10, 64)
	if err != nil {
		return 0
	}
	return n
}
