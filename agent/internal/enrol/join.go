package enrol

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	"github.com/gpuaas/millwright/agent/internal/clock"
	"github.com/gpuaas/millwright/agent/internal/crash"
	"github.com/gpuaas/millwright/pki"
	"github.com/gpuaas/millwright/pki/trustroot"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	"github.com/gpuaas/millwright/proto/rpcerr"
)

const (
	callTimeout = 30 * time.Second
	retryFirst  = 500 * time.Millisecond
	retryMost   = 30 * time.Second
)

// ErrNotJoined is wrapped by the error of [Open] on a host that has not joined.
var ErrNotJoined = errors.New("this host has not joined a cluster")

// Config is what the package needs.
type Config struct {
	// Dir is the identity directory; it is made with mode 0700.
	Dir string
	// Now is the wall clock; nil means time.Now.
	Now func() time.Time
	// Boot is CLOCK_BOOTTIME; nil means the machine's.
	Boot func() time.Duration
	// Log gets a line for each try that did not work, and for each success.
	Log *slog.Logger
	// Server replaces the address of the bundle, as host:port, where it is set.
	Server string
	// DialOptions are added to each connection.
	DialOptions []grpc.DialOption
}

func (c Config) withDefaults() Config {
	if c.Now == nil {
		c.Now = clock.System{}.Now
	}
	if c.Boot == nil {
		c.Boot = clock.System{}.Boot
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return c
}

// Ensure returns the node's enrolment. A host that has not joined joins with
// the bundle at bundlePath, and tries until ctx ends or the server says no. A
// host that has joined, and whose bundle has a token which it has not used, is
// enrolled again: it tries that once, and goes on with what it has when that
// does not work, also when its identity has expired. What the node has begun
// needs no identity to be finished; [Enrolment.Unused] says whether another try
// is worth it.
//
// The error wraps [ErrNotJoined] when there is neither identity nor bundle.
func Ensure(ctx context.Context, cfg Config, bundlePath string) (*Enrolment, error) {
	cfg = cfg.withDefaults()
	have, err := Open(cfg)
	if err != nil && !errors.Is(err, ErrNotJoined) {
		return nil, fmt.Errorf("%w; restore the file, or remove %s and put a bundle, made with millctl node token create, at %s", err, cfg.Dir, bundlePath)
	}
	bundle, bundleErr := ReadBundle(bundlePath)
	switch {
	case have == nil && errors.Is(bundleErr, fs.ErrNotExist):
		return nil, fmt.Errorf("%w: make a bundle with millctl node token create NODE --out join.json and put it at %s", ErrNotJoined, bundlePath)
	case have == nil && bundleErr != nil:
		return nil, bundleErr
	case have == nil:
		warnExposed(cfg, bundle, bundlePath)
		return Join(ctx, cfg, bundle)
	case bundleErr != nil:
		if !errors.Is(bundleErr, fs.ErrNotExist) {
			cfg.Log.Warn("join bundle cannot be read, going on with the identity at hand", "path", bundlePath, "err", bundleErr)
		}
		return have, nil
	case have.node.TokenSHA256 == bundle.tokenSHA256():
		return have, nil
	}
	again, err := joinOnce(ctx, cfg, bundle)
	if err != nil {
		cfg.Log.Warn("new join bundle cannot be used, going on with the identity at hand", "path", bundlePath, "err", err)
		return have, nil
	}
	return again, nil
}

// Unused reports whether the bundle at path can be read and holds a token that
// the node has not used.
func (e *Enrolment) Unused(path string) bool {
	b, err := ReadBundle(path)
	if err != nil {
		return false
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.node.TokenSHA256 != b.tokenSHA256()
}

func warnExposed(cfg Config, b *Bundle, path string) {
	if b.Exposed {
		cfg.Log.Warn("others can read the join bundle and its token: set its mode with chmod 600", "path", path)
	}
}

// Join enrols the host with a bundle. It makes the node's key first and keeps
// it, so that whatever happens to an answer, the next try has the same key and
// the token is good for it again. It tries until ctx ends, the server says no,
// or what the server serves is not what the bundle pins.
//
// A host that belongs to another cluster or has another name is refused: it
// must be wiped by hand first.
func Join(ctx context.Context, cfg Config, b *Bundle) (*Enrolment, error) {
	cfg = cfg.withDefaults()
	wait := retryFirst
	for {
		e, err := joinOnce(ctx, cfg, b)
		if err == nil || permanent(err) {
			return e, err
		}
		if ctx.Err() != nil {
			return nil, fmt.Errorf("join given up: %w", errors.Join(context.Cause(ctx), err))
		}
		pause := rand.N(wait) + wait/10
		cfg.Log.Warn("join did not work, trying again", "server", cfg.address(b.Server), "retry_in_s", pause.Seconds(), "err", err)
		if !clock.Sleep(ctx, pause) {
			return nil, fmt.Errorf("join given up: %w", errors.Join(context.Cause(ctx), err))
		}
		wait = min(2*wait, retryMost)
	}
}

// joinError is an error that another try cannot mend.
type joinError struct{ error }

func (e joinError) Unwrap() error { return e.error }

func permanent(err error) bool {
	var j joinError
	return errors.As(err, &j)
}

func joinOnce(ctx context.Context, cfg Config, b *Bundle) (*Enrolment, error) {
	old, err := belongs(cfg.Dir, b)
	if err != nil {
		return nil, joinError{err}
	}
	key, err := ensureKey(cfg.Dir)
	if err != nil {
		return nil, joinError{err}
	}
	csr, err := pki.NewRequest(key)
	if err != nil {
		return nil, joinError{err}
	}
	hostname, err := os.Hostname()
	if err != nil {
		hostname = "" // it is only for the server's log
	}
	resp, err := callJoin(ctx, cfg, b, &agentv1.JoinRequest{Token: b.token, Csr: csr, Hostname: hostname})
	if err != nil {
		return nil, err
	}
	crash.Point("enrol.join.answered")
	e, err := checkAnswer(cfg, b, old, resp)
	if err != nil {
		return nil, joinError{fmt.Errorf("join %s: the server's answer is not what the bundle pins: %w", cfg.address(b.Server), err)}
	}
	if err := e.write(); err != nil {
		return nil, joinError{err}
	}
	cfg.Log.Info("joined", "node", e.Node(), "cluster", e.node.Cluster, "generation", e.Generation(), "not_after", e.NotAfter())
	return e, nil
}

// belongs returns what the host knows of its membership, if it has one, and an
// error if the bundle is for another.
func belongs(dir string, b *Bundle) (*nodeRecord, error) {
	old, err := readNode(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if cluster := fmt.Sprintf("%x", b.Cluster); old.Cluster != cluster || old.Node != b.ID.Name {
		return nil, fmt.Errorf("this host is node %s of cluster %s, and the bundle is for node %s of cluster %s: to move the host, stop the agent and remove %s and its state",
			old.Node, old.Cluster, b.ID.Name, cluster, dir)
	}
	return old, nil
}

func callJoin(ctx context.Context, cfg Config, b *Bundle, req *agentv1.JoinRequest) (*agentv1.JoinResponse, error) {
	var refused atomic.Pointer[error] // why the server's certificate was not accepted
	tlsConfig := pki.JoinTLS(b.ID.TrustDomain, b.CASHA256, cfg.Now)
	verify := tlsConfig.VerifyConnection
	tlsConfig.VerifyConnection = func(cs tls.ConnectionState) error {
		err := verify(cs)
		if err != nil {
			refused.Store(&err)
		}
		return err
	}
	conn, err := dial(cfg, cfg.address(b.Server), tlsConfig)
	if err != nil {
		return nil, joinError{err}
	}
	defer conn.Close() //nolint:errcheck // nothing is in flight
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	resp, err := agentv1.NewEnrolmentServiceClient(conn).Join(ctx, req)
	if err == nil {
		return resp, nil
	}
	if why := refused.Load(); why != nil {
		return nil, joinError{fmt.Errorf("join %s: %w", cfg.address(b.Server), *why)}
	}
	err = fmt.Errorf("join %s: %w", cfg.address(b.Server), rpcerr.Plain(err))
	final := []codes.Code{codes.PermissionDenied, codes.Unauthenticated, codes.InvalidArgument, codes.Unimplemented}
	if slices.Contains(final, status.Code(err)) {
		return nil, joinError{err}
	}
	return nil, err
}

func dial(cfg Config, address string, tlsConfig *tls.Config) (*grpc.ClientConn, error) {
	opts := append([]grpc.DialOption{grpc.WithTransportCredentials(credentials.NewTLS(tlsConfig))}, cfg.DialOptions...)
	conn, err := grpc.NewClient("passthrough:///"+address, opts...)
	if err != nil {
		return nil, fmt.Errorf("dial %s: %w", address, err)
	}
	return conn, nil
}

// checkAnswer holds the server's answer against the bundle: the node's name and
// key, the CA, and the cluster with the newest trust root that the operator
// knew. A trust root that the host has already is only ever extended.
func checkAnswer(cfg Config, b *Bundle, old *nodeRecord, resp *agentv1.JoinResponse) (*Enrolment, error) {
	if resp.GetNode() != b.ID.Name {
		return nil, fmt.Errorf("the token is for node %q and the bundle for %q", resp.GetNode(), b.ID.Name)
	}
	identity, err := makeIdentity(cfg.Dir, b.ID, resp.GetCertificates(), resp.GetCaCertificates())
	if err != nil {
		return nil, err
	}
	if !slices.ContainsFunc(resp.GetCaCertificates(), func(der []byte) bool { return sha256.Sum256(der) == b.CASHA256 }) {
		return nil, fmt.Errorf("the CA certificates do not contain the pinned one, %x", b.CASHA256)
	}
	root, err := trustroot.Open(resp.GetTrustChain(), b.Cluster[:])
	if err != nil {
		return nil, err
	}
	if !root.Contains(b.TrustRoot[:]) {
		return nil, fmt.Errorf("the trust chain of %d versions does not contain the pinned version %x: the server serves an old or another one", root.Version(), b.TrustRoot)
	}
	if root.TrustDomain() != b.ID.TrustDomain {
		return nil, fmt.Errorf("the trust root is for trust domain %q and the bundle for %q", root.TrustDomain(), b.ID.TrustDomain)
	}
	node := nodeRecord{
		Version: filesVersion, Node: b.ID.Name, TrustDomain: b.ID.TrustDomain, Server: b.Server,
		Cluster: fmt.Sprintf("%x", b.Cluster), Generation: resp.GetGeneration(), Floor: b.Floor,
		JoinTime: cfg.Now().UTC(), TokenSHA256: b.tokenSHA256(),
	}
	if old != nil {
		have, err := readTrust(cfg.Dir, b.Cluster[:])
		if err != nil {
			return nil, err
		}
		if root, err = have.Extend(root.Chain()); err != nil {
			return nil, err
		}
		if old.Floor.After(node.Floor) {
			node.Floor = old.Floor
		}
	}
	return newEnrolment(cfg, node, identity, root), nil
}

// makeIdentity ties served certificates to the node's key and id.
func makeIdentity(dir string, want pki.ID, certs, cas [][]byte) (*pki.Identity, error) {
	key, err := pki.ReadPrivateKey(filepath.Join(dir, keyFile))
	if err != nil {
		return nil, err
	}
	chain, err := pki.ParseCertificatesDER(certs)
	if err != nil {
		return nil, err
	}
	roots, err := pki.ParseCertificatesDER(cas)
	if err != nil {
		return nil, err
	}
	identity, err := pki.NewIdentity(chain, key, roots)
	if err != nil {
		return nil, err
	}
	if identity.ID != want {
		return nil, fmt.Errorf("the certificate is for %s: want %s", identity.ID, want)
	}
	return identity, nil
}

func (c Config) address(ofBundle string) string {
	if c.Server != "" {
		return c.Server
	}
	return ofBundle
}
