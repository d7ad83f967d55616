package gpu_test

import (
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"unicode/utf8"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/millwright/agent/internal/child"
	"github.com/gpuaas/millwright/agent/internal/gpu"
	"github.com/gpuaas/millwright/agent/internal/gpu/wire"
	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
)

// liar is a millwright-gpu whose memory was written over: it answers a question
// as lie says, and the others as they should be.
type liar struct {
	conn, far net.Conn
	gone      chan struct{}
	once      sync.Once
	said      string
}

func startLiar(lie func(*gpuv1.ChildRequest, *gpuv1.ChildReply) []byte, said string) func(child.LongSpec) (gpu.Process, error) {
	return func(child.LongSpec) (gpu.Process, error) {
		ours, theirs := net.Pipe()
		l := &liar{conn: ours, far: theirs, gone: make(chan struct{}), said: said}
		var answers sync.WaitGroup
		answers.Go(func() { l.answer(lie) })
		return l, nil
	}
}

func (l *liar) answer(lie func(*gpuv1.ChildRequest, *gpuv1.ChildReply) []byte) {
	for {
		q := &gpuv1.ChildRequest{}
		if wire.Read(l.far, q) != nil {
			return
		}
		r := &gpuv1.ChildReply{Id: q.GetId()}
		switch q.GetAsk().(type) {
		case *gpuv1.ChildRequest_Start:
			r.Answer = &gpuv1.ChildReply_Started{Started: &gpuv1.ChildStarted{Protocol: wire.Protocol, Gpus: 1}}
		case *gpuv1.ChildRequest_Inventory:
			r.Answer = &gpuv1.ChildReply_Inventory{Inventory: &gpuv1.Inventory{Gpus: []*gpuv1.Gpu{{Uuid: proto.String("GPU-a")}}}}
		case *gpuv1.ChildRequest_Sample:
			r.Answer = &gpuv1.ChildReply_Sample{Sample: &gpuv1.Sample{Count: proto.Uint32(1), Gpus: []*gpuv1.GpuSample{{Uuid: "GPU-a"}}}}
		case *gpuv1.ChildRequest_Events:
			r.Answer = &gpuv1.ChildReply_Events{Events: &gpuv1.ChildEventList{}}
		}
		raw := lie(q, r)
		if raw != nil && len(raw) == 0 { // it dies
			_ = l.Kill() // always nil
			return
		}
		if raw != nil {
			if _, err := l.far.Write(raw); err != nil {
				return
			}
			continue
		}
		if wire.Write(l.far, r) != nil {
			return
		}
	}
}

func (l *liar) Conn() net.Conn        { return l.conn }
func (l *liar) Pid() int              { return 7 }
func (l *liar) Gone() <-chan struct{} { return l.gone }
func (l *liar) Kill() error {
	l.once.Do(func() { close(l.gone); l.far.Close() }) //nolint:errcheck // it ends
	return nil
}
func (l *liar) End() (int, syscall.Signal, string) { return -1, syscall.SIGABRT, l.said }

// TestNonsense has a program answer with what was not asked for: that is a state
// with words, the agent goes on, and is well once the program is.
func TestNonsense(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("x", 200)
	for name, lie := range map[string]func(*gpuv1.ChildRequest, *gpuv1.ChildReply) []byte{
		"no answer at all": func(_ *gpuv1.ChildRequest, r *gpuv1.ChildReply) []byte { r.Answer = nil; return nil },
		"an answer to another": func(_ *gpuv1.ChildRequest, r *gpuv1.ChildReply) []byte {
			r.Answer = &gpuv1.ChildReply_Started{}
			return nil
		},
		"an id that was not asked": func(_ *gpuv1.ChildRequest, r *gpuv1.ChildReply) []byte { r.Id += 77; return nil },
		"a failure that is none": func(_ *gpuv1.ChildRequest, r *gpuv1.ChildReply) []byte {
			r.Failure = &gpuv1.ChildFailure{State: ok}
			return nil
		},
		"a frame of 4 GiB": func(*gpuv1.ChildRequest, *gpuv1.ChildReply) []byte { return []byte{0xff, 0xff, 0xff, 0xff} },
		"no message":       func(*gpuv1.ChildRequest, *gpuv1.ChildReply) []byte { return []byte{0, 0, 0, 2, 0xff, 0xff} },
		"names of 200 bytes": func(_ *gpuv1.ChildRequest, r *gpuv1.ChildReply) []byte {
			if inv := r.GetInventory(); inv != nil {
				inv.Gpus[0].Uuid = &long
			}
			if s := r.GetSample(); s != nil {
				s.Gpus[0].PciBusId = long
			}
			if e := r.GetEvents(); e != nil {
				e.Events = []*gpuv1.GpuEvent{{Uuid: long}}
			}
			return nil
		},
		"four thousand million GPUs": func(_ *gpuv1.ChildRequest, r *gpuv1.ChildReply) []byte {
			if s := r.GetSample(); s != nil {
				s.Count = proto.Uint32(4_000_000_000)
			} else if r.GetEvents() != nil {
				r.GetEvents().Events = make([]*gpuv1.GpuEvent, 5000)
				for i := range r.GetEvents().GetEvents() {
					r.GetEvents().Events[i] = &gpuv1.GpuEvent{}
				}
			} else if inv := r.GetInventory(); inv != nil {
				for range 300 {
					inv.Gpus = append(inv.Gpus, &gpuv1.Gpu{})
				}
			}
			return nil
		},
	} {
		for what, ask := range map[string]func(*bench) error{
			"inventory": func(b *bench) error { _, err := b.Inventory(t.Context()); return err },
			"sample":    func(b *bench) error { _, err := b.Sample(t.Context(), gpuv1.Tier_TIER_FAST); return err },
			"events":    func(b *bench) error { _, err := b.Events(t.Context()); return err },
		} {
			t.Run(name+"/"+what, func(t *testing.T) {
				t.Parallel()
				var lies atomic.Bool
				b := newBench(t, func(c *gpu.Config) {
					c.Start = startLiar(func(q *gpuv1.ChildRequest, r *gpuv1.ChildReply) []byte {
						about := map[string]bool{"inventory": q.GetInventory() != nil, "sample": q.GetSample() != nil, "events": q.GetEvents() != nil}
						if !lies.Load() || !about[what] {
							return nil
						}
						return lie(q, r)
					}, "")
				})
				b.await(ok)
				if err := ask(b); err != nil {
					t.Fatalf("before: %v", err)
				}
				lies.Store(true)
				if err := ask(b); err == nil {
					t.Error("it was taken for an answer")
				}
				if text := b.await(unusable); !strings.Contains(text, "is no answer") {
					t.Errorf("message %q", text)
				}
				lies.Store(false)
				b.await(ok)
			})
		}
	}
}

// TestWordsThatAreNoText: what a library printed before it ended is told as
// text, since a byte that is none would end the session that carries it.
func TestWordsThatAreNoText(t *testing.T) {
	t.Parallel()
	b := newBench(t, func(c *gpu.Config) {
		c.Start = startLiar(func(q *gpuv1.ChildRequest, _ *gpuv1.ChildReply) []byte {
			if q.GetSample() != nil {
				return []byte{}
			}
			return nil
		}, "abort: \xff\xfe "+strings.Repeat("x", 5000))
	})
	b.await(ok)
	if _, err := b.Sample(t.Context(), gpuv1.Tier_TIER_FAST); err == nil {
		t.Error("the sample was answered")
	}
	text := b.await(crashed)
	if !utf8.ValidString(text) || len(text) > 2000 || !strings.Contains(text, "a fast sample was asked: abort: ") {
		t.Errorf("message of %d bytes: %q", len(text), text)
	}
	if _, err := proto.Marshal(b.Status()); err != nil {
		t.Errorf("it cannot be sent: %v", err)
	}
}
