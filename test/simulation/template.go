package simulation

import (
	"context"
	"encoding/pem"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/peer"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/millwright/agent"
	"github.com/gpuaas/millwright/controlplane"
	"github.com/gpuaas/millwright/pki"
	"github.com/gpuaas/millwright/pki/envelope"
	"github.com/gpuaas/millwright/pki/trustroot"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	nodev1 "github.com/gpuaas/millwright/proto/millwright/node/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks/all"
	"github.com/gpuaas/millwright/tasks/tasktest/fakehost"
)

const (
	trustDomain = "example.org"
	maxNodes    = 3
)

// template is a founded server and its joined nodes, as directories that each
// schedule begins with a copy of.
type template struct {
	dir      string
	key      *envelope.Key
	cluster  [32]byte
	version  uint64
	operator *peer.Peer
	nodes    [maxNodes]*peer.Peer
}

func nodeName(i int) string { return fmt.Sprintf("n%d", i+1) }

// newTemplate founds a cluster the way a person does: the nodes join over TLS,
// through pipes in memory.
func newTemplate(t *testing.T, dir string) *template {
	tp := &template{dir: dir}
	synctest.Test(t, func(t *testing.T) { tp.found(t) })
	return tp
}

func (tp *template) found(t *testing.T) {
	log := slog.New(slog.DiscardHandler)
	must(t, os.MkdirAll(tp.dir, 0o700))
	key, err := envelope.GenerateKey()
	must(t, err)
	recovery, err := envelope.GenerateKey()
	must(t, err)
	root, err := trustroot.SignGenesis(trustroot.Genesis{
		TrustDomain: trustDomain, IssuedAt: time.Now().Add(-time.Minute),
		Keys: []*taskv1.TrustKey{
			trustroot.NewKey("alice", key.Public(), time.Time{}, taskv1.KeyRole_KEY_ROLE_OPERATOR),
			trustroot.NewKey("alice", recovery.Public(), time.Time{}, taskv1.KeyRole_KEY_ROLE_RECOVERY),
		},
	}, recovery)
	must(t, err)
	tp.key, tp.cluster, tp.version = key, root.Cluster(), root.Version()
	operatorKey, err := pki.GenerateKey()
	must(t, err)
	csr, err := pki.NewRequest(operatorKey)
	must(t, err)
	line := newPipes()
	server := &server{}
	cfg := controlplane.Config{
		StateDir: filepath.Join(tp.dir, "server"), AdvertiseAddress: "server:443", Registry: all.Registry(), Logger: log, Version: "sim",
		NodeTTL: 30 * 24 * time.Hour, Listener: line, HTTPListener: newSilent(), Now: time.Now,
		Boot:  func() time.Duration { return time.Since(epoch) },
		Local: func(from controlplane.Services) { server.set(newServices(from)) },
	}
	file, err := controlplane.Found(t.Context(), cfg, &nodev1.FoundingBundle{
		Version: 1, Genesis: root.Chain()[0], Operator: "alice", OperatorCsr: csr,
	}, trustDomain)
	must(t, err)
	tp.operator, err = peerOf(file.GetOperatorCertificates()[0])
	must(t, err)
	stopServer := runs(t, controlplane.New(cfg).Run)
	synctest.Wait()
	nodes := nodev1.NewNodeServiceClient(&call{w: &world{server: server}, peer: tp.operator})
	for i := range maxNodes {
		tp.join(t, i, root, file, nodes, line, log)
	}
	stopServer()
}

// join joins one node and stops its agent.
func (tp *template) join(t *testing.T, i int, root *trustroot.Root, file *nodev1.ContextFile, nodes nodev1.NodeServiceClient, line *pipes, log *slog.Logger) {
	name := nodeName(i)
	dir := filepath.Join(tp.dir, name)
	must(t, os.MkdirAll(dir, 0o700))
	token, err := nodes.CreateJoinToken(t.Context(), &nodev1.CreateJoinTokenRequest{Node: name})
	must(t, err)
	cluster, newest := root.Cluster(), root.Hash()
	bundle, err := protojson.Marshal(&agentv1.JoinBundle{
		Version: 1, Server: token.GetNodeAddress(), TrustDomain: trustDomain, CaSha256: file.GetCaSha256(),
		Cluster: fmt.Sprintf("%x", cluster), TrustRoot: fmt.Sprintf("%x", newest),
		Floor: timestamppb.New(time.Now().Add(-time.Minute)), Node: name, Token: token.GetToken(), Expires: token.GetExpireTime(),
	})
	must(t, err)
	must(t, os.WriteFile(filepath.Join(dir, "join.json"), bundle, 0o600))
	must(t, os.WriteFile(filepath.Join(dir, "policy.yaml"), []byte("version: 1\nrules:\n  - allow: \"*\"\n"), 0o600))
	machine := &node{boot: time.Now()}
	stop := runs(t, agent.New(agent.Config{
		StateDir: filepath.Join(dir, "state"), PolicyFile: filepath.Join(dir, "policy.yaml"), JoinFile: filepath.Join(dir, "join.json"),
		Executable: "/usr/bin/millwrightd", Version: "sim", Registry: all.Registry(), Logger: log, Clock: machine,
		Hosts: fakehost.New().Hosts(nil), Dial: line.dial,
	}).Run)
	for range 600 {
		time.Sleep(100 * time.Millisecond)
		n, err := nodes.GetNode(t.Context(), &nodev1.GetNodeRequest{Name: name})
		if err == nil && n.GetNode().GetState() == nodev1.NodeState_NODE_STATE_CONNECTED {
			break
		}
	}
	stop()
	b, err := os.ReadFile(filepath.Join(dir, "state", "identity", "svid.pem"))
	must(t, err)
	block, _ := pem.Decode(b)
	if block == nil {
		t.Fatalf("node %s has no certificate", name)
	}
	tp.nodes[i], err = peerOf(block.Bytes)
	must(t, err)
}

// runs runs f until the function that it returns is called.
func runs(t *testing.T, f func(context.Context) error) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := f(ctx); err != nil {
			t.Errorf("Run() = %v, want nil", err)
		}
	})
	return func() { cancel(); wg.Wait() }
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// pipes is a listener in memory.
type pipes struct {
	*silent
	conns chan net.Conn
}

func newPipes() *pipes { return &pipes{newSilent(), make(chan net.Conn)} }

// Accept implements [net.Listener].
func (p *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.conns:
		return c, nil
	case <-p.done:
		return nil, net.ErrClosed
	}
}

func (p *pipes) dial(ctx context.Context, _ string) (net.Conn, error) {
	ours, theirs := net.Pipe()
	select {
	case p.conns <- theirs:
		return ours, nil
	case <-p.done:
		return nil, net.ErrClosed
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}
