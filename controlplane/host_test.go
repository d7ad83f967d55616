package controlplane_test

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/millwright/pki"
	"github.com/gpuaas/millwright/pki/envelope"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

func sha(t testing.TB, hexed string) (out [sha256.Size]byte) {
	t.Helper()
	copy(out[:], must(hex.DecodeString(hexed))(t))
	return out
}

// host speaks a node's part of the session protocol. It keeps a journal in
// memory and does what a test tells it.
type host struct {
	w          *world
	node       string
	generation uint64
	conn       *grpc.ClientConn

	instance, boot string
	journal        string
	previous       string
	frames         [][]byte
	first          uint64 // the first frame that is kept
	unfinished     []*agentv1.UnfinishedTask
	kinds          []*agentv1.KindSupport
	credits        uint32
	conditions     []*taskv1.Condition

	stream  grpc.BidiStreamingClient[agentv1.SessionRequest, agentv1.SessionResponse]
	cancel  context.CancelFunc
	welcome *agentv1.Welcome
	epoch   uint64
	inbox   chan *agentv1.SessionResponse // closed when the stream has ended
	end     *error                        // how it ended; read after inbox is closed
	pending []*agentv1.SessionResponse    // received and not asked for yet

	connected bool // the session is open, as far as the host knows
	accepted  int  // how often it accepted a task
}

func newHost(w *world, node string, generation uint64, id *pki.Identity) *host {
	h := &host{
		w: w, node: node, generation: generation, conn: w.dial(id), credits: 32, first: 1,
		instance: uuid.NewString(), boot: uuid.NewString(), journal: uuid.NewString(),
		kinds: []*agentv1.KindSupport{{Kind: "system.command", Revision: 1}, {Kind: "storage.mount", Revision: 1}, {Kind: "task.resolve", Revision: 1}},
	}
	h.emit(&taskv1.Event{Payload: &taskv1.Event_JournalOpened{JournalOpened: &taskv1.JournalOpened{
		Reason: taskv1.JournalReason_JOURNAL_REASON_JOINED, Generation: generation}}})
	return h
}

// newJournal makes the host lose its journal.
func (h *host) newJournal() {
	h.previous, h.journal = h.journal, uuid.NewString()
	h.instance = uuid.NewString()
	h.frames, h.first, h.unfinished = nil, 1, nil
	h.emit(&taskv1.Event{Payload: &taskv1.Event_JournalOpened{JournalOpened: &taskv1.JournalOpened{
		PreviousJournalId: h.previous, Reason: taskv1.JournalReason_JOURNAL_REASON_MISSING, Generation: h.generation}}})
}

// emit appends an event to the journal and returns its seq.
func (h *host) emit(e *taskv1.Event) uint64 {
	e.JournalId, e.Seq = h.journal, h.lastSeq()+1
	e.BootId, e.WallTime, e.BootTime = h.boot, timestamppb.Now(), durationpb.New(time.Minute)
	sum := sha256.Sum256(fmt.Appendf(nil, "%s\x00%d\x00%s", h.node, h.generation, h.previous))
	if len(h.frames) > 0 {
		sum = sha256.Sum256(h.frames[len(h.frames)-1])
	}
	e.PrevHash = sum[:]
	h.frames = append(h.frames, must(proto.Marshal(e))(h.w.t))
	return e.GetSeq()
}

func (h *host) lastSeq() uint64 { return h.first - 1 + uint64(len(h.frames)) }

func (h *host) hello() *agentv1.Hello {
	return &agentv1.Hello{
		MinProtocol: 1, MaxProtocol: 1, BootId: h.boot, JournalId: h.journal, LastSeq: h.lastSeq(), FirstSeq: h.first,
		AgentVersion: "test", Kinds: h.kinds, WallTime: timestamppb.Now(), Unfinished: h.unfinished, Credits: h.credits,
		TrustRootVersion: 1, Generation: h.generation, InstanceId: h.instance,
		Facts: &agentv1.NodeFacts{Hostname: h.node, Conditions: h.conditions},
	}
}

// open opens a session and returns the first answer.
func (h *host) open() *agentv1.SessionResponse {
	h.w.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	h.w.t.Cleanup(cancel)
	stream, err := agentv1.NewAgentServiceClient(h.conn).Session(ctx)
	if err != nil {
		h.w.t.Fatalf("%s: Session: %v", h.node, err)
	}
	h.stream, h.cancel = stream, cancel
	h.inbox, h.pending, h.epoch = make(chan *agentv1.SessionResponse, 1024), nil, 0
	inbox, end := h.inbox, new(error)
	h.end = end
	var wg sync.WaitGroup
	wg.Go(func() {
		defer close(inbox)
		for {
			m, err := stream.Recv()
			if err != nil {
				*end = err
				return
			}
			inbox <- m
		}
	})
	h.send(&agentv1.SessionRequest{Message: &agentv1.SessionRequest_Hello{Hello: h.hello()}})
	return h.next("an answer to the Hello", func(*agentv1.SessionResponse) bool { return true })
}

// connect opens a session, and sends what the server lacks.
func (h *host) connect() {
	h.w.t.Helper()
	m := h.open()
	if h.welcome = m.GetWelcome(); h.welcome == nil {
		h.w.t.Fatalf("%s: %v in place of a Welcome", h.node, m)
	}
	if id := h.hello().GetJournalId(); h.welcome.GetJournalId() != id {
		h.w.t.Errorf("%s: the Welcome is for journal %q, want %q", h.node, h.welcome.GetJournalId(), id)
	}
	h.epoch = h.welcome.GetSessionEpoch()
	h.flush(h.welcome.GetResendFrom())
}

// hangUp breaks the session and waits until the server has seen it.
func (h *host) hangUp() {
	h.cancel()
	for range h.inbox {
	}
}

func (h *host) send(m *agentv1.SessionRequest) {
	h.w.t.Helper()
	m.SessionEpoch = h.epoch
	if err := h.stream.Send(m); err != nil {
		h.w.t.Fatalf("%s: send: %v", h.node, err)
	}
}

// sendFrames sends frames as they are.
func (h *host) sendFrames(gap bool, frames ...[]byte) {
	h.w.t.Helper()
	h.send(&agentv1.SessionRequest{Message: &agentv1.SessionRequest_Events{Events: &agentv1.EventBatch{
		JournalId: h.journal, Frames: frames, GapBefore: gap}}})
}

// flush sends the journal from a frame on, and waits until all is acknowledged.
func (h *host) flush(from uint64) {
	h.w.t.Helper()
	if from > h.lastSeq() {
		return
	}
	gap := from < h.first
	h.sendFrames(gap, h.frames[max(from, h.first)-h.first:]...)
	h.acked(h.lastSeq())
}

// report emits an event and waits for its acknowledgement.
func (h *host) report(e *taskv1.Event) {
	h.w.t.Helper()
	seq := h.emit(e)
	h.flush(seq)
}

func (h *host) acked(seq uint64) {
	h.w.t.Helper()
	h.next(fmt.Sprintf("an acknowledgement of %d", seq), func(m *agentv1.SessionResponse) bool { return m.GetAck().GetSeq() >= seq })
}

// next returns the first message that fits, and keeps the others for later.
func (h *host) next(what string, fits func(*agentv1.SessionResponse) bool) *agentv1.SessionResponse {
	h.w.t.Helper()
	for i, m := range h.pending {
		if fits(m) {
			h.pending = append(h.pending[:i:i], h.pending[i+1:]...)
			return m
		}
	}
	deadline := time.After(patience)
	for {
		select {
		case m, ok := <-h.inbox:
			switch {
			case !ok:
				h.w.t.Fatalf("%s: the stream ended with %v before %s", h.node, *h.end, what)
			case fits(m):
				return m
			}
			h.pending = append(h.pending, m)
		case <-deadline:
			h.w.t.Fatalf("%s: %s has not come; got %v", h.node, what, h.pending)
		}
	}
}

// assignment waits for the assignment of a task; any one when id is empty.
func (h *host) assignment(id string) *agentv1.Assignment {
	h.w.t.Helper()
	return h.next("an assignment", func(m *agentv1.SessionResponse) bool {
		return m.GetAssignment() != nil && (id == "" || h.leafOf(m.GetAssignment()).GetTaskId() == id)
	}).GetAssignment()
}

// none checks that nothing that fits has come, once the server has twice
// answered a frame that is too far ahead: what it was about to send before the
// first answer has come before the second.
func (h *host) none(what string, fits func(*agentv1.SessionResponse) bool) {
	h.w.t.Helper()
	ahead := must(proto.Marshal(&taskv1.Event{JournalId: h.journal, Seq: h.lastSeq() + 1000}))(h.w.t)
	for range 2 {
		h.sendFrames(false, ahead)
		h.next("a request to send again", func(m *agentv1.SessionResponse) bool { return m.GetResend() != nil })
	}
	for _, m := range h.pending {
		if fits(m) {
			h.w.t.Errorf("%s: %s has come: %v", h.node, what, m)
		}
	}
}

func (h *host) leafOf(a *agentv1.Assignment) *taskv1.TaskLeaf {
	return must(envelope.DecodeLeaf(a.GetSignedLeaf().GetLeaf()))(h.w.t)
}

// accept answers Accepted and reports it.
func (h *host) accept(a *agentv1.Assignment) *taskv1.TaskLeaf {
	h.w.t.Helper()
	leaf := h.leafOf(a)
	h.answer(a, &agentv1.AssignmentAnswer{Answer: &agentv1.AssignmentAnswer_Accepted{Accepted: &agentv1.Accepted{
		JournalId: h.journal, Seq: h.lastSeq() + 1}}})
	h.report(acceptedEvent(a))
	hash := envelope.LeafHash(a.GetSignedLeaf().GetLeaf())
	h.unfinished = append(h.unfinished, &agentv1.UnfinishedTask{TaskId: leaf.GetTaskId(), LeafHash: hash[:], State: taskv1.TaskState_TASK_STATE_ACCEPTED})
	return leaf
}

func acceptedEvent(a *agentv1.Assignment) *taskv1.Event {
	leaf := &taskv1.TaskLeaf{}
	_ = proto.Unmarshal(a.GetSignedLeaf().GetLeaf(), leaf)
	hash := envelope.LeafHash(a.GetSignedLeaf().GetLeaf())
	return &taskv1.Event{Payload: &taskv1.Event_Accepted{Accepted: &taskv1.TaskAccepted{
		TaskId: leaf.GetTaskId(), LeafHash: hash[:], Envelope: a.GetEnvelope(), SignedLeaf: a.GetSignedLeaf(), TrustRootVersion: 1,
		AuthorizedBy: []*taskv1.Authorizer{{KeyId: a.GetEnvelope().GetSignatures()[0].GetKeyId(), Name: "alice", Role: taskv1.KeyRole_KEY_ROLE_OPERATOR}},
	}}}
}

func (h *host) answer(a *agentv1.Assignment, answer *agentv1.AssignmentAnswer) {
	h.w.t.Helper()
	answer.AssignmentId = a.GetAssignmentId()
	h.send(&agentv1.SessionRequest{Message: &agentv1.SessionRequest_Answer{Answer: answer}})
}

// run reports a task's life from its plan to a good end.
func (h *host) run(id string) {
	h.w.t.Helper()
	h.report(&taskv1.Event{Payload: &taskv1.Event_Planned{Planned: &taskv1.TaskPlanned{TaskId: id, Plan: &taskv1.Plan{
		Kind: "system.command", Steps: []*taskv1.PlannedStep{{Type: "command.run", Title: "run /usr/bin/true"}}}}}})
	h.report(&taskv1.Event{Payload: &taskv1.Event_Started{Started: &taskv1.TaskStarted{TaskId: id}}})
	h.report(&taskv1.Event{Payload: &taskv1.Event_StepEnded{StepEnded: &taskv1.StepEnded{TaskId: id, Outcome: &taskv1.StepOutcome{
		Phase: taskv1.StepPhase_STEP_PHASE_VERIFIED, Attempts: 1}}}})
	h.finish(id, taskv1.TaskState_TASK_STATE_SUCCEEDED)
}

func (h *host) finish(id string, state taskv1.TaskState) {
	h.w.t.Helper()
	h.report(finished(id, state))
	for i, u := range h.unfinished {
		if u.GetTaskId() == id {
			h.unfinished = append(h.unfinished[:i:i], h.unfinished[i+1:]...)
			return
		}
	}
}

func finished(id string, state taskv1.TaskState) *taskv1.Event {
	return &taskv1.Event{Payload: &taskv1.Event_Finished{Finished: &taskv1.TaskFinished{TaskId: id, State: state}}}
}
