package intercept_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthgrpc "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"github.com/gpuaas/millwright/controlplane/internal/rpc/intercept"
	"github.com/gpuaas/millwright/pki"
	"github.com/gpuaas/millwright/pki/pkitest"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// tasks answers by a function.
type tasks struct {
	taskv1.UnimplementedTaskServiceServer
	get func(context.Context) error
}

// GetTask answers by the function.
func (s tasks) GetTask(ctx context.Context, _ *taskv1.GetTaskRequest) (*taskv1.GetTaskResponse, error) {
	return &taskv1.GetTaskResponse{}, s.get(ctx)
}

// CreateTasks takes everything.
func (s tasks) CreateTasks(context.Context, *taskv1.CreateTasksRequest) (*taskv1.CreateTasksResponse, error) {
	return &taskv1.CreateTasksResponse{}, nil
}

// agents notes the caller of its stream.
type agents struct {
	agentv1.UnimplementedAgentServiceServer
	caller chan intercept.Caller
}

// Session notes its caller and ends.
func (s agents) Session(stream grpc.BidiStreamingServer[agentv1.SessionRequest, agentv1.SessionResponse]) error {
	s.caller <- intercept.CallerFrom(stream.Context())
	return nil
}

func get(t *testing.T, conn *grpc.ClientConn) error {
	t.Helper()
	_, err := taskv1.NewTaskServiceClient(conn).GetTask(deadline(t), &taskv1.GetTaskRequest{})
	return err
}

func TestCallerOfUnaryAndStream(t *testing.T) {
	callers := make(chan intercept.Caller, 1)
	s := serve(t, services{
		agent: agents{caller: callers},
		task:  tasks{get: func(ctx context.Context) error { callers <- intercept.CallerFrom(ctx); return nil }},
	}, nil)
	if err := get(t, s.dial(t, pki.RoleOperator)); err != nil {
		t.Fatal(err)
	}
	c := <-callers
	if c.ID.String() != "spiffe://test.example/operator/caller" || c.Generation != 0 || c.Addr == "" || time.Until(c.NotAfter) > time.Hour {
		t.Errorf("unary: got %+v", c)
	}
	stream, err := agentv1.NewAgentServiceClient(s.dial(t, pki.RoleNode)).Session(deadline(t))
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.CloseSend(); err != nil {
		t.Fatal(err)
	}
	if c = <-callers; c.ID.String() != "spiffe://test.example/node/caller" || c.Generation != 1 || c.Certificate == nil {
		t.Errorf("stream: got %+v", c)
	}
	if c := intercept.CallerFrom(t.Context()); c.ID != (pki.ID{}) || c.Name() != "anonymous" {
		t.Errorf("without the chain: got %+v", c)
	}
}

func TestEvicted(t *testing.T) {
	s := serve(t, services{}, nil)
	conn := s.dial(t, pki.RoleNode)
	renew := func() error {
		_, err := agentv1.NewEnrolmentServiceClient(conn).Renew(deadline(t), &agentv1.RenewRequest{})
		return err
	}
	if err := renew(); status.Code(err) != codes.Unimplemented {
		t.Errorf("a member: %v", err)
	}
	if s.members.node != "caller" || s.members.genSeen != 1 {
		t.Errorf("asked for node %s of generation %d", s.members.node, s.members.genSeen)
	}
	s.members.set(fmt.Errorf("node caller was evicted: %w", intercept.ErrNotMember))
	if err := renew(); status.Code(err) != codes.PermissionDenied || !strings.Contains(err.Error(), "evicted") {
		t.Errorf("evicted, on the open connection: %v", err)
	}
	stream, err := agentv1.NewAgentServiceClient(conn).Session(deadline(t))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); status.Code(err) != codes.PermissionDenied {
		t.Errorf("evicted, a stream: %v", err)
	}
	s.members.set(errors.New("disk on fire"))
	if err := renew(); status.Code(err) != codes.Internal || strings.Contains(err.Error(), "fire") {
		t.Errorf("membership unknown: %v", err)
	}
}

func TestExpiredOnAnOpenConnection(t *testing.T) {
	var ahead atomic.Int64
	s := serve(t, services{task: tasks{get: func(context.Context) error { return nil }}}, func(c *intercept.Config) {
		c.Now = func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) }
	})
	conn := s.dial(t, pki.RoleOperator)
	if err := get(t, conn); err != nil {
		t.Fatal(err)
	}
	ahead.Store(int64(2 * time.Hour))
	if err := get(t, conn); status.Code(err) != codes.Unauthenticated || !strings.Contains(err.Error(), "ended at") {
		t.Errorf("got %v", err)
	}
}

func TestPanicAndInnerErrors(t *testing.T) {
	var log syncBuffer
	var answer atomic.Value
	s := serve(t, services{task: tasks{get: func(context.Context) error {
		return answer.Load().(func() error)()
	}}}, func(c *intercept.Config) { c.Log = slog.New(slog.NewTextHandler(&log, nil)) })
	conn := s.dial(t, pki.RoleOperator)
	for _, tt := range []struct {
		name string
		get  func() error
		code codes.Code
		logs bool
	}{
		{"panic", func() error { panic("secret-1") }, codes.Internal, true},
		{"plain error", func() error { return errors.New("secret-1") }, codes.Internal, true},
		{"status", func() error { return status.Error(codes.NotFound, "no such task") }, codes.NotFound, false},
		{"wrapped status", func() error { return fmt.Errorf("get: %w", status.Error(codes.NotFound, "no")) }, codes.NotFound, false},
		{"end of the context", func() error { return fmt.Errorf("wait: %w", context.DeadlineExceeded) }, codes.DeadlineExceeded, false},
		{"none", func() error { return nil }, codes.OK, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			log.Reset()
			answer.Store(tt.get)
			err := get(t, conn)
			if status.Code(err) != tt.code || err != nil && strings.Contains(err.Error(), "secret-1") {
				t.Errorf("got %v, want %s", err, tt.code)
			}
			if got := strings.Count(log.String(), "secret-1"); got != 0 != tt.logs || got > 1 && tt.name != "panic" {
				t.Errorf("log has it %d times: %s", got, log.String())
			}
		})
	}
}

type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

// Write appends.
func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

// String is all that was written.
func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// Reset forgets it.
func (s *syncBuffer) Reset() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.b.Reset()
}

func TestLimit(t *testing.T) {
	limits := intercept.DefaultLimits()
	limits[intercept.ClassRead] = intercept.Limit{PerSecond: 0.1, Burst: 2}
	s := serve(t, services{task: tasks{get: func(context.Context) error { return nil }}}, func(c *intercept.Config) { c.Limits = limits })
	conn := s.dial(t, pki.RoleOperator)
	for range 2 {
		if err := get(t, conn); err != nil {
			t.Fatal(err)
		}
	}
	err := get(t, s.dial(t, pki.RoleOperator)) // the same caller on another connection
	if status.Code(err) != codes.ResourceExhausted {
		t.Fatalf("third call: %v", err)
	}
	details := status.Convert(err).Details()
	if len(details) != 1 {
		t.Fatalf("details %v", details)
	}
	if retry, ok := details[0].(*errdetails.RetryInfo); !ok || retry.GetRetryDelay().AsDuration() != 10*time.Second {
		t.Errorf("got %v", details[0])
	}
	if err := get(t, s.dial(t, pki.RoleController)); err != nil {
		t.Errorf("another caller: %v", err)
	}
	if _, err := taskv1.NewTaskServiceClient(conn).CreateTasks(deadline(t), &taskv1.CreateTasksRequest{}); err != nil {
		t.Errorf("another class: %v", err)
	}
}

func TestAudit(t *testing.T) {
	s := serve(t, services{task: tasks{get: func(context.Context) error { return status.Error(codes.NotFound, "no such task") }}}, nil)
	operator := s.dial(t, pki.RoleOperator)
	if _, err := taskv1.NewTaskServiceClient(operator).CreateTasks(deadline(t), &taskv1.CreateTasksRequest{}); err != nil {
		t.Fatal(err)
	}
	is := func(method string, code codes.Code, denied bool, audit intercept.Audit) {
		t.Helper()
		records := s.auditor.take()
		if len(records) != 1 {
			t.Fatalf("got %d records: %+v", len(records), records)
		}
		r := records[0]
		if !strings.HasSuffix(r.Method, method) || r.Code != code || r.Denied != denied || r.Audit != audit || r.Caller.Addr == "" {
			t.Errorf("got %+v", r)
		}
	}
	is("/CreateTasks", codes.OK, false, intercept.AuditEach)
	if err := get(t, operator); status.Code(err) != codes.NotFound {
		t.Fatal(err)
	}
	is("/GetTask", codes.NotFound, false, intercept.AuditCoalesced)
	if err := get(t, s.dial(t, pki.RoleNode)); status.Code(err) != codes.PermissionDenied {
		t.Fatal(err)
	}
	is("/GetTask", codes.PermissionDenied, true, intercept.AuditCoalesced)
	if _, err := healthgrpc.NewHealthClient(operator).Check(deadline(t), &healthgrpc.HealthCheckRequest{}); err != nil {
		t.Fatal(err)
	}
	if records := s.auditor.take(); len(records) != 0 {
		t.Errorf("health is recorded: %+v", records)
	}
}

func TestLogAuditorCoalesces(t *testing.T) {
	var log syncBuffer
	a := intercept.NewLogAuditor(slog.New(slog.NewTextHandler(&log, nil)))
	now := time.Now()
	record := func(after time.Duration, audit intercept.Audit, addr string) {
		a.Audit(intercept.Record{Time: now.Add(after), Method: "/x", Caller: intercept.Caller{Addr: addr}, Audit: audit, Denied: true})
	}
	lines := func() int { return strings.Count(log.String(), "\n") }
	for range 100 {
		record(0, intercept.AuditCoalesced, "10.0.0.1:1")
	}
	if lines() != 1 {
		t.Errorf("100 calls gave %d lines", lines())
	}
	record(time.Second, intercept.AuditCoalesced, "10.0.0.2:1")
	if lines() != 2 {
		t.Errorf("another caller gave no line")
	}
	record(time.Minute, intercept.AuditCoalesced, "10.0.0.1:2")
	if lines() != 3 || !strings.Contains(log.String(), "skipped=99") {
		t.Errorf("after a minute: %s", log.String())
	}
	for range 3 {
		record(time.Minute, intercept.AuditEach, "10.0.0.1:1")
	}
	if lines() != 6 {
		t.Errorf("what is recorded each time gave %d lines", lines()-3)
	}
}

func TestMessageSize(t *testing.T) {
	s := serve(t, services{task: tasks{}}, nil)
	client := taskv1.NewTaskServiceClient(s.dial(t, pki.RoleOperator))
	create := func(bytes int) error {
		req := &taskv1.CreateTasksRequest{Leaves: []*taskv1.SignedLeaf{{Leaf: make([]byte, bytes)}}}
		_, err := client.CreateTasks(deadline(t), req)
		return err
	}
	if err := create(4<<20 + 400<<10); err != nil {
		t.Errorf("4 MiB and their proofs: %v", err)
	}
	if err := create(intercept.MaxRequest); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("too much: %v", err)
	}
}

// follow opens a stream that follows something, and returns once it is open.
func follow(t *testing.T, conn *grpc.ClientConn) (grpc.ServerStreamingClient[healthgrpc.HealthCheckResponse], error) {
	t.Helper()
	stream, err := healthgrpc.NewHealthClient(conn).Watch(deadline(t), &healthgrpc.HealthCheckRequest{})
	if err == nil {
		_, err = stream.Recv()
	}
	return stream, err
}

func TestOpenStreamsOfOneCaller(t *testing.T) {
	limits := intercept.DefaultLimits()
	limits[intercept.ClassWatch] = intercept.Limit{PerSecond: 1000, Burst: 1000, Open: 2}
	s := serve(t, services{}, func(c *intercept.Config) { c.Limits = limits })
	first := s.dial(t, pki.RoleOperator)
	for range 2 {
		if _, err := follow(t, first); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := follow(t, s.dial(t, pki.RoleOperator)); status.Code(err) != codes.ResourceExhausted || !strings.Contains(err.Error(), "open streams") {
		t.Errorf("a third one, on another connection: %v", err)
	}
	if r := s.auditor.take(); len(r) != 1 || !r[0].Denied {
		t.Errorf("recorded as %+v", r)
	}
	if _, err := follow(t, s.dial(t, pki.RoleController)); err != nil {
		t.Errorf("another caller: %v", err)
	}
}

func TestStreamEndsWithItsCertificate(t *testing.T) {
	var ahead atomic.Int64
	s := serve(t, services{}, func(c *intercept.Config) {
		c.Now = func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) }
	})
	conn := s.dial(t, pki.RoleOperator)
	if err := get(t, conn); status.Code(err) != codes.Unimplemented { // the handshake is behind us
		t.Fatal(err)
	}
	ahead.Store(int64(time.Hour - 2*time.Second)) // of the hour that pkitest gives
	stream, err := follow(t, conn)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); status.Code(err) != codes.Unauthenticated || !strings.Contains(err.Error(), "ended at") {
		t.Errorf("the stream ended with %v", err)
	}
}

func TestStreamsOfOneConnection(t *testing.T) {
	limits := intercept.DefaultLimits()
	limits[intercept.ClassWatch] = intercept.Limit{PerSecond: 1000, Burst: 1000, Open: 1000}
	s := serve(t, services{}, func(c *intercept.Config) { c.Limits = limits })
	client := healthgrpc.NewHealthClient(s.dial(t, pki.RoleOperator))
	ctx, cancel := context.WithCancel(deadline(t))
	defer cancel()
	for range intercept.MaxStreams {
		stream, err := client.Watch(ctx, &healthgrpc.HealthCheckRequest{})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := stream.Recv(); err != nil {
			t.Fatal(err)
		}
	}
	short, stop := context.WithTimeout(ctx, 300*time.Millisecond)
	defer stop()
	if _, err := client.Check(short, &healthgrpc.HealthCheckRequest{}); status.Code(err) != codes.DeadlineExceeded {
		t.Errorf("one more than %d: %v", intercept.MaxStreams, err)
	}
}

// TestNoCertificateOfAnotherCA knows another CA than the server.
func TestNoCertificateOfAnotherCA(t *testing.T) {
	s := serve(t, services{}, nil)
	stranger := &server{cluster: pkitest.New(t), addr: s.addr}
	if err := get(t, stranger.dial(t, pki.RoleOperator)); status.Code(err) != codes.Unavailable {
		t.Errorf("got %v", err)
	}
}
