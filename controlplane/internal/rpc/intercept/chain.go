package intercept

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/gpuaas/millwright/controlplane/internal/clock"
	"github.com/gpuaas/millwright/controlplane/internal/store"
	"github.com/gpuaas/millwright/pki"
	"github.com/gpuaas/millwright/proto/rpcerr"
)

// ErrNotMember is wrapped by the error of [Members] about a node that was
// evicted, is unknown, or was enrolled anew since its certificate was made.
var ErrNotMember = errors.New("not a member")

// Members says whether a node still belongs to the cluster. It is asked at
// every RPC of a node, so it answers from memory.
type Members interface {
	// CheckMember returns nil if the node is enrolled, not evicted, and its
	// current enrolment generation is the one given; a generation of 0 is that
	// of a certificate which carries none and fits any. Otherwise the error
	// wraps ErrNotMember and tells the node what to do.
	CheckMember(ctx context.Context, node string, generation uint64) error
}

// Auditor records calls. Audit does not block on I/O for long, and is safe for
// concurrent use.
type Auditor interface {
	Audit(Record)
}

// Record is one call, once it has ended or was denied.
type Record struct {
	// Time is when it ended.
	Time time.Time
	// Method is the full name of the RPC.
	Method string
	// Caller made it.
	Caller Caller
	// Code is its outcome.
	Code codes.Code
	// Message is the error's text, if it failed.
	Message string
	// Denied says that the policy, the membership or a limit kept it from
	// being served.
	Denied bool
	// Audit is the row's decision; AuditCoalesced for a denied call.
	Audit Audit
}

// Config is what a [Chain] needs.
type Config struct {
	// Policy is the table; [Default] in the product.
	Policy Policy
	// Members is asked about every call of a node.
	Members Members
	// Auditor records calls.
	Auditor Auditor
	// Limits are the limits by class; [DefaultLimits] in the product.
	Limits map[Class]Limit
	// Log gets what went wrong inside the server.
	Log *slog.Logger
	// Now is the wall clock; nil means the machine's.
	Now func() time.Time
}

// Chain stands before every RPC. It is safe for concurrent use.
type Chain struct {
	policy  Policy
	members Members
	auditor Auditor
	limiter *limiter
	log     *slog.Logger
	now     func() time.Time
}

// New returns the chain.
func New(cfg Config) *Chain {
	if cfg.Now == nil {
		cfg.Now = clock.Now
	}
	return &Chain{
		policy:  cfg.Policy,
		members: cfg.Members,
		auditor: cfg.Auditor,
		limiter: newLimiter(cfg.Limits),
		log:     cfg.Log,
		now:     cfg.Now,
	}
}

// call is one RPC on its way through the chain.
type call struct {
	method string
	stream bool
	start  time.Time
	caller Caller
	row    Row
}

// A stage does its part and calls next, or returns an error and does not.
type stage func(ctx context.Context, c *call, next func(context.Context) error) error

// serve passes a call through all stages in their order.
func (ch *Chain) serve(ctx context.Context, c *call, handle func(context.Context) error) error {
	c.start = ch.now()
	stages := []stage{ch.recover, ch.logged, ch.identify, ch.authorize, ch.limit, ch.audit, ch.expire}
	var run func(ctx context.Context, i int) error
	run = func(ctx context.Context, i int) error {
		if i == len(stages) {
			return handle(ctx)
		}
		return stages[i](ctx, c, func(ctx context.Context) error { return run(ctx, i+1) })
	}
	return run(ctx, 0)
}

// Unary is the interceptor of RPCs with one answer.
func (ch *Chain) Unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	ctx, cancel := context.WithTimeout(ctx, unaryTimeout)
	defer cancel()
	var resp any
	err := ch.serve(ctx, &call{method: info.FullMethod}, func(ctx context.Context) (err error) {
		resp, err = handler(ctx, req)
		return err
	})
	if err != nil {
		return nil, err
	}
	return resp, nil
}

// Stream is the interceptor of RPCs with streams.
func (ch *Chain) Stream(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	return ch.serve(stream.Context(), &call{method: info.FullMethod, stream: true}, func(ctx context.Context) error {
		return handler(srv, &contextStream{ServerStream: stream, ctx: ctx})
	})
}

// contextStream is a stream whose context carries the caller. The interface of
// grpc leaves no other way.
type contextStream struct {
	grpc.ServerStream
	ctx context.Context
}

// Context returns the context with the caller.
func (s *contextStream) Context() context.Context { return s.ctx }

func (ch *Chain) recover(ctx context.Context, c *call, next func(context.Context) error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			ch.log.Error("rpc panicked", "method", c.method, "caller", c.caller.Name(), "panic", fmt.Sprint(p), "stack", string(debug.Stack()))
			err = internal()
		}
	}()
	return next(ctx)
}

// logged logs each call once, and keeps an error that no handler meant for the
// caller from reaching it.
func (ch *Chain) logged(ctx context.Context, c *call, next func(context.Context) error) error {
	err := next(ctx)
	st, meant := status.FromError(err)
	switch {
	case !meant && (errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)):
		st = status.FromContextError(err)
		err = st.Err()
	case errors.Is(err, store.ErrUnwritable):
		ch.log.Error("rpc could not be stored", "method", c.method, "caller", c.caller.Name(), "err", err)
		return rpcerr.New(codes.Unavailable, "STORE_UNWRITABLE", "the server cannot write to its disk; make room there, then try again")
	case !meant:
		ch.log.Error("rpc went wrong", "method", c.method, "caller", c.caller.Name(), "err", err)
		return internal()
	}
	level := slog.LevelDebug
	if slices.Contains([]codes.Code{codes.Internal, codes.Unknown, codes.DataLoss}, st.Code()) {
		level = slog.LevelError
	}
	if ch.log.Enabled(ctx, level) {
		ch.log.Log(ctx, level, "rpc ended", "method", c.method, "caller", c.caller.Name(), "addr", c.caller.Addr,
			"code", st.Code().String(), "message", st.Message(), "duration_s", ch.now().Sub(c.start).Seconds())
	}
	return err
}

func (ch *Chain) identify(ctx context.Context, c *call, next func(context.Context) error) error {
	c.caller = peerCaller(ctx)
	if cert := c.caller.Certificate; cert != nil && !ch.now().Before(cert.NotAfter) {
		return ch.deny(c, codes.Unauthenticated, c.caller.ended())
	}
	return next(WithCaller(ctx, c.caller))
}

func (ch *Chain) authorize(ctx context.Context, c *call, next func(context.Context) error) error {
	role := c.caller.ID.Role
	switch {
	case ch.policy.Allows(c.method, role):
	case role == "":
		return ch.deny(c, codes.Unauthenticated, fmt.Sprintf("%s needs a client certificate, and none was presented", c.method))
	default:
		return ch.deny(c, codes.PermissionDenied, fmt.Sprintf("%s may not call %s: it is not for the role %s", c.caller.Name(), c.method, role))
	}
	c.row = ch.policy[c.method]
	if role != pki.RoleNode {
		return next(ctx)
	}
	err := ch.members.CheckMember(ctx, c.caller.ID.Name, c.caller.Generation)
	switch {
	case err == nil:
		return next(ctx)
	case errors.Is(err, ErrNotMember):
		return ch.deny(c, codes.PermissionDenied, err.Error())
	}
	return fmt.Errorf("check membership of %s: %w", c.caller.ID.Name, err)
}

func (ch *Chain) limit(ctx context.Context, c *call, next func(context.Context) error) error {
	class := c.row.Class
	bucket, wait := ch.limiter.take(class, c.caller.limitKey(), ch.now())
	if bucket == nil {
		ch.record(c, codes.ResourceExhausted, "limit", true)
		return exhausted(class, wait)
	}
	if c.stream {
		if !ch.limiter.open(bucket) {
			return ch.deny(c, codes.ResourceExhausted, fmt.Sprintf("too many open streams of the class %s: end those that no one reads", class))
		}
		defer ch.limiter.close(bucket)
	}
	return next(ctx)
}

func (ch *Chain) audit(ctx context.Context, c *call, next func(context.Context) error) error {
	err := next(ctx)
	if c.row.Audit != AuditNone {
		st := status.Convert(err)
		ch.record(c, st.Code(), st.Message(), false)
	}
	return err
}

// expire ends a stream that follows something with the certificate of its
// caller. A node's streams have no timer of their own: whoever serves them looks
// at the time.
func (ch *Chain) expire(ctx context.Context, c *call, next func(context.Context) error) error {
	if c.row.Class != ClassWatch || c.caller.Certificate == nil {
		return next(ctx)
	}
	ended := status.Error(codes.Unauthenticated, c.caller.ended())
	ctx, cancel := context.WithTimeoutCause(ctx, c.caller.NotAfter.Sub(ch.now()), ended)
	defer cancel()
	err := next(ctx)
	if err != nil && errors.Is(context.Cause(ctx), ended) {
		return ended
	}
	return err
}

func (ch *Chain) deny(c *call, code codes.Code, message string) error {
	ch.record(c, code, message, true)
	return status.Error(code, message)
}

func (ch *Chain) record(c *call, code codes.Code, message string, denied bool) {
	decision := c.row.Audit
	if denied {
		decision = AuditCoalesced
	}
	ch.auditor.Audit(Record{
		Time: ch.now(), Method: c.method, Caller: c.caller,
		Code: code, Message: message, Denied: denied, Audit: decision,
	})
}

func internal() error {
	return status.Error(codes.Internal, "something went wrong inside the server; its log says what")
}
