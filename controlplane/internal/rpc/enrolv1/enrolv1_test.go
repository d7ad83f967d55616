package enrolv1_test

import (
	"context"
	"crypto/ecdsa"
	"errors"
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	"github.com/gpuaas/millwright/controlplane/internal/dispatch"
	"github.com/gpuaas/millwright/controlplane/internal/eventlog"
	"github.com/gpuaas/millwright/controlplane/internal/fleet"
	"github.com/gpuaas/millwright/controlplane/internal/rpc/enrolv1"
	"github.com/gpuaas/millwright/controlplane/internal/rpc/intercept"
	"github.com/gpuaas/millwright/controlplane/internal/rpc/nodev1"
	"github.com/gpuaas/millwright/controlplane/internal/store/boltstore"
	"github.com/gpuaas/millwright/pki"
	"github.com/gpuaas/millwright/pki/pkitest"
	"github.com/gpuaas/millwright/pki/trustroot"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

const operator = "spiffe://test.example/operator/alice"

// noSessions is a server to which no node is connected.
type noSessions struct{}

// Cut has nothing to cut.
func (noSessions) Cut(string, string, string) {}

// Contact knows no one.
func (noSessions) Contact(string) (dispatch.Contact, bool) { return dispatch.Contact{}, false }

// trust serves the trust root of a test cluster.
type trust struct{ root *trustroot.Root }

// TrustChain returns it.
func (t trust) TrustChain(context.Context) ([]*taskv1.Envelope, error) { return t.root.Chain(), nil }

// site is the service as the server runs it: real store, real membership, the
// real chain, TLS on loopback.
type site struct {
	cluster *pkitest.Cluster
	fleet   *fleet.Fleet
	addr    string
	ahead   atomic.Int64 // how far the server's clock is ahead
}

func newSite(t *testing.T) *site {
	t.Helper()
	s := &site{cluster: pkitest.New(t)}
	now := func() time.Time { return time.Now().Add(time.Duration(s.ahead.Load())) }
	quiet := slog.New(slog.DiscardHandler)
	db, err := boltstore.Create(filepath.Join(t.TempDir(), "store.db"))
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	wg.Go(func() {
		if err := db.Run(ctx); err != nil && !errors.Is(err, context.Canceled) {
			t.Errorf("store: %v", err)
		}
	})
	log := eventlog.New(eventlog.Config{Writer: db, Now: now})
	s.fleet = fleet.New(fleet.Config{
		Log: log, Reader: db, Sessions: noSessions{}, Logger: quiet, Actor: "spiffe://test.example/server/one", Now: now,
		NodeID: func(name string) string { return "spiffe://test.example/node/" + name },
	})
	chain := intercept.New(intercept.Config{
		Policy: intercept.Default(), Members: s.fleet, Auditor: intercept.NewLogAuditor(quiet),
		Limits: intercept.DefaultLimits(), Log: quiet, Now: now,
	})
	g := grpc.NewServer(chain.ServerOptions(s.cluster.TLS(t, pki.RoleServer, "one"))...)
	agentv1.RegisterEnrolmentServiceServer(g, enrolv1.New(enrolv1.Config{
		TrustDomain: pkitest.TrustDomain, NodeTTL: time.Hour, Tokens: s.fleet, Keys: s.fleet, Issuer: s.cluster.CA,
		Trust: trust{s.cluster.Root}, Log: quiet, Now: now,
	}))
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s.addr = l.Addr().String()
	wg.Go(func() {
		if err := g.Serve(l); err != nil {
			t.Errorf("serve: %v", err)
		}
	})
	t.Cleanup(func() {
		g.Stop()
		cancel()
		wg.Wait()
		if err := db.Close(); err != nil {
			t.Errorf("close store: %v", err)
		}
	})
	return s
}

func (s *site) token(t *testing.T, node string, ttl time.Duration) string {
	t.Helper()
	token, _, err := s.fleet.CreateToken(t.Context(), operator, node, ttl, false)
	if errors.Is(err, nodev1.ErrMember) { // it takes the place of the one that has joined
		token, _, err = s.fleet.CreateToken(t.Context(), operator, node, ttl, true)
	}
	if err != nil {
		t.Fatal(err)
	}
	return token
}

func (s *site) dial(t *testing.T, id *pki.Identity) agentv1.EnrolmentServiceClient {
	t.Helper()
	config := pki.JoinTLS(pkitest.TrustDomain, s.cluster.CA.SHA256(), nil)
	if id != nil {
		source := new(pki.Static)
		source.Set(id)
		config = pki.TLS{Source: source, TrustDomain: pkitest.TrustDomain}.Client()
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
	return agentv1.NewEnrolmentServiceClient(conn)
}

func newKey(t *testing.T) *ecdsa.PrivateKey {
	t.Helper()
	key, err := pki.GenerateKey()
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func request(t *testing.T, key *ecdsa.PrivateKey) []byte {
	t.Helper()
	csr, err := pki.NewRequest(key)
	if err != nil {
		t.Fatal(err)
	}
	return csr
}

func (s *site) join(t *testing.T, token string, key *ecdsa.PrivateKey) (*agentv1.JoinResponse, error) {
	t.Helper()
	return s.dial(t, nil).Join(t.Context(), &agentv1.JoinRequest{Token: token, Csr: request(t, key), Hostname: "host"})
}

// identity makes the identity of an answer.
func (s *site) identity(t *testing.T, certs [][]byte, key *ecdsa.PrivateKey) *pki.Identity {
	t.Helper()
	chain, err := pki.ParseCertificatesDER(certs)
	if err != nil {
		t.Fatal(err)
	}
	id, err := pki.NewIdentity(chain, key, s.cluster.CA.Roots())
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func denied(t *testing.T, err error, says string) {
	t.Helper()
	if status.Code(err) != codes.PermissionDenied || !strings.Contains(err.Error(), says) || !strings.Contains(err.Error(), "millctl node token create") {
		t.Errorf("got %v, want PermissionDenied with %q and the way out", err, says)
	}
}

func TestJoinAndRenew(t *testing.T) {
	s := newSite(t)
	key := newKey(t)
	resp, err := s.join(t, s.token(t, "gpu-001", time.Hour), key)
	if err != nil {
		t.Fatal(err)
	}
	cluster := s.cluster.Root.Cluster()
	if root, err := trustroot.Open(resp.GetTrustChain(), cluster[:]); err != nil || root.Hash() != s.cluster.Root.Hash() {
		t.Errorf("trust chain: %v", err)
	}
	id := s.identity(t, resp.GetCertificates(), key)
	if id.ID.String() != "spiffe://test.example/node/gpu-001" || resp.GetNode() != "gpu-001" || resp.GetGeneration() != 1 || pki.Generation(id.Leaf()) != 1 {
		t.Errorf("got %s, generation %d", id.ID, resp.GetGeneration())
	}
	if left := time.Until(id.NotAfter()); left > time.Hour || left < 59*time.Minute {
		t.Errorf("good for %s", left)
	}
	fresh := newKey(t) // a renewal may bring a new key
	again, err := s.dial(t, id).Renew(t.Context(), &agentv1.RenewRequest{Csr: request(t, fresh)})
	if err != nil {
		t.Fatal(err)
	}
	next := s.identity(t, again.GetCertificates(), fresh)
	if next.ID != id.ID || pki.Generation(next.Leaf()) != 1 {
		t.Errorf("renewed as %s, generation %d", next.ID, pki.Generation(next.Leaf()))
	}
	if _, err := s.dial(t, next).Renew(t.Context(), &agentv1.RenewRequest{Csr: request(t, fresh)}); err != nil {
		t.Errorf("the renewed certificate: %v", err)
	}
}

func TestToken(t *testing.T) {
	s := newSite(t)
	key := newKey(t)
	token := s.token(t, "gpu-001", time.Hour)
	first, err := s.join(t, token, key)
	if err != nil {
		t.Fatal(err)
	}
	// The same host again, whose answer was lost: the same enrolment.
	if again, err := s.join(t, token, key); err != nil || again.GetGeneration() != first.GetGeneration() {
		t.Errorf("again: %v", err)
	}
	_, err = s.join(t, token, newKey(t))
	denied(t, err, "has been used")
	_, err = s.join(t, "never-made", key)
	denied(t, err, "unknown to this server")
	_, err = newSite(t).join(t, token, key)
	denied(t, err, "unknown to this server") // of another cluster

	late := s.token(t, "gpu-002", time.Minute)
	other := newKey(t)
	if _, err := s.join(t, late, other); err != nil {
		t.Fatal(err)
	}
	s.ahead.Store(int64(2 * time.Minute))
	_, err = s.join(t, late, other)
	denied(t, err, "has expired") // also for the key that used it
	s.ahead.Store(0)

	// A newer enrolment ends what the older token gave.
	old := s.identity(t, first.GetCertificates(), key)
	second := newKey(t)
	newer, err := s.join(t, s.token(t, "gpu-001", time.Hour), second)
	if err != nil || newer.GetGeneration() != 2 {
		t.Fatalf("newer: %v", err)
	}
	_, err = s.join(t, token, key)
	denied(t, err, "has been used")
	if _, err := s.dial(t, old).Renew(t.Context(), &agentv1.RenewRequest{Csr: request(t, key)}); status.Code(err) != codes.PermissionDenied {
		t.Errorf("the older enrolment renews: %v", err)
	}
}

func TestEvicted(t *testing.T) {
	s := newSite(t)
	key := newKey(t)
	token := s.token(t, "gpu-001", time.Hour)
	resp, err := s.join(t, token, key)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.fleet.Evict(t.Context(), operator, "gpu-001", "stolen"); err != nil {
		t.Fatal(err)
	}
	_, err = s.join(t, token, key)
	denied(t, err, "has been used")
	id := s.identity(t, resp.GetCertificates(), key)
	_, err = s.dial(t, id).Renew(t.Context(), &agentv1.RenewRequest{Csr: request(t, key)})
	denied(t, err, "evicted")
	if again, err := s.join(t, s.token(t, "gpu-001", time.Hour), newKey(t)); err != nil || again.GetGeneration() != 2 {
		t.Errorf("a new token: %v", err)
	}
}

// TestRace sends one token from many hosts at once: one joins.
func TestRace(t *testing.T) {
	s := newSite(t)
	const hosts = 24
	for range 3 {
		token := s.token(t, "gpu-001", time.Hour)
		var joined, refused atomic.Int32
		start := make(chan struct{})
		var wg sync.WaitGroup
		for range hosts {
			client, csr := s.dial(t, nil), request(t, newKey(t))
			wg.Go(func() {
				<-start
				_, err := client.Join(t.Context(), &agentv1.JoinRequest{Token: token, Csr: csr})
				switch status.Code(err) {
				case codes.OK:
					joined.Add(1)
				case codes.PermissionDenied:
					refused.Add(1)
				default:
					t.Errorf("join: %v", err)
				}
			})
		}
		close(start)
		wg.Wait()
		if joined.Load() != 1 || refused.Load() != hosts-1 {
			t.Errorf("%d joined and %d were refused", joined.Load(), refused.Load())
		}
	}
}

func TestBadRequests(t *testing.T) {
	s := newSite(t)
	key := newKey(t)
	good := request(t, key)
	altered := append([]byte(nil), good...)
	altered[len(altered)-1] ^= 1
	token := s.token(t, "gpu-001", time.Hour)
	client := s.dial(t, nil)
	for name, req := range map[string]*agentv1.JoinRequest{
		"no token":      {Csr: good},
		"long token":    {Csr: good, Token: strings.Repeat("x", 200)},
		"no csr":        {Token: token},
		"altered csr":   {Token: token, Csr: altered},
		"long csr":      {Token: token, Csr: make([]byte, 8<<10)},
		"long hostname": {Token: token, Csr: good, Hostname: strings.Repeat("x", 300)},
	} {
		if _, err := client.Join(t.Context(), req); status.Code(err) != codes.InvalidArgument {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := s.join(t, token, key); err != nil {
		t.Errorf("the token is gone: %v", err)
	}
}

// TestWhoMayRenew calls with certificates that are no node's.
func TestWhoMayRenew(t *testing.T) {
	s := newSite(t)
	csr := request(t, newKey(t))
	for _, role := range []pki.Role{pki.RoleOperator, pki.RoleController, pki.RoleServer} {
		_, err := s.dial(t, s.cluster.Identity(t, role, "a")).Renew(t.Context(), &agentv1.RenewRequest{Csr: csr})
		if status.Code(err) != codes.PermissionDenied {
			t.Errorf("%s: %v", role, err)
		}
	}
	if _, err := s.dial(t, nil).Renew(t.Context(), &agentv1.RenewRequest{Csr: csr}); status.Code(err) != codes.Unauthenticated {
		t.Errorf("without a certificate: %v", err)
	}
	_, err := enrolv1.New(enrolv1.Config{}).Renew(t.Context(), &agentv1.RenewRequest{Csr: csr})
	if status.Code(err) != codes.PermissionDenied {
		t.Errorf("past the chain: %v", err)
	}
}
