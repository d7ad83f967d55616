package cli_test

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protojson"

	"github.com/gpuaas/millwright/pki"
	"github.com/gpuaas/millwright/pki/pkitest"
	nodev1 "github.com/gpuaas/millwright/proto/millwright/node/v1"

	"github.com/gpuaas/millwright/controlplane/internal/cli"
)

// TestMain makes the test binary the server that looks at its store.
func TestMain(m *testing.M) {
	if os.Args[0] == "millwright-server" {
		os.Exit(cli.Main(context.Background(), os.Args[1:], os.Stdout, os.Stderr))
	}
	os.Exit(m.Run())
}

func call(ctx context.Context, args ...string) (code int, stdout, stderr string) {
	var out, errs bytes.Buffer
	code = cli.Main(ctx, args, &out, &errs)
	return code, out.String(), errs.String()
}

func write(t *testing.T, name, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestUsage(t *testing.T) {
	t.Parallel()
	bad := write(t, "server.yaml", "version: 1\nadvertise_address: a:1\nbad_key: 1\n")
	for _, c := range []struct {
		args []string
		code int
		word string
	}{
		{nil, 2, "run, init, config check or log export"},
		{[]string{"serve"}, 2, `"serve"`},
		{[]string{"run", "x"}, 2, `"x"`},
		{[]string{"run", "--port=1"}, 2, "--port"},
		{[]string{"config"}, 2, "config check"},
		{[]string{"log"}, 2, "log export"},
		{[]string{"log", "export", "--config", "/none"}, 1, "/none"},
		{[]string{"init"}, 2, "--trust-root is missing"},
		{[]string{"init", "--trust-root=f", "--trust-domain=d"}, 2, "--context-out is missing"},
		{[]string{"config", "check", "--config", "/none"}, 1, "/none"},
		{[]string{"config", "check", "--config", bad}, 1, `server.yaml:3: unknown key "bad_key"`},
		{[]string{"run", "--config", bad}, 1, `unknown key "bad_key"`},
	} {
		code, _, stderr := call(t.Context(), c.args...)
		if code != c.code || !strings.Contains(stderr, c.word) {
			t.Errorf("millwright-server %v = %d, %q; want %d with %q", c.args, code, stderr, c.code, c.word)
		}
	}
	for _, arg := range []string{"--help", "--version"} {
		if code, stdout, _ := call(t.Context(), arg); code != 0 || stdout == "" {
			t.Errorf("millwright-server %s = %d, %q", arg, code, stdout)
		}
	}
}

func TestInitAndRun(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	config := write(t, "server.yaml", "version: 1\nadvertise_address: server.test:7443\nlisten: 127.0.0.1:0\nhttp_listen: 127.0.0.1:0\nstate_dir: "+dir+"/state\n")
	if code, stdout, _ := call(t.Context(), "config", "check", "--config", config); code != 0 || !strings.Contains(stdout, "is good") {
		t.Errorf("config check = %d, %q", code, stdout)
	}
	if code, _, stderr := call(t.Context(), "run", "--config", config); code != 1 || !strings.Contains(stderr, "millwright-server init") {
		t.Errorf("run before init = %d, %q", code, stderr)
	}
	key, err := pki.GenerateKey()
	if err != nil {
		t.Fatal(err)
	}
	csr, err := pki.NewRequest(key)
	if err != nil {
		t.Fatal(err)
	}
	cluster := pkitest.New(t)
	founding, err := protojson.Marshal(&nodev1.FoundingBundle{Version: 1, Genesis: cluster.Root.Chain()[0], Operator: "alice", OperatorCsr: csr})
	if err != nil {
		t.Fatal(err)
	}
	bundle, out := write(t, "founding.json", string(founding)), filepath.Join(dir, "ctx.json")
	args := []string{"init", "--config", config, "--trust-root", bundle, "--trust-domain", pkitest.TrustDomain, "--context-out", out}
	for range 2 { // the second changes nothing
		if code, stdout, stderr := call(t.Context(), args...); code != 0 || !strings.Contains(stdout, "millctl context add") {
			t.Fatalf("init = %d, %q, %q", code, stdout, stderr)
		}
	}
	data, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	file := &nodev1.ContextFile{}
	if err := protojson.Unmarshal(data, file); err != nil || !json.Valid(data) || file.GetServer() != "server.test:7443" || len(file.GetOperatorCertificates()) == 0 {
		t.Errorf("context file %s, %v", data, err)
	}
	chain, err := pki.ParseCertificatesDER(file.GetOperatorCertificates())
	if err != nil || chain[0].URIs[0].String() != "spiffe://test.example/operator/alice" {
		t.Errorf("operator's certificate: %v, %v", chain, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel() // it starts, and stops well
	if code, _, stderr := call(ctx, "run", "--config", config); code != 0 {
		t.Errorf("run = %d, %q", code, stderr)
	}

	store := filepath.Join(dir, "state", "store.db")
	good, err := os.ReadFile(store)
	if err != nil {
		t.Fatal(err)
	}
	for name, damaged := range map[string][]byte{"emptied": nil, "cut": good[:len(good)/5], "zeroed": make([]byte, len(good))} {
		if err := os.WriteFile(store, damaged, 0o600); err != nil {
			t.Fatal(err)
		}
		code, _, stderr := call(t.Context(), "run", "--config", config)
		if code != 3 || !strings.Contains(stderr, "restore store.db from a backup") || !strings.Contains(stderr, store) {
			t.Errorf("run on a store that was %s = %d, %q; want 3 and what to do", name, code, stderr)
		}
		if now, err := os.ReadFile(store); err != nil || !bytes.Equal(now, damaged) {
			t.Errorf("the store that was %s was changed: %v", name, err)
		}
	}
}
