package pki

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
)

const (
	pemCertificate = "CERTIFICATE"
	pemPrivateKey  = "PRIVATE KEY"
	maxCSR         = 4 << 10
)

// ErrRequest is wrapped by the error about a certificate request that is not
// acceptable.
var ErrRequest = errors.New("certificate request is not acceptable")

// GenerateKey returns a new ECDSA P-256 key.
func GenerateKey() (*ecdsa.PrivateKey, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("generate key: %w", err)
	}
	return key, nil
}

// MarshalPrivateKey returns a key as PKCS #8 in PEM. It is secret.
func MarshalPrivateKey(key crypto.Signer) ([]byte, error) {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("encode private key: %w", err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: pemPrivateKey, Bytes: der}), nil
}

// ParsePrivateKey returns the PKCS #8 key in PEM data.
func ParsePrivateKey(data []byte) (crypto.Signer, error) {
	block, _ := pem.Decode(data)
	if block == nil || block.Type != pemPrivateKey {
		return nil, fmt.Errorf("private key: no PEM block %q", pemPrivateKey)
	}
	parsed, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return nil, fmt.Errorf("private key: %w", err)
	}
	key, ok := parsed.(crypto.Signer)
	if !ok {
		return nil, fmt.Errorf("private key: a %T cannot sign", parsed)
	}
	return key, nil
}

// ReadPrivateKey returns the PKCS #8 key in a PEM file.
func ReadPrivateKey(path string) (crypto.Signer, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read private key: %w", err)
	}
	key, err := ParsePrivateKey(data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return key, nil
}

// NewRequest returns a PKCS #10 request in DER that proves possession of key
// and says nothing else: names come from whoever issues the certificate.
func NewRequest(key crypto.Signer) ([]byte, error) {
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key)
	if err != nil {
		return nil, fmt.Errorf("make certificate request: %w", err)
	}
	return der, nil
}

// RequestKey returns the public key of a PKCS #10 request in DER, and nothing
// else of it. The key must be ECDSA P-256, as all keys of SVIDs are, and the
// request must be signed by it. The error wraps [ErrRequest].
func RequestKey(der []byte) (*ecdsa.PublicKey, error) {
	if n := len(der); n == 0 || n > maxCSR {
		return nil, fmt.Errorf("%w: it has %d bytes: 1 to %d are allowed", ErrRequest, n, maxCSR)
	}
	req, err := x509.ParseCertificateRequest(der)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrRequest, err)
	}
	key, ok := req.PublicKey.(*ecdsa.PublicKey)
	if !ok || key.Curve != elliptic.P256() {
		return nil, fmt.Errorf("%w: its key is not ECDSA P-256", ErrRequest)
	}
	if err := req.CheckSignature(); err != nil {
		return nil, fmt.Errorf("%w: it is not signed by its key: %w", ErrRequest, err)
	}
	return key, nil
}

// KeySHA256 is the SHA-256 over a public key in its PKIX form. It names a key.
func KeySHA256(public crypto.PublicKey) ([sha256.Size]byte, error) {
	der, err := x509.MarshalPKIXPublicKey(public)
	if err != nil {
		return [sha256.Size]byte{}, fmt.Errorf("encode public key: %w", err)
	}
	return sha256.Sum256(der), nil
}
