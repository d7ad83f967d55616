package enrol

import (
	"context"
	"crypto/tls"
	"fmt"

	"github.com/gpuaas/millwright/pki"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	"github.com/gpuaas/millwright/proto/rpcerr"
)

// Refused says that the server did not accept the certificate, although it is
// good by this node's clock. It does not block.
func (e *Enrolment) Refused() {
	select {
	case e.refused <- struct{}{}:
	default:
	}
}

// Ended says in words what becomes of a certificate that has ended, or "" while
// it is good.
func (e *Enrolment) Ended() string {
	now, end := e.cfg.Now(), e.NotAfter()
	switch {
	case now.Before(end):
		return ""
	case now.Sub(end) > pki.RekeyWithin:
		return fmt.Sprintf("the node's certificate has ended at %s, too long ago to be replaced by itself: put a new bundle, made with millctl node token create %s --rejoin, in the place of the old one",
			stamp(end), e.Node())
	}
	return fmt.Sprintf("the node's certificate has ended at %s; the node asks %s for a new one with the key that it joined with, until %s",
		stamp(end), e.Server(), stamp(end.Add(pki.RekeyWithin)))
}

// rekey asks for a new certificate by answering a challenge with the key that
// the node joined with. The handshake carries no certificate: an ended one would
// be refused there.
func (e *Enrolment) rekey(ctx context.Context) error {
	current, err := e.Identity()
	if err != nil {
		return err
	}
	csr, err := pki.NewRequest(current.Key)
	if err != nil {
		return err
	}
	anonymous := e.TLS()
	anonymous.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return new(tls.Certificate), nil }
	conn, err := dial(e.cfg, e.Server(), anonymous)
	if err != nil {
		return err
	}
	defer conn.Close() //nolint:errcheck // nothing is in flight
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	client, leaf := agentv1.NewEnrolmentServiceClient(conn), current.Leaf().Raw
	start, err := client.StartRekey(ctx, &agentv1.StartRekeyRequest{Certificate: leaf})
	if err != nil {
		return fmt.Errorf("ask %s for a challenge: %w", e.Server(), rpcerr.Plain(err))
	}
	signature, err := pki.SignRekey(current.Key, start.GetChallenge(), csr)
	if err != nil {
		return err
	}
	resp, err := client.Rekey(ctx, &agentv1.RekeyRequest{Certificate: leaf, Challenge: start.GetChallenge(), Csr: csr, Signature: signature})
	if err != nil {
		return fmt.Errorf("re-key at %s: %w", e.Server(), rpcerr.Plain(err))
	}
	if err := e.replace(current, resp.GetCertificates(), resp.GetCaCertificates()); err != nil {
		return fmt.Errorf("re-key at %s: the answer cannot be used: %w", e.Server(), err)
	}
	e.cfg.Log.Info("node re-keyed after its certificate ended", "node", e.Node(), "not_after", e.NotAfter())
	return nil
}
