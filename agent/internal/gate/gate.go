package gate

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/millwright/agent/internal/clock"
	"github.com/gpuaas/millwright/pki/trustroot"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
)

// The codes of refusals and deferrals that the gate makes itself. Those of the
// signature check come from package trustroot.
const (
	ReasonWrongNode        = "WRONG_NODE"
	ReasonBelowFloor       = "BELOW_FLOOR"
	ReasonWindowPassed     = "WINDOW_PASSED"
	ReasonPolicyDenied     = "POLICY_DENIED"
	ReasonUnknownKind      = "UNKNOWN_KIND"
	ReasonSpecInvalid      = "SPEC_INVALID"
	ReasonImpactNotAllowed = "IMPACT_NOT_ALLOWED"
	ReasonPolicyInvalid    = "POLICY_INVALID"
	ReasonClockUntrusted   = "CLOCK_UNTRUSTED"
	ReasonNotBefore        = "NOT_BEFORE"
)

// maxSkew is how far ahead of the node's clock a signer's may be.
const maxSkew = 5 * time.Minute

// clockAgain is how soon a task is tried again while the clock is in doubt.
const clockAgain = 5 * time.Second

// Refusal says never. Find it with errors.As.
type Refusal struct {
	// Reason is the code.
	Reason string
	// Message names the rule and the way out.
	Message string
}

// Error is the message.
func (r *Refusal) Error() string { return r.Message }

// Deferral says not now. Find it with errors.As.
type Deferral struct {
	// Reason is the code.
	Reason string
	// Message names the way out.
	Message string
	// RetryAfter is the shortest time after which a new try is worth it.
	RetryAfter time.Duration
}

// Error is the message.
func (d *Deferral) Error() string { return d.Message }

// Admission is a task that the gate lets through.
type Admission struct {
	trustroot.Verified
	// Kind is the leaf's kind.
	Kind *tasks.Kind
	// Spec is the leaf's spec, decoded and valid.
	Spec proto.Message
}

// Config is what a gate needs. All fields must be set.
type Config struct {
	// Node is the node's name.
	Node string
	// Root returns the node's trust root, or nil when it has none yet.
	Root func() *trustroot.Root
	// Policy is the path of the policy file. It is read at each decision.
	Policy string
	// Registry knows the kinds.
	Registry *tasks.Registry
	// Floor is the time at or before which nothing may have been issued.
	Floor time.Time
	// Clock tells the time by which windows are judged.
	Clock clock.Clock
	// Doubt says why that time cannot be relied on, or nil; optional.
	Doubt func() error
	// Logger is told of refusals and deferrals, coalesced.
	Logger *slog.Logger
}

// Gate decides. It is safe for concurrent use.
type Gate struct {
	cfg Config
	log *coalescer
}

// New returns a gate.
func New(cfg Config) *Gate {
	return &Gate{cfg: cfg, log: newCoalescer(cfg.Logger, cfg.Clock)}
}

// Admit decides about a task that was delivered. The error is a [*Refusal] or a
// [*Deferral].
func (g *Gate) Admit(ctx context.Context, env *taskv1.Envelope, signed *taskv1.SignedLeaf) (*Admission, error) {
	adm, err := g.judge(env, signed)
	if err != nil {
		g.log.said(ctx, err)
		return nil, err
	}
	return adm, nil
}

// Start decides again about an accepted task before it begins. The error is a
// [*Deferral] when the task has to wait, and a [*Refusal] otherwise, with the
// reason WINDOW_PASSED for one whose time is over.
func (g *Gate) Start(ctx context.Context, env *taskv1.Envelope, signed *taskv1.SignedLeaf) (*Admission, error) {
	adm, err := g.judge(env, signed)
	if err != nil {
		g.log.said(ctx, err)
		return nil, err
	}
	if wait := adm.TaskSet.GetNotBefore().AsTime().Sub(g.cfg.Clock.Now()); wait > 0 {
		return nil, &Deferral{
			Reason:     ReasonNotBefore,
			Message:    "it may start at " + stamp(adm.TaskSet.GetNotBefore().AsTime()),
			RetryAfter: wait,
		}
	}
	return adm, nil
}

// Restore decides whether the node may bring back by itself what a task has
// left. It is judged by the trust root of when the task was accepted, and
// whatever its window; the policy is the present one. The error is a
// [*Deferral] or a [*Refusal].
func (g *Gate) Restore(_ context.Context, env *taskv1.Envelope, signed *taskv1.SignedLeaf, rootVersion uint64) (*Admission, error) {
	root := g.cfg.Root()
	if root == nil {
		return nil, noRoot()
	}
	then, ok := root.At(rootVersion)
	if !ok {
		return nil, &Deferral{string(trustroot.ReasonTrustRootBehind), fmt.Sprintf(
			"it was accepted under version %d of the trust root, and the node has version %d", rootVersion, root.Version()), time.Minute}
	}
	return g.check(then, env, signed, g.checkNode, g.checkKind, g.checkImpact, g.checkPolicy)
}

func (g *Gate) judge(env *taskv1.Envelope, signed *taskv1.SignedLeaf) (*Admission, error) {
	root := g.cfg.Root()
	if root == nil {
		return nil, noRoot()
	}
	return g.check(root, env, signed, g.checkNode, g.checkKind, g.checkTime, g.checkImpact, g.checkPolicy)
}

func noRoot() *Deferral {
	return &Deferral{string(trustroot.ReasonTrustRootBehind), "the node has no trust root yet", time.Minute}
}

func (g *Gate) check(root *trustroot.Root, env *taskv1.Envelope, signed *taskv1.SignedLeaf, checks ...func(*Admission) error) (*Admission, error) {
	verified, err := root.VerifyTaskSet(env, signed)
	if err != nil {
		return nil, untrusted(err)
	}
	adm := &Admission{Verified: *verified}
	for _, check := range checks {
		if err := check(adm); err != nil {
			return nil, err
		}
	}
	return adm, nil
}

func untrusted(err error) error {
	var r *trustroot.Refusal
	switch {
	case !errors.As(err, &r):
		return &Refusal{string(trustroot.ReasonMalformed), err.Error()}
	case r.Deferred():
		return &Deferral{string(r.Reason), r.Error(), 10 * time.Second}
	default:
		return &Refusal{string(r.Reason), r.Error()}
	}
}

func (g *Gate) checkNode(adm *Admission) error {
	if adm.Leaf.GetNode() == g.cfg.Node {
		return nil
	}
	return &Refusal{ReasonWrongNode, fmt.Sprintf("the task is signed for node %q, and this is %q", adm.Leaf.GetNode(), g.cfg.Node)}
}

func (g *Gate) checkKind(adm *Admission) error {
	kind, err := g.cfg.Registry.Kind(adm.Leaf.GetKind())
	if err != nil {
		return &Refusal{ReasonUnknownKind, err.Error()}
	}
	spec, err := kind.DecodeSpec(adm.Leaf.GetRevision(), adm.Leaf.GetSpec())
	switch {
	case errors.Is(err, tasks.ErrUnknownKind):
		return &Refusal{ReasonUnknownKind, err.Error() + "; update the agent"}
	case err != nil:
		return &Refusal{ReasonSpecInvalid, err.Error()}
	}
	if err := kind.Validate(spec); err != nil {
		return &Refusal{ReasonSpecInvalid, err.Error()}
	}
	if err := tasks.CheckSecretDigests(spec, adm.Leaf); err != nil {
		return &Refusal{ReasonSpecInvalid, err.Error()}
	}
	adm.Kind, adm.Spec = kind, spec
	return nil
}

func (g *Gate) checkTime(adm *Admission) error {
	if g.cfg.Doubt != nil {
		if err := g.cfg.Doubt(); err != nil {
			return &Deferral{ReasonClockUntrusted, "nothing with a window is begun: " + err.Error(), clockAgain}
		}
	}
	now := g.cfg.Clock.Now()
	issued, notAfter := adm.TaskSet.GetIssuedAt().AsTime(), adm.TaskSet.GetNotAfter().AsTime()
	switch {
	case !now.Before(notAfter):
		return &Refusal{ReasonWindowPassed, fmt.Sprintf("it had to start before %s, and it is %s; sign it again", stamp(notAfter), stamp(now))}
	case !issued.After(g.cfg.Floor):
		return &Refusal{ReasonBelowFloor, fmt.Sprintf(
			"it was signed at %s, and this node carries out only what was signed after %s, because it may have run what is older; sign it again",
			stamp(issued), stamp(g.cfg.Floor))}
	case issued.Sub(now) > maxSkew:
		return &Deferral{ReasonClockUntrusted, fmt.Sprintf(
			"it was signed at %s, and the node's clock shows %s; check the clocks of the node and of the signer", stamp(issued), stamp(now)), time.Minute}
	}
	return nil
}

// checkImpact refuses a kind whose disturbance the signer did not allow. A plan
// disturbs nothing.
func (g *Gate) checkImpact(adm *Admission) error {
	if adm.Leaf.GetMode() == taskv1.Mode_MODE_PLAN {
		return nil
	}
	for _, impact := range adm.Kind.Impact {
		if !slices.Contains(adm.Leaf.GetAllowedImpact(), impact) {
			return &Refusal{ReasonImpactNotAllowed, fmt.Sprintf(
				"%s may cause %s, which the signer did not allow; sign it again with that impact allowed", adm.Kind.Kind, impact)}
		}
	}
	return nil
}

func (g *Gate) checkPolicy(adm *Admission) error {
	policy, err := ReadPolicy(g.cfg.Policy)
	if err != nil {
		return &Deferral{ReasonPolicyInvalid, err.Error(), 30 * time.Second}
	}
	req := Request{Kind: adm.Kind.Kind, Roles: adm.RoleNames()}
	if c, ok := adm.Spec.(interface{ GetArgv() []string }); ok {
		req.Argv = c.GetArgv()
	}
	if v := policy.Decide(req); !v.Allowed {
		return &Refusal{ReasonPolicyDenied, v.Message}
	}
	return nil
}

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }
