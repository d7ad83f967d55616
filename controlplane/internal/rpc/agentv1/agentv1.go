// Package agentv1 serves AgentService: what a node calls. The node is always
// the one of the certificate; no message names one.
package agentv1

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"

	"github.com/gpuaas/millwright/controlplane/internal/clock"
	"github.com/gpuaas/millwright/controlplane/internal/crash"
	"github.com/gpuaas/millwright/controlplane/internal/dispatch"
	"github.com/gpuaas/millwright/controlplane/internal/output"
	"github.com/gpuaas/millwright/controlplane/internal/rpc/intercept"
	"github.com/gpuaas/millwright/controlplane/internal/store"
)

// maxStep bounds the step numbers of outputs.
const maxStep = 1000

// Sessions holds the sessions of nodes; see [dispatch.Dispatcher].
type Sessions interface {
	// Serve holds one until it ends.
	Serve(peer dispatch.Peer, stream dispatch.Stream) error
}

// Outputs keeps what commands wrote; see [output.Store].
type Outputs interface {
	// Put appends a piece and returns how much of the part is durable.
	Put(key output.Key, part agentv1.OutputPart, offset uint64, data []byte) (received uint64, err error)
}

// Members says whether a node still belongs to the cluster; see
// [intercept.Members].
type Members interface {
	CheckMember(ctx context.Context, node string, generation uint64) error
}

// Config is what the service needs.
type Config struct {
	// Sessions holds the sessions of nodes.
	Sessions Sessions
	// Outputs keeps what commands wrote.
	Outputs Outputs
	// Secrets keeps the values of secrets.
	Secrets Secrets
	// Members is asked at every piece of output.
	Members Members
	// Reader reads the store.
	Reader store.Reader
	// Logger gets what an operator of the server should know.
	Logger *slog.Logger
	// Stopping is closed when the server is about to stop.
	Stopping <-chan struct{}
	// Now is the wall clock; nil means the machine's.
	Now func() time.Time
}

// Service serves AgentService. It is safe for concurrent use.
type Service struct {
	agentv1.UnimplementedAgentServiceServer
	cfg Config
}

// New returns the service.
func New(cfg Config) *Service {
	if cfg.Now == nil {
		cfg.Now = clock.Now
	}
	return &Service{cfg: cfg}
}

// Session is the one stream of a node.
func (s *Service) Session(stream grpc.BidiStreamingServer[agentv1.SessionRequest, agentv1.SessionResponse]) error {
	caller := intercept.CallerFrom(stream.Context())
	return s.cfg.Sessions.Serve(dispatch.Peer{
		Node: caller.ID.Name, ID: caller.Name(), Generation: caller.Generation, NotAfter: caller.NotAfter,
	}, stream)
}

// UploadOutput takes the output of commands. Each piece is durable before it is
// acknowledged, and an answer that names fewer bytes than were sent says from
// where to go on.
func (s *Service) UploadOutput(stream grpc.BidiStreamingServer[agentv1.UploadOutputRequest, agentv1.UploadOutputResponse]) error {
	ctx := stream.Context()
	caller := intercept.CallerFrom(ctx)
	mine := "" // the last task that was found to be the node's
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		select {
		case <-s.cfg.Stopping:
			return status.Error(codes.Unavailable, "the server is stopping; come back later")
		default:
		}
		if !s.cfg.Now().Before(caller.NotAfter) {
			return status.Error(codes.Unauthenticated, "the certificate of the node has ended; connect again with a new one")
		}
		if err := s.cfg.Members.CheckMember(ctx, caller.ID.Name, caller.Generation); err != nil {
			return status.Error(codes.PermissionDenied, err.Error())
		}
		if m.GetTaskId() != mine {
			if err := s.belongs(ctx, caller.ID.Name, m.GetTaskId()); err != nil {
				return err
			}
			mine = m.GetTaskId()
		}
		answer, err := s.put(m)
		if err != nil {
			return err
		}
		if err := stream.Send(answer); err != nil {
			return err
		}
		crash.Point("server.output.answered")
	}
}

// belongs returns an error unless a task is the node's own. It is the same for
// a task of another node and for one that does not exist.
func (s *Service) belongs(ctx context.Context, node, taskID string) error {
	return s.cfg.Reader.View(ctx, func(v store.View) error {
		row, err := v.Task(taskID)
		if err != nil && !errors.Is(err, store.ErrNotFound) {
			return err
		}
		if err != nil || row.GetTask().GetNode() != node {
			return status.Error(codes.NotFound, "this node has no task with the id "+clip(taskID))
		}
		return nil
	})
}

func (s *Service) put(m *agentv1.UploadOutputRequest) (*agentv1.UploadOutputResponse, error) {
	switch m.GetStream() {
	case taskv1.Stream_STREAM_STDOUT, taskv1.Stream_STREAM_STDERR:
	default:
		return nil, status.Errorf(codes.InvalidArgument, "stream: %s is no stream of a command", m.GetStream())
	}
	switch m.GetPart() {
	case agentv1.OutputPart_OUTPUT_PART_HEAD, agentv1.OutputPart_OUTPUT_PART_TAIL:
	default:
		return nil, status.Errorf(codes.InvalidArgument, "part: %s is no part of an output", m.GetPart())
	}
	if m.GetStep() >= maxStep {
		return nil, status.Errorf(codes.InvalidArgument, "step: %d: at most %d are counted", m.GetStep(), maxStep)
	}
	key := output.Key{TaskID: m.GetTaskId(), Step: m.GetStep(), Stream: m.GetStream()}
	crash.Point("server.output.before")
	received, err := s.cfg.Outputs.Put(key, m.GetPart(), m.GetOffset(), m.GetData())
	switch {
	case errors.Is(err, output.ErrTooLarge):
		return nil, status.Error(codes.InvalidArgument, err.Error())
	case err != nil:
		s.cfg.Logger.Error("output not stored", "task_id", m.GetTaskId(), "err", err)
		return nil, status.Error(codes.Unavailable, "the server cannot store output now; come back later")
	}
	crash.Point("server.output.stored")
	return &agentv1.UploadOutputResponse{
		TaskId: m.GetTaskId(), Step: m.GetStep(), Stream: m.GetStream(), Part: m.GetPart(), ReceivedBytes: received,
		Complete: m.GetLast() && received == m.GetOffset()+uint64(len(m.GetData())),
	}, nil
}

func clip(s string) string {
	if len(s) > 100 {
		return s[:100] + "..."
	}
	return s
}
