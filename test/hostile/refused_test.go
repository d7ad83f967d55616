package hostile_test

import (
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/millwright/pki/envelope"
	"github.com/gpuaas/millwright/pki/trustroot"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// forgery is a task that must not run. All of them have the id of the genuine
// one.
type forgery struct {
	name, reason string
	make         func(w *world, leaf *taskv1.TaskLeaf) (*taskv1.Envelope, *taskv1.SignedLeaf)
}

// unknown is a field that no message has.
var unknown = protowire.AppendVarint(protowire.AppendTag(nil, 1000, protowire.VarintType), 1)

// wrapped changes the messages around what was signed.
func wrapped(change func(*taskv1.Envelope, *taskv1.SignedLeaf)) func(*world, *taskv1.TaskLeaf) (*taskv1.Envelope, *taskv1.SignedLeaf) {
	return func(w *world, leaf *taskv1.TaskLeaf) (*taskv1.Envelope, *taskv1.SignedLeaf) {
		env, signed := w.one(leaf)
		env, signed = proto.CloneOf(env), proto.CloneOf(signed)
		change(env, signed)
		return env, signed
	}
}

// window signs with another window or cluster.
func window(change func(*envelope.Window)) func(*world, *taskv1.TaskLeaf) (*taskv1.Envelope, *taskv1.SignedLeaf) {
	return func(w *world, leaf *taskv1.TaskLeaf) (*taskv1.Envelope, *taskv1.SignedLeaf) {
		return w.one(leaf, change)
	}
}

// changed changes the leaf before it is signed, with the operator's own key and
// no check of what is signed.
func changed(change func(*taskv1.TaskLeaf)) func(*world, *taskv1.TaskLeaf) (*taskv1.Envelope, *taskv1.SignedLeaf) {
	return func(w *world, leaf *taskv1.TaskLeaf) (*taskv1.Envelope, *taskv1.SignedLeaf) {
		change(leaf)
		return w.force(leaf, func(*taskv1.TaskSet) {}, w.c.Key())
	}
}

// set is changed for the task set.
func set(change func(*taskv1.TaskSet)) func(*world, *taskv1.TaskLeaf) (*taskv1.Envelope, *taskv1.SignedLeaf) {
	return func(w *world, leaf *taskv1.TaskLeaf) (*taskv1.Envelope, *taskv1.SignedLeaf) {
		return w.force(leaf, change, w.c.Key())
	}
}

// force signs whatever it is given.
func (w *world) force(leaf *taskv1.TaskLeaf, change func(*taskv1.TaskSet), keys ...envelope.Signer) (*taskv1.Envelope, *taskv1.SignedLeaf) {
	w.t.Helper()
	tree, err := envelope.BuildSet([][]byte{marshal(w.t, leaf), marshal(w.t, w.leaf("other"))})
	if err != nil {
		w.t.Fatal(err)
	}
	win := w.c.Window()
	s := &taskv1.TaskSet{
		Cluster: win.Cluster, TrustRootVersion: win.TrustRootVersion, IssuedAt: timestamppb.New(win.IssuedAt),
		NotBefore: timestamppb.New(win.IssuedAt), NotAfter: timestamppb.New(win.NotAfter), Size: 2, Root: tree.Root[:],
	}
	change(s)
	env, err := envelope.Sign(envelope.TaskSetType, marshal(w.t, s), keys...)
	if err != nil {
		w.t.Fatal(err)
	}
	return env, tree.Leaves[0]
}

func (w *world) newKey() *envelope.Key {
	w.t.Helper()
	key, err := envelope.GenerateKey()
	if err != nil {
		w.t.Fatal(err)
	}
	return key
}

func forgeries() []forgery {
	return []forgery{
		{"unknown field in the envelope", "MALFORMED", wrapped(func(e *taskv1.Envelope, _ *taskv1.SignedLeaf) { e.ProtoReflect().SetUnknown(unknown) })},
		{"unknown field in a signature", "MALFORMED", wrapped(func(e *taskv1.Envelope, _ *taskv1.SignedLeaf) {
			e.Signatures[0].ProtoReflect().SetUnknown(unknown)
		})},
		{"unknown field in the signed leaf", "MALFORMED", wrapped(func(_ *taskv1.Envelope, l *taskv1.SignedLeaf) { l.ProtoReflect().SetUnknown(unknown) })},
		{"unknown field in the proof", "MALFORMED", wrapped(func(_ *taskv1.Envelope, l *taskv1.SignedLeaf) { l.Proof.ProtoReflect().SetUnknown(unknown) })},
		{"unknown field in the task set", "MALFORMED", set(func(s *taskv1.TaskSet) { s.ProtoReflect().SetUnknown(unknown) })},
		{"unknown field in a time", "MALFORMED", set(func(s *taskv1.TaskSet) { s.NotAfter.ProtoReflect().SetUnknown(unknown) })},
		{"unknown field in the leaf", "MALFORMED", changed(func(l *taskv1.TaskLeaf) { l.ProtoReflect().SetUnknown(unknown) })},
		{"unknown field in a label", "MALFORMED", changed(func(l *taskv1.TaskLeaf) { l.Labels[0].ProtoReflect().SetUnknown(unknown) })},
		{"unknown field in the spec", "SPEC_INVALID", changed(func(l *taskv1.TaskLeaf) { l.Spec = append(l.Spec, unknown...) })},
		{"unknown mode", "MALFORMED", changed(func(l *taskv1.TaskLeaf) { l.Mode = 99 })},
		{"no mode", "MALFORMED", changed(func(l *taskv1.TaskLeaf) { l.Mode = 0 })},
		{"unknown impact", "MALFORMED", changed(func(l *taskv1.TaskLeaf) { l.AllowedImpact = []taskv1.Impact{99} })},
		{"unknown enum number in the spec", "SPEC_INVALID", changed(func(l *taskv1.TaskLeaf) {
			l.Kind, l.Spec = "task.resolve", []byte("\x0a\x2401890000-0000-7000-8000-000000000001\x12\x20"+string(make([]byte, 32))+"\x18\x63")
		})},
		{"unknown kind", "UNKNOWN_KIND", changed(func(l *taskv1.TaskLeaf) { l.Kind = "system.reboot_all" })},
		{"unknown revision", "UNKNOWN_KIND", changed(func(l *taskv1.TaskLeaf) { l.Revision = 99 })},
		{"spec that is none", "SPEC_INVALID", changed(func(l *taskv1.TaskLeaf) { l.Spec = []byte{0xff} })},
		{"spec that breaks a rule", "SPEC_INVALID", changed(func(l *taskv1.TaskLeaf) { l.Spec = nil })},

		{"another node's leaf", "WRONG_NODE", changed(func(l *taskv1.TaskLeaf) { l.Node = "gpu-002" })},
		{"another node's leaf of the same set", "WRONG_NODE", func(w *world, leaf *taskv1.TaskLeaf) (*taskv1.Envelope, *taskv1.SignedLeaf) {
			theirs := proto.CloneOf(leaf)
			theirs.Node = "gpu-002"
			env, signed := w.sign([]*taskv1.TaskLeaf{theirs, w.leaf("other")})
			return env, signed[0]
		}},
		{"a leaf of another set", "PROOF_INVALID", func(w *world, leaf *taskv1.TaskLeaf) (*taskv1.Envelope, *taskv1.SignedLeaf) {
			_, signed := w.one(leaf)
			env, _ := w.one(w.leaf("other"))
			return env, signed
		}},
		{"another leaf's proof", "PROOF_INVALID", wrapped(func(_ *taskv1.Envelope, l *taskv1.SignedLeaf) { l.Proof.Index = 2 })},
		{"no proof", "", wrapped(func(_ *taskv1.Envelope, l *taskv1.SignedLeaf) { l.Proof = nil })},
		{"no leaf", "", wrapped(func(_ *taskv1.Envelope, l *taskv1.SignedLeaf) { l.Leaf = nil })},

		{"wrong cluster", "WRONG_CLUSTER", window(func(w *envelope.Window) { w.Cluster = make([]byte, 32) })},
		{"issued before the floor", "BELOW_FLOOR", window(func(w *envelope.Window) { w.IssuedAt = w.IssuedAt.Add(-time.Hour) })},
		{"past its window", "WINDOW_PASSED", window(func(w *envelope.Window) {
			w.IssuedAt, w.NotAfter = w.IssuedAt.Add(-20*time.Second), w.IssuedAt.Add(-10*time.Second)
		})},
		{"a window too long", "MALFORMED", set(func(s *taskv1.TaskSet) {
			s.NotAfter = timestamppb.New(s.IssuedAt.AsTime().Add(8 * 24 * time.Hour))
		})},

		{"unsigned", "", wrapped(func(e *taskv1.Envelope, _ *taskv1.SignedLeaf) { e.Signatures = nil })},
		{"signed twice by one key", "", wrapped(func(e *taskv1.Envelope, _ *taskv1.SignedLeaf) { e.Signatures = append(e.Signatures, e.Signatures[0]) })},
		{"signed as something else", "MALFORMED", wrapped(func(e *taskv1.Envelope, _ *taskv1.SignedLeaf) { e.PayloadType = envelope.TrustRootType })},
		{"signed by an unknown key", "SIGNATURE_INVALID", func(w *world, leaf *taskv1.TaskLeaf) (*taskv1.Envelope, *taskv1.SignedLeaf) {
			return w.force(leaf, func(*taskv1.TaskSet) {}, w.newKey())
		}},
		{"signed by an unknown key beside a good one", "SIGNATURE_INVALID", func(w *world, leaf *taskv1.TaskLeaf) (*taskv1.Envelope, *taskv1.SignedLeaf) {
			return w.force(leaf, func(*taskv1.TaskSet) {}, w.c.Key(), w.newKey())
		}},
		{"an unknown key's signature under a known key's id", "SIGNATURE_INVALID", func(w *world, leaf *taskv1.TaskLeaf) (*taskv1.Envelope, *taskv1.SignedLeaf) {
			env, signed := w.force(leaf, func(*taskv1.TaskSet) {}, w.newKey())
			good, _ := w.one(leaf)
			env.Signatures[0].KeyId = good.GetSignatures()[0].GetKeyId()
			return env, signed
		}},
		{"signed by the recovery key", "SIGNATURE_INVALID", func(w *world, leaf *taskv1.TaskLeaf) (*taskv1.Envelope, *taskv1.SignedLeaf) {
			return w.force(leaf, func(*taskv1.TaskSet) {}, w.c.RecoveryKey())
		}},
	}
}

// TestRefused delivers tasks that must not run, and compares the node after
// each with what it was before.
func TestRefused(t *testing.T) {
	w := newWorld(t)
	leaf := w.leaf("genuine")
	env, signed := w.one(leaf)
	s := w.s.Next()
	w.settled(s)
	before := w.snapshot()
	for _, f := range forgeries() {
		env, signed := f.make(w, proto.CloneOf(leaf))
		if a := s.Deliver(f.name, env, signed); !refused(a, f.reason) {
			t.Errorf("%s: answer %v, want it refused with %s", f.name, a, f.reason)
		}
		if a := w.snapshot(); a != before {
			t.Errorf("%s: the node has changed", f.name)
			before = a
		}
	}
	w.runs(s, env, signed, leaf.GetTaskId(), "genuine")
}

// TestDeferred delivers tasks that may become good. They leave no trace either.
func TestDeferred(t *testing.T) {
	w := newWorld(t)
	leaf := w.leaf("genuine")
	env, signed := w.one(leaf)
	s := w.s.Next()
	w.settled(s)
	before := w.snapshot()
	for _, d := range []struct {
		name   string
		reason trustroot.Reason
		make   func(*world, *taskv1.TaskLeaf) (*taskv1.Envelope, *taskv1.SignedLeaf)
	}{
		{"signed under a newer trust root", trustroot.ReasonTrustRootBehind, window(func(w *envelope.Window) { w.TrustRootVersion++ })},
		{"signed in the future", "CLOCK_UNTRUSTED", window(func(w *envelope.Window) { w.IssuedAt = w.IssuedAt.Add(time.Hour / 2) })},
	} {
		env, signed := d.make(w, proto.CloneOf(leaf))
		if a := s.Deliver(d.name, env, signed); a.GetDeferred().GetReason() != string(d.reason) {
			t.Errorf("%s: answer %v, want it deferred with %s", d.name, a, d.reason)
		}
	}
	w.unchanged(before)
	w.runs(s, env, signed, leaf.GetTaskId(), "genuine")
}

// TestAssignmentWithoutParts is about messages in which something is missing.
func TestAssignmentWithoutParts(t *testing.T) {
	w := newWorld(t)
	env, signed := w.one(w.leaf("genuine"))
	s := w.s.Next()
	w.settled(s)
	before := w.snapshot()
	for _, a := range []*agentv1.Assignment{
		{AssignmentId: "1"}, {AssignmentId: "2", Envelope: env}, {AssignmentId: "3", SignedLeaf: signed},
		{AssignmentId: "4", Envelope: new(taskv1.Envelope), SignedLeaf: new(taskv1.SignedLeaf)},
	} {
		w.mustRefuse(s, a.GetAssignmentId(), a.GetEnvelope(), a.GetSignedLeaf())
	}
	w.unchanged(before)
}
