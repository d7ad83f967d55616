package controlplane_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/millwright/controlplane"
	"github.com/gpuaas/millwright/pki"
	"github.com/gpuaas/millwright/pki/envelope"
	"github.com/gpuaas/millwright/pki/pkitest"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	nodev1 "github.com/gpuaas/millwright/proto/millwright/node/v1"
	systemv1 "github.com/gpuaas/millwright/proto/millwright/system/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks/all"
	"github.com/gpuaas/millwright/test/relisten"
)

// patience is how long a test waits for what must come.
const patience = 30 * time.Second

// world is a founded server over loopback TLS, with its first operator. It can
// be stopped and started again on the same state and address.
type world struct {
	t       testing.TB
	cluster *pkitest.Cluster
	cfg     controlplane.Config
	addr    string
	http    string

	operatorKey *identityKey
	context     *nodev1.ContextFile
	roots       []*x509.Certificate

	stop  context.CancelFunc
	ended chan error

	conn  *grpc.ClientConn // the operator's
	tasks taskv1.TaskServiceClient
	nodes nodev1.NodeServiceClient
}

type identityKey struct {
	csr      []byte
	identity func(chain, roots [][]byte) *pki.Identity
}

func newIdentityKey(t testing.TB) *identityKey {
	t.Helper()
	key := must(pki.GenerateKey())(t)
	return &identityKey{
		csr: must(pki.NewRequest(key))(t),
		identity: func(chain, roots [][]byte) *pki.Identity {
			certs := must(pki.ParseCertificatesDER(chain))(t)
			return must(pki.NewIdentity(certs, key, must(pki.ParseCertificatesDER(roots))(t)))(t)
		},
	}
}

// must fails the test on an error: must(f())(t).
func must[V any](v V, err error) func(testing.TB) V {
	return func(t testing.TB) V {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

// newWorld founds a server and starts it.
func newWorld(t testing.TB) *world {
	t.Helper()
	return newWorldWith(t, func(*controlplane.Config) {})
}

func newWorldWith(t testing.TB, change func(*controlplane.Config)) *world {
	t.Helper()
	w := &world{t: t, cluster: pkitest.New(t), operatorKey: newIdentityKey(t)}
	out := io.Discard
	if os.Getenv("MILLWRIGHT_TEST_LOG") != "" {
		out = os.Stderr
	}
	w.cfg = controlplane.Config{
		StateDir: t.TempDir() + "/state", AdvertiseAddress: "server.test:7443", Registry: all.Registry(),
		Logger: slog.New(slog.NewTextHandler(out, &slog.HandlerOptions{Level: slog.LevelDebug})),
		Sweep:  20 * time.Millisecond, Heartbeat: time.Minute, Version: "test",
	}
	change(&w.cfg)
	w.context = must(controlplane.Found(t.Context(), w.cfg, w.bundle(), pkitest.TrustDomain))(t)
	w.roots = must(pki.ParseCertificatesDER(w.context.GetCaCertificates()))(t)
	w.start()
	t.Cleanup(w.shut)
	w.conn = w.dial(w.operatorKey.identity(w.context.GetOperatorCertificates(), w.context.GetCaCertificates()))
	w.tasks, w.nodes = taskv1.NewTaskServiceClient(w.conn), nodev1.NewNodeServiceClient(w.conn)
	return w
}

func (w *world) bundle() *nodev1.FoundingBundle {
	return &nodev1.FoundingBundle{Version: 1, Genesis: w.cluster.Root.Chain()[0], Operator: "alice", OperatorCsr: w.operatorKey.csr}
}

// start runs the server, on the address that it had before.
func (w *world) start() {
	w.t.Helper()
	if w.addr == "" {
		// An address of its own, since no one else may take the port while the
		// server is down.
		ip := fmt.Sprintf("127.%d.%d.%d:0", 1+rand.N(254), rand.N(255), 1+rand.N(254))
		w.addr, w.http = ip, ip
	}
	w.cfg.Listener = w.listen(w.addr)
	w.cfg.HTTPListener = w.listen(w.http)
	w.addr, w.http = w.cfg.Listener.Addr().String(), w.cfg.HTTPListener.Addr().String()
	ctx, cancel := context.WithCancel(context.Background())
	w.stop, w.ended = cancel, make(chan error, 1)
	server := controlplane.New(w.cfg)
	var wg sync.WaitGroup
	wg.Go(func() { w.ended <- server.Run(ctx) })
}

func (w *world) listen(addr string) net.Listener {
	w.t.Helper()
	return relisten.Listen(w.t, addr)
}

// shut stops the server and checks that it ended well.
func (w *world) shut() {
	if w.stop == nil {
		return
	}
	w.stop()
	w.stop = nil
	if err := <-w.ended; err != nil {
		w.t.Errorf("server ended with %v", err)
	}
}

func (w *world) restart() {
	w.t.Helper()
	w.shut()
	w.start()
}

// dial connects with an identity; nil for none.
func (w *world) dial(id *pki.Identity) *grpc.ClientConn {
	w.t.Helper()
	source := new(pki.Static)
	var cfg *tls.Config
	if id == nil {
		cfg = pki.JoinTLS(pkitest.TrustDomain, sha(w.t, w.context.GetCaSha256()), nil)
	} else {
		source.Set(id)
		cfg = pki.TLS{Source: source, TrustDomain: pkitest.TrustDomain}.Client()
	}
	conn := must(grpc.NewClient(w.addr, grpc.WithTransportCredentials(credentials.NewTLS(cfg)),
		grpc.WithConnectParams(grpc.ConnectParams{MinConnectTimeout: patience}), grpc.WithDefaultCallOptions(grpc.WaitForReady(true))))(w.t)
	w.t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// ctx is a context with a deadline for what must come.
func (w *world) ctx() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	w.t.Cleanup(cancel)
	return ctx
}

// leaf is a command for a node.
func (w *world) leaf(node string) *taskv1.TaskLeaf {
	w.t.Helper()
	spec := must(proto.Marshal(&systemv1.CommandSpec{Argv: []string{"/usr/bin/true"}}))(w.t)
	return &taskv1.TaskLeaf{
		TaskId: pkitest.NewTaskID(w.t), Node: node, Mode: taskv1.Mode_MODE_EXECUTE,
		Kind: "system.command", Revision: 1, Spec: spec,
	}
}

func (w *world) request(leaves ...*taskv1.TaskLeaf) *taskv1.CreateTasksRequest {
	w.t.Helper()
	env, signed := w.cluster.Sign(w.t, leaves...)
	return &taskv1.CreateTasksRequest{RequestId: uuid.NewString(), Envelope: env, Leaves: signed}
}

// create creates tasks and returns them.
func (w *world) create(leaves ...*taskv1.TaskLeaf) []*taskv1.Task {
	w.t.Helper()
	resp, err := w.tasks.CreateTasks(w.ctx(), w.request(leaves...))
	if err != nil {
		w.t.Fatalf("CreateTasks: %v", err)
	}
	return resp.GetTasks()
}

// short signs leaves with a window that ends at a time.
func (w *world) short(end time.Time, leaves ...*taskv1.TaskLeaf) *taskv1.CreateTasksRequest {
	w.t.Helper()
	window := w.cluster.Window()
	window.NotAfter = end
	env, signed, err := envelope.SignTaskSet(window, leaves, w.cluster.Operator)
	if err != nil {
		w.t.Fatal(err)
	}
	return &taskv1.CreateTasksRequest{RequestId: uuid.NewString(), Envelope: env, Leaves: signed}
}

func (w *world) task(id string) *taskv1.Task {
	w.t.Helper()
	resp, err := w.tasks.GetTask(w.ctx(), &taskv1.GetTaskRequest{Id: id})
	if err != nil {
		w.t.Fatalf("GetTask(%s): %v", id, err)
	}
	return resp.GetTask()
}

// waitState waits until a task is in a state.
func (w *world) waitState(id string, want taskv1.TaskState) *taskv1.Task {
	w.t.Helper()
	var task *taskv1.Task
	w.eventually("task "+id+" is "+want.String(), func() bool {
		task = w.task(id)
		return task.GetState() == want
	})
	return task
}

// eventually waits until something holds.
func (w *world) eventually(what string, holds func() bool) {
	w.t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(patience)
	for !holds() {
		select {
		case <-tick.C:
		case <-deadline:
			w.t.Fatalf("not within %s: %s", patience, what)
		}
	}
}

// history returns the types of a task's events.
func (w *world) history(id string) []string {
	w.t.Helper()
	var types []string
	for _, ev := range w.events(id) {
		types = append(types, ev.GetType())
	}
	return types
}

func (w *world) events(id string) []*taskv1.TaskEvent {
	w.t.Helper()
	var out []*taskv1.TaskEvent
	for token := ""; ; {
		resp, err := w.tasks.ListTaskEvents(w.ctx(), &taskv1.ListTaskEventsRequest{Id: id, PageToken: token, PageSize: 3})
		if err != nil {
			w.t.Fatalf("ListTaskEvents(%s): %v", id, err)
		}
		out = append(out, resp.GetEvents()...)
		if token = resp.GetNextPageToken(); token == "" {
			return out
		}
	}
}

// join makes a token and lets a host join with it, also in the place of another.
func (w *world) join(node string) *host {
	w.t.Helper()
	token, err := w.nodes.CreateJoinToken(w.ctx(), &nodev1.CreateJoinTokenRequest{Node: node})
	if status.Code(err) == codes.AlreadyExists {
		token, err = w.nodes.CreateJoinToken(w.ctx(), &nodev1.CreateJoinTokenRequest{Node: node, Rejoin: true})
	}
	if err != nil {
		w.t.Fatalf("CreateJoinToken(%s): %v", node, err)
	}
	key := newIdentityKey(w.t)
	resp, err := agentv1.NewEnrolmentServiceClient(w.dial(nil)).Join(w.ctx(), &agentv1.JoinRequest{Token: token.GetToken(), Csr: key.csr, Hostname: node})
	if err != nil {
		w.t.Fatalf("Join(%s): %v", node, err)
	}
	return newHost(w, node, resp.GetGeneration(), key.identity(resp.GetCertificates(), resp.GetCaCertificates()))
}
