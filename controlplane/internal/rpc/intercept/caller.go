package intercept

import (
	"context"
	"crypto/x509"
	"fmt"
	"net"
	"time"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"

	"github.com/gpuaas/millwright/pki"
)

// Caller is who makes a call, by its certificate.
type Caller struct {
	// ID is the SPIFFE id; the zero ID for a caller without a certificate.
	ID pki.ID
	// Generation is the enrolment generation in a node's certificate; 0 where
	// it has none, as certificates of another CA do.
	Generation uint64
	// NotAfter is the end of the certificate. Whoever serves a stream ends it
	// then.
	NotAfter time.Time
	// Certificate is the leaf; nil for a caller without one.
	Certificate *x509.Certificate
	// Addr is the caller's network address, for logs and limits.
	Addr string
}

// Name is the SPIFFE id as text, or "anonymous".
func (c Caller) Name() string {
	if c.ID == (pki.ID{}) {
		return "anonymous"
	}
	return c.ID.String()
}

// ended says that the certificate has ended.
func (c Caller) ended() string {
	return fmt.Sprintf("the certificate of %s ended at %s: connect again with a new one", c.Name(), c.NotAfter.Format(time.RFC3339))
}

// limitKey is whom a limit is counted for: an identity, or else a host.
func (c Caller) limitKey() string {
	if c.ID != (pki.ID{}) {
		return c.ID.String()
	}
	host, _, err := net.SplitHostPort(c.Addr)
	if err != nil {
		return c.Addr
	}
	return host
}

type callerKey struct{}

// WithCaller returns a context that carries caller. The chain does it for every
// call; tests of a service do it for themselves.
func WithCaller(ctx context.Context, caller Caller) context.Context {
	return context.WithValue(ctx, callerKey{}, caller)
}

// CallerFrom returns the caller of the RPC that ctx belongs to. Without the
// chain there is none: the zero Caller, which may do nothing.
func CallerFrom(ctx context.Context) Caller {
	caller, _ := ctx.Value(callerKey{}).(Caller)
	return caller
}

// peerCaller reads the caller from the connection. The TLS configuration has
// verified the certificate when the connection was made.
func peerCaller(ctx context.Context) Caller {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return Caller{}
	}
	caller := Caller{}
	if p.Addr != nil {
		caller.Addr = p.Addr.String()
	}
	info, ok := p.AuthInfo.(credentials.TLSInfo)
	if !ok {
		return caller
	}
	id, ok := pki.PeerID(info.State)
	if !ok {
		return caller
	}
	leaf := info.State.PeerCertificates[0]
	caller.ID = id
	caller.Generation = pki.Generation(leaf)
	caller.NotAfter = leaf.NotAfter
	caller.Certificate = leaf
	return caller
}
