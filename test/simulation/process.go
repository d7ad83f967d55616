package simulation

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"

	"github.com/gpuaas/millwright/agent"
	"github.com/gpuaas/millwright/controlplane"
	"github.com/gpuaas/millwright/tasks/all"
	"github.com/gpuaas/millwright/tasks/tasktest/fakehost"
)

// epoch is when every bubble begins.
var epoch = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)

// node is a machine: what outlives its agent.
type node struct {
	*fakehost.Node
	w      *world
	name   string
	dir    string
	peer   *peer.Peer
	opened int // streams so far; guarded by world.mu
	life   int // rises when it becomes another instance: a boot, a new journal; guarded by world.mu

	heard map[int]bool // lives that the server has heard of; driver only

	cutUp, cutDown bool // the line is cut in this direction; driver only
	agent          *process
	jitter         *rand.Rand // used by one agent, in the bubble

	mu     sync.Mutex
	offset time.Duration // of its wall clock; guarded by mu
	boot   time.Time     // guarded by mu

	rebooted, lost, failed, clockSet, ahead bool // what happened to it; driver only
}

func (n *node) peerContext(ctx context.Context) context.Context { return peer.NewContext(ctx, n.peer) }

// Now is the node's wall clock.
func (n *node) Now() time.Time {
	n.mu.Lock()
	defer n.mu.Unlock()
	return time.Now().Add(n.offset).Round(0)
}

// Boot is the time since the node has booted.
func (n *node) Boot() time.Duration {
	n.mu.Lock()
	defer n.mu.Unlock()
	return time.Since(n.boot)
}

func (n *node) step(d time.Duration) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.offset = d
}

// start runs the node's agent.
func (n *node) start() {
	ctx, cancel := context.WithCancel(context.Background())
	p := &process{w: n.w, name: n.name, cancel: cancel, ended: make(chan struct{})}
	n.agent = p
	var draw sync.Mutex
	a := agent.New(agent.Config{
		StateDir: filepath.Join(n.dir, "state"), PolicyFile: filepath.Join(n.dir, "policy.yaml"),
		JoinFile: filepath.Join(n.dir, "join.json"), Executable: "/usr/bin/millwrightd", Version: "sim",
		Registry: all.Registry(), Logger: n.w.log.With("program", n.name), Clock: n, Hosts: n.Hosts(p.hook),
		Connect: func(string) (agent.Conn, error) { return &conn{w: n.w, node: n, alive: p}, nil },
		Guard:   p.guard,
		Jitter: func(d time.Duration) time.Duration {
			draw.Lock()
			defer draw.Unlock()
			return time.Duration(n.jitter.Int64N(int64(d)))
		},
	})
	n.w.server.wait.Go(func() {
		defer close(p.ended)
		if err := a.Run(ctx); err != nil {
			n.w.t.Errorf("agent of %s: Run() = %v", n.name, err)
		}
	})
}

// hook lets the driver hold, and fail, what a step does to its node.
func (p *process) hook(ctx context.Context, op fakehost.Op) error {
	if !op.Change {
		if p.dead() {
			return errDead
		}
		return ctx.Err()
	}
	return p.wait(ctx, fmt.Sprintf("host %s %s %s", op.Name, op.Object, phases[op.Phase]))
}

var phases = map[fakehost.Phase]string{fakehost.Before: "before", fakehost.During: "during", fakehost.After: "after"}

// server is the server's machine.
type server struct {
	w       *world
	dir     string
	run     *process
	serving sync.WaitGroup // streams that it serves
	wait    sync.WaitGroup // all processes

	mu  sync.Mutex
	now *services // guarded by mu; nil while it does not serve

	backup, restored bool // driver only
}

func (s *server) current() *services {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.now
}

func (s *server) set(now *services) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.now = now
}

func (s *server) config(p *process) controlplane.Config {
	return controlplane.Config{
		StateDir: filepath.Join(s.dir, "server"), AdvertiseAddress: "server:443", Registry: all.Registry(),
		Logger: s.w.log.With("program", "server"), Version: "sim", Sweep: 5 * time.Second, NodeTTL: 30 * 24 * time.Hour,
		Listener: newSilent(), HTTPListener: newSilent(), Now: time.Now,
		Boot:  func() time.Duration { return time.Since(epoch) },
		Local: func(from controlplane.Services) { s.set(newServices(from)) },
		Guard: p.guard,
	}
}

func (s *server) start() {
	ctx, cancel := context.WithCancel(context.Background())
	p := &process{w: s.w, name: "server", cancel: cancel, ended: make(chan struct{})}
	s.run = p
	s.wait.Go(func() {
		defer close(p.ended)
		if err := controlplane.New(s.config(p)).Run(ctx); err != nil && !errors.Is(err, errDead) {
			s.w.t.Errorf("server: Run() = %v", err)
		}
	})
}

// stop ends the server as a power cut would: what it has sent may arrive, its
// clients hear that the connection is gone, or do not.
func (w *world) stopServer(silently bool) {
	s := w.server
	s.set(nil)
	w.mu.Lock()
	streams := append([]*stream(nil), w.streams...)
	w.mu.Unlock()
	for _, st := range streams {
		if st.server == nil {
			continue
		}
		st.mu.Lock()
		st.up = nil
		if !st.downEnd && !silently {
			st.down = append(st.down, packet{end: errCut})
		}
		st.downEnd = true
		st.mu.Unlock()
		if !st.serverGone {
			st.serverGone = true
			st.server(errCut)
		}
	}
	w.kill(s.run)
	s.serving.Wait()
}

// stopAgent ends a node's agent as a kill would.
func (w *world) stopAgent(n *node) {
	if n.agent == nil {
		return
	}
	w.kill(n.agent)
	n.agent = nil
}

// peerOf is what a server sees of a client with this certificate.
func peerOf(certificate []byte) (*peer.Peer, error) {
	leaf, err := x509.ParseCertificate(certificate)
	if err != nil {
		return nil, err
	}
	return &peer.Peer{
		Addr:     &net.TCPAddr{IP: net.IPv4(192, 0, 2, 1), Port: 4000},
		AuthInfo: credentials.TLSInfo{State: tls.ConnectionState{HandshakeComplete: true, PeerCertificates: []*x509.Certificate{leaf}}},
	}, nil
}

// copyDir copies a directory of files and directories.
func copyDir(to, from string) error {
	return filepath.WalkDir(from, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		if d.IsDir() {
			return os.MkdirAll(filepath.Join(to, rel), 0o700)
		}
		return copyFile(filepath.Join(to, rel), path)
	})
}

func copyFile(to, from string) error {
	b, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	return os.WriteFile(to, b, 0o600)
}
