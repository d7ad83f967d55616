package check_test

import (
	"crypto/sha256"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/millwright/pki/envelope"
	"github.com/gpuaas/millwright/pki/pkitest"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	auditv1 "github.com/gpuaas/millwright/proto/millwright/audit/v1"
	serverv1 "github.com/gpuaas/millwright/proto/millwright/server/v1"
	systemv1 "github.com/gpuaas/millwright/proto/millwright/system/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/test/invariants/check"
)

const (
	nodeName  = "gpu-001"
	journalID = "journal-a"
	mark      = "mark-1"
	verified  = taskv1.StepPhase_STEP_PHASE_VERIFIED
	succeeded = taskv1.TaskState_TASK_STATE_SUCCEEDED
)

// story is what happened, before it is written down. A test changes it, and
// then the history.
type story struct {
	t       *testing.T
	cluster *pkitest.Cluster
	env     *taskv1.Envelope
	command *taskv1.SignedLeaf // runs once and leaves a mark
	mount   *taskv1.SignedLeaf // leaves an intent
	events  []*taskv1.Event
	states  map[string]taskv1.TaskState // rows of the server
	sent    int                         // how many frames the server has
	acked   uint64
	effects []check.Effect
}

func leafOf(t *testing.T, l *taskv1.SignedLeaf) *taskv1.TaskLeaf {
	t.Helper()
	leaf, err := envelope.DecodeLeaf(l.GetLeaf())
	if err != nil {
		t.Fatal(err)
	}
	return leaf
}

func (s *story) id(l *taskv1.SignedLeaf) string { return leafOf(s.t, l).GetTaskId() }

// newStory is one command and one mount that went well.
func newStory(t *testing.T) *story {
	t.Helper()
	s := &story{t: t, cluster: pkitest.New(t)}
	spec, err := proto.Marshal(&systemv1.CommandSpec{Argv: []string{"/bin/mark", mark}})
	if err != nil {
		t.Fatal(err)
	}
	env, leaves := s.cluster.Sign(t,
		&taskv1.TaskLeaf{TaskId: pkitest.NewTaskID(t), Node: nodeName, Mode: taskv1.Mode_MODE_EXECUTE, Kind: "system.command", Revision: 1, Spec: spec},
		&taskv1.TaskLeaf{TaskId: pkitest.NewTaskID(t), Node: nodeName, Mode: taskv1.Mode_MODE_EXECUTE, Kind: "storage.mount", Revision: 1})
	s.env, s.command, s.mount = env, leaves[0], leaves[1]
	one, two := s.id(s.command), s.id(s.mount)
	s.states = map[string]taskv1.TaskState{one: succeeded, two: succeeded}
	s.effects = []check.Effect{{Node: nodeName, Key: mark, Count: 1}}
	s.events = []*taskv1.Event{
		{Payload: &taskv1.Event_JournalOpened{JournalOpened: &taskv1.JournalOpened{Generation: 1, Floor: timestamppb.New(time.Now().Add(-time.Hour))}}},
		s.accepted(s.command),
		planned(one, "system.command", taskv1.Effect_EFFECT_AT_MOST_ONCE),
		{Payload: &taskv1.Event_Started{Started: &taskv1.TaskStarted{TaskId: one}}},
		finishedAs(one, succeeded, &taskv1.StepOutcome{Phase: verified, Attempts: 1, Command: &taskv1.CommandOutcome{InvocationId: "run-1"}}),
		s.accepted(s.mount),
		planned(two, "storage.mount", taskv1.Effect_EFFECT_IDEMPOTENT, taskv1.Effect_EFFECT_CHECK_THEN_ACT),
		{Payload: &taskv1.Event_Started{Started: &taskv1.TaskStarted{TaskId: two}}},
		{Payload: &taskv1.Event_StepEnded{StepEnded: &taskv1.StepEnded{TaskId: two, Outcome: &taskv1.StepOutcome{Phase: verified, Attempts: 2}}}},
		intent(two, taskv1.IntentState_INTENT_STATE_ACTIVE),
		finishedAs(two, succeeded, &taskv1.StepOutcome{Phase: verified, Attempts: 2}, &taskv1.StepOutcome{Phase: verified, Attempts: 1}),
		intent(two, taskv1.IntentState_INTENT_STATE_RESTORED),
	}
	s.sent, s.acked = len(s.events), uint64(len(s.events))
	return s
}

func (s *story) accepted(l *taskv1.SignedLeaf) *taskv1.Event {
	hash := envelope.LeafHash(l.GetLeaf())
	return &taskv1.Event{Payload: &taskv1.Event_Accepted{Accepted: &taskv1.TaskAccepted{
		TaskId: s.id(l), LeafHash: hash[:], Envelope: s.env, SignedLeaf: l, TrustRootVersion: 1,
	}}}
}

func planned(id, kind string, effects ...taskv1.Effect) *taskv1.Event {
	plan := &taskv1.Plan{Kind: kind}
	for _, e := range effects {
		plan.Steps = append(plan.Steps, &taskv1.PlannedStep{Effect: e})
	}
	return &taskv1.Event{Payload: &taskv1.Event_Planned{Planned: &taskv1.TaskPlanned{TaskId: id, Plan: plan}}}
}

func finishedAs(id string, state taskv1.TaskState, steps ...*taskv1.StepOutcome) *taskv1.Event {
	return &taskv1.Event{Payload: &taskv1.Event_Finished{Finished: &taskv1.TaskFinished{TaskId: id, State: state, Steps: steps}}}
}

func intent(id string, state taskv1.IntentState) *taskv1.Event {
	return &taskv1.Event{Payload: &taskv1.Event_IntentChanged{IntentChanged: &taskv1.IntentChanged{Key: "mount:/data", TaskId: id, State: state}}}
}

// history writes the story down as a node and a server do.
func (s *story) history() *check.History {
	s.t.Helper()
	n, server := check.NewNode(), check.NewServer()
	s.add(n.Add(&agentv1.JournalLine{Line: &agentv1.JournalLine_Head{Head: &agentv1.JournalHead{
		Meta: &agentv1.JournalMeta{JournalId: journalID, Node: nodeName, Generation: 1}, FirstSeq: 1, LastSeq: uint64(len(s.events)), AcknowledgedSeq: s.acked,
	}}}))
	cluster := s.cluster.Root.Cluster()
	s.add(server.Add(&auditv1.LogLine{Line: &auditv1.LogLine_Cluster{Cluster: &serverv1.ClusterRow{Cluster: cluster[:], TrustChain: s.cluster.Root.Chain()}}}))
	prev := sha256.Sum256([]byte(nodeName + "\x001\x00"))
	for i, e := range s.events {
		e.JournalId, e.Seq, e.PrevHash = journalID, uint64(i+1), append([]byte(nil), prev[:]...)
		if e.WallTime == nil {
			e.WallTime = timestamppb.New(time.Now().Add(time.Second))
		}
		b := s.bytes(e)
		prev = sha256.Sum256(b)
		s.add(n.Add(&agentv1.JournalLine{Line: &agentv1.JournalLine_Frame{Frame: &agentv1.JournalFrame{
			Seq: e.GetSeq(), Hash: append([]byte(nil), prev[:]...), PrevHash: e.GetPrevHash(), Bytes: b,
		}}}))
		if i < s.sent {
			s.log(server, &auditv1.LogEntry{Entry: &auditv1.LogEntry_NodeFrame{NodeFrame: &auditv1.NodeFrame{Node: nodeName, Generation: 1, JournalId: journalID, Seq: e.GetSeq(), Frame: b}}})
			s.add(server.Add(&auditv1.LogLine{Line: &auditv1.LogLine_Journal{Journal: &serverv1.JournalRow{
				Node: nodeName, JournalId: journalID, LastSeq: e.GetSeq(), LastSha256: append([]byte(nil), prev[:]...),
			}}}))
		}
	}
	for _, l := range []*taskv1.SignedLeaf{s.command, s.mount} {
		id := s.id(l)
		s.add(server.Add(&auditv1.LogLine{Line: &auditv1.LogLine_Task{Task: &serverv1.TaskRow{
			Task: &taskv1.Task{Id: id, Node: nodeName, State: s.states[id]}, SignedLeaf: l,
		}}}))
		s.add(n.Add(&agentv1.JournalLine{Line: &agentv1.JournalLine_Task{Task: &agentv1.TaskRecord{TaskId: id, State: s.states[id]}}}))
	}
	s.add(server.Add(&auditv1.LogLine{Line: &auditv1.LogLine_Node{Node: &serverv1.NodeRow{Name: nodeName, Generation: 1, JournalId: journalID}}}))
	return &check.History{Server: server, Nodes: []*check.Node{n}, Effects: s.effects}
}

// send logs more frames of the journal after those that the history has.
func (s *story) send(server *check.Server, events []*taskv1.Event) {
	s.t.Helper()
	for i, e := range events {
		before := hashOf(s.bytes(s.events[len(s.events)-1]))
		e.JournalId, e.Seq, e.PrevHash, e.WallTime = journalID, uint64(len(s.events)+1), before, timestamppb.New(time.Now().Add(time.Second))
		s.events = append(s.events[:len(s.events):len(s.events)], events[i])
		s.log(server, &auditv1.LogEntry{Entry: &auditv1.LogEntry_NodeFrame{NodeFrame: &auditv1.NodeFrame{
			Node: nodeName, Generation: 1, JournalId: journalID, Seq: e.GetSeq(), Frame: s.bytes(e),
		}}})
		s.add(server.Add(&auditv1.LogLine{Line: &auditv1.LogLine_Journal{Journal: &serverv1.JournalRow{
			Node: nodeName, JournalId: journalID, LastSeq: e.GetSeq(), LastSha256: hashOf(s.bytes(e)),
		}}}))
	}
}

func hashOf(b []byte) []byte {
	sum := sha256.Sum256(b)
	return sum[:]
}

func (s *story) log(server *check.Server, e *auditv1.LogEntry) {
	s.t.Helper()
	e.Index = uint64(len(server.Entries)) + 1
	b := s.bytes(e)
	sum := sha256.Sum256(b)
	s.add(server.Add(&auditv1.LogLine{Line: &auditv1.LogLine_Entry{Entry: &auditv1.ExportedEntry{Index: e.GetIndex(), Hash: sum[:], Bytes: b}}}))
}

func (s *story) bytes(m proto.Message) []byte {
	s.t.Helper()
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	s.add(err)
	return b
}

func (s *story) add(err error) {
	s.t.Helper()
	if err != nil {
		s.t.Fatal(err)
	}
}
