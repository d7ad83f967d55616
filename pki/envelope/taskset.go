package envelope

import (
	"fmt"
	"time"

	"golang.org/x/mod/sumdb/tlog"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// HashSize is the size in bytes of every hash here: SHA-256.
const HashSize = tlog.HashSize

// LeafHash returns the RFC 6962 hash of a leaf's exact bytes:
// SHA-256(0x00 || leaf).
func LeafHash(leaf []byte) [HashSize]byte {
	return tlog.RecordHash(leaf)
}

// Set is the Merkle tree over the leaves of a task set.
type Set struct {
	// Root is the tree's hash.
	Root [HashSize]byte
	// Leaves are the leaves, in order, each with its proof.
	Leaves []*taskv1.SignedLeaf
}

// BuildSet builds the tree over the exact bytes of leaves. It needs at least
// one and at most [MaxSetSize].
func BuildSet(leaves [][]byte) (*Set, error) {
	if n := len(leaves); n == 0 || n > MaxSetSize {
		return nil, fmt.Errorf("%w: a set has 1 to %d leaves, this one %d", ErrMalformed, MaxSetSize, n)
	}
	var stored []tlog.Hash
	reader := tlog.HashReaderFunc(func(indexes []int64) ([]tlog.Hash, error) {
		hashes := make([]tlog.Hash, len(indexes))
		for i, x := range indexes {
			hashes[i] = stored[x]
		}
		return hashes, nil
	})
	for i, leaf := range leaves {
		hashes, err := tlog.StoredHashes(int64(i), leaf, reader)
		if err != nil {
			return nil, fmt.Errorf("hash leaf %d: %w", i, err)
		}
		stored = append(stored, hashes...)
	}
	size := int64(len(leaves))
	root, err := tlog.TreeHash(size, reader)
	if err != nil {
		return nil, fmt.Errorf("hash set: %w", err)
	}
	set := &Set{Root: root, Leaves: make([]*taskv1.SignedLeaf, len(leaves))}
	for i, leaf := range leaves {
		path, err := tlog.ProveRecord(size, int64(i), reader)
		if err != nil {
			return nil, fmt.Errorf("prove leaf %d: %w", i, err)
		}
		proof := &taskv1.InclusionProof{Index: uint64(i)}
		for _, h := range path {
			proof.Hashes = append(proof.Hashes, append([]byte(nil), h[:]...))
		}
		set.Leaves[i] = &taskv1.SignedLeaf{Leaf: leaf, Proof: proof}
	}
	return set, nil
}

// CheckProof returns the hash of the signed leaf's bytes when its proof ties
// them to set, and otherwise an error that wraps [ErrProof]; an unknown field
// and a missing part wrap [ErrMalformed].
func CheckProof(set *taskv1.TaskSet, signed *taskv1.SignedLeaf) (hash [HashSize]byte, err error) {
	if err := checkSignedLeaf(signed); err != nil {
		return hash, err
	}
	proof := signed.GetProof()
	if proof.GetIndex() >= set.GetSize() {
		return hash, fmt.Errorf("%w: index %d of a set of %d", ErrProof, proof.GetIndex(), set.GetSize())
	}
	path := make(tlog.RecordProof, len(proof.GetHashes()))
	for i, h := range proof.GetHashes() {
		if copy(path[i][:], h) != HashSize || len(h) != HashSize {
			return hash, fmt.Errorf("%w: hash %d has %d bytes: want %d", ErrProof, i, len(h), HashSize)
		}
	}
	if len(set.GetRoot()) != HashSize {
		return hash, fmt.Errorf("%w: root has %d bytes: want %d", ErrProof, len(set.GetRoot()), HashSize)
	}
	leaf := tlog.RecordHash(signed.GetLeaf())
	err = tlog.CheckRecord(path, int64(set.GetSize()), tlog.Hash(set.GetRoot()), int64(proof.GetIndex()), leaf)
	if err != nil {
		return hash, fmt.Errorf("%w: leaf %d of %d: the proof does not lead to the signed root", ErrProof, proof.GetIndex(), set.GetSize())
	}
	return leaf, nil
}

// EncodeLeaf checks leaf by [CheckLeaf] and returns its bytes. They are made
// once: whatever handles the leaf afterwards keeps these.
func EncodeLeaf(leaf *taskv1.TaskLeaf) ([]byte, error) {
	if err := CheckLeaf(leaf); err != nil {
		return nil, err
	}
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(leaf)
	if err != nil {
		return nil, fmt.Errorf("encode leaf of task %s: %w", leaf.GetTaskId(), err)
	}
	if len(b) > MaxLeaf {
		return nil, fmt.Errorf("%w: leaf of task %s has %d bytes: at most %d are allowed", ErrMalformed, leaf.GetTaskId(), len(b), MaxLeaf)
	}
	return b, nil
}

// DecodeLeaf decodes the exact bytes of a leaf and checks it by [CheckLeaf].
// The error wraps [ErrMalformed].
func DecodeLeaf(b []byte) (*taskv1.TaskLeaf, error) {
	if n := len(b); n == 0 || n > MaxLeaf {
		return nil, fmt.Errorf("%w: leaf has %d bytes: 1 to %d are allowed", ErrMalformed, n, MaxLeaf)
	}
	leaf := new(taskv1.TaskLeaf)
	if err := unmarshal(b, leaf); err != nil {
		return nil, err
	}
	if err := CheckLeaf(leaf); err != nil {
		return nil, err
	}
	return leaf, nil
}

// DecodeTaskSet decodes the payload of an envelope of type [TaskSetType] and
// checks it by [CheckTaskSet]. The error wraps [ErrMalformed].
func DecodeTaskSet(payload []byte) (*taskv1.TaskSet, error) {
	set := new(taskv1.TaskSet)
	if err := unmarshal(payload, set); err != nil {
		return nil, err
	}
	if err := CheckTaskSet(set); err != nil {
		return nil, err
	}
	return set, nil
}

// Window is what a signer says about a set besides its leaves.
type Window struct {
	// Cluster is the SHA-256 over the payload of the trust root's genesis.
	Cluster []byte
	// TrustRootVersion is the newest version that the signer knows.
	TrustRootVersion uint64
	// IssuedAt is the time of signing.
	IssuedAt time.Time
	// NotBefore is the earliest start; the zero time means IssuedAt.
	NotBefore time.Time
	// NotAfter is the end of the time in which a leaf may start; at most
	// [MaxLife] after IssuedAt.
	NotAfter time.Time
}

// SignTaskSet encodes leaves, builds the set over them and signs it. The leaves
// that it returns are in the order given, each with its proof.
func SignTaskSet(w Window, leaves []*taskv1.TaskLeaf, signers ...Signer) (*taskv1.Envelope, []*taskv1.SignedLeaf, error) {
	encoded := make([][]byte, len(leaves))
	for i, leaf := range leaves {
		b, err := EncodeLeaf(leaf)
		if err != nil {
			return nil, nil, fmt.Errorf("leaves[%d]: %w", i, err)
		}
		encoded[i] = b
	}
	tree, err := BuildSet(encoded)
	if err != nil {
		return nil, nil, err
	}
	if w.NotBefore.IsZero() {
		w.NotBefore = w.IssuedAt
	}
	set := &taskv1.TaskSet{
		Cluster:          w.Cluster,
		TrustRootVersion: w.TrustRootVersion,
		IssuedAt:         timestamppb.New(w.IssuedAt),
		NotBefore:        timestamppb.New(w.NotBefore),
		NotAfter:         timestamppb.New(w.NotAfter),
		Size:             uint64(len(leaves)),
		Root:             tree.Root[:],
	}
	if err := CheckTaskSet(set); err != nil {
		return nil, nil, err
	}
	payload, err := proto.MarshalOptions{Deterministic: true}.Marshal(set)
	if err != nil {
		return nil, nil, fmt.Errorf("encode task set: %w", err)
	}
	env, err := Sign(TaskSetType, payload, signers...)
	if err != nil {
		return nil, nil, err
	}
	return env, tree.Leaves, nil
}
