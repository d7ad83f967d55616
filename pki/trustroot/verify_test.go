package trustroot_test

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/millwright/pki/envelope"
	"github.com/gpuaas/millwright/pki/pkitest"
	"github.com/gpuaas/millwright/pki/trustroot"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

func newLeaf(t testing.TB, node string) *taskv1.TaskLeaf {
	return &taskv1.TaskLeaf{
		TaskId: pkitest.NewTaskID(t), Node: node, Mode: taskv1.Mode_MODE_EXECUTE,
		Kind: "system.command", Revision: 1, Spec: []byte("spec"),
		Labels: []*taskv1.Label{{Key: "k", Value: "v"}},
	}
}

// refused checks the code of an error.
func refused(t *testing.T, err error, want trustroot.Reason) {
	t.Helper()
	var r *trustroot.Refusal
	if !errors.As(err, &r) {
		t.Fatalf("got %v, want a refusal %s", err, want)
	}
	if r.Reason != want {
		t.Errorf("got %s (%v), want %s", r.Reason, err, want)
	}
	if r.Deferred() != (want == trustroot.ReasonTrustRootBehind) {
		t.Errorf("%s: deferred = %v", r.Reason, r.Deferred())
	}
}

func TestVerifyTaskSet(t *testing.T) {
	c := pkitest.New(t)
	leaves := []*taskv1.TaskLeaf{newLeaf(t, "a"), newLeaf(t, "b"), newLeaf(t, "c")}
	env, signed := c.Sign(t, leaves...)
	for i, s := range signed {
		v, err := c.Root.VerifyTaskSet(env, s)
		if err != nil {
			t.Fatal(err)
		}
		if !proto.Equal(v.Leaf, leaves[i]) || v.LeafHash != envelope.LeafHash(s.GetLeaf()) || v.RootVersion != 1 {
			t.Errorf("leaf %d: got %v", i, v)
		}
		want := &taskv1.Authorizer{KeyId: c.Operator.KeyID(), Name: "alice", Role: taskv1.KeyRole_KEY_ROLE_OPERATOR}
		if len(v.Authorizers) != 1 || !proto.Equal(v.Authorizers[0], want) || !slices.Equal(v.RoleNames(), []string{"operator"}) {
			t.Errorf("authorized by %v as %v", v.Authorizers, v.RoleNames())
		}
	}
	// Who signs decides the roles that it counts for.
	env, signed, err := envelope.SignTaskSet(c.Window(), leaves, c.Controller)
	if err != nil {
		t.Fatal(err)
	}
	if v, err := c.Root.VerifyTaskSet(env, signed[0]); err != nil || !slices.Equal(v.RoleNames(), []string{"controller"}) {
		t.Errorf("controller: %v, %v", v, err)
	}
	env, signed, err = envelope.SignTaskSet(c.Window(), leaves, c.Controller, c.Operator)
	if err != nil {
		t.Fatal(err)
	}
	if v, err := c.Root.VerifyTaskSet(env, signed[0]); err != nil || !slices.Equal(v.RoleNames(), []string{"operator", "controller"}) {
		t.Errorf("both: %v, %v", v, err)
	}
}

func TestVerifyTaskSetRefuses(t *testing.T) {
	c := pkitest.New(t)
	leaf := newLeaf(t, "a")
	sign := func(w envelope.Window, keys ...envelope.Signer) (*taskv1.Envelope, *taskv1.SignedLeaf) {
		env, signed, err := envelope.SignTaskSet(w, []*taskv1.TaskLeaf{leaf}, keys...)
		if err != nil {
			t.Fatal(err)
		}
		return env, signed[0]
	}
	other := c.Window()
	other.Cluster = bytes.Repeat([]byte{1}, 32)
	newer := c.Window()
	newer.TrustRootVersion = 2
	for _, tt := range []struct {
		name   string
		window envelope.Window
		keys   []envelope.Signer
		want   trustroot.Reason
	}{
		{"stranger", c.Window(), []envelope.Signer{pkitest.NewKey(t)}, trustroot.ReasonSignatureInvalid},
		{"operator and stranger", c.Window(), []envelope.Signer{c.Operator, pkitest.NewKey(t)}, trustroot.ReasonSignatureInvalid},
		{"recovery key", c.Window(), []envelope.Signer{c.Recovery}, trustroot.ReasonSignatureInvalid},
		{"operator and recovery key", c.Window(), []envelope.Signer{c.Operator, c.Recovery}, trustroot.ReasonSignatureInvalid},
		{"own key, other cluster", other, []envelope.Signer{c.Operator}, trustroot.ReasonWrongCluster},
		{"other key, other cluster", other, []envelope.Signer{pkitest.NewKey(t)}, trustroot.ReasonWrongCluster},
		{"own key, newer root", newer, []envelope.Signer{c.Operator}, trustroot.ReasonTrustRootBehind},
		{"key of a newer root", newer, []envelope.Signer{pkitest.NewKey(t)}, trustroot.ReasonTrustRootBehind},
	} {
		t.Run(tt.name, func(t *testing.T) {
			env, signed := sign(tt.window, tt.keys...)
			_, err := c.Root.VerifyTaskSet(env, signed)
			refused(t, err, tt.want)
		})
	}
	env, signed := sign(c.Window(), c.Operator)
	_, foreign := sign(c.Window(), c.Operator)
	foreign.Leaf = mustEncode(t, newLeaf(t, "b"))
	_, err := c.Root.VerifyTaskSet(env, foreign)
	refused(t, err, trustroot.ReasonProofInvalid)
	_, err = c.Root.VerifyTaskSet(nil, signed)
	refused(t, err, trustroot.ReasonMalformed)
	_, err = c.Root.VerifyTaskSet(env, nil)
	refused(t, err, trustroot.ReasonMalformed)
	_, err = c.Root.VerifyTaskSet(c.Root.Chain()[0], signed)
	refused(t, err, trustroot.ReasonMalformed)
}

func mustEncode(t testing.TB, leaf *taskv1.TaskLeaf) []byte {
	t.Helper()
	b, err := envelope.EncodeLeaf(leaf)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// TestSignedNonsense is signed by a good key and breaks a rule of its form.
func TestSignedNonsense(t *testing.T) {
	c := pkitest.New(t)
	signRaw := func(editSet func(*taskv1.TaskSet), leaf []byte) (*taskv1.Envelope, *taskv1.SignedLeaf) {
		tree, err := envelope.BuildSet([][]byte{leaf})
		if err != nil {
			t.Fatal(err)
		}
		good, _ := c.Sign(t, newLeaf(t, "a"))
		set := new(taskv1.TaskSet)
		if err := proto.Unmarshal(good.GetPayload(), set); err != nil {
			t.Fatal(err)
		}
		set.Root, set.Size = tree.Root[:], 1
		editSet(set)
		payload, err := proto.Marshal(set)
		if err != nil {
			t.Fatal(err)
		}
		env, err := envelope.Sign(envelope.TaskSetType, payload, c.Operator)
		if err != nil {
			t.Fatal(err)
		}
		return env, tree.Leaves[0]
	}
	leafWith := func(edit func(*taskv1.TaskLeaf)) []byte {
		leaf := newLeaf(t, "a")
		edit(leaf)
		b, err := proto.Marshal(leaf)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	same := func(*taskv1.TaskSet) {}
	good := leafWith(func(*taskv1.TaskLeaf) {})
	for name, tt := range map[string]struct {
		set  func(*taskv1.TaskSet)
		leaf []byte
	}{
		"unknown field in the set":  {func(s *taskv1.TaskSet) { unknown(s) }, good},
		"size 0":                    {func(s *taskv1.TaskSet) { s.Size = 0 }, good},
		"eight days":                {func(s *taskv1.TaskSet) { s.NotAfter.Seconds += 8 * 24 * 3600 }, good},
		"unknown field in the leaf": {same, leafWith(func(l *taskv1.TaskLeaf) { unknown(l) })},
		"unknown enum number":       {same, leafWith(func(l *taskv1.TaskLeaf) { l.Mode = 7 })},
		"no mode":                   {same, leafWith(func(l *taskv1.TaskLeaf) { l.Mode = 0 })},
		"unsorted labels":           {same, leafWith(func(l *taskv1.TaskLeaf) { l.Labels = append(l.Labels, &taskv1.Label{Key: "a"}) })},
		"not a leaf":                {same, []byte("not a leaf")},
	} {
		t.Run(name, func(t *testing.T) {
			env, signed := signRaw(tt.set, tt.leaf)
			_, err := c.Root.VerifyTaskSet(env, signed)
			refused(t, err, trustroot.ReasonMalformed)
		})
	}
	env, signed := signRaw(same, good)
	if _, err := c.Root.VerifyTaskSet(env, signed); err != nil {
		t.Errorf("the good one of this test is refused: %v", err)
	}
}

func unknown(m proto.Message) {
	m.ProtoReflect().SetUnknown(protowire.AppendVarint(protowire.AppendTag(nil, 1000, protowire.VarintType), 1))
}

// TestFlipEveryBit alters envelope and leaf at every bit, as they travel. Each
// time the answer is a refusal and never a deferral, and the genuine one is
// good all the while.
func TestFlipEveryBit(t *testing.T) {
	c := pkitest.New(t)
	for _, size := range []int{1, 5} {
		t.Run(fmt.Sprintf("set of %d", size), func(t *testing.T) {
			var leaves []*taskv1.TaskLeaf
			for range size {
				leaves = append(leaves, newLeaf(t, "a"))
			}
			env, signed := c.Sign(t, leaves...)
			leaf := signed[size/2]
			flipEveryBit(t, env, func(e *taskv1.Envelope) error {
				_, err := c.Root.VerifyTaskSet(e, leaf)
				return err
			})
			flipEveryBit(t, leaf, func(l *taskv1.SignedLeaf) error {
				_, err := c.Root.VerifyTaskSet(env, l)
				return err
			})
		})
	}
}

func flipEveryBit[M proto.Message](t *testing.T, m M, verify func(M) error) {
	t.Helper()
	if err := verify(m); err != nil {
		t.Fatalf("the genuine one is refused: %v", err)
	}
	b, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 8 * len(b) {
		bad := bytes.Clone(b)
		bad[i/8] ^= 1 << (i % 8)
		altered := m.ProtoReflect().New().Interface().(M)
		if err := proto.Unmarshal(bad, altered); err != nil {
			continue // it never reaches a verifier
		}
		var r *trustroot.Refusal
		switch err := verify(altered); {
		case err == nil:
			t.Fatalf("%T: byte %d, bit %d altered: accepted", m, i/8, i%8)
		case !errors.As(err, &r) || r.Deferred():
			t.Fatalf("%T: byte %d, bit %d altered: %v is not a refusal", m, i/8, i%8, err)
		}
	}
}

func TestEndedKey(t *testing.T) {
	end := time.Now()
	operator, recovery := pkitest.NewKey(t), pkitest.NewKey(t)
	root, err := trustroot.SignGenesis(trustroot.Genesis{
		TrustDomain: "td.test", IssuedAt: end.Add(-time.Hour),
		Keys: []*taskv1.TrustKey{
			trustroot.NewKey("alice", operator.Public(), end, taskv1.KeyRole_KEY_ROLE_OPERATOR),
			trustroot.NewKey("recovery", recovery.Public(), time.Time{}, taskv1.KeyRole_KEY_ROLE_RECOVERY),
		},
	}, operator, recovery)
	if err != nil {
		t.Fatal(err)
	}
	cluster := root.Cluster()
	for issued, ok := range map[time.Time]bool{end.Add(-time.Second): true, end: false, end.Add(time.Second): false} {
		env, signed, err := envelope.SignTaskSet(envelope.Window{
			Cluster: cluster[:], TrustRootVersion: 1, IssuedAt: issued, NotAfter: end.Add(time.Hour),
		}, []*taskv1.TaskLeaf{newLeaf(t, "a")}, operator)
		if err != nil {
			t.Fatal(err)
		}
		_, err = root.VerifyTaskSet(env, signed[0])
		if ok && err != nil {
			t.Errorf("issued before the end: %v", err)
		}
		if !ok {
			refused(t, err, trustroot.ReasonSignatureInvalid)
		}
	}
}

// TestThreshold asks for two operators; the controller's own threshold of one
// does not make up for one that is missing.
func TestThreshold(t *testing.T) {
	a, b, controller, recovery := pkitest.NewKey(t), pkitest.NewKey(t), pkitest.NewKey(t), pkitest.NewKey(t)
	root, err := trustroot.SignGenesis(trustroot.Genesis{
		TrustDomain: "td.test", IssuedAt: time.Now(),
		Keys: []*taskv1.TrustKey{
			trustroot.NewKey("a", a.Public(), time.Time{}, taskv1.KeyRole_KEY_ROLE_OPERATOR),
			trustroot.NewKey("b", b.Public(), time.Time{}, taskv1.KeyRole_KEY_ROLE_OPERATOR),
			trustroot.NewKey("c", controller.Public(), time.Time{}, taskv1.KeyRole_KEY_ROLE_CONTROLLER),
			trustroot.NewKey("r", recovery.Public(), time.Time{}, taskv1.KeyRole_KEY_ROLE_RECOVERY),
		},
		Thresholds: []*taskv1.Threshold{{Role: taskv1.KeyRole_KEY_ROLE_OPERATOR, Keys: 2}},
	}, recovery)
	if err != nil {
		t.Fatal(err)
	}
	cluster := root.Cluster()
	for name, tt := range map[string]struct {
		keys  []envelope.Signer
		roles []string
	}{
		"one operator":                {[]envelope.Signer{a}, nil},
		"two operators":               {[]envelope.Signer{a, b}, []string{"operator"}},
		"controller":                  {[]envelope.Signer{controller}, []string{"controller"}},
		"one operator and controller": {[]envelope.Signer{a, controller}, []string{"controller"}},
	} {
		t.Run(name, func(t *testing.T) {
			env, signed, err := envelope.SignTaskSet(envelope.Window{
				Cluster: cluster[:], TrustRootVersion: 1, IssuedAt: time.Now(), NotAfter: time.Now().Add(time.Hour),
			}, []*taskv1.TaskLeaf{newLeaf(t, "a")}, tt.keys...)
			if err != nil {
				t.Fatal(err)
			}
			v, err := root.VerifyTaskSet(env, signed[0])
			if tt.roles == nil {
				refused(t, err, trustroot.ReasonSignatureInvalid)
				return
			}
			if err != nil || !slices.Equal(v.RoleNames(), tt.roles) || len(v.Authorizers) != len(tt.keys) {
				t.Errorf("got %v, %v", v, err)
			}
		})
	}
}

func FuzzVerifyTaskSet(f *testing.F) {
	c := pkitest.New(f)
	env, signed := c.Sign(f, newLeaf(f, "a"), newLeaf(f, "b"))
	eb, err := proto.Marshal(env)
	if err != nil {
		f.Fatal(err)
	}
	lb, err := proto.Marshal(signed[1])
	if err != nil {
		f.Fatal(err)
	}
	f.Add(eb, lb)
	f.Fuzz(func(t *testing.T, eb, lb []byte) {
		e, l := new(taskv1.Envelope), new(taskv1.SignedLeaf)
		if proto.Unmarshal(eb, e) != nil || proto.Unmarshal(lb, l) != nil {
			return
		}
		v, err := c.Root.VerifyTaskSet(e, l)
		var r *trustroot.Refusal
		if err != nil && !errors.As(err, &r) {
			t.Errorf("%v is not a refusal", err)
		}
		if err == nil && v.LeafHash != envelope.LeafHash(signed[1].GetLeaf()) {
			t.Errorf("%v was never signed", v.Leaf)
		}
	})
}
