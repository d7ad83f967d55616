// Package healthv1 serves HealthService: how people and controllers see the
// health of GPUs.
package healthv1

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/millwright/pki"
	healthv1 "github.com/gpuaas/millwright/proto/millwright/health/v1"
	serverv1 "github.com/gpuaas/millwright/proto/millwright/server/v1"
	"github.com/gpuaas/millwright/proto/rpcerr"

	"github.com/gpuaas/millwright/controlplane/internal/eventlog"
	"github.com/gpuaas/millwright/controlplane/internal/store"
)

const (
	defaultPage = 100
	maxNodes    = 500  // of a page of GPUs
	maxChanges  = 1000 // of a page of changes
	maxFilter   = 100
	// maxPageBytes bounds a page, so that it fits an answer.
	maxPageBytes = 2 << 20
)

// Board is what nodes reported; see [board.Board].
type Board interface {
	Node(node string, rows []*serverv1.HealthRow) *healthv1.NodeHealth
	Gpus(node string, rows []*serverv1.HealthRow, whole bool) []*healthv1.GpuHealth
	Status(node string) *healthv1.NodeHealth
	Known() []string
}

// Config is what the service needs.
type Config struct {
	// Board is what nodes reported.
	Board Board
	// Reader reads the store.
	Reader store.Reader
	// Changed is [eventlog.Log.Changed].
	Changed func() <-chan struct{}
	// Stopping is closed when the server is about to stop.
	Stopping <-chan struct{}
}

// Service serves HealthService. It is safe for concurrent use.
type Service struct {
	healthv1.UnimplementedHealthServiceServer
	cfg Config
}

// New returns the service.
func New(cfg Config) *Service { return &Service{cfg: cfg} }

// ListGpus returns GPUs by page, by node and index.
func (s *Service) ListGpus(ctx context.Context, req *healthv1.ListGpusRequest) (*healthv1.ListGpusResponse, error) {
	size, err := pageSize(req.GetPageSize(), maxNodes)
	if err != nil {
		return nil, err
	}
	if err := checkFilter(req.GetNodes(), req.GetStates()); err != nil {
		return nil, err
	}
	filter := &healthv1.ListGpusRequest{Nodes: req.GetNodes(), States: req.GetStates()}
	after, err := parsePageToken(req.GetPageToken(), filter)
	if err != nil {
		return nil, err
	}
	out, bytes := &healthv1.ListGpusResponse{}, 0
	err = s.eachNode(ctx, after, size, func(v store.View, row *serverv1.NodeRow) (more bool, err error) {
		after = row.GetName()
		if len(req.GetNodes()) > 0 && !slices.Contains(req.GetNodes(), row.GetName()) {
			return true, nil
		}
		gpus, err := s.gpus(v, row, false)
		for _, g := range gpus {
			if len(req.GetStates()) == 0 || slices.Contains(req.GetStates(), g.GetState()) {
				out.Gpus, bytes = append(out.Gpus, g), bytes+proto.Size(g)
			}
		}
		return bytes < maxPageBytes, err
	}, func() { out.NextPageToken = formatPageToken(after, filter) })
	return out, err
}

// eachNode calls each for up to size members after a name, until it has had
// enough, and more when there may be others behind the last.
func (s *Service) eachNode(ctx context.Context, after string, size int, each func(store.View, *serverv1.NodeRow) (bool, error), more func()) error {
	return s.cfg.Reader.View(ctx, func(v store.View) error {
		rows, err := v.Nodes(after, size+1)
		if err != nil {
			return err
		}
		for i, row := range rows {
			if i == size {
				more()
				return nil
			}
			goOn, err := each(v, row)
			if err != nil {
				return err
			}
			if !goOn && i+1 < len(rows) {
				more()
				return nil
			}
		}
		return nil
	})
}

// member reports whether the health of a node is of interest: it has joined and
// was not evicted.
func member(row *serverv1.NodeRow) bool { return row.GetGeneration() > 0 && !row.GetEvicted() }

func (s *Service) gpus(v store.View, row *serverv1.NodeRow, whole bool) ([]*healthv1.GpuHealth, error) {
	if !member(row) {
		return nil, nil
	}
	rows, err := v.Health(row.GetName(), eventlog.MaxConditions)
	if err != nil {
		return nil, err
	}
	return s.cfg.Board.Gpus(row.GetName(), rows, whole), nil
}

// GetGpu returns one GPU.
func (s *Service) GetGpu(ctx context.Context, req *healthv1.GetGpuRequest) (*healthv1.GetGpuResponse, error) {
	name := req.GetGpu()
	if node, index, ok := strings.Cut(name, "/"); ok {
		return s.gpuAt(ctx, name, node, index)
	}
	if len(name) < 4 || len(name) > 128 {
		return nil, rpcerr.Invalid("MALFORMED", rpcerr.Violation{Field: "gpu", Value: clip(name),
			Rule: "it must be a GPU's UUID, at least 4 of its first letters, or NODE/INDEX; see: millctl gpu list"})
	}
	var found *healthv1.GpuHealth // the last one: beside others only their number counts
	count := 0
	for after, last := "", false; !last; {
		last = true
		err := s.eachNode(ctx, after, maxNodes, func(v store.View, row *serverv1.NodeRow) (bool, error) {
			after = row.GetName()
			gpus, err := s.gpus(v, row, true)
			for _, g := range gpus {
				switch {
				case g.GetUuid() == name:
					found, count = g, 1
					return false, err
				case strings.HasPrefix(g.GetUuid(), name):
					found, count = g, count+1
				}
			}
			return true, err
		}, func() { last = count == 1 && found.GetUuid() == name })
		if err != nil {
			return nil, err
		}
	}
	switch count {
	case 0:
		return nil, rpcerr.New(codes.NotFound, "UNKNOWN_GPU", "no GPU has the UUID %s; see: millctl gpu list", clip(name))
	case 1:
		return &healthv1.GetGpuResponse{Gpu: found}, nil
	}
	return nil, rpcerr.New(codes.FailedPrecondition, "AMBIGUOUS", "%d GPUs have a UUID that begins with %s; give more of it", count, name)
}

// gpuAt returns the GPU of a node by its index.
func (s *Service) gpuAt(ctx context.Context, name, node, index string) (*healthv1.GetGpuResponse, error) {
	n, err := strconv.ParseUint(index, 10, 32)
	if err != nil || pki.CheckName(node) != nil {
		return nil, rpcerr.Invalid("MALFORMED", rpcerr.Violation{Field: "gpu", Value: clip(name),
			Rule: "it must be a node's name, a slash and the index of its GPU, as gpu-001/3"})
	}
	out := &healthv1.GetGpuResponse{}
	err = s.cfg.Reader.View(ctx, func(v store.View) error {
		row, err := v.Node(node)
		if err != nil {
			return unknown(node, err)
		}
		gpus, err := s.gpus(v, row, true)
		for _, g := range gpus {
			if g.Index != nil && uint64(g.GetIndex()) == n && out.Gpu == nil {
				out.Gpu = g
			}
		}
		return err
	})
	if err == nil && out.GetGpu() == nil {
		err = rpcerr.New(codes.NotFound, "UNKNOWN_GPU", "node %s has named no GPU with the index %d; see: millctl gpu list -n %s", node, n, node)
	}
	return out, err
}

// GetNodeHealth returns the conditions of one node.
func (s *Service) GetNodeHealth(ctx context.Context, req *healthv1.GetNodeHealthRequest) (*healthv1.GetNodeHealthResponse, error) {
	if err := checkNode("node", req.GetNode()); err != nil {
		return nil, err
	}
	out := &healthv1.GetNodeHealthResponse{}
	err := s.cfg.Reader.View(ctx, func(v store.View) error {
		if _, err := v.Node(req.GetNode()); err != nil {
			return unknown(req.GetNode(), err)
		}
		rows, err := v.Health(req.GetNode(), eventlog.MaxConditions)
		out.Health = s.cfg.Board.Node(req.GetNode(), rows)
		return err
	})
	return out, err
}

// ListHealthChanges returns the history of one node's conditions.
func (s *Service) ListHealthChanges(ctx context.Context, req *healthv1.ListHealthChangesRequest) (*healthv1.ListHealthChangesResponse, error) {
	size, err := pageSize(req.GetPageSize(), maxChanges)
	if err != nil {
		return nil, err
	}
	if err := checkNode("node", req.GetNode()); err != nil {
		return nil, err
	}
	filter := &healthv1.ListHealthChangesRequest{Node: req.GetNode()}
	from, err := parseIndexToken(req.GetPageToken(), filter)
	if err != nil {
		return nil, err
	}
	out := &healthv1.ListHealthChangesResponse{}
	err = s.cfg.Reader.View(ctx, func(v store.View) error {
		if _, err := v.Node(req.GetNode()); err != nil {
			return unknown(req.GetNode(), err)
		}
		if out.TrimmedIndex, err = v.HealthTrimmed(req.GetNode()); err != nil {
			return err
		}
		if req.GetPageToken() != "" && from <= out.GetTrimmedIndex() {
			return rpcerr.New(codes.OutOfRange, "HISTORY_TRIMMED",
				"what comes next was taken out of the history meanwhile, by its age or number; list anew without a token, which begins with the oldest that is kept")
		}
		entries, err := v.HealthEntries(req.GetNode(), from, size, maxPageBytes)
		if err != nil {
			return err
		}
		for _, e := range entries {
			change, err := changeOf(e)
			if err != nil {
				return err
			}
			out.Changes, from = append(out.Changes, change), e.Index+1
		}
		rest, err := v.HealthEntries(req.GetNode(), from, 1, 1)
		if err != nil || len(rest) == 0 {
			return err
		}
		out.NextPageToken = formatIndexToken(from, filter)
		return nil
	})
	return out, err
}

func pageSize(n int32, most int) (int, error) {
	switch {
	case n < 0 || int(n) > most:
		return 0, rpcerr.Invalid("MALFORMED", rpcerr.Violation{Field: "page_size", Value: fmt.Sprint(n),
			Rule: fmt.Sprintf("it must be between 1 and %d, or 0 for %d", most, defaultPage)})
	case n == 0:
		return defaultPage, nil
	}
	return int(n), nil
}

func checkFilter(nodes []string, states []healthv1.State) error {
	if len(nodes) > maxFilter || len(states) > maxFilter {
		return rpcerr.Invalid("BAD_FILTER", rpcerr.Violation{Field: "nodes", Value: fmt.Sprint(len(nodes)),
			Rule: fmt.Sprintf("at most %d are allowed; leave it empty for all", maxFilter)})
	}
	for i, node := range nodes {
		if err := checkNode(fmt.Sprintf("nodes[%d]", i), node); err != nil {
			return err
		}
	}
	for i, state := range states {
		if _, known := healthv1.State_name[int32(state)]; !known || state == healthv1.State_STATE_UNSPECIFIED {
			return rpcerr.Invalid("BAD_FILTER", rpcerr.Violation{Field: fmt.Sprintf("states[%d]", i), Value: fmt.Sprint(int32(state)),
				Rule: "it must be a state that a GPU can have"})
		}
	}
	return nil
}

func checkNode(field, name string) error {
	if err := pki.CheckName(name); err != nil {
		return rpcerr.Invalid("MALFORMED", rpcerr.Violation{Field: field, Value: clip(name), Rule: err.Error()})
	}
	return nil
}

func unknown(name string, err error) error {
	if errors.Is(err, store.ErrNotFound) {
		return rpcerr.New(codes.NotFound, "UNKNOWN_NODE", "no node has the name %s; see: millctl node list", name)
	}
	return err
}

func clip(s string) string {
	if len(s) > 100 {
		return strings.ToValidUTF8(s[:100], "") + "..."
	}
	return s
}
