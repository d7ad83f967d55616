package intercept

import (
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"

	"github.com/gpuaas/millwright/pki"
)

// The limits of connections and messages. Buffers are small because a server
// holds one connection for each node; a larger one gains nothing for messages
// of this size.
const (
	// MaxRequest is the largest request, in bytes: the 4 MiB of leaves that one
	// CreateTasks may carry, and what is around them.
	MaxRequest = 4<<20 + 512<<10
	// MaxResponse is the largest response, in bytes.
	MaxResponse = 8 << 20
	// MaxStreams is how many RPCs one connection may have open.
	MaxStreams = 64

	bufferSize       = 4 << 10
	maxHeaderList    = 16 << 10
	handshakeTimeout = 10 * time.Second
	unaryTimeout     = time.Minute
	pingAfter        = 30 * time.Second
	pingTimeout      = 10 * time.Second
	minClientPing    = 15 * time.Second
	maxIdle          = 15 * time.Minute
	// maxAge sends new RPCs to a new connection, and so to a new handshake;
	// open streams are not cut by it.
	maxAge = 45 * time.Minute
)

// ServerOptions returns the options of the server's gRPC listener: TLS, the
// limits, and the chain.
func (ch *Chain) ServerOptions(tls pki.TLS) []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.Creds(credentials.NewTLS(tls.Server())),
		grpc.UnaryInterceptor(ch.Unary),
		grpc.StreamInterceptor(ch.Stream),
		grpc.MaxRecvMsgSize(MaxRequest),
		grpc.MaxSendMsgSize(MaxResponse),
		grpc.MaxConcurrentStreams(MaxStreams),
		grpc.MaxHeaderListSize(maxHeaderList),
		grpc.ReadBufferSize(bufferSize),
		grpc.WriteBufferSize(bufferSize),
		grpc.ConnectionTimeout(handshakeTimeout),
		grpc.KeepaliveParams(keepalive.ServerParameters{
			MaxConnectionIdle: maxIdle,
			MaxConnectionAge:  maxAge,
			Time:              pingAfter,
			Timeout:           pingTimeout,
		}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{
			MinTime:             minClientPing,
			PermitWithoutStream: true,
		}),
	}
}
