package workload_test

import (
	"context"
	"crypto/x509"
	"errors"
	"log/slog"
	"net"
	"path/filepath"
	"sync"
	"testing"
	"time"

	workloadpb "github.com/spiffe/go-spiffe/v2/proto/spiffe/workload"
	"google.golang.org/grpc"

	"github.com/gpuaas/millwright/pki"
	"github.com/gpuaas/millwright/pki/pkitest"
	"github.com/gpuaas/millwright/pki/workload"
)

// agent is a stand-in for a SPIRE agent: it serves the Workload API's protocol
// on a socket, and what it is told.
type agent struct {
	workloadpb.UnimplementedSpiffeWorkloadAPIServer
	updates chan *pki.Identity
}

// FetchX509SVID streams the identities that it is told.
func (a *agent) FetchX509SVID(_ *workloadpb.X509SVIDRequest, stream workloadpb.SpiffeWorkloadAPI_FetchX509SVIDServer) error {
	for {
		select {
		case <-stream.Context().Done():
			return stream.Context().Err()
		case id := <-a.updates:
			if err := stream.Send(response(id)); err != nil {
				return err
			}
		}
	}
}

func response(id *pki.Identity) *workloadpb.X509SVIDResponse {
	key, err := x509.MarshalPKCS8PrivateKey(id.Key)
	if err != nil {
		panic(err)
	}
	return &workloadpb.X509SVIDResponse{Svids: []*workloadpb.X509SVID{{
		SpiffeId: id.ID.String(), X509Svid: id.Leaf().Raw, X509SvidKey: key, Bundle: id.Roots[0].Raw,
	}}}
}

func TestSource(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "api.sock")
	l, err := new(net.ListenConfig).Listen(t.Context(), "unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	a := &agent{updates: make(chan *pki.Identity)}
	server := grpc.NewServer()
	workloadpb.RegisterSpiffeWorkloadAPIServer(server, a)
	served := make(chan error, 1)
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { served <- server.Serve(l) })

	source := workload.New(workload.Config{Addr: "unix://" + socket, Log: slog.New(slog.DiscardHandler)})
	if _, err := source.Identity(); !errors.Is(err, pki.ErrNoIdentity) {
		t.Errorf("before it runs: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ran := make(chan error, 1)
	wg.Go(func() { ran <- source.Run(ctx) })

	cluster := pkitest.New(t)
	first, second := cluster.Identity(t, pki.RoleNode, "a"), cluster.Identity(t, pki.RoleNode, "a")
	a.updates <- first
	eventually(t, source, first)
	a.updates <- second
	eventually(t, source, second)
	server.Stop() // the API goes away; the identity stays
	eventually(t, source, second)
	cancel()
	if err := <-ran; err != nil {
		t.Errorf("run: %v", err)
	}
	if err := <-served; err != nil {
		t.Errorf("serve: %v", err)
	}
}

func eventually(t *testing.T, source *workload.Source, want *pki.Identity) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); <-tick.C {
		if got, err := source.Identity(); err == nil && got.Leaf().Equal(want.Leaf()) {
			return
		}
	}
	t.Fatal("the identity does not come")
}

func TestBadAddress(t *testing.T) {
	source := workload.New(workload.Config{Addr: "nonsense", Log: slog.New(slog.DiscardHandler)})
	if err := source.Run(t.Context()); err == nil {
		t.Error("an address that cannot be used is no error")
	}
}
