package controlplane_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/millwright/pki/envelope"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	storagev1 "github.com/gpuaas/millwright/proto/millwright/storage/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

func TestLostJournalHoldsWhatWasSent(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.join("n1")
	h.credits = 3
	h.connect()
	tasks := w.create(w.leaf("n1"), w.leaf("n1"), w.leaf("n1"), w.leaf("n1"))
	accepted, finishedID, assigned, queued := tasks[0].GetId(), tasks[1].GetId(), tasks[2].GetId(), tasks[3].GetId()
	h.accept(h.assignment(accepted))
	h.accept(h.assignment(finishedID))
	h.assignment(assigned)
	h.credits = 0 // so that the last one stays in the queue
	h.send(&agentv1.SessionRequest{Message: &agentv1.SessionRequest_Credits{Credits: &agentv1.Credits{}}})
	h.finish(finishedID, taskv1.TaskState_TASK_STATE_SUCCEEDED)
	h.hangUp()
	h.newJournal()
	h.connect()
	for _, id := range []string{accepted, assigned} {
		task := w.task(id)
		if task.GetState() != taskv1.TaskState_TASK_STATE_HELD || task.GetReason() != "JOURNAL_LOST" || !strings.Contains(task.GetMessage(), "millctl task resolve "+id) {
			t.Errorf("task = %v", task)
		}
	}
	if got := w.task(finishedID).GetState(); got != taskv1.TaskState_TASK_STATE_SUCCEEDED {
		t.Errorf("a task that had ended is %s", got)
	}
	if got := w.task(queued).GetState(); got != taskv1.TaskState_TASK_STATE_QUEUED {
		t.Errorf("a task that was never sent is %s", got)
	}
	if c := condition(w.node("n1").GetConditions(), "IntentsLost"); c != nil {
		t.Errorf("commands leave no intents: %v", c)
	}
}

func TestLostIntentsAreToldUntilSetAgain(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.join("n1")
	h.kinds = append(h.kinds, &agentv1.KindSupport{Kind: "storage.unmount", Revision: 1})
	h.connect()
	begin := func(leaf *taskv1.TaskLeaf) string {
		id := w.create(leaf)[0].GetId()
		h.accept(h.assignment(id))
		return id
	}
	mount := func(target string) *taskv1.TaskLeaf {
		leaf := w.leaf("n1")
		leaf.Kind = "storage.mount"
		leaf.Spec = must(proto.Marshal(&storagev1.MountSpec{Target: target, Source: &storagev1.MountSpec_Bind{Bind: &storagev1.BindSource{Path: "/srv"}}}))(t)
		return leaf
	}
	unmount := func(target string) *taskv1.TaskLeaf {
		leaf := w.leaf("n1")
		leaf.Kind = "storage.unmount"
		leaf.Spec = must(proto.Marshal(&storagev1.UnmountSpec{Target: target}))(t)
		return leaf
	}
	lost := func(want ...string) {
		t.Helper()
		c := condition(w.node("n1").GetConditions(), "IntentsLost")
		if len(want) == 0 {
			if c != nil {
				t.Errorf("condition = %v, want none", c)
			}
			return
		}
		for _, target := range []string{"/a", "/b", "/c", "/d", "/p"} {
			if got := strings.Contains(c.GetMessage(), "mount:"+target); got != slices.Contains(want, target) {
				t.Errorf("condition = %v, want it to name %v", c, want)
			}
		}
	}
	loseJournal := func() {
		h.hangUp()
		h.newJournal()
		h.connect()
	}
	plan := mount("/p")
	plan.Mode = taskv1.Mode_MODE_PLAN
	for _, leaf := range []*taskv1.TaskLeaf{mount("/a"), mount("/b"), mount("/c"), unmount("/c"), plan} {
		h.finish(begin(leaf), taskv1.TaskState_TASK_STATE_SUCCEEDED)
	}
	inFlight := begin(mount("/d"))
	lost()
	loseJournal()
	lost("/a", "/b", "/d")
	if got := w.task(inFlight).GetReason(); got != "JOURNAL_LOST" {
		t.Errorf("the task in flight has the reason %q", got)
	}

	h.finish(begin(mount("/a")), taskv1.TaskState_TASK_STATE_FAILED)
	lost("/a", "/b", "/d")
	h.finish(begin(mount("/a")), taskv1.TaskState_TASK_STATE_SUCCEEDED)
	h.finish(begin(unmount("/b")), taskv1.TaskState_TASK_STATE_SUCCEEDED)
	lost("/d")
	loseJournal()
	lost("/a", "/d")
	h.finish(begin(mount("/d")), taskv1.TaskState_TASK_STATE_SUCCEEDED)
	h.finish(begin(unmount("/a")), taskv1.TaskState_TASK_STATE_SUCCEEDED)
	lost()

	loseJournal()
	lost("/d")
	w.join("n1").connect()
	lost()
}

func TestResolveOfATaskThatTheNodeHasForgotten(t *testing.T) {
	t.Parallel()
	for as, want := range map[taskv1.ResolveAs]taskv1.TaskState{
		taskv1.ResolveAs_RESOLVE_AS_ABANDON: taskv1.TaskState_TASK_STATE_ABANDONED,
		taskv1.ResolveAs_RESOLVE_AS_ACCEPT:  taskv1.TaskState_TASK_STATE_SUCCEEDED,
	} {
		t.Run(as.String(), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			h := w.join("n1")
			h.connect()
			lost := w.create(w.leaf("n1"))[0]
			h.accept(h.assignment(lost.GetId()))
			h.hangUp()
			h.newJournal()
			h.credits = 0 // a resolve needs none
			h.connect()
			leaf := w.leaf("n1")
			leaf.Kind = "task.resolve"
			leaf.Spec = must(proto.Marshal(&taskv1.ResolveSpec{TaskId: lost.GetId(), LeafHash: lost.GetLeafHash(), As: as}))(t)
			resolve := w.create(leaf)[0].GetId()
			h.accept(h.assignment(resolve))
			h.run(resolve)
			task := w.task(lost.GetId())
			if task.GetState() != want || task.GetAssertedBy() != "spiffe://test.example/operator/alice" {
				t.Errorf("task = %v, want %s", task, want)
			}
		})
	}
}

func TestTwoHostsUnderOneIdentity(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.join("n1")
	h.connect()
	first, second := h.instance, uuid.NewString()
	h.instance = second
	h.connect() // may be the same host with new state
	holder := *h
	h.instance = first
	isDuplicate := func(m *agentv1.SessionResponse) bool { return m.GetGoodbye().GetReason() == "DUPLICATE_IDENTITY" }
	// The last Hello of a host that has booted since may come late.
	if m := h.open(); m.GetGoodbye().GetReason() != "SUPERSEDED" {
		t.Fatalf("the host that came back got %v", m)
	}
	if c := condition(w.node("n1").GetConditions(), "DuplicateIdentity"); c != nil {
		t.Errorf("one late Hello makes %v", c)
	}
	id := w.create(w.leaf("n1"))[0].GetId()
	holder.accept(holder.assignment(id)) // it still has its session
	if m := h.open(); !isDuplicate(m) {
		t.Fatalf("the host that came back again got %v", m)
	}
	holder.next("a Goodbye", isDuplicate)
	h.instance = second
	if m := h.open(); !isDuplicate(m) {
		t.Errorf("the other host got %v", m)
	}
	if c := condition(w.node("n1").GetConditions(), "DuplicateIdentity"); c == nil {
		t.Errorf("conditions = %v", w.node("n1").GetConditions())
	}
	again := w.join("n1")
	again.connect()
	if c := condition(w.node("n1").GetConditions(), "DuplicateIdentity"); c != nil {
		t.Errorf("a new enrolment leaves %v", c)
	}
}

func TestFramesAreTakenOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.join("n1")
	h.connect()
	id := w.create(w.leaf("n1"))[0].GetId()
	h.accept(h.assignment(id))
	h.run(id)
	before := w.history(id)
	h.sendFrames(false, h.frames...)
	h.acked(h.lastSeq())
	if diff := cmp.Diff(before, w.history(id)); diff != "" {
		t.Errorf("history (-before +after):\n%s", diff)
	}
}

func TestMissingFramesAreAskedFor(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.join("n1")
	h.connect()
	for range 3 {
		h.emit(&taskv1.Event{Payload: &taskv1.Event_IntentChanged{IntentChanged: &taskv1.IntentChanged{Key: "mount:/x"}}})
	}
	h.sendFrames(false, h.frames[2:]...)
	m := h.next("a request to send again", func(m *agentv1.SessionResponse) bool { return m.GetResend() != nil })
	if got := m.GetResend().GetFromSeq(); got != 2 {
		t.Errorf("asked from %d, want 2", got)
	}
	h.flush(2)
}

func TestGapThatTheNodeCannotFill(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.join("n1")
	h.connect()
	for range 4 {
		h.emit(&taskv1.Event{Payload: &taskv1.Event_IntentChanged{IntentChanged: &taskv1.IntentChanged{Key: "mount:/x"}}})
	}
	h.hangUp()
	h.frames, h.first = h.frames[3:], 4
	h.connect() // sends with gap_before
	if c := condition(w.node("n1").GetConditions(), "JournalGap"); !strings.Contains(c.GetMessage(), "events 2 to 3") {
		t.Errorf("condition = %v", c)
	}
	h.assignment(w.create(w.leaf("n1"))[0].GetId())
}

// TestTaskThatWasAcceptedInAGap has a node that took a task and ended it, and can
// no longer send the events. The task is neither sent for ever nor lost.
func TestTaskThatWasAcceptedInAGap(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.join("n1")
	h.connect()
	task := w.create(w.leaf("n1"))[0]
	id := task.GetId()
	a := h.assignment(id)
	h.hangUp()
	acceptSeq := h.emit(acceptedEvent(a))
	h.emit(finished(id, taskv1.TaskState_TASK_STATE_SUCCEEDED))
	last := h.emit(&taskv1.Event{Payload: &taskv1.Event_IntentChanged{IntentChanged: &taskv1.IntentChanged{Key: "mount:/x"}}})
	h.frames, h.first = h.frames[last-1:], last
	h.connect() // sends with gap_before
	h.answer(h.assignment(id), &agentv1.AssignmentAnswer{Answer: &agentv1.AssignmentAnswer_Accepted{Accepted: &agentv1.Accepted{
		JournalId: h.journal, Seq: acceptSeq, Known: true}}})
	got := w.waitState(id, taskv1.TaskState_TASK_STATE_HELD)
	if got.GetReason() != "EVENTS_LOST" || !strings.Contains(got.GetMessage(), "millctl task resolve "+id) {
		t.Errorf("task = %v", got)
	}
	h.hangUp()
	h.connect()
	h.none("an assignment", func(m *agentv1.SessionResponse) bool { return m.GetAssignment() != nil })
	leaf := w.leaf("n1")
	leaf.Kind = "task.resolve"
	leaf.Spec = must(proto.Marshal(&taskv1.ResolveSpec{TaskId: id, LeafHash: task.GetLeafHash(), As: taskv1.ResolveAs_RESOLVE_AS_ABANDON}))(t)
	resolve := w.create(leaf)[0].GetId()
	h.accept(h.assignment(resolve))
	h.finish(resolve, taskv1.TaskState_TASK_STATE_REFUSED) // it has ended there
	w.waitState(id, taskv1.TaskState_TASK_STATE_ABANDONED)
}

// TestKnownTaskWhoseEventIsOnTheWay is answered as known before its events come.
func TestKnownTaskWhoseEventIsOnTheWay(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.join("n1")
	h.connect()
	id := w.create(w.leaf("n1"))[0].GetId()
	a := h.assignment(id)
	h.answer(a, &agentv1.AssignmentAnswer{Answer: &agentv1.AssignmentAnswer_Accepted{Accepted: &agentv1.Accepted{
		JournalId: h.journal, Seq: h.lastSeq() + 1, Known: true}}})
	h.report(acceptedEvent(a))
	if diff := cmp.Diff([]string{"CREATED", "ASSIGNED", "ACCEPTED"}, w.history(id)); diff != "" {
		t.Errorf("history (-want +got):\n%s", diff)
	}
}

func TestForkIsRecordedAndStopsWork(t *testing.T) {
	t.Parallel()
	for name, forge := range map[string]func(h *host){
		"same seq, other bytes": func(h *host) {
			e := &taskv1.Event{}
			_ = proto.Unmarshal(h.frames[0], e)
			e.BootId = "another"
			h.sendFrames(false, must(proto.Marshal(e))(h.w.t))
		},
		"next seq, other chain": func(h *host) {
			h.emit(&taskv1.Event{Payload: &taskv1.Event_IntentChanged{IntentChanged: &taskv1.IntentChanged{Key: "mount:/x"}}})
			e := &taskv1.Event{}
			_ = proto.Unmarshal(h.frames[1], e)
			e.PrevHash = make([]byte, 32)
			h.sendFrames(false, must(proto.Marshal(e))(h.w.t))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			h := w.join("n1")
			h.connect()
			forge(h)
			w.eventually("the fork is told", func() bool { return condition(w.node("n1").GetConditions(), "JournalFork") != nil })
			w.create(w.leaf("n1"))
			h.sendFrames(false, h.frames[0])
			h.none("an assignment", func(m *agentv1.SessionResponse) bool { return m.GetAssignment() != nil })
			if got := w.node("n1").GetAcknowledgedSeq(); got != 1 {
				t.Errorf("acknowledged %d frames, want 1", got)
			}
		})
	}
}

func TestJournalThatWentBackGetsNoWork(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.join("n1")
	h.connect()
	h.report(&taskv1.Event{Payload: &taskv1.Event_IntentChanged{IntentChanged: &taskv1.IntentChanged{Key: "mount:/x"}}})
	h.hangUp()
	h.frames = h.frames[:1]
	h.connect()
	if got := h.welcome.GetResendFrom(); got != 3 {
		t.Errorf("resend_from = %d, want 3: by it the node sees that it went back", got)
	}
	w.create(w.leaf("n1"))
	h.none("an assignment", func(m *agentv1.SessionResponse) bool { return m.GetAssignment() != nil })
	if c := condition(w.node("n1").GetConditions(), "JournalBehind"); c == nil {
		t.Errorf("conditions = %v", w.node("n1").GetConditions())
	}
}

func TestUnknownAndImpossibleEventsAreStoredAndAcknowledged(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h, other := w.join("n1"), w.join("n2")
	h.connect()
	other.connect()
	id := w.create(w.leaf("n1"))[0].GetId()
	h.accept(h.assignment(id))
	future := &taskv1.Event{}
	future.ProtoReflect().SetUnknown([]byte{0xfa, 0x07, 0x02, 'h', 'i'}) // field 127
	h.report(future)
	if c := condition(w.node("n1").GetConditions(), "EventsNotApplied"); c != nil {
		t.Errorf("an unknown event raised %v", c)
	}
	other.report(finished(id, taskv1.TaskState_TASK_STATE_FAILED))
	if c := condition(w.node("n2").GetConditions(), "EventsNotApplied"); !strings.Contains(c.GetMessage(), "belongs to another node") {
		t.Errorf("condition = %v", c)
	}
	if got := w.task(id).GetState(); got != taskv1.TaskState_TASK_STATE_ACCEPTED {
		t.Errorf("another node made the task %s", got)
	}
	h.report(finished(id, taskv1.TaskState_TASK_STATE_RUNNING))
	if c := condition(w.node("n1").GetConditions(), "EventsNotApplied"); c == nil {
		t.Error("an end that is none raised no condition")
	}
}

func TestRestoredFromTheNode(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.join("n1")
	h.connect()
	leaf := w.leaf("n1")
	env, signed := w.cluster.Sign(t, leaf)
	token := w.watchToken()
	h.report(acceptedEvent(&agentv1.Assignment{Envelope: env, SignedLeaf: signed[0]}))
	task := w.task(leaf.GetTaskId())
	hash := envelope.LeafHash(signed[0].GetLeaf())
	if task.GetState() != taskv1.TaskState_TASK_STATE_ACCEPTED || string(task.GetLeafHash()) != string(hash[:]) || task.GetSpec() == nil {
		t.Errorf("restored task = %v", task)
	}
	h.run(leaf.GetTaskId())
	w.waitState(leaf.GetTaskId(), taskv1.TaskState_TASK_STATE_SUCCEEDED)
	stream, err := w.tasks.WatchTasks(w.ctx(), &taskv1.WatchTasksRequest{ResumeToken: token})
	if err == nil {
		_, err = stream.Recv()
	}
	if status.Code(err) != codes.OutOfRange {
		t.Errorf("a watch from before the log was found to have gone back: %v", err)
	}

	forged := w.leaf("n1")
	env, signed = w.cluster.Sign(t, forged)
	env.Signatures[0].Signature[0] ^= 1
	h.report(acceptedEvent(&agentv1.Assignment{Envelope: env, SignedLeaf: signed[0]}))
	if _, err := w.tasks.GetTask(w.ctx(), &taskv1.GetTaskRequest{Id: forged.GetTaskId()}); status.Code(err) != codes.NotFound {
		t.Errorf("a node invented a task: %v", err)
	}
}
