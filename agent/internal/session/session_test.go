package session_test

import (
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/gpuaas/millwright/agent/internal/session"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

func TestHelloAndWork(t *testing.T) {
	s, n := serve(t, loopback(t)), newNode(3)
	ses := start(t, n, s, nil)
	p := s.accept(t)
	want := &agentv1.Hello{
		MinProtocol: 1, MaxProtocol: 1, BootId: "boot", JournalId: "journal-1", LastSeq: 3, FirstSeq: 1,
		AgentVersion: "1.2.3", Kinds: []*agentv1.KindSupport{{Kind: "storage.mount", Revision: 1}},
		Unfinished: []*agentv1.UnfinishedTask{{TaskId: "t1", LeafHash: []byte{1}, State: taskv1.TaskState_TASK_STATE_RUNNING}},
		Credits:    32, TrustRootVersion: 7, Generation: 3, Facts: &agentv1.NodeFacts{Hostname: "host"}, InstanceId: "instance",
	}
	if diff := cmp.Diff(want, p.hello, protocmp.Transform(), protocmp.IgnoreFields(&agentv1.Hello{}, "wall_time")); diff != "" {
		t.Errorf("Hello (-want +got):\n%s", diff)
	}
	p.welcome(9, 1)
	if got := seqs(t, p.events()); !slices.Equal(got, []uint64{1, 2, 3}) {
		t.Errorf("frames = %v, want 1 2 3", got)
	}
	p.ack("journal-1", 2)
	eventually(t, "acknowledgement recorded", func() bool { n.mu.Lock(); defer n.mu.Unlock(); return n.acked == 2 })
	p.send(assignment("a1"))
	p.send(&agentv1.SessionResponse{Message: &agentv1.SessionResponse_Cancel{Cancel: &agentv1.CancelRequest{TaskId: "t1"}}})
	p.send(assignment("a2"))
	if got := p.answer().GetAssignmentId(); got != "a1" {
		t.Errorf("answered %q, want a1", got)
	}
	if got := p.answer().GetAssignmentId(); got != "a2" {
		t.Errorf("answered %q, want a2", got)
	}
	if got, want := n.made(), []string{"deliver a1", "cancel t1", "deliver a2"}; !slices.Equal(got, want) {
		t.Errorf("calls = %v, want %v: a cancel must not overtake its task", got, want)
	}
	if st := ses.Status(); !st.Connected || st.Epoch != 9 || st.Err != "" {
		t.Errorf("Status() = %+v, want connected in epoch 9", st)
	}
	n.append(1, 0)
	if got := seqs(t, p.events()); !slices.Equal(got, []uint64{4}) {
		t.Errorf("frames = %v, want 4", got)
	}
}

func TestResumesWhereTheServerStands(t *testing.T) {
	s, n := serve(t, loopback(t)), newNode(5)
	start(t, n, s, nil)
	p := s.accept(t)
	p.welcome(1, 4)
	if got := seqs(t, p.events()); !slices.Equal(got, []uint64{4, 5}) {
		t.Errorf("frames = %v, want 4 5", got)
	}
	eventually(t, "what the Welcome acknowledges is recorded", func() bool { n.mu.Lock(); defer n.mu.Unlock(); return n.acked == 3 })
}

func TestResendRequest(t *testing.T) {
	s, n := serve(t, loopback(t)), newNode(5)
	start(t, n, s, nil)
	p := s.accept(t)
	p.welcome(1, 1)
	p.events()
	p.send(&agentv1.SessionResponse{Message: &agentv1.SessionResponse_Resend{Resend: &agentv1.ResendRequest{JournalId: "other", FromSeq: 1}}})
	p.send(&agentv1.SessionResponse{Message: &agentv1.SessionResponse_Resend{Resend: &agentv1.ResendRequest{JournalId: "journal-1", FromSeq: 2}}})
	if got := seqs(t, p.events()); !slices.Equal(got, []uint64{2, 3, 4, 5}) {
		t.Errorf("frames = %v, want 2 to 5", got)
	}
	p.ack("journal-1", 5)
	eventually(t, "acknowledgement recorded", func() bool { n.mu.Lock(); defer n.mu.Unlock(); return n.acked == 5 })
}

// TestServerKnowsMore: what an older stream carried may be stored after the
// Welcome of the next one.
func TestServerKnowsMore(t *testing.T) {
	s, n := serve(t, loopback(t)), newNode(0)
	n.append(40, 100<<10) // more than the window holds
	start(t, n, s, nil)
	p := s.accept(t)
	p.welcome(1, 1)
	p.events()
	p.ack("journal-1", 38)
	for {
		got := seqs(t, p.events())
		if got[0] == 39 {
			break
		}
		if got[0] > 39 || got[len(got)-1] >= 39 {
			t.Fatalf("frames %v do not begin anew at 39", got)
		}
	}
	p.ack("journal-1", 40)
	eventually(t, "acknowledgement recorded", func() bool { n.mu.Lock(); defer n.mu.Unlock(); return n.acked == 40 })
}

func TestGapIsTold(t *testing.T) {
	s, n := serve(t, loopback(t)), newNode(0)
	n.first = 10
	n.append(2, 0)
	start(t, n, s, nil)
	p := s.accept(t)
	p.welcome(1, 4)
	b := p.events()
	if got := seqs(t, b); !b.GetGapBefore() || !slices.Equal(got, []uint64{10, 11}) {
		t.Errorf("frames = %v, gap %v, want 10 11 after a gap", got, b.GetGapBefore())
	}
	n.append(1, 0)
	b = p.events()
	if got := seqs(t, b); b.GetGapBefore() || !slices.Equal(got, []uint64{12}) {
		t.Errorf("frames = %v, gap %v, want 12 without a gap", got, b.GetGapBefore())
	}
	p.ack("journal-1", 12)
	eventually(t, "acknowledgement recorded", func() bool { n.mu.Lock(); defer n.mu.Unlock(); return n.acked == 12 })
}

func TestWindowIsBounded(t *testing.T) {
	const frame = 100 << 10
	s, n := serve(t, loopback(t)), newNode(0)
	n.append(64, frame)
	start(t, n, s, nil)
	p := s.accept(t)
	p.welcome(1, 1)
	var last uint64
	for last < 10 { // less than the window holds
		last += uint64(len(p.events().GetFrames()))
	}
	// All that it will send without an acknowledgement is under way. An answer
	// overtakes events, so what was sent before it is all there is.
	bytes, frames := int(last)*frame, last
	for {
		p.send(assignment("probe"))
		m := p.recv(func(m *agentv1.SessionRequest) bool { return m.GetAnswer() != nil || m.GetEvents() != nil })
		if m.GetAnswer() != nil {
			break
		}
		frames += uint64(len(m.GetEvents().GetFrames()))
		bytes += len(m.GetEvents().GetFrames()) * frame
	}
	if bytes > 1<<20+64*frame {
		t.Errorf("%d bytes were sent without acknowledgement", bytes)
	}
	for frames < 64 {
		p.ack("journal-1", frames)
		frames += uint64(len(p.events().GetFrames()))
	}
}

func TestOtherEpochsAreIgnored(t *testing.T) {
	s, n := serve(t, loopback(t)), newNode(1)
	start(t, n, s, nil)
	p := s.accept(t)
	p.welcome(5, 2)
	for _, epoch := range []uint64{4, 6} {
		m := assignment("stale")
		m.SessionEpoch = epoch
		p.send(m)
		p.send(&agentv1.SessionResponse{SessionEpoch: epoch, Message: &agentv1.SessionResponse_Goodbye{Goodbye: &agentv1.Goodbye{Reason: "SUPERSEDED"}}})
		p.send(&agentv1.SessionResponse{SessionEpoch: epoch, Message: &agentv1.SessionResponse_Ack{Ack: &agentv1.EventAck{JournalId: "journal-1", Seq: 99}}})
	}
	p.send(assignment("fresh"))
	if got := p.answer().GetAssignmentId(); got != "fresh" {
		t.Errorf("answered %q, want fresh", got)
	}
	if got := n.made(); !slices.Equal(got, []string{"deliver fresh"}) {
		t.Errorf("calls = %v, want only the fresh one", got)
	}
}

func TestServerAheadOfJournal(t *testing.T) {
	s, n := serve(t, loopback(t)), newNode(3)
	start(t, n, s, nil)
	p := s.accept(t)
	p.welcome(1, 9)
	p.gone()
	again := s.accept(t)
	if again.hello.GetJournalId() != "journal-1+" || again.hello.GetLastSeq() != 0 {
		t.Errorf("Hello names journal %q at %d, want a new one", again.hello.GetJournalId(), again.hello.GetLastSeq())
	}
	if !slices.Equal(n.behind, []uint64{8}) {
		t.Errorf("Behind was called with %v, want 8", n.behind)
	}
}

func TestIdentityReplaced(t *testing.T) {
	s, n := serve(t, loopback(t)), newNode(1)
	start(t, n, s, nil)
	p := s.accept(t)
	p.welcome(1, 2)
	n.replace(func(id *session.Identity) { id.Generation = 4 })
	p.gone()
	if got := s.accept(t).hello.GetGeneration(); got != 4 {
		t.Errorf("Hello has generation %d, want 4", got)
	}
}

// TestLossyLine cuts the connection after each batch. Every frame must arrive
// in order and without a hole, however often the line is cut.
func TestLossyLine(t *testing.T) {
	s, n := serve(t, loopback(t)), newNode(0)
	n.append(10, 200<<10)
	// A new identity each time makes the session come back at once.
	start(t, n, s, nil)
	var have uint64
	for epoch := uint64(1); have < 10; epoch++ {
		p := s.accept(t)
		p.welcome(epoch, have+1)
		got := seqs(t, p.events())
		for _, seq := range got {
			if seq != have+1 {
				t.Fatalf("frame %d follows %d", seq, have)
			}
			have++
		}
		n.replace(func(*session.Identity) {})
		p.end <- nil
	}
}

func TestOutputWantedAndTrust(t *testing.T) {
	s, n := serve(t, loopback(t)), newNode(0)
	wanted := make(chan string, 1)
	start(t, n, s, func(c *session.Config) { c.Wanted = func(id string) { wanted <- id } })
	p := s.accept(t)
	p.epoch = 1
	p.send(&agentv1.SessionResponse{Message: &agentv1.SessionResponse_Welcome{Welcome: &agentv1.Welcome{
		Protocol: 1, SessionEpoch: 1, ResendFrom: 1, TrustUpdates: []*taskv1.Envelope{{}, {}},
	}}})
	p.send(&agentv1.SessionResponse{Message: &agentv1.SessionResponse_OutputWanted{OutputWanted: &agentv1.OutputWanted{TaskId: "t9"}}})
	select {
	case id := <-wanted:
		if id != "t9" {
			t.Errorf("wanted %q, want t9", id)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("nobody was told of the wanted output")
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.updates != 2 {
		t.Errorf("trust store was given %d updates, want 2", n.updates)
	}
}
