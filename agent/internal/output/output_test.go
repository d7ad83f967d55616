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

	"github.com/gpuaas/millwright/agent/internal/clock"
	"github.com/gpuaas/millwright/agent/internal/output"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

const (
	stdout = taskv1.Stream_STREAM_STDOUT
	stderr = taskv1.Stream_STREAM_STDERR
	head   = agentv1.OutputPart_OUTPUT_PART_HEAD
	tail   = agentv1.OutputPart_OUTPUT_PART_TAIL
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
	cfg := output.Config{Files: n, Ledger: n, Clock: clock.System{}, Logger: slog.New(slog.DiscardHandler), BytesPerSecond: 1 << 30}
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

func fill(n int, seed byte) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i*7) + seed + byte(i>>8)
	}
	return b
}

func ended(headBytes, tailBytes int, total uint64) stream {
	return stream{head: fill(headBytes, 1), tail: fill(tailBytes, 2), total: total, ended: true}
}

func TestWholeOutput(t *testing.T) {
	for _, tc := range []struct {
		name     string
		out      stream
		cutEvery int
	}{
		{"empty", stream{ended: true}, 0},
		{"one byte", ended(1, 0, 1), 0},
		{"a piece", ended(16<<10, 0, 16<<10), 0},
		{"a piece and one", ended(16<<10+1, 0, 16<<10+1), 0},
		{"head and tail", ended(1<<20, 256<<10, 200<<20), 0},
		{"cut after two pieces", ended(100<<10, 40<<10, 200<<20), 2},
		{"cut after seven pieces", ended(1<<20, 256<<10, 200<<20), 7},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s, n := newStore(), newNode()
			s.cutEvery = tc.cutEvery
			inBubble(t, s, n, nil, func(t *testing.T, _ *output.Uploader) {
				id := n.add("t1", 2, tc.out, ended(3, 0, 3))
				until(t, "output sent", func() bool { return n.isSent(id) })
				for p, want := range map[part][]byte{{"t1", 2, stdout, head}: tc.out.head, {"t1", 2, stdout, tail}: tc.out.tail, {"t1", 2, stderr, head}: fill(3, 1)} {
					got, complete, total := s.has(p)
					if !bytes.Equal(got, want) {
						t.Errorf("%v: the server has %d bytes, want the %d that were written", p, len(got), len(want))
					}
					if len(want) > 0 && !complete {
						t.Errorf("%v: the server was not told that it is complete", p)
					}
					if p.stream == stdout && len(want) > 0 && total != tc.out.total {
						t.Errorf("%v: total = %d, want %d", p, total, tc.out.total)
					}
				}
				if _, complete, _ := s.has(part{"t1", 2, stdout, head}); !complete {
					t.Errorf("the head is not complete on the server")
				}
				s.mu.Lock()
				defer s.mu.Unlock()
				if s.largest > output.ChunkBytes {
					t.Errorf("a piece had %d bytes, at most %d are allowed", s.largest, output.ChunkBytes)
				}
			})
		})
	}
}

func TestLiveHead(t *testing.T) {
	s, n := newStore(), newNode()
	inBubble(t, s, n, nil, func(t *testing.T, _ *output.Uploader) {
		id := n.add("t1", 0, stream{}, stream{})
		p := part{"t1", 0, stdout, head}
		for range 5 {
			n.change(id, stdout, func(st *stream) { st.head = append(st.head, "line\n"...); st.total += 5 })
			<-time.After(2 * time.Second)
			n.mu.Lock()
			want := slices.Clone(n.out[id][stdout].head)
			n.mu.Unlock()
			if got, complete, _ := s.has(p); !bytes.Equal(got, want) || complete {
				t.Fatalf("while it runs the server has %q (complete %v), want %q", got, complete, want)
			}
		}
		// More than the head holds: the server still hears the total.
		n.change(id, stdout, func(st *stream) { st.total = 5000 })
		<-time.After(2 * time.Second)
		if _, complete, total := s.has(p); !complete || total != 5000 {
			t.Errorf("total = %d, complete %v; want 5000 and the head complete", total, complete)
		}
		before, _ := s.counts()
		<-time.After(time.Minute)
		if got, _ := s.counts(); got != before {
			t.Errorf("%d pieces were sent while nothing was written", got-before)
		}
		if n.isSent(id) {
			t.Fatal("a command that runs counts as sent")
		}
		for _, st := range []taskv1.Stream{stdout, stderr} {
			n.change(id, st, func(st *stream) { st.ended = true })
		}
		n.change(id, stdout, func(st *stream) { st.tail = fill(100, 2) })
		until(t, "output sent", func() bool { return n.isSent(id) })
		if got, complete, _ := s.has(part{"t1", 0, stdout, tail}); !complete || len(got) != 100 {
			t.Errorf("tail has %d bytes, complete %v; want 100", len(got), complete)
		}
	})
}

func TestPace(t *testing.T) {
	s, n := newStore(), newNode()
	slow := func(c *output.Config) { c.BytesPerSecond = output.DefaultBytesPerSecond }
	inBubble(t, s, n, slow, func(t *testing.T, _ *output.Uploader) {
		begun := time.Now()
		id := n.add("t1", 0, ended(1<<20, 256<<10, 1<<30), stream{ended: true})
		until(t, "output sent", func() bool { return n.isSent(id) })
		s.mu.Lock()
		defer s.mu.Unlock()
		if d := s.times[len(s.times)-1].Sub(begun); d < 4900*time.Millisecond || d > 7*time.Second {
			t.Errorf("1.25 MiB at 256 KiB/s took %v, want about 5s", d)
		}
	})
}

// TestRefusedTaskHoldsNobodyUp lets the server refuse one task for ever.
func TestRefusedTaskHoldsNobodyUp(t *testing.T) {
	s, n := newStore(), newNode()
	s.refuse = "a"
	inBubble(t, s, n, nil, func(t *testing.T, _ *output.Uploader) {
		a, b := n.add("a", 0, ended(10, 0, 10), stream{ended: true}), n.add("b", 0, ended(10, 0, 10), stream{ended: true})
		until(t, "the other is sent", func() bool { return n.isSent(b) })
		<-time.After(10 * time.Minute)
		if n.isSent(a) {
			t.Error("a refused output counts as sent")
		}
		if _, streams := s.counts(); streams > 15 {
			t.Errorf("%d streams were opened in ten minutes for a refused task", streams)
		}
	})
}

func TestWanted(t *testing.T) {
	s, n := newStore(), newNode()
	inBubble(t, s, n, nil, func(t *testing.T, u *output.Uploader) {
		id0, id1 := n.add("t1", 0, ended(20<<10, 0, 20<<10), stream{ended: true}), n.add("t1", 1, ended(5, 0, 5), stream{ended: true})
		until(t, "output sent", func() bool { return n.isSent(id0) && n.isSent(id1) })
		s.mu.Lock()
		clear(s.data) // the server was restored
		clear(s.complete)
		s.mu.Unlock()
		u.Want("t1")
		u.Want("unknown")
		whole := func(step uint32, size int) bool {
			got, complete, _ := s.has(part{"t1", step, stdout, head})
			return complete && len(got) == size
		}
		until(t, "sent again", func() bool { return whole(0, 20<<10) && whole(1, 5) })
		<-time.After(2 * time.Second)
		before, _ := s.counts()
		<-time.After(time.Minute)
		if got, _ := s.counts(); got != before {
			t.Errorf("%d pieces were sent after all was there", got-before)
		}
	})
}

func TestLyingServer(t *testing.T) {
	s, n := newStore(), newNode()
	inBubble(t, s, n, nil, func(t *testing.T, _ *output.Uploader) {
		s.mu.Lock()
		s.data[part{"t1", 0, stdout, head}] = fill(500, 9) // more than there ever was
		s.mu.Unlock()
		id := n.add("t1", 0, ended(5, 0, 5), stream{ended: true})
		<-time.After(10 * time.Minute)
		if n.isSent(id) {
			t.Error("output counts as sent though the server has something else")
		}
	})
}

func TestDeletion(t *testing.T) {
	for _, tc := range []struct {
		name  string
		set   func(*node)
		after time.Duration
		gone  bool
	}{
		{"runs", func(*node) {}, 30 * 24 * time.Hour, false},
		{"ended and not acknowledged", func(n *node) { n.ended["t1"] = time.Now() }, 6 * 24 * time.Hour, false},
		{"ended and acknowledged", func(n *node) { n.ended["t1"], n.acked["t1"] = time.Now(), true }, 2 * time.Minute, true},
		{"ended a week ago", func(n *node) { n.ended["t1"] = time.Now() }, 7*24*time.Hour + 2*time.Minute, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s, n := newStore(), newNode()
			inBubble(t, s, n, nil, func(t *testing.T, _ *output.Uploader) {
				n.add("t1", 0, ended(5, 0, 5), stream{ended: true})
				n.mu.Lock()
				tc.set(n)
				n.mu.Unlock()
				<-time.After(tc.after)
				synctest.Wait()
				n.mu.Lock()
				defer n.mu.Unlock()
				if gone := slices.Contains(n.deleted, "t1"); gone != tc.gone {
					t.Errorf("deleted = %v, want %v", gone, tc.gone)
				}
			})
		})
	}
}

// TestNoFiles looks at a command that is about to start, and at one that never
// did.
func TestNoFiles(t *testing.T) {
	s, n := newStore(), newNode()
	late, never := output.ID{TaskID: "a"}, output.ID{TaskID: "b"}
	n.planned = []output.ID{late, never}
	inBubble(t, s, n, nil, func(t *testing.T, _ *output.Uploader) {
		<-time.After(time.Minute)
		if n.isSent(late) || n.isSent(never) {
			t.Fatal("the output of a command that has not started counts as sent")
		}
		n.add("a", 0, ended(5, 0, 5), stream{ended: true})
		n.mu.Lock()
		n.ended["b"] = time.Now()
		n.mu.Unlock()
		until(t, "both are settled", func() bool { return n.isSent(late) && n.isSent(never) })
		if got, complete, _ := s.has(part{"a", 0, stdout, head}); !complete || len(got) != 5 {
			t.Errorf("the server has %d bytes, complete %v; want 5", len(got), complete)
		}
	})
}

// TestLoopback sends over a real socket.
func TestLoopback(t *testing.T) {
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s, n := newStore(), newNode()
	id := n.add("t1", 0, ended(1<<20, 256<<10, 200<<20), stream{ended: true})
	start(t, s, n, nil, l, nil)
	deadline := time.After(10 * time.Second)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !n.isSent(id) {
		select {
		case <-deadline:
			t.Fatal("not sent within ten seconds")
		case <-tick.C:
		}
	}
	if got, _, _ := s.has(part{"t1", 0, stdout, head}); !bytes.Equal(got, fill(1<<20, 1)) {
		t.Error("the server has another head than was written")
	}
}
