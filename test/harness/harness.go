// Package harness runs a real control plane and real agents in one process,
// over loopback TLS, with nodes in memory.
package harness

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/millwright/agent"
	"github.com/gpuaas/millwright/controlplane"
	"github.com/gpuaas/millwright/pki"
	"github.com/gpuaas/millwright/pki/envelope"
	"github.com/gpuaas/millwright/pki/trustroot"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	nodev1 "github.com/gpuaas/millwright/proto/millwright/node/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/all"
	"github.com/gpuaas/millwright/tasks/tasktest/fakehost"
	"github.com/gpuaas/millwright/test/invariants/check"
	"github.com/gpuaas/millwright/test/relisten"
)

const trustDomain = "example.org"

// Cluster is a control plane that was founded by one operator, and that
// operator's clients.
type Cluster struct {
	t        *testing.T
	root     *trustroot.Root
	key      *envelope.Key // signs tasks
	slurm    *envelope.Key // signs tasks as a controller
	recovery *envelope.Key // changes the trust root
	operator *ecdsa.PrivateKey
	file     *nodev1.ContextFile
	cfg      controlplane.Config
	clock    *Clock
	log      *slog.Logger
	stop     func()

	nodes    []*Node
	expected []check.Expected
	checked  bool

	// Tasks and Nodes are the operator's.
	Tasks taskv1.TaskServiceClient
	Nodes nodev1.NodeServiceClient
}

// New founds a cluster and runs its server for the length of the test. Its
// configuration may be changed before.
func New(t *testing.T, changes ...func(*controlplane.Config)) *Cluster {
	t.Helper()
	c := &Cluster{t: t, clock: new(Clock), log: slog.New(slog.NewTextHandler(&testWriter{t: t}, &slog.HandlerOptions{Level: slog.LevelDebug}))}
	c.key = must(envelope.GenerateKey())(t)
	c.slurm = must(envelope.GenerateKey())(t)
	c.recovery = must(envelope.GenerateKey())(t)
	c.root = must(trustroot.SignGenesis(trustroot.Genesis{
		TrustDomain: trustDomain, IssuedAt: c.clock.Now().Add(-time.Minute),
		Keys: []*taskv1.TrustKey{
			trustroot.NewKey("alice", c.key.Public(), time.Time{}, taskv1.KeyRole_KEY_ROLE_OPERATOR),
			trustroot.NewKey("slurm", c.slurm.Public(), time.Time{}, taskv1.KeyRole_KEY_ROLE_CONTROLLER),
			trustroot.NewKey("alice", c.recovery.Public(), time.Time{}, taskv1.KeyRole_KEY_ROLE_RECOVERY),
		},
	}, c.recovery))(t)
	c.operator = must(pki.GenerateKey())(t)
	c.configure(filepath.Join(t.TempDir(), "server"))
	for _, change := range changes {
		change(&c.cfg)
	}
	c.file = must(controlplane.Found(t.Context(), c.cfg, &nodev1.FoundingBundle{
		Version: 1, Genesis: c.root.Chain()[0], Operator: "alice", OperatorCsr: must(pki.NewRequest(c.operator))(t),
	}, trustDomain))(t)
	c.stop = run(t, controlplane.New(c.cfg).Run)
	c.connect()
	return c
}

// configure sets the server's configuration, with ports of its own.
func (c *Cluster) configure(stateDir string) {
	c.t.Helper()
	listener := listen(c.t, "127.0.0.1:0")
	c.cfg = controlplane.Config{
		StateDir: stateDir, AdvertiseAddress: listener.Addr().String(),
		Registry: all.Registry(), Logger: c.log.With("program", "server"), Version: "test",
		Listener: listener, HTTPListener: listen(c.t, "127.0.0.1:0"), Now: c.clock.Now,
	}
}

// connect makes the operator's clients.
func (c *Cluster) connect() {
	t := c.t
	t.Helper()
	source := new(pki.Static)
	source.Set(must(pki.NewIdentity(
		must(pki.ParseCertificatesDER(c.file.GetOperatorCertificates()))(t), c.operator,
		must(pki.ParseCertificatesDER(c.file.GetCaCertificates()))(t)))(t))
	conn := must(grpc.NewClient("passthrough:///"+c.cfg.AdvertiseAddress, grpc.WithTransportCredentials(
		credentials.NewTLS(pki.TLS{Source: source, TrustDomain: trustDomain, Now: c.clock.Now}.Client()))))(t)
	t.Cleanup(func() { _ = conn.Close() })
	c.Tasks, c.Nodes = taskv1.NewTaskServiceClient(conn), nodev1.NewNodeServiceClient(conn)
}

// RestartServer ends the server as SIGTERM would, waits for while, and runs it
// again on the same address.
func (c *Cluster) RestartServer(while func()) {
	c.t.Helper()
	c.StopServer()
	while()
	c.StartServer()
}

// Node is a machine in memory with the agent's directories.
type Node struct {
	*fakehost.Node
	Name string
	Dir  string
	// Registry knows the kinds of its agent; nil means all.
	Registry *tasks.Registry
	c        *Cluster
	line     line

	gone string // why it does not come to rest
}

// line is the node's connections.
type line struct {
	mu    sync.Mutex
	cut   bool       // guarded by mu
	conns []net.Conn // guarded by mu
}

func (l *line) dial(ctx context.Context, address string) (net.Conn, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cut {
		return nil, errors.New("the line is cut")
	}
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", address)
	if err == nil {
		l.conns = append(l.conns, conn)
	}
	return conn, err
}

// Cut breaks the node's connections, and lets it make no other until Heal.
func (n *Node) Cut() {
	n.line.mu.Lock()
	defer n.line.mu.Unlock()
	n.line.cut = true
	for _, c := range n.line.conns {
		_ = c.Close()
	}
	n.line.conns = nil
}

// Heal ends a Cut.
func (n *Node) Heal() {
	n.line.mu.Lock()
	defer n.line.mu.Unlock()
	n.line.cut = false
}

// State is the path of a file of the agent's state.
func (n *Node) State(name string) string { return filepath.Join(n.Dir, "state", name) }

// NewNode makes a machine whose agent will find a join bundle, and a policy
// that allows all kinds.
func (c *Cluster) NewNode(name string) *Node {
	c.t.Helper()
	n := &Node{Node: fakehost.New(), Name: name, Dir: c.t.TempDir(), c: c}
	n.NewBundle()
	n.write("policy.yaml", []byte("version: 1\nrules:\n  - allow: \"*\"\n"))
	c.nodes = append(c.nodes, n)
	return n
}

// NewBundle gives the node a new join bundle, with which it joins for the first
// time or again.
func (n *Node) NewBundle() {
	c, name := n.c, n.Name
	c.t.Helper()
	token, err := c.Nodes.CreateJoinToken(c.t.Context(), &nodev1.CreateJoinTokenRequest{Node: name}, grpc.WaitForReady(true))
	if status.Code(err) == codes.AlreadyExists {
		token, err = c.Nodes.CreateJoinToken(c.t.Context(), &nodev1.CreateJoinTokenRequest{Node: name, Rejoin: true}, grpc.WaitForReady(true))
	}
	if err != nil {
		c.t.Fatalf("make a join token for %s: %v", name, err)
	}
	cluster, newest := c.root.Cluster(), c.root.Hash()
	bundle := must(protojson.Marshal(&agentv1.JoinBundle{
		Version: 1, Server: token.GetNodeAddress(), TrustDomain: trustDomain, CaSha256: c.file.GetCaSha256(),
		Cluster: fmt.Sprintf("%x", cluster), TrustRoot: fmt.Sprintf("%x", newest),
		Floor: timestamppb.New(c.clock.Now().Add(-time.Minute)), Node: name, Token: token.GetToken(), Expires: token.GetExpireTime(),
	}))(c.t)
	n.write("join.json", bundle)
}

func (n *Node) write(name string, data []byte) {
	n.c.t.Helper()
	if err := os.WriteFile(filepath.Join(n.Dir, name), data, 0o600); err != nil {
		n.c.t.Fatal(err)
	}
}

// Start runs the node's agent until stop is called, or the test ends.
// Its configuration may be changed before.
func (n *Node) Start(changes ...func(*agent.Config)) (stop func()) {
	n.c.t.Helper()
	registry := n.Registry
	if registry == nil {
		registry = all.Registry()
	}
	cfg := agent.Config{
		StateDir: filepath.Join(n.Dir, "state"), RunDir: filepath.Join(n.Dir, "run"),
		PolicyFile: filepath.Join(n.Dir, "policy.yaml"), JoinFile: filepath.Join(n.Dir, "join.json"),
		Executable: "/usr/bin/millwrightd", Version: "test", Registry: registry,
		Logger: n.c.log.With("program", n.Name), Labels: map[string]string{"pool": "a"}, Hosts: n.Hosts(nil), Dial: n.line.dial,
		Server: n.c.cfg.AdvertiseAddress, Clock: n.c.clock,
	}
	for _, change := range changes {
		change(&cfg)
	}
	stop = run(n.c.t, agent.New(cfg).Run)
	n.c.t.Cleanup(n.c.check) // while all still run
	return stop
}

// Connected waits until the node has a session.
func (n *Node) Connected() *nodev1.Node {
	n.c.t.Helper()
	var node *nodev1.Node
	n.c.until("node "+n.Name+" is connected", func(ctx context.Context) (bool, error) {
		r, err := n.c.Nodes.GetNode(ctx, &nodev1.GetNodeRequest{Name: n.Name})
		node = r.GetNode()
		return node.GetState() == nodev1.NodeState_NODE_STATE_CONNECTED, err
	})
	return node
}

// Create signs a task for a node and creates it. Its leaf may be changed before
// it is signed.
func (c *Cluster) Create(n *Node, kind string, spec proto.Message, changes ...func(*taskv1.TaskLeaf)) *taskv1.Task {
	c.t.Helper()
	cluster := c.root.Cluster()
	now := c.clock.Now()
	leaf := &taskv1.TaskLeaf{
		TaskId: must(uuid.NewV7())(c.t).String(), Node: n.Name, Mode: taskv1.Mode_MODE_EXECUTE, Kind: kind, Revision: 1,
		Spec: must(proto.Marshal(spec))(c.t),
	}
	for _, change := range changes {
		change(leaf)
	}
	env, leaves, err := envelope.SignTaskSet(
		envelope.Window{Cluster: cluster[:], TrustRootVersion: c.root.Version(), IssuedAt: now, NotAfter: now.Add(time.Hour)},
		[]*taskv1.TaskLeaf{leaf}, c.key)
	if err != nil {
		c.t.Fatal(err)
	}
	r := must(c.Tasks.CreateTasks(c.t.Context(), &taskv1.CreateTasksRequest{RequestId: uuid.NewString(), Envelope: env, Leaves: leaves}))(c.t)
	return r.GetTasks()[0]
}

// Ended waits until a task has ended or is held.
func (c *Cluster) Ended(id string) *taskv1.Task {
	c.t.Helper()
	return c.Reached(id, taskv1.TaskState_TASK_STATE_HELD)
}

// Reached waits until a task has reached a state, or one that comes later.
func (c *Cluster) Reached(id string, state taskv1.TaskState) *taskv1.Task {
	c.t.Helper()
	var task *taskv1.Task
	c.until("task "+id+" is "+state.String(), func(ctx context.Context) (bool, error) {
		r, err := c.Tasks.GetTask(ctx, &taskv1.GetTaskRequest{Id: id})
		task = r.GetTask()
		return task.GetState() >= state, err
	})
	return task
}

// until polls until ok, for at most a minute.
func (c *Cluster) until(what string, ok func(context.Context) (bool, error)) {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(c.t.Context(), time.Minute)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		done, err := ok(ctx)
		if done && err == nil {
			return
		}
		select {
		case <-ctx.Done():
			c.t.Fatalf("%s: not within a minute (last error: %v)", what, err)
		case <-tick.C:
		}
	}
}

func listen(t *testing.T, address string) net.Listener {
	t.Helper()
	return relisten.Listen(t, address)
}

// run runs f until stop is called, or the test ends. Its error fails the test.
func run(t *testing.T, f func(context.Context) error) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := f(ctx); err != nil {
			t.Errorf("Run() = %v, want nil", err)
		}
	})
	stop = func() { cancel(); wg.Wait() }
	t.Cleanup(stop)
	return stop
}

// must returns a value, or fails the test with the error.
func must[T any](v T, err error) func(*testing.T) T {
	return func(t *testing.T) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

// testWriter shows what is logged with the test that it belongs to.
type testWriter struct{ t *testing.T }

func (w *testWriter) Write(b []byte) (int, error) {
	w.t.Log(string(bytes.TrimSpace(b)))
	return len(b), nil
}

// Status is what the agent says of itself over its own socket.
func (n *Node) Status() *agentv1.GetStatusResponse {
	n.c.t.Helper()
	return Ask(n, func(ctx context.Context, c agentv1.LocalServiceClient) (*agentv1.GetStatusResponse, error) {
		return c.GetStatus(ctx, &agentv1.GetStatusRequest{})
	})
}

// Ask asks the agent over its own socket, once it listens there, and returns its
// answer.
func Ask[T any](n *Node, ask func(context.Context, agentv1.LocalServiceClient) (T, error)) T {
	n.c.t.Helper()
	answer, err := n.ask(func(ctx context.Context, c agentv1.LocalServiceClient) (any, error) { return ask(ctx, c) })
	if err != nil {
		n.c.t.Fatal(err)
	}
	return answer.(T)
}

func (n *Node) ask(ask func(context.Context, agentv1.LocalServiceClient) (any, error)) (any, error) {
	n.c.t.Helper()
	// An agent that has just been started does not listen yet.
	soon := grpc.ConnectParams{MinConnectTimeout: time.Second, Backoff: backoff.Config{BaseDelay: 10 * time.Millisecond, Multiplier: 1.5, MaxDelay: 200 * time.Millisecond}}
	conn := must(grpc.NewClient("unix:"+filepath.Join(n.Dir, "run", "agent.sock"), grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(soon), grpc.WithDefaultCallOptions(grpc.WaitForReady(true))))(n.c.t)
	defer conn.Close() //nolint:errcheck // the answer is here
	ctx, cancel := context.WithTimeout(n.c.t.Context(), time.Minute)
	defer cancel()
	return ask(ctx, agentv1.NewLocalServiceClient(conn))
}

// Journal returns a task as the node's journal has it, asked over the agent's
// own socket, or nil while it does not have it.
func (n *Node) Journal(taskID string) *agentv1.TaskRecord {
	n.c.t.Helper()
	r, err := n.ask(func(ctx context.Context, c agentv1.LocalServiceClient) (any, error) {
		return c.ListJournal(ctx, &agentv1.ListJournalRequest{TaskId: taskID})
	})
	if status.Code(err) == codes.NotFound {
		return nil
	}
	if err != nil {
		n.c.t.Fatal(err)
	}
	return r.(*agentv1.ListJournalResponse).GetTasks()[0].GetRecord()
}
