package ca

import (
	"crypto/ecdsa"
	"fmt"
	"sync"
	"time"

	"github.com/gpuaas/millwright/pki"
)

// Source is a [pki.Source] for the program that holds the CA: it issues its own
// certificate, and a new one with a new key once half of its life has passed.
type Source struct {
	ca  *CA
	id  pki.ID
	ttl time.Duration

	mu      sync.Mutex
	current *pki.Identity
}

// NewSource returns a source for id, a server's id of the CA's trust domain.
func NewSource(ca *CA, id pki.ID, ttl time.Duration) *Source {
	return &Source{ca: ca, id: id, ttl: ttl}
}

// Identity returns the current certificate, and makes one first where it is
// due.
func (s *Source) Identity() (*pki.Identity, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.current != nil && s.ca.now().Before(s.current.NotAfter().Add(-s.ttl/2)) {
		return s.current, nil
	}
	next, err := s.issue()
	if err != nil {
		return nil, err
	}
	s.current = next
	return next, nil
}

func (s *Source) issue() (*pki.Identity, error) {
	key, err := pki.GenerateKey()
	if err != nil {
		return nil, err
	}
	return s.ca.Identity(Request{ID: s.id, TTL: s.ttl}, key)
}

// Identity issues a certificate for key, which takes the place of
// r.PublicKey, and returns it as an identity.
func (c *CA) Identity(r Request, key *ecdsa.PrivateKey) (*pki.Identity, error) {
	r.PublicKey = &key.PublicKey
	chain, err := c.Issue(r)
	if err != nil {
		return nil, err
	}
	id, err := pki.NewIdentity(chain, key, c.Roots())
	if err != nil {
		return nil, fmt.Errorf("use certificate for %s: %w", r.ID, err)
	}
	return id, nil
}
