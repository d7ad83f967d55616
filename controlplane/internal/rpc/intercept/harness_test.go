package intercept_test

import (
	"context"
	"log/slog"
	"net"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health"
	healthgrpc "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/gpuaas/millwright/controlplane/internal/rpc/intercept"
	"github.com/gpuaas/millwright/pki"
	"github.com/gpuaas/millwright/pki/pkitest"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	healthv1 "github.com/gpuaas/millwright/proto/millwright/health/v1"
	nodev1 "github.com/gpuaas/millwright/proto/millwright/node/v1"
	secretv1 "github.com/gpuaas/millwright/proto/millwright/secret/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// members is a set of nodes that were evicted.
type members struct {
	mu      sync.Mutex
	err     error
	node    string
	genSeen uint64
}

// CheckMember returns the error that is set, and notes what it was asked.
func (m *members) CheckMember(_ context.Context, node string, generation uint64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.node, m.genSeen = node, generation
	return m.err
}

func (m *members) set(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.err = err
}

// auditor keeps the records.
type auditor struct {
	mu      sync.Mutex
	records []intercept.Record
}

// Audit keeps r.
func (a *auditor) Audit(r intercept.Record) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.records = append(a.records, r)
}

func (a *auditor) take() []intercept.Record {
	a.mu.Lock()
	defer a.mu.Unlock()
	taken := a.records
	a.records = nil
	return taken
}

// services are the handlers behind the chain; those that a test leaves out
// answer Unimplemented, which shows that the chain let the call through.
type services struct {
	agent agentv1.AgentServiceServer
	task  taskv1.TaskServiceServer
}

// server is a real gRPC server with TLS on loopback.
type server struct {
	cluster *pkitest.Cluster
	members *members
	auditor *auditor
	addr    string
	info    map[string]grpc.ServiceInfo
}

func serve(t *testing.T, s services, edit func(*intercept.Config)) *server {
	t.Helper()
	out := &server{cluster: pkitest.New(t), members: new(members), auditor: new(auditor)}
	cfg := intercept.Config{
		Policy: intercept.Default(), Members: out.members, Auditor: out.auditor,
		Limits: intercept.DefaultLimits(), Log: slog.New(slog.DiscardHandler),
	}
	if edit != nil {
		edit(&cfg)
	}
	if s.agent == nil {
		s.agent = agentv1.UnimplementedAgentServiceServer{}
	}
	if s.task == nil {
		s.task = taskv1.UnimplementedTaskServiceServer{}
	}
	g := grpc.NewServer(intercept.New(cfg).ServerOptions(out.cluster.TLS(t, pki.RoleServer, "one"))...)
	agentv1.RegisterAgentServiceServer(g, s.agent)
	agentv1.RegisterEnrolmentServiceServer(g, agentv1.UnimplementedEnrolmentServiceServer{})
	taskv1.RegisterTaskServiceServer(g, s.task)
	healthv1.RegisterHealthServiceServer(g, healthv1.UnimplementedHealthServiceServer{})
	nodev1.RegisterNodeServiceServer(g, nodev1.UnimplementedNodeServiceServer{})
	secretv1.RegisterSecretServiceServer(g, secretv1.UnimplementedSecretServiceServer{})
	healthgrpc.RegisterHealthServer(g, health.NewServer())
	out.info = g.GetServiceInfo()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	out.addr = l.Addr().String()
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := g.Serve(l); err != nil {
			t.Errorf("serve: %v", err)
		}
	})
	t.Cleanup(wg.Wait)
	t.Cleanup(g.Stop)
	return out
}

// dial connects as a role; "" is without a certificate.
func (s *server) dial(t *testing.T, role pki.Role) *grpc.ClientConn {
	t.Helper()
	config := pki.JoinTLS(pkitest.TrustDomain, s.cluster.CA.SHA256(), nil)
	if role != "" {
		config = s.cluster.TLS(t, role, "caller").Client()
	}
	conn, err := grpc.NewClient("passthrough:///"+s.addr, grpc.WithTransportCredentials(credentials.NewTLS(config)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := conn.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return conn
}

func deadline(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}
