package trustroot

import (
	"bytes"
	"crypto/ed25519"
	"crypto/sha256"
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/millwright/pki/envelope"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/proto/strict"
)

// MaxChain is the largest number of versions in a chain.
const MaxChain = 1024

// Root is a verified version of the trust root, with those before it. It never
// changes, and is safe for concurrent use.
type Root struct {
	versions []version // by version number, from 1; the last one is this root
}

type version struct {
	envelope *taskv1.Envelope
	root     *taskv1.TrustRoot
	hash     [sha256.Size]byte // over the payload
	keys     map[string]*taskv1.TrustKey
}

// Open verifies a chain, the genesis first, whose genesis hashes to
// pinnedCluster, and returns its last version. The error wraps [ErrChain].
func Open(chain []*taskv1.Envelope, pinnedCluster []byte) (*Root, error) {
	if n := len(chain); n == 0 || n > MaxChain {
		return nil, fmt.Errorf("%w: it has %d versions: 1 to %d are allowed", ErrChain, n, MaxChain)
	}
	hash := sha256.Sum256(chain[0].GetPayload())
	if !bytes.Equal(hash[:], pinnedCluster) {
		return nil, fmt.Errorf("%w: %w: want %x, got %x", ErrChain, ErrWrongCluster, pinnedCluster, hash)
	}
	genesis, err := openGenesis(chain[0])
	if err != nil {
		return nil, err
	}
	return genesis.Extend(chain[1:])
}

// OpenGenesis verifies a genesis that nothing pins yet, as the one who founds a
// cluster does. Use [Open] everywhere else.
func OpenGenesis(env *taskv1.Envelope) (*Root, error) {
	return openGenesis(env)
}

func openGenesis(env *taskv1.Envelope) (*Root, error) {
	v, err := decode(env)
	if err != nil {
		return nil, err
	}
	if err := v.checkGenesis(); err != nil {
		return nil, fmt.Errorf("%w: genesis: %w", ErrChain, err)
	}
	if err := v.checkSigners(env, v); err != nil {
		return nil, fmt.Errorf("%w: genesis: %w", ErrChain, err)
	}
	return &Root{versions: []version{*v}}, nil
}

// Extend verifies updates, the oldest first, and returns the last version.
// Versions that r has already are skipped when they are the same, so that a
// whole chain may be given; one that differs is an error that wraps [ErrFork].
// r itself is not changed. The error wraps [ErrChain].
func (r *Root) Extend(updates []*taskv1.Envelope) (*Root, error) {
	next := &Root{versions: r.versions[:len(r.versions):len(r.versions)]}
	for _, env := range updates {
		v, err := decode(env)
		if err != nil {
			return nil, err
		}
		number := v.root.GetVersion()
		switch last := next.last(); {
		case number == last.root.GetVersion()+1 && len(next.versions) < MaxChain:
			if err := v.checkUpdate(env, last); err != nil {
				return nil, fmt.Errorf("%w: version %d: %w", ErrChain, number, err)
			}
			next.versions = append(next.versions, *v)
		case number > last.root.GetVersion():
			return nil, fmt.Errorf("%w: version %d does not follow version %d of at most %d", ErrChain, number, last.root.GetVersion(), MaxChain)
		case next.versions[number-1].hash != v.hash:
			return nil, fmt.Errorf("%w: %w: version %d is %x here and %x there", ErrChain, ErrFork, number, next.versions[number-1].hash, v.hash)
		}
	}
	return next, nil
}

// decode reads one version and checks its form, not its signatures.
func decode(env *taskv1.Envelope) (*version, error) {
	v := &version{
		envelope: proto.CloneOf(env),
		root:     new(taskv1.TrustRoot),
		hash:     sha256.Sum256(env.GetPayload()),
	}
	if n := len(env.GetPayload()); n == 0 || n > envelope.MaxPayload {
		return nil, fmt.Errorf("%w: payload has %d bytes: 1 to %d are allowed", ErrChain, n, envelope.MaxPayload)
	}
	if err := strict.Unmarshal(env.GetPayload(), v.root); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrChain, err)
	}
	if err := CheckForm(v.root); err != nil {
		return nil, fmt.Errorf("%w: version %d: %w", ErrChain, v.root.GetVersion(), err)
	}
	v.keys = make(map[string]*taskv1.TrustKey, len(v.root.GetKeys()))
	for _, k := range v.root.GetKeys() {
		v.keys[k.GetId()] = k
	}
	return v, nil
}

func (r *Root) last() *version { return &r.versions[len(r.versions)-1] }

// Version is the number of this version, from 1.
func (r *Root) Version() uint64 { return r.last().root.GetVersion() }

// Cluster is the cluster's id: SHA-256 over the payload of the genesis.
func (r *Root) Cluster() [sha256.Size]byte { return r.versions[0].hash }

// Hash is SHA-256 over the payload of this version.
func (r *Root) Hash() [sha256.Size]byte { return r.last().hash }

// TrustDomain is the SPIFFE trust domain of the cluster.
func (r *Root) TrustDomain() string { return r.last().root.GetTrustDomain() }

// Contains reports whether hash is the hash of this version or of one before.
func (r *Root) Contains(hash []byte) bool {
	for i := range r.versions {
		if bytes.Equal(r.versions[i].hash[:], hash) {
			return true
		}
	}
	return false
}

// At returns the root as it was at a version, and whether there was one.
func (r *Root) At(number uint64) (*Root, bool) {
	if number == 0 || number > uint64(len(r.versions)) {
		return nil, false
	}
	return &Root{versions: r.versions[:number:number]}, true
}

// Chain returns the envelopes from the genesis to this version.
func (r *Root) Chain() []*taskv1.Envelope { return r.Since(0) }

// Since returns the envelopes of the versions after number, the oldest first.
func (r *Root) Since(number uint64) []*taskv1.Envelope {
	var list []*taskv1.Envelope
	for i := range r.versions {
		if r.versions[i].root.GetVersion() > number {
			list = append(list, proto.CloneOf(r.versions[i].envelope))
		}
	}
	return list
}

// Message returns a copy of this version as its message.
func (r *Root) Message() *taskv1.TrustRoot { return proto.CloneOf(r.last().root) }

// Key returns a copy of the key with the id, and whether this version has it.
func (r *Root) Key(id string) (*taskv1.TrustKey, bool) {
	k, ok := r.last().keys[id]
	return proto.CloneOf(k), ok
}

// Removed reports whether the key with the id was removed, and since when what
// it signed is not to be believed; the zero time when it is.
func (r *Root) Removed(id string) (compromisedSince time.Time, removed bool) {
	for _, k := range r.last().root.GetRemoved() {
		if k.GetId() == id {
			return optionalTime(k.GetCompromisedSince()), true
		}
	}
	return time.Time{}, false
}

// publicKey is a lookup for [envelope.Verify].
func (v *version) publicKey(id string) (ed25519.PublicKey, bool) {
	k, ok := v.keys[id]
	return k.GetPublicKey(), ok
}

// threshold is how many keys of the role must sign.
func (v *version) threshold(role taskv1.KeyRole) int {
	for _, t := range v.root.GetThresholds() {
		if t.GetRole() == role {
			return int(t.GetKeys())
		}
	}
	return 1
}
