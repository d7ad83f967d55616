package enrolv1

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/binary"
	"fmt"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/millwright/pki"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
)

const (
	challengeFor  = time.Minute
	challengeSize = 8 + 24 + sha256.Size // its end, random bytes, and the server's word for it
	maxCSR        = 8 << 10
)

// Keys is what the server knows of the keys that nodes joined with.
type Keys interface {
	// CheckKey returns nil if the node is enrolled in this generation, was not
	// evicted, and joined with the key of this hash. Otherwise the error tells
	// the node what to do.
	CheckKey(ctx context.Context, node string, generation uint64, keySHA256 [sha256.Size]byte) error
}

// challenges are kept by nobody until they are answered: a challenge carries its
// end and the server's word for it, so that asking for many costs no memory.
// Those that were answered are remembered until their end.
type challenges struct {
	secret [32]byte // of this run of the server

	mu   sync.Mutex
	used map[string]time.Time // by challenge, to its end; guarded by mu
}

func newChallenges() *challenges {
	c := &challenges{used: map[string]time.Time{}}
	_, _ = rand.Read(c.secret[:]) // it never fails
	return c
}

func (c *challenges) make(cert []byte, now time.Time) []byte {
	b := binary.BigEndian.AppendUint64(nil, uint64(now.Add(challengeFor).UnixNano()))
	random := make([]byte, 24)
	_, _ = rand.Read(random) // it never fails
	b = append(b, random...)
	return append(b, c.word(b, cert)...)
}

func (c *challenges) word(b, cert []byte) []byte {
	h := hmac.New(sha256.New, c.secret[:])
	h.Write(b)
	h.Write(cert)
	return h.Sum(nil)
}

// good reports whether a challenge was made here for a certificate and has not
// ended.
func (c *challenges) good(b, cert []byte, now time.Time) bool {
	if len(b) != challengeSize || !hmac.Equal(b[challengeSize-sha256.Size:], c.word(b[:challengeSize-sha256.Size], cert)) {
		return false
	}
	left := time.Unix(0, int64(binary.BigEndian.Uint64(b))).Sub(now)
	return left > 0 && left <= challengeFor // a clock that was set back makes none last longer
}

// use takes a challenge, once.
func (c *challenges) use(b []byte, now time.Time) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for k, end := range c.used {
		if left := end.Sub(now); left < -challengeFor || left > 2*challengeFor {
			delete(c.used, k)
		}
	}
	if _, used := c.used[string(b)]; used {
		return false
	}
	c.used[string(b)] = time.Unix(0, int64(binary.BigEndian.Uint64(b)))
	return true
}

// StartRekey gives a challenge to whoever shows an ended certificate of a node.
func (s *Service) StartRekey(ctx context.Context, req *agentv1.StartRekeyRequest) (*agentv1.StartRekeyResponse, error) {
	if _, err := s.ended(ctx, req.GetCertificate()); err != nil {
		return nil, err
	}
	return &agentv1.StartRekeyResponse{Challenge: s.challenges.make(req.GetCertificate(), s.cfg.Now())}, nil
}

// Rekey gives a node that holds the key that it joined with a new certificate.
func (s *Service) Rekey(ctx context.Context, req *agentv1.RekeyRequest) (*agentv1.RekeyResponse, error) {
	if len(req.GetCsr()) > maxCSR {
		return nil, status.Errorf(codes.InvalidArgument, "csr: it has %d bytes: at most %d are allowed", len(req.GetCsr()), maxCSR)
	}
	node, err := s.ended(ctx, req.GetCertificate())
	if err != nil {
		return nil, err
	}
	now := s.cfg.Now()
	if !s.challenges.good(req.GetChallenge(), req.GetCertificate(), now) {
		return nil, status.Error(codes.FailedPrecondition, "challenge: it is not of this server, or has ended: ask for another")
	}
	key, hash, err := requestKey(req.GetCsr())
	if err != nil {
		return nil, err
	}
	if hash != node.key {
		return nil, status.Error(codes.PermissionDenied, "csr: it must be for the key of the ended certificate")
	}
	if !pki.VerifyRekey(key, req.GetChallenge(), req.GetCsr(), req.GetSignature()) {
		return nil, status.Error(codes.PermissionDenied, "signature: it is not that of the key which the node joined with")
	}
	if !s.challenges.use(req.GetChallenge(), now) {
		return nil, status.Error(codes.FailedPrecondition, "challenge: it was answered before: ask for another")
	}
	certs, err := s.issue(node.id.Name, node.generation, key)
	if err != nil {
		return nil, err
	}
	s.cfg.Log.Info("node re-keyed", "node", node.id.Name, "generation", node.generation, "ended", node.notAfter)
	return &agentv1.RekeyResponse{
		Certificates: certs, CaCertificates: pki.DERs(s.cfg.Issuer.Roots()), ServerTime: timestamppb.New(now),
	}, nil
}

// endedNode is whom an ended certificate names.
type endedNode struct {
	id         pki.ID
	generation uint64
	key        [sha256.Size]byte
	notAfter   time.Time
}

// ended reads a certificate that has ended, or will: by the node's clock it may
// have ended before it did by the server's.
func (s *Service) ended(ctx context.Context, der []byte) (*endedNode, error) {
	chain, err := pki.ParseCertificatesDER([][]byte{der})
	if err != nil {
		return nil, status.Errorf(codes.InvalidArgument, "certificate: %v", err)
	}
	leaf := chain[0]
	now := s.cfg.Now()
	if over := now.Sub(leaf.NotAfter); over > pki.RekeyWithin {
		return nil, status.Errorf(codes.PermissionDenied,
			"the certificate ended at %s, longer ago than %d days: let the node join again with: millctl node token create %s --rejoin --out join.json",
			leaf.NotAfter.UTC().Format(time.RFC3339), int(pki.RekeyWithin.Hours()/24), leaf.Subject.CommonName)
	}
	id, err := pki.VerifyChain(chain, s.cfg.Issuer.Roots(), s.cfg.TrustDomain, within(leaf, now))
	if err != nil {
		return nil, status.Error(codes.PermissionDenied, err.Error())
	}
	if id.Role != pki.RoleNode {
		return nil, status.Errorf(codes.PermissionDenied, "%s is not a node: only a node can re-key", id)
	}
	hash, err := pki.KeySHA256(leaf.PublicKey)
	if err != nil {
		return nil, fmt.Errorf("hash key of %s: %w", id, err)
	}
	n := &endedNode{id: id, generation: pki.Generation(leaf), key: hash, notAfter: leaf.NotAfter}
	if err := s.cfg.Keys.CheckKey(ctx, id.Name, n.generation, hash); err != nil {
		return nil, status.Error(codes.PermissionDenied, err.Error())
	}
	return n, nil
}

// within is now, or the end of the certificate's life that is nearer to it.
func within(leaf *x509.Certificate, now time.Time) time.Time {
	switch {
	case now.After(leaf.NotAfter):
		return leaf.NotAfter
	case now.Before(leaf.NotBefore):
		return leaf.NotBefore
	}
	return now
}
