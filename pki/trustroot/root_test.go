package trustroot_test

import (
	"crypto/sha256"
	"errors"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/millwright/pki/envelope"
	"github.com/gpuaas/millwright/pki/pkitest"
	"github.com/gpuaas/millwright/pki/trustroot"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

const (
	operatorRole = taskv1.KeyRole_KEY_ROLE_OPERATOR
	recoveryRole = taskv1.KeyRole_KEY_ROLE_RECOVERY
)

func open(t *testing.T, root *trustroot.Root) *trustroot.Root {
	t.Helper()
	cluster := root.Cluster()
	again, err := trustroot.Open(root.Chain(), cluster[:])
	if err != nil {
		t.Fatalf("open: %v", err)
	}
	return again
}

func update(t *testing.T, root *trustroot.Root, u trustroot.Update, keys ...envelope.Signer) *trustroot.Root {
	t.Helper()
	u.IssuedAt = time.Now()
	next, err := root.SignUpdate(u, keys...)
	if err != nil {
		t.Fatal(err)
	}
	return next
}

// raw signs a root as it is, past the checks of SignUpdate.
func raw(t *testing.T, root *taskv1.TrustRoot, keys ...envelope.Signer) *taskv1.Envelope {
	t.Helper()
	payload, err := proto.Marshal(root)
	if err != nil {
		t.Fatal(err)
	}
	env, err := envelope.Sign(envelope.TrustRootType, payload, keys...)
	if err != nil {
		t.Fatal(err)
	}
	return env
}

// next is a good update of root that changes nothing.
func next(root *trustroot.Root) *taskv1.TrustRoot {
	hash := root.Hash()
	m := root.Message()
	m.Version++
	m.Previous = hash[:]
	m.IssuedAt = timestamppb.Now()
	return m
}

func TestChain(t *testing.T) {
	c := pkitest.New(t)
	bob, second := pkitest.NewKey(t), pkitest.NewKey(t)
	v2 := update(t, c.Root, trustroot.Update{Add: []*taskv1.TrustKey{
		trustroot.NewKey("bob", bob.Public(), time.Time{}, operatorRole),
		trustroot.NewKey("recovery-2", second.Public(), time.Time{}, recoveryRole),
	}}, c.Recovery)
	since := time.Now().Add(-time.Hour).Truncate(time.Second)
	v3 := update(t, v2, trustroot.Update{
		Remove:     []*taskv1.RemovedKey{{Id: c.Operator.KeyID(), CompromisedSince: timestamppb.New(since)}},
		Thresholds: []*taskv1.Threshold{{Role: recoveryRole, Keys: 2}},
	}, second)
	root := open(t, v3)
	if root.Version() != 3 || root.Cluster() != c.Root.Cluster() || root.Hash() != v3.Hash() || root.TrustDomain() != pkitest.TrustDomain {
		t.Errorf("got version %d of %x", root.Version(), root.Cluster())
	}
	for _, v := range []*trustroot.Root{c.Root, v2, v3} {
		if hash := v.Hash(); !root.Contains(hash[:]) {
			t.Errorf("version %d is not contained", v.Version())
		}
		if at, ok := root.At(v.Version()); !ok || at.Hash() != v.Hash() {
			t.Errorf("version %d is not there", v.Version())
		}
	}
	if hash := v3.Hash(); c.Root.Contains(hash[:]) || root.Contains(nil) {
		t.Error("contains what it does not")
	}
	if _, ok := root.At(4); ok {
		t.Error("version 4 is there")
	}
	if got, removed := root.Removed(c.Operator.KeyID()); !removed || !got.Equal(since) {
		t.Errorf("removed: %v, %v", got, removed)
	}
	if n := len(root.Since(1)); n != 2 {
		t.Errorf("%d updates since version 1", n)
	}

	// Bob signs now, and alice no longer; by the genesis it is the other way.
	env, signed := c.Sign(t, newLeaf(t, "a"))
	_, err := root.VerifyTaskSet(env, signed[0])
	refused(t, err, trustroot.ReasonSignatureInvalid)
	if !strings.Contains(err.Error(), "was removed") {
		t.Errorf("a removed key: %v", err)
	}
	at, _ := root.At(1)
	if _, err := at.VerifyTaskSet(env, signed[0]); err != nil {
		t.Errorf("by the version of its time: %v", err)
	}
	w := c.Window()
	w.TrustRootVersion = 2
	env, signed, err = envelope.SignTaskSet(w, []*taskv1.TaskLeaf{newLeaf(t, "a")}, bob)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := root.VerifyTaskSet(env, signed[0]); err != nil {
		t.Errorf("bob: %v", err)
	}
	_, err = c.Root.VerifyTaskSet(env, signed[0])
	refused(t, err, trustroot.ReasonTrustRootBehind)

	// From version 3 on both recovery keys must sign.
	if _, err := v3.SignUpdate(trustroot.Update{IssuedAt: time.Now()}, second); !errors.Is(err, trustroot.ErrChain) {
		t.Errorf("one recovery key of two: %v", err)
	}
	update(t, v3, trustroot.Update{}, second, c.Recovery)
}

func TestOpenRefuses(t *testing.T) {
	c, other := pkitest.New(t), pkitest.New(t)
	v2 := update(t, c.Root, trustroot.Update{}, c.Recovery)
	v3 := update(t, v2, trustroot.Update{}, c.Recovery)
	chain := v3.Chain()
	cluster, otherCluster := c.Root.Cluster(), other.Root.Cluster()
	for name, tt := range map[string]struct {
		chain []*taskv1.Envelope
		pin   []byte
	}{
		"empty":               {nil, cluster[:]},
		"another's pin":       {chain, otherCluster[:]},
		"no pin":              {chain, nil},
		"begins at version 2": {chain[1:], cluster[:]},
		"one is missing":      {[]*taskv1.Envelope{chain[0], chain[2]}, cluster[:]},
		"wrong order":         {[]*taskv1.Envelope{chain[0], chain[2], chain[1]}, cluster[:]},
		"nothing in it":       {[]*taskv1.Envelope{chain[0], nil}, cluster[:]},
		"too long":            {make([]*taskv1.Envelope, trustroot.MaxChain+1), cluster[:]},
	} {
		if _, err := trustroot.Open(tt.chain, tt.pin); !errors.Is(err, trustroot.ErrChain) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := trustroot.Open(chain, otherCluster[:]); !errors.Is(err, trustroot.ErrWrongCluster) {
		t.Errorf("another's pin: %v", err)
	}
	for i := range chain {
		unsigned := proto.CloneOf(chain[i])
		unsigned.Signatures[0].Signature[5] ^= 1
		bad := append([]*taskv1.Envelope(nil), chain...)
		bad[i] = unsigned
		if _, err := trustroot.Open(bad, cluster[:]); !errors.Is(err, trustroot.ErrChain) {
			t.Errorf("signature of version %d altered: %v", i+1, err)
		}
	}
}

func TestUpdateRefuses(t *testing.T) {
	c := pkitest.New(t)
	dave := pkitest.NewKey(t)
	removal := trustroot.Update{Remove: []*taskv1.RemovedKey{{Id: c.Controller.KeyID(), CompromisedSince: timestamppb.New(time.Unix(1000, 0))}}}
	v2 := update(t, c.Root, removal, c.Recovery)
	daveKey := trustroot.NewKey("dave", dave.Public(), time.Time{}, operatorRole)
	for _, tt := range []struct {
		name string
		edit func(*taskv1.TrustRoot)
		keys []envelope.Signer
	}{
		{"by an operator", func(*taskv1.TrustRoot) {}, []envelope.Signer{c.Operator}},
		{"by recovery and operator", func(*taskv1.TrustRoot) {}, []envelope.Signer{c.Recovery, c.Operator}},
		{"by a stranger", func(*taskv1.TrustRoot) {}, []envelope.Signer{dave}},
		{"other predecessor", func(r *taskv1.TrustRoot) { r.Previous[0] ^= 1 }, nil},
		{"version skipped", func(r *taskv1.TrustRoot) { r.Version++ }, nil},
		{"other trust domain", func(r *taskv1.TrustRoot) { r.TrustDomain = "other.test" }, nil},
		{"issued before the one before", func(r *taskv1.TrustRoot) { r.IssuedAt.Seconds -= 3600 }, nil},
		{"key dropped without a word", func(r *taskv1.TrustRoot) {
			r.Keys = deleteKey(r.Keys, c.Operator.KeyID())
		}, nil},
		{"removal taken back", func(r *taskv1.TrustRoot) { r.Removed = nil }, nil},
		{"removal taken back, key again", func(r *taskv1.TrustRoot) {
			r.Removed = nil
			r.Keys = sortKeys(append(r.Keys, trustroot.NewKey("slurm", c.Controller.Public(), time.Time{}, taskv1.KeyRole_KEY_ROLE_CONTROLLER)))
		}, nil},
		{"removed and a key", func(r *taskv1.TrustRoot) {
			r.Keys = sortKeys(append(r.Keys, trustroot.NewKey("slurm", c.Controller.Public(), time.Time{}, taskv1.KeyRole_KEY_ROLE_CONTROLLER)))
		}, nil},
		{"compromised later", func(r *taskv1.TrustRoot) { r.Removed[0].CompromisedSince.Seconds++ }, nil},
		{"compromised no more", func(r *taskv1.TrustRoot) { r.Removed[0].CompromisedSince = nil }, nil},
		{"keys unsorted", func(r *taskv1.TrustRoot) { r.Keys[0], r.Keys[1] = r.Keys[1], r.Keys[0] }, nil},
		{"key twice", func(r *taskv1.TrustRoot) { r.Keys = append(r.Keys[:1], r.Keys...) }, nil},
		{"id of another key", func(r *taskv1.TrustRoot) { r.Keys = sortKeys(append(r.Keys, withID(daveKey, strings.Repeat("0", 32)))) }, nil},
		{"key without a role", func(r *taskv1.TrustRoot) { r.Keys[0].Roles = nil }, nil},
		{"role of no name", func(r *taskv1.TrustRoot) { r.Keys[0].Roles = []taskv1.KeyRole{0} }, nil},
		{"role of an unknown number", func(r *taskv1.TrustRoot) { r.Keys[0].Roles = []taskv1.KeyRole{9} }, nil},
		{"key of an unknown type", func(r *taskv1.TrustRoot) { r.Keys[0].Type = 2 }, nil},
		{"short key", func(r *taskv1.TrustRoot) { r.Keys[0].PublicKey = r.Keys[0].PublicKey[1:] }, nil},
		{"no recovery key", func(r *taskv1.TrustRoot) {
			r.Keys = deleteKey(r.Keys, c.Recovery.KeyID())
			r.Removed = append(r.Removed, &taskv1.RemovedKey{Id: c.Recovery.KeyID()})
		}, nil},
		{"threshold above the keys", func(r *taskv1.TrustRoot) { r.Thresholds = []*taskv1.Threshold{{Role: operatorRole, Keys: 2}} }, nil},
		{"threshold 0", func(r *taskv1.TrustRoot) { r.Thresholds = []*taskv1.Threshold{{Role: operatorRole}} }, nil},
		{"threshold twice", func(r *taskv1.TrustRoot) {
			r.Thresholds = []*taskv1.Threshold{{Role: operatorRole, Keys: 1}, {Role: operatorRole, Keys: 1}}
		}, nil},
		{"unknown field", func(r *taskv1.TrustRoot) { unknown(r) }, nil},
		{"unknown field in a key", func(r *taskv1.TrustRoot) { unknown(r.Keys[0]) }, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			m := next(v2)
			tt.edit(m)
			keys := tt.keys
			if keys == nil {
				keys = []envelope.Signer{c.Recovery}
			}
			if _, err := v2.Extend([]*taskv1.Envelope{raw(t, m, keys...)}); !errors.Is(err, trustroot.ErrChain) {
				t.Errorf("got %v", err)
			}
		})
	}
	if _, err := v2.Extend([]*taskv1.Envelope{raw(t, next(v2), c.Recovery)}); err != nil {
		t.Errorf("the good one of this test is refused: %v", err)
	}
	earlier := next(v2)
	earlier.Removed[0].CompromisedSince.Seconds--
	if _, err := v2.Extend([]*taskv1.Envelope{raw(t, earlier, c.Recovery)}); err != nil {
		t.Errorf("compromised earlier than thought: %v", err)
	}
}

func deleteKey(keys []*taskv1.TrustKey, id string) []*taskv1.TrustKey {
	var list []*taskv1.TrustKey
	for _, k := range keys {
		if k.GetId() != id {
			list = append(list, k)
		}
	}
	return list
}

func sortKeys(keys []*taskv1.TrustKey) []*taskv1.TrustKey {
	for i := range keys {
		for j := i; j > 0 && keys[j].GetId() < keys[j-1].GetId(); j-- {
			keys[j], keys[j-1] = keys[j-1], keys[j]
		}
	}
	return keys
}

func withID(k *taskv1.TrustKey, id string) *taskv1.TrustKey {
	k = proto.CloneOf(k)
	k.Id = id
	return k
}

// TestNeverGoesBack gives a root what it has, and another of the same number.
func TestNeverGoesBack(t *testing.T) {
	c := pkitest.New(t)
	v2 := update(t, c.Root, trustroot.Update{}, c.Recovery)
	same, err := v2.Extend(c.Root.Chain())
	if err != nil || same.Version() != 2 || same.Hash() != v2.Hash() {
		t.Errorf("an older chain changes it: %v", err)
	}
	fork := update(t, c.Root, trustroot.Update{Remove: []*taskv1.RemovedKey{{Id: c.Controller.KeyID()}}}, c.Recovery)
	if _, err := v2.Extend(fork.Since(1)); !errors.Is(err, trustroot.ErrFork) {
		t.Errorf("a fork: %v", err)
	}
	v3 := update(t, v2, trustroot.Update{}, c.Recovery)
	if _, err := v2.Extend(v3.Chain()); err != nil {
		t.Errorf("a whole newer chain: %v", err)
	}
	if v2.Version() != 2 {
		t.Error("a root changes when it is extended")
	}
}

func TestEndedRecoveryKey(t *testing.T) {
	end := time.Now().Add(-time.Hour)
	operator, recovery := pkitest.NewKey(t), pkitest.NewKey(t)
	root, err := trustroot.SignGenesis(trustroot.Genesis{
		TrustDomain: "td.test", IssuedAt: end.Add(-time.Hour),
		Keys: []*taskv1.TrustKey{
			trustroot.NewKey("alice", operator.Public(), time.Time{}, operatorRole),
			trustroot.NewKey("recovery", recovery.Public(), end, recoveryRole),
		},
	}, recovery)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := root.SignUpdate(trustroot.Update{IssuedAt: end}, recovery); !errors.Is(err, trustroot.ErrChain) {
		t.Errorf("after its end: %v", err)
	}
	if _, err := root.SignUpdate(trustroot.Update{IssuedAt: end.Add(-1)}, recovery); err != nil {
		t.Errorf("before its end: %v", err)
	}
}

func TestGenesis(t *testing.T) {
	operator, recovery := pkitest.NewKey(t), pkitest.NewKey(t)
	operatorKey := trustroot.NewKey("alice", operator.Public(), time.Time{}, operatorRole)
	recoveryKey := trustroot.NewKey("recovery", recovery.Public(), time.Time{}, recoveryRole)
	good := trustroot.Genesis{TrustDomain: "td.test", IssuedAt: time.Now(), Keys: []*taskv1.TrustKey{operatorKey, recoveryKey}}
	root, err := trustroot.SignGenesis(good, operator, recovery)
	if err != nil {
		t.Fatal(err)
	}
	if want := sha256.Sum256(root.Chain()[0].GetPayload()); root.Cluster() != want {
		t.Errorf("cluster %x, want %x", root.Cluster(), want)
	}
	if again, err := trustroot.OpenGenesis(root.Chain()[0]); err != nil || again.Cluster() != root.Cluster() {
		t.Errorf("open genesis: %v", err)
	}
	for name, tt := range map[string]struct {
		keys    []*taskv1.TrustKey
		domain  string
		signers []envelope.Signer
	}{
		"no operator":         {[]*taskv1.TrustKey{recoveryKey}, "td.test", []envelope.Signer{recovery}},
		"no recovery key":     {[]*taskv1.TrustKey{operatorKey}, "td.test", []envelope.Signer{operator}},
		"not by the recovery": {good.Keys, "td.test", []envelope.Signer{operator}},
		"by a stranger too":   {good.Keys, "td.test", []envelope.Signer{recovery, pkitest.NewKey(t)}},
		"bad trust domain":    {good.Keys, "TD.test", []envelope.Signer{recovery}},
		"bad holder": {[]*taskv1.TrustKey{recoveryKey, trustroot.NewKey("Alice Smith", operator.Public(), time.Time{}, operatorRole)},
			"td.test", []envelope.Signer{recovery}},
	} {
		g := trustroot.Genesis{TrustDomain: tt.domain, IssuedAt: time.Now(), Keys: tt.keys}
		if _, err := trustroot.SignGenesis(g, tt.signers...); err == nil {
			t.Errorf("%s: signed", name)
		}
	}
}

func FuzzOpen(f *testing.F) {
	c := pkitest.New(f)
	cluster := c.Root.Cluster()
	b, err := proto.Marshal(c.Root.Chain()[0])
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		env := new(taskv1.Envelope)
		if proto.Unmarshal(b, env) != nil {
			return
		}
		root, err := trustroot.Open([]*taskv1.Envelope{env}, cluster[:])
		if err == nil && root.Hash() != cluster {
			t.Error("another genesis")
		}
		if err != nil && !errors.Is(err, trustroot.ErrChain) {
			t.Errorf("%v is not ErrChain", err)
		}
	})
}
