package harness

import (
	"context"
	"crypto"
	"crypto/x509"
	"path/filepath"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/gpuaas/millwright/controlplane"
	"github.com/gpuaas/millwright/pki"
	"github.com/gpuaas/millwright/pki/ca"
	"github.com/gpuaas/millwright/pki/envelope"
)

// TrustDomain is the trust domain of every cluster.
const TrustDomain = trustDomain

// Address is where the server listens, or another one in its place.
func (c *Cluster) Address() string { return c.cfg.AdvertiseAddress }

// StopServer ends the server as SIGTERM would.
func (c *Cluster) StopServer() { c.stop() }

// StartServer runs the server again.
func (c *Cluster) StartServer() {
	c.t.Helper()
	c.cfg.Listener = listen(c.t, c.cfg.AdvertiseAddress)
	c.cfg.HTTPListener = listen(c.t, "127.0.0.1:0")
	c.stop = run(c.t, controlplane.New(c.cfg).Run)
	c.t.Cleanup(c.check) // while all still run
}

// CA is the server's own, as who has stolen its files has it.
func (c *Cluster) CA() *ca.CA {
	c.t.Helper()
	return must(ca.Load(filepath.Join(c.cfg.StateDir, "ca"), ca.Config{TrustDomain: trustDomain}))(c.t)
}

// Key signs tasks for the cluster.
func (c *Cluster) Key() *envelope.Key { return c.key }

// ControllerKey signs tasks as the controller slurm does.
func (c *Cluster) ControllerKey() *envelope.Key { return c.slurm }

// RecoveryKey is in the trust root, and may not sign tasks.
func (c *Cluster) RecoveryKey() *envelope.Key { return c.recovery }

// Window is a window from now on, an hour long.
func (c *Cluster) Window() envelope.Window {
	cluster, now := c.root.Cluster(), c.clock.Now()
	return envelope.Window{Cluster: cluster[:], TrustRootVersion: c.root.Version(), IssuedAt: now, NotAfter: now.Add(time.Hour)}
}

// Identity issues a certificate for an hour, whoever asks; of generation 1
// where the role is node.
func (c *Cluster) Identity(role pki.Role, name string) *pki.Identity {
	c.t.Helper()
	request := ca.Request{ID: must(pki.NewID(trustDomain, role, name))(c.t), TTL: time.Hour}
	if role == pki.RoleNode {
		request.Generation = 1
	}
	return must(c.CA().Identity(request, must(pki.GenerateKey())(c.t)))(c.t)
}

// Connect returns a connection to the server as the holder of an identity, or
// as someone without one when it is nil.
func (c *Cluster) Connect(identity *pki.Identity) *grpc.ClientConn {
	c.t.Helper()
	config := pki.JoinTLS(trustDomain, c.CA().SHA256(), nil)
	if identity != nil {
		source := new(pki.Static)
		source.Set(identity)
		config = pki.TLS{Source: source, TrustDomain: trustDomain}.Client()
	}
	conn := must(grpc.NewClient("passthrough:///"+c.Address(), grpc.WithTransportCredentials(credentials.NewTLS(config))))(c.t)
	c.t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// CAFiles are the key and the certificate of the server's CA.
func (c *Cluster) CAFiles() (crypto.Signer, *x509.Certificate) {
	c.t.Helper()
	dir := filepath.Join(c.cfg.StateDir, "ca")
	key := must(pki.ReadPrivateKey(filepath.Join(dir, "ca.key")))(c.t)
	return key, must(pki.ReadCertificates(filepath.Join(dir, "ca.pem")))(c.t)[0]
}

// OutputDir is where the server keeps the output of commands.
func (c *Cluster) OutputDir() string { return filepath.Join(c.cfg.StateDir, "output") }

// Settled waits until the server has all that the node's journal says.
func (c *Cluster) Settled(n *Node) {
	c.t.Helper()
	c.until("the journal of "+n.Name+" is acknowledged", func(context.Context) (bool, error) {
		s := n.Status()
		return s.GetLastSeq() == s.GetAcknowledgedSeq(), nil
	})
}

// StoreFile is the file of the server's store. It is to be copied or replaced
// only while no server runs.
func (c *Cluster) StoreFile() string { return filepath.Join(c.cfg.StateDir, "store.db") }
