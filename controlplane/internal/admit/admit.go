// Package admit decides whether a request to create tasks is taken. It says
// all that is wrong at once, with the field, the value, the rule and the way
// out, and it stores nothing. A spec is judged by the code that judges it again
// on the node; the signature by the cluster's own trust root.
package admit

import (
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"google.golang.org/grpc/codes"

	"github.com/gpuaas/millwright/pki/trustroot"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/proto/rpcerr"
	"github.com/gpuaas/millwright/proto/strict"
	"github.com/gpuaas/millwright/tasks"

	"github.com/gpuaas/millwright/controlplane/internal/clock"
	"github.com/gpuaas/millwright/controlplane/internal/store"
)

// Limits of a request.
const (
	// MaxLeaves is the largest number of tasks in a request.
	MaxLeaves = 1000
	// MaxBytes is the size that the leaves of a request have in all.
	MaxBytes = 4 << 20
	// MaxSkew is how far issued_at may be from the server's clock.
	MaxSkew = 5 * time.Minute
)

// Config is what an admitter needs.
type Config struct {
	// Registry knows the kinds.
	Registry *tasks.Registry
	// Root is the cluster's trust root as it is now.
	Root func() *trustroot.Root
	// Now is the wall clock; nil means the machine's.
	Now func() time.Time
}

// Admitter judges requests. It is safe for concurrent use.
type Admitter struct{ cfg Config }

// New returns an admitter.
func New(cfg Config) *Admitter {
	if cfg.Now == nil {
		cfg.Now = clock.Now
	}
	return &Admitter{cfg: cfg}
}

// Request is a request whose form is good.
type Request struct {
	// ID is the request's id; empty when it only validates.
	ID string
	// Leaves are the tasks, in the order of the request.
	Leaves []Leaf
	// Envelope is the authorisation; nil when the request only validates.
	Envelope *taskv1.Envelope
}

// Leaf is one task of a request.
type Leaf struct {
	Signed *taskv1.SignedLeaf
	Leaf   *taskv1.TaskLeaf
	Hash   [32]byte
}

// Form checks the form of a request, whoever signed it and whatever the store
// holds: sizes, ids, and that every leaf decodes whole. The error is an
// [rpcerr.Error].
func (a *Admitter) Form(req *taskv1.CreateTasksRequest) (*Request, error) {
	if err := strict.Check(req); err != nil {
		return nil, rpcerr.New(codes.InvalidArgument, "MALFORMED", "%v: the client is newer than this server; update the server first", err)
	}
	if err := checkSizes(req); err != nil {
		return nil, err
	}
	out := &Request{ID: req.GetRequestId(), Envelope: req.GetEnvelope()}
	var problems []rpcerr.Violation
	seen := map[string]int{}
	for i, signed := range req.GetLeaves() {
		leaf, bad := decodeLeaf(i, signed)
		problems = append(problems, bad...)
		if leaf == nil {
			continue
		}
		if first, dup := seen[leaf.Leaf.GetTaskId()]; dup {
			problems = append(problems, rpcerr.Violation{Field: at(i, "task_id"), Value: leaf.Leaf.GetTaskId(),
				Rule: fmt.Sprintf("leaves[%d] has the same id; every task needs its own", first)})
		}
		seen[leaf.Leaf.GetTaskId()] = i
		out.Leaves = append(out.Leaves, *leaf)
	}
	if len(problems) > 0 {
		return nil, rpcerr.Invalid("MALFORMED", problems...)
	}
	return out, nil
}

func checkSizes(req *taskv1.CreateTasksRequest) error {
	size := 0
	for _, l := range req.GetLeaves() {
		size += len(l.GetLeaf())
	}
	switch n := len(req.GetLeaves()); {
	case n == 0:
		return rpcerr.Invalid("MALFORMED", rpcerr.Violation{Field: "leaves", Rule: "it is empty; give at least one task"})
	case n > MaxLeaves:
		return rpcerr.Invalid("TOO_LARGE", rpcerr.Violation{Field: "leaves", Value: fmt.Sprint(n),
			Rule: fmt.Sprintf("at most %d tasks fit one request; split it", MaxLeaves)})
	case size > MaxBytes:
		return rpcerr.Invalid("TOO_LARGE", rpcerr.Violation{Field: "leaves", Value: fmt.Sprintf("%d bytes", size),
			Rule: fmt.Sprintf("the leaves may have at most %d bytes in all; split the request", MaxBytes)})
	}
	if req.GetValidateOnly() {
		return nil
	}
	if _, err := uuid.Parse(req.GetRequestId()); err != nil || len(req.GetRequestId()) != 36 {
		return rpcerr.Invalid("MALFORMED", rpcerr.Violation{Field: "request_id", Value: clip(req.GetRequestId()),
			Rule: "it must be a UUID of the caller's choice, such as 0199c2a0-7d1e-7c3b-9f0a-3d5b1f6e2a10"})
	}
	if req.GetEnvelope() == nil {
		return rpcerr.Invalid("ENVELOPE_MISSING", rpcerr.Violation{Field: "envelope",
			Rule: "it is missing; nothing runs that was not signed: sign the set with an operator's or controller's key, or set validate_only"})
	}
	return nil
}

// Signed checks who signed the request, and when. The error is an
// [rpcerr.Error].
func (a *Admitter) Signed(req *Request) (*trustroot.VerifiedSet, error) {
	set, err := a.cfg.Root().VerifySet(req.Envelope)
	if err != nil {
		return nil, refusal("envelope", err)
	}
	if n := set.TaskSet.GetSize(); n != uint64(len(req.Leaves)) {
		return nil, rpcerr.Invalid("PROOF_INVALID", rpcerr.Violation{Field: "leaves", Value: fmt.Sprint(len(req.Leaves)),
			Rule: fmt.Sprintf("the envelope covers %d tasks; send all of them, in the order of the set", n)})
	}
	for i, l := range req.Leaves {
		if _, err := set.VerifyLeaf(l.Signed); err != nil {
			return nil, refusal(fmt.Sprintf("leaves[%d]", i), err)
		}
		if got := l.Signed.GetProof().GetIndex(); got != uint64(i) {
			return nil, rpcerr.Invalid("PROOF_INVALID", rpcerr.Violation{Field: at(i, "proof.index"), Value: fmt.Sprint(got),
				Rule: "send the leaves in the order of the set"})
		}
	}
	return set, a.checkTimes(set.TaskSet)
}

func (a *Admitter) checkTimes(set *taskv1.TaskSet) error {
	now := a.cfg.Now()
	skew := set.GetIssuedAt().AsTime().Sub(now)
	if skew.Abs() > MaxSkew {
		way := "ahead of"
		if skew < 0 {
			way = "behind"
		}
		return rpcerr.Invalid("CLOCK_SKEW", rpcerr.Violation{Field: "envelope.issued_at", Value: set.GetIssuedAt().AsTime().Format(time.RFC3339),
			Rule: fmt.Sprintf("it is %s %s the server's clock (%s); at most %s is allowed: set the clock that is wrong, then sign again",
				skew.Abs().Round(time.Second), way, now.UTC().Format(time.RFC3339), MaxSkew)})
	}
	if end := set.GetNotAfter().AsTime(); !end.After(now) {
		return rpcerr.Invalid("WINDOW_PASSED", rpcerr.Violation{Field: "envelope.not_after", Value: end.Format(time.RFC3339),
			Rule: "it has passed; sign again with a later one"})
	}
	return nil
}

// Tasks checks every task against what is known: the kinds of this release,
// the nodes, and other tasks. The error is an [rpcerr.Error] with all problems.
func (a *Admitter) Tasks(v store.View, req *Request) error {
	c := &checker{registry: a.cfg.Registry, view: v, nodes: map[string]nodeAnswer{}}
	for i := range req.Leaves {
		if err := c.leaf(i, req.Leaves[i].Leaf); err != nil {
			return err
		}
	}
	return c.err()
}

func refusal(field string, err error) error {
	var r *trustroot.Refusal
	if !errors.As(err, &r) {
		return err
	}
	out := rpcerr.Invalid(string(r.Reason), rpcerr.Violation{Field: field, Rule: r.Error()})
	if r.Deferred() {
		out.Code = codes.FailedPrecondition
	}
	return out
}

func at(i int, field string) string { return fmt.Sprintf("leaves[%d].%s", i, field) }

// clip keeps a value in a message short.
func clip(s string) string {
	if len(s) > 100 {
		return s[:100] + "..."
	}
	return s
}
