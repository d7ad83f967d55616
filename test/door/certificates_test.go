package door_test

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"math/big"
	"net/url"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	healthgrpc "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"github.com/gpuaas/millwright/pki"
	"github.com/gpuaas/millwright/pki/pkitest"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	nodev1 "github.com/gpuaas/millwright/proto/millwright/node/v1"
	"github.com/gpuaas/millwright/test/harness"
)

// TestCertificateShapes presents each shape, signed by the cluster's own CA, as
// an operator and as a node. A bad one gets no RPC through, not even one that
// needs no certificate.
func TestCertificateShapes(t *testing.T) {
	c := harness.New(t)
	shapes := pkitest.Shapes(harness.TrustDomain)
	if len(shapes) != 30 {
		t.Fatalf("%d shapes, want 30", len(shapes))
	}
	for _, role := range []pki.Role{pki.RoleOperator, pki.RoleNode} {
		for _, s := range shapes {
			t.Run(string(role)+"/"+s.Name, func(t *testing.T) {
				conn := connect(t, c, issue(t, c, role, s))
				for name, err := range knock(t, conn) {
					through := status.Code(err) != codes.Unavailable
					if through != s.Good {
						t.Errorf("%s: %v, want it through: %t", name, err, s.Good)
					}
				}
			})
		}
	}
	t.Run("another CA", func(t *testing.T) {
		other := harness.New(t)
		cert := issue(t, other, pki.RoleOperator, shapes[0])
		for name, err := range knock(t, connect(t, c, cert)) {
			if status.Code(err) != codes.Unavailable {
				t.Errorf("%s: %v, want no RPC through", name, err)
			}
		}
	})
}

// issue signs a certificate of a shape with the key of the cluster's CA.
func issue(t *testing.T, c *harness.Cluster, role pki.Role, s pkitest.Shape) tls.Certificate {
	t.Helper()
	caKey, caCert := c.CAFiles()
	key, err := pki.GenerateKey()
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: "a"},
		NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(time.Hour),
		BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		URIs:        []*url.URL{{Scheme: "spiffe", Host: harness.TrustDomain, Path: "/" + string(role) + "/a"}},
	}
	s.Edit(template, string(role))
	der, err := x509.CreateCertificate(rand.Reader, template, caCert, key.Public(), caKey)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

// connect presents any certificate, and believes any server.
func connect(t *testing.T, c *harness.Cluster, cert tls.Certificate) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient("passthrough:///"+c.Address(), grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{
		InsecureSkipVerify:   true,
		MinVersion:           tls.VersionTLS13,
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &cert, nil },
	})))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// knock calls an RPC of each kind, and returns the errors.
func knock(t *testing.T, conn *grpc.ClientConn) map[string]error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	out := map[string]error{}
	_, out["ListNodes"] = nodev1.NewNodeServiceClient(conn).ListNodes(ctx, &nodev1.ListNodesRequest{})
	_, out["Join"] = agentv1.NewEnrolmentServiceClient(conn).Join(ctx, &agentv1.JoinRequest{})
	_, out["Check"] = healthgrpc.NewHealthClient(conn).Check(ctx, &healthgrpc.HealthCheckRequest{})
	session, err := agentv1.NewAgentServiceClient(conn).Session(ctx)
	if err == nil {
		_ = session.CloseSend() // Recv has the reason
		_, err = session.Recv()
	}
	out["Session"] = err
	return out
}

// TestCAOfAnotherServer is about the other direction: a server that does not
// have the pinned CA gets no token.
func TestCAOfAnotherServer(t *testing.T) {
	good, other := harness.New(t), harness.New(t)
	token := newToken(t, good, "n1", time.Hour)
	hash := good.CA().SHA256()
	hash[0] ^= 1
	for name, conn := range map[string]*grpc.ClientConn{
		"wrong CA hash": dial(t, good.Address(), pki.JoinTLS(harness.TrustDomain, hash, nil)),
		"other server":  dial(t, other.Address(), pki.JoinTLS(harness.TrustDomain, good.CA().SHA256(), nil)),
		"other domain":  dial(t, good.Address(), pki.JoinTLS("other.test", good.CA().SHA256(), nil)),
	} {
		_, _, err := join(t, conn, token)
		if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "certificate") {
			t.Errorf("%s: %v, want that the certificate is refused", name, err)
		}
	}
	if _, _, err := join(t, good.Connect(nil), token); err != nil {
		t.Errorf("the token was used up: %v", err)
	}
}

func dial(t *testing.T, address string, config *tls.Config) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(credentials.NewTLS(config)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}
