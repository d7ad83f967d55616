// Package hostile is a server that has the cluster's own identity and does as
// it is told: it sends what was altered, sends it twice, forgets, and lies. The
// tests here show that a node is none the worse for it.
package hostile

import (
	"context"
	"fmt"
	"net"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/millwright/pki"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// patience is how long anything may take that must happen.
const patience = 30 * time.Second

// Server takes sessions and says nothing by itself but Welcome.
type Server struct {
	agentv1.UnimplementedAgentServiceServer
	t        testing.TB
	grpc     *grpc.Server
	wg       sync.WaitGroup
	sessions chan *Session

	mu     sync.Mutex
	epoch  uint64                                   // of the newest session; guarded by mu
	events []*taskv1.Event                          // of all sessions, as they came; guarded by mu
	secret func(*agentv1.FetchSecretRequest) []byte // guarded by mu
	news   chan struct{}                            // closed, and made anew, with each event; guarded by mu
}

// Serve serves on l, with an empty store, until Stop or the end of the test.
// Epochs begin after the given one.
func Serve(t testing.TB, l net.Listener, identity *pki.Identity, trustDomain string, epoch uint64) *Server {
	t.Helper()
	source := new(pki.Static)
	source.Set(identity)
	s := &Server{t: t, sessions: make(chan *Session, 16), epoch: epoch, news: make(chan struct{})}
	s.grpc = grpc.NewServer(grpc.ForceServerCodec(codec{}),
		grpc.Creds(credentials.NewTLS(pki.TLS{Source: source, TrustDomain: trustDomain}.Server())))
	agentv1.RegisterAgentServiceServer(s.grpc, s)
	s.wg.Go(func() {
		if err := s.grpc.Serve(l); err != nil {
			t.Errorf("hostile server: %v", err)
		}
	})
	t.Cleanup(s.Stop)
	return s
}

// Stop ends the server and its sessions.
func (s *Server) Stop() {
	s.grpc.Stop()
	s.wg.Wait()
}

// Raw is a SessionResponse in bytes that need not be one.
type Raw []byte

// codec sends Raw as it is.
type codec struct{}

func (codec) Name() string { return "proto" }

func (codec) Marshal(v any) ([]byte, error) {
	switch m := v.(type) {
	case Raw:
		return m, nil
	case proto.Message:
		return proto.Marshal(m)
	}
	return nil, fmt.Errorf("encode %T: it is no message", v)
}

func (codec) Unmarshal(data []byte, v any) error {
	m, ok := v.(proto.Message)
	if !ok {
		return fmt.Errorf("decode %T: it is no message", v)
	}
	return proto.Unmarshal(data, m)
}

// Session is one of a node's.
type Session struct {
	// Hello is what the node said first.
	Hello *agentv1.Hello
	// Epoch is the one it was given.
	Epoch uint64

	t       testing.TB
	stream  grpc.ServerStream
	answers chan *agentv1.AssignmentAnswer
	ended   chan struct{}
}

// Session answers Hello with Welcome, and asks for all events that the node
// has: it is a store that never saw one.
func (s *Server) Session(stream grpc.BidiStreamingServer[agentv1.SessionRequest, agentv1.SessionResponse]) error {
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	s.mu.Lock()
	s.epoch++
	session := &Session{
		Hello: first.GetHello(), Epoch: s.epoch, t: s.t, stream: stream,
		answers: make(chan *agentv1.AssignmentAnswer, 64), ended: make(chan struct{}),
	}
	s.mu.Unlock()
	defer close(session.ended)
	err = stream.Send(&agentv1.SessionResponse{SessionEpoch: session.Epoch, Message: &agentv1.SessionResponse_Welcome{Welcome: &agentv1.Welcome{
		Protocol: session.Hello.GetMaxProtocol(), SessionEpoch: session.Epoch, ResendFrom: 1, ServerTime: timestamppb.Now(),
	}}})
	if err != nil {
		return err
	}
	s.sessions <- session
	for {
		m, err := stream.Recv()
		if err != nil {
			return err
		}
		if answer := m.GetAnswer(); answer != nil {
			session.answers <- answer
		}
		if err := s.keep(m.GetEvents().GetFrames()); err != nil {
			return err
		}
	}
}

func (s *Server) keep(frames [][]byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, frame := range frames {
		e := new(taskv1.Event)
		if err := proto.Unmarshal(frame, e); err != nil {
			return err
		}
		s.events = append(s.events, e)
	}
	close(s.news)
	s.news = make(chan struct{})
	return nil
}

// Secrets has the server answer each request for a secret, of whatever task,
// with what value returns. Before, it has none.
func (s *Server) Secrets(value func(*agentv1.FetchSecretRequest) []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.secret = value
}

// FetchSecret gives the value of [Server.Secrets].
func (s *Server) FetchSecret(_ context.Context, req *agentv1.FetchSecretRequest) (*agentv1.FetchSecretResponse, error) {
	s.mu.Lock()
	value := s.secret
	s.mu.Unlock()
	if value == nil {
		return nil, status.Error(codes.NotFound, "no such secret")
	}
	return &agentv1.FetchSecretResponse{Value: value(req)}, nil
}

// Next waits for a node's next session.
func (s *Server) Next() *Session {
	s.t.Helper()
	select {
	case session := <-s.sessions:
		return session
	case <-time.After(patience):
		s.t.Fatal("no session began")
		return nil
	}
}

// Finished waits until the node has reported the end of a task.
func (s *Server) Finished(taskID string) *taskv1.TaskFinished {
	s.t.Helper()
	late := time.After(patience)
	for {
		s.mu.Lock()
		events, news := s.events, s.news
		s.mu.Unlock()
		for _, e := range events {
			if f := e.GetFinished(); f != nil && f.GetTaskId() == taskID {
				return f
			}
		}
		select {
		case <-news:
		case <-late:
			s.t.Fatalf("no end of task %s was reported", taskID)
		}
	}
}

// Events returns what came until now.
func (s *Server) Events() []*taskv1.Event {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]*taskv1.Event(nil), s.events...)
}

// Send sends a message under the session's epoch, unless it has one already.
func (s *Session) Send(m *agentv1.SessionResponse) {
	s.t.Helper()
	if m.GetSessionEpoch() == 0 {
		m.SessionEpoch = s.Epoch
	}
	if err := s.stream.SendMsg(m); err != nil {
		s.t.Fatalf("send: %v", err)
	}
}

// SendRaw sends bytes.
func (s *Session) SendRaw(b []byte) {
	s.t.Helper()
	if err := s.stream.SendMsg(Raw(b)); err != nil {
		s.t.Fatalf("send: %v", err)
	}
}

// Ended waits until the session has ended.
func (s *Session) Ended() {
	s.t.Helper()
	select {
	case <-s.ended:
	case <-time.After(patience):
		s.t.Fatal("the session goes on")
	}
}

// Answer waits for the next answer to an assignment.
func (s *Session) Answer() *agentv1.AssignmentAnswer {
	s.t.Helper()
	select {
	case a := <-s.answers:
		return a
	case <-s.ended:
		s.t.Fatal("the session ended before the answer")
	case <-time.After(patience):
		s.t.Fatal("no answer came")
	}
	return nil
}

// Deliver sends an assignment and returns the answer.
func (s *Session) Deliver(id string, env *taskv1.Envelope, leaf *taskv1.SignedLeaf) *agentv1.AssignmentAnswer {
	s.t.Helper()
	s.Send(&agentv1.SessionResponse{Message: &agentv1.SessionResponse_Assignment{
		Assignment: &agentv1.Assignment{AssignmentId: id, Envelope: env, SignedLeaf: leaf}}})
	a := s.Answer()
	if a.GetAssignmentId() != id {
		s.t.Fatalf("the answer is to assignment %q, not to %q", a.GetAssignmentId(), id)
	}
	return a
}
