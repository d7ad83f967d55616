// Package enrolv1 serves EnrolmentService: it turns a join token into an
// identity, and a valid identity into a new one.
package enrolv1

import (
	"context"
	"crypto/ecdsa"
	"crypto/sha256"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"time"
	"unicode/utf8"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/millwright/controlplane/internal/clock"
	"github.com/gpuaas/millwright/controlplane/internal/crash"
	"github.com/gpuaas/millwright/controlplane/internal/rpc/intercept"
	"github.com/gpuaas/millwright/pki"
	"github.com/gpuaas/millwright/pki/ca"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

const (
	maxToken    = 128
	maxHostname = 253
)

// The errors of [Tokens.RedeemToken] about a token that is not good.
var (
	// ErrTokenUnknown is for a token that was never made here, or is forgotten.
	ErrTokenUnknown = errors.New("join token is unknown")
	// ErrTokenExpired is for a token whose time is over.
	ErrTokenExpired = errors.New("join token has expired")
	// ErrTokenUsed is for a token that another key has used, that was used and
	// followed by a newer enrolment of the node, or whose node was evicted
	// since.
	ErrTokenUsed = errors.New("join token has been used")
	// ErrTokenVoid is for a token that was not used before its node was evicted.
	ErrTokenVoid = errors.New("join token was made before its node was evicted")
	// ErrTokenTaken is for a token that does not say that the node joins again, and
	// whose node has joined.
	ErrTokenTaken = errors.New("another host has joined under the name of the join token")
)

// Tokens is the store of join tokens. It knows them by their hash only.
type Tokens interface {
	// RedeemToken enrols the node that the token was made for, with the key.
	//
	// In one transaction, durable before it returns:
	//   - no token with this hash: ErrTokenUnknown;
	//   - Now is at or after the token's end: ErrTokenExpired, also for a key
	//     that has used it;
	//   - it is unused, and older than the node's last eviction: ErrTokenVoid;
	//   - it is unused, the node has joined and was not evicted, and the token does
	//     not say that it joins again: ErrTokenTaken;
	//   - else, if the token is unused: it is marked as used by KeySHA256, the node's
	//     enrolment generation rises by one (it begins at 1), its key becomes
	//     KeySHA256, an eviction is lifted, the NodeJoined entry is written, and
	//     the enrolment is returned;
	//   - it was used by the same key, and the enrolment that it made is still
	//     the node's current one and the node is not evicted: the same
	//     enrolment is returned, and nothing is written;
	//   - else: ErrTokenUsed.
	// Of any number of calls at once with different keys, one wins.
	RedeemToken(ctx context.Context, r Redemption) (Enrolment, error)
}

// Redemption is a token that a host presents.
type Redemption struct {
	// TokenSHA256 is the hash over the token's text; see [TokenSHA256].
	TokenSHA256 [sha256.Size]byte
	// KeySHA256 is the hash over the host's public key in PKIX form.
	KeySHA256 [sha256.Size]byte
	// Hostname is what the host calls itself, for the log.
	Hostname string
	// Now is the server's clock.
	Now time.Time
}

// Enrolment is what a token gives.
type Enrolment struct {
	// Node is the node's name.
	Node string
	// Generation is its enrolment generation, from 1.
	Generation uint64
}

// Issuer issues certificates; [ca.CA] is one.
type Issuer interface {
	// Issue returns a chain, the leaf first.
	Issue(ca.Request) ([]*x509.Certificate, error)
	// Roots returns the CA certificates.
	Roots() []*x509.Certificate
}

// TrustChain gives the trust root.
type TrustChain interface {
	// TrustChain returns all versions, the genesis first.
	TrustChain(ctx context.Context) ([]*taskv1.Envelope, error)
}

// Config is what the service needs.
type Config struct {
	// TrustDomain is the SPIFFE trust domain.
	TrustDomain string
	// NodeTTL is the life of a node's certificate; 0 means
	// [ca.DefaultNodeTTL].
	NodeTTL time.Duration
	// Tokens is the store of join tokens.
	Tokens Tokens
	// Keys knows the keys that nodes joined with.
	Keys Keys
	// Issuer issues the certificates.
	Issuer Issuer
	// Trust gives the trust root.
	Trust TrustChain
	// Log gets a line for each node that joins.
	Log *slog.Logger
	// Now is the wall clock; nil means the machine's.
	Now func() time.Time
}

// Service serves EnrolmentService. It is safe for concurrent use.
type Service struct {
	agentv1.UnimplementedEnrolmentServiceServer
	cfg        Config
	challenges *challenges
}

// New returns the service.
func New(cfg Config) *Service {
	if cfg.NodeTTL == 0 {
		cfg.NodeTTL = ca.DefaultNodeTTL
	}
	if cfg.Now == nil {
		cfg.Now = clock.Now
	}
	return &Service{cfg: cfg, challenges: newChallenges()}
}

// TokenSHA256 is the hash by which a token is stored and found.
func TokenSHA256(token string) [sha256.Size]byte { return sha256.Sum256([]byte(token)) }

// Join turns a token and a certificate request into an identity.
func (s *Service) Join(ctx context.Context, req *agentv1.JoinRequest) (*agentv1.JoinResponse, error) {
	if n := len(req.GetToken()); n == 0 || n > maxToken {
		return nil, status.Errorf(codes.InvalidArgument, "token: it has %d bytes: 1 to %d are allowed; take the one of the join bundle", n, maxToken)
	}
	if n := len(req.GetHostname()); n > maxHostname || !utf8.ValidString(req.GetHostname()) {
		return nil, status.Errorf(codes.InvalidArgument, "hostname: it must be at most %d bytes of UTF-8", maxHostname)
	}
	key, keyHash, err := requestKey(req.GetCsr())
	if err != nil {
		return nil, err
	}
	chain, err := s.cfg.Trust.TrustChain(ctx)
	if err != nil {
		return nil, fmt.Errorf("read trust chain: %w", err)
	}
	enrolment, err := s.cfg.Tokens.RedeemToken(ctx, Redemption{
		TokenSHA256: TokenSHA256(req.GetToken()),
		KeySHA256:   keyHash,
		Hostname:    req.GetHostname(),
		Now:         s.cfg.Now(),
	})
	if err != nil {
		return nil, tokenError(err)
	}
	crash.Point("server.join.redeemed")
	certs, err := s.issue(enrolment.Node, enrolment.Generation, key)
	if err != nil {
		return nil, err
	}
	s.cfg.Log.Info("node joined", "node", enrolment.Node, "generation", enrolment.Generation,
		"hostname", req.GetHostname(), "key_sha256", fmt.Sprintf("%x", keyHash))
	return &agentv1.JoinResponse{
		Node:           enrolment.Node,
		Certificates:   certs,
		CaCertificates: pki.DERs(s.cfg.Issuer.Roots()),
		TrustChain:     chain,
		Generation:     enrolment.Generation,
		ServerTime:     timestamppb.New(s.cfg.Now()),
	}, nil
}

// Renew gives the calling node a new certificate. The name and the generation
// are those of the certificate that it calls with.
func (s *Service) Renew(ctx context.Context, req *agentv1.RenewRequest) (*agentv1.RenewResponse, error) {
	caller := intercept.CallerFrom(ctx)
	if caller.ID.Role != pki.RoleNode {
		return nil, status.Errorf(codes.PermissionDenied, "%s is not a node: only a node can renew", caller.Name())
	}
	key, _, err := requestKey(req.GetCsr())
	if err != nil {
		return nil, err
	}
	certs, err := s.issue(caller.ID.Name, caller.Generation, key)
	if err != nil {
		return nil, err
	}
	return &agentv1.RenewResponse{Certificates: certs, CaCertificates: pki.DERs(s.cfg.Issuer.Roots())}, nil
}

func (s *Service) issue(node string, generation uint64, key *ecdsa.PublicKey) ([][]byte, error) {
	id, err := pki.NewID(s.cfg.TrustDomain, pki.RoleNode, node)
	if err != nil {
		return nil, fmt.Errorf("name node %q: %w", node, err)
	}
	certs, err := s.cfg.Issuer.Issue(ca.Request{ID: id, PublicKey: key, TTL: s.cfg.NodeTTL, Generation: generation})
	if err != nil {
		return nil, err
	}
	return pki.DERs(certs), nil
}

func requestKey(csr []byte) (*ecdsa.PublicKey, [sha256.Size]byte, error) {
	key, err := pki.RequestKey(csr)
	if err != nil {
		return nil, [sha256.Size]byte{}, status.Errorf(codes.InvalidArgument, "csr: %v", err)
	}
	hash, err := pki.KeySHA256(key)
	return key, hash, err
}

// tokenError says what is wrong with a token and what to do. Who guesses
// tokens learns nothing from it: an unknown one is all that a guess can be.
func tokenError(err error) error {
	const again = "make a new one with: millctl node token create NODE --out join.json"
	switch {
	case errors.Is(err, ErrTokenUnknown):
		return status.Errorf(codes.PermissionDenied, "join token is unknown to this server: check that the bundle is from this cluster, or %s", again)
	case errors.Is(err, ErrTokenExpired):
		return status.Errorf(codes.PermissionDenied, "join token has expired: %s", again)
	case errors.Is(err, ErrTokenUsed):
		return status.Errorf(codes.PermissionDenied, "join token has been used by another host or enrolment: if that was not you, evict the node; %s", again)
	case errors.Is(err, ErrTokenVoid):
		return status.Errorf(codes.PermissionDenied, "join token was made before its node was evicted, and is void since: %s", again)
	case errors.Is(err, ErrTokenTaken):
		return status.Error(codes.PermissionDenied, "a host has joined under the name of this join token since: "+
			"if this one shall take its place, make a new one with: millctl node token create NODE --rejoin --out join.json")
	}
	return fmt.Errorf("redeem join token: %w", err)
}
