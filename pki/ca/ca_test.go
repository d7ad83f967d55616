package ca_test

import (
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/gpuaas/millwright/pki"
	"github.com/gpuaas/millwright/pki/ca"
)

const domain = "td.test"

func mustID(t *testing.T, role pki.Role, name string) pki.ID {
	t.Helper()
	id, err := pki.NewID(domain, role, name)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func TestIssueIsStrict(t *testing.T) {
	authority, err := ca.New(ca.Config{TrustDomain: domain})
	if err != nil {
		t.Fatal(err)
	}
	for _, role := range pki.Roles() {
		key, err := pki.GenerateKey()
		if err != nil {
			t.Fatal(err)
		}
		id := mustID(t, role, "a")
		chain, err := authority.Issue(ca.Request{ID: id, PublicKey: &key.PublicKey, TTL: time.Hour, Generation: 7})
		if err != nil {
			t.Fatal(err)
		}
		got, err := pki.VerifyChain(chain, authority.Roots(), domain, time.Now())
		if err != nil || got != id {
			t.Errorf("%s: %v, %v", id, got, err)
		}
		leaf := chain[0]
		if g := pki.Generation(leaf); g != 7 {
			t.Errorf("generation %d, want 7", g)
		}
		if back := time.Since(leaf.NotBefore); back < ca.Backdate-time.Second || back > ca.Backdate+10*time.Second {
			t.Errorf("backdated by %s", back)
		}
		if left := time.Until(leaf.NotAfter); left > time.Hour || left < time.Hour-10*time.Second {
			t.Errorf("good for %s", left)
		}
	}
}

// TestOnlyTheKeyIsTaken asks with a request full of wishes.
func TestOnlyTheKeyIsTaken(t *testing.T) {
	authority, err := ca.New(ca.Config{TrustDomain: domain})
	if err != nil {
		t.Fatal(err)
	}
	key, err := pki.GenerateKey()
	if err != nil {
		t.Fatal(err)
	}
	csr, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{
		Subject:  pkix.Name{CommonName: "root", SerialNumber: "99"},
		URIs:     []*url.URL{mustID(t, pki.RoleOperator, "mallory").URL()},
		DNSNames: []string{"evil.test"},
	}, key)
	if err != nil {
		t.Fatal(err)
	}
	public, err := pki.RequestKey(csr)
	if err != nil {
		t.Fatal(err)
	}
	id := mustID(t, pki.RoleNode, "a")
	chain, err := authority.Issue(ca.Request{ID: id, PublicKey: public, TTL: time.Hour, Generation: 1})
	if err != nil {
		t.Fatal(err)
	}
	leaf := chain[0]
	got, err := pki.StrictLeaf(leaf)
	if err != nil || got != id || len(leaf.DNSNames) != 0 || leaf.Subject.CommonName != "a" || pki.Generation(leaf) != 1 {
		t.Errorf("got %v, %v, %v, %v", got, err, leaf.DNSNames, leaf.Subject)
	}
}

func TestIssueRefuses(t *testing.T) {
	authority, err := ca.New(ca.Config{TrustDomain: domain})
	if err != nil {
		t.Fatal(err)
	}
	key, err := pki.GenerateKey()
	if err != nil {
		t.Fatal(err)
	}
	good := ca.Request{ID: mustID(t, pki.RoleNode, "a"), PublicKey: &key.PublicKey, TTL: time.Hour}
	for name, edit := range map[string]func(*ca.Request){
		"other trust domain": func(r *ca.Request) { r.ID.TrustDomain = "other.test" },
		"bad name":           func(r *ca.Request) { r.ID.Name = "../a" },
		"no role":            func(r *ca.Request) { r.ID.Role = "" },
		"no key":             func(r *ca.Request) { r.PublicKey = nil },
		"no life":            func(r *ca.Request) { r.TTL = 0 },
		"too long a life":    func(r *ca.Request) { r.TTL = ca.MaxTTL + 1 },
	} {
		r := good
		edit(&r)
		if _, err := authority.Issue(r); err == nil {
			t.Errorf("%s: issued", name)
		}
	}
}

func TestCreateAndLoad(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "ca")
	cfg := ca.Config{TrustDomain: domain}
	made, err := ca.Create(dir, cfg)
	if err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 2 {
		t.Fatalf("directory holds %v, %v", entries, err)
	}
	for _, e := range entries {
		if info, err := e.Info(); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: mode %v, %v", e.Name(), info.Mode(), err)
		}
	}
	loaded, err := ca.Load(dir, cfg)
	if err != nil || loaded.SHA256() != made.SHA256() {
		t.Fatalf("load: %v", err)
	}
	if _, err := ca.Create(dir, cfg); !errors.Is(err, fs.ErrExist) {
		t.Errorf("a second CA: %v", err)
	}
	if again, err := ca.Load(dir, cfg); err != nil || again.SHA256() != made.SHA256() {
		t.Errorf("the first CA is gone: %v", err)
	}
	if _, err := ca.Load(dir, ca.Config{TrustDomain: "other.test"}); err == nil {
		t.Error("loaded for another trust domain")
	}
	if err := os.Chmod(filepath.Join(dir, "ca.key"), 0o640); err != nil {
		t.Fatal(err)
	}
	if _, err := ca.Load(dir, cfg); !errors.Is(err, fs.ErrPermission) {
		t.Errorf("key that others can read: %v", err)
	}
	if _, err := ca.Load(t.TempDir(), cfg); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no CA: %v", err)
	}
}

// TestCreateAfterACrash finds a certificate whose key was never written.
func TestCreateAfterACrash(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "ca.pem"), []byte("half"), 0o600); err != nil {
		t.Fatal(err)
	}
	cfg := ca.Config{TrustDomain: domain}
	made, err := ca.Create(dir, cfg)
	if err != nil {
		t.Fatal(err)
	}
	if loaded, err := ca.Load(dir, cfg); err != nil || loaded.SHA256() != made.SHA256() {
		t.Errorf("load: %v", err)
	}
}

func TestSourceIssuesAnewAtHalfLife(t *testing.T) {
	now := time.Now()
	authority, err := ca.New(ca.Config{TrustDomain: domain, Now: func() time.Time { return now }})
	if err != nil {
		t.Fatal(err)
	}
	source := ca.NewSource(authority, mustID(t, pki.RoleServer, "one"), 24*time.Hour)
	first, err := source.Identity()
	if err != nil {
		t.Fatal(err)
	}
	now = now.Add(11 * time.Hour)
	if same, err := source.Identity(); err != nil || same != first {
		t.Errorf("issued anew before half life: %v", err)
	}
	now = now.Add(2 * time.Hour)
	second, err := source.Identity()
	if err != nil || second == first || !second.NotAfter().After(first.NotAfter()) {
		t.Errorf("not issued anew: %v", err)
	}
}
