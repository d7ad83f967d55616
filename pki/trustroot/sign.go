package trustroot

import (
	"cmp"
	"crypto/ed25519"
	"fmt"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/millwright/pki/envelope"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// NewKey describes an Ed25519 public key for a trust root. The zero notAfter
// means that the key does not end.
func NewKey(name string, public ed25519.PublicKey, notAfter time.Time, roles ...taskv1.KeyRole) *taskv1.TrustKey {
	roles = slices.Compact(slices.Sorted(slices.Values(roles)))
	k := &taskv1.TrustKey{
		Id:        envelope.KeyID(taskv1.KeyType_KEY_TYPE_ED25519, public),
		Type:      taskv1.KeyType_KEY_TYPE_ED25519,
		PublicKey: public,
		Roles:     roles,
		Name:      name,
	}
	if !notAfter.IsZero() {
		k.NotAfter = timestamppb.New(notAfter)
	}
	return k
}

// Genesis says what the first version of a trust root is made of.
type Genesis struct {
	// TrustDomain is the SPIFFE trust domain of the cluster.
	TrustDomain string
	// IssuedAt is the time of signing.
	IssuedAt time.Time
	// Keys are made by [NewKey], in any order: at least one operator and one
	// recovery key.
	Keys []*taskv1.TrustKey
	// Thresholds, where a role needs more than one key.
	Thresholds []*taskv1.Threshold
}

// SignGenesis makes and signs the genesis. Enough of its recovery keys must be
// among the signers to meet their threshold; other keys of it may sign too.
func SignGenesis(g Genesis, signers ...envelope.Signer) (*Root, error) {
	env, err := sign(&taskv1.TrustRoot{
		Version:     1,
		IssuedAt:    timestamppb.New(g.IssuedAt),
		TrustDomain: g.TrustDomain,
		Keys:        g.Keys,
		Thresholds:  g.Thresholds,
	}, signers)
	if err != nil {
		return nil, fmt.Errorf("sign genesis: %w", err)
	}
	return openGenesis(env)
}

// Update says what the next version of a trust root changes.
type Update struct {
	// IssuedAt is the time of signing.
	IssuedAt time.Time
	// Add are keys to add, made by [NewKey].
	Add []*taskv1.TrustKey
	// Remove are keys to remove for ever, or removals to date back.
	Remove []*taskv1.RemovedKey
	// Thresholds replace all thresholds; nil leaves them as they are.
	Thresholds []*taskv1.Threshold
}

// SignUpdate makes and signs the version after r, and returns the root that
// ends with it. Enough recovery keys of r must be the signers, and no others.
func (r *Root) SignUpdate(u Update, signers ...envelope.Signer) (*Root, error) {
	next := r.Message()
	hash := r.Hash()
	next.Version++
	next.Previous = hash[:]
	next.IssuedAt = timestamppb.New(u.IssuedAt)
	next.Keys = append(next.Keys, u.Add...)
	if u.Thresholds != nil {
		next.Thresholds = u.Thresholds
	}
	for _, removal := range u.Remove {
		next.Keys = slices.DeleteFunc(next.Keys, func(k *taskv1.TrustKey) bool { return k.GetId() == removal.GetId() })
		next.Removed = slices.DeleteFunc(next.Removed, func(k *taskv1.RemovedKey) bool { return k.GetId() == removal.GetId() })
		next.Removed = append(next.Removed, removal)
	}
	env, err := sign(next, signers)
	if err != nil {
		return nil, fmt.Errorf("sign version %d of the trust root: %w", next.GetVersion(), err)
	}
	return r.Extend([]*taskv1.Envelope{env})
}

func sign(root *taskv1.TrustRoot, signers []envelope.Signer) (*taskv1.Envelope, error) {
	root = proto.CloneOf(root)
	slices.SortFunc(root.Keys, func(a, b *taskv1.TrustKey) int { return cmp.Compare(a.GetId(), b.GetId()) })
	slices.SortFunc(root.Thresholds, func(a, b *taskv1.Threshold) int { return cmp.Compare(a.GetRole(), b.GetRole()) })
	slices.SortFunc(root.Removed, func(a, b *taskv1.RemovedKey) int { return cmp.Compare(a.GetId(), b.GetId()) })
	if err := CheckForm(root); err != nil {
		return nil, err
	}
	payload, err := proto.MarshalOptions{Deterministic: true}.Marshal(root)
	if err != nil {
		return nil, fmt.Errorf("encode: %w", err)
	}
	return envelope.Sign(envelope.TrustRootType, payload, signers...)
}
