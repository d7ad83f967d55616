package formats_test

import (
	"bytes"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/millwright/pki/envelope"
	"github.com/gpuaas/millwright/pki/trustroot"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// hexBytes are bytes that JSON shows in hexadecimal.
type hexBytes []byte

// MarshalText implements encoding.TextMarshaler.
func (h hexBytes) MarshalText() ([]byte, error) { return []byte(hex.EncodeToString(h)), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (h *hexBytes) UnmarshalText(text []byte) (err error) {
	*h, err = hex.DecodeString(string(text))
	return err
}

// The vectors, as the files below testdata/<release>/vectors hold them.
type (
	vectors struct {
		Keys      []keyVector
		TrustRoot trustVector
		Sets      []setVector
		Journal   journalVector
		Plan      planVector
	}
	keyVector struct {
		Name   string   `json:"name"`
		Type   uint8    `json:"type"`
		Seed   hexBytes `json:"seed"`
		Public hexBytes `json:"public"`
		ID     string   `json:"key_id"`
	}
	signatureVector struct {
		KeyID     string   `json:"key_id"`
		Signature hexBytes `json:"signature"`
	}
	envelopeVector struct {
		PayloadType   string            `json:"payload_type"`
		Payload       hexBytes          `json:"payload"`
		PayloadSHA256 hexBytes          `json:"payload_sha256"`
		PAE           hexBytes          `json:"pae"`
		Signatures    []signatureVector `json:"signatures"`
		Envelope      hexBytes          `json:"envelope"`
	}
	trustVector struct {
		Cluster  hexBytes         `json:"cluster"`
		Versions []envelopeVector `json:"versions"`
	}
	leafVector struct {
		Leaf  hexBytes   `json:"leaf"`
		Hash  hexBytes   `json:"leaf_hash"`
		Proof []hexBytes `json:"proof"`
	}
	setVector struct {
		Version  uint64         `json:"trust_root_version"`
		Root     hexBytes       `json:"root"`
		Leaves   []leafVector   `json:"leaves"`
		Envelope envelopeVector `json:"envelope"`
	}
	frameVector struct {
		Frame    hexBytes `json:"frame"`
		PrevHash hexBytes `json:"prev_hash"`
		SHA256   hexBytes `json:"sha256"`
	}
	journalVector struct {
		Node   string        `json:"node"`
		Frames []frameVector `json:"frames"`
	}
	planVector struct {
		Plan   hexBytes `json:"plan"`
		Digest hexBytes `json:"plan_digest"`
	}
)

// files names the file of each part.
func (v *vectors) files() map[string]any {
	return map[string]any{
		"keys.json": &v.Keys, "trust_root.json": &v.TrustRoot, "task_sets.json": &v.Sets,
		"event_chain.json": &v.Journal, "plan.json": &v.Plan,
	}
}

// read returns the vectors of a release. A word that is not known is an error.
func read(t *testing.T, rel string) *vectors {
	t.Helper()
	v := new(vectors)
	for name, part := range v.files() {
		b, err := os.ReadFile(filepath.Join("testdata", rel, "vectors", name))
		if err != nil {
			t.Fatal(err)
		}
		d := json.NewDecoder(bytes.NewReader(b))
		d.DisallowUnknownFields()
		if err := d.Decode(part); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
	}
	if len(v.Keys) == 0 || len(v.TrustRoot.Versions) != 3 || len(v.Sets) != 3 || len(v.Journal.Frames) != 4 {
		t.Fatalf("%s: %d keys, %d versions, %d sets, %d frames", rel, len(v.Keys), len(v.TrustRoot.Versions), len(v.Sets), len(v.Journal.Frames))
	}
	return v
}

// TestVectors verifies the vectors of each release twice: by package pki, and by
// computations that are written down here from proto/README.md alone.
func TestVectors(t *testing.T) {
	if *update {
		makeVectors(t)
	}
	releases, err := filepath.Glob("testdata/v*")
	if err != nil || len(releases) == 0 {
		t.Fatalf("no releases below testdata (%v)", err)
	}
	for _, dir := range releases {
		t.Run(filepath.Base(dir), func(t *testing.T) {
			v := read(t, filepath.Base(dir))
			t.Run("keys", v.checkKeys)
			t.Run("trust_root", v.checkTrustRoot)
			t.Run("task_sets", v.checkSets)
			t.Run("event_chain", v.checkJournal)
			t.Run("plan", v.checkPlan)
		})
	}
}

func same(t *testing.T, what string, got, want []byte) {
	t.Helper()
	if !bytes.Equal(got, want) {
		t.Errorf("%s = %x, want %x", what, got, want)
	}
}

func sum(parts ...[]byte) []byte {
	h := sha256.Sum256(bytes.Join(parts, nil))
	return h[:]
}

func (v *vectors) checkKeys(t *testing.T) {
	for _, k := range v.Keys {
		public := ed25519.NewKeyFromSeed(k.Seed).Public().(ed25519.PublicKey)
		same(t, k.Name, public, k.Public)
		if got := hex.EncodeToString(sum([]byte{k.Type}, k.Public)[:16]); got != k.ID {
			t.Errorf("%s: key id %s, want %s", k.Name, got, k.ID)
		}
		if got := envelope.KeyID(taskv1.KeyType(k.Type), k.Public); got != k.ID {
			t.Errorf("%s: package envelope says %s, want %s", k.Name, got, k.ID)
		}
	}
}

func (v *vectors) public(t *testing.T, id string) ed25519.PublicKey {
	for _, k := range v.Keys {
		if k.ID == id {
			return ed25519.PublicKey(k.Public)
		}
	}
	t.Errorf("no key %s", id)
	return make(ed25519.PublicKey, ed25519.PublicKeySize)
}

// message is the envelope as package pki takes it. Its signatures are checked
// here without it.
func (v *vectors) message(t *testing.T, e envelopeVector) *taskv1.Envelope {
	t.Helper()
	pae := fmt.Appendf(nil, "DSSEv1 %d %s %d %s", len(e.PayloadType), e.PayloadType, len(e.Payload), e.Payload)
	same(t, "pae", pae, e.PAE)
	same(t, "payload_sha256", sum(e.Payload), e.PayloadSHA256)
	want := &taskv1.Envelope{PayloadType: e.PayloadType, Payload: e.Payload}
	for _, s := range e.Signatures {
		if !ed25519.Verify(v.public(t, s.KeyID), pae, s.Signature) {
			t.Errorf("the signature of key %s does not verify", s.KeyID)
		}
		want.Signatures = append(want.Signatures, &taskv1.Signature{KeyId: s.KeyID, Signature: s.Signature})
	}
	env, err := envelope.Decode(e.Envelope)
	if err != nil || !proto.Equal(env, want) {
		t.Fatalf("Decode(envelope) = %v, %v, want %v", env, err, want)
	}
	return env
}

func (v *vectors) checkTrustRoot(t *testing.T) {
	root := v.root(t)
	if root.Version() != 3 {
		t.Errorf("the chain ends at version %d", root.Version())
	}
	var previous []byte
	for i, version := range v.TrustRoot.Versions {
		fields := fieldsOf(t, version.Payload)
		if n := fields[1][0].number; n != uint64(i+1) {
			t.Errorf("version %d says that it is version %d", i+1, n)
		}
		if i == 0 {
			same(t, "cluster", version.PayloadSHA256, v.TrustRoot.Cluster)
		} else {
			same(t, "previous", fields[2][0].bytes, previous)
		}
		previous = version.PayloadSHA256
		if hash := sum(version.Payload); !root.Contains(hash) {
			t.Errorf("version %d (%x) is not in the chain", i+1, hash)
		}
	}
	broken := root.Chain()
	broken[1], broken[2] = broken[2], broken[1]
	if _, err := trustroot.Open(broken, v.TrustRoot.Cluster); !errors.Is(err, trustroot.ErrChain) {
		t.Errorf("Open(versions out of order) = %v", err)
	}
}

func (v *vectors) root(t *testing.T) *trustroot.Root {
	t.Helper()
	var chain []*taskv1.Envelope
	for _, version := range v.TrustRoot.Versions {
		chain = append(chain, v.message(t, version))
	}
	root, err := trustroot.Open(chain, v.TrustRoot.Cluster)
	if err != nil {
		t.Fatal(err)
	}
	return root
}

func (v *vectors) checkSets(t *testing.T) {
	last := v.root(t)
	for i, size := range []int{1, 2, 5} {
		set := v.Sets[i]
		if len(set.Leaves) != size {
			t.Fatalf("set %d has %d leaves, want %d", i, len(set.Leaves), size)
		}
		env := v.message(t, set.Envelope)
		var hashes [][]byte
		for _, l := range set.Leaves {
			same(t, "leaf_hash", sum([]byte{0}, l.Leaf), l.Hash)
			hashes = append(hashes, l.Hash)
		}
		same(t, "root", merkleRoot(hashes), set.Root)
		same(t, "root in the payload", fieldsOf(t, set.Envelope.Payload)[7][0].bytes, set.Root)
		then, ok := last.At(set.Version)
		if !ok {
			t.Fatalf("no version %d", set.Version)
		}
		for n, l := range set.Leaves {
			same(t, fmt.Sprintf("root by the proof of leaf %d", n), rootByProof(n, size, l), set.Root)
			signed := l.signed(uint64(n))
			if got, err := then.VerifyTaskSet(env, signed); err != nil || !bytes.Equal(got.LeafHash[:], l.Hash) {
				t.Errorf("VerifyTaskSet(leaf %d of %d) = %v, %v", n, size, got, err)
			}
			signed.Proof.Index++
			if _, err := then.VerifyTaskSet(env, signed); err == nil {
				t.Errorf("leaf %d of %d is taken for its neighbour", n, size)
			}
		}
	}
	v.refused(t, 0, 3, trustroot.ReasonSignatureInvalid) // its key was removed
	v.refused(t, 2, 2, trustroot.ReasonTrustRootBehind)
}

func (v *vectors) refused(t *testing.T, set int, version uint64, want trustroot.Reason) {
	t.Helper()
	then, _ := v.root(t).At(version)
	_, err := then.VerifySet(v.message(t, v.Sets[set].Envelope))
	var refusal *trustroot.Refusal
	if !errors.As(err, &refusal) || refusal.Reason != want {
		t.Errorf("set %d under version %d = %v, want %s", set, version, err, want)
	}
}

func (l leafVector) signed(index uint64) *taskv1.SignedLeaf {
	out := &taskv1.SignedLeaf{Leaf: l.Leaf, Proof: &taskv1.InclusionProof{Index: index}}
	for _, h := range l.Proof {
		out.Proof.Hashes = append(out.Proof.Hashes, h)
	}
	return out
}

// merkleRoot is MTH of RFC 6962, section 2.1, over the hashes of leaves.
func merkleRoot(hashes [][]byte) []byte {
	if len(hashes) == 1 {
		return hashes[0]
	}
	k := 1
	for 2*k < len(hashes) {
		k *= 2
	}
	return sum([]byte{1}, merkleRoot(hashes[:k]), merkleRoot(hashes[k:]))
}

// rootByProof follows an audit path from its leaf upwards (RFC 9162, section
// 2.1.3.2).
func rootByProof(index, size int, l leafVector) []byte {
	r := []byte(l.Hash)
	for fn, sn, i := index, size-1, 0; i < len(l.Proof); i++ {
		if sn == 0 {
			return nil
		}
		if fn%2 == 1 || fn == sn {
			r = sum([]byte{1}, l.Proof[i], r)
			for fn%2 == 0 && fn != 0 {
				fn, sn = fn/2, sn/2
			}
		} else {
			r = sum([]byte{1}, r, l.Proof[i])
		}
		fn, sn = fn/2, sn/2
	}
	return r
}
