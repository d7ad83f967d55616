package formats_test

import (
	"crypto/ed25519"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/millwright/pki/envelope"
	"github.com/gpuaas/millwright/pki/trustroot"
	storagev1 "github.com/gpuaas/millwright/proto/millwright/storage/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
)

// What the vectors are about. All of it is fixed, and so are the signatures.
const (
	vectorNode = "gpu-001"
	vectorBoot = "5d1f4c0e-6f5b-4b53-9a55-0d4d9d6f2f11"
	journalA   = "6f0f7d2c-29a1-4e5e-8c57-7f4a1c0b9a01"
	journalB   = "b3c1f5de-1b8e-4a57-9b69-2a3e5d7c8f02"
)

var vectorTime = time.Date(2026, time.November, 1, 12, 0, 0, 0, time.UTC)

// seedKey is a signing key that everybody may know.
type seedKey struct {
	name    string
	seed    []byte
	private ed25519.PrivateKey
}

func newSeedKey(name string) seedKey {
	seed := sum([]byte("millwright test key " + name))
	return seedKey{name, seed, ed25519.NewKeyFromSeed(seed)}
}

func (k seedKey) public() ed25519.PublicKey { return k.private.Public().(ed25519.PublicKey) }

// KeyID implements envelope.Signer.
func (k seedKey) KeyID() string { return envelope.KeyID(taskv1.KeyType_KEY_TYPE_ED25519, k.public()) }

// SignMessage implements envelope.Signer.
func (k seedKey) SignMessage(m []byte) ([]byte, error) { return ed25519.Sign(k.private, m), nil }

func (k seedKey) trusted(roles ...taskv1.KeyRole) *taskv1.TrustKey {
	return trustroot.NewKey(k.name, k.public(), time.Time{}, roles...)
}

// maker makes the vectors of the release in work.
type maker struct {
	t *testing.T
	vectors

	alice, bob, carol, slurm, rec1, rec2 seedKey
	root                                 *trustroot.Root
}

func makeVectors(t *testing.T) {
	t.Helper()
	m := &maker{t: t, alice: newSeedKey("alice"), bob: newSeedKey("bob"), carol: newSeedKey("carol"), slurm: newSeedKey("slurm"),
		rec1: newSeedKey("recovery-1"), rec2: newSeedKey("recovery-2")}
	for _, k := range []seedKey{m.alice, m.bob, m.carol, m.slurm, m.rec1, m.rec2} {
		m.Keys = append(m.Keys, keyVector{Name: k.name, Type: uint8(taskv1.KeyType_KEY_TYPE_ED25519), Seed: k.seed, Public: hexBytes(k.public()), ID: k.KeyID()})
	}
	m.makeTrustRoot()
	m.makeSet(1, 1, m.alice)
	m.makeSet(2, 2, m.alice, m.bob)
	m.makeSet(3, 5, m.slurm)
	m.makeJournal()
	m.makePlan()
	dir := filepath.Join("testdata", release, "vectors")
	m.must(os.MkdirAll(dir, 0o755))
	for name, part := range m.files() {
		b, err := json.MarshalIndent(part, "", "  ")
		m.must(err)
		m.must(os.WriteFile(filepath.Join(dir, name), append(b, '\n'), 0o644))
	}
}

func (m *maker) must(err error) {
	m.t.Helper()
	if err != nil {
		m.t.Fatal(err)
	}
}

func (m *maker) encode(p proto.Message) []byte {
	m.t.Helper()
	return canonical(p.ProtoReflect())
}

// makeTrustRoot makes a genesis; a version with a second operator, of whom two
// must sign; and one that removes the first.
func (m *maker) makeTrustRoot() {
	const operator, recovery = taskv1.KeyRole_KEY_ROLE_OPERATOR, taskv1.KeyRole_KEY_ROLE_RECOVERY
	root, err := trustroot.SignGenesis(trustroot.Genesis{
		TrustDomain: "vectors.example", IssuedAt: vectorTime,
		Keys: []*taskv1.TrustKey{m.alice.trusted(operator), m.slurm.trusted(taskv1.KeyRole_KEY_ROLE_CONTROLLER), m.rec1.trusted(recovery)},
	}, m.rec1, m.alice)
	m.must(err)
	root, err = root.SignUpdate(trustroot.Update{
		IssuedAt: vectorTime.Add(time.Hour), Add: []*taskv1.TrustKey{m.bob.trusted(operator), m.rec2.trusted(recovery)},
		Thresholds: []*taskv1.Threshold{{Role: operator, Keys: 2}, {Role: recovery, Keys: 2}},
	}, m.rec1)
	m.must(err)
	root, err = root.SignUpdate(trustroot.Update{
		IssuedAt: vectorTime.Add(2 * time.Hour), Add: []*taskv1.TrustKey{m.carol.trusted(operator)},
		Remove: []*taskv1.RemovedKey{{Id: m.alice.KeyID(), CompromisedSince: timestamppb.New(vectorTime.Add(90 * time.Minute))}},
	}, m.rec2, m.rec1)
	m.must(err)
	m.root = root
	cluster := root.Cluster()
	m.TrustRoot.Cluster = cluster[:]
	for _, env := range root.Chain() {
		m.TrustRoot.Versions = append(m.TrustRoot.Versions, m.envelope(env))
	}
}

func (m *maker) envelope(env *taskv1.Envelope) envelopeVector {
	out := envelopeVector{
		PayloadType: env.GetPayloadType(), Payload: env.GetPayload(), PayloadSHA256: sum(env.GetPayload()), Envelope: m.encode(env),
		PAE: fmt.Appendf(nil, "DSSEv1 %d %s %d %s", len(env.GetPayloadType()), env.GetPayloadType(), len(env.GetPayload()), env.GetPayload()),
	}
	for _, s := range env.GetSignatures() {
		out.Signatures = append(out.Signatures, signatureVector{s.GetKeyId(), s.GetSignature()})
	}
	return out
}

func (m *maker) makeSet(version uint64, size int, signers ...envelope.Signer) {
	var leaves []*taskv1.TaskLeaf
	for i := range size {
		leaves = append(leaves, &taskv1.TaskLeaf{
			TaskId: fmt.Sprintf("019a3f0a-4c00-7000-8000-%04d%08d", size, i), Node: fmt.Sprintf("gpu-%03d", i+1),
			Mode: taskv1.Mode_MODE_EXECUTE, Kind: "storage.mount", Revision: 1,
			Spec: m.encode(&storagev1.MountSpec{Target: "/data", Source: &storagev1.MountSpec_Bind{Bind: &storagev1.BindSource{Path: "/srv/data"}}}),
		})
	}
	last := leaves[size-1] // one in which everything is set
	last.AllowedImpact = []taskv1.Impact{taskv1.Impact_IMPACT_DRAIN, taskv1.Impact_IMPACT_REBOOT}
	last.Deadline = durationpb.New(90 * time.Second)
	last.PlanDigest = sum([]byte("a plan"))
	last.RetryOf, last.Project, last.Reason = "019a3f0a-4c00-7000-8000-000000000000", "research", "Überprüfung"
	last.Labels = []*taskv1.Label{{Key: "pool", Value: "a100"}, {Key: "rack", Value: "r7"}}
	last.Cause = &taskv1.Cause{Resource: "slurm/cluster-a/node/gpu-001", Generation: 3, Epoch: 7, CorrelationId: "c-1"}
	last.SecretDigests = []*taskv1.SecretDigest{{Reference: "munge-key", Salt: sum([]byte("salt"))[:16], Sha256: sum(sum([]byte("salt"))[:16], []byte("value"))}}
	cluster := m.root.Cluster()
	issued := vectorTime.Add(time.Duration(version) * time.Hour)
	env, signed, err := envelope.SignTaskSet(envelope.Window{
		Cluster: cluster[:], TrustRootVersion: version, IssuedAt: issued, NotBefore: issued, NotAfter: issued.Add(24 * time.Hour),
	}, leaves, signers...)
	m.must(err)
	set, err := envelope.DecodeTaskSet(env.GetPayload())
	m.must(err)
	v := setVector{Version: version, Root: set.GetRoot(), Envelope: m.envelope(env)}
	for _, l := range signed {
		lv := leafVector{Leaf: l.GetLeaf(), Hash: sum([]byte{0}, l.GetLeaf()), Proof: []hexBytes{}}
		for _, h := range l.GetProof().GetHashes() {
			lv.Proof = append(lv.Proof, h)
		}
		v.Leaves = append(v.Leaves, lv)
	}
	m.Sets = append(m.Sets, v)
}

// makeJournal makes two frames of one journal, and two of the one that began
// when it was lost.
func (m *maker) makeJournal() {
	m.Journal.Node = vectorNode
	env := new(taskv1.Envelope)
	m.must(proto.Unmarshal(m.Sets[0].Envelope.Envelope, env))
	leaf := m.Sets[0].Leaves[0]
	taskID := "019a3f0a-4c00-7000-8000-000100000000"
	opened := func(previous string, reason taskv1.JournalReason) *taskv1.Event {
		return &taskv1.Event{Payload: &taskv1.Event_JournalOpened{JournalOpened: &taskv1.JournalOpened{
			PreviousJournalId: previous, Reason: reason, Floor: timestamppb.New(vectorTime), Generation: 1,
		}}}
	}
	first := func(previous string) []byte { return sum(fmt.Appendf(nil, "%s\x00%d\x00%s", vectorNode, 1, previous)) }
	prev := m.frame(journalA, 1, first(""), opened("", taskv1.JournalReason_JOURNAL_REASON_JOINED))
	m.frame(journalA, 2, prev, &taskv1.Event{Payload: &taskv1.Event_Accepted{Accepted: &taskv1.TaskAccepted{
		TaskId: taskID, LeafHash: leaf.Hash, Envelope: env, SignedLeaf: leaf.signed(0), TrustRootVersion: 1,
		AuthorizedBy: []*taskv1.Authorizer{{KeyId: m.alice.KeyID(), Name: "alice", Role: taskv1.KeyRole_KEY_ROLE_OPERATOR}},
	}}})
	prev = m.frame(journalB, 1, first(journalA), opened(journalA, taskv1.JournalReason_JOURNAL_REASON_MISSING))
	m.frame(journalB, 2, prev, &taskv1.Event{Payload: &taskv1.Event_IntentChanged{IntentChanged: &taskv1.IntentChanged{
		Key: "mount:/data", State: taskv1.IntentState_INTENT_STATE_ACTIVE, TaskId: taskID,
	}}})
}

func (m *maker) frame(journal string, seq uint64, prev []byte, ev *taskv1.Event) (hash []byte) {
	at := time.Duration(len(m.Journal.Frames)) * time.Minute
	ev.JournalId, ev.Seq, ev.PrevHash, ev.BootId = journal, seq, prev, vectorBoot
	ev.WallTime, ev.BootTime = timestamppb.New(vectorTime.Add(at)), durationpb.New(10*time.Second+at)
	b := m.encode(ev)
	m.Journal.Frames = append(m.Journal.Frames, frameVector{Frame: b, PrevHash: prev, SHA256: sum(b)})
	return sum(b)
}

func (m *maker) makePlan() {
	b, digest, err := tasks.MarshalPlan(&taskv1.Plan{
		Kind: "storage.mount", Revision: 1, Impact: []taskv1.Impact{taskv1.Impact_IMPACT_SERVICE_RESTART},
		Differences: []*taskv1.Difference{{Subject: "mount /data", Want: "bind /srv/data"}},
		Steps: []*taskv1.PlannedStep{
			{Type: "file.write", Revision: 1, Effect: taskv1.Effect_EFFECT_IDEMPOTENT, Title: "write data.mount", Undoable: true,
				Args: m.encode(&taskv1.WriteFileStep{Path: "/etc/systemd/system/data.mount", Data: []byte("[Mount]\n"), Mode: 0o644})},
			{Type: "command.run", Revision: 1, Effect: taskv1.Effect_EFFECT_AT_MOST_ONCE, Title: "run true", Timeout: durationpb.New(time.Minute),
				Args: m.encode(&taskv1.CommandStep{Argv: []string{"/usr/bin/true"}, SuccessExitCodes: []int32{0, 7}})},
		},
	})
	m.must(err)
	m.Plan = planVector{Plan: b, Digest: digest}
}
