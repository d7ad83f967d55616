package controlplane_test

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/gpuaas/millwright/controlplane"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	nodev1 "github.com/gpuaas/millwright/proto/millwright/node/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

func condition(list []*taskv1.Condition, kind string) *taskv1.Condition {
	for _, c := range list {
		if c.GetType() == kind {
			return c
		}
	}
	return nil
}

func (w *world) node(name string) *nodev1.Node {
	w.t.Helper()
	resp, err := w.nodes.GetNode(w.ctx(), &nodev1.GetNodeRequest{Name: name})
	if err != nil {
		w.t.Fatalf("GetNode(%s): %v", name, err)
	}
	return resp.GetNode()
}

func TestDeferredGoesBackToTheQueueAndIsTriedAgain(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.join("n1")
	h.connect()
	id := w.create(w.leaf("n1"))[0].GetId()
	h.answer(h.assignment(id), &agentv1.AssignmentAnswer{Answer: &agentv1.AssignmentAnswer_Deferred{Deferred: &agentv1.Deferred{
		Reason: "DISK_FULL", Message: "make room", RetryAfter: durationpb.New(time.Second)}}})
	task := w.waitState(id, taskv1.TaskState_TASK_STATE_QUEUED)
	if c := condition(task.GetConditions(), "Deferred"); c.GetReason() != "DISK_FULL" || c.GetMessage() != "make room" {
		t.Errorf("conditions = %v", task.GetConditions())
	}
	second := h.assignment(id)
	h.accept(second)
	task = w.task(id)
	if task.GetState() != taskv1.TaskState_TASK_STATE_ACCEPTED || len(task.GetConditions()) != 0 {
		t.Errorf("after the second try: %v", task)
	}
}

func TestRefused(t *testing.T) {
	t.Parallel()
	for reason, want := range map[string]taskv1.TaskState{
		"POLICY_DENIED": taskv1.TaskState_TASK_STATE_REFUSED,
		"WINDOW_PASSED": taskv1.TaskState_TASK_STATE_EXPIRED,
	} {
		t.Run(reason, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			h := w.join("n1")
			h.connect()
			id := w.create(w.leaf("n1"))[0].GetId()
			h.answer(h.assignment(id), &agentv1.AssignmentAnswer{Answer: &agentv1.AssignmentAnswer_Refused{Refused: &agentv1.Refused{
				Reason: reason, Message: "rule 3"}}})
			task := w.waitState(id, want)
			if task.GetReason() != reason || task.GetMessage() != "rule 3" || task.GetUndo() != taskv1.UndoState_UNDO_STATE_NOT_NEEDED || task.GetEndTime() == nil {
				t.Errorf("task = %v", task)
			}
		})
	}
}

func TestCreditsBoundWhatIsSent(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.join("n1")
	h.credits = 2
	h.connect()
	tasks := w.create(w.leaf("n1"), w.leaf("n1"), w.leaf("n1"))
	first, second := h.assignment(tasks[0].GetId()), h.assignment(tasks[1].GetId())
	h.accept(first)
	h.accept(second)
	isAssignment := func(m *agentv1.SessionResponse) bool { return m.GetAssignment() != nil }
	h.none("a third assignment", isAssignment)
	h.finish(tasks[0].GetId(), taskv1.TaskState_TASK_STATE_FAILED)
	h.assignment(tasks[2].GetId())
}

func TestHeldTaskKeepsNoCredit(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.join("n1")
	h.credits = 1
	h.connect()
	tasks := w.create(w.leaf("n1"), w.leaf("n1"))
	h.accept(h.assignment(tasks[0].GetId()))
	h.report(&taskv1.Event{Payload: &taskv1.Event_Held{Held: &taskv1.TaskHeld{TaskId: tasks[0].GetId(), Reason: "OUTCOME_UNKNOWN", Message: "look"}}})
	if got := w.task(tasks[0].GetId()); got.GetState() != taskv1.TaskState_TASK_STATE_HELD || got.GetReason() != "OUTCOME_UNKNOWN" {
		t.Errorf("task = %v", got)
	}
	h.assignment(tasks[1].GetId())
}

func TestAssignmentThatWasNotAcceptedIsSentAgain(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.join("n1")
	h.connect()
	id := w.create(w.leaf("n1"))[0].GetId()
	h.assignment(id)
	h.hangUp()
	w.waitState(id, taskv1.TaskState_TASK_STATE_ASSIGNED) // the server decides nothing while the node is away
	h.connect()
	h.accept(h.assignment(id))
	want := []string{"CREATED", "ASSIGNED", "REQUEUED", "ASSIGNED", "ACCEPTED"}
	if diff := cmp.Diff(want, w.history(id)); diff != "" {
		t.Errorf("history (-want +got):\n%s", diff)
	}
}

func TestAcceptedBeforeTheSessionBrokeIsNotSentAgain(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.join("n1")
	h.connect()
	id := w.create(w.leaf("n1"))[0].GetId()
	a := h.assignment(id)
	h.hangUp()
	h.emit(acceptedEvent(a)) // durable on the node; the server has not heard
	if m := h.open(); m.GetWelcome() == nil {
		t.Fatalf("got %v", m)
	} else {
		h.welcome, h.epoch = m.GetWelcome(), m.GetWelcome().GetSessionEpoch()
	}
	h.none("an assignment before the events", func(m *agentv1.SessionResponse) bool { return m.GetAssignment() != nil })
	if diff := cmp.Diff([]string{"CREATED", "ASSIGNED"}, w.history(id)); diff != "" {
		t.Errorf("before the events came, history (-want +got):\n%s", diff)
	}
	h.flush(h.welcome.GetResendFrom())
	h.none("an assignment", func(m *agentv1.SessionResponse) bool { return m.GetAssignment() != nil })
	if got := w.task(id).GetState(); got != taskv1.TaskState_TASK_STATE_ACCEPTED {
		t.Errorf("the task is %s, want ACCEPTED", got)
	}
}

func TestNewestStreamWins(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.join("n1")
	h.connect()
	older := *h
	h.connect()
	older.next("a Goodbye", func(m *agentv1.SessionResponse) bool { return m.GetGoodbye().GetReason() == "SUPERSEDED" })
	if h.epoch <= older.epoch {
		t.Errorf("epochs %d, then %d", older.epoch, h.epoch)
	}
	id := w.create(w.leaf("n1"))[0].GetId()
	h.assignment(id)
}

// What was meant for another session is late, however right it is by itself.
func TestMessagesOfAnotherSessionCountForNothing(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.join("n1")
	h.credits = 2
	h.connect()
	h.connect()
	tasks := w.create(w.leaf("n1"), w.leaf("n1"), w.leaf("n1"))
	running, sent, queued := tasks[0].GetId(), tasks[1].GetId(), tasks[2].GetId()
	h.accept(h.assignment(running))
	assigned := h.assignment(sent)
	h.emit(finished(running, taskv1.TaskState_TASK_STATE_SUCCEEDED))
	epoch := h.epoch
	for _, other := range []uint64{0, epoch - 1, epoch + 1} {
		h.epoch = other
		h.sendFrames(false, h.frames[len(h.frames)-1])
		h.answer(assigned, &agentv1.AssignmentAnswer{Answer: &agentv1.AssignmentAnswer_Deferred{Deferred: &agentv1.Deferred{Reason: "LATE"}}})
		h.send(&agentv1.SessionRequest{Message: &agentv1.SessionRequest_Credits{Credits: &agentv1.Credits{Credits: 9}}})
		h.send(&agentv1.SessionRequest{Message: &agentv1.SessionRequest_Heartbeat{Heartbeat: &agentv1.Heartbeat{
			HasConditions: true, Conditions: []*taskv1.Condition{{Type: "Late"}}}}})
	}
	h.epoch = epoch
	h.none("an assignment beyond the credits", func(m *agentv1.SessionResponse) bool { return m.GetAssignment() != nil })
	for id, want := range map[string]taskv1.TaskState{
		running: taskv1.TaskState_TASK_STATE_ACCEPTED, sent: taskv1.TaskState_TASK_STATE_ASSIGNED, queued: taskv1.TaskState_TASK_STATE_QUEUED,
	} {
		if got := w.task(id).GetState(); got != want {
			t.Errorf("a message of another session made a task %s, want %s", got, want)
		}
	}
	if c := condition(w.node("n1").GetConditions(), "Late"); c != nil {
		t.Errorf("a heartbeat of another session is shown: %v", c)
	}
	h.flush(h.lastSeq())
	if got := w.task(running).GetState(); got != taskv1.TaskState_TASK_STATE_SUCCEEDED {
		t.Errorf("in its own session the same frame leaves the task %s", got)
	}
}

func TestTerminalStatesNeverChange(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.join("n1")
	h.connect()
	id := w.create(w.leaf("n1"))[0].GetId()
	h.accept(h.assignment(id))
	h.finish(id, taskv1.TaskState_TASK_STATE_FAILED)
	before := w.task(id)
	h.report(finished(id, taskv1.TaskState_TASK_STATE_SUCCEEDED))
	h.report(&taskv1.Event{Payload: &taskv1.Event_Started{Started: &taskv1.TaskStarted{TaskId: id}}})
	if !proto.Equal(before, w.task(id)) {
		t.Errorf("the task changed from %v to %v", before, w.task(id))
	}
	events := w.events(id)
	for _, ev := range events[len(events)-2:] {
		if !ev.GetLate() || ev.GetState() != taskv1.TaskState_TASK_STATE_FAILED {
			t.Errorf("late report in the history: %v", ev)
		}
	}
}

func TestCancel(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	queued := w.join("n2")
	h := w.join("n1")
	h.connect()
	idQueued := w.create(w.leaf("n2"))[0].GetId()
	resp, err := w.tasks.CancelTask(w.ctx(), &taskv1.CancelTaskRequest{Id: idQueued, Reason: "not needed"})
	if err != nil || resp.GetTask().GetState() != taskv1.TaskState_TASK_STATE_CANCELLED {
		t.Fatalf("CancelTask of a queued task = %v, %v", resp, err)
	}
	_, err = w.tasks.CancelTask(w.ctx(), &taskv1.CancelTaskRequest{Id: idQueued})
	if status.Code(err) != codes.FailedPrecondition {
		t.Errorf("CancelTask of a cancelled task = %v", err)
	}
	queued.connect()
	queued.none("an assignment", func(m *agentv1.SessionResponse) bool { return m.GetAssignment() != nil })

	id := w.create(w.leaf("n1"))[0].GetId()
	h.accept(h.assignment(id))
	resp, err = w.tasks.CancelTask(w.ctx(), &taskv1.CancelTaskRequest{Id: id, Reason: "stop"})
	if err != nil || resp.GetTask().GetState() != taskv1.TaskState_TASK_STATE_ACCEPTED || !resp.GetTask().GetCancelRequested() {
		t.Fatalf("CancelTask of an accepted task = %v, %v", resp, err)
	}
	isCancel := func(m *agentv1.SessionResponse) bool { return m.GetCancel().GetTaskId() == id }
	m := h.next("a request to cancel", isCancel)
	if m.GetCancel().GetReason() != "stop" || m.GetCancel().GetRequestedBy() != "spiffe://test.example/operator/alice" {
		t.Errorf("cancel = %v", m)
	}
	h.connect()
	h.next("the request to cancel again", isCancel)
	h.finish(id, taskv1.TaskState_TASK_STATE_CANCELLED)
	if got := w.task(id).GetState(); got != taskv1.TaskState_TASK_STATE_CANCELLED {
		t.Errorf("task is %s", got)
	}
}

func TestCancelOfAnAssignedTaskThatIsDeferred(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.join("n1")
	h.connect()
	id := w.create(w.leaf("n1"))[0].GetId()
	a := h.assignment(id)
	if _, err := w.tasks.CancelTask(w.ctx(), &taskv1.CancelTaskRequest{Id: id}); err != nil {
		t.Fatal(err)
	}
	h.answer(a, &agentv1.AssignmentAnswer{Answer: &agentv1.AssignmentAnswer_Deferred{Deferred: &agentv1.Deferred{Reason: "SAFE_MODE"}}})
	w.waitState(id, taskv1.TaskState_TASK_STATE_CANCELLED)
}

func TestQueuedTaskExpires(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.join("n1")
	leaf := w.leaf("n1")
	if _, err := w.tasks.CreateTasks(w.ctx(), w.short(time.Now().Add(3*time.Second), leaf)); err != nil {
		t.Fatal(err)
	}
	task := w.waitState(leaf.GetTaskId(), taskv1.TaskState_TASK_STATE_EXPIRED)
	if task.GetReason() != "WINDOW_PASSED" || task.GetMessage() == "" {
		t.Errorf("task = %v", task)
	}
}

func TestSentTaskDoesNotExpireOnTheServer(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h, marker := w.join("n1"), w.join("n2")
	_ = marker
	h.connect()
	end := time.Now().Add(3 * time.Second)
	sent, queued := w.leaf("n1"), w.leaf("n2")
	if _, err := w.tasks.CreateTasks(w.ctx(), w.short(end, sent, queued)); err != nil {
		t.Fatal(err)
	}
	h.assignment(sent.GetTaskId())
	w.waitState(queued.GetTaskId(), taskv1.TaskState_TASK_STATE_EXPIRED)
	if got := w.task(sent.GetTaskId()).GetState(); got != taskv1.TaskState_TASK_STATE_ASSIGNED {
		t.Errorf("the task that was sent is %s; only the node's word ends it", got)
	}
}

func TestEvict(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.join("n1")
	h.credits = 1
	h.connect()
	tasks := w.create(w.leaf("n1"), w.leaf("n1"))
	h.accept(h.assignment(tasks[0].GetId()))
	if _, err := w.nodes.EvictNode(w.ctx(), &nodev1.EvictNodeRequest{Name: "n1", Reason: "stolen"}); err != nil {
		t.Fatal(err)
	}
	h.next("a Goodbye", func(m *agentv1.SessionResponse) bool { return m.GetGoodbye().GetReason() == "EVICTED" })
	if got := w.task(tasks[0].GetId()); got.GetState() != taskv1.TaskState_TASK_STATE_ABANDONED || got.GetReason() != "NODE_EVICTED" || got.GetAssertedBy() != "" {
		t.Errorf("the task that was sent: %v", got)
	}
	if got := w.task(tasks[1].GetId()).GetState(); got != taskv1.TaskState_TASK_STATE_CANCELLED {
		t.Errorf("the task that was not sent is %s", got)
	}
	for range h.inbox {
	}
	stream, err := agentv1.NewAgentServiceClient(h.conn).Session(w.ctx())
	if err == nil {
		_, err = stream.Recv()
	}
	if status.Code(err) != codes.PermissionDenied || !strings.Contains(err.Error(), "evicted") {
		t.Errorf("a session of an evicted node: %v", err)
	}
	w.restart() // and it stays so
	again := w.join("n1")
	again.connect()
	if got := w.node("n1"); got.GetState() != nodev1.NodeState_NODE_STATE_CONNECTED || got.GetGeneration() != 2 {
		t.Errorf("after it joined again: %v", got)
	}
}

func TestHeartbeats(t *testing.T) {
	t.Parallel()
	w := newWorldWith(t, func(c *controlplane.Config) { c.Heartbeat = time.Second })
	h := w.join("n1")
	h.connect()
	h.next("a heartbeat", func(m *agentv1.SessionResponse) bool { return m.GetHeartbeat() != nil })
	h.send(&agentv1.SessionRequest{Message: &agentv1.SessionRequest_Heartbeat{Heartbeat: &agentv1.Heartbeat{HasConditions: true,
		Conditions: []*taskv1.Condition{{Type: "PolicyInvalid", Status: taskv1.ConditionStatus_CONDITION_STATUS_TRUE, Message: "line 3"}}}}})
	w.eventually("the condition is stored", func() bool { return condition(w.node("n1").GetConditions(), "PolicyInvalid") != nil })
	heard := w.node("n1").GetLastSeenTime().AsTime()
	for range h.inbox { // silence: the server cuts it
	}
	if status.Code(*h.end) != codes.DeadlineExceeded {
		t.Errorf("a silent session ended with %v", *h.end)
	}
	w.eventually("the node is away", func() bool { return w.node("n1").GetState() == nodev1.NodeState_NODE_STATE_DISCONNECTED })
	if got := w.node("n1").GetLastSeenTime(); got == nil || got.AsTime().Before(heard) {
		t.Errorf("last_seen_time = %v, want it no earlier than %v, as it was while the node was there", got, heard)
	}
}

func TestDrain(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.join("n1")
	h.connect()
	w.shut()
	h.next("a notice", func(m *agentv1.SessionResponse) bool { return m.GetDrain() != nil })
}

func TestProtocolErrors(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.join("n1")
	h.connect()
	h.send(&agentv1.SessionRequest{Message: &agentv1.SessionRequest_Events{Events: &agentv1.EventBatch{JournalId: h.journal, Frames: [][]byte{{0xff}}}}})
	h.next("a Goodbye", func(m *agentv1.SessionResponse) bool { return m.GetGoodbye().GetReason() == "PROTOCOL_ERROR" })

	h.connect()
	h.send(&agentv1.SessionRequest{Message: &agentv1.SessionRequest_Events{Events: &agentv1.EventBatch{JournalId: "another", Frames: h.frames}}})
	h.next("a Goodbye", func(m *agentv1.SessionResponse) bool { return m.GetGoodbye().GetReason() == "PROTOCOL_ERROR" })

	h.connect()
	epoch := h.epoch
	h.epoch = 1 // of an older stream: ignored
	h.sendFrames(false, []byte{0xff})
	h.epoch = epoch
	h.assignment(w.create(w.leaf("n1"))[0].GetId())
}

// watchToken is where the log is now.
func (w *world) watchToken() string {
	w.t.Helper()
	resp, err := w.tasks.ListTasks(w.ctx(), &taskv1.ListTasksRequest{PageSize: 1})
	if err != nil {
		w.t.Fatal(err)
	}
	return resp.GetWatchToken()
}
