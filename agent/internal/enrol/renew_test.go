package enrol_test

import (
	"context"
	"crypto"
	"errors"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/gpuaas/millwright/agent/internal/enrol"
	"github.com/gpuaas/millwright/pki/trustroot"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// running runs an enrolment until the test ends.
func running(t *testing.T, e *enrol.Enrolment) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := e.Run(ctx); err != nil {
			t.Errorf("run: %v", err)
		}
	})
	t.Cleanup(wg.Wait)
	t.Cleanup(cancel)
}

// renewed waits for the next certificate.
func renewed(t *testing.T, e *enrol.Enrolment, after <-chan struct{}) {
	t.Helper()
	select {
	case <-after:
	case <-time.After(20 * time.Second):
		t.Fatalf("not renewed; it ends at %s", e.NotAfter())
	}
}

func TestRenewal(t *testing.T) {
	a := newAuthority(t)
	a.ttl = 2 * time.Second
	a.start(t, "127.0.0.1:0")
	cfg := config(t)
	e, err := enrol.Join(deadline(t, 20*time.Second), cfg, parse(t, a.message("token-1")))
	if err != nil {
		t.Fatal(err)
	}
	before, err := e.Identity()
	if err != nil {
		t.Fatal(err)
	}
	next := e.Renewed()
	running(t, e)
	renewed(t, e, next)
	next = e.Renewed()
	renewed(t, e, next)
	after, err := e.Identity()
	if err != nil {
		t.Fatal(err)
	}
	if public, ok := after.Key.Public().(interface{ Equal(crypto.PublicKey) bool }); !ok || !public.Equal(before.Key.Public()) {
		t.Error("the key has changed")
	}
	// Certificates end at whole seconds, and two renewals may be within one.
	if after.Leaf().Equal(before.Leaf()) || after.ID != before.ID || after.NotAfter().Before(before.NotAfter()) {
		t.Errorf("from %s to %s", before.NotAfter(), after.NotAfter())
	}
	if stored, err := enrol.Open(cfg); err != nil || stored.NotAfter().Before(after.NotAfter()) {
		t.Errorf("the files hold an older one: %v", err)
	}
}

func withLog(cfg enrol.Config, f func()) enrol.Config {
	cfg.Log = onLog(f)
	return cfg
}

// TestRenewalWaitsForTheServer restarts the server at its address.
func TestRenewalWaitsForTheServer(t *testing.T) {
	a := newAuthority(t)
	a.ttl = 10 * time.Second // with what it is backdated, its half is past
	stop := a.start(t, "127.0.0.1:0")
	cfg := config(t)
	if _, err := enrol.Join(deadline(t, 20*time.Second), cfg, parse(t, a.message("token-1"))); err != nil {
		t.Fatal(err)
	}
	stop()
	failed := make(chan struct{})
	e, err := enrol.Open(withLog(cfg, sync.OnceFunc(func() { close(failed) })))
	if err != nil {
		t.Fatal(err)
	}
	next := e.Renewed()
	running(t, e)
	<-failed
	if id, err := e.Identity(); err != nil || id.ID != nodeID(nodeName) {
		t.Errorf("without a server: %v", err)
	}
	a.start(t, a.addr)
	renewed(t, e, next)
}

func TestEvictedIsNotRenewed(t *testing.T) {
	a := newAuthority(t)
	a.ttl = 10 * time.Second
	a.start(t, "127.0.0.1:0")
	cfg := config(t)
	joined, err := enrol.Join(deadline(t, 20*time.Second), cfg, parse(t, a.message("token-1")))
	if err != nil {
		t.Fatal(err)
	}
	a.set(func(a *authority) { a.deny = status.Error(codes.PermissionDenied, "node was evicted") })
	failed := make(chan struct{})
	e, err := enrol.Open(withLog(cfg, sync.OnceFunc(func() { close(failed) })))
	if err != nil {
		t.Fatal(err)
	}
	running(t, e)
	<-failed
	if !e.NotAfter().Equal(joined.NotAfter()) {
		t.Error("renewed")
	}
}

func TestExtendTrust(t *testing.T) {
	a := newAuthority(t)
	a.start(t, "127.0.0.1:0")
	cfg := config(t)
	e, err := enrol.Join(deadline(t, 20*time.Second), cfg, parse(t, a.message("token-1")))
	if err != nil {
		t.Fatal(err)
	}
	v2, err := a.root.SignUpdate(trustroot.Update{
		IssuedAt: time.Now(), Remove: []*taskv1.RemovedKey{{Id: a.cluster.Controller.KeyID()}},
	}, a.cluster.Recovery)
	if err != nil {
		t.Fatal(err)
	}
	bad := v2.Since(1)
	bad[0].Signatures[0].Signature[0] ^= 1
	if root, err := e.ExtendTrust(bad); !errors.Is(err, trustroot.ErrChain) || root.Version() != 1 || e.Trust().Version() != 1 {
		t.Errorf("altered: %v", err)
	}
	if root, err := e.ExtendTrust(v2.Since(1)); err != nil || root.Hash() != v2.Hash() || e.Trust().Hash() != v2.Hash() {
		t.Errorf("good: %v", err)
	}
	if root, err := e.ExtendTrust(v2.Chain()); err != nil || root.Version() != 2 {
		t.Errorf("the same again: %v", err)
	}
	if again, err := enrol.Open(cfg); err != nil || again.Trust().Hash() != v2.Hash() {
		t.Errorf("after a restart: %v", err)
	}
}
