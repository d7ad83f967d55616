// Package pkitest makes a cluster's keys and certificates in memory, for tests.
// All of it is real: an embedded CA, a signed trust root, and signed task sets.
package pkitest

import (
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/gpuaas/millwright/pki"
	"github.com/gpuaas/millwright/pki/ca"
	"github.com/gpuaas/millwright/pki/envelope"
	"github.com/gpuaas/millwright/pki/trustroot"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// TrustDomain is the trust domain of every test cluster.
const TrustDomain = "test.example"

// Cluster is a cluster with one operator key, one controller key and one
// recovery key.
type Cluster struct {
	// CA is the embedded CA.
	CA *ca.CA
	// Root is the trust root; it has only the genesis.
	Root *trustroot.Root
	// Operator, Controller and Recovery are the signing keys, of the holders
	// "alice", "slurm" and "recovery".
	Operator, Controller, Recovery *envelope.Key

	now func() time.Time
}

// New makes a cluster by the machine's clock.
func New(t testing.TB) *Cluster { return NewAt(t, time.Now) }

// NewAt makes a cluster by another clock.
func NewAt(t testing.TB, now func() time.Time) *Cluster {
	t.Helper()
	c := &Cluster{Operator: NewKey(t), Controller: NewKey(t), Recovery: NewKey(t), now: now}
	var err error
	if c.CA, err = ca.New(ca.Config{TrustDomain: TrustDomain, Now: now}); err != nil {
		t.Fatal(err)
	}
	c.Root, err = trustroot.SignGenesis(trustroot.Genesis{
		TrustDomain: TrustDomain,
		IssuedAt:    now(),
		Keys: []*taskv1.TrustKey{
			trustroot.NewKey("alice", c.Operator.Public(), time.Time{}, taskv1.KeyRole_KEY_ROLE_OPERATOR),
			trustroot.NewKey("slurm", c.Controller.Public(), time.Time{}, taskv1.KeyRole_KEY_ROLE_CONTROLLER),
			trustroot.NewKey("recovery", c.Recovery.Public(), time.Time{}, taskv1.KeyRole_KEY_ROLE_RECOVERY),
		},
	}, c.Operator, c.Recovery)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// NewKey makes a signing key.
func NewKey(t testing.TB) *envelope.Key {
	t.Helper()
	k, err := envelope.GenerateKey()
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// NewTaskID makes a task id.
func NewTaskID(t testing.TB) string {
	t.Helper()
	id, err := uuid.NewV7()
	if err != nil {
		t.Fatal(err)
	}
	return id.String()
}

// Window is a window from now on, an hour long.
func (c *Cluster) Window() envelope.Window {
	cluster := c.Root.Cluster()
	now := c.now()
	return envelope.Window{
		Cluster:          cluster[:],
		TrustRootVersion: c.Root.Version(),
		IssuedAt:         now,
		NotAfter:         now.Add(time.Hour),
	}
}

// Sign signs leaves with the operator's key and [Cluster.Window].
func (c *Cluster) Sign(t testing.TB, leaves ...*taskv1.TaskLeaf) (*taskv1.Envelope, []*taskv1.SignedLeaf) {
	t.Helper()
	env, signed, err := envelope.SignTaskSet(c.Window(), leaves, c.Operator)
	if err != nil {
		t.Fatal(err)
	}
	return env, signed
}

// Identity issues a certificate that is good for an hour, of generation 1 where
// the role is node.
func (c *Cluster) Identity(t testing.TB, role pki.Role, name string) *pki.Identity {
	t.Helper()
	id, err := pki.NewID(TrustDomain, role, name)
	if err != nil {
		t.Fatal(err)
	}
	key, err := pki.GenerateKey()
	if err != nil {
		t.Fatal(err)
	}
	request := ca.Request{ID: id, TTL: time.Hour}
	if role == pki.RoleNode {
		request.Generation = 1
	}
	identity, err := c.CA.Identity(request, key)
	if err != nil {
		t.Fatal(err)
	}
	return identity
}

// TLS returns the TLS configurations of a holder of [Cluster.Identity].
func (c *Cluster) TLS(t testing.TB, role pki.Role, name string) pki.TLS {
	t.Helper()
	source := new(pki.Static)
	source.Set(c.Identity(t, role, name))
	return pki.TLS{Source: source, TrustDomain: TrustDomain, Now: c.now}
}
