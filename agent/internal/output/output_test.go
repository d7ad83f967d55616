package output_test

import (
	"bytes"
	"net"
	"slices"
	"testing"
	"testing/synctest"
	"time"

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
