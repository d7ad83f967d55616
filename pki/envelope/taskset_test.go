package envelope_test

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/millwright/pki/envelope"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

const (
	taskID  = "01931b5e-7c00-7abc-8def-0123456789ab"
	otherID = "01931b5e-7c00-7abc-8def-0123456789ac"
)

// treeHash is RFC 6962's definition, word for word.
func treeHash(leaves [][]byte) []byte {
	if len(leaves) == 1 {
		h := sha256.Sum256(append([]byte{0}, leaves[0]...))
		return h[:]
	}
	k := 1
	for 2*k < len(leaves) {
		k *= 2
	}
	b := append([]byte{1}, treeHash(leaves[:k])...)
	h := sha256.Sum256(append(b, treeHash(leaves[k:])...))
	return h[:]
}

func TestBuildSet(t *testing.T) {
	var leaves [][]byte
	for n := 1; n <= 33; n++ {
		leaves = append(leaves, fmt.Appendf(nil, "leaf %d", n))
		tree, err := envelope.BuildSet(leaves)
		if err != nil {
			t.Fatal(err)
		}
		if want := treeHash(leaves); !bytes.Equal(tree.Root[:], want) {
			t.Fatalf("root of %d leaves: got %x, want %x", n, tree.Root, want)
		}
		set := &taskv1.TaskSet{Size: uint64(n), Root: tree.Root[:]}
		for i, signed := range tree.Leaves {
			hash, err := envelope.CheckProof(set, signed)
			if err != nil || hash != envelope.LeafHash(leaves[i]) {
				t.Fatalf("leaf %d of %d: %v", i, n, err)
			}
			for j := range n { // at no other place, and no other leaf
				moved := proto.CloneOf(signed)
				moved.Proof.Index = uint64(j)
				if _, err := envelope.CheckProof(set, moved); j != i && !errors.Is(err, envelope.ErrProof) {
					t.Fatalf("leaf %d of %d stands at %d: %v", i, n, j, err)
				}
				other := proto.CloneOf(signed)
				other.Leaf = leaves[j]
				if _, err := envelope.CheckProof(set, other); j != i && !errors.Is(err, envelope.ErrProof) {
					t.Fatalf("leaf %d of %d passes as %d: %v", j, n, i, err)
				}
			}
		}
	}
	if _, err := envelope.BuildSet(nil); !errors.Is(err, envelope.ErrMalformed) {
		t.Errorf("an empty set: %v", err)
	}
}

func TestCheckProofRefuses(t *testing.T) {
	tree, err := envelope.BuildSet([][]byte{[]byte("a"), []byte("b"), []byte("c")})
	if err != nil {
		t.Fatal(err)
	}
	set := &taskv1.TaskSet{Size: 3, Root: tree.Root[:]}
	for _, tt := range []struct {
		name string
		edit func(*taskv1.SignedLeaf)
		want error
	}{
		{"index beyond the set", func(s *taskv1.SignedLeaf) { s.Proof.Index = 3 }, envelope.ErrProof},
		{"huge index", func(s *taskv1.SignedLeaf) { s.Proof.Index = 1 << 63 }, envelope.ErrProof},
		{"a hash more", func(s *taskv1.SignedLeaf) { s.Proof.Hashes = append(s.Proof.Hashes, make([]byte, 32)) }, envelope.ErrProof},
		{"a hash less", func(s *taskv1.SignedLeaf) { s.Proof.Hashes = s.Proof.Hashes[1:] }, envelope.ErrProof},
		{"long hash", func(s *taskv1.SignedLeaf) { s.Proof.Hashes[0] = append(s.Proof.Hashes[0], 0) }, envelope.ErrProof},
		{"short hash", func(s *taskv1.SignedLeaf) { s.Proof.Hashes[0] = s.Proof.Hashes[0][1:] }, envelope.ErrProof},
		{"65 hashes", func(s *taskv1.SignedLeaf) { s.Proof.Hashes = make([][]byte, 65) }, envelope.ErrMalformed},
		{"no proof", func(s *taskv1.SignedLeaf) { s.Proof = nil }, envelope.ErrMalformed},
		{"no leaf", func(s *taskv1.SignedLeaf) { s.Leaf = nil }, envelope.ErrMalformed},
		{"huge leaf", func(s *taskv1.SignedLeaf) { s.Leaf = make([]byte, envelope.MaxLeaf+1) }, envelope.ErrMalformed},
		{"unknown field", func(s *taskv1.SignedLeaf) { addUnknown(s) }, envelope.ErrMalformed},
		{"unknown field in the proof", func(s *taskv1.SignedLeaf) { addUnknown(s.Proof) }, envelope.ErrMalformed},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bad := proto.CloneOf(tree.Leaves[1])
			tt.edit(bad)
			if _, err := envelope.CheckProof(set, bad); !errors.Is(err, tt.want) {
				t.Errorf("got %v, want %v", err, tt.want)
			}
		})
	}
}

func goodLeaf() *taskv1.TaskLeaf {
	return &taskv1.TaskLeaf{
		TaskId: taskID, Node: "gpu-001", Mode: taskv1.Mode_MODE_EXECUTE, Kind: "storage.mount", Revision: 1,
		Spec:          []byte("spec"),
		AllowedImpact: []taskv1.Impact{taskv1.Impact_IMPACT_DRAIN, taskv1.Impact_IMPACT_REBOOT},
		Deadline:      durationpb.New(time.Minute),
		PlanDigest:    make([]byte, 32),
		RetryOf:       otherID,
		Project:       "blue",
		Labels:        []*taskv1.Label{{Key: "a", Value: "1"}, {Key: "b"}},
		Cause:         &taskv1.Cause{Resource: "slurm/a/node/gpu-001", Generation: 1},
		SecretDigests: []*taskv1.SecretDigest{{Reference: "munge", Salt: make([]byte, 16), Sha256: make([]byte, 32)}},
		Reason:        "because",
	}
}

func TestCheckLeaf(t *testing.T) {
	if err := envelope.CheckLeaf(goodLeaf()); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		field string // that the error names
		edit  func(*taskv1.TaskLeaf)
	}{
		{"task_id", func(l *taskv1.TaskLeaf) { l.TaskId = "" }},
		{"task_id", func(l *taskv1.TaskLeaf) { l.TaskId = strings.ToUpper(taskID) }},
		{"task_id", func(l *taskv1.TaskLeaf) { l.TaskId = strings.ReplaceAll(taskID, "-", "") }},
		{"task_id", func(l *taskv1.TaskLeaf) { l.TaskId = "{" + taskID + "}" }},
		{"task_id", func(l *taskv1.TaskLeaf) { l.TaskId = strings.Replace(taskID, "-7abc", "-4abc", 1) }},
		{"task_id", func(l *taskv1.TaskLeaf) { l.TaskId = strings.Replace(taskID, "-8", "-c", 1) }},
		{"node", func(l *taskv1.TaskLeaf) { l.Node = "GPU-001" }},
		{"mode", func(l *taskv1.TaskLeaf) { l.Mode = 0 }},
		{"mode", func(l *taskv1.TaskLeaf) { l.Mode = 9 }},
		{"kind", func(l *taskv1.TaskLeaf) { l.Kind = "mount" }},
		{"kind", func(l *taskv1.TaskLeaf) { l.Kind = "storage.mount.now" }},
		{"kind", func(l *taskv1.TaskLeaf) { l.Kind = "storage." }},
		{"kind", func(l *taskv1.TaskLeaf) { l.Kind = "Storage.mount" }},
		{"revision", func(l *taskv1.TaskLeaf) { l.Revision = 0 }},
		{"allowed_impact[1]", func(l *taskv1.TaskLeaf) { l.AllowedImpact[1] = l.AllowedImpact[0] }},
		{"allowed_impact[0]", func(l *taskv1.TaskLeaf) { l.AllowedImpact[0] = 0 }},
		{"allowedImpact[0]", func(l *taskv1.TaskLeaf) { l.AllowedImpact[0] = 77 }},
		{"deadline", func(l *taskv1.TaskLeaf) { l.Deadline = durationpb.New(0) }},
		{"deadline", func(l *taskv1.TaskLeaf) { l.Deadline = durationpb.New(envelope.MaxDeadline + 1) }},
		{"plan_digest", func(l *taskv1.TaskLeaf) { l.PlanDigest = l.PlanDigest[1:] }},
		{"plan_digest", func(l *taskv1.TaskLeaf) { l.Mode = taskv1.Mode_MODE_PLAN }},
		{"retry_of", func(l *taskv1.TaskLeaf) { l.RetryOf = taskID }},
		{"retry_of", func(l *taskv1.TaskLeaf) { l.RetryOf = "x" }},
		{"project", func(l *taskv1.TaskLeaf) { l.Project = "a b" }},
		{"labels[1].key", func(l *taskv1.TaskLeaf) { l.Labels[1].Key = "a" }},
		{"labels[1].key", func(l *taskv1.TaskLeaf) { l.Labels[0].Key = "c" }},
		{"labels[0].key", func(l *taskv1.TaskLeaf) { l.Labels[0].Key = "A" }},
		{"labels[0].value", func(l *taskv1.TaskLeaf) { l.Labels[0].Value = "\x1b[31m" }},
		{"labels[0].value", func(l *taskv1.TaskLeaf) { l.Labels[0].Value = strings.Repeat("x", 64) }},
		{"labels", func(l *taskv1.TaskLeaf) {
			for i := range 70 {
				l.Labels = append(l.Labels, &taskv1.Label{Key: fmt.Sprintf("c%02d", i)})
			}
		}},
		{"cause.resource", func(l *taskv1.TaskLeaf) { l.Cause.Resource = "" }},
		{"cause.generation", func(l *taskv1.TaskLeaf) { l.Cause.Generation = -1 }},
		{"secret_digests[0].salt", func(l *taskv1.TaskLeaf) { l.SecretDigests[0].Salt = nil }},
		{"secret_digests[0].sha256", func(l *taskv1.TaskLeaf) { l.SecretDigests[0].Sha256 = nil }},
		{"secret_digests[1].reference", func(l *taskv1.TaskLeaf) { l.SecretDigests = append(l.SecretDigests, l.SecretDigests[0]) }},
		{"reason", func(l *taskv1.TaskLeaf) { l.Reason = strings.Repeat("x", envelope.MaxReason+1) }},
		{"unknown field", func(l *taskv1.TaskLeaf) { addUnknown(l) }},
		{"cause: unknown field", func(l *taskv1.TaskLeaf) { addUnknown(l.Cause) }},
		{"labels[1]: unknown field", func(l *taskv1.TaskLeaf) { addUnknown(l.Labels[1]) }},
	} {
		leaf := goodLeaf()
		tt.edit(leaf)
		err := envelope.CheckLeaf(leaf)
		if !errors.Is(err, envelope.ErrMalformed) || !strings.Contains(err.Error(), tt.field+": ") && !strings.HasSuffix(err.Error(), tt.field) {
			t.Errorf("%s: got %v", tt.field, err)
		}
		b, err := proto.Marshal(leaf)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := envelope.DecodeLeaf(b); !errors.Is(err, envelope.ErrMalformed) {
			t.Errorf("%s: decoded: %v", tt.field, err)
		}
	}
}

func TestCheckLeafNamesAllProblems(t *testing.T) {
	err := envelope.CheckLeaf(&taskv1.TaskLeaf{})
	var m envelope.Malformed
	if !errors.As(err, &m) || len(m) != 5 {
		t.Errorf("got %v, want the five fields that are missing", err)
	}
}

func goodSet() *taskv1.TaskSet {
	now := time.Now()
	return &taskv1.TaskSet{
		Cluster: make([]byte, 32), TrustRootVersion: 1, Size: 1, Root: make([]byte, 32),
		IssuedAt: timestamppb.New(now), NotBefore: timestamppb.New(now), NotAfter: timestamppb.New(now.Add(envelope.MaxLife)),
	}
}

func TestCheckTaskSet(t *testing.T) {
	if err := envelope.CheckTaskSet(goodSet()); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		field string
		edit  func(*taskv1.TaskSet)
	}{
		{"cluster", func(s *taskv1.TaskSet) { s.Cluster = s.Cluster[1:] }},
		{"trust_root_version", func(s *taskv1.TaskSet) { s.TrustRootVersion = 0 }},
		{"size", func(s *taskv1.TaskSet) { s.Size = 0 }},
		{"size", func(s *taskv1.TaskSet) { s.Size = 1 << 63 }},
		{"root", func(s *taskv1.TaskSet) { s.Root = append(s.Root, 0) }},
		{"issued_at", func(s *taskv1.TaskSet) { s.IssuedAt = nil }},
		{"not_before", func(s *taskv1.TaskSet) { s.NotBefore.Nanos = -1 }},
		{"not_after", func(s *taskv1.TaskSet) { s.NotAfter = nil }},
		{"not_after", func(s *taskv1.TaskSet) { s.NotAfter = s.NotBefore }},
		{"not_after", func(s *taskv1.TaskSet) {
			s.NotAfter = timestamppb.New(s.IssuedAt.AsTime().Add(envelope.MaxLife + 1))
		}},
		{"not_after", func(s *taskv1.TaskSet) {
			s.NotBefore = timestamppb.New(s.IssuedAt.AsTime().Add(-2 * time.Hour))
			s.NotAfter = timestamppb.New(s.IssuedAt.AsTime().Add(-time.Hour))
		}},
		{"unknown field", func(s *taskv1.TaskSet) { addUnknown(s) }},
		{"issuedAt: unknown field", func(s *taskv1.TaskSet) { addUnknown(s.IssuedAt) }},
	} {
		set := goodSet()
		tt.edit(set)
		err := envelope.CheckTaskSet(set)
		if !errors.Is(err, envelope.ErrMalformed) || !strings.Contains(err.Error(), tt.field) {
			t.Errorf("%s: got %v", tt.field, err)
		}
	}
}

func TestSignTaskSet(t *testing.T) {
	k := newKey(t)
	w := envelope.Window{Cluster: make([]byte, 32), TrustRootVersion: 1, IssuedAt: time.Now(), NotAfter: time.Now().Add(time.Hour)}
	second := goodLeaf()
	second.TaskId, second.RetryOf, second.Node = otherID, "", "gpu-002"
	env, signed, err := envelope.SignTaskSet(w, []*taskv1.TaskLeaf{goodLeaf(), second}, k)
	if err != nil {
		t.Fatal(err)
	}
	payload, _, err := envelope.Verify(env, envelope.TaskSetType, ring(k))
	if err != nil {
		t.Fatal(err)
	}
	set, err := envelope.DecodeTaskSet(payload)
	if err != nil || set.GetSize() != 2 || !set.GetNotBefore().AsTime().Equal(w.IssuedAt) {
		t.Fatalf("got %v, %v", set, err)
	}
	for i, node := range []string{"gpu-001", "gpu-002"} {
		if _, err := envelope.CheckProof(set, signed[i]); err != nil {
			t.Error(err)
		}
		if leaf, err := envelope.DecodeLeaf(signed[i].GetLeaf()); err != nil || leaf.GetNode() != node {
			t.Errorf("leaf %d: %v, %v", i, leaf, err)
		}
	}
	w.NotAfter = w.IssuedAt.Add(envelope.MaxLife + time.Second)
	if _, _, err := envelope.SignTaskSet(w, []*taskv1.TaskLeaf{goodLeaf()}, k); !errors.Is(err, envelope.ErrMalformed) {
		t.Errorf("too long a window: %v", err)
	}
	if _, _, err := envelope.SignTaskSet(w, []*taskv1.TaskLeaf{{}}, k); !errors.Is(err, envelope.ErrMalformed) {
		t.Errorf("a bad leaf: %v", err)
	}
}

func FuzzDecodeLeaf(f *testing.F) {
	b, err := envelope.EncodeLeaf(goodLeaf())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		leaf, err := envelope.DecodeLeaf(b)
		if err != nil {
			if !errors.Is(err, envelope.ErrMalformed) {
				t.Errorf("%v is not ErrMalformed", err)
			}
			return
		}
		if _, err := envelope.EncodeLeaf(leaf); err != nil {
			t.Errorf("what was decoded cannot be encoded: %v", err)
		}
	})
}

func FuzzDecodeTaskSet(f *testing.F) {
	b, err := proto.Marshal(goodSet())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		set, err := envelope.DecodeTaskSet(b)
		if err == nil && (set.GetSize() == 0 || set.GetNotAfter().AsTime().Sub(set.GetIssuedAt().AsTime()) > envelope.MaxLife) {
			t.Errorf("%v is no good set", set)
		}
	})
}
