package pki

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/sha256"
	"fmt"
	"time"
)

// RekeyWithin is how long after the end of its certificate a node may ask for
// another with the key that it joined with.
const RekeyWithin = 30 * 24 * time.Hour

// RekeyDigest is what a node signs to answer the challenge of a re-keying.
func RekeyDigest(challenge, csr []byte) []byte {
	c, r := sha256.Sum256(challenge), sha256.Sum256(csr)
	h := sha256.New()
	h.Write([]byte("millwright rekey v1\x00"))
	h.Write(c[:])
	h.Write(r[:])
	return h.Sum(nil)
}

// SignRekey answers a challenge.
func SignRekey(key crypto.Signer, challenge, csr []byte) ([]byte, error) {
	sig, err := key.Sign(rand.Reader, RekeyDigest(challenge, csr), crypto.SHA256)
	if err != nil {
		return nil, fmt.Errorf("sign the answer to a challenge: %w", err)
	}
	return sig, nil
}

// VerifyRekey reports whether the holder of a key has answered a challenge.
func VerifyRekey(key *ecdsa.PublicKey, challenge, csr, signature []byte) bool {
	return ecdsa.VerifyASN1(key, RekeyDigest(challenge, csr), signature)
}
