package script_test

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/millwright/pki"
	"github.com/gpuaas/millwright/pki/envelope"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/proto/rpcerr"
	"github.com/gpuaas/millwright/tasks"
)

func compile(pattern string) (*regexp.Regexp, error) { return regexp.Compile("(?m)" + pattern) }

func lastSlash(s string) int { return strings.LastIndexByte(s, '/') }

// operator returns the caller's id, and refuses all but operators.
func operator(ctx context.Context) (string, error) {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return "", status.Error(codes.Unauthenticated, "no peer")
	}
	info, ok := p.AuthInfo.(credentials.TLSInfo)
	if !ok {
		return "", status.Error(codes.Unauthenticated, "no TLS")
	}
	id, ok := pki.PeerID(info.State)
	if !ok {
		return "", status.Error(codes.Unauthenticated, "no certificate")
	}
	if id.Role != pki.RoleOperator {
		return "", status.Errorf(codes.PermissionDenied, "%s is not an operator", id)
	}
	return id.String(), nil
}

// CreateTasks stores tasks, all or none.
func (s *server) CreateTasks(ctx context.Context, req *taskv1.CreateTasksRequest) (*taskv1.CreateTasksResponse, error) {
	who, err := operator(ctx)
	if err != nil {
		return nil, err
	}
	made := make([]*stored, len(req.GetLeaves()))
	var wrong []rpcerr.Violation
	for i, signed := range req.GetLeaves() {
		leaf, err := envelope.DecodeLeaf(signed.GetLeaf())
		if err != nil {
			return nil, status.Error(codes.InvalidArgument, err.Error())
		}
		t, bad := s.newTask(i, leaf)
		wrong = append(wrong, bad...)
		t.CreatedBy = who
		made[i] = &stored{task: t, envelope: req.GetEnvelope(), signed: signed}
	}
	if len(wrong) > 0 {
		e := rpcerr.Invalid("SPEC_INVALID", wrong...)
		if wrong[0].Rule == noNode {
			e.Code = codes.NotFound
		}
		return nil, e
	}
	if req.GetValidateOnly() {
		return &taskv1.CreateTasksResponse{}, nil
	}
	if ids, ok := s.requests[req.GetRequestId()]; ok {
		return s.again(ids, made)
	}
	return s.store(req, made)
}

const noNode = "no such node"

// newTask makes the row of a leaf, and tells what is wrong with it.
func (s *server) newTask(i int, leaf *taskv1.TaskLeaf) (*taskv1.Task, []rpcerr.Violation) {
	at := func(field string) string { return fmt.Sprintf("leaves[%d].%s", i, field) }
	t := &taskv1.Task{
		Id: leaf.GetTaskId(), Node: leaf.GetNode(), Kind: leaf.GetKind(), Revision: leaf.GetRevision(), Mode: leaf.GetMode(),
		RetryOf: leaf.GetRetryOf(), Project: leaf.GetProject(), Labels: leaf.GetLabels(), RequestReason: leaf.GetReason(),
	}
	if s.nodes[leaf.GetNode()] == nil {
		return t, []rpcerr.Violation{{Field: at("node"), Value: leaf.GetNode(), Rule: noNode}}
	}
	kind, err := s.registry.Kind(leaf.GetKind())
	if err != nil {
		return t, []rpcerr.Violation{{Field: at("kind"), Value: leaf.GetKind(), Rule: err.Error()}}
	}
	spec, err := kind.DecodeSpec(leaf.GetRevision(), leaf.GetSpec())
	if err != nil {
		return t, []rpcerr.Violation{{Field: at("spec"), Rule: err.Error()}}
	}
	if problems := (tasks.Problems)(nil); errors.As(kind.Validate(spec), &problems) {
		var out []rpcerr.Violation
		for _, p := range problems {
			out = append(out, rpcerr.Violation{Field: at("spec." + p.Field), Value: p.Value, Rule: p.Rule})
		}
		return t, out
	}
	if t.Spec, err = anypb.New(spec); err != nil {
		return t, []rpcerr.Violation{{Field: at("spec"), Rule: err.Error()}}
	}
	return t, nil
}

// again answers a request id that was used before.
func (s *server) again(ids []string, made []*stored) (*taskv1.CreateTasksResponse, error) {
	resp := &taskv1.CreateTasksResponse{AlreadyExisted: true}
	for i, id := range ids {
		old := s.find(id)
		if len(made) != len(ids) || made[i].task.GetNode() != old.task.GetNode() || !proto.Equal(made[i].task.GetSpec(), old.task.GetSpec()) {
			return nil, rpcerr.New(codes.AlreadyExists, "REQUEST_ID_REUSED", "request id was used for other tasks; use another one")
		}
		resp.Tasks = append(resp.Tasks, old.task)
	}
	return resp, nil
}

func (s *server) store(req *taskv1.CreateTasksRequest, made []*stored) (*taskv1.CreateTasksResponse, error) {
	resp := &taskv1.CreateTasksResponse{}
	for _, st := range made {
		verified, err := s.root.VerifyTaskSet(st.envelope, st.signed)
		if err != nil {
			return nil, rpcerr.New(codes.InvalidArgument, "SIGNATURE_INVALID", "%v", err)
		}
		t := st.task
		t.LeafHash, t.AuthorizedBy = verified.LeafHash[:], verified.Authorizers
		t.IssuedAt, t.NotBefore, t.NotAfter = verified.TaskSet.GetIssuedAt(), verified.TaskSet.GetNotBefore(), verified.TaskSet.GetNotAfter()
		t.CreateTime, t.State = timestamppb.Now(), taskv1.TaskState_TASK_STATE_QUEUED
		s.tasks = append(s.tasks, st)
		t.CreateIndex = uint64(len(s.tasks))
		s.requests[req.GetRequestId()] = append(s.requests[req.GetRequestId()], t.GetId())
		s.record(t, "CREATED", t.GetState(), "", "", t.GetCreatedBy())
		resp.Tasks = append(resp.Tasks, proto.CloneOf(t))
	}
	for _, st := range made {
		s.carryOut(st.task, s.fate)
	}
	return resp, nil
}

func (s *server) find(id string) *stored {
	var found *stored
	for _, st := range s.tasks {
		if st.task.GetId() == id || len(id) >= 4 && strings.HasPrefix(st.task.GetId(), id) {
			if found != nil {
				return nil
			}
			found = st
		}
	}
	return found
}

// GetTask returns one task.
func (s *server) GetTask(_ context.Context, req *taskv1.GetTaskRequest) (*taskv1.GetTaskResponse, error) {
	st := s.find(req.GetId())
	if st == nil {
		return nil, rpcerr.New(codes.NotFound, "UNKNOWN_TASK", "no task has the id %q, or more than one begins with it", req.GetId())
	}
	return &taskv1.GetTaskResponse{Task: proto.CloneOf(st.task), Envelope: st.envelope, SignedLeaf: st.signed}, nil
}

// ListTasks returns a page, the newest first.
func (s *server) ListTasks(_ context.Context, req *taskv1.ListTasksRequest) (*taskv1.ListTasksResponse, error) {
	resp := &taskv1.ListTasksResponse{WatchToken: strconv.Itoa(len(s.events))}
	before := uint64(len(s.tasks)) + 1
	if req.GetPageToken() != "" {
		n, err := strconv.ParseUint(req.GetPageToken(), 10, 64)
		if err != nil {
			return nil, status.Error(codes.InvalidArgument, "page_token: it is not one of this server's; list from the start")
		}
		before = n
	}
	for _, st := range slices.Backward(s.tasks) {
		t := st.task
		if t.GetCreateIndex() >= before || !wanted(t, req) {
			continue
		}
		if len(resp.GetTasks()) == int(req.GetPageSize()) {
			resp.NextPageToken = strconv.FormatUint(resp.GetTasks()[len(resp.GetTasks())-1].GetCreateIndex(), 10)
			break
		}
		resp.Tasks = append(resp.Tasks, proto.CloneOf(t))
	}
	return resp, nil
}

func wanted(t *taskv1.Task, req *taskv1.ListTasksRequest) bool {
	return (len(req.GetNodes()) == 0 || slices.Contains(req.GetNodes(), t.GetNode())) &&
		(len(req.GetStates()) == 0 || slices.Contains(req.GetStates(), t.GetState())) &&
		(len(req.GetKinds()) == 0 || slices.Contains(req.GetKinds(), t.GetKind())) &&
		(req.GetCreatedAfter() == nil || !t.GetCreateTime().AsTime().Before(req.GetCreatedAfter().AsTime())) &&
		(req.GetCreatedBefore() == nil || t.GetCreateTime().AsTime().Before(req.GetCreatedBefore().AsTime()))
}

// CancelTask cancels a task that is queued.
func (s *server) CancelTask(ctx context.Context, req *taskv1.CancelTaskRequest) (*taskv1.CancelTaskResponse, error) {
	who, err := operator(ctx)
	if err != nil {
		return nil, err
	}
	st := s.find(req.GetId())
	if st == nil {
		return nil, status.Error(codes.NotFound, "no such task")
	}
	if st.task.GetState() >= taskv1.TaskState_TASK_STATE_SUCCEEDED {
		return nil, status.Error(codes.FailedPrecondition, "the task has ended")
	}
	s.record(st.task, "CANCELLED", taskv1.TaskState_TASK_STATE_CANCELLED, "CANCELLED", req.GetReason(), who)
	return &taskv1.CancelTaskResponse{Task: proto.CloneOf(st.task)}, nil
}

// ListTaskEvents returns the history of a task, two events a page.
func (s *server) ListTaskEvents(_ context.Context, req *taskv1.ListTaskEventsRequest) (*taskv1.ListTaskEventsResponse, error) {
	after, _ := strconv.ParseUint(req.GetPageToken(), 10, 64) // empty means from the start
	resp := &taskv1.ListTaskEventsResponse{}
	for _, e := range s.events {
		if e.GetTaskId() != req.GetId() || e.GetIndex() <= after {
			continue
		}
		if len(resp.GetEvents()) == 2 {
			resp.NextPageToken = strconv.FormatUint(resp.GetEvents()[1].GetIndex(), 10)
			break
		}
		resp.Events = append(resp.Events, e)
	}
	return resp, nil
}

// WatchTasks streams events.
func (s *server) WatchTasks(req *taskv1.WatchTasksRequest, stream taskv1.TaskService_WatchTasksServer) error {
	s.mu.Lock()
	next := uint64(len(s.events))
	s.watchers++
	s.announce()
	s.mu.Unlock()
	if req.GetResumeToken() != "" {
		n, err := strconv.ParseUint(req.GetResumeToken(), 10, 64)
		if err != nil {
			return status.Error(codes.InvalidArgument, "resume_token: it is not one of this server's")
		}
		next = n
	}
	for {
		s.mu.Lock()
		oldest, events, changed := s.oldest, s.events[min(next, uint64(len(s.events))):], s.changed
		s.mu.Unlock()
		if next+1 < oldest {
			return status.Error(codes.OutOfRange, "the token is too old; list again")
		}
		for _, e := range events {
			next = e.GetIndex()
			if len(req.GetTaskIds()) > 0 && !slices.Contains(req.GetTaskIds(), e.GetTaskId()) ||
				len(req.GetNodes()) > 0 && !slices.Contains(req.GetNodes(), e.GetNode()) {
				continue
			}
			if err := stream.Send(&taskv1.WatchTasksResponse{ResumeToken: strconv.FormatUint(next, 10), Event: e}); err != nil {
				return err
			}
		}
		select {
		case <-changed:
		case <-stream.Context().Done():
			return stream.Context().Err()
		}
	}
}

// ReadOutput streams the output that a transcript gave.
func (s *server) ReadOutput(req *taskv1.ReadOutputRequest, stream taskv1.TaskService_ReadOutputServer) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.find(req.GetId()) == nil {
		return status.Error(codes.NotFound, "no such task")
	}
	for _, m := range s.output {
		if req.Step != nil && m.GetStep() != req.GetStep() || req.GetStream() != 0 && m.GetStream() != req.GetStream() {
			continue
		}
		if err := stream.Send(m); err != nil {
			return err
		}
	}
	return nil
}
