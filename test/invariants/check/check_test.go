package check_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	auditv1 "github.com/gpuaas/millwright/proto/millwright/audit/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/test/invariants/check"
)

func TestGoodHistory(t *testing.T) {
	if found := check.Check(newStory(t).history()); len(found) != 0 {
		t.Errorf("Check() of a good history = %v, want nothing", found)
	}
}

// doctored histories each break one invariant, and no other.
var doctored = []struct {
	name  string
	want  string
	says  string
	story func(*story)
	after func(*story, *check.History)
}{
	{name: "a hole in the log", want: check.Chain, says: "has the index 2", after: func(_ *story, h *check.History) {
		for _, e := range h.Server.Entries {
			e.Index, e.Entry.Index = e.Index+1, e.Entry.Index+1
		}
	}},
	{name: "an entry was altered", want: check.Chain, says: "not what its hash is of", after: func(_ *story, h *check.History) {
		h.Server.Entries[2].Hash[0] ^= 1
	}},
	{name: "a frame was altered", want: check.Chain, says: "does not name the frame before it", story: func(s *story) { s.sent, s.acked = 11, 11 }, after: func(_ *story, h *check.History) {
		last := h.Nodes[0].Frames[11]
		last.Event.PrevHash[0] ^= 1
		last.PrevHash = last.Event.PrevHash
		h.Nodes[0].Head.LastSeq = 11
	}},
	{name: "an acknowledged frame is not in the log", want: check.Kept, says: "was acknowledged, and is not in", story: func(s *story) { s.sent = 11 }},
	{name: "the end of a task never came", want: check.Kept, says: "the end of the task", story: func(s *story) {
		s.events, s.sent, s.acked = s.events[:5], 4, 4
		s.states[s.id(s.mount)], s.states[s.id(s.command)] = taskv1.TaskState_TASK_STATE_REFUSED, taskv1.TaskState_TASK_STATE_HELD
	}, after: func(s *story, h *check.History) {
		s.decide(h, s.mount, taskv1.TaskState_TASK_STATE_REFUSED)
		s.decide(h, s.command, taskv1.TaskState_TASK_STATE_HELD)
		h.Nodes[0].Head.LastSeq = 4 // it is written after the head was read
		h.Nodes[0].Tasks[s.id(s.command)].State = succeeded
	}},
	{name: "a mark is missing", want: check.Kept, says: "is not on the node", story: func(s *story) { s.effects[0].Count = 0 }},
	{name: "a row says another end", want: check.Rows, says: "its log says", story: func(s *story) { s.states[s.id(s.command)] = taskv1.TaskState_TASK_STATE_HELD }, after: func(s *story, h *check.History) {
		h.Nodes[0].Tasks[s.id(s.command)].State = succeeded
	}},
	{name: "a row is not there", want: check.Rows, says: "no such task", after: func(s *story, h *check.History) { delete(h.Server.Tasks, s.id(s.mount)) }},
	{name: "the node's record says another end", want: check.Rows, says: "the node's journal holds it as", after: func(s *story, h *check.History) {
		h.Nodes[0].Tasks[s.id(s.command)].State = taskv1.TaskState_TASK_STATE_FAILED
	}},
	{name: "an end after the end", want: check.Final, says: "says more of it", story: func(s *story) {
		s.insert(5, finishedAs(s.id(s.command), taskv1.TaskState_TASK_STATE_FAILED, s.events[4].GetFinished().GetSteps()...))
	}, after: func(s *story, h *check.History) {
		h.Nodes[0].Tasks[s.id(s.command)].State = taskv1.TaskState_TASK_STATE_FAILED
	}},
	{name: "the server ends a task again", want: check.Final, says: "makes it TASK_STATE_ABANDONED", after: func(s *story, h *check.History) {
		s.decide(h, s.command, taskv1.TaskState_TASK_STATE_ABANDONED)
	}},
	{name: "a step without an acceptance", want: check.Authorised, says: "nothing that was accepted", story: func(s *story) { s.remove(5) }},
	{name: "a forged signature", want: check.Authorised, says: "its signature does not hold", story: func(s *story) { s.env.Signatures[0].Signature[0] ^= 1 }},
	{name: "another node's task", want: check.Authorised, says: "is for node", story: func(s *story) {
		leaf := leafOf(s.t, s.command)
		leaf.Node = "gpu-002"
		env, leaves := s.cluster.Sign(s.t, leaf)
		a := s.events[1].GetAccepted()
		s.command, a.Envelope = leaves[0], env
		a.SignedLeaf, a.LeafHash = leaves[0], s.accepted(leaves[0]).GetAccepted().GetLeafHash()
	}},
	{name: "below the floor", want: check.Authorised, says: "the floor of journal", story: func(s *story) {
		s.events[0].GetJournalOpened().Floor = timestamppb.New(time.Now().Add(time.Minute))
	}},
	{name: "after its window", want: check.Authorised, says: "outside of its window", story: func(s *story) { s.events[3].WallTime = timestamppb.New(time.Now().Add(2 * time.Hour)) }},
	{name: "another kind", want: check.Authorised, says: "the plan is of kind", story: func(s *story) { s.events[2].GetPlanned().Plan.Kind = "system.reboot" }},
	{name: "an intent of nobody", want: check.Authorised, says: "not one that its task has set", story: func(s *story) { s.events[11].GetIntentChanged().TaskId = "" }},
	{name: "an intent of a task that failed", want: check.Authorised, says: "its task has not succeeded", story: func(s *story) {
		s.events[10].GetFinished().State = taskv1.TaskState_TASK_STATE_FAILED
		s.states[s.id(s.mount)] = taskv1.TaskState_TASK_STATE_FAILED
	}},
	{name: "a mark of no task", want: check.Authorised, says: "belongs to no task", story: func(s *story) { s.effects = append(s.effects, check.Effect{Node: nodeName, Key: "other", Count: 1}) }},
	{name: "it began before it was planned", want: check.Order, says: "started (frame 3) follows accepted", story: func(s *story) { s.events[2], s.events[3] = s.events[3], s.events[2] }},
	{name: "it succeeded without its steps", want: check.Order, says: "0 of 1 steps verified", story: func(s *story) { s.events[4].GetFinished().Steps = nil }},
	{name: "it was refused after it began", want: check.Order, says: "after its first step", story: func(s *story) {
		s.events[4].GetFinished().State, s.states[s.id(s.command)] = taskv1.TaskState_TASK_STATE_REFUSED, taskv1.TaskState_TASK_STATE_REFUSED
	}},
	{name: "a command was begun twice", want: check.Once, says: "begun 2 times", story: func(s *story) { s.events[4].GetFinished().Steps[0].Attempts = 2 }},
	{name: "a command ran as two units", want: check.Once, says: "as run-0 and as run-1", story: func(s *story) {
		s.insert(4, &taskv1.Event{Payload: &taskv1.Event_StepEnded{StepEnded: &taskv1.StepEnded{TaskId: s.id(s.command), Outcome: &taskv1.StepOutcome{
			Phase: verified, Attempts: 1, Command: &taskv1.CommandOutcome{InvocationId: "run-0"},
		}}}})
	}},
	{name: "two marks", want: check.Once, says: "ran 2 times", story: func(s *story) { s.effects[0].Count = 2 }},
	{name: "a task that never ends", want: check.Quiet, says: "still TASK_STATE_RUNNING", story: func(s *story) {
		s.events, s.sent, s.acked = s.events[:9], 9, 9
		s.states[s.id(s.mount)] = taskv1.TaskState_TASK_STATE_RUNNING
	}},
	{name: "an outbox that is not empty", want: check.Quiet, says: "11 of 12 frames", story: func(s *story) { s.sent, s.acked = 11, 11 }},
	{name: "a node that nobody speaks of", want: check.Quiet, says: "nothing says why", after: func(_ *story, h *check.History) { h.Nodes = nil }},
}

func (s *story) insert(at int, e *taskv1.Event) {
	s.events = slices.Insert(s.events, at, e)
	s.sent, s.acked = len(s.events), uint64(len(s.events))
}

func (s *story) remove(at int) {
	s.events = slices.Delete(s.events, at, at+1)
	s.sent, s.acked = len(s.events), uint64(len(s.events))
}

func (s *story) decide(h *check.History, l *taskv1.SignedLeaf, state taskv1.TaskState) {
	s.log(h.Server, &auditv1.LogEntry{Entry: &auditv1.LogEntry_TaskDecided{TaskDecided: &auditv1.TaskDecided{TaskId: s.id(l), Node: nodeName, State: state}}})
}

func TestDoctoredHistories(t *testing.T) {
	shown := map[string]bool{}
	for _, d := range doctored {
		t.Run(d.name, func(t *testing.T) {
			s := newStory(t)
			if d.story != nil {
				d.story(s)
			}
			h := s.history()
			if d.after != nil {
				d.after(s, h)
			}
			found := check.Check(h)
			hit := false
			for _, v := range found {
				hit = hit || v.Invariant == d.want && strings.Contains(v.String(), d.says)
				if v.Invariant != d.want && (d.name != "a step without an acceptance" || v.Invariant != check.Order) {
					t.Errorf("it breaks another invariant too: %v", v)
				}
			}
			if !hit {
				t.Errorf("Check() = %v, want %s with %q", found, d.want, d.says)
			}
			shown[d.want] = true
		})
	}
	for _, name := range check.Names() {
		if !shown[name] {
			t.Errorf("no history breaks %s", name)
		}
	}
}

func TestGone(t *testing.T) {
	s := newStory(t)
	s.events, s.sent, s.acked = s.events[:9], 9, 9
	s.states[s.id(s.mount)] = taskv1.TaskState_TASK_STATE_RUNNING
	h := s.history()
	h.Nodes, h.Gone = nil, map[string]string{nodeName: "its machine burnt"}
	if found := check.Check(h); len(found) != 0 {
		t.Errorf("Check() of a node that is gone = %v, want nothing", found)
	}
}

// TestLateWordOfALostJournal: what a stream of a lost journal still says of a
// task that is held for the loss does not bring it back, but its end counts.
func TestLateWordOfALostJournal(t *testing.T) {
	heldState := taskv1.TaskState_TASK_STATE_HELD
	for _, c := range []struct {
		name, reason, current string
		frames                int // of the twelve, how many came after all
		row                   taskv1.TaskState
		want                  string
	}{
		{"it goes on there", "JOURNAL_LOST", "journal-b", 9, heldState, ""},
		{"the server believed it", "JOURNAL_LOST", "journal-b", 9, taskv1.TaskState_TASK_STATE_RUNNING, "its log says TASK_STATE_HELD"},
		{"it has ended there", "JOURNAL_LOST", "journal-b", 11, succeeded, ""},
		{"the server did not hear its end", "JOURNAL_LOST", "journal-b", 11, heldState, "its log says TASK_STATE_SUCCEEDED"},
		{"the journal is back", "JOURNAL_LOST", journalID, 9, heldState, "its log says TASK_STATE_RUNNING"},
		{"it was held for another reason", "EVENTS_LOST", "journal-b", 9, heldState, "its log says TASK_STATE_RUNNING"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newStory(t)
			all := s.events
			s.events, s.sent, s.acked = s.events[:8], 8, 8
			s.states[s.id(s.mount)] = c.row
			h := s.history()
			s.log(h.Server, &auditv1.LogEntry{Entry: &auditv1.LogEntry_JournalChanged{JournalChanged: &auditv1.JournalChanged{Node: nodeName, OldJournalId: journalID, NewJournalId: c.current}}})
			s.log(h.Server, &auditv1.LogEntry{Entry: &auditv1.LogEntry_TaskDecided{TaskDecided: &auditv1.TaskDecided{TaskId: s.id(s.mount), Node: nodeName, State: heldState, Reason: c.reason}}})
			s.send(h.Server, all[8:c.frames])
			h.Nodes, h.Gone = nil, map[string]string{nodeName: "it has another journal"}
			found := check.Check(h)
			if c.want == "" && len(found) != 0 || c.want != "" && (len(found) != 1 || !strings.Contains(found[0].String(), c.want)) {
				t.Errorf("Check() = %v, want %q", found, c.want)
			}
		})
	}
}

func ExampleViolation() {
	fmt.Println(check.Violation{Invariant: check.Once, Node: "gpu-001", Task: "t1", What: "its command ran 2 times"})
	// Output: once: gpu-001, task t1: its command ran 2 times
}
