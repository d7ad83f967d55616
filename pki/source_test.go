package pki_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/gpuaas/millwright/pki"
)

func TestFiles(t *testing.T) {
	ca := newIssuer(t)
	dir := t.TempDir()
	cert, key, roots := filepath.Join(dir, "svid.pem"), filepath.Join(dir, "key.pem"), filepath.Join(dir, "ca.pem")
	write := func(id *pki.Identity) {
		t.Helper()
		pem, err := pki.MarshalPrivateKey(id.Key)
		if err != nil {
			t.Fatal(err)
		}
		for path, data := range map[string][]byte{
			cert: pki.MarshalCertificates(id.Chain), key: pem, roots: pki.MarshalCertificates(id.Roots),
		} {
			if err := os.WriteFile(path, data, 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	first, second := ca.identity(t, pki.RoleNode), ca.identity(t, pki.RoleNode)
	write(first)
	files, err := pki.OpenFiles(cert, key, roots)
	if err != nil {
		t.Fatal(err)
	}
	is := func(want *pki.Identity) {
		t.Helper()
		if got, err := files.Identity(); err != nil || !got.Leaf().Equal(want.Leaf()) || got.ID != want.ID {
			t.Errorf("got %v, %v", got, err)
		}
	}
	is(first)
	write(second)
	is(first) // until it is told
	if err := files.Reload(); err != nil {
		t.Fatal(err)
	}
	is(second)
	if err := os.WriteFile(cert, []byte("garbage"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := files.Reload(); !errors.Is(err, pki.ErrCertificate) {
		t.Errorf("garbage: %v", err)
	}
	is(second) // what does not load changes nothing
}

func TestNewIdentityRefuses(t *testing.T) {
	ca, other := newIssuer(t), newIssuer(t)
	good := ca.identity(t, pki.RoleNode)
	if _, err := pki.NewIdentity(good.Chain, newKey(t), good.Roots); !errors.Is(err, pki.ErrCertificate) {
		t.Errorf("key of another certificate: %v", err)
	}
	if _, err := pki.NewIdentity(good.Chain, good.Key, []*x509.Certificate{other.cert}); !errors.Is(err, pki.ErrCertificate) {
		t.Errorf("roots of another CA: %v", err)
	}
	if _, err := pki.NewIdentity(nil, good.Key, good.Roots); !errors.Is(err, pki.ErrCertificate) {
		t.Errorf("no certificate: %v", err)
	}
}

func TestVerifyChainBounds(t *testing.T) {
	ca := newIssuer(t)
	id := ca.identity(t, pki.RoleNode)
	long := append([]*x509.Certificate{id.Leaf()}, ca.cert, ca.cert, ca.cert, ca.cert)
	if _, err := pki.VerifyChain(long, id.Roots, "td.test", id.NotBefore().Add(1)); !errors.Is(err, pki.ErrCertificate) {
		t.Errorf("chain of five: %v", err)
	}
	if _, err := pki.VerifyChain(nil, id.Roots, "td.test", id.NotBefore().Add(1)); !errors.Is(err, pki.ErrCertificate) {
		t.Errorf("no chain: %v", err)
	}
}

func TestRequestKey(t *testing.T) {
	key := newKey(t)
	csr, err := pki.NewRequest(key)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := pki.RequestKey(csr); err != nil || !got.Equal(key.Public()) {
		t.Fatalf("got %v, %v", got, err)
	}
	for i := range csr {
		bad := append([]byte(nil), csr...)
		bad[i] ^= 0x01
		if _, err := pki.RequestKey(bad); !errors.Is(err, pki.ErrRequest) {
			t.Fatalf("byte %d of the request does not matter: %v", i, err)
		}
	}
	p384, err := ecdsa.GenerateKey(elliptic.P384(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	rsaKey, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	wrong384, err := pki.NewRequest(p384)
	if err != nil {
		t.Fatal(err)
	}
	wrongRSA, err := pki.NewRequest(rsaKey)
	if err != nil {
		t.Fatal(err)
	}
	for name, der := range map[string][]byte{
		"empty": nil, "garbage": []byte("garbage"), "too long": make([]byte, 5000),
		"P-384": wrong384, "RSA": wrongRSA, "something after it": append(append([]byte(nil), csr...), 0),
	} {
		if _, err := pki.RequestKey(der); !errors.Is(err, pki.ErrRequest) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func FuzzRequestKey(f *testing.F) {
	key, err := pki.GenerateKey()
	if err != nil {
		f.Fatal(err)
	}
	csr, err := pki.NewRequest(key)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(csr)
	f.Fuzz(func(t *testing.T, der []byte) {
		if k, err := pki.RequestKey(der); err == nil && k.Curve != elliptic.P256() {
			t.Error("a key of another curve")
		}
	})
}
