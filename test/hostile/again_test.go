package hostile_test

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/gpuaas/millwright/controlplane"
	"github.com/gpuaas/millwright/pki/envelope"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/test/harness"
)

// TestDeliveredAgain delivers a task that has ended: in the same session, in
// another epoch, from a server that never saw it, and under another signature.
// Each time the first outcome is told, and nothing runs.
func TestDeliveredAgain(t *testing.T) {
	w := newWorld(t)
	leaf := w.leaf("genuine")
	env, signed := w.one(leaf)
	s := w.s.Next()
	w.runs(s, env, signed, leaf.GetTaskId(), "genuine")
	first := w.s.Finished(leaf.GetTaskId())
	w.settled(s)
	record, machine := w.n.Journal(leaf.GetTaskId()), w.n.Dump()
	seq := w.known(s.Deliver("same session", env, signed), 0)

	// A server with an earlier epoch, which has none of the node's events.
	w.s.Stop()
	w.s = w.serve(0)
	s = w.s.Next()
	w.known(s.Deliver("another store", env, signed), seq)
	if diff := cmp.Diff(first, w.s.Finished(leaf.GetTaskId()), protocmp.Transform()); diff != "" {
		t.Errorf("another outcome is told (-first +again):\n%s", diff)
	}
	w.s.Stop()
	w.s = w.serve(s.Epoch + 7)
	s = w.s.Next()
	w.known(s.Deliver("another epoch", env, signed), seq)
	// The same leaf, in a set that was signed later.
	other, again := w.sign([]*taskv1.TaskLeaf{leaf}, func(w *envelope.Window) { w.NotAfter = w.NotAfter.Add(time.Hour) })
	w.known(s.Deliver("signed again", other, again[0]), seq)
	// What may no longer begin was carried out all the same.
	if err := os.WriteFile(filepath.Join(w.n.Dir, "policy.yaml"), []byte("version: 1\nrules: []\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	w.known(s.Deliver("denied by now", env, signed), seq)
	if err := os.WriteFile(filepath.Join(w.n.Dir, "policy.yaml"), []byte("version: 1\nrules: [{allow: \"*\"}]\n"), 0o600); err != nil {
		t.Fatal(err)
	}

	// Another task under its id.
	impostor := proto.CloneOf(leaf)
	impostor.Reason = "another one"
	env, leaves := w.sign([]*taskv1.TaskLeaf{impostor})
	if a := s.Deliver("impostor", env, leaves[0]); !refused(a, "ID_REUSED") {
		t.Errorf("another task under the id: answer %v, want it refused with ID_REUSED", a)
	}
	w.settled(s)
	if diff := cmp.Diff(record, w.n.Journal(leaf.GetTaskId()), protocmp.Transform()); diff != "" {
		t.Errorf("the journal has changed (-before +after):\n%s", diff)
	}
	if now := w.n.Dump(); now != machine || w.n.Runs(program, "genuine") != 1 {
		t.Errorf("the node was\n%s\nand is now\n%s", machine, now)
	}
}

// known asks that the answer is about a task that is known, and returns the
// number of the event with which it was accepted, which is seq unless that is 0.
func (w *world) known(a *agentv1.AssignmentAnswer, seq uint64) uint64 {
	w.t.Helper()
	got := a.GetAccepted()
	if !got.GetKnown() || got.GetSeq() == 0 || seq != 0 && got.GetSeq() != seq {
		w.t.Errorf("%s: answer %v, want that it is known since event %d", a.GetAssignmentId(), a, seq)
	}
	return got.GetSeq()
}

// TestOtherEpochs sends messages of earlier and later sessions than the one
// that there is.
func TestOtherEpochs(t *testing.T) {
	w := newWorld(t)
	leaf := w.leaf("genuine")
	env, signed := w.one(leaf)
	s := w.s.Next()
	w.settled(s)
	before := w.snapshot()
	for _, epoch := range []uint64{s.Epoch - 1, s.Epoch + 1, 1 << 63} {
		for _, m := range []*agentv1.SessionResponse{
			{Message: &agentv1.SessionResponse_Assignment{Assignment: &agentv1.Assignment{AssignmentId: "other epoch", Envelope: env, SignedLeaf: signed}}},
			{Message: &agentv1.SessionResponse_Ack{Ack: &agentv1.EventAck{JournalId: s.Hello.GetJournalId(), Seq: 1}}},
			{Message: &agentv1.SessionResponse_Ack{Ack: &agentv1.EventAck{JournalId: s.Hello.GetJournalId(), Seq: 1 << 40}}},
			{Message: &agentv1.SessionResponse_Goodbye{Goodbye: &agentv1.Goodbye{Reason: "EVICTED"}}},
		} {
			m.SessionEpoch = epoch
			s.Send(m)
		}
	}
	// What comes next is answered, in the same session, and nothing else is.
	w.mustRefuse(s, "after them", env, nil)
	w.unchanged(before)
	w.runs(s, env, signed, leaf.GetTaskId(), "genuine")
}

// TestWindowPassed lets the node see a task after its window, which the server
// believes open, since its clock is behind. That it expired is the node's word.
func TestWindowPassed(t *testing.T) {
	behind := func() time.Time { return time.Now().Add(-30 * time.Second) }
	c := harness.New(t, func(cfg *controlplane.Config) { cfg.Now = behind })
	n := c.NewNode("gpu-001")
	if err := n.Do("program " + program); err != nil {
		t.Fatal(err)
	}
	w := &world{t: t, c: c, n: n}
	n.Start()
	n.Connected()
	n.Cut()
	leaf := w.leaf("late")
	window := c.Window()
	window.NotAfter = time.Now().Add(2 * time.Second)
	env, leaves, err := envelope.SignTaskSet(window, []*taskv1.TaskLeaf{leaf}, c.Key())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Tasks.CreateTasks(t.Context(), &taskv1.CreateTasksRequest{RequestId: uuid.NewString(), Envelope: env, Leaves: leaves}); err != nil {
		t.Fatal(status.Convert(err).Details(), err)
	}
	<-time.After(time.Until(window.NotAfter))
	n.Heal()
	task := c.Reached(leaf.GetTaskId(), taskv1.TaskState_TASK_STATE_SUCCEEDED)
	if task.GetState() != taskv1.TaskState_TASK_STATE_EXPIRED || task.GetReason() != "WINDOW_PASSED" {
		t.Errorf("task = %v, want it expired", task)
	}
	events, err := c.Tasks.ListTaskEvents(t.Context(), &taskv1.ListTaskEventsRequest{Id: leaf.GetTaskId()})
	if err != nil {
		t.Fatal(err)
	}
	if all := events.GetEvents(); all[len(all)-1].GetType() != "REFUSED" && all[len(all)-1].GetType() != "EXPIRED" {
		t.Errorf("its last event is %v, want the node's refusal", all[len(all)-1])
	}
	if n.Started() != 0 || n.Journal(leaf.GetTaskId()) != nil {
		t.Errorf("%d processes were started, and the journal has %v", n.Started(), n.Journal(leaf.GetTaskId()))
	}
}
