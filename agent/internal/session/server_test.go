package session_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"math/big"
	"net"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/millwright/agent/internal/session"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// server is a real gRPC server over TLS 1.3 that hands each session to the
// test, which plays the control plane's part.
type server struct {
	agentv1.UnimplementedAgentServiceServer
	address  string
	identity session.Identity
	dial     func(ctx context.Context, address string) (net.Conn, error)
	peers    chan *peer
	rejects  chan error // a session is refused with each error sent here
}

// peer is one session as the server sees it.
type peer struct {
	t     *testing.T
	rpc   agentv1.AgentService_SessionServer
	epoch uint64
	end   chan error
	hello *agentv1.Hello
}

func (s *server) Session(rpc agentv1.AgentService_SessionServer) error {
	select {
	case err := <-s.rejects:
		return err
	default:
	}
	p := &peer{rpc: rpc, end: make(chan error, 1)}
	select {
	case s.peers <- p:
	case <-rpc.Context().Done():
		return rpc.Context().Err()
	}
	select {
	case err := <-p.end:
		return err
	case <-rpc.Context().Done():
		return rpc.Context().Err()
	}
}

// listener is how a server is reached.
type listener struct {
	net.Listener
	dial func(ctx context.Context, address string) (net.Conn, error)
}

func loopback(t *testing.T) listener {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return listener{Listener: l}
}

// pipes is a listener in memory, for tests in a bubble of time.
type pipes struct {
	conns  chan net.Conn
	closed chan struct{}
	once   sync.Once
}

func inMemory() listener {
	p := &pipes{conns: make(chan net.Conn), closed: make(chan struct{})}
	return listener{Listener: p, dial: func(ctx context.Context, _ string) (net.Conn, error) {
		near, far := net.Pipe()
		select {
		case p.conns <- far:
			return near, nil
		case <-p.closed:
			return nil, net.ErrClosed
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}}
}

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.conns:
		return c, nil
	case <-p.closed:
		return nil, net.ErrClosed
	}
}

func (p *pipes) Close() error { p.once.Do(func() { close(p.closed) }); return nil }

func (p *pipes) Addr() net.Addr { return &net.UnixAddr{Name: "pipe", Net: "unix"} }

func serve(t *testing.T, l listener) *server {
	t.Helper()
	cert, pool := certificate(t)
	s := &server{
		address: l.Addr().String(), dial: l.dial, peers: make(chan *peer), rejects: make(chan error, 8),
		identity: session.Identity{
			Server: l.Addr().String(), NotAfter: time.Now().Add(24 * time.Hour), Generation: 3,
			TLS: &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: pool, ServerName: "test", Certificates: []tls.Certificate{cert}},
		},
	}
	srv := grpc.NewServer(
		grpc.Creds(credentials.NewTLS(&tls.Config{
			MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{cert}, ClientCAs: pool, ClientAuth: tls.RequireAndVerifyClientCert,
		})),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 10 * time.Second, PermitWithoutStream: true}))
	agentv1.RegisterAgentServiceServer(srv, s)
	var wg sync.WaitGroup
	wg.Go(func() { _ = srv.Serve(l) })
	t.Cleanup(func() { srv.Stop(); wg.Wait() })
	return s
}

func certificate(t *testing.T) (tls.Certificate, *x509.CertPool) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test"}, DNSNames: []string{"test"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(1000 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(leaf)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}, pool
}

// accept waits for a session and takes its Hello.
func (s *server) accept(t *testing.T) *peer {
	t.Helper()
	var p *peer
	select {
	case p = <-s.peers:
	case <-time.After(10 * time.Minute): // in a bubble this costs nothing
		t.Fatal("no session was opened")
	}
	p.t = t
	m, err := p.rpc.Recv()
	if err != nil {
		t.Fatalf("receive the Hello: %v", err)
	}
	if m.GetHello() == nil || m.GetSessionEpoch() != 0 {
		t.Fatalf("first message = %v, want a Hello of epoch 0", m)
	}
	p.hello = m.GetHello()
	return p
}

// welcome opens the session with a heartbeat every minute.
func (p *peer) welcome(epoch, resendFrom uint64) {
	p.t.Helper()
	p.epoch = epoch
	p.send(&agentv1.SessionResponse{Message: &agentv1.SessionResponse_Welcome{Welcome: &agentv1.Welcome{
		Protocol: 1, SessionEpoch: epoch, ResendFrom: resendFrom, ServerTime: timestamppb.Now(),
		HeartbeatInterval: durationpb.New(time.Minute), ServerVersion: "test",
	}}})
}

func (p *peer) send(m *agentv1.SessionResponse) {
	p.t.Helper()
	if m.SessionEpoch == 0 {
		m.SessionEpoch = p.epoch
	}
	if err := p.rpc.Send(m); err != nil {
		p.t.Fatalf("send: %v", err)
	}
}

func (p *peer) ack(journal string, seq uint64) {
	p.t.Helper()
	p.send(&agentv1.SessionResponse{Message: &agentv1.SessionResponse_Ack{Ack: &agentv1.EventAck{JournalId: journal, Seq: seq}}})
}

func assignment(id string) *agentv1.SessionResponse {
	return &agentv1.SessionResponse{Message: &agentv1.SessionResponse_Assignment{Assignment: &agentv1.Assignment{AssignmentId: id}}}
}

// recv returns the next message that pick takes; others are passed over.
func (p *peer) recv(pick func(*agentv1.SessionRequest) bool) *agentv1.SessionRequest {
	p.t.Helper()
	for {
		m, err := p.rpc.Recv()
		if err != nil {
			p.t.Fatalf("receive: %v", err)
		}
		if m.GetSessionEpoch() != p.epoch {
			p.t.Fatalf("message has epoch %d, want %d: %v", m.GetSessionEpoch(), p.epoch, m)
		}
		if pick(m) {
			return m
		}
	}
}

func (p *peer) answer() *agentv1.AssignmentAnswer {
	p.t.Helper()
	return p.recv(func(m *agentv1.SessionRequest) bool { return m.GetAnswer() != nil }).GetAnswer()
}

func (p *peer) events() *agentv1.EventBatch {
	p.t.Helper()
	return p.recv(func(m *agentv1.SessionRequest) bool { return m.GetEvents() != nil }).GetEvents()
}

// seqs decodes the numbers of a batch's frames.
func seqs(t *testing.T, b *agentv1.EventBatch) []uint64 {
	t.Helper()
	var out []uint64
	for _, f := range b.GetFrames() {
		var e taskv1.Event
		if err := proto.Unmarshal(f, &e); err != nil {
			t.Fatal(err)
		}
		out = append(out, e.GetSeq())
	}
	return out
}

// gone waits until the node has ended the stream.
func (p *peer) gone() {
	p.t.Helper()
	for {
		if _, err := p.rpc.Recv(); err != nil {
			return
		}
	}
}
