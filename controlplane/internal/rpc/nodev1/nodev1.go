// Package nodev1 serves NodeService: how operators see, admit and evict nodes.
package nodev1

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/millwright/pki"
	"github.com/gpuaas/millwright/pki/trustroot"
	nodev1 "github.com/gpuaas/millwright/proto/millwright/node/v1"
	"github.com/gpuaas/millwright/proto/rpcerr"

	"github.com/gpuaas/millwright/controlplane/internal/clock"
	"github.com/gpuaas/millwright/controlplane/internal/rpc/intercept"
	"github.com/gpuaas/millwright/controlplane/internal/store"
)

const (
	defaultTTL  = time.Hour
	maxTTL      = 7 * 24 * time.Hour
	defaultPage = 100
	maxPage     = 1000
	maxReason   = 1 << 10
	// pagePrefix tells the sort and version of a page token.
	pagePrefix = "n1"
)

var (
	// ErrMember is returned for a plain token of a name that has joined.
	ErrMember = errors.New("a host has joined under this name")
	// ErrNeverJoined is returned for a rejoin token of a name that has not.
	ErrNeverJoined = errors.New("no host has joined under this name")
)

// Fleet is the nodes.
type Fleet interface {
	// Get returns a node, or an error that wraps [store.ErrNotFound].
	Get(ctx context.Context, name string) (*nodev1.Node, error)
	// List returns nodes after a name, and where the next page begins.
	List(ctx context.Context, after string, limit int, states []nodev1.NodeState) (nodes []*nodev1.Node, next string, err error)
	// CreateToken makes a join token for a name, which must be good. Rejoin says
	// that the name has joined before, and that whoever brings the token takes the
	// place of the host that has it. The error is [ErrMember] without rejoin for a
	// name that has joined and was not evicted, and [ErrNeverJoined] with it for
	// one that has not.
	CreateToken(ctx context.Context, actor, node string, ttl time.Duration, rejoin bool) (token string, expires time.Time, err error)
	// Evict ends a node's membership, or returns an error that wraps
	// [store.ErrNotFound].
	Evict(ctx context.Context, actor, node, reason string) error
}

// Config is what the service needs.
type Config struct {
	// Fleet is the nodes.
	Fleet Fleet
	// Root is the cluster's trust root as it is now.
	Root func() *trustroot.Root
	// NodeAddress is the address that nodes dial, as host:port.
	NodeAddress string
	// Version is the server's version.
	Version string
	// Now is the wall clock; nil means the machine's.
	Now func() time.Time
}

// Service serves NodeService. It is safe for concurrent use.
type Service struct {
	nodev1.UnimplementedNodeServiceServer
	cfg Config
}

// New returns the service.
func New(cfg Config) *Service {
	if cfg.Now == nil {
		cfg.Now = clock.Now
	}
	return &Service{cfg: cfg}
}

// GetNode returns one node.
func (s *Service) GetNode(ctx context.Context, req *nodev1.GetNodeRequest) (*nodev1.GetNodeResponse, error) {
	if err := checkName("name", req.GetName()); err != nil {
		return nil, err
	}
	n, err := s.cfg.Fleet.Get(ctx, req.GetName())
	if err != nil {
		return nil, unknown(req.GetName(), err)
	}
	return &nodev1.GetNodeResponse{Node: n}, nil
}

// ListNodes returns nodes by page, by name.
func (s *Service) ListNodes(ctx context.Context, req *nodev1.ListNodesRequest) (*nodev1.ListNodesResponse, error) {
	size := int(req.GetPageSize())
	switch {
	case size < 0 || size > maxPage:
		return nil, rpcerr.Invalid("MALFORMED", rpcerr.Violation{Field: "page_size", Value: fmt.Sprint(size),
			Rule: fmt.Sprintf("it must be between 1 and %d, or 0 for %d", maxPage, defaultPage)})
	case size == 0:
		size = defaultPage
	}
	after, err := parseToken(req)
	if err != nil {
		return nil, err
	}
	nodes, next, err := s.cfg.Fleet.List(ctx, after, size, req.GetStates())
	if err != nil {
		return nil, err
	}
	out := &nodev1.ListNodesResponse{Nodes: nodes}
	if next != "" {
		out.NextPageToken = formatToken(req, next)
	}
	return out, nil
}

// CreateJoinToken makes a token for a node's name.
func (s *Service) CreateJoinToken(ctx context.Context, req *nodev1.CreateJoinTokenRequest) (*nodev1.CreateJoinTokenResponse, error) {
	if err := checkName("node", req.GetNode()); err != nil {
		return nil, err
	}
	ttl := defaultTTL
	if req.GetTtl() != nil {
		ttl = req.GetTtl().AsDuration()
	}
	if ttl < time.Second || ttl > maxTTL {
		return nil, rpcerr.Invalid("MALFORMED", rpcerr.Violation{Field: "ttl", Value: ttl.String(),
			Rule: fmt.Sprintf("it must be between 1s and %s; unset it for %s", maxTTL, defaultTTL)})
	}
	token, expires, err := s.cfg.Fleet.CreateToken(ctx, intercept.CallerFrom(ctx).Name(), req.GetNode(), ttl, req.GetRejoin())
	switch {
	case errors.Is(err, ErrMember):
		return nil, rpcerr.New(codes.AlreadyExists, "NODE_JOINED", "%[1]s: a host has joined under this name, and has it; if another one, or the same one "+
			"made anew, shall take its place: millctl node token create %[1]s --rejoin; else choose another name", req.GetNode())
	case errors.Is(err, ErrNeverJoined):
		return nil, rpcerr.New(codes.NotFound, "UNKNOWN_NODE", "%[1]s: no host has joined under this name (see: millctl node list); a new node needs no --rejoin", req.GetNode())
	case err != nil:
		return nil, err
	}
	return &nodev1.CreateJoinTokenResponse{Token: token, ExpireTime: timestamppb.New(expires), NodeAddress: s.cfg.NodeAddress}, nil
}

// EvictNode ends a node's membership. Of a node that was evicted already it
// changes nothing.
func (s *Service) EvictNode(ctx context.Context, req *nodev1.EvictNodeRequest) (*nodev1.EvictNodeResponse, error) {
	if err := checkName("name", req.GetName()); err != nil {
		return nil, err
	}
	if n := len(req.GetReason()); n > maxReason {
		return nil, rpcerr.Invalid("MALFORMED", rpcerr.Violation{Field: "reason", Value: fmt.Sprintf("%d bytes", n),
			Rule: fmt.Sprintf("it may have at most %d bytes", maxReason)})
	}
	if err := s.cfg.Fleet.Evict(ctx, intercept.CallerFrom(ctx).Name(), req.GetName(), req.GetReason()); err != nil {
		return nil, unknown(req.GetName(), err)
	}
	n, err := s.cfg.Fleet.Get(ctx, req.GetName())
	if err != nil {
		return nil, err
	}
	return &nodev1.EvictNodeResponse{Node: n}, nil
}

// GetCluster says what the caller is connected to.
func (s *Service) GetCluster(ctx context.Context, _ *nodev1.GetClusterRequest) (*nodev1.GetClusterResponse, error) {
	root := s.cfg.Root()
	cluster := root.Cluster()
	return &nodev1.GetClusterResponse{
		TrustDomain: root.TrustDomain(), Cluster: cluster[:], TrustChain: root.Chain(),
		ServerVersion: s.cfg.Version, Caller: intercept.CallerFrom(ctx).Name(), ServerTime: timestamppb.New(s.cfg.Now()),
	}, nil
}

func checkName(field, name string) error {
	if err := pki.CheckName(name); err != nil {
		return rpcerr.Invalid("MALFORMED", rpcerr.Violation{Field: field, Rule: err.Error()})
	}
	return nil
}

func unknown(name string, err error) error {
	if errors.Is(err, store.ErrNotFound) {
		return rpcerr.New(codes.NotFound, "UNKNOWN_NODE", "no node has the name %s; see: millctl node list", name)
	}
	return err
}

// formatToken makes a page token that belongs to the states of req.
func formatToken(req *nodev1.ListNodesRequest, after string) string {
	return base64.RawURLEncoding.EncodeToString([]byte(strings.Join([]string{pagePrefix, states(req), after}, " ")))
}

func parseToken(req *nodev1.ListNodesRequest) (after string, err error) {
	if req.GetPageToken() == "" {
		return "", nil
	}
	b, err := base64.RawURLEncoding.DecodeString(req.GetPageToken())
	parts := strings.Split(string(b), " ")
	if err != nil || len(parts) != 3 || parts[0] != pagePrefix || pki.CheckName(parts[2]) != nil {
		return "", rpcerr.Invalid("MALFORMED", rpcerr.Violation{Field: "page_token", Rule: "it must be a token from an earlier answer, unchanged"})
	}
	if parts[1] != states(req) {
		return "", rpcerr.Invalid("MALFORMED", rpcerr.Violation{Field: "page_token",
			Rule: "it is from a list with another filter; repeat that filter, or begin anew without a token"})
	}
	return parts[2], nil
}

func states(req *nodev1.ListNodesRequest) string {
	list := slices.Clone(req.GetStates())
	slices.Sort(list)
	return strings.ReplaceAll(fmt.Sprint(slices.Compact(list)), " ", ",")
}
