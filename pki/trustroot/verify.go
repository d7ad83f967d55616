package trustroot

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"slices"
	"time"

	"github.com/gpuaas/millwright/pki/envelope"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// VerifiedSet is a task set that keys of the trust root authorised. What it
// holds is what was signed; do not change it.
type VerifiedSet struct {
	// TaskSet is the set.
	TaskSet *taskv1.TaskSet
	// PayloadSHA256 is the hash over the envelope's payload, the set's name.
	PayloadSHA256 [sha256.Size]byte
	// Authorizers are the keys that signed, in the order of the signatures,
	// each with the role it counts for.
	Authorizers []*taskv1.Authorizer
	// Roles are the roles whose threshold is met, operator before controller;
	// at least one.
	Roles []taskv1.KeyRole
	// RootVersion is the version of the trust root that judged it.
	RootVersion uint64
}

// Verified is one leaf of a verified set.
type Verified struct {
	VerifiedSet
	// Leaf is the leaf, decoded from the bytes that LeafHash covers.
	Leaf *taskv1.TaskLeaf
	// LeafHash is the RFC 6962 hash over the leaf's exact bytes.
	LeafHash [sha256.Size]byte
}

// VerifyTaskSet judges an envelope and one leaf by r: every signature, the
// roles and thresholds of the keys, the cluster, the forms of set and leaf, and
// the inclusion proof. It knows neither the time nor the node nor its policy:
// window, floor, node's name and kind are for the caller to judge.
//
// The error is a [*Refusal].
func (r *Root) VerifyTaskSet(env *taskv1.Envelope, signed *taskv1.SignedLeaf) (*Verified, error) {
	set, err := r.VerifySet(env)
	if err != nil {
		return nil, err
	}
	return set.VerifyLeaf(signed)
}

// VerifySet judges an envelope alone; see [Root.VerifyTaskSet].
func (r *Root) VerifySet(env *taskv1.Envelope) (*VerifiedSet, error) {
	payload, ids, err := envelope.Verify(env, envelope.TaskSetType, r.last().publicKey)
	if errors.Is(err, envelope.ErrUnknownKey) {
		return nil, r.judgeUnknown(env, err)
	}
	if err != nil {
		return nil, refusal(err)
	}
	set, err := envelope.DecodeTaskSet(payload)
	if err != nil {
		return nil, refusal(err)
	}
	if err := r.checkCluster(set); err != nil {
		return nil, err
	}
	if have, want := r.Version(), set.GetTrustRootVersion(); want > have {
		return nil, behind(want, have)
	}
	verified := &VerifiedSet{
		TaskSet:       set,
		PayloadSHA256: sha256.Sum256(payload),
		RootVersion:   r.Version(),
	}
	if err := r.last().authorize(verified, ids); err != nil {
		return nil, err
	}
	return verified, nil
}

// VerifyLeaf judges one leaf by a set that was verified. The error is a
// [*Refusal].
func (s *VerifiedSet) VerifyLeaf(signed *taskv1.SignedLeaf) (*Verified, error) {
	hash, err := envelope.CheckProof(s.TaskSet, signed)
	if err != nil {
		return nil, refusal(err)
	}
	leaf, err := envelope.DecodeLeaf(signed.GetLeaf())
	if err != nil {
		return nil, refusal(err)
	}
	return &Verified{VerifiedSet: *s, Leaf: leaf, LeafHash: hash}, nil
}

// judgeUnknown decides about an envelope with a key that this root lacks. Its
// payload is not verified, and only two harmless things are read from it: that
// it is meant for another cluster, and that a newer root may know the key.
func (r *Root) judgeUnknown(env *taskv1.Envelope, unknown error) error {
	set, err := envelope.DecodeTaskSet(env.GetPayload())
	if err != nil {
		return refusal(err)
	}
	if err := r.checkCluster(set); err != nil {
		return err
	}
	if have, want := r.Version(), set.GetTrustRootVersion(); want > have {
		return behind(want, have)
	}
	for _, s := range env.GetSignatures() {
		if _, removed := r.Removed(s.GetKeyId()); removed {
			return refuse(ReasonSignatureInvalid, "key %s was removed from the trust root: sign with another key", s.GetKeyId())
		}
	}
	return refuse(ReasonSignatureInvalid, "%w to version %d of the trust root: sign with a key that it names", unknown, r.Version())
}

func (r *Root) checkCluster(set *taskv1.TaskSet) error {
	own := r.Cluster()
	if bytes.Equal(set.GetCluster(), own[:]) {
		return nil
	}
	return refuse(ReasonWrongCluster, "the set is signed for cluster %x, and this is %x", set.GetCluster(), own)
}

func behind(want, have uint64) error {
	return refuse(ReasonTrustRootBehind, "the signer knows version %d of the trust root, and this is version %d: try again once the update is here", want, have)
}

// authorize checks that each signer may sign tasks and that the threshold of at
// least one role is met, and records both in s.
func (v *version) authorize(s *VerifiedSet, ids []string) error {
	issued := s.TaskSet.GetIssuedAt().AsTime()
	signers := make(map[taskv1.KeyRole]int)
	for _, id := range ids {
		key := v.keys[id]
		if ended(key, issued) {
			return refuse(ReasonSignatureInvalid, "key %s of %s ended at %s, before the set was issued at %s: sign with another key",
				id, key.GetName(), key.GetNotAfter().AsTime().Format(time.RFC3339), issued.Format(time.RFC3339))
		}
		role, ok := taskRole(key)
		if !ok {
			return refuse(ReasonSignatureInvalid, "key %s of %s may not sign tasks: it is a recovery key", id, key.GetName())
		}
		for _, each := range taskRoles() {
			if slices.Contains(key.GetRoles(), each) {
				signers[each]++
			}
		}
		s.Authorizers = append(s.Authorizers, &taskv1.Authorizer{KeyId: id, Name: key.GetName(), Role: role})
	}
	for _, role := range taskRoles() {
		if signers[role] >= v.threshold(role) {
			s.Roles = append(s.Roles, role)
		}
	}
	if len(s.Roles) == 0 {
		return refuse(ReasonSignatureInvalid, "%d operator and %d controller keys signed: the trust root asks for %d operators or %d controllers",
			signers[taskv1.KeyRole_KEY_ROLE_OPERATOR], signers[taskv1.KeyRole_KEY_ROLE_CONTROLLER],
			v.threshold(taskv1.KeyRole_KEY_ROLE_OPERATOR), v.threshold(taskv1.KeyRole_KEY_ROLE_CONTROLLER))
	}
	return nil
}

func taskRoles() []taskv1.KeyRole {
	return []taskv1.KeyRole{taskv1.KeyRole_KEY_ROLE_OPERATOR, taskv1.KeyRole_KEY_ROLE_CONTROLLER}
}

// taskRole is the role that a key is shown with.
func taskRole(k *taskv1.TrustKey) (taskv1.KeyRole, bool) {
	for _, role := range taskRoles() {
		if slices.Contains(k.GetRoles(), role) {
			return role, true
		}
	}
	return taskv1.KeyRole_KEY_ROLE_UNSPECIFIED, false
}

// RoleName is the role as policy files write it: operator, controller or
// recovery, and "" for another.
func RoleName(role taskv1.KeyRole) string {
	switch role {
	case taskv1.KeyRole_KEY_ROLE_OPERATOR:
		return "operator"
	case taskv1.KeyRole_KEY_ROLE_CONTROLLER:
		return "controller"
	case taskv1.KeyRole_KEY_ROLE_RECOVERY:
		return "recovery"
	case taskv1.KeyRole_KEY_ROLE_UNSPECIFIED:
	}
	return ""
}

// RoleNames returns the names of s.Roles.
func (s *VerifiedSet) RoleNames() []string {
	names := make([]string, len(s.Roles))
	for i, role := range s.Roles {
		names[i] = RoleName(role)
	}
	return names
}
