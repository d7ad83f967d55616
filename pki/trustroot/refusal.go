package trustroot

import (
	"errors"
	"fmt"

	"github.com/gpuaas/millwright/pki/envelope"
)

// Reason is a code of Refused.reason, and of Deferred.reason for
// [ReasonTrustRootBehind].
type Reason string

// The reasons for which a task set or a leaf is not believed.
const (
	// ReasonMalformed is for bytes that break a rule of their form.
	ReasonMalformed Reason = "MALFORMED"
	// ReasonSignatureInvalid is for a signature that does not verify, a key
	// that is unknown, removed, ended or may not sign tasks, and for too few
	// signatures.
	ReasonSignatureInvalid Reason = "SIGNATURE_INVALID"
	// ReasonWrongCluster is for a set of another cluster.
	ReasonWrongCluster Reason = "WRONG_CLUSTER"
	// ReasonProofInvalid is for a leaf that is not in the set.
	ReasonProofInvalid Reason = "PROOF_INVALID"
	// ReasonTrustRootBehind is for a set whose signer knows a newer trust
	// root: it may be good, and can be judged once the update is here.
	ReasonTrustRootBehind Reason = "TRUST_ROOT_BEHIND"
)

// Refusal is why a task set or a leaf is not believed. Find it with errors.As.
type Refusal struct {
	// Reason is the code.
	Reason Reason
	// Err says it in words, with the way out where there is one.
	Err error
}

// Error is the words.
func (r *Refusal) Error() string { return r.Err.Error() }

// Unwrap returns Err.
func (r *Refusal) Unwrap() error { return r.Err }

// Deferred reports whether the answer is "not now" rather than "never".
func (r *Refusal) Deferred() bool { return r.Reason == ReasonTrustRootBehind }

func refuse(reason Reason, format string, args ...any) error {
	return &Refusal{Reason: reason, Err: fmt.Errorf(format, args...)}
}

// refusal gives an error of package envelope its code.
func refusal(err error) error {
	switch {
	case errors.Is(err, envelope.ErrMalformed):
		return &Refusal{Reason: ReasonMalformed, Err: err}
	case errors.Is(err, envelope.ErrProof):
		return &Refusal{Reason: ReasonProofInvalid, Err: err}
	default:
		return &Refusal{Reason: ReasonSignatureInvalid, Err: err}
	}
}

// The errors about a chain of trust roots.
var (
	// ErrChain is wrapped by every error about a chain that cannot be trusted.
	ErrChain = errors.New("trust root cannot be trusted")
	// ErrWrongCluster is wrapped, beside ErrChain, when the genesis is not the
	// pinned one.
	ErrWrongCluster = errors.New("genesis is not the pinned one")
	// ErrFork is wrapped, beside ErrChain, when a version differs from the one
	// that is trusted already.
	ErrFork = errors.New("two trust roots claim one version")
)
