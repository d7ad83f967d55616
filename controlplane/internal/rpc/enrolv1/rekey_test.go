package enrolv1_test

import (
	"crypto"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/gpuaas/millwright/pki"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
)

// member is a node that has joined, and whose certificate is good for an hour.
type member struct {
	t      *testing.T
	site   *site
	client agentv1.EnrolmentServiceClient
	key    crypto.Signer
	leaf   []byte
}

func newMember(t *testing.T, s *site, node string) *member {
	t.Helper()
	m := &member{t: t, site: s, client: s.dial(t, nil)}
	key, err := pki.GenerateKey()
	if err != nil {
		t.Fatal(err)
	}
	m.key = key
	resp, err := m.client.Join(t.Context(), &agentv1.JoinRequest{Token: s.token(t, node, time.Hour), Csr: m.csr(key)})
	if err != nil {
		t.Fatal(err)
	}
	m.leaf = resp.GetCertificates()[0]
	return m
}

func (m *member) csr(key crypto.Signer) []byte {
	m.t.Helper()
	csr, err := pki.NewRequest(key)
	if err != nil {
		m.t.Fatal(err)
	}
	return csr
}

// start asks for a challenge.
func (m *member) start() ([]byte, error) {
	resp, err := m.client.StartRekey(m.t.Context(), &agentv1.StartRekeyRequest{Certificate: m.leaf})
	return resp.GetChallenge(), err
}

// answer makes the right answer to a challenge.
func (m *member) answer(challenge []byte, key crypto.Signer) *agentv1.RekeyRequest {
	m.t.Helper()
	csr := m.csr(key)
	sig, err := pki.SignRekey(key, challenge, csr)
	if err != nil {
		m.t.Fatal(err)
	}
	return &agentv1.RekeyRequest{Certificate: m.leaf, Challenge: challenge, Csr: csr, Signature: sig}
}

func (m *member) challenged() []byte {
	m.t.Helper()
	c, err := m.start()
	if err != nil {
		m.t.Fatal(err)
	}
	return c
}

// TestRekey re-keys at each distance between the server's clock and the end of
// the certificate.
func TestRekey(t *testing.T) {
	for _, tt := range []struct {
		name  string
		ahead time.Duration // of the server, when the node asks
		want  codes.Code
	}{
		{"still good by the server's clock", 0, codes.OK},
		{"the server's clock was set back", -time.Hour, codes.OK},
		{"just ended", time.Hour + time.Minute, codes.OK},
		{"29 days ago", 29 * 24 * time.Hour, codes.OK},
		{"31 days ago", 31 * 24 * time.Hour, codes.PermissionDenied},
		{"ten years ago", 10 * 365 * 24 * time.Hour, codes.PermissionDenied},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newSite(t)
			m := newMember(t, s, "n1")
			s.ahead.Store(int64(tt.ahead))
			challenge, err := m.start()
			if status.Code(err) != tt.want {
				t.Fatalf("challenge: %v", err)
			}
			if err != nil {
				if !strings.Contains(err.Error(), "node token create n1") {
					t.Errorf("no way out: %v", err)
				}
				return
			}
			resp, err := m.client.Rekey(t.Context(), m.answer(challenge, m.key))
			if err != nil {
				t.Fatal(err)
			}
			chain, err := pki.ParseCertificatesDER(resp.GetCertificates())
			if err != nil {
				t.Fatal(err)
			}
			id, err := pki.VerifyChain(chain, s.cluster.CA.Roots(), "test.example", time.Now())
			if tt.ahead <= 0 && err != nil {
				t.Error(err)
			}
			if err == nil && id.Name != "n1" || pki.Generation(chain[0]) != 1 {
				t.Errorf("it is for %s, generation %d", id, pki.Generation(chain[0]))
			}
		})
	}
}

func TestRekeyRefused(t *testing.T) {
	s := newSite(t)
	m, other := newMember(t, s, "n1"), newMember(t, s, "n2")
	s.ahead.Store(int64(2 * time.Hour))
	stranger, err := pki.GenerateKey()
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name string
		make func() *agentv1.RekeyRequest
		want codes.Code
	}{
		{"another key", func() *agentv1.RekeyRequest { return m.answer(m.challenged(), stranger) }, codes.PermissionDenied},
		{"the key of another node", func() *agentv1.RekeyRequest { return m.answer(m.challenged(), other.key) }, codes.PermissionDenied},
		{"signed by another key", func() *agentv1.RekeyRequest {
			r := m.answer(m.challenged(), m.key)
			r.Signature, _ = pki.SignRekey(stranger, r.GetChallenge(), r.GetCsr())
			return r
		}, codes.PermissionDenied},
		{"no signature", func() *agentv1.RekeyRequest {
			r := m.answer(m.challenged(), m.key)
			r.Signature = nil
			return r
		}, codes.PermissionDenied},
		{"the challenge of another node", func() *agentv1.RekeyRequest { return m.answer(other.challenged(), m.key) }, codes.FailedPrecondition},
		{"a challenge of its own making", func() *agentv1.RekeyRequest { return m.answer(make([]byte, 64), m.key) }, codes.FailedPrecondition},
		{"no challenge", func() *agentv1.RekeyRequest { return m.answer(nil, m.key) }, codes.FailedPrecondition},
		{"a challenge that has ended", func() *agentv1.RekeyRequest {
			r := m.answer(m.challenged(), m.key)
			s.ahead.Add(int64(61 * time.Second))
			return r
		}, codes.FailedPrecondition},
		{"another answer's signature", func() *agentv1.RekeyRequest {
			r, old := m.answer(m.challenged(), m.key), m.answer(m.challenged(), m.key)
			r.Signature = old.GetSignature()
			return r
		}, codes.PermissionDenied},
		{"a certificate of nobody", func() *agentv1.RekeyRequest {
			r := m.answer(m.challenged(), m.key)
			r.Certificate = []byte("x")
			return r
		}, codes.InvalidArgument},
		{"a certificate of the server's CA itself", func() *agentv1.RekeyRequest {
			r := m.answer(m.challenged(), m.key)
			r.Certificate = s.cluster.CA.Roots()[0].Raw
			return r
		}, codes.PermissionDenied},
	} {
		if _, err := m.client.Rekey(t.Context(), tt.make()); status.Code(err) != tt.want {
			t.Errorf("%s: got %v, want %s", tt.name, err, tt.want)
		}
	}

	r := m.answer(m.challenged(), m.key)
	if _, err := m.client.Rekey(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	if _, err := m.client.Rekey(t.Context(), r); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("the same answer again: %v", err)
	}
	if err := s.fleet.Evict(t.Context(), operator, "n1", "stolen"); err != nil {
		t.Fatal(err)
	}
	if _, err := m.start(); status.Code(err) != codes.PermissionDenied {
		t.Errorf("after the eviction: %v", err)
	}
	again := newMember(t, s, "n1") // another key, another generation
	if _, err := m.start(); status.Code(err) != codes.PermissionDenied {
		t.Errorf("the host before: %v", err)
	}
	if _, err := again.start(); err != nil {
		t.Errorf("the host that joined since: %v", err)
	}
}
