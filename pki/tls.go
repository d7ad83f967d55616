package pki

import (
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"slices"
	"time"
)

// TLS makes the TLS configurations of a program with an identity. All of them
// speak TLS 1.3 only, verify the peer in VerifyConnection, which a resumed
// session cannot skip, and keep no session tickets.
type TLS struct {
	// Source is the own identity, asked at each handshake.
	Source Source
	// TrustDomain is the trust domain of both sides.
	TrustDomain string
	// Now is the wall clock; nil means time.Now.
	Now func() time.Time
}

// Server returns the configuration of a server. A client may come without a
// certificate; one that it presents is verified. Whoever serves decides by
// [PeerID] what a client without one may do.
func (t TLS) Server() *tls.Config {
	c := baseTLS(t.now())
	c.ClientAuth = tls.RequestClientCert // verified below, by the one path
	c.GetCertificate = func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
		return t.certificate()
	}
	c.VerifyConnection = func(cs tls.ConnectionState) error {
		if len(cs.PeerCertificates) == 0 {
			return nil
		}
		_, err := t.verify(cs.PeerCertificates, Roles()...)
		return err
	}
	return c
}

// Client returns the configuration of a client, which talks to a server of the
// trust domain only, whatever its host name.
func (t TLS) Client() *tls.Config {
	c := baseTLS(t.now())
	c.InsecureSkipVerify = true // by host name; VerifyConnection does it by SPIFFE id
	c.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
		return t.certificate()
	}
	c.VerifyConnection = func(cs tls.ConnectionState) error {
		_, err := t.verify(cs.PeerCertificates, RoleServer)
		return err
	}
	return c
}

// JoinTLS returns the configuration of a client that has no certificate yet. It
// talks only to a server of trustDomain whose certificate is signed by the CA
// certificate that it presents along with its own and whose SHA-256 is caSHA256.
// A nil now means time.Now.
func JoinTLS(trustDomain string, caSHA256 [sha256.Size]byte, now func() time.Time) *tls.Config {
	if now == nil {
		now = time.Now
	}
	c := baseTLS(now)
	c.InsecureSkipVerify = true // by host name and system roots; VerifyConnection does it by the pin
	c.VerifyConnection = func(cs tls.ConnectionState) error {
		ca, err := pinnedCA(cs.PeerCertificates, caSHA256)
		if err != nil {
			return err
		}
		id, err := VerifyChain(cs.PeerCertificates, []*x509.Certificate{ca}, trustDomain, now())
		if err != nil {
			return err
		}
		return checkPeerRole(id, RoleServer)
	}
	return c
}

// PeerID returns the id of the peer of a connection whose configuration this
// package made, and whether the peer has one.
func PeerID(cs tls.ConnectionState) (ID, bool) {
	if !cs.HandshakeComplete || len(cs.PeerCertificates) == 0 {
		return ID{}, false
	}
	id, err := StrictLeaf(cs.PeerCertificates[0])
	return id, err == nil
}

func baseTLS(now func() time.Time) *tls.Config {
	return &tls.Config{
		MinVersion:             tls.VersionTLS13,
		SessionTicketsDisabled: true,
		Time:                   now,
	}
}

func (t TLS) now() func() time.Time {
	if t.Now == nil {
		return time.Now
	}
	return t.Now
}

func (t TLS) certificate() (*tls.Certificate, error) {
	id, err := t.Source.Identity()
	if err != nil {
		return nil, fmt.Errorf("own certificate: %w", err)
	}
	return id.TLSCertificate(), nil
}

func (t TLS) verify(chain []*x509.Certificate, roles ...Role) (ID, error) {
	own, err := t.Source.Identity()
	if err != nil {
		return ID{}, fmt.Errorf("own CA certificates: %w", err)
	}
	id, err := VerifyChain(chain, own.Roots, t.TrustDomain, t.now()())
	if err != nil {
		return ID{}, err
	}
	return id, checkPeerRole(id, roles...)
}

func checkPeerRole(id ID, roles ...Role) error {
	if slices.Contains(roles, id.Role) {
		return nil
	}
	return fmt.Errorf("%w: %s: the peer must be one of %v", ErrCertificate, id, roles)
}

func pinnedCA(chain []*x509.Certificate, pin [sha256.Size]byte) (*x509.Certificate, error) {
	if len(chain) > maxChain {
		return nil, fmt.Errorf("%w: the chain has %d certificates: 1 to %d are allowed", ErrCertificate, len(chain), maxChain)
	}
	for _, c := range chain {
		if c.IsCA && sha256.Sum256(c.Raw) == pin {
			return c, nil
		}
	}
	return nil, fmt.Errorf("%w: the server presents no CA certificate with SHA-256 %x: check the server's address, and make a new join bundle if its CA has changed", ErrCertificate, pin)
}
