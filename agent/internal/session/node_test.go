package session_test

import (
	"context"
	"log/slog"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/millwright/agent/internal/clock"
	"github.com/gpuaas/millwright/agent/internal/session"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// node is the agent's side of the tests: a journal in memory and all else that
// a session needs.
type node struct {
	mu         sync.Mutex
	journal    string
	first      uint64
	frames     [][]byte
	acked      uint64
	grown      chan struct{}
	behind     []uint64
	calls      []string
	conditions []*taskv1.Condition
	updates    int
	identity   session.Identity
	replaced   chan struct{}
	block      chan struct{} // Deliver waits for it, when set
}

func newNode(frames int) *node {
	n := &node{journal: "journal-1", first: 1, grown: make(chan struct{}), replaced: make(chan struct{})}
	n.append(frames, 0)
	return n
}

func (n *node) append(count, size int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for range count {
		e := &taskv1.Event{JournalId: n.journal, Seq: n.first + uint64(len(n.frames)), PrevHash: make([]byte, size)}
		b, err := proto.Marshal(e)
		if err != nil {
			panic(err)
		}
		n.frames = append(n.frames, b)
	}
	close(n.grown)
	n.grown = make(chan struct{})
}

func (n *node) Identity(context.Context) (session.Identity, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	id := n.identity
	id.Replaced = n.replaced
	return id, nil
}

func (n *node) replace(change func(*session.Identity)) {
	n.mu.Lock()
	defer n.mu.Unlock()
	change(&n.identity)
	close(n.replaced)
	n.replaced = make(chan struct{})
}

func (n *node) Head(context.Context) (session.Head, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return session.Head{JournalID: n.journal, InstanceID: "instance", FirstSeq: n.first, LastSeq: n.first + uint64(len(n.frames)) - 1}, nil
}

func (n *node) NextEvents(ctx context.Context, after uint64, limit int) (string, [][]byte, bool, error) {
	for {
		n.mu.Lock()
		gap := after+1 < n.first
		from := max(after+1, n.first) - n.first
		if from < uint64(len(n.frames)) {
			out := n.frames[from:min(uint64(len(n.frames)), from+uint64(limit))]
			id := n.journal
			n.mu.Unlock()
			return id, out, gap, nil
		}
		grown := n.grown
		n.mu.Unlock()
		select {
		case <-ctx.Done():
			return "", nil, false, ctx.Err()
		case <-grown:
		}
	}
}

func (n *node) Ack(_ context.Context, journal string, seq uint64) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if journal == n.journal {
		n.acked = max(n.acked, seq)
	}
	return nil
}

func (n *node) Behind(_ context.Context, journal string, seq uint64) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.behind = append(n.behind, seq)
	n.journal, n.first, n.frames = journal+"+", 1, nil
	return nil
}

func (n *node) Deliver(ctx context.Context, a *agentv1.Assignment) *agentv1.AssignmentAnswer {
	if n.block != nil {
		select {
		case <-n.block:
		case <-ctx.Done():
			return nil
		}
	}
	n.called("deliver " + a.GetAssignmentId())
	return &agentv1.AssignmentAnswer{AssignmentId: a.GetAssignmentId(), Answer: &agentv1.AssignmentAnswer_Accepted{Accepted: &agentv1.Accepted{JournalId: "journal-1"}}}
}

func (n *node) Cancel(_ context.Context, c *agentv1.CancelRequest) error {
	n.called("cancel " + c.GetTaskId())
	return nil
}

func (n *node) called(what string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.calls = append(n.calls, what)
}

func (n *node) made() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return append([]string(nil), n.calls...)
}

func (n *node) Unfinished(context.Context) ([]*agentv1.UnfinishedTask, error) {
	return []*agentv1.UnfinishedTask{{TaskId: "t1", LeafHash: []byte{1}, State: taskv1.TaskState_TASK_STATE_RUNNING}}, nil
}

func (n *node) Version() uint64 { return 7 }

func (n *node) Update(_ context.Context, updates []*taskv1.Envelope) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.updates += len(updates)
	return nil
}

func (n *node) BootID(context.Context) (string, error) { return "boot", nil }

func (n *node) Facts(context.Context) *agentv1.NodeFacts {
	return &agentv1.NodeFacts{Hostname: "host"}
}

func (n *node) Conditions() []*taskv1.Condition {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.conditions
}

// start runs a session for the length of the test.
func start(t *testing.T, n *node, s *server, change func(*session.Config)) *session.Session {
	t.Helper()
	n.identity = s.identity
	cfg := session.Config{
		Identities: n, Journal: n, Tasks: n, Trust: n, Node: n, Clock: clock.System{},
		Logger: slog.New(slog.DiscardHandler), Version: "1.2.3", Credits: 32,
		Kinds: []*agentv1.KindSupport{{Kind: "storage.mount", Revision: 1}}, Dial: s.dial,
	}
	if change != nil {
		change(&cfg)
	}
	ses := session.New(cfg)
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := ses.Run(ctx); err != nil {
			t.Errorf("Run() = %v, want nil", err)
		}
	})
	t.Cleanup(func() { cancel(); wg.Wait() })
	return ses
}

// eventually polls until ok, for at most ten seconds.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	deadline := time.After(10 * time.Second)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-deadline:
			t.Fatalf("%s: not within ten seconds", what)
		case <-tick.C:
		}
	}
}
