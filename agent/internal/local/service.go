package local

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

const (
	defaultLimit = 100
	maxLimit     = 1000
	maxReason    = 1024
)

// GetStatus implements agentv1.LocalServiceServer.
func (s *Server) GetStatus(ctx context.Context, _ *agentv1.GetStatusRequest) (*agentv1.GetStatusResponse, error) {
	st, err := s.cfg.Node.Status(ctx)
	if err != nil {
		return nil, status.Errorf(codes.Internal, "read status: %v", err)
	}
	return st, nil
}

// ListGpus implements agentv1.LocalServiceServer.
func (s *Server) ListGpus(ctx context.Context, _ *agentv1.ListGpusRequest) (*agentv1.ListGpusResponse, error) {
	r, err := s.cfg.Node.GPUs(ctx)
	if err != nil {
		return nil, status.Errorf(codes.Unavailable, "read GPUs: %v", err)
	}
	return r, nil
}

// ListJournal implements agentv1.LocalServiceServer. Envelopes and proofs are
// left out.
func (s *Server) ListJournal(ctx context.Context, r *agentv1.ListJournalRequest) (*agentv1.ListJournalResponse, error) {
	switch limit := r.GetLimit(); {
	case limit == 0:
		r.Limit = defaultLimit
	case limit < 0 || limit > maxLimit:
		return nil, status.Errorf(codes.InvalidArgument, "limit: %d: want 1 to %d", limit, maxLimit)
	}
	j, err := s.cfg.Node.Journal(ctx, r)
	if err != nil {
		return nil, refusal("read journal", err)
	}
	return j, nil
}

// ResolveTask implements agentv1.LocalServiceServer.
func (s *Server) ResolveTask(ctx context.Context, r *agentv1.ResolveTaskRequest) (*agentv1.ResolveTaskResponse, error) {
	as := wordOf(r.GetAs())
	_, err := ParseAs(as)
	switch {
	case err != nil:
		return nil, status.Error(codes.InvalidArgument, err.Error())
	case r.GetTaskId() == "":
		return nil, status.Error(codes.InvalidArgument, "task_id: missing")
	case strings.TrimSpace(r.GetReason()) == "" || len(r.GetReason()) > maxReason:
		return nil, status.Errorf(codes.InvalidArgument, "reason: want 1 to %d bytes that say why, for the history", maxReason)
	}
	who, _ := caller(ctx) // the interceptor has seen it
	s.cfg.Logger.InfoContext(ctx, "task is resolved on the node", "task_id", r.GetTaskId(), "as", as, "uid", who.UID, "pid", who.PID, "reason", r.GetReason())
	state, err := s.cfg.Node.Resolve(ctx, r)
	if err != nil {
		return nil, refusal("resolve task "+r.GetTaskId(), err)
	}
	return &agentv1.ResolveTaskResponse{State: state}, nil
}

// ParseAs returns the way to settle a held task that a word stands for.
func ParseAs(as string) (taskv1.ResolveAs, error) {
	for _, way := range []taskv1.ResolveAs{taskv1.ResolveAs_RESOLVE_AS_UNDO, taskv1.ResolveAs_RESOLVE_AS_ACCEPT, taskv1.ResolveAs_RESOLVE_AS_ABANDON} {
		if as == wordOf(way) {
			return way, nil
		}
	}
	return 0, fmt.Errorf("as: %q: want undo (undo what can be undone), accept (it did what it should) or abandon (give it up as it is)", as)
}

func wordOf(as taskv1.ResolveAs) string {
	return strings.ToLower(strings.TrimPrefix(as.String(), "RESOLVE_AS_"))
}

func refusal(what string, err error) error {
	code := codes.Internal
	switch {
	case errors.Is(err, ErrNotFound):
		code = codes.NotFound
	case errors.Is(err, ErrNotHeld):
		code = codes.FailedPrecondition
	}
	return status.Errorf(code, "%s: %v", what, err)
}

// ResetClock implements agentv1.LocalServiceServer.
func (s *Server) ResetClock(ctx context.Context, _ *agentv1.ResetClockRequest) (*agentv1.ResetClockResponse, error) {
	who, _ := caller(ctx) // the interceptor has seen it
	s.cfg.Logger.InfoContext(ctx, "clock is reset on the node", "uid", who.UID, "pid", who.PID)
	before, now, err := s.cfg.Node.ResetClock(ctx)
	if err != nil {
		return nil, refusal("reset clock", err)
	}
	return &agentv1.ResetClockResponse{Before: timestamppb.New(before), Now: timestamppb.New(now)}, nil
}
