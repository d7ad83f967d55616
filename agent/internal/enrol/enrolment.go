package enrol

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"path/filepath"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/gpuaas/millwright/agent/internal/clock"
	"github.com/gpuaas/millwright/agent/internal/crash"
	"github.com/gpuaas/millwright/pki"
	"github.com/gpuaas/millwright/pki/trustroot"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

const (
	// lookAgain is how often the certificate's age is looked at: a timer of
	// half a day would not notice that the machine slept or its clock was set.
	lookAgain  = time.Minute
	renewFirst = time.Second
	renewMost  = 5 * time.Minute
)

// Enrolment is what a node got by joining. It is a [pki.Source], and safe for
// concurrent use. While [Enrolment.Run] runs it renews its certificate; without
// a server it keeps what it has.
type Enrolment struct {
	cfg  Config
	node nodeRecord

	mu       sync.RWMutex
	identity *pki.Identity
	root     *trustroot.Root
	renewed  chan struct{} // closed, and replaced, when identity changes

	refused chan struct{} // holds a token once the server has refused the certificate

	extend sync.Mutex // held while the trust root is extended
}

func newEnrolment(cfg Config, node nodeRecord, identity *pki.Identity, root *trustroot.Root) *Enrolment {
	return &Enrolment{cfg: cfg, node: node, identity: identity, root: root, renewed: make(chan struct{}), refused: make(chan struct{}, 1)}
}

// Open reads the enrolment of a host that has joined. An expired certificate is
// no error: see [Enrolment.NotAfter]. The error wraps [ErrNotJoined] where the
// host has not joined.
func Open(cfg Config) (*Enrolment, error) {
	cfg = cfg.withDefaults()
	node, err := readNode(cfg.Dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w: %w", ErrNotJoined, err)
	}
	if err != nil {
		return nil, fmt.Errorf("read identity: %w", err)
	}
	cluster, err := node.cluster()
	if err != nil {
		return nil, fmt.Errorf("read identity: %s: %w", filepath.Join(cfg.Dir, nodeFile), err)
	}
	root, err := readTrust(cfg.Dir, cluster)
	if err != nil {
		return nil, fmt.Errorf("read identity: %w", err)
	}
	path := func(name string) string { return filepath.Join(cfg.Dir, name) }
	identity, err := pki.ReadIdentity(path(svidFile), path(keyFile), path(caFile))
	if err != nil {
		return nil, fmt.Errorf("read identity: %w", err)
	}
	want := pki.ID{TrustDomain: node.TrustDomain, Role: pki.RoleNode, Name: node.Node}
	if identity.ID != want {
		return nil, fmt.Errorf("read identity: %s is of %s, and this host is %s", path(svidFile), identity.ID, want)
	}
	return newEnrolment(cfg, *node, identity, root), nil
}

// write makes the enrolment durable; node.json, which says that the host has
// joined, comes last.
func (e *Enrolment) write() error {
	if err := writeTrust(e.cfg.Dir, e.root); err != nil {
		return err
	}
	crash.Point("enrol.trust.written")
	if err := e.writeIdentity(e.identity); err != nil {
		return err
	}
	crash.Point("enrol.identity.written")
	if err := writeJSON(filepath.Join(e.cfg.Dir, nodeFile), &e.node); err != nil {
		return err
	}
	crash.Point("enrol.node.written")
	return nil
}

func (e *Enrolment) writeIdentity(id *pki.Identity) error {
	if err := writeFile(filepath.Join(e.cfg.Dir, caFile), pki.MarshalCertificates(id.Roots)); err != nil {
		return err
	}
	return writeFile(filepath.Join(e.cfg.Dir, svidFile), pki.MarshalCertificates(id.Chain))
}

// Identity returns the certificate with its key, also when it has expired.
func (e *Enrolment) Identity() (*pki.Identity, error) {
	e.mu.RLock()
	defer e.mu.RUnlock()
	return e.identity, nil
}

// TLS returns the configuration for connections to the server.
func (e *Enrolment) TLS() *tls.Config {
	return pki.TLS{Source: e, TrustDomain: e.node.TrustDomain, Now: e.cfg.Now}.Client()
}

// Node is the node's name.
func (e *Enrolment) Node() string { return e.node.Node }

// TrustDomain is the SPIFFE trust domain.
func (e *Enrolment) TrustDomain() string { return e.node.TrustDomain }

// Generation is the enrolment generation.
func (e *Enrolment) Generation() uint64 { return e.node.Generation }

// Server is the server's address, as host:port.
func (e *Enrolment) Server() string { return e.cfg.address(e.node.Server) }

// Floor is the bundle's floor: nothing issued at or before it is carried out.
// The journal may hold a later one.
func (e *Enrolment) Floor() time.Time { return e.node.Floor }

// Cluster is the cluster's id.
func (e *Enrolment) Cluster() [sha256.Size]byte { return e.Trust().Cluster() }

// NotBefore is the beginning of the certificate's validity.
func (e *Enrolment) NotBefore() time.Time {
	e.mu.RLock()
	defer e.mu.RUnlock()
	return e.identity.NotBefore()
}

// NotAfter is the end of the certificate's validity.
func (e *Enrolment) NotAfter() time.Time {
	e.mu.RLock()
	defer e.mu.RUnlock()
	return e.identity.NotAfter()
}

// Renewed returns a channel that is closed once the certificate is replaced.
// It is taken before the certificate is looked at, so that none is missed.
func (e *Enrolment) Renewed() <-chan struct{} {
	e.mu.RLock()
	defer e.mu.RUnlock()
	return e.renewed
}

// Trust is the newest trust root that the node has.
func (e *Enrolment) Trust() *trustroot.Root {
	e.mu.RLock()
	defer e.mu.RUnlock()
	return e.root
}

// ExtendTrust verifies updates of the trust root, the oldest first, and makes
// them durable before it puts them in force. Versions that the node has are
// skipped. The error wraps [trustroot.ErrChain] when they cannot be trusted;
// then the root stays as it was.
func (e *Enrolment) ExtendTrust(updates []*taskv1.Envelope) (*trustroot.Root, error) {
	e.extend.Lock()
	defer e.extend.Unlock()
	have := e.Trust()
	next, err := have.Extend(updates)
	if err != nil || next.Version() == have.Version() {
		return have, err
	}
	if err := writeTrust(e.cfg.Dir, next); err != nil {
		return have, err
	}
	e.mu.Lock()
	e.root = next
	e.mu.Unlock()
	return next, nil
}

// Run renews the certificate once about half of its life has passed, and goes
// on trying, ever more slowly, where that does not work. It returns nil once
// ctx has ended.
func (e *Enrolment) Run(ctx context.Context) error {
	wait := renewFirst
	due, dueBoot := e.renewAt(e.NotBefore()), e.renewBoot()
	refused := false
	for {
		// By whichever clock is first: the wall clock may be wrong, and the time
		// since boot begins anew.
		left := min(due.Sub(e.cfg.Now()), dueBoot-e.cfg.Boot())
		if left > 0 && !refused {
			var ok bool
			if refused, ok = e.rest(ctx, min(left, lookAgain)); !ok {
				return nil
			}
			continue
		}
		err := e.extendLife(ctx, refused)
		if ctx.Err() != nil {
			return nil //nolint:nilerr // it was told to end
		}
		if err == nil {
			wait, due, dueBoot, refused = renewFirst, e.renewAt(e.cfg.Now()), e.renewBoot(), false
			e.cfg.Log.Info("certificate renewed", "node", e.Node(), "not_after", e.NotAfter())
			continue
		}
		e.logRenewal(err)
		if !clock.Sleep(ctx, rand.N(wait)+wait/2) {
			return nil
		}
		wait = min(2*wait, renewMost)
	}
}

// rest waits, and reports whether the server has refused the certificate
// meanwhile. ok is false when ctx has ended.
func (e *Enrolment) rest(ctx context.Context, d time.Duration) (refused, ok bool) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false, false
	case <-e.refused:
		return true, true
	case <-timer.C:
		return false, true
	}
}

// extendLife renews the certificate while it is good, and re-keys once it has
// ended, by this clock or by the server's.
func (e *Enrolment) extendLife(ctx context.Context, refused bool) error {
	if !e.cfg.Now().Before(e.NotAfter()) {
		return e.rekey(ctx)
	}
	err := e.renew(ctx)
	if err == nil || !refused || ctx.Err() != nil {
		return err
	}
	return e.rekey(ctx)
}

// renewBoot is half of the certificate's life from now, by CLOCK_BOOTTIME, a
// tenth of it earlier or later.
func (e *Enrolment) renewBoot() time.Duration {
	life := max(e.NotAfter().Sub(e.NotBefore()), renewFirst)
	return e.cfg.Boot() + life/2 - life/10 + rand.N(life/5)
}

// renewAt is half of the certificate's life as counted from a time, a tenth of
// it earlier or later, so that nodes which joined together do not renew
// together. A certificate that is of no use by the node's clock is not asked
// for again at once.
func (e *Enrolment) renewAt(from time.Time) time.Time {
	life := e.NotAfter().Sub(from)
	if life < renewFirst {
		return from.Add(renewFirst)
	}
	return from.Add(life/2 - life/10 + rand.N(life/5))
}

func (e *Enrolment) logRenewal(err error) {
	if e.cfg.Now().Before(e.NotAfter()) {
		e.cfg.Log.Warn("certificate not renewed, trying again", "node", e.Node(), "not_after", e.NotAfter(), "err", err)
		return
	}
	e.cfg.Log.Error("certificate not replaced", "why", e.Ended(), "node", e.Node(), "err", err)
}

// renew asks for a new certificate for the same key, proving the current one.
func (e *Enrolment) renew(ctx context.Context) error {
	current, err := e.Identity()
	if err != nil {
		return err
	}
	csr, err := pki.NewRequest(current.Key)
	if err != nil {
		return err
	}
	conn, err := dial(e.cfg, e.Server(), e.TLS())
	if err != nil {
		return err
	}
	defer conn.Close() //nolint:errcheck // nothing is in flight
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	resp, err := agentv1.NewEnrolmentServiceClient(conn).Renew(ctx, &agentv1.RenewRequest{Csr: csr})
	if status.Code(err) == codes.PermissionDenied {
		return fmt.Errorf("renew at %s: the server denies it: %w", e.Server(), err)
	}
	if err != nil {
		return fmt.Errorf("renew at %s: %w", e.Server(), err)
	}
	if err := e.replace(current, resp.GetCertificates(), resp.GetCaCertificates()); err != nil {
		return fmt.Errorf("renew at %s: the answer cannot be used: %w", e.Server(), err)
	}
	return nil
}

// replace puts served certificates in the place of the current ones.
func (e *Enrolment) replace(current *pki.Identity, certs, cas [][]byte) error {
	next, err := makeIdentity(e.cfg.Dir, current.ID, certs, cas)
	if err != nil {
		return err
	}
	if err := e.writeIdentity(next); err != nil {
		return err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.identity = next
	close(e.renewed)
	e.renewed = make(chan struct{})
	return nil
}

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }
