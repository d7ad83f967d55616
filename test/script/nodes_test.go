package script_test

import (
	"context"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/timestamppb"

	nodev1 "github.com/gpuaas/millwright/proto/millwright/node/v1"
	"github.com/gpuaas/millwright/proto/rpcerr"
)

// GetNode returns one node.
func (s *server) GetNode(_ context.Context, req *nodev1.GetNodeRequest) (*nodev1.GetNodeResponse, error) {
	n := s.nodes[req.GetName()]
	if n == nil {
		return nil, rpcerr.New(codes.NotFound, "UNKNOWN_NODE", "no node is named %q", req.GetName())
	}
	return &nodev1.GetNodeResponse{Node: n}, nil
}

// ListNodes returns the nodes, one a page.
func (s *server) ListNodes(_ context.Context, req *nodev1.ListNodesRequest) (*nodev1.ListNodesResponse, error) {
	var names []string
	for name, n := range s.nodes {
		if name > req.GetPageToken() && (len(req.GetStates()) == 0 || slices.Contains(req.GetStates(), n.GetState())) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	resp := &nodev1.ListNodesResponse{}
	if len(names) > 0 {
		resp.Nodes = append(resp.Nodes, s.nodes[names[0]])
	}
	if len(names) > 1 {
		resp.NextPageToken = names[0]
	}
	return resp, nil
}

// CreateJoinToken makes a token.
func (s *server) CreateJoinToken(_ context.Context, req *nodev1.CreateJoinTokenRequest) (*nodev1.CreateJoinTokenResponse, error) {
	s.tellNode([]string{req.GetNode(), "EXPECTED"})
	return &nodev1.CreateJoinTokenResponse{
		Token: "not-a-real-token", ExpireTime: timestamppb.New(time.Now().Add(req.GetTtl().AsDuration())), NodeAddress: "server.example.org:7443",
	}, nil
}

// EvictNode evicts a node.
func (s *server) EvictNode(ctx context.Context, req *nodev1.EvictNodeRequest) (*nodev1.EvictNodeResponse, error) {
	resp, err := s.GetNode(ctx, &nodev1.GetNodeRequest{Name: req.GetName()})
	if err != nil {
		return nil, err
	}
	resp.Node.State = nodev1.NodeState_NODE_STATE_EVICTED
	return &nodev1.EvictNodeResponse{Node: resp.GetNode()}, nil
}

// GetCluster says who is who.
func (s *server) GetCluster(ctx context.Context, _ *nodev1.GetClusterRequest) (*nodev1.GetClusterResponse, error) {
	who, err := operator(ctx)
	if err != nil {
		return nil, err
	}
	return &nodev1.GetClusterResponse{
		TrustDomain: s.root.TrustDomain(), Cluster: s.cluster, TrustChain: s.root.Chain(), ServerVersion: "1.0.0",
		Caller: who, ServerTime: timestamppb.Now(),
	}, nil
}
