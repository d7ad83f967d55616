package door_test

import (
	"crypto/ecdsa"
	"errors"
	"io"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/gpuaas/millwright/controlplane"
	"github.com/gpuaas/millwright/pki"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	nodev1 "github.com/gpuaas/millwright/proto/millwright/node/v1"
	"github.com/gpuaas/millwright/test/harness"
)

func newToken(t *testing.T, c *harness.Cluster, node string, ttl time.Duration) string {
	t.Helper()
	r, err := c.Nodes.CreateJoinToken(t.Context(), &nodev1.CreateJoinTokenRequest{Node: node, Ttl: durationpb.New(ttl)}, grpc.WaitForReady(true))
	if status.Code(err) == codes.AlreadyExists {
		r, err = c.Nodes.CreateJoinToken(t.Context(), &nodev1.CreateJoinTokenRequest{Node: node, Ttl: durationpb.New(ttl), Rejoin: true})
	}
	if err != nil {
		t.Fatal(err)
	}
	return r.GetToken()
}

// join joins with a new key.
func join(t *testing.T, conn *grpc.ClientConn, token string) (*pki.Identity, *agentv1.JoinResponse, error) {
	t.Helper()
	key, err := pki.GenerateKey()
	if err != nil {
		t.Fatal(err)
	}
	return joinAs(t, conn, token, key)
}

func joinAs(t *testing.T, conn *grpc.ClientConn, token string, key *ecdsa.PrivateKey) (*pki.Identity, *agentv1.JoinResponse, error) {
	t.Helper()
	csr, err := pki.NewRequest(key)
	if err != nil {
		t.Error(err)
		return nil, nil, err
	}
	r, err := agentv1.NewEnrolmentServiceClient(conn).Join(t.Context(), &agentv1.JoinRequest{Token: token, Csr: csr, Hostname: "host"})
	if err != nil {
		return nil, nil, err
	}
	chain, err1 := pki.ParseCertificatesDER(r.GetCertificates())
	roots, err2 := pki.ParseCertificatesDER(r.GetCaCertificates())
	if err := errors.Join(err1, err2); err != nil {
		return nil, nil, err
	}
	identity, err := pki.NewIdentity(chain, key, roots)
	return identity, r, err
}

// TestRace lets 32 hosts run for one token. One gets an identity, and it works.
func TestRace(t *testing.T) {
	c := harness.New(t)
	token := newToken(t, c, "n1", time.Hour)
	var wg sync.WaitGroup
	var winners atomic.Int32
	var winner atomic.Pointer[pki.Identity]
	start := make(chan struct{})
	for range 32 {
		wg.Go(func() {
			conn := c.Connect(nil)
			<-start
			identity, _, err := join(t, conn, token)
			switch {
			case err == nil:
				winners.Add(1)
				winner.Store(identity)
			case status.Code(err) != codes.PermissionDenied || !strings.Contains(err.Error(), "used"):
				t.Errorf("a loser is told %v", err)
			}
		})
	}
	close(start)
	wg.Wait()
	if n := winners.Load(); n != 1 {
		t.Fatalf("%d hosts have an identity of n1, want 1", n)
	}
	node, err := c.Nodes.GetNode(t.Context(), &nodev1.GetNodeRequest{Name: "n1"})
	if err != nil || node.GetNode().GetGeneration() != 1 {
		t.Errorf("node = %v, %v; want it in its first enrolment", node, err)
	}
	if err := openSession(t, c.Connect(winner.Load())); err != nil {
		t.Errorf("the winner has no session: %v", err)
	}
}

// openSession says Hello and returns nil for a Welcome.
func openSession(t *testing.T, conn *grpc.ClientConn) error {
	t.Helper()
	s, err := agentv1.NewAgentServiceClient(conn).Session(t.Context())
	if err != nil {
		return err
	}
	if err := s.Send(&agentv1.SessionRequest{Message: &agentv1.SessionRequest_Hello{Hello: hello("journal-1", 0)}}); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	m, err := s.Recv()
	if err == nil && m.GetWelcome() == nil {
		return errors.New("no Welcome but " + m.String())
	}
	return err
}

// TestTokens presents tokens that are no longer, or never were, good. The node
// is not enrolled by any of them.
func TestTokens(t *testing.T) {
	var late atomic.Int64 // how far the server's clock is ahead, in nanoseconds
	c := harness.New(t, func(cfg *controlplane.Config) {
		cfg.Now = func() time.Time { return time.Now().Add(time.Duration(late.Load())) }
	})
	used := newToken(t, c, "used", time.Hour)
	key, err := pki.GenerateKey()
	if err != nil {
		t.Fatal(err)
	}
	first, _, err := joinAs(t, c.Connect(nil), used, key)
	if err != nil {
		t.Fatal(err)
	}
	// A lost answer loses no node: the same key may ask again, and gets the
	// same name and enrolment.
	again, r, err := joinAs(t, c.Connect(nil), used, key)
	if err != nil || r.GetNode() != "used" || r.GetGeneration() != 1 || again.Leaf().URIs[0].String() != first.Leaf().URIs[0].String() {
		t.Errorf("the same key, again: %v, %v", r, err)
	}
	expired := newToken(t, c, "expired", time.Minute)
	foreign := newToken(t, harness.New(t), "foreign", time.Hour)
	late.Store(int64(2 * time.Minute))
	for _, bad := range []struct{ name, token, node, want string }{
		{"used by another host", used, "", "used"},
		{"expired", expired, "expired", "expired"},
		{"of another cluster", foreign, "foreign", "unknown"},
		{"altered", alter(expired), "expired", "unknown"},
		{"guessed", strings.Repeat("a", len(used)), "guessed", "unknown"},
	} {
		_, _, err := join(t, c.Connect(nil), bad.token)
		if status.Code(err) != codes.PermissionDenied || !strings.Contains(err.Error(), bad.want) {
			t.Errorf("%s: %v, want PermissionDenied that says %q", bad.name, err, bad.want)
		}
		if strings.Contains(err.Error(), bad.token) {
			t.Errorf("%s: the error shows the token", bad.name)
		}
		if r, err := c.Nodes.GetNode(t.Context(), &nodev1.GetNodeRequest{Name: bad.node}); r.GetNode().GetGeneration() != 0 || r.GetNode().GetJoinTime() != nil {
			t.Errorf("%s: node %v (%v), want that it has not joined", bad.name, r.GetNode(), err)
		}
	}
	for _, none := range []string{"", strings.Repeat("a", 10_000)} {
		if _, _, err := join(t, c.Connect(nil), none); status.Code(err) != codes.InvalidArgument {
			t.Errorf("a token of %d bytes: %v, want InvalidArgument", len(none), err)
		}
	}
}

// alter changes the token's last letter.
func alter(token string) string {
	last := byte('a')
	if token[len(token)-1] == last {
		last = 'b'
	}
	return token[:len(token)-1] + string(last)
}

// TestEvicted puts a node out. Its stream ends, and its certificate, which is
// still good, opens no door.
func TestEvicted(t *testing.T) {
	c := harness.New(t)
	identity, _, err := join(t, c.Connect(nil), newToken(t, c, "n1", time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	conn := c.Connect(identity)
	if err := openSession(t, conn); err != nil {
		t.Fatal(err)
	}
	stream, err := agentv1.NewAgentServiceClient(conn).UploadOutput(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Nodes.EvictNode(t.Context(), &nodev1.EvictNodeRequest{Name: "n1", Reason: "a test"}); err != nil {
		t.Fatal(err)
	}
	_ = stream.Send(&agentv1.UploadOutputRequest{TaskId: "x"}) // Recv has the reason
	if _, err := stream.Recv(); status.Code(err) != codes.PermissionDenied {
		t.Errorf("its open stream of output: %v, want PermissionDenied", err)
	}
	for _, m := range methods() {
		if may := callers[string(m.FullName())]; len(may) != 1 || may[0] != node {
			continue
		}
		for name, conn := range map[string]*grpc.ClientConn{"old": conn, "new": c.Connect(identity)} {
			if code := status.Code(call(t, conn, m, false)); code != codes.PermissionDenied {
				t.Errorf("%s over the %s connection: %s, want PermissionDenied", m.FullName(), name, code)
			}
		}
	}
}
