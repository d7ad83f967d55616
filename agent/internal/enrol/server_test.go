package enrol_test

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/millwright/agent/internal/enrol"
	"github.com/gpuaas/millwright/pki"
	"github.com/gpuaas/millwright/pki/ca"
	"github.com/gpuaas/millwright/pki/pkitest"
	"github.com/gpuaas/millwright/pki/trustroot"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	"github.com/gpuaas/millwright/test/relisten"
)

const nodeName = "gpu-001"

// authority is a control plane as far as enrolment goes: a real CA and trust
// root behind real TLS. A test may make it lie or lose its answers.
type authority struct {
	agentv1.UnimplementedEnrolmentServiceServer
	cluster *pkitest.Cluster

	mu         sync.Mutex
	root       *trustroot.Root
	ttl        time.Duration
	generation uint64
	tokens     map[string][sha256.Size]byte // to the key that used it
	deny       error                        // instead of an answer
	lose       int                          // that many answers are lost, after the work was done
	lie        func(*agentv1.JoinResponse)
	joins      int
	renewals   int
	addr       string
}

func newAuthority(t *testing.T) *authority {
	c := pkitest.New(t)
	return &authority{cluster: c, root: c.Root, ttl: time.Hour, tokens: make(map[string][sha256.Size]byte)}
}

// start serves until the test ends or stop is called.
func (a *authority) start(t *testing.T, addr string) (stop func()) {
	t.Helper()
	l := relisten.Listen(t, addr)
	a.addr = l.Addr().String()
	g := grpc.NewServer(grpc.Creds(credentials.NewTLS(a.cluster.TLS(t, pki.RoleServer, "one").Server())))
	agentv1.RegisterEnrolmentServiceServer(g, a)
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := g.Serve(l); err != nil {
			t.Errorf("serve: %v", err)
		}
	})
	stop = sync.OnceFunc(func() { g.Stop(); wg.Wait() })
	t.Cleanup(stop)
	return stop
}

// set changes what the authority does.
func (a *authority) set(f func(*authority)) {
	a.mu.Lock()
	defer a.mu.Unlock()
	f(a)
}

func (a *authority) counts() (joins, renewals int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.joins, a.renewals
}

// Join keeps the rules of tokens: one key for each, and that one again.
func (a *authority) Join(_ context.Context, req *agentv1.JoinRequest) (*agentv1.JoinResponse, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.joins++
	if a.deny != nil {
		return nil, a.deny
	}
	key, err := pki.RequestKey(req.GetCsr())
	if err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	hash, err := pki.KeySHA256(key)
	if err != nil {
		return nil, err
	}
	switch by, used := a.tokens[req.GetToken()]; {
	case used && by != hash:
		return nil, status.Error(codes.PermissionDenied, "join token has been used")
	case !used:
		a.tokens[req.GetToken()] = hash
		a.generation++
	}
	certs, err := a.cluster.CA.Issue(ca.Request{ID: nodeID(nodeName), PublicKey: key, TTL: a.ttl, Generation: a.generation})
	if err != nil {
		return nil, err
	}
	resp := &agentv1.JoinResponse{
		Node: nodeName, Certificates: pki.DERs(certs), CaCertificates: pki.DERs(a.cluster.CA.Roots()),
		TrustChain: a.root.Chain(), Generation: a.generation, ServerTime: timestamppb.Now(),
	}
	if a.lie != nil {
		a.lie(resp)
	}
	if a.lose > 0 {
		a.lose--
		return nil, status.Error(codes.Unavailable, "the answer is lost")
	}
	return resp, nil
}

// Renew issues to the certificate that calls.
func (a *authority) Renew(ctx context.Context, req *agentv1.RenewRequest) (*agentv1.RenewResponse, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.deny != nil {
		return nil, a.deny
	}
	p, _ := peer.FromContext(ctx)
	id, ok := pki.PeerID(p.AuthInfo.(credentials.TLSInfo).State)
	if !ok || id.Role != pki.RoleNode {
		return nil, status.Error(codes.Unauthenticated, "no node")
	}
	key, err := pki.RequestKey(req.GetCsr())
	if err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	certs, err := a.cluster.CA.Issue(ca.Request{ID: id, PublicKey: key, TTL: a.ttl, Generation: a.generation})
	if err != nil {
		return nil, err
	}
	a.renewals++
	return &agentv1.RenewResponse{Certificates: pki.DERs(certs), CaCertificates: pki.DERs(a.cluster.CA.Roots())}, nil
}

func nodeID(name string) pki.ID {
	return pki.ID{TrustDomain: pkitest.TrustDomain, Role: pki.RoleNode, Name: name}
}

// message is a bundle for the authority's cluster.
func (a *authority) message(token string) *agentv1.JoinBundle {
	pin, cluster, newest := a.cluster.CA.SHA256(), a.root.Cluster(), a.root.Hash()
	return &agentv1.JoinBundle{
		Version: 1, Server: a.addr, TrustDomain: pkitest.TrustDomain,
		CaSha256: hex.EncodeToString(pin[:]), Cluster: hex.EncodeToString(cluster[:]), TrustRoot: hex.EncodeToString(newest[:]),
		Floor: timestamppb.New(time.Now().Add(-time.Minute)), Node: nodeName, Token: token,
		Expires: timestamppb.New(time.Now().Add(time.Hour)),
	}
}

func encode(t testing.TB, m *agentv1.JoinBundle) []byte {
	t.Helper()
	data, err := protojson.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func parse(t *testing.T, m *agentv1.JoinBundle) *enrol.Bundle {
	t.Helper()
	b, err := enrol.ParseBundle(encode(t, m))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// put writes a bundle where Ensure looks for it.
func put(t *testing.T, path string, m *agentv1.JoinBundle) {
	t.Helper()
	if err := os.WriteFile(path, encode(t, m), 0o600); err != nil {
		t.Fatal(err)
	}
}

func config(t *testing.T) enrol.Config {
	return enrol.Config{Dir: filepath.Join(t.TempDir(), "identity")}
}

func deadline(t *testing.T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}
