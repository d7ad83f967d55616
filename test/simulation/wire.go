package simulation

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/millwright/controlplane"
)

// packet is one message on its way, or the end of its direction.
type packet struct {
	message proto.Message
	end     error // set: nothing follows
}

// stream is one stream of a node. Its two directions are queues that only the
// driver empties; each is in order, as on a TCP connection.
type stream struct {
	w      *world
	node   *node
	name   string
	method string
	life   int // of its node, when it was opened

	mu       sync.Mutex
	up, down []packet // guarded by mu; sent, and not delivered
	upEnd    bool     // guarded by mu; nothing more is taken from the client
	hungUp   bool     // guarded by mu; the client listens no more
	downEnd  bool     // guarded by mu; the server sends nothing more
	blackout bool     // guarded by mu; the end that the server made is lost

	toClient, toServer chan packet
	server             context.CancelCauseFunc // nil until the server has heard of it; driver only
	clientGone         bool                    // the end was delivered to the client; driver only
	welcomed           bool                    // the server's Welcome was delivered to the client; driver only
	serverGone         bool                    // the end was delivered to the server; driver only
}

var errCut = status.Error(codes.Unavailable, "the connection was cut")

func (s *stream) sendUp(p packet) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.upEnd {
		return io.EOF
	}
	s.upEnd = p.end != nil
	s.up = append(s.up, p)
	return nil
}

func (s *stream) sendDown(p packet) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.downEnd {
		return errCut
	}
	s.downEnd = p.end != nil
	if p.end != nil && s.blackout {
		return nil
	}
	s.down = append(s.down, p)
	return nil
}

// conn is a node's connection.
type conn struct {
	w     *world
	node  *node
	alive *process

	mu      sync.Mutex
	closed  bool
	streams []*stream
}

// Invoke refuses: an agent that has joined makes no single call here.
func (c *conn) Invoke(context.Context, string, any, any, ...grpc.CallOption) error {
	return status.Error(codes.Unimplemented, "no single calls in the simulation")
}

// NewStream opens a stream. The server hears of it with its first message.
func (c *conn) NewStream(ctx context.Context, _ *grpc.StreamDesc, method string, _ ...grpc.CallOption) (grpc.ClientStream, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed || c.alive.dead() {
		return nil, errCut
	}
	s := c.w.newStream(c.node, method)
	c.streams = append(c.streams, s)
	return &clientStream{stream: s, ctx: ctx, stop: context.AfterFunc(ctx, func() { s.hangUp() })}, nil
}

// Close ends all streams.
func (c *conn) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	for _, s := range c.streams {
		s.hangUp()
	}
	return nil
}

// hangUp ends the client's direction, and gives the client no more.
func (s *stream) hangUp() {
	s.mu.Lock()
	again := s.hungUp
	s.hungUp = true
	s.mu.Unlock()
	if again {
		return
	}
	_ = s.sendUp(packet{end: status.Error(codes.Canceled, "the client hung up")})
	s.toClient <- packet{end: status.Error(codes.Canceled, "hung up")}
}

type clientStream struct {
	*stream
	ctx  context.Context // of the call, as grpc keeps it
	stop func() bool
}

func (c *clientStream) Header() (metadata.MD, error) { return nil, nil }
func (c *clientStream) Trailer() metadata.MD         { return nil }
func (c *clientStream) CloseSend() error             { return nil }
func (c *clientStream) Context() context.Context     { return c.ctx }

func (c *clientStream) SendMsg(m any) error {
	return c.sendUp(packet{message: proto.CloneOf(m.(proto.Message))})
}

func (c *clientStream) RecvMsg(m any) error {
	p := <-c.toClient
	if p.end != nil {
		c.toClient <- p
		c.stop()
		return p.end
	}
	return transfer(m, p.message)
}

// transfer copies a message through its bytes, as a wire does.
func transfer(to any, from proto.Message) error {
	b, err := proto.Marshal(from)
	if err != nil {
		return err
	}
	return proto.Unmarshal(b, to.(proto.Message))
}

type serverStream struct {
	*stream
	ctx context.Context // of the call, as grpc keeps it
}

func (s *serverStream) SetHeader(metadata.MD) error  { return nil }
func (s *serverStream) SendHeader(metadata.MD) error { return nil }
func (s *serverStream) SetTrailer(metadata.MD)       {}
func (s *serverStream) Context() context.Context     { return s.ctx }

func (s *serverStream) SendMsg(m any) error {
	if s.ctx.Err() != nil {
		return status.FromContextError(s.ctx.Err()).Err()
	}
	return s.sendDown(packet{message: proto.CloneOf(m.(proto.Message))})
}

func (s *serverStream) RecvMsg(m any) error {
	var p packet
	select {
	case p = <-s.toServer:
	case <-s.ctx.Done():
	}
	if s.ctx.Err() != nil {
		return status.FromContextError(s.ctx.Err()).Err()
	}
	if p.end != nil {
		return p.end
	}
	return transfer(m, p.message)
}

// services is what a server offers.
type services struct {
	controlplane.Services
	unary   map[string]func(ctx context.Context, dec func(any) error) (any, error)
	streams map[string]func(stream grpc.ServerStream) error
}

func newServices(from controlplane.Services) *services {
	s := &services{Services: from,
		unary:   map[string]func(context.Context, func(any) error) (any, error){},
		streams: map[string]func(grpc.ServerStream) error{},
	}
	from.Register(s)
	return s
}

// RegisterService implements [grpc.ServiceRegistrar].
func (s *services) RegisterService(desc *grpc.ServiceDesc, impl any) {
	for _, m := range desc.Methods {
		s.unary["/"+desc.ServiceName+"/"+m.MethodName] = func(ctx context.Context, dec func(any) error) (any, error) {
			return m.Handler(impl, ctx, dec, s.Unary)
		}
	}
	for _, m := range desc.Streams {
		info := &grpc.StreamServerInfo{FullMethod: "/" + desc.ServiceName + "/" + m.StreamName, IsClientStream: m.ClientStreams, IsServerStream: m.ServerStreams}
		s.streams[info.FullMethod] = func(stream grpc.ServerStream) error { return s.Stream(impl, stream, info, m.Handler) }
	}
}

// call is the operator's connection: single calls, at once.
type call struct {
	w    *world
	peer *peer.Peer
}

// Invoke calls the server that runs now.
func (c *call) Invoke(ctx context.Context, method string, args, reply any, _ ...grpc.CallOption) error {
	s := c.w.server.current()
	if s == nil {
		return errCut
	}
	out, err := s.unary[method](peer.NewContext(ctx, c.peer), func(m any) error { return transfer(m, args.(proto.Message)) })
	if err != nil {
		return err
	}
	return transfer(reply, out.(proto.Message))
}

// NewStream refuses: the operator watches nothing here.
func (c *call) NewStream(context.Context, *grpc.StreamDesc, string, ...grpc.CallOption) (grpc.ClientStream, error) {
	return nil, status.Error(codes.Unimplemented, "no streams in the simulation")
}

// silent is a listener at which nobody calls.
type silent struct{ done chan struct{} }

func newSilent() *silent { return &silent{make(chan struct{})} }

func (l *silent) Accept() (net.Conn, error) { <-l.done; return nil, net.ErrClosed }
func (l *silent) Addr() net.Addr            { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 1} }
func (l *silent) Close() error {
	select {
	case <-l.done:
	default:
		close(l.done)
	}
	return nil
}

// describe names a message for the trace, without what differs between runs.
func describe(p packet) string {
	if p.end != nil {
		return "end"
	}
	m := p.message.ProtoReflect()
	fields := m.Descriptor().Oneofs().ByName("message")
	if fields == nil {
		return string(m.Descriptor().Name())
	}
	f := m.WhichOneof(fields)
	if f == nil {
		return "empty"
	}
	out := string(f.Name())
	body := m.Get(f).Message()
	for _, name := range []string{"seq", "resend_from", "from_seq", "session_epoch", "last_seq"} {
		for i := range body.Descriptor().Fields().Len() {
			if fd := body.Descriptor().Fields().Get(i); string(fd.Name()) == name {
				out += fmt.Sprintf(" %s=%v", name, body.Get(fd).Interface())
			}
		}
		_ = name
	}
	if fd := body.Descriptor().Fields().ByName("frames"); fd != nil {
		out += fmt.Sprintf(" frames=%d", body.Get(fd).List().Len())
	}
	if fd := body.Descriptor().Oneofs().ByName("answer"); fd != nil {
		if which := body.WhichOneof(fd); which != nil {
			out += " " + string(which.Name())
		}
	}
	return strings.TrimSpace(out)
}

var errDead = errors.New("the process has died")
