package gate_test

import (
	"bytes"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/gpuaas/millwright/agent/internal/gate"
	"github.com/gpuaas/millwright/pki/envelope"
	"github.com/gpuaas/millwright/pki/pkitest"
	"github.com/gpuaas/millwright/pki/trustroot"
	storagev1 "github.com/gpuaas/millwright/proto/millwright/storage/v1"
	systemv1 "github.com/gpuaas/millwright/proto/millwright/system/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks/all"
)

var t0 = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

type fakeClock struct {
	mu  sync.Mutex
	now time.Time // guarded by mu
}

func (c *fakeClock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *fakeClock) Boot() time.Duration { return c.Now().Sub(t0) }

func (c *fakeClock) set(t time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = t
}

// site is a cluster with one node's gate.
type site struct {
	*pkitest.Cluster
	t      *testing.T
	clock  *fakeClock
	root   *trustroot.Root
	policy string
	log    *bytes.Buffer
	gate   *gate.Gate
}

const allowAll = "version: 1\nrules:\n  - allow: \"*\"\n"

func newSite(t *testing.T, policy string) *site {
	t.Helper()
	clock := &fakeClock{now: t0}
	s := &site{Cluster: pkitest.NewAt(t, clock.Now), t: t, clock: clock, policy: filepath.Join(t.TempDir(), "policy.yaml"), log: &bytes.Buffer{}}
	s.root = s.Root
	s.write(policy)
	s.gate = gate.New(gate.Config{
		Node: "gpu-001", Root: func() *trustroot.Root { return s.root }, Policy: s.policy, Registry: all.Registry(),
		Floor: t0.Add(-time.Minute), Clock: clock, Logger: slog.New(slog.NewTextHandler(s.log, nil)),
	})
	return s
}

func (s *site) write(policy string) {
	s.t.Helper()
	if err := os.WriteFile(s.policy, []byte(policy), 0o600); err != nil {
		s.t.Fatal(err)
	}
}

func leaf(t *testing.T, kind string, spec proto.Message) *taskv1.TaskLeaf {
	t.Helper()
	b, err := proto.Marshal(spec)
	if err != nil {
		t.Fatal(err)
	}
	return &taskv1.TaskLeaf{
		TaskId: pkitest.NewTaskID(t), Node: "gpu-001", Mode: taskv1.Mode_MODE_EXECUTE, Kind: kind, Revision: 1, Spec: b,
		Deadline: durationpb.New(time.Minute),
	}
}

func command(t *testing.T, argv ...string) *taskv1.TaskLeaf {
	return leaf(t, "system.command", &systemv1.CommandSpec{Argv: argv})
}

// outcome is the reason of an answer, or ACCEPTED.
func outcome(err error) string {
	var r *gate.Refusal
	var d *gate.Deferral
	switch {
	case err == nil:
		return "ACCEPTED"
	case errors.As(err, &r):
		return "REFUSED " + r.Reason
	case errors.As(err, &d):
		return "DEFERRED " + d.Reason
	}
	return err.Error()
}

func TestAdmit(t *testing.T) {
	for _, tc := range []struct {
		name    string
		policy  string
		prepare func(s *site) (*taskv1.Envelope, *taskv1.SignedLeaf)
		want    string
		words   []string
	}{
		{"fine", allowAll, func(s *site) (*taskv1.Envelope, *taskv1.SignedLeaf) {
			return s.sign(command(s.t, "/usr/bin/true"))
		}, "ACCEPTED", nil},
		{"another node", allowAll, func(s *site) (*taskv1.Envelope, *taskv1.SignedLeaf) {
			l := command(s.t, "/usr/bin/true")
			l.Node = "gpu-002"
			return s.sign(l)
		}, "REFUSED WRONG_NODE", []string{"gpu-001", "gpu-002"}},
		{"unknown kind", allowAll, func(s *site) (*taskv1.Envelope, *taskv1.SignedLeaf) {
			return s.sign(leaf(s.t, "quantum.entangle", &systemv1.CommandSpec{}))
		}, "REFUSED UNKNOWN_KIND", []string{"quantum.entangle", "storage.mount"}},
		{"newer revision", allowAll, func(s *site) (*taskv1.Envelope, *taskv1.SignedLeaf) {
			l := command(s.t, "/usr/bin/true")
			l.Revision = 99
			return s.sign(l)
		}, "REFUSED UNKNOWN_KIND", []string{"99", "update the agent"}},
		{"invalid spec", allowAll, func(s *site) (*taskv1.Envelope, *taskv1.SignedLeaf) {
			return s.sign(command(s.t, "true"))
		}, "REFUSED SPEC_INVALID", []string{"argv"}},
		{"unknown field in the spec", allowAll, func(s *site) (*taskv1.Envelope, *taskv1.SignedLeaf) {
			l := command(s.t, "/usr/bin/true")
			l.Spec = append(l.Spec, 0xf8, 0x06, 0x01) // field 111
			return s.sign(l)
		}, "REFUSED SPEC_INVALID", []string{"unknown field"}},
		{"empty spec", allowAll, func(s *site) (*taskv1.Envelope, *taskv1.SignedLeaf) {
			return s.sign(leaf(s.t, "storage.mount", &storagev1.MountSpec{}))
		}, "REFUSED SPEC_INVALID", nil},
		{"past its window", allowAll, func(s *site) (*taskv1.Envelope, *taskv1.SignedLeaf) {
			e, l := s.sign(command(s.t, "/usr/bin/true"))
			s.clock.set(t0.Add(time.Hour))
			return e, l
		}, "REFUSED WINDOW_PASSED", []string{"2026-03-01T13:00:00Z", "sign it again"}},
		{"at the floor", allowAll, func(s *site) (*taskv1.Envelope, *taskv1.SignedLeaf) {
			s.clock.set(t0.Add(-time.Minute))
			e, l := s.sign(command(s.t, "/usr/bin/true"))
			s.clock.set(t0)
			return e, l
		}, "REFUSED BELOW_FLOOR", []string{"2026-03-01T11:59:00Z", "sign it again"}},
		{"from the future", allowAll, func(s *site) (*taskv1.Envelope, *taskv1.SignedLeaf) {
			s.clock.set(t0.Add(10 * time.Minute))
			e, l := s.sign(command(s.t, "/usr/bin/true"))
			s.clock.set(t0)
			return e, l
		}, "DEFERRED CLOCK_UNTRUSTED", []string{"clock"}},
		{"no policy rule", "version: 1\nrules: []\n", func(s *site) (*taskv1.Envelope, *taskv1.SignedLeaf) {
			return s.sign(command(s.t, "/usr/bin/true"))
		}, "REFUSED POLICY_DENIED", []string{"policy.yaml", "no rule", "- allow: system.command", "/usr/bin/true"}},
		{"denied by a rule", "version: 1\nrules:\n  - deny: system.*\n  - allow: \"*\"\n", func(s *site) (*taskv1.Envelope, *taskv1.SignedLeaf) {
			return s.sign(command(s.t, "/usr/bin/true"))
		}, "REFUSED POLICY_DENIED", []string{"line 3", "deny: system.*"}},
		{"invalid policy", "version: 1\nrules:\n  - alow: \"*\"\n", func(s *site) (*taskv1.Envelope, *taskv1.SignedLeaf) {
			return s.sign(command(s.t, "/usr/bin/true"))
		}, "DEFERRED POLICY_INVALID", []string{"line 3", "alow"}},
		{"no policy", allowAll, func(s *site) (*taskv1.Envelope, *taskv1.SignedLeaf) {
			if err := os.Remove(s.policy); err != nil {
				s.t.Fatal(err)
			}
			return s.sign(command(s.t, "/usr/bin/true"))
		}, "DEFERRED POLICY_INVALID", []string{"policy.yaml", "no policy file"}},
		{"altered envelope", allowAll, func(s *site) (*taskv1.Envelope, *taskv1.SignedLeaf) {
			e, l := s.sign(command(s.t, "/usr/bin/true"))
			e.Payload[len(e.Payload)-1] ^= 1
			return e, l
		}, "REFUSED SIGNATURE_INVALID", nil},
		{"altered leaf", allowAll, func(s *site) (*taskv1.Envelope, *taskv1.SignedLeaf) {
			e, l := s.sign(command(s.t, "/usr/bin/true"))
			l.Leaf[len(l.Leaf)-1] ^= 1
			return e, l
		}, "REFUSED PROOF_INVALID", nil},
		{"another cluster", allowAll, func(s *site) (*taskv1.Envelope, *taskv1.SignedLeaf) {
			other := pkitest.NewAt(s.t, s.clock.Now)
			e, l := other.Sign(s.t, command(s.t, "/usr/bin/true"))
			return e, l[0]
		}, "REFUSED WRONG_CLUSTER", nil},
		{"newer trust root", allowAll, func(s *site) (*taskv1.Envelope, *taskv1.SignedLeaf) {
			w := s.Window()
			w.TrustRootVersion = 2
			e, l, err := envelope.SignTaskSet(w, []*taskv1.TaskLeaf{command(s.t, "/usr/bin/true")}, s.Operator)
			if err != nil {
				s.t.Fatal(err)
			}
			return e, l[0]
		}, "DEFERRED TRUST_ROOT_BEHIND", nil},
		{"no trust root", allowAll, func(s *site) (*taskv1.Envelope, *taskv1.SignedLeaf) {
			s.root = nil
			return s.sign(command(s.t, "/usr/bin/true"))
		}, "DEFERRED TRUST_ROOT_BEHIND", nil},
		{"nothing", allowAll, func(*site) (*taskv1.Envelope, *taskv1.SignedLeaf) { return nil, nil }, "REFUSED MALFORMED", nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := newSite(t, tc.policy)
			env, signed := tc.prepare(s)
			adm, err := s.gate.Admit(t.Context(), env, signed)
			if got := outcome(err); got != tc.want {
				t.Fatalf("Admit = %s (%v), want %s", got, err, tc.want)
			}
			if err == nil && (adm.Kind.Kind != "system.command" || adm.Spec == nil || adm.Authorizers[0].GetName() != "alice") {
				t.Errorf("admission = %+v", adm)
			}
			for _, w := range tc.words {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("message %q does not say %q", err, w)
				}
			}
			var d *gate.Deferral
			if errors.As(err, &d) && d.RetryAfter <= 0 {
				t.Errorf("deferral without a time: %+v", d)
			}
		})
	}
}

func (s *site) sign(l *taskv1.TaskLeaf) (*taskv1.Envelope, *taskv1.SignedLeaf) {
	s.t.Helper()
	env, signed := s.Sign(s.t, l)
	return env, signed[0]
}

func TestStart(t *testing.T) {
	s := newSite(t, allowAll)
	w := s.Window()
	w.NotBefore, w.NotAfter = t0.Add(time.Hour), t0.Add(2*time.Hour)
	env, signed, err := envelope.SignTaskSet(w, []*taskv1.TaskLeaf{command(t, "/usr/bin/true")}, s.Operator)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.gate.Admit(t.Context(), env, signed[0]); err != nil {
		t.Errorf("Admit before its time = %v, want it accepted", err)
	}
	for _, tc := range []struct {
		after  time.Duration
		policy string
		want   string
	}{
		{0, allowAll, "DEFERRED NOT_BEFORE"},
		{time.Hour, allowAll, "ACCEPTED"},
		{time.Hour, "version: 1\nrules: []\n", "REFUSED POLICY_DENIED"},
		{time.Hour, "version: 7\n", "DEFERRED POLICY_INVALID"},
		{2 * time.Hour, allowAll, "REFUSED WINDOW_PASSED"},
	} {
		s.clock.set(t0.Add(tc.after))
		s.write(tc.policy)
		if _, err := s.gate.Start(t.Context(), env, signed[0]); outcome(err) != tc.want {
			t.Errorf("Start after %v with policy %q = %v, want %s", tc.after, tc.policy, outcome(err), tc.want)
		}
	}
}

// TestRestore judges by the trust root of then and the policy of now, whatever
// the window.
func TestRestore(t *testing.T) {
	s := newSite(t, allowAll)
	env, signed := s.sign(command(t, "/usr/bin/true"))
	s.clock.set(t0.Add(30 * 24 * time.Hour))
	next, err := s.Root.SignUpdate(trustroot.Update{
		IssuedAt: s.clock.Now(), Remove: []*taskv1.RemovedKey{{Id: s.Operator.KeyID()}},
		Add: []*taskv1.TrustKey{trustroot.NewKey("bob", pkitest.NewKey(t).Public(), time.Time{}, taskv1.KeyRole_KEY_ROLE_OPERATOR)},
	}, s.Recovery)
	if err != nil {
		t.Fatal(err)
	}
	s.root = next
	if _, err := s.gate.Restore(t.Context(), env, signed, 1); err != nil {
		t.Errorf("Restore = %v, want it allowed", err)
	}
	if _, err := s.gate.Start(t.Context(), env, signed); outcome(err) != "REFUSED SIGNATURE_INVALID" {
		t.Errorf("Start with a removed key = %v", outcome(err))
	}
	if _, err := s.gate.Restore(t.Context(), env, signed, 9); outcome(err) != "DEFERRED TRUST_ROOT_BEHIND" {
		t.Errorf("Restore by an unknown version = %v", outcome(err))
	}
	s.write("version: 1\nrules: []\n")
	if _, err := s.gate.Restore(t.Context(), env, signed, 1); outcome(err) != "REFUSED POLICY_DENIED" {
		t.Errorf("Restore against the policy = %v", outcome(err))
	}
}

// TestControllerRole lets a rule tell operators from controllers.
func TestControllerRole(t *testing.T) {
	s := newSite(t, "version: 1\nrules:\n  - allow: system.command\n    roles: [controller]\n")
	leaves := []*taskv1.TaskLeaf{command(t, "/usr/bin/true")}
	for _, tc := range []struct {
		signer *envelope.Key
		want   string
	}{{s.Operator, "REFUSED POLICY_DENIED"}, {s.Controller, "ACCEPTED"}} {
		env, signed, err := envelope.SignTaskSet(s.Window(), leaves, tc.signer)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.gate.Admit(t.Context(), env, signed[0]); outcome(err) != tc.want {
			t.Errorf("Admit = %v, want %s", outcome(err), tc.want)
		}
	}
}

// TestEveryByteCounts alters the envelope and the leaf at every byte.
func TestEveryByteCounts(t *testing.T) {
	s := newSite(t, allowAll)
	env, signed := s.sign(command(t, "/usr/bin/true"))
	e, err := proto.Marshal(env)
	if err != nil {
		t.Fatal(err)
	}
	l, err := proto.Marshal(signed)
	if err != nil {
		t.Fatal(err)
	}
	all := append(append([]byte(nil), e...), l...)
	for i := range all {
		all[i] ^= 0x11
		env2, signed2 := new(taskv1.Envelope), new(taskv1.SignedLeaf)
		err := errors.Join(proto.Unmarshal(all[:len(e)], env2), proto.Unmarshal(all[len(e):], signed2))
		all[i] ^= 0x11
		if err != nil {
			continue // it never comes off the wire
		}
		if _, err := s.gate.Admit(t.Context(), env2, signed2); err == nil {
			t.Errorf("accepted with byte %d of %d altered", i, len(all))
		}
	}
}

// TestLogIsCoalesced refuses many times and logs little.
func TestLogIsCoalesced(t *testing.T) {
	s := newSite(t, "version: 1\nrules: []\n")
	env, signed := s.sign(command(t, "/usr/bin/true"))
	admit := func() {
		if _, err := s.gate.Admit(t.Context(), env, signed); err == nil {
			t.Fatal("accepted")
		}
	}
	for range 100 {
		admit()
	}
	if got := strings.Count(s.log.String(), "\n"); got != 1 {
		t.Errorf("%d lines for 100 refusals, want 1", got)
	}
	s.clock.set(t0.Add(2 * time.Minute))
	admit()
	if !strings.Contains(s.log.String(), "not_logged_before=99") {
		t.Errorf("log = %s, want the number of those left out", s.log)
	}
}
