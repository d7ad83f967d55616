package output_test

import (
	"bytes"
	"context"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/gpuaas/millwright/agent/internal/output"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// part names what the server stores.
type part struct {
	task   string
	step   uint32
	stream taskv1.Stream
	part   agentv1.OutputPart
}

// store is a server that keeps what it is sent.
type store struct {
	agentv1.UnimplementedAgentServiceServer
	mu       sync.Mutex
	data     map[part][]byte
	complete map[part]bool
	total    map[part]uint64
	largest  int
	streams  int
	pieces   int
	cutEvery int    // the stream breaks after so many pieces
	refuse   string // a task that is refused
	times    []time.Time
}

func (s *store) UploadOutput(rpc agentv1.AgentService_UploadOutputServer) error {
	s.mu.Lock()
	s.streams++
	s.mu.Unlock()
	for n := 1; ; n++ {
		m, err := rpc.Recv()
		if err != nil {
			return err
		}
		r, err := s.take(m)
		if err != nil {
			return err
		}
		if s.cutEvery > 0 && n%s.cutEvery == 0 {
			return status.Error(codes.Unavailable, "cut") // the piece is stored, the answer lost
		}
		if err := rpc.Send(r); err != nil {
			return err
		}
	}
}

func (s *store) take(m *agentv1.UploadOutputRequest) (*agentv1.UploadOutputResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if m.GetTaskId() == s.refuse {
		return nil, status.Error(codes.NotFound, "no such task")
	}
	p := part{m.GetTaskId(), m.GetStep(), m.GetStream(), m.GetPart()}
	s.pieces++
	s.times = append(s.times, time.Now())
	s.largest = max(s.largest, len(m.GetData()))
	if uint64(len(s.data[p])) == m.GetOffset() {
		s.data[p] = append(s.data[p], m.GetData()...)
		s.complete[p] = s.complete[p] || m.GetLast()
	}
	s.total[p] = m.GetTotalBytes()
	return &agentv1.UploadOutputResponse{
		TaskId: p.task, Step: p.step, Stream: p.stream, Part: p.part,
		ReceivedBytes: uint64(len(s.data[p])), Complete: s.complete[p],
	}, nil
}

func (s *store) has(p part) (data []byte, complete bool, total uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.data[p]), s.complete[p], s.total[p]
}

func (s *store) counts() (pieces, streams int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.pieces, s.streams
}

// node holds commands in memory and what was recorded of them.
type node struct {
	mu      sync.Mutex
	out     map[output.ID]map[taskv1.Stream]*stream
	sent    map[output.ID]bool
	ended   map[string]time.Time // by task; missing: it runs
	acked   map[string]bool
	deleted []string
	planned []output.ID // will have files later, or never
}

type stream struct {
	head, tail []byte
	total      uint64
	ended      bool
}

func newNode() *node {
	return &node{out: map[output.ID]map[taskv1.Stream]*stream{}, sent: map[output.ID]bool{}, ended: map[string]time.Time{}, acked: map[string]bool{}}
}

func (n *node) add(task string, step uint32, out, err stream) output.ID {
	n.mu.Lock()
	defer n.mu.Unlock()
	id := output.ID{TaskID: task, Step: step}
	n.out[id] = map[taskv1.Stream]*stream{stdout: &out, stderr: &err}
	return id
}

func (n *node) change(id output.ID, s taskv1.Stream, f func(*stream)) {
	n.mu.Lock()
	defer n.mu.Unlock()
	f(n.out[id][s])
}

func (n *node) Commands() ([]output.ID, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	var ids []output.ID
	for id := range n.out {
		ids = append(ids, id)
	}
	return ids, nil
}

func (n *node) State(id output.ID, s taskv1.Stream) (output.State, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	st, ok := n.out[id][s]
	if !ok {
		return output.State{}, fmt.Errorf("no output: %w", fs.ErrNotExist)
	}
	return output.State{Total: st.total, Head: uint64(len(st.head)), Tail: uint64(len(st.tail)), Ended: st.ended}, nil
}

func (n *node) ReadHead(id output.ID, s taskv1.Stream, p []byte, offset int64) (int, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return bytes.NewReader(n.out[id][s].head).ReadAt(p, offset)
}

func (n *node) ReadTail(id output.ID, s taskv1.Stream, p []byte, offset int64) (int, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return bytes.NewReader(n.out[id][s].tail).ReadAt(p, offset)
}

func (n *node) Delete(task string) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.deleted = append(n.deleted, task)
	for id := range n.out {
		if id.TaskID == task {
			delete(n.out, id)
		}
	}
	return nil
}

func (n *node) Unsent(context.Context) ([]output.ID, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	var ids []output.ID
	for id := range n.out {
		if !n.sent[id] {
			ids = append(ids, id)
		}
	}
	for _, id := range n.planned {
		if _, ok := n.out[id]; !ok && !n.sent[id] {
			ids = append(ids, id)
		}
	}
	slices.SortFunc(ids, func(a, b output.ID) int { return bytes.Compare([]byte(a.TaskID), []byte(b.TaskID)) })
	return ids, nil
}

func (n *node) Sent(_ context.Context, id output.ID) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.sent[id] = true
	return nil
}

func (n *node) isSent(id output.ID) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.sent[id]
}

func (n *node) Ended(_ context.Context, task string) (bool, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	_, ended := n.ended[task]
	return ended, nil
}

func (n *node) Disposable(_ context.Context, task string, before time.Time) (bool, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	end, ended := n.ended[task]
	if !ended {
		return false, nil
	}
	all := true
	for id := range n.out {
		all = all && (id.TaskID != task || n.sent[id])
	}
	return n.acked[task] && all || end.Before(before), nil
}

func newStore() *store {
	return &store{data: map[part][]byte{}, complete: map[part]bool{}, total: map[part]uint64{}}
}

// start serves s over a real connection and uploads to it for the length of
// the test. In a bubble the connection is in memory.
func start(t *testing.T, s *store, n *node, change func(*output.Config), l net.Listener, dial func(context.Context, string) (net.Conn, error)) *output.Uploader {
	t.Helper()
	srv := grpc.NewServer()
	agentv1.RegisterAgentServiceServer(srv, s)
	var wg sync.WaitGroup
	wg.Go(func() { _ = srv.Serve(l) })
	opts := []grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())}
	if dial != nil {
		opts = append(opts, grpc.WithContextDialer(dial))
	}
	conn, err := grpc.NewClient("passthrough:///"+l.Addr().String(), opts...)
	if err != nil {
		t.Fatal(err)
	}
	cfg := output.Config{Files: n, Ledger: n, Clock: fakeTime{time.Now()}, Logger: slog.New(slog.DiscardHandler), BytesPerSecond: 1 << 30}
	if change != nil {
		change(&cfg)
	}
	u := output.New(cfg)
	ctx, cancel := context.WithCancel(context.Background())
	wg.Go(func() {
		if err := u.Serve(ctx, conn); err != nil {
			t.Errorf("Serve() = %v, want nil", err)
		}
	})
	wg.Go(func() {
		if err := u.Run(ctx); err != nil {
			t.Errorf("Run() = %v, want nil", err)
		}
	})
	t.Cleanup(func() { cancel(); _ = conn.Close(); srv.Stop(); wg.Wait() })
	return u
}

// pipes is a listener in memory.
type pipes struct {
	conns  chan net.Conn
	closed chan struct{}
	once   sync.Once
}

func newPipes() *pipes { return &pipes{conns: make(chan net.Conn), closed: make(chan struct{})} }

func (p *pipes) dial(ctx context.Context, _ string) (net.Conn, error) {
	near, far := net.Pipe()
	select {
	case p.conns <- far:
		return near, nil
	case <-p.closed:
		return nil, net.ErrClosed
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.conns:
		return c, nil
	case <-p.closed:
		return nil, net.ErrClosed
	}
}

func (p *pipes) Close() error   { p.once.Do(func() { close(p.closed) }); return nil }
func (p *pipes) Addr() net.Addr { return &net.UnixAddr{Name: "pipe", Net: "unix"} }

// inBubble runs play in a bubble of time.
func inBubble(t *testing.T, s *store, n *node, change func(*output.Config), play func(t *testing.T, u *output.Uploader)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		l := newPipes()
		play(t, start(t, s, n, change, l, l.dial))
	})
}

// until lets a second pass in the bubble until ok, for an hour at most.
func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for range 3600 {
		synctest.Wait()
		if ok() {
			return
		}
		<-time.After(time.Second)
	}
	t.Fatalf("%s: not within an hour", what)
}

// fakeTime is the time of a synctest bubble, by both clocks.
type fakeTime struct{ begun time.Time }

// Now is the wall clock.
func (fakeTime) Now() time.Time { return time.Now() }

// Boot is the time since the test began.
func (f fakeTime) Boot() time.Duration { return time.Since(f.begun) }
