package fleet_test

import (
	"context"
	"crypto/sha256"
	"errors"
	"log/slog"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/gpuaas/millwright/controlplane/internal/dispatch"
	"github.com/gpuaas/millwright/controlplane/internal/eventlog"
	"github.com/gpuaas/millwright/controlplane/internal/fleet"
	"github.com/gpuaas/millwright/controlplane/internal/rpc/enrolv1"
	"github.com/gpuaas/millwright/controlplane/internal/rpc/intercept"
	"github.com/gpuaas/millwright/controlplane/internal/store/boltstore"
)

// hastyLog is a log whose caller is gone as soon as something is committed.
type hastyLog struct {
	*eventlog.Log
	gone context.CancelFunc
}

// Commit implements [fleet.Log].
func (l *hastyLog) Commit(ctx context.Context, decide func(*eventlog.Tx) error) error {
	err := l.Log.Commit(ctx, decide)
	l.gone()
	return err
}

// cuts counts the sessions that were cut.
type cuts struct{ n int }

// Cut implements [fleet.Sessions].
func (c *cuts) Cut(string, string, string) { c.n++ }

// Contact implements [fleet.Sessions].
func (c *cuts) Contact(string) (dispatch.Contact, bool) { return dispatch.Contact{}, false }

// What was committed must count at once, also for a caller that did not wait
// for the answer: else an evicted node stays a member until the next start.
func TestMembershipChangesAlthoughTheCallerIsGone(t *testing.T) {
	t.Parallel()
	db, err := boltstore.Create(filepath.Join(t.TempDir(), "store.db"))
	if err != nil {
		t.Fatal(err)
	}
	running, stop := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { _ = db.Run(running) })
	t.Cleanup(func() {
		stop()
		wg.Wait()
		_ = db.Close()
	})
	log, sessions := &hastyLog{Log: eventlog.New(eventlog.Config{Writer: db})}, new(cuts)
	f := fleet.New(fleet.Config{Log: log, Reader: db, Sessions: sessions, Logger: slog.New(slog.DiscardHandler),
		Actor: "server", NodeID: func(name string) string { return "spiffe://test/node/" + name }})
	hasty := func() context.Context {
		ctx, cancel := context.WithCancel(t.Context())
		log.gone = cancel
		return ctx
	}
	token, _, err := f.CreateToken(hasty(), "alice", "n1", time.Hour, false)
	if err != nil {
		t.Fatalf("CreateToken = %v", err)
	}
	join := enrolv1.Redemption{TokenSHA256: enrolv1.TokenSHA256(token), KeySHA256: sha256.Sum256([]byte("key")), Now: time.Now()}
	if _, err := f.RedeemToken(hasty(), join); err != nil {
		t.Errorf("RedeemToken = %v", err)
	}
	if err := f.CheckMember(t.Context(), "n1", 1); err != nil {
		t.Errorf("the node that joined: %v", err)
	}
	if err := f.Evict(hasty(), "alice", "n1", ""); err != nil {
		t.Errorf("Evict = %v", err)
	}
	if err := f.CheckMember(t.Context(), "n1", 1); !errors.Is(err, intercept.ErrNotMember) {
		t.Errorf("the node that was evicted: %v", err)
	}
	if sessions.n != 2 {
		t.Errorf("%d sessions were cut, want 2: at the join and at the eviction", sessions.n)
	}
}
