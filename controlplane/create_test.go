package controlplane_test

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/millwright/pki/envelope"
	"github.com/gpuaas/millwright/pki/pkitest"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	nodev1 "github.com/gpuaas/millwright/proto/millwright/node/v1"
	storagev1 "github.com/gpuaas/millwright/proto/millwright/storage/v1"
	systemv1 "github.com/gpuaas/millwright/proto/millwright/system/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/proto/rpcerr"
)

// TestCreateRefuses is what is refused at admission: the code, the reason, the
// words that the answer must have, and that nothing was stored.
func TestCreateRefuses(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.join("gpu-001").connect()
	w.join("gone")
	if _, err := w.nodes.EvictNode(w.ctx(), &nodev1.EvictNodeRequest{Name: "gone"}); err != nil {
		t.Fatal(err)
	}
	signed := func(change func(l *taskv1.TaskLeaf)) *taskv1.CreateTasksRequest {
		l := w.leaf("gpu-001")
		change(l)
		return w.request(l)
	}
	at := func(skew time.Duration) *taskv1.CreateTasksRequest {
		window := w.cluster.Window()
		window.IssuedAt, window.NotBefore = time.Now().Add(skew), time.Now()
		env, leaves, err := envelope.SignTaskSet(window, []*taskv1.TaskLeaf{w.leaf("gpu-001")}, w.cluster.Operator)
		if err != nil {
			t.Fatal(err)
		}
		return &taskv1.CreateTasksRequest{RequestId: uuid.NewString(), Envelope: env, Leaves: leaves}
	}
	change := func(f func(r *taskv1.CreateTasksRequest)) *taskv1.CreateTasksRequest {
		r := w.request(w.leaf("gpu-001"), w.leaf("gpu-001"))
		f(r)
		return r
	}
	mount := func(spec *storagev1.MountSpec) *taskv1.CreateTasksRequest {
		return signed(func(l *taskv1.TaskLeaf) {
			l.Kind, l.Spec = "storage.mount", must(proto.Marshal(spec))(t)
		})
	}
	otherCluster := pkitest.New(t)
	for _, c := range []struct {
		name   string
		req    *taskv1.CreateTasksRequest
		code   codes.Code
		reason string
		words  []string
	}{
		{"unknown kind", signed(func(l *taskv1.TaskLeaf) { l.Kind = "storage.munt" }), codes.InvalidArgument, "UNKNOWN_KIND",
			[]string{"leaves[0].kind", `"storage.munt"`, "storage.mount", "system.command", "task.resolve"}},
		{"revision too new", signed(func(l *taskv1.TaskLeaf) { l.Revision = 9 }), codes.InvalidArgument, "UNKNOWN_KIND", []string{"leaves[0].revision", `"9"`, "update"}},
		{"unknown node", signed(func(l *taskv1.TaskLeaf) { l.Node = "gpu-002" }), codes.NotFound, "UNKNOWN_NODE", []string{"leaves[0].node", "did you mean gpu-001?"}},
		{"evicted node", signed(func(l *taskv1.TaskLeaf) { l.Node = "gone" }), codes.FailedPrecondition, "NODE_EVICTED", []string{"evicted", "millctl node token create gone"}},
		{"kind that the node lacks", signed(func(l *taskv1.TaskLeaf) {
			l.Kind, l.Spec = "storage.unmount", must(proto.Marshal(&storagev1.UnmountSpec{Target: "/mnt/x"}))(t)
		}), codes.FailedPrecondition, "NODE_LACKS_KIND", []string{"does not have this kind"}},
		{"spec with an unknown field", signed(func(l *taskv1.TaskLeaf) { l.Spec = append(l.Spec, 0xfa, 0x07, 0) }), codes.InvalidArgument, "SPEC_INVALID", []string{"leaves[0].spec", "unknown field"}},
		{"all problems at once", mount(&storagev1.MountSpec{Target: "/"}), codes.InvalidArgument, "SPEC_INVALID", []string{"leaves[0].spec.target", `"/"`, "leaves[0].spec.source"}},
		{"no envelope", change(func(r *taskv1.CreateTasksRequest) { r.Envelope = nil }), codes.InvalidArgument, "ENVELOPE_MISSING", []string{"envelope", "validate_only"}},
		{"no leaves", change(func(r *taskv1.CreateTasksRequest) { r.Leaves = nil }), codes.InvalidArgument, "MALFORMED", []string{"leaves"}},
		{"request id", change(func(r *taskv1.CreateTasksRequest) { r.RequestId = "7" }), codes.InvalidArgument, "MALFORMED", []string{"request_id", `"7"`, "UUID"}},
		{"altered signature", change(func(r *taskv1.CreateTasksRequest) { r.Envelope.Signatures[0].Signature[3] ^= 1 }), codes.InvalidArgument, "SIGNATURE_INVALID", []string{"envelope"}},
		{"altered payload", change(func(r *taskv1.CreateTasksRequest) { r.Envelope.Payload[5] ^= 1 }), codes.InvalidArgument, "SIGNATURE_INVALID", []string{"envelope"}},
		{"altered leaf", change(func(r *taskv1.CreateTasksRequest) {
			l := w.leaf("gpu-001")
			r.Leaves[1].Leaf = must(envelope.EncodeLeaf(l))(t)
		}), codes.InvalidArgument, "PROOF_INVALID", []string{"leaves[1]"}},
		{"missing leaf", change(func(r *taskv1.CreateTasksRequest) { r.Leaves = r.Leaves[:1] }), codes.InvalidArgument, "PROOF_INVALID", []string{"covers 2 tasks"}},
		{"leaves in another order", change(func(r *taskv1.CreateTasksRequest) { r.Leaves[0], r.Leaves[1] = r.Leaves[1], r.Leaves[0] }), codes.InvalidArgument, "PROOF_INVALID", []string{"order"}},
		{"another cluster", change(func(r *taskv1.CreateTasksRequest) {
			r.Envelope, r.Leaves = otherCluster.Sign(t, w.leaf("gpu-001"))
		}), codes.InvalidArgument, "WRONG_CLUSTER", []string{"cluster"}},
		{"clock ahead", at(10 * time.Minute), codes.InvalidArgument, "CLOCK_SKEW", []string{"envelope.issued_at", "10m0s ahead of"}},
		{"clock behind", at(-10 * time.Minute), codes.InvalidArgument, "CLOCK_SKEW", []string{"10m0s behind"}},
		{"unknown field", change(func(r *taskv1.CreateTasksRequest) { r.Envelope.ProtoReflect().SetUnknown([]byte{0xfa, 0x07, 0}) }), codes.InvalidArgument, "MALFORMED", []string{"unknown field"}},
		{"retry of nothing", signed(func(l *taskv1.TaskLeaf) { l.RetryOf = pkitest.NewTaskID(t) }), codes.InvalidArgument, "UNKNOWN_TASK", []string{"leaves[0].retry_of"}},
		{"resolve of nothing", signed(func(l *taskv1.TaskLeaf) {
			l.Kind = "task.resolve"
			l.Spec = must(proto.Marshal(&taskv1.ResolveSpec{TaskId: pkitest.NewTaskID(t), LeafHash: make([]byte, 32), As: taskv1.ResolveAs_RESOLVE_AS_ABANDON}))(t)
		}), codes.NotFound, "UNKNOWN_TASK", []string{"leaves[0].spec.task_id"}},
		{"two problems of two sorts", signed(func(l *taskv1.TaskLeaf) { l.Kind, l.Node = "no.such", "nowhere" }), codes.InvalidArgument, "INVALID", []string{"leaves[0].kind", "leaves[0].node"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			resp, err := w.tasks.CreateTasks(w.ctx(), c.req)
			if status.Code(err) != c.code || rpcerr.Reason(err) != c.reason {
				t.Fatalf("CreateTasks = %v, %v (%s); want %s %s", resp, err, rpcerr.Reason(err), c.code, c.reason)
			}
			text := err.Error()
			for _, v := range rpcerr.Violations(err) {
				text += "\n" + v.Field + ": " + v.Rule
			}
			for _, word := range c.words {
				if !strings.Contains(text, word) {
					t.Errorf("the answer does not say %q:\n%s", word, text)
				}
			}
		})
	}
	resp, err := w.tasks.ListTasks(w.ctx(), &taskv1.ListTasksRequest{})
	if err != nil || len(resp.GetTasks()) != 0 {
		t.Errorf("after all refusals there are %d tasks, %v", len(resp.GetTasks()), err)
	}
}

func TestCreateTooLarge(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.join("n1")
	leaves := make([]*taskv1.TaskLeaf, 1001)
	for i := range leaves {
		leaves[i] = w.leaf("n1")
	}
	_, err := w.tasks.CreateTasks(w.ctx(), w.request(leaves...))
	if status.Code(err) != codes.InvalidArgument || rpcerr.Reason(err) != "TOO_LARGE" {
		t.Errorf("1001 leaves: %v", err)
	}
	big := make([]*taskv1.SignedLeaf, 20)
	for i := range big {
		big[i] = &taskv1.SignedLeaf{Leaf: make([]byte, 219<<10)}
	}
	_, err = w.tasks.CreateTasks(w.ctx(), &taskv1.CreateTasksRequest{RequestId: uuid.NewString(), Leaves: big})
	if status.Code(err) != codes.InvalidArgument || rpcerr.Reason(err) != "TOO_LARGE" {
		t.Errorf("more than 4 MiB of leaves: %v", err)
	}
	_, err = w.tasks.CreateTasks(w.ctx(), &taskv1.CreateTasksRequest{Leaves: []*taskv1.SignedLeaf{{Leaf: make([]byte, 6<<20)}}})
	if status.Code(err) != codes.ResourceExhausted {
		t.Errorf("a message of 6 MiB: %v", err)
	}
}

func TestRequestIDIsIdempotent(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.join("n1")
	leaf := w.leaf("n1")
	req := w.request(leaf)
	first, err := w.tasks.CreateTasks(w.ctx(), req)
	if err != nil || first.GetAlreadyExisted() {
		t.Fatalf("CreateTasks = %v, %v", first, err)
	}
	again := proto.CloneOf(leaf)
	again.TaskId = pkitest.NewTaskID(t) // signed anew, after a lost answer
	resigned := w.request(again)
	resigned.RequestId = req.GetRequestId()
	for name, r := range map[string]*taskv1.CreateTasksRequest{"same bytes": req, "signed anew": resigned} {
		second, err := w.tasks.CreateTasks(w.ctx(), r)
		if err != nil || !second.GetAlreadyExisted() || second.GetTasks()[0].GetId() != leaf.GetTaskId() {
			t.Errorf("%s: CreateTasks = %v, %v", name, second, err)
		}
	}
	for _, c := range []struct {
		name   string
		change func(*taskv1.TaskLeaf)
		path   string
	}{
		{"spec", func(l *taskv1.TaskLeaf) {
			l.Spec = must(proto.Marshal(&systemv1.CommandSpec{Argv: []string{"/usr/bin/false"}}))(t)
		}, "leaves[0].spec.argv[0]"},
		{"node", func(l *taskv1.TaskLeaf) { l.Node = "n2" }, "leaves[0].node"},
		{"mode", func(l *taskv1.TaskLeaf) { l.Mode = taskv1.Mode_MODE_PLAN }, "leaves[0].mode"},
		{"option", func(l *taskv1.TaskLeaf) { l.Reason = "other" }, "leaves[0].reason"},
	} {
		other := proto.CloneOf(leaf)
		other.TaskId = pkitest.NewTaskID(t)
		c.change(other)
		r := w.request(other)
		r.RequestId = req.GetRequestId()
		_, err := w.tasks.CreateTasks(w.ctx(), r)
		v := rpcerr.Violations(err)
		if status.Code(err) != codes.AlreadyExists || rpcerr.Reason(err) != "REQUEST_CONFLICT" || len(v) != 1 || v[0].Field != c.path {
			t.Errorf("%s: %v, violations %v; want ALREADY_EXISTS naming %s", c.name, err, v, c.path)
		}
	}
	two := w.request(proto.CloneOf(again), w.leaf("n1"))
	two.RequestId = req.GetRequestId()
	if _, err := w.tasks.CreateTasks(w.ctx(), two); status.Code(err) != codes.AlreadyExists {
		t.Errorf("another number of tasks: %v", err)
	}
}

func TestTaskIDWithOtherBytes(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.join("n1")
	leaf := w.leaf("n1")
	w.create(leaf)
	other := proto.CloneOf(leaf)
	other.Mode = taskv1.Mode_MODE_PLAN
	fresh := w.leaf("n1")
	_, err := w.tasks.CreateTasks(w.ctx(), w.request(fresh, other))
	if status.Code(err) != codes.AlreadyExists || rpcerr.Reason(err) != "TASK_EXISTS" || !strings.Contains(fmt.Sprint(rpcerr.Violations(err)), "differs in mode") {
		t.Errorf("CreateTasks = %v %v", err, rpcerr.Violations(err))
	}
	if _, err := w.tasks.GetTask(w.ctx(), &taskv1.GetTaskRequest{Id: fresh.GetTaskId()}); status.Code(err) != codes.NotFound {
		t.Errorf("all or none: the other task of the request is there: %v", err)
	}
	if got := w.task(leaf.GetTaskId()).GetMode(); got != taskv1.Mode_MODE_EXECUTE {
		t.Errorf("the stored task is now %s", got)
	}
}

func TestRequestsRace(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.join("n1")
	leaf := w.leaf("n1")
	req := w.request(leaf)
	var wg sync.WaitGroup
	var mu sync.Mutex
	fresh := 0
	for range 16 {
		wg.Go(func() {
			resp, err := w.tasks.CreateTasks(w.ctx(), req)
			mu.Lock()
			defer mu.Unlock()
			if err != nil || resp.GetTasks()[0].GetId() != leaf.GetTaskId() {
				t.Errorf("CreateTasks = %v, %v", resp, err)
			}
			if !resp.GetAlreadyExisted() {
				fresh++
			}
		})
	}
	wg.Wait()
	if fresh != 1 {
		t.Errorf("%d of 16 racers created the task", fresh)
	}
	if diff := cmp.Diff([]string{"CREATED"}, w.history(leaf.GetTaskId())); diff != "" {
		t.Errorf("history (-want +got):\n%s", diff)
	}
}

func TestValidateOnly(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.join("n1")
	leaf := w.leaf("n1")
	req := &taskv1.CreateTasksRequest{ValidateOnly: true, Leaves: []*taskv1.SignedLeaf{{Leaf: must(envelope.EncodeLeaf(leaf))(t)}}}
	resp, err := w.tasks.CreateTasks(w.ctx(), req)
	if err != nil || len(resp.GetTasks()) != 1 || resp.GetTasks()[0].GetSpec() == nil {
		t.Errorf("CreateTasks = %v, %v", resp, err)
	}
	if _, err := w.tasks.GetTask(w.ctx(), &taskv1.GetTaskRequest{Id: leaf.GetTaskId()}); status.Code(err) != codes.NotFound {
		t.Errorf("validate_only stored something: %v", err)
	}
	leaf.Kind = "no.such"
	req.Leaves[0].Leaf = must(envelope.EncodeLeaf(leaf))(t)
	if _, err := w.tasks.CreateTasks(w.ctx(), req); rpcerr.Reason(err) != "UNKNOWN_KIND" {
		t.Errorf("CreateTasks = %v", err)
	}
}

func TestGetByPrefix(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.join("n1")
	a, b := w.leaf("n1"), w.leaf("n1")
	a.TaskId, b.TaskId = "0199c2a0-7d1e-7c3b-9f0a-3d5b1f6e2a10", "0199c2a0-7d1f-7c3b-9f0a-3d5b1f6e2a10"
	w.create(a, b)
	if got := w.task("0199c2a0-7d1e").GetId(); got != a.GetTaskId() {
		t.Errorf("GetTask by prefix = %s", got)
	}
	for id, want := range map[string]codes.Code{
		"0199c2a0-7d1": codes.InvalidArgument, "019": codes.InvalidArgument, "0199%": codes.InvalidArgument,
		"ffff": codes.NotFound, "0199c2a0-7d1e-7c3b-9f0a-3d5b1f6e2a11": codes.NotFound,
	} {
		_, err := w.tasks.GetTask(w.ctx(), &taskv1.GetTaskRequest{Id: id})
		if status.Code(err) != want {
			t.Errorf("GetTask(%s) = %v, want %s", id, err, want)
		}
		if id == "0199c2a0-7d1" && (!strings.Contains(err.Error(), a.GetTaskId()) || !strings.Contains(err.Error(), b.GetTaskId())) {
			t.Errorf("an ambiguous id does not list the tasks: %v", err)
		}
	}
}

func TestAnotherNodesDataIsOutOfReach(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h, other := w.join("n1"), w.join("n2")
	h.connect()
	id := w.create(w.leaf("n1"))[0].GetId()
	h.accept(h.assignment(id))
	stream, err := agentv1.NewAgentServiceClient(other.conn).UploadOutput(w.ctx())
	if err != nil {
		t.Fatal(err)
	}
	_ = stream.Send(&agentv1.UploadOutputRequest{TaskId: id, Stream: taskv1.Stream_STREAM_STDOUT, Part: agentv1.OutputPart_OUTPUT_PART_HEAD, Data: []byte("x")})
	if _, err := stream.Recv(); status.Code(err) != codes.NotFound {
		t.Errorf("output for another node's task: %v", err)
	}
	if _, err := taskv1.NewTaskServiceClient(h.conn).GetTask(w.ctx(), &taskv1.GetTaskRequest{Id: id}); status.Code(err) != codes.PermissionDenied {
		t.Errorf("a node on an operator's method: %v", err)
	}
	session, err := agentv1.NewAgentServiceClient(w.conn).Session(w.ctx())
	if err == nil {
		_, err = session.Recv()
	}
	if status.Code(err) != codes.PermissionDenied {
		t.Errorf("an operator on a node's method: %v", err)
	}
}
