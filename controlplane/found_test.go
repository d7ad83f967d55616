package controlplane_test

import (
	"errors"
	"io"
	"net/http"
	"os"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	healthgrpc "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"github.com/gpuaas/millwright/controlplane"
	"github.com/gpuaas/millwright/pki/pkitest"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	nodev1 "github.com/gpuaas/millwright/proto/millwright/node/v1"
)

func TestFoundIsNotDestructive(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.join("n1")
	id := w.create(w.leaf("n1"))[0].GetId()
	w.shut()
	again, err := controlplane.Found(t.Context(), w.cfg, w.bundle(), pkitest.TrustDomain)
	if err != nil || again.GetCaSha256() != w.context.GetCaSha256() || again.GetCluster() != w.context.GetCluster() {
		t.Fatalf("Found again = %v, %v", again, err)
	}
	other := *w
	other.cluster = pkitest.New(t)
	if _, err := controlplane.Found(t.Context(), w.cfg, other.bundle(), pkitest.TrustDomain); !errors.Is(err, controlplane.ErrFounded) {
		t.Errorf("Found over another cluster: %v", err)
	}
	w.start()
	w.task(id)
}

func TestFoundRefuses(t *testing.T) {
	t.Parallel()
	w := &world{t: t, cluster: pkitest.New(t), operatorKey: newIdentityKey(t)}
	for name, c := range map[string]struct {
		change func(*nodev1.FoundingBundle)
		domain string
		word   string
	}{
		"version":      {func(b *nodev1.FoundingBundle) { b.Version = 2 }, pkitest.TrustDomain, "version 2"},
		"genesis":      {func(b *nodev1.FoundingBundle) { b.Genesis.Payload[9] ^= 1 }, pkitest.TrustDomain, "genesis"},
		"trust domain": {func(*nodev1.FoundingBundle) {}, "other.example", "other.example"},
		"operator":     {func(b *nodev1.FoundingBundle) { b.Operator = "Al ice" }, pkitest.TrustDomain, "operator"},
		"csr":          {func(b *nodev1.FoundingBundle) { b.OperatorCsr = []byte("x") }, pkitest.TrustDomain, "operator_csr"},
	} {
		cfg := controlplane.Config{StateDir: t.TempDir() + "/state"}
		b := w.bundle()
		c.change(b)
		_, err := controlplane.Found(t.Context(), cfg, b, c.domain)
		if err == nil || !strings.Contains(err.Error(), c.word) {
			t.Errorf("%s: Found = %v, want an error with %q", name, err, c.word)
		}
		if _, err := os.Stat(cfg.StateDir); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: the state directory was made", name)
		}
	}
}

func TestRunWithoutFounding(t *testing.T) {
	t.Parallel()
	err := controlplane.New(controlplane.Config{StateDir: t.TempDir()}).Run(t.Context())
	if !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), "millwright-server init") {
		t.Errorf("Run = %v", err)
	}
}

func TestHealth(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	resp, err := healthgrpc.NewHealthClient(w.conn).Check(w.ctx(), &healthgrpc.HealthCheckRequest{})
	if err != nil || resp.GetStatus() != healthgrpc.HealthCheckResponse_SERVING {
		t.Errorf("Check = %v, %v", resp, err)
	}
	for _, path := range []string{"/healthz", "/readyz"} {
		req, err := http.NewRequestWithContext(w.ctx(), http.MethodGet, "http://"+w.http+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(resp.Body)
		if err := errors.Join(err, resp.Body.Close()); err != nil || resp.StatusCode != http.StatusOK || string(body) != "ok\n" {
			t.Errorf("%s = %d %q, %v", path, resp.StatusCode, body, err)
		}
	}
	// Who watches is told that the server stops before it is gone.
	watch, err := healthgrpc.NewHealthClient(w.conn).Watch(w.ctx(), &healthgrpc.HealthCheckRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if resp, err := watch.Recv(); err != nil || resp.GetStatus() != healthgrpc.HealthCheckResponse_SERVING {
		t.Errorf("Watch = %v, %v", resp, err)
	}
	w.shut()
	if resp, err := watch.Recv(); err != nil || resp.GetStatus() != healthgrpc.HealthCheckResponse_NOT_SERVING {
		t.Errorf("Watch of a server that stops = %v, %v", resp, err)
	}
}

func TestJoinTokens(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	token, err := w.nodes.CreateJoinToken(w.ctx(), &nodev1.CreateJoinTokenRequest{Node: "n1"})
	if err != nil {
		t.Fatal(err)
	}
	if got := w.node("n1").GetState(); got != nodev1.NodeState_NODE_STATE_EXPECTED {
		t.Errorf("before it joins the node is %s", got)
	}
	enrol := agentv1.NewEnrolmentServiceClient(w.dial(nil))
	key, foreign := newIdentityKey(t), newIdentityKey(t)
	for range 2 { // a lost answer loses no node
		resp, err := enrol.Join(w.ctx(), &agentv1.JoinRequest{Token: token.GetToken(), Csr: key.csr})
		if err != nil || resp.GetNode() != "n1" || resp.GetGeneration() != 1 {
			t.Fatalf("Join = %v, %v", resp, err)
		}
	}
	if _, err := enrol.Join(w.ctx(), &agentv1.JoinRequest{Token: token.GetToken(), Csr: foreign.csr}); status.Code(err) != codes.PermissionDenied {
		t.Errorf("Join of another key = %v", err)
	}
	if _, err := enrol.Join(w.ctx(), &agentv1.JoinRequest{Token: "guess", Csr: foreign.csr}); status.Code(err) != codes.PermissionDenied {
		t.Errorf("Join with a guess = %v", err)
	}
	w.restart()
	if _, err := enrol.Join(w.ctx(), &agentv1.JoinRequest{Token: token.GetToken(), Csr: foreign.csr}); status.Code(err) != codes.PermissionDenied {
		t.Errorf("Join of another key after a restart = %v", err)
	}
	data, err := os.ReadFile(w.cfg.StateDir + "/store.db")
	if err != nil || strings.Contains(string(data), token.GetToken()) {
		t.Errorf("the store holds the token itself, %v", err)
	}
	for name, req := range map[string]*nodev1.CreateJoinTokenRequest{"name": {Node: "N 1"}, "no name": {}} {
		if _, err := w.nodes.CreateJoinToken(w.ctx(), req); status.Code(err) != codes.InvalidArgument {
			t.Errorf("%s: CreateJoinToken = %v", name, err)
		}
	}
}

func TestListNodes(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, name := range []string{"c", "a", "b"} {
		w.join(name)
	}
	w.join("b").connect()
	var got []string
	req := &nodev1.ListNodesRequest{PageSize: 2}
	for {
		resp, err := w.nodes.ListNodes(w.ctx(), req)
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range resp.GetNodes() {
			got = append(got, n.GetName())
		}
		if req.PageToken = resp.GetNextPageToken(); req.PageToken == "" {
			break
		}
	}
	if strings.Join(got, "") != "abc" {
		t.Errorf("nodes = %v", got)
	}
	resp, err := w.nodes.ListNodes(w.ctx(), &nodev1.ListNodesRequest{States: []nodev1.NodeState{nodev1.NodeState_NODE_STATE_CONNECTED}})
	if err != nil || len(resp.GetNodes()) != 1 || resp.GetNodes()[0].GetName() != "b" {
		t.Errorf("connected nodes = %v, %v", resp, err)
	}
	if _, err := w.nodes.GetNode(w.ctx(), &nodev1.GetNodeRequest{Name: "x"}); status.Code(err) != codes.NotFound {
		t.Errorf("GetNode(x) = %v", err)
	}
	cluster, err := w.nodes.GetCluster(w.ctx(), &nodev1.GetClusterRequest{})
	if err != nil || len(cluster.GetTrustChain()) != 1 || cluster.GetCaller() != "spiffe://test.example/operator/alice" {
		t.Errorf("GetCluster = %v, %v", cluster, err)
	}
}

// TestFoundAsAnotherUser wants nothing made in the directory of another user:
// root can write there, and the server then could not read it.
func TestFoundAsAnotherUser(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("only root can give a directory away")
	}
	w := &world{t: t, cluster: pkitest.New(t), operatorKey: newIdentityKey(t)}
	cfg := controlplane.Config{StateDir: t.TempDir()}
	if err := os.Chown(cfg.StateDir, 65534, 65534); err != nil {
		t.Fatal(err)
	}
	_, err := controlplane.Found(t.Context(), cfg, w.bundle(), pkitest.TrustDomain)
	if err == nil || !strings.Contains(err.Error(), "runuser -u") {
		t.Errorf("Found in the directory of another user = %v, want the way out", err)
	}
	if made, err := os.ReadDir(cfg.StateDir); err != nil || len(made) > 0 {
		t.Errorf("made %v (%v), want nothing", made, err)
	}
}
