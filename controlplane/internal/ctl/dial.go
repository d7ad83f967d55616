package ctl

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"

	"github.com/gpuaas/millwright/controlplane/internal/ctl/home"
	"github.com/gpuaas/millwright/pki"
	healthv1 "github.com/gpuaas/millwright/proto/millwright/health/v1"
	nodev1 "github.com/gpuaas/millwright/proto/millwright/node/v1"
	secretv1 "github.com/gpuaas/millwright/proto/millwright/secret/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

const (
	// callTimeout bounds each call that is no stream.
	callTimeout = 30 * time.Second
	dialTimeout = 10 * time.Second
	// maxMessage is more than any answer: a page of 1,000 tasks with their specs.
	maxMessage = 64 << 20
)

// retries makes gRPC try a call again when no answer came. Every call may be
// repeated: creating tasks because of its request id, the others by nature.
const retries = `{"methodConfig":[{"name":[{}],"retryPolicy":{"maxAttempts":5,"initialBackoff":"0.2s",` +
	`"maxBackoff":"2s","backoffMultiplier":2,"retryableStatusCodes":["UNAVAILABLE"]}}]}`

// client is a connection to the server of one context.
type client struct {
	tasks   taskv1.TaskServiceClient
	nodes   nodev1.NodeServiceClient
	health  healthv1.HealthServiceClient
	secrets secretv1.SecretServiceClient
	conn    *grpc.ClientConn
	home    *home.Home
	at      *home.Context
	server  string
	log     *dialLog
}

// dial makes the client. It does not connect: the first call does.
func dial(h *home.Home, at *home.Context, now func() time.Time) (*client, error) {
	log := &dialLog{}
	server := at.File.GetServer()
	conn, err := grpc.NewClient("passthrough:///"+server,
		grpc.WithTransportCredentials(&recorder{TransportCredentials: credentials.NewTLS(at.TLS(now)), log: log}),
		grpc.WithContextDialer(log.dial),
		grpc.WithDefaultServiceConfig(retries),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage)),
		grpc.WithUnaryInterceptor(bounded),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 2 * time.Second},
			MinConnectTimeout: dialTimeout,
		}),
	)
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", server, err)
	}
	return &client{
		tasks: taskv1.NewTaskServiceClient(conn), nodes: nodev1.NewNodeServiceClient(conn), health: healthv1.NewHealthServiceClient(conn), secrets: secretv1.NewSecretServiceClient(conn),
		conn: conn, home: h, at: at, server: server, log: log,
	}, nil
}

// bounded gives a call without a deadline of its own one.
func bounded(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	return invoke(ctx, method, req, reply, cc, opts...)
}

// dialLog remembers why the newest connection was not made or was lost, since
// gRPC tells it only as text.
type dialLog struct {
	mu  sync.Mutex // guards err
	err error
}

func (l *dialLog) set(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.err = err
}

func (l *dialLog) dial(ctx context.Context, address string) (net.Conn, error) {
	conn, err := (&net.Dialer{Timeout: dialTimeout}).DialContext(ctx, "tcp", address)
	if err != nil {
		l.set(err)
	}
	return conn, err
}

// recorder is transport credentials that note how a handshake failed.
type recorder struct {
	credentials.TransportCredentials
	log *dialLog
}

// ClientHandshake notes the outcome of the handshake. With TLS 1.3 a server's
// refusal of the certificate arrives only when something is read.
func (r *recorder) ClientHandshake(ctx context.Context, authority string, raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn, info, err := r.TransportCredentials.ClientHandshake(ctx, authority, raw)
	r.log.set(err)
	if err != nil {
		return nil, nil, err
	}
	return &readLog{Conn: conn, log: r.log}, info, nil
}

// Clone returns a copy that notes in the same place.
func (r *recorder) Clone() credentials.TransportCredentials {
	return &recorder{TransportCredentials: r.TransportCredentials.Clone(), log: r.log}
}

// readLog is a connection that notes why reading ended.
type readLog struct {
	net.Conn
	log *dialLog
}

func (c *readLog) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if err != nil && !errors.Is(err, net.ErrClosed) {
		c.log.set(err)
	}
	return n, err
}

// trouble is why the newest connection was not made or was lost.
func (c *client) trouble() error {
	c.log.mu.Lock()
	defer c.log.mu.Unlock()
	return c.log.err
}

// unreachable names the address, the likely cause and the way out.
func (c *client) unreachable(doing string, cause error) error {
	code, why := exitError, "check the address in the context and the network"
	var dns *net.DNSError
	var op *net.OpError
	var authority x509.UnknownAuthorityError
	var invalid x509.CertificateInvalidError
	var record tls.RecordHeaderError
	switch {
	case errors.As(cause, &dns):
		why = "the name is not known; check the address in the context and the DNS"
	case errors.Is(cause, syscall.ECONNREFUSED):
		why = "nothing listens there; is millwright-server running, and is the port right?"
	case errors.Is(cause, context.DeadlineExceeded), isTimeout(cause):
		why = "nothing answers there; check the address, the route and the firewall"
	case errors.As(cause, &authority):
		why = "the server's certificate is of a CA that is not this context's; either this is another cluster's server, or someone is in between. Do not go on before you know; the CA is in the context file of millwright-server init"
	case errors.As(cause, &invalid) && invalid.Reason == x509.Expired:
		why = "the server's certificate is not valid now; check both clocks, then the server's log"
	case errors.As(cause, &record):
		why = "it is not a TLS port; check the port"
	case errors.Is(cause, pki.ErrCertificate):
		why = "what answers there is not a server of this context's cluster; check the address"
	case errors.As(cause, &op) && op.Op == "remote error":
		code, why = exitDenied, "the server refuses this operator's certificate; see its dates with: millctl whoami --offline"
	}
	return &failure{code: code, err: fmt.Errorf("%s: connect to %s: %w\n%s", doing, c.server, cause, why)}
}

func isTimeout(err error) bool {
	var n net.Error
	return errors.As(err, &n) && n.Timeout()
}
