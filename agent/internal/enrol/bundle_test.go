package enrol_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/millwright/agent/internal/enrol"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
)

const secret = "token-that-must-not-show"

func goodMessage() *agentv1.JoinBundle {
	hash := strings.Repeat("0a", 32)
	return &agentv1.JoinBundle{
		Version: 1, Server: "server.test:7443", TrustDomain: "td.test", CaSha256: hash, Cluster: hash, TrustRoot: hash,
		Floor: timestamppb.Now(), Node: "gpu-001", Token: secret, Expires: timestamppb.Now(),
	}
}

func TestParseBundle(t *testing.T) {
	b, err := enrol.ParseBundle(encode(t, goodMessage()))
	if err != nil {
		t.Fatal(err)
	}
	if b.Server != "server.test:7443" || b.ID.String() != "spiffe://td.test/node/gpu-001" || b.Cluster[0] != 0x0a {
		t.Errorf("got %+v", b)
	}
	for _, tt := range []struct {
		says string // what the error names
		edit func(*agentv1.JoinBundle)
	}{
		{"version 2", func(m *agentv1.JoinBundle) { m.Version = 2 }},
		{"server", func(m *agentv1.JoinBundle) { m.Server = "server.test" }},
		{"server", func(m *agentv1.JoinBundle) { m.Server = "server.test:0" }},
		{"server", func(m *agentv1.JoinBundle) { m.Server = ":7443" }},
		{"server", func(m *agentv1.JoinBundle) { m.Server = "server.test:70000" }},
		{"trust domain", func(m *agentv1.JoinBundle) { m.TrustDomain = "TD" }},
		{"ca_sha256", func(m *agentv1.JoinBundle) { m.CaSha256 = "0a" }},
		{"cluster", func(m *agentv1.JoinBundle) { m.Cluster = strings.Repeat("zz", 32) }},
		{"trust_root", func(m *agentv1.JoinBundle) { m.TrustRoot = "" }},
		{"floor", func(m *agentv1.JoinBundle) { m.Floor = nil }},
		{"expires", func(m *agentv1.JoinBundle) { m.Expires = nil }},
		{"name", func(m *agentv1.JoinBundle) { m.Node = "../x" }},
		{"token", func(m *agentv1.JoinBundle) { m.Token = "" }},
		{"token", func(m *agentv1.JoinBundle) { m.Token = strings.Repeat(secret, 10) }},
	} {
		m := goodMessage()
		tt.edit(m)
		_, err := enrol.ParseBundle(encode(t, m))
		if !errors.Is(err, enrol.ErrBundle) || !strings.Contains(err.Error(), tt.says) || strings.Contains(err.Error(), secret) {
			t.Errorf("%s: got %v", tt.says, err)
		}
	}
	good := string(encode(t, goodMessage()))
	for name, data := range map[string]string{
		"empty": "", "no JSON": secret, "unknown key": `{"x":1,` + good[1:], "too long": good + strings.Repeat(" ", 70000),
	} {
		if _, err := enrol.ParseBundle([]byte(data)); !errors.Is(err, enrol.ErrBundle) || strings.Contains(err.Error(), secret) {
			t.Errorf("%s: got %v", name, err)
		}
	}
}

func TestReadBundle(t *testing.T) {
	path := filepath.Join(t.TempDir(), "join.json")
	if _, err := enrol.ReadBundle(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no file: %v", err)
	}
	put(t, path, goodMessage())
	if b, err := enrol.ReadBundle(path); err != nil || b.Exposed {
		t.Errorf("mode 0600: %v", err)
	}
	if err := os.Chmod(path, 0o644); err != nil {
		t.Fatal(err)
	}
	if b, err := enrol.ReadBundle(path); err != nil || !b.Exposed {
		t.Errorf("mode 0644: %v", err)
	}
	if err := os.WriteFile(path, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := enrol.ReadBundle(path); !errors.Is(err, enrol.ErrBundle) || !strings.Contains(err.Error(), path) {
		t.Errorf("half a file: %v", err)
	}
	pipe := filepath.Join(t.TempDir(), "pipe")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := enrol.ReadBundle(pipe); !errors.Is(err, enrol.ErrBundle) {
		t.Errorf("a pipe that nobody writes to: %v", err)
	}
}

func FuzzParseBundle(f *testing.F) {
	f.Add(encode(f, goodMessage()))
	f.Fuzz(func(t *testing.T, data []byte) {
		b, err := enrol.ParseBundle(data)
		if err != nil && !errors.Is(err, enrol.ErrBundle) {
			t.Errorf("%v is not ErrBundle", err)
		}
		if err == nil && (b.Server == "" || b.ID.Name == "" || b.Floor.IsZero()) {
			t.Errorf("parsed as %+v", b)
		}
	})
}
