package session_test

import (
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/gpuaas/millwright/agent/internal/session"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// inBubble runs play with a server in memory and a node, in a bubble of time.
func inBubble(t *testing.T, n *node, change func(*session.Config), play func(t *testing.T, s *server, ses *session.Session)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		s := serve(t, inMemory())
		n.grown, n.replaced = make(chan struct{}), make(chan struct{})
		play(t, s, start(t, n, s, change))
	})
}

func TestSilentServerIsLeft(t *testing.T) {
	inBubble(t, newNode(0), nil, func(t *testing.T, s *server, ses *session.Session) {
		p := s.accept(t)
		p.welcome(1, 1)
		begun := time.Now()
		p.gone()
		if d := time.Since(begun); d != 150*time.Second {
			t.Errorf("a silent server was left after %v, want 2.5 intervals of a minute", d)
		}
		s.accept(t)
	})
}

func TestTalkingServerIsKept(t *testing.T) {
	inBubble(t, newNode(0), nil, func(t *testing.T, s *server, ses *session.Session) {
		p := s.accept(t)
		p.welcome(1, 1)
		for range 60 {
			<-time.After(2 * time.Minute)
			p.send(&agentv1.SessionResponse{Message: &agentv1.SessionResponse_Heartbeat{Heartbeat: &agentv1.ServerHeartbeat{}}})
		}
		synctest.Wait()
		if !ses.Status().Connected {
			t.Errorf("a server that talks was left: %+v", ses.Status())
		}
		// Messages of another epoch are no sign of life.
		for range 3 {
			<-time.After(time.Minute)
			m := &agentv1.SessionResponse{SessionEpoch: 99, Message: &agentv1.SessionResponse_Heartbeat{Heartbeat: &agentv1.ServerHeartbeat{}}}
			if p.rpc.Send(m) != nil {
				break
			}
		}
		synctest.Wait()
		if ses.Status().Connected {
			t.Error("messages of another epoch kept the session alive")
		}
	})
}

func TestNoWelcome(t *testing.T) {
	inBubble(t, newNode(0), nil, func(t *testing.T, s *server, ses *session.Session) {
		begun := time.Now()
		s.accept(t).gone()
		if d := time.Since(begun); d != 30*time.Second {
			t.Errorf("a server without a Welcome was left after %v, want 30s", d)
		}
		s.accept(t)
	})
}

func TestHeartbeats(t *testing.T) {
	n := newNode(2)
	inBubble(t, n, nil, func(t *testing.T, s *server, ses *session.Session) {
		set := func(s taskv1.ConditionStatus) {
			n.mu.Lock()
			defer n.mu.Unlock()
			n.conditions = []*taskv1.Condition{{Type: "PolicyInvalid", Status: s}}
		}
		p := s.accept(t)
		set(taskv1.ConditionStatus_CONDITION_STATUS_FALSE) // it is not as the Hello said
		p.welcome(1, 3)
		beat := func() *agentv1.Heartbeat {
			return p.recv(func(m *agentv1.SessionRequest) bool { return m.GetHeartbeat() != nil }).GetHeartbeat()
		}
		if h := beat(); h.GetLastSeq() != 2 || len(h.GetConditions()) != 1 || h.GetWallTime() == nil {
			t.Errorf("heartbeat = %v, want last_seq 2 and the conditions since the Hello", h)
		}
		set(taskv1.ConditionStatus_CONDITION_STATUS_TRUE)
		if h := beat(); !h.GetHasConditions() || len(h.GetConditions()) != 1 {
			t.Errorf("heartbeat = %v, want the changed conditions", h)
		}
		p.send(&agentv1.SessionResponse{Message: &agentv1.SessionResponse_Heartbeat{Heartbeat: &agentv1.ServerHeartbeat{}}})
		if h := beat(); h.GetHasConditions() {
			t.Errorf("heartbeat = %v, want no conditions since none changed", h)
		}
	})
}

func TestPausesAskedFor(t *testing.T) {
	retry := func(d time.Duration) error {
		st, err := status.New(codes.Unavailable, "busy").WithDetails(&errdetails.RetryInfo{RetryDelay: durationpb.New(d)})
		if err != nil {
			t.Fatal(err)
		}
		return st.Err()
	}
	for _, tc := range []struct {
		name     string
		play     func(*server, *peer)
		min, max time.Duration
	}{
		{"drain", func(_ *server, p *peer) {
			p.send(&agentv1.SessionResponse{Message: &agentv1.SessionResponse_Drain{Drain: &agentv1.DrainNotice{ReconnectAfter: durationpb.New(40 * time.Second)}}})
			p.end <- nil
		}, 40 * time.Second, 41 * time.Second},
		{"drain and the server does not end the stream", func(_ *server, p *peer) {
			p.send(&agentv1.SessionResponse{Message: &agentv1.SessionResponse_Drain{Drain: &agentv1.DrainNotice{ReconnectAfter: durationpb.New(40 * time.Second)}}})
		}, 50 * time.Second, 51 * time.Second},
		{"goodbye", func(_ *server, p *peer) {
			p.send(&agentv1.SessionResponse{Message: &agentv1.SessionResponse_Goodbye{Goodbye: &agentv1.Goodbye{Reason: "X", ReconnectAfter: durationpb.New(2 * time.Minute)}}})
		}, 2 * time.Minute, 2*time.Minute + time.Second},
		{"retry info", func(_ *server, p *peer) { p.end <- retry(30 * time.Second) }, 30 * time.Second, 31 * time.Second},
		{"a year", func(_ *server, p *peer) { p.end <- retry(365 * 24 * time.Hour) }, 15 * time.Minute, 15*time.Minute + time.Second},
		{"nothing", func(_ *server, p *peer) { p.end <- nil }, 0, time.Second},
	} {
		t.Run(tc.name, func(t *testing.T) {
			inBubble(t, newNode(0), nil, func(t *testing.T, s *server, ses *session.Session) {
				p := s.accept(t)
				p.welcome(1, 1)
				begun := time.Now()
				tc.play(s, p)
				again := <-s.peers
				if d := time.Since(begun); d < tc.min || d > tc.max+10*time.Millisecond {
					t.Errorf("came back after %v, want %v to %v", d, tc.min, tc.max)
				}
				_ = again
			})
		})
	}
}

// TestBackoff lets the server refuse ten times: the pauses have jitter, stay
// below a minute, and grow.
func TestBackoff(t *testing.T) {
	inBubble(t, newNode(0), nil, func(t *testing.T, s *server, ses *session.Session) {
		begun := time.Now()
		var longest time.Duration
		for range 40 {
			p := s.accept(t)
			longest = max(longest, time.Since(begun))
			begun = time.Now()
			p.end <- status.Error(codes.Unavailable, "no")
		}
		if longest > time.Minute+time.Second || longest < 2*time.Second {
			t.Errorf("longest pause = %v, want more than 2s and at most a minute", longest)
		}
	})
}

func TestEndsBeforeTheCertificateDoes(t *testing.T) {
	n := newNode(0)
	synctest.Test(t, func(t *testing.T) {
		s := serve(t, inMemory())
		n.grown, n.replaced = make(chan struct{}), make(chan struct{})
		s.identity.NotAfter = time.Now().Add(10 * time.Minute)
		ses := start(t, n, s, nil)
		p := s.accept(t)
		p.welcome(1, 1)
		for range 9 {
			<-time.After(time.Minute)
			p.send(&agentv1.SessionResponse{Message: &agentv1.SessionResponse_Heartbeat{Heartbeat: &agentv1.ServerHeartbeat{}}})
		}
		synctest.Wait()
		if !ses.Status().Connected {
			t.Fatalf("session ended early: %+v", ses.Status())
		}
		p.gone()
		if !time.Now().Before(s.identity.NotAfter) {
			t.Errorf("the stream outlived the certificate")
		}
		// Renewal brings it back at once.
		n.replace(func(id *session.Identity) { id.NotAfter = time.Now().Add(time.Hour) })
		s.accept(t).welcome(2, 1)
	})
}
