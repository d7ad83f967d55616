package controlplane_test

import (
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/gpuaas/millwright/controlplane"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	nodev1 "github.com/gpuaas/millwright/proto/millwright/node/v1"
	systemv1 "github.com/gpuaas/millwright/proto/millwright/system/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// huge is near what one message can carry.
func huge() string { return strings.Repeat("x", 4_000_000) }

// A page is bounded in bytes too: what is listed must fit an answer.
func TestListOfLargeTasks(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.join("n1")
	var want []string
	for range 5 {
		var leaves []*taskv1.TaskLeaf
		for range 14 {
			leaf := w.leaf("n1")
			leaf.Spec = must(proto.Marshal(&systemv1.CommandSpec{Argv: slices.Concat([]string{"/usr/bin/true"},
				slices.Repeat([]string{strings.Repeat("a", 1000)}, 120))}))(t)
			leaves = append(leaves, leaf)
		}
		for _, task := range w.create(leaves...) {
			want = append(want, task.GetId())
		}
	}
	got := w.list(&taskv1.ListTasksRequest{PageSize: 1000}, func() {})
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("listed %d tasks, want %d", len(got), len(want))
	}
}

func TestNodeThatSaysTooMuch(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.join("n1")
	conditions := []*taskv1.Condition{{Type: "A", Message: huge()}}
	refused := func(what string) {
		t.Helper()
		for range h.inbox {
		}
		if status.Code(*h.end) != codes.InvalidArgument || !strings.Contains((*h.end).Error(), "at most") {
			t.Errorf("%s: the session ended with %v", what, *h.end)
		}
	}
	h.connect()
	h.send(&agentv1.SessionRequest{Message: &agentv1.SessionRequest_Heartbeat{Heartbeat: &agentv1.Heartbeat{HasConditions: true, Conditions: conditions}}})
	refused("a heartbeat")
	hello := h.hello()
	hello.Facts.Conditions = conditions
	stream := must(agentv1.NewAgentServiceClient(h.conn).Session(w.ctx()))(t)
	if err := stream.Send(&agentv1.SessionRequest{Message: &agentv1.SessionRequest_Hello{Hello: hello}}); err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); status.Code(err) != codes.InvalidArgument {
		t.Errorf("a Hello: %v", err)
	}
	h.connect()
	id := w.create(w.leaf("n1"))[0].GetId()
	h.answer(h.assignment(id), &agentv1.AssignmentAnswer{Answer: &agentv1.AssignmentAnswer_Deferred{Deferred: &agentv1.Deferred{
		Reason: "DISK_FULL", Message: huge(), RetryAfter: durationpb.New(time.Hour)}}})
	w.eventually("the answer is stored", func() bool { return condition(w.task(id).GetConditions(), "Deferred") != nil })
	for _, waiting := range []*taskv1.TaskWaiting{{TaskId: huge()[:1_000_000]}, {TaskId: id, Message: huge()}} {
		h.report(&taskv1.Event{Payload: &taskv1.Event_Waiting{Waiting: waiting}})
		if c := condition(w.node("n1").GetConditions(), "EventsNotApplied"); c == nil || len(c.GetMessage()) > 2000 {
			t.Errorf("the node's condition has %d bytes", len(c.GetMessage()))
		}
	}
	if n := proto.Size(w.task(id)); n > 10_000 {
		t.Errorf("the task has %d bytes", n)
	}
	nodes, err := w.nodes.ListNodes(w.ctx(), &nodev1.ListNodesRequest{})
	if err != nil || proto.Size(nodes) > 10_000 {
		t.Errorf("ListNodes = %d bytes, %v", proto.Size(nodes), err)
	}
}

// However much a node says of a task, it can be read, and no watcher falls.
func TestTaskThatItsNodeMakesLarge(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.join("n1")
	h.connect()
	token := w.watchToken()
	id := w.create(w.leaf("n1"))[0].GetId()
	h.accept(h.assignment(id))
	for i := range uint32(12) {
		h.report(&taskv1.Event{Payload: &taskv1.Event_StepEnded{StepEnded: &taskv1.StepEnded{TaskId: id, Step: i, Outcome: &taskv1.StepOutcome{
			Error: huge()[:900_000]}}}})
	}
	h.report(&taskv1.Event{Payload: &taskv1.Event_Waiting{Waiting: &taskv1.TaskWaiting{TaskId: id, Message: huge()}}})
	if n := proto.Size(w.task(id)); n < 1_000_000 || n > 5_000_000 {
		t.Errorf("the task has %d bytes", n)
	}
	w.create(w.leaf("n1"))
	for _, want := range w.events(id) {
		var got *taskv1.TaskEvent
		if got, token = w.watchOne(token); got.GetIndex() != want.GetIndex() {
			t.Errorf("watched event %d, want %d", got.GetIndex(), want.GetIndex())
		}
	}
	if got, _ := w.watchOne(token); got.GetTaskId() == id {
		t.Errorf("one more event: %v", got.GetType())
	}
}

// A server that was restored may have a task in its queue that its node took.
func TestAcceptedWithoutAnAssignment(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.join("n1")
	h.credits = 0
	h.connect()
	id := w.create(w.leaf("n1"))[0].GetId()
	got := must(w.tasks.GetTask(w.ctx(), &taskv1.GetTaskRequest{Id: id}))(t)
	h.accept(&agentv1.Assignment{Envelope: got.GetEnvelope(), SignedLeaf: got.GetSignedLeaf()})
	h.connect() // with the same journal
	if task := w.task(id); task.GetState() != taskv1.TaskState_TASK_STATE_ACCEPTED {
		t.Errorf("task is %s: %s", task.GetState(), task.GetMessage())
	}
}

func TestTokenFromBeforeTheEviction(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.join("n1")
	token := must(w.nodes.CreateJoinToken(w.ctx(), &nodev1.CreateJoinTokenRequest{Node: "n1", Rejoin: true}))(t).GetToken()
	must(w.nodes.EvictNode(w.ctx(), &nodev1.EvictNodeRequest{Name: "n1"}))(t)
	enrol := agentv1.NewEnrolmentServiceClient(w.dial(nil))
	join := func() error {
		_, err := enrol.Join(w.ctx(), &agentv1.JoinRequest{Token: token, Csr: newIdentityKey(t).csr})
		return err
	}
	if err := join(); status.Code(err) != codes.PermissionDenied || !strings.Contains(err.Error(), "before its node was evicted") {
		t.Errorf("Join = %v", err)
	}
	w.join("n1") // with a token from after it
	if err := join(); status.Code(err) != codes.PermissionDenied {
		t.Errorf("Join after the node is back = %v", err)
	}
}

// What kept a node from taking tasks may be over when its conditions change.
func TestDeferredIsTriedAgainWhenTheNodeChanges(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.join("n1")
	h.conditions = []*taskv1.Condition{{Type: "PolicyInvalid", Status: taskv1.ConditionStatus_CONDITION_STATUS_TRUE}}
	h.connect()
	id := w.create(w.leaf("n1"))[0].GetId()
	later := func(a *agentv1.Assignment) {
		t.Helper()
		h.answer(a, &agentv1.AssignmentAnswer{Answer: &agentv1.AssignmentAnswer_Deferred{Deferred: &agentv1.Deferred{
			Reason: "POLICY_INVALID", RetryAfter: durationpb.New(time.Hour)}}})
		w.waitState(id, taskv1.TaskState_TASK_STATE_QUEUED)
	}
	later(h.assignment(id))
	h.connect() // the same as before
	h.none("an assignment", func(m *agentv1.SessionResponse) bool { return m.GetAssignment() != nil })
	h.send(&agentv1.SessionRequest{Message: &agentv1.SessionRequest_Heartbeat{Heartbeat: &agentv1.Heartbeat{HasConditions: true}}})
	later(h.assignment(id))
	h.conditions = []*taskv1.Condition{{Type: "DiskFull", Status: taskv1.ConditionStatus_CONDITION_STATUS_TRUE}}
	h.connect()
	h.accept(h.assignment(id))
}

// A stream that was opened with a certificate ends with it.
func TestUploadEndsWithTheCertificate(t *testing.T) {
	t.Parallel()
	var ahead atomic.Int64
	w := newWorldWith(t, func(c *controlplane.Config) {
		c.Now = func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) }
	})
	h := w.join("n1")
	h.connect()
	id := w.create(w.leaf("n1"))[0].GetId()
	stream := must(agentv1.NewAgentServiceClient(h.conn).UploadOutput(w.ctx()))(t)
	piece := &agentv1.UploadOutputRequest{TaskId: id, Stream: taskv1.Stream_STREAM_STDOUT, Part: agentv1.OutputPart_OUTPUT_PART_HEAD, Data: []byte("x")}
	upload := func() error {
		if err := stream.Send(piece); err != nil {
			return err
		}
		_, err := stream.Recv()
		return err
	}
	if err := upload(); err != nil {
		t.Fatal(err)
	}
	ahead.Store(int64(25 * time.Hour))
	if err := upload(); status.Code(err) != codes.Unauthenticated {
		t.Errorf("after the end of the certificate: %v", err)
	}
}
