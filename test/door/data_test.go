package door_test

import (
	"crypto/sha256"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/millwright/pki/envelope"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	nodev1 "github.com/gpuaas/millwright/proto/millwright/node/v1"
	systemv1 "github.com/gpuaas/millwright/proto/millwright/system/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/test/harness"
	"github.com/gpuaas/millwright/test/invariants/check"
)

func hello(journal string, last uint64) *agentv1.Hello {
	return &agentv1.Hello{
		MinProtocol: 1, MaxProtocol: 1, BootId: "boot-1", JournalId: journal, LastSeq: last, FirstSeq: 1,
		WallTime: timestamppb.Now(), TrustRootVersion: 1, Generation: 1, InstanceId: "instance-1",
		Kinds: []*agentv1.KindSupport{{Kind: "system.command", Revision: 1}}, Facts: &agentv1.NodeFacts{Hostname: "host"},
	}
}

// liar is a node that speaks about another one's tasks. Its journal is sound in
// form.
type liar struct {
	t       *testing.T
	conn    *grpc.ClientConn
	journal string
	frames  [][]byte
}

func (l *liar) say(e *taskv1.Event) {
	l.t.Helper()
	sum := sha256.Sum256([]byte("liar\x001\x00"))
	if n := len(l.frames); n > 0 {
		sum = sha256.Sum256(l.frames[n-1])
	}
	e.JournalId, e.Seq, e.PrevHash, e.BootId, e.WallTime = l.journal, uint64(len(l.frames)+1), sum[:], "boot-1", timestamppb.Now()
	frame, err := proto.Marshal(e)
	if err != nil {
		l.t.Fatal(err)
	}
	l.frames = append(l.frames, frame)
}

// tell opens a session and sends the journal, which the server takes.
func (l *liar) tell(unfinished ...*agentv1.UnfinishedTask) {
	l.t.Helper()
	s, err := agentv1.NewAgentServiceClient(l.conn).Session(l.t.Context())
	if err != nil {
		l.t.Fatal(err)
	}
	h := hello(l.journal, uint64(len(l.frames)))
	h.Unfinished, h.Credits = unfinished, 32
	l.send(s, &agentv1.SessionRequest{Message: &agentv1.SessionRequest_Hello{Hello: h}})
	m, err := s.Recv()
	if err != nil || m.GetWelcome() == nil {
		l.t.Fatalf("in place of a Welcome: %v, %v", m, err)
	}
	epoch := m.GetSessionEpoch()
	l.send(s, &agentv1.SessionRequest{SessionEpoch: epoch, Message: &agentv1.SessionRequest_Events{
		Events: &agentv1.EventBatch{JournalId: l.journal, Frames: l.frames}}})
	for m.GetAck().GetSeq() < uint64(len(l.frames)) {
		if m, err = s.Recv(); err != nil {
			l.t.Fatal(err)
		}
		if a := m.GetAssignment(); a != nil {
			l.t.Errorf("it was given %v", a)
		}
	}
	for _, answer := range []*agentv1.AssignmentAnswer{
		{AssignmentId: "1", Answer: &agentv1.AssignmentAnswer_Refused{Refused: &agentv1.Refused{Reason: "LIE"}}},
		{AssignmentId: "", Answer: &agentv1.AssignmentAnswer_Deferred{Deferred: &agentv1.Deferred{Reason: "LIE"}}},
	} {
		l.send(s, &agentv1.SessionRequest{SessionEpoch: epoch, Message: &agentv1.SessionRequest_Answer{Answer: answer}})
	}
}

func (l *liar) send(s grpc.BidiStreamingClient[agentv1.SessionRequest, agentv1.SessionResponse], m *agentv1.SessionRequest) {
	l.t.Helper()
	if err := s.Send(m); err != nil {
		l.t.Fatal(err)
	}
}

// TestAnotherNodesData lets a node that has joined upload output for another
// one's task, and report its end, its acceptance and its failure. None of it is
// stored under that task.
func TestAnotherNodesData(t *testing.T) {
	c := harness.New(t)
	n := c.NewNode("honest")
	n.Gone("it is cut off in the middle of its work")
	for _, invariant := range []string{check.Authorised, check.Order, check.Quiet} {
		c.Expect(invariant, "liar", "it tells of tasks that are not its own")
	}
	if err := n.Do("program /usr/bin/work\nresult block /usr/bin/work"); err != nil {
		t.Fatal(err)
	}
	n.Start()
	n.Connected()
	running := c.Create(n, "system.command", &systemv1.CommandSpec{Argv: []string{"/usr/bin/work"}}).GetId()
	c.Reached(running, taskv1.TaskState_TASK_STATE_RUNNING)
	n.Cut()
	queued := c.Create(n, "system.command", &systemv1.CommandSpec{Argv: []string{"/usr/bin/work"}}).GetId()
	identity, _, err := join(t, c.Connect(nil), newToken(t, c, "liar", time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	l := &liar{t: t, conn: c.Connect(identity), journal: uuid.NewString()}
	await(t, "the honest node is seen as gone", func() bool {
		r, err := c.Nodes.GetNode(t.Context(), &nodev1.GetNodeRequest{Name: "honest"})
		return err == nil && r.GetNode().GetState() != nodev1.NodeState_NODE_STATE_CONNECTED
	})
	before := look(t, c, running, queued)

	var unfinished []*agentv1.UnfinishedTask
	l.say(&taskv1.Event{Payload: &taskv1.Event_JournalOpened{JournalOpened: &taskv1.JournalOpened{Reason: taskv1.JournalReason_JOURNAL_REASON_JOINED, Generation: 1}}})
	for _, id := range []string{running, queued} {
		l.upload(id)
		got, err := c.Tasks.GetTask(t.Context(), &taskv1.GetTaskRequest{Id: id})
		if err != nil {
			t.Fatal(err)
		}
		unfinished = append(unfinished, &agentv1.UnfinishedTask{TaskId: id, LeafHash: got.GetTask().GetLeafHash()})
		l.say(&taskv1.Event{Payload: &taskv1.Event_Accepted{Accepted: &taskv1.TaskAccepted{
			TaskId: id, LeafHash: got.GetTask().GetLeafHash(), Envelope: got.GetEnvelope(), SignedLeaf: got.GetSignedLeaf()}}})
		l.say(&taskv1.Event{Payload: &taskv1.Event_Held{Held: &taskv1.TaskHeld{TaskId: id, Reason: "LIE"}}})
		l.say(&taskv1.Event{Payload: &taskv1.Event_Finished{Finished: &taskv1.TaskFinished{TaskId: id, State: taskv1.TaskState_TASK_STATE_SUCCEEDED}}})
	}
	invented := l.invent(c)
	l.tell(unfinished...)
	if diff := cmp.Diff(before, look(t, c, running, queued), protocmp.Transform()); diff != "" {
		t.Errorf("the other node's tasks have changed (-before +after):\n%s", diff)
	}
	for _, id := range invented {
		if r, err := c.Tasks.GetTask(t.Context(), &taskv1.GetTaskRequest{Id: id}); status.Code(err) != codes.NotFound {
			t.Errorf("a task that nobody created is there: %v, %v", r.GetTask(), err)
		}
	}
}

// invent reports the acceptance of tasks that no one created: one that an
// operator signed for another node, and one that no one signed.
func (l *liar) invent(c *harness.Cluster) (ids []string) {
	l.t.Helper()
	spec, err := proto.Marshal(&systemv1.CommandSpec{Argv: []string{"/usr/bin/work"}})
	if err != nil {
		l.t.Fatal(err)
	}
	unknown, err := envelope.GenerateKey()
	if err != nil {
		l.t.Fatal(err)
	}
	for node, key := range map[string]*envelope.Key{"honest": c.Key(), "liar": unknown} {
		id := uuid.Must(uuid.NewV7()).String()
		env, leaves, err := envelope.SignTaskSet(c.Window(), []*taskv1.TaskLeaf{{
			TaskId: id, Node: node, Mode: taskv1.Mode_MODE_EXECUTE, Kind: "system.command", Revision: 1, Spec: spec}}, key)
		if err != nil {
			l.t.Fatal(err)
		}
		hash := envelope.LeafHash(leaves[0].GetLeaf())
		l.say(&taskv1.Event{Payload: &taskv1.Event_Accepted{Accepted: &taskv1.TaskAccepted{
			TaskId: id, LeafHash: hash[:], Envelope: env, SignedLeaf: leaves[0], TrustRootVersion: 1}}})
		ids = append(ids, id)
	}
	return ids
}

// upload tries to store output of a task. The answer is the one about a task
// that does not exist.
func (l *liar) upload(id string) {
	l.t.Helper()
	var said []string
	for _, each := range []string{id, uuid.Must(uuid.NewV7()).String()} {
		s, err := agentv1.NewAgentServiceClient(l.conn).UploadOutput(l.t.Context())
		if err == nil {
			_ = s.Send(&agentv1.UploadOutputRequest{TaskId: each, Stream: taskv1.Stream_STREAM_STDOUT,
				Part: agentv1.OutputPart_OUTPUT_PART_HEAD, Data: []byte("a lie"), TotalBytes: 5, Last: true}) // Recv has the reason
			_, err = s.Recv()
		}
		if status.Code(err) != codes.NotFound {
			l.t.Fatalf("upload for task %s: %v, want NotFound", each, err)
		}
		said = append(said, strings.ReplaceAll(err.Error(), each, "ID"))
	}
	if said[0] != said[1] {
		l.t.Errorf("about another node's task: %q, about none: %q", said[0], said[1])
	}
}

// seen is all that the server shows of tasks, and of the node that has them.
type seen struct {
	Tasks  []*taskv1.GetTaskResponse
	Events []*taskv1.ListTaskEventsResponse
	Node   string
	Output map[string]string
}

func look(t *testing.T, c *harness.Cluster, ids ...string) seen {
	t.Helper()
	s := seen{Output: map[string]string{}}
	for _, id := range ids {
		task, err := c.Tasks.GetTask(t.Context(), &taskv1.GetTaskRequest{Id: id})
		if err != nil {
			t.Fatal(err)
		}
		events, err := c.Tasks.ListTaskEvents(t.Context(), &taskv1.ListTaskEventsRequest{Id: id})
		if err != nil {
			t.Fatal(err)
		}
		s.Tasks, s.Events = append(s.Tasks, task), append(s.Events, events)
	}
	node, err := c.Nodes.GetNode(t.Context(), &nodev1.GetNodeRequest{Name: "honest"})
	if err != nil {
		t.Fatal(err)
	}
	s.Node = fmt.Sprint(node.GetNode().GetJournalId(), node.GetNode().GetSessionEpoch(), node.GetNode().GetConditions())
	err = filepath.WalkDir(c.OutputDir(), func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b, err := os.ReadFile(path)
		s.Output[path] = string(b)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// await polls until ok, for at most a minute.
func await(t *testing.T, what string, ok func() bool) {
	t.Helper()
	deadline := time.After(time.Minute)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-deadline:
			t.Fatalf("%s: not within a minute", what)
		case <-tick.C:
		}
	}
}
