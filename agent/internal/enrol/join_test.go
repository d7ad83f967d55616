package enrol_test

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/millwright/agent/internal/enrol"
	"github.com/gpuaas/millwright/pki"
	"github.com/gpuaas/millwright/pki/ca"
	"github.com/gpuaas/millwright/pki/pkitest"
	"github.com/gpuaas/millwright/pki/trustroot"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
)

func TestJoin(t *testing.T) {
	a := newAuthority(t)
	a.start(t, "127.0.0.1:0")
	cfg := config(t)
	m := a.message("token-1")
	if _, err := enrol.Open(cfg); !errors.Is(err, enrol.ErrNotJoined) {
		t.Errorf("before: %v", err)
	}
	e, err := enrol.Join(deadline(t, 20*time.Second), cfg, parse(t, m))
	if err != nil {
		t.Fatal(err)
	}
	again, err := enrol.Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range []*enrol.Enrolment{e, again} {
		id, err := e.Identity()
		if err != nil || id.ID != nodeID(nodeName) || !e.NotAfter().Equal(id.NotAfter()) || !e.NotBefore().Equal(id.NotBefore()) {
			t.Errorf("identity %v, %v", id, err)
		}
		if e.Node() != nodeName || e.Generation() != 1 || e.Server() != a.addr || !e.Floor().Equal(m.GetFloor().AsTime()) ||
			e.Cluster() != a.root.Cluster() || e.Trust().Hash() != a.root.Hash() || e.TrustDomain() != pkitest.TrustDomain {
			t.Errorf("got %s, generation %d of %s", e.Node(), e.Generation(), e.Server())
		}
	}
	if st, err := os.Stat(cfg.Dir); err != nil || st.Mode().Perm() != 0o700 {
		t.Errorf("directory: %v, %v", st.Mode(), err)
	}
	entries, err := os.ReadDir(cfg.Dir)
	if err != nil || len(entries) != 5 {
		t.Errorf("files %v, %v", entries, err)
	}
	for _, entry := range entries {
		path := filepath.Join(cfg.Dir, entry.Name())
		if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v", path, st.Mode(), err)
		}
		if data, err := os.ReadFile(path); err != nil || bytes.Contains(data, []byte("token-1")) {
			t.Errorf("%s holds the token: %v", path, err)
		}
	}
}

// TestLostAnswers loses the answer after the token was used. The node asks
// again with the same key, and is enrolled once.
func TestLostAnswers(t *testing.T) {
	a := newAuthority(t)
	a.lose = 2
	a.start(t, "127.0.0.1:0")
	e, err := enrol.Join(deadline(t, 30*time.Second), config(t), parse(t, a.message("token-1")))
	if err != nil {
		t.Fatal(err)
	}
	if joins, _ := a.counts(); joins != 3 || e.Generation() != 1 {
		t.Errorf("%d joins, generation %d", joins, e.Generation())
	}
}

// TestKeyOutlivesTheProcess gives up a join, as a crash does, and tries anew.
func TestKeyOutlivesTheProcess(t *testing.T) {
	a := newAuthority(t)
	a.lose = 1000
	a.start(t, "127.0.0.1:0")
	cfg := config(t)
	ctx, cancel := context.WithCancelCause(t.Context())
	cfg.Log = onLog(func() { cancel(errors.New("crash")) })
	if _, err := enrol.Join(ctx, cfg, parse(t, a.message("token-1"))); err == nil || !strings.Contains(err.Error(), "crash") {
		t.Fatalf("got %v", err)
	}
	cfg.Log = nil
	a.set(func(a *authority) { a.lose = 0 })
	e, err := enrol.Join(deadline(t, 20*time.Second), cfg, parse(t, a.message("token-1")))
	if err != nil || e.Generation() != 1 {
		t.Errorf("after the crash: %v", err)
	}
}

func TestJoinWaitsForTheServer(t *testing.T) {
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	a := newAuthority(t)
	a.addr = l.Addr().String()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	cfg := config(t)
	bundle := parse(t, a.message("token-1"))
	tried := make(chan struct{})
	cfg.Log = onLog(sync.OnceFunc(func() { close(tried) }))
	var wg sync.WaitGroup
	defer wg.Wait()
	joined := make(chan error, 1)
	ctx := deadline(t, 30*time.Second)
	wg.Go(func() { _, err := enrol.Join(ctx, cfg, bundle); joined <- err })
	<-tried
	a.start(t, a.addr)
	if err := <-joined; err != nil {
		t.Error(err)
	}
}

// TestWrongCA meets a server of another CA. It gets neither token nor request.
func TestWrongCA(t *testing.T) {
	a, other := newAuthority(t), newAuthority(t)
	other.start(t, "127.0.0.1:0")
	a.addr = other.addr
	_, err := enrol.Join(deadline(t, 20*time.Second), config(t), parse(t, a.message("token-1")))
	if !errors.Is(err, pki.ErrCertificate) || !strings.Contains(err.Error(), "no CA certificate with SHA-256") {
		t.Errorf("got %v", err)
	}
	if joins, _ := other.counts(); joins != 0 {
		t.Error("the wrong server was asked")
	}
}

func TestDenied(t *testing.T) {
	a := newAuthority(t)
	a.deny = status.Error(codes.PermissionDenied, "join token has expired")
	a.start(t, "127.0.0.1:0")
	cfg := config(t)
	_, err := enrol.Join(deadline(t, 20*time.Second), cfg, parse(t, a.message("secret-token")))
	if err == nil || !strings.Contains(err.Error(), "join token has expired") || strings.Contains(err.Error(), "secret-token") {
		t.Errorf("got %v", err)
	}
	if joins, _ := a.counts(); joins != 1 {
		t.Errorf("asked %d times: no is no", joins)
	}
}

// TestLies has the pinned server answer with what the bundle does not pin.
func TestLies(t *testing.T) {
	stranger := newAuthority(t)
	for name, lie := range map[string]func(t *testing.T, a *authority, r *agentv1.JoinResponse){
		"other node": func(_ *testing.T, _ *authority, r *agentv1.JoinResponse) { r.Node = "gpu-002" },
		"certificate for another node": func(t *testing.T, a *authority, r *agentv1.JoinResponse) {
			r.Certificates = reissue(t, a.cluster, r, nodeID("gpu-002"))
		},
		"certificate for an operator": func(t *testing.T, a *authority, r *agentv1.JoinResponse) {
			r.Certificates = reissue(t, a.cluster, r, pki.ID{TrustDomain: pkitest.TrustDomain, Role: pki.RoleOperator, Name: nodeName})
		},
		"certificate for another key": func(t *testing.T, a *authority, r *agentv1.JoinResponse) {
			r.Certificates = pki.DERs(a.cluster.Identity(t, pki.RoleNode, nodeName).Chain)
		},
		"certificate of another CA": func(t *testing.T, _ *authority, r *agentv1.JoinResponse) {
			r.Certificates = reissue(t, stranger.cluster, r, nodeID(nodeName))
		},
		"other CA altogether": func(t *testing.T, _ *authority, r *agentv1.JoinResponse) {
			r.Certificates = reissue(t, stranger.cluster, r, nodeID(nodeName))
			r.CaCertificates = pki.DERs(stranger.cluster.CA.Roots())
		},
		"no certificate":  func(_ *testing.T, _ *authority, r *agentv1.JoinResponse) { r.Certificates = nil },
		"no CA":           func(_ *testing.T, _ *authority, r *agentv1.JoinResponse) { r.CaCertificates = nil },
		"no trust chain":  func(_ *testing.T, _ *authority, r *agentv1.JoinResponse) { r.TrustChain = nil },
		"another's chain": func(_ *testing.T, _ *authority, r *agentv1.JoinResponse) { r.TrustChain = stranger.root.Chain() },
		"altered signature": func(_ *testing.T, _ *authority, r *agentv1.JoinResponse) {
			r.TrustChain[1].Signatures[0].Signature[3] ^= 1
		},
		"chain without the newest": func(_ *testing.T, _ *authority, r *agentv1.JoinResponse) {
			r.TrustChain = r.TrustChain[:1]
		},
	} {
		t.Run(name, func(t *testing.T) {
			a := newAuthority(t)
			var err error
			if a.root, err = a.root.SignUpdate(trustroot.Update{IssuedAt: time.Now()}, a.cluster.Recovery); err != nil {
				t.Fatal(err)
			}
			a.lie = func(r *agentv1.JoinResponse) { lie(t, a, r) }
			a.start(t, "127.0.0.1:0")
			cfg := config(t)
			_, err = enrol.Join(deadline(t, 20*time.Second), cfg, parse(t, a.message("token-1")))
			if err == nil || !strings.Contains(err.Error(), "not what the bundle pins") {
				t.Errorf("got %v", err)
			}
			if joins, _ := a.counts(); joins != 1 {
				t.Errorf("asked %d times", joins)
			}
			if entries, err := os.ReadDir(cfg.Dir); err != nil || len(entries) != 1 {
				t.Errorf("written: %v, %v", entries, err)
			}
		})
	}
}

// TestOtherTrustDomain pins a trust root that is for another trust domain.
func TestOtherTrustDomain(t *testing.T) {
	a := newAuthority(t)
	var err error
	a.root, err = trustroot.SignGenesis(trustroot.Genesis{
		TrustDomain: "other.example", IssuedAt: time.Now(), Keys: a.root.Message().GetKeys(),
	}, a.cluster.Recovery)
	if err != nil {
		t.Fatal(err)
	}
	a.start(t, "127.0.0.1:0")
	_, err = enrol.Join(deadline(t, 20*time.Second), config(t), parse(t, a.message("token-1")))
	if err == nil || !strings.Contains(err.Error(), "other.example") {
		t.Errorf("got %v", err)
	}
}

// reissue certifies the key of an answer for another id or by another CA.
func reissue(t *testing.T, c *pkitest.Cluster, r *agentv1.JoinResponse, id pki.ID) [][]byte {
	t.Helper()
	certs, err := pki.ParseCertificatesDER(r.GetCertificates())
	if err != nil {
		t.Fatal(err)
	}
	key, ok := certs[0].PublicKey.(*ecdsa.PublicKey)
	if !ok {
		t.Fatalf("the key is a %T", certs[0].PublicKey)
	}
	chain, err := c.CA.Issue(ca.Request{ID: id, PublicKey: key, TTL: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	return pki.DERs(chain)
}

// TestOneClusterOneName gives a host that has joined a bundle for another.
func TestOneClusterOneName(t *testing.T) {
	a, other := newAuthority(t), newAuthority(t)
	a.start(t, "127.0.0.1:0")
	other.start(t, "127.0.0.1:0")
	cfg := config(t)
	if _, err := enrol.Join(deadline(t, 20*time.Second), cfg, parse(t, a.message("token-1"))); err != nil {
		t.Fatal(err)
	}
	renamed := a.message("token-2")
	renamed.Node = "gpu-002"
	for name, m := range map[string]*agentv1.JoinBundle{"other cluster": other.message("token-1"), "other name": renamed} {
		if _, err := enrol.Join(deadline(t, 20*time.Second), cfg, parse(t, m)); err == nil || !strings.Contains(err.Error(), "to move the host") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if e, err := enrol.Open(cfg); err != nil || e.Cluster() != a.root.Cluster() || e.Node() != nodeName {
		t.Errorf("after it: %v", err)
	}
}

func TestEnsure(t *testing.T) {
	a := newAuthority(t)
	a.start(t, "127.0.0.1:0")
	cfg := config(t)
	path := filepath.Join(t.TempDir(), "join.json")
	ensure := func() *enrol.Enrolment {
		t.Helper()
		e, err := enrol.Ensure(deadline(t, 20*time.Second), cfg, path)
		if err != nil {
			t.Fatal(err)
		}
		return e
	}
	joins := func(want int) {
		t.Helper()
		if got, _ := a.counts(); got != want {
			t.Errorf("%d joins, want %d", got, want)
		}
	}
	if _, err := enrol.Ensure(t.Context(), cfg, path); !errors.Is(err, enrol.ErrNotJoined) || !strings.Contains(err.Error(), "node token create") {
		t.Errorf("neither identity nor bundle: %v", err)
	}
	first := a.message("token-1")
	put(t, path, first)
	if e := ensure(); e.Generation() != 1 {
		t.Errorf("generation %d", e.Generation())
	}
	ensure() // the bundle was used
	joins(1)
	if err := os.WriteFile(path, []byte("garbage"), 0o600); err != nil {
		t.Fatal(err)
	}
	ensure() // a bad bundle does not take away what there is
	joins(1)

	second := a.message("token-2")
	second.Floor = timestamppb.New(first.GetFloor().AsTime().Add(-time.Hour))
	put(t, path, second)
	if e := ensure(); e.Generation() != 2 || !e.Floor().Equal(first.GetFloor().AsTime()) {
		t.Errorf("new bundle: generation %d, floor %s", e.Generation(), e.Floor())
	}
	joins(2)

	a.set(func(a *authority) { a.deny = status.Error(codes.PermissionDenied, "no") })
	put(t, path, a.message("token-3"))
	if e := ensure(); e.Generation() != 2 {
		t.Errorf("denied: generation %d", e.Generation())
	}
	joins(3)

	// Expired and denied: what the node has begun is finished all the same, and
	// the bundle is still good for another try.
	later := time.Now().Add(2 * time.Hour)
	cfg.Now = func() time.Time { return later }
	if e := ensure(); e.Generation() != 2 || !e.Unused(path) {
		t.Errorf("expired and denied: generation %d, bundle unused %v", e.Generation(), e.Unused(path))
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if e := ensure(); e.NotAfter().After(later) {
		t.Error("not expired")
	}

	// Damaged: a person has to decide, and is told how.
	if err := os.WriteFile(filepath.Join(cfg.Dir, "svid.pem"), []byte("garbage"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := enrol.Ensure(t.Context(), cfg, path); err == nil || !strings.Contains(err.Error(), "remove "+cfg.Dir) {
		t.Errorf("a damaged certificate: %v, want the way out", err)
	}
}

// TestRejoinKeepsTheTrustRoot enrols a host anew whose trust root is newer than
// what is served, and one that meets a fork.
func TestRejoinKeepsTheTrustRoot(t *testing.T) {
	a := newAuthority(t)
	a.start(t, "127.0.0.1:0")
	cfg := config(t)
	old := a.root
	newer, err := old.SignUpdate(trustroot.Update{IssuedAt: time.Now()}, a.cluster.Recovery)
	if err != nil {
		t.Fatal(err)
	}
	a.root = newer
	if _, err := enrol.Join(deadline(t, 20*time.Second), cfg, parse(t, a.message("token-1"))); err != nil {
		t.Fatal(err)
	}
	a.set(func(a *authority) { a.root = old })
	e, err := enrol.Join(deadline(t, 20*time.Second), cfg, parse(t, a.message("token-2")))
	if err != nil || e.Trust().Hash() != newer.Hash() {
		t.Errorf("older chain served: %v", err)
	}
	fork, err := old.SignUpdate(trustroot.Update{IssuedAt: time.Now().Add(time.Second)}, a.cluster.Recovery)
	if err != nil {
		t.Fatal(err)
	}
	a.set(func(a *authority) { a.root = fork })
	if _, err := enrol.Join(deadline(t, 20*time.Second), cfg, parse(t, a.message("token-3"))); !errors.Is(err, trustroot.ErrFork) {
		t.Errorf("fork served: %v", err)
	}
}
