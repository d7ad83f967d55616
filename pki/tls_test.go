package pki_test

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/gpuaas/millwright/pki"
	"github.com/gpuaas/millwright/pki/pkitest"
)

// shake does one handshake over a real connection, with a byte each way, and
// returns what each side says of it.
func shake(t *testing.T, server, client *tls.Config) (serverErr, clientErr error) {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close() //nolint:errcheck // one connection was all
	var wg sync.WaitGroup
	wg.Go(func() {
		conn, err := l.Accept()
		if err != nil {
			serverErr = err
			return
		}
		serverErr = talk(t.Context(), tls.Server(conn, server))
	})
	conn, err := new(net.Dialer).DialContext(t.Context(), "tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	clientErr = talk(t.Context(), tls.Client(conn, client))
	wg.Wait()
	return serverErr, clientErr
}

func talk(ctx context.Context, conn *tls.Conn) error {
	defer conn.Close() //nolint:errcheck // all was said
	if err := conn.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
		return err
	}
	if err := conn.HandshakeContext(ctx); err != nil {
		return err
	}
	if _, err := conn.Write([]byte{1}); err != nil {
		return err
	}
	_, err := io.ReadFull(conn, make([]byte, 1))
	return err
}

func TestShapesAreThirty(t *testing.T) {
	if n := len(pkitest.Shapes("td.test")); n != 30 {
		t.Errorf("%d shapes, want 30", n)
	}
}

// TestShapesAtTheServer presents each shape to a server in a real handshake.
func TestShapesAtTheServer(t *testing.T) {
	ca := newIssuer(t)
	server := ca.tls(t, pki.RoleServer).Server()
	for _, s := range append(pkitest.Shapes("td.test"), pkitest.MoreShapes("td.test")...) {
		t.Run(s.Name, func(t *testing.T) {
			key := newKey(t)
			cert := tls.Certificate{Certificate: [][]byte{ca.issue(t, pki.RoleNode, key, s.Edit)}, PrivateKey: key}
			client := &tls.Config{
				InsecureSkipVerify: true,
				GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
					return &cert, nil
				},
			}
			serverErr, _ := shake(t, server, client)
			check(t, s.Good, serverErr)
		})
	}
}

// TestShapesAtTheClient presents each shape as a server's, to a client with an
// identity and to one that joins.
func TestShapesAtTheClient(t *testing.T) {
	ca := newIssuer(t)
	clients := map[string]*tls.Config{
		"member":  ca.tls(t, pki.RoleNode).Client(),
		"joining": pki.JoinTLS("td.test", sha256.Sum256(ca.cert.Raw), nil),
	}
	for _, s := range append(pkitest.Shapes("td.test"), pkitest.MoreShapes("td.test")...) {
		key := newKey(t)
		server := &tls.Config{Certificates: []tls.Certificate{{
			Certificate: [][]byte{ca.issue(t, pki.RoleServer, key, s.Edit), ca.cert.Raw}, PrivateKey: key,
		}}}
		for name, client := range clients {
			t.Run(name+"/"+s.Name, func(t *testing.T) {
				_, clientErr := shake(t, server, client)
				check(t, s.Good, clientErr)
			})
		}
	}
}

func check(t *testing.T, ok bool, err error) {
	t.Helper()
	switch {
	case ok && err != nil:
		t.Errorf("refused: %v", err)
	case !ok && err == nil:
		t.Error("accepted")
	case !ok && (errors.Is(err, io.EOF) || errors.Is(err, net.ErrClosed)):
		t.Errorf("the connection broke instead of being refused: %v", err)
	}
}

func TestServerTakesNoCertificateForNoIdentity(t *testing.T) {
	ca := newIssuer(t)
	var id atomic.Value
	server := ca.tls(t, pki.RoleServer).Server()
	verify := server.VerifyConnection
	server.VerifyConnection = func(cs tls.ConnectionState) error {
		cs.HandshakeComplete = true
		_, ok := pki.PeerID(cs)
		id.Store(ok)
		return verify(cs)
	}
	serverErr, clientErr := shake(t, server, &tls.Config{InsecureSkipVerify: true})
	if serverErr != nil || clientErr != nil {
		t.Fatalf("a client without a certificate is refused: %v, %v", serverErr, clientErr)
	}
	if id.Load() != false {
		t.Error("a client without a certificate has an id")
	}
}

func TestClientWantsAServer(t *testing.T) {
	ca := newIssuer(t)
	for _, role := range []pki.Role{pki.RoleNode, pki.RoleOperator, pki.RoleController} {
		server := ca.tls(t, role).Server()
		for name, client := range map[string]*tls.Config{
			"member":  ca.tls(t, pki.RoleNode).Client(),
			"joining": pki.JoinTLS("td.test", sha256.Sum256(ca.cert.Raw), nil),
		} {
			if _, err := shake(t, server, client); !errors.Is(err, pki.ErrCertificate) {
				t.Errorf("%s client and a server with a certificate of a %s: %v", name, role, err)
			}
		}
	}
}

func TestOtherCA(t *testing.T) {
	ours, other := newIssuer(t), newIssuer(t)
	if err, _ := shake(t, ours.tls(t, pki.RoleServer).Server(), loose(other.tls(t, pki.RoleNode))); !errors.Is(err, pki.ErrCertificate) {
		t.Errorf("server takes a node of another CA: %v", err)
	}
	if _, err := shake(t, other.tls(t, pki.RoleServer).Server(), ours.tls(t, pki.RoleNode).Client()); !errors.Is(err, pki.ErrCertificate) {
		t.Errorf("client takes a server of another CA: %v", err)
	}
}

// loose is a client that presents its certificate and takes any server.
func loose(t pki.TLS) *tls.Config {
	c := t.Client()
	c.VerifyConnection = nil
	return c
}

func TestJoinPin(t *testing.T) {
	ours, other := newIssuer(t), newIssuer(t)
	pin := sha256.Sum256(ours.cert.Raw)
	good := ours.tls(t, pki.RoleServer).Server()
	if _, err := shake(t, good, pki.JoinTLS("td.test", pin, nil)); err != nil {
		t.Errorf("pinned server: %v", err)
	}
	if _, err := shake(t, good, pki.JoinTLS("other.test", pin, nil)); !errors.Is(err, pki.ErrCertificate) {
		t.Errorf("another trust domain: %v", err)
	}
	_, err := shake(t, other.tls(t, pki.RoleServer).Server(), pki.JoinTLS("td.test", pin, nil))
	if !errors.Is(err, pki.ErrCertificate) || !strings.Contains(err.Error(), "no CA certificate with SHA-256") {
		t.Errorf("wrong CA: %v", err)
	}
	// A server that shows the pinned CA and is signed by another one.
	id := other.identity(t, pki.RoleServer)
	cert := id.TLSCertificate()
	cert.Certificate = [][]byte{id.Leaf().Raw, other.cert.Raw, ours.cert.Raw}
	if _, err := shake(t, &tls.Config{Certificates: []tls.Certificate{*cert}}, pki.JoinTLS("td.test", pin, nil)); !errors.Is(err, pki.ErrCertificate) {
		t.Errorf("borrowed CA: %v", err)
	}
	// A pin on a leaf is no pin on a CA.
	leaf := sha256.Sum256(id.Leaf().Raw)
	if _, err := shake(t, &tls.Config{Certificates: []tls.Certificate{*cert}}, pki.JoinTLS("td.test", leaf, nil)); !errors.Is(err, pki.ErrCertificate) {
		t.Errorf("pinned leaf: %v", err)
	}
}

func TestOnlyTLS13(t *testing.T) {
	ca := newIssuer(t)
	old := loose(ca.tls(t, pki.RoleNode))
	old.MinVersion, old.MaxVersion = tls.VersionTLS12, tls.VersionTLS12
	if err, _ := shake(t, ca.tls(t, pki.RoleServer).Server(), old); err == nil {
		t.Error("server speaks TLS 1.2")
	}
	server := ca.tls(t, pki.RoleServer).Server()
	server.MinVersion, server.MaxVersion = tls.VersionTLS12, tls.VersionTLS12
	if _, err := shake(t, server, ca.tls(t, pki.RoleNode).Client()); err == nil {
		t.Error("client speaks TLS 1.2")
	}
}

// TestResumptionSkipsNothing flips what the server trusts between two
// connections of a client that caches sessions. Once as configured, when there
// is nothing to resume; once with tickets forced on, when the session is
// resumed and the peer is verified all the same.
func TestResumptionSkipsNothing(t *testing.T) {
	for name, tickets := range map[string]bool{"as configured": false, "tickets forced on": true} {
		t.Run(name, func(t *testing.T) {
			ours, other := newIssuer(t), newIssuer(t)
			source := new(pki.Static)
			source.Set(ours.identity(t, pki.RoleServer))
			server := pki.TLS{Source: source, TrustDomain: "td.test"}.Server()
			var resumed atomic.Int32
			verify := server.VerifyConnection
			server.VerifyConnection = func(cs tls.ConnectionState) error {
				if cs.DidResume {
					resumed.Add(1)
				}
				return verify(cs)
			}
			client := loose(ours.tls(t, pki.RoleNode))
			client.ServerName = "x"
			client.ClientSessionCache = tls.NewLRUClientSessionCache(8)
			if tickets {
				server.SessionTicketsDisabled, client.SessionTicketsDisabled = false, false
			}
			for range 2 {
				if serverErr, clientErr := shake(t, server, client); serverErr != nil || clientErr != nil {
					t.Fatalf("before: %v, %v", serverErr, clientErr)
				}
			}
			if got := resumed.Load() > 0; got != tickets {
				t.Fatalf("resumed = %v, want %v", got, tickets)
			}
			// The server no longer trusts the CA of the client.
			swapped := ours.identity(t, pki.RoleServer)
			source.Set(&pki.Identity{ID: swapped.ID, Chain: swapped.Chain, Key: swapped.Key, Roots: []*x509.Certificate{other.cert}})
			if serverErr, _ := shake(t, server, client); !errors.Is(serverErr, pki.ErrCertificate) {
				t.Errorf("after: the peer is served: %v", serverErr)
			}
		})
	}
}

func TestTLSByItsOwnClock(t *testing.T) {
	ca := newIssuer(t)
	client := ca.tls(t, pki.RoleNode)
	client.Now = func() time.Time { return time.Now().Add(time.Hour) }
	if _, err := shake(t, ca.tls(t, pki.RoleServer).Server(), client.Client()); !errors.Is(err, pki.ErrCertificate) {
		t.Errorf("a certificate that has expired by the client's clock: %v", err)
	}
}

func TestNoIdentityYet(t *testing.T) {
	ca := newIssuer(t)
	client := pki.TLS{Source: new(pki.Static), TrustDomain: "td.test"}.Client()
	if _, err := shake(t, ca.tls(t, pki.RoleServer).Server(), client); !errors.Is(err, pki.ErrNoIdentity) {
		t.Errorf("got %v, want ErrNoIdentity", err)
	}
}
