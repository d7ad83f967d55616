package session_test

import (
	"crypto/tls"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/gpuaas/millwright/agent/internal/session"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
)

func resend(seq uint64) *agentv1.SessionResponse {
	return &agentv1.SessionResponse{Message: &agentv1.SessionResponse_Resend{Resend: &agentv1.ResendRequest{JournalId: "journal-1", FromSeq: seq}}}
}

func welcome(protocol uint32, epoch, resendFrom uint64) *agentv1.SessionResponse {
	return &agentv1.SessionResponse{SessionEpoch: epoch, Message: &agentv1.SessionResponse_Welcome{Welcome: &agentv1.Welcome{
		Protocol: protocol, SessionEpoch: epoch, ResendFrom: resendFrom, HeartbeatInterval: durationpb.New(time.Minute),
	}}}
}

// TestHostileServer breaks the protocol in each way. The node ends the stream,
// says why, does no work, and comes back.
func TestHostileServer(t *testing.T) {
	for _, tc := range []struct {
		name string
		play func(*peer)
		want string
	}{
		{"no welcome", func(p *peer) { p.send(assignment("a")) }, "no Welcome"},
		{"empty message", func(p *peer) { p.send(&agentv1.SessionResponse{}) }, "no Welcome"},
		{"newer protocol", func(p *peer) { p.send(welcome(2, 1, 1)) }, "revision 2"},
		{"protocol 0", func(p *peer) { p.send(welcome(0, 1, 1)) }, "revision 0"},
		{"epoch 0", func(p *peer) { p.send(welcome(1, 0, 1)) }, "epoch 0"},
		{"resend from 0", func(p *peer) { p.send(welcome(1, 1, 0)) }, "resend_from 0"},
		{"welcome for another journal", func(p *peer) {
			w := welcome(1, 1, 3)
			w.GetWelcome().JournalId = "journal-0"
			p.send(w)
		}, "is for journal journal-0, and ours is journal-1"},
		{"second welcome", func(p *peer) { p.welcome(1, 1); p.send(welcome(1, 1, 1)) }, "second Welcome"},
		{"ack of what was not sent", func(p *peer) { p.welcome(1, 1); p.ack("journal-1", 1<<63) }, "the journal ends at 3"},
		{"resend of frame 0", func(p *peer) { p.welcome(1, 1); p.send(resend(0)) }, "frame 0 again"},
		{"resend of what was not sent", func(p *peer) { p.welcome(1, 1); p.send(resend(1 << 63)) }, "again"},
		{"evicted", func(p *peer) {
			p.welcome(1, 1)
			p.send(&agentv1.SessionResponse{Message: &agentv1.SessionResponse_Goodbye{Goodbye: &agentv1.Goodbye{Reason: "EVICTED", Message: "gone"}}})
		}, "EVICTED: gone"},
		{"goodbye instead of welcome", func(p *peer) {
			p.send(&agentv1.SessionResponse{Message: &agentv1.SessionResponse_Goodbye{Goodbye: &agentv1.Goodbye{Reason: "DUPLICATE_IDENTITY", Message: "two"}}})
		}, "DUPLICATE_IDENTITY: two"},
		{"stream ends", func(p *peer) { p.welcome(1, 1); p.end <- nil }, "closed the stream"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			s, n := serve(t, loopback(t)), newNode(3)
			ses := start(t, n, s, nil)
			p := s.accept(t)
			tc.play(p)
			eventually(t, "the session ends", func() bool { st := ses.Status(); return !st.Connected && strings.Contains(st.Err, tc.want) })
			if got := n.made(); len(got) != 0 {
				t.Errorf("calls = %v, want none", got)
			}
			s.accept(t) // it comes back
		})
	}
}

func TestMoreWorkThanCredits(t *testing.T) {
	s, n := serve(t, loopback(t)), newNode(0)
	n.block = make(chan struct{})
	read := make(chan string, 1)
	ses := start(t, n, s, func(c *session.Config) { c.Credits, c.Wanted = 4, func(id string) { read <- id } })
	p := s.accept(t)
	p.welcome(1, 1)
	send := func(n int) {
		for range n {
			if err := p.rpc.Send(&agentv1.SessionResponse{SessionEpoch: 1, Message: assignment("a").GetMessage()}); err != nil {
				return
			}
		}
	}
	// Words about held tasks take no credit, and a person may settle many at once.
	send(200)
	p.send(&agentv1.SessionResponse{Message: &agentv1.SessionResponse_OutputWanted{OutputWanted: &agentv1.OutputWanted{}}})
	select {
	case <-read:
	case <-time.After(10 * time.Second):
		t.Fatalf("200 messages of work are not taken: %+v", ses.Status())
	}
	send(1000)
	eventually(t, "the session ends", func() bool { return strings.Contains(ses.Status().Err, "more work than the 4 credits") })
}

// TestGarbage speaks TLS and then nonsense.
func TestGarbage(t *testing.T) {
	cert, pool := certificate(t)
	l, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{cert}, NextProtos: []string{"h2"}})
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	var mu sync.Mutex
	dials := 0
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			dials++
			mu.Unlock()
			wg.Go(func() {
				_, _ = c.Write([]byte(strings.Repeat("\x00\xff{]garbage\r\n", 4096)))
				_ = c.(*tls.Conn).CloseWrite()
				_ = c.Close()
			})
		}
	})
	t.Cleanup(func() { _ = l.Close(); wg.Wait() })
	n := newNode(3)
	s := &server{address: l.Addr().String(), identity: session.Identity{
		Server: l.Addr().String(), NotAfter: time.Now().Add(time.Hour),
		TLS: &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: pool, ServerName: "test", Certificates: []tls.Certificate{cert}},
	}}
	ses := start(t, n, s, nil)
	eventually(t, "it dials again", func() bool { mu.Lock(); defer mu.Unlock(); return dials >= 2 })
	if st := ses.Status(); st.Connected || st.Err == "" {
		t.Errorf("Status() = %+v, want an error", st)
	}
}

// TestWrongServer meets a server whose certificate another CA signed.
func TestWrongServer(t *testing.T) {
	s, n := serve(t, loopback(t)), newNode(3)
	_, other := certificate(t)
	s.identity.TLS = s.identity.TLS.Clone()
	s.identity.TLS.RootCAs = other
	ses := start(t, n, s, nil)
	eventually(t, "the error is told", func() bool { return strings.Contains(ses.Status().Err, "certificate") })
}

func TestNobodyListens(t *testing.T) {
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := l.Addr().String()
	_ = l.Close()
	n := newNode(3)
	s := &server{address: address, identity: session.Identity{Server: address, NotAfter: time.Now().Add(time.Hour), TLS: &tls.Config{MinVersion: tls.VersionTLS13}}}
	ses := start(t, n, s, nil)
	eventually(t, "the error names the address", func() bool {
		return strings.Contains(ses.Status().Err, "connection refused") && strings.Contains(ses.Status().Err, address)
	})
}
