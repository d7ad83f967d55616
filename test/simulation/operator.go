package simulation

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/gpuaas/millwright/pki/envelope"
	storagev1 "github.com/gpuaas/millwright/proto/millwright/storage/v1"
	systemv1 "github.com/gpuaas/millwright/proto/millwright/system/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// order is one task that the operator wants, with what came of it.
type order struct {
	alias   string
	id      string
	request *taskv1.CreateTasksRequest
	node    *node
	kind    string
	plan    bool
	argv    []string
	hash    []byte
	blocks  bool
	exits   int
	settles *order // the held task that it settles
	as      taskv1.ResolveAs
	end     string // how it ended, in a word

	mu      sync.Mutex
	busy    bool // guarded by mu; a call is under way
	created bool // guarded by mu; the server has said so
	cancel  bool // guarded by mu; a cancel is wanted and was not taken yet
	refused string
}

// operator makes tasks, and keeps what it was told about them.
type operator struct {
	w       *world
	tp      *template
	client  taskv1.TaskServiceClient
	orders  []*order
	told    map[string]taskv1.TaskState // terminal states that the server has told
	calls   sync.WaitGroup
	targets []string
}

func newOperator(w *world, tp *template) *operator {
	return &operator{w: w, tp: tp, client: taskv1.NewTaskServiceClient(&call{w: w, peer: tp.operator}), told: map[string]taskv1.TaskState{},
		targets: []string{"/srv/a", "/srv/b"}}
}

// taskID is a UUID of version 7 made by the driver's dice.
func (o *operator) taskID() string {
	now := time.Now().UnixMilli()
	return fmt.Sprintf("%08x-%04x-7%03x-8%03x-%012x", uint32(now>>16), uint16(now), o.w.rng.Uint32N(1<<12), o.w.rng.Uint32N(1<<12), o.w.rng.Uint64N(1<<48))
}

// order makes one task at random.
func (o *operator) order() *order {
	rng := o.w.rng
	t := &order{alias: fmt.Sprintf("t%d", len(o.orders)+1), id: o.taskID(), node: o.w.nodes[rng.IntN(len(o.w.nodes))]}
	leaf := &taskv1.TaskLeaf{TaskId: t.id, Node: t.node.name, Mode: taskv1.Mode_MODE_EXECUTE, Revision: 1}
	var spec proto.Message
	held := o.held()
	switch dice := rng.IntN(10); {
	case dice < 2 && len(held) > 0:
		t.settles = held[rng.IntN(len(held))]
		t.kind, t.node = "task.resolve", t.settles.node
		t.as = []taskv1.ResolveAs{taskv1.ResolveAs_RESOLVE_AS_ABANDON, taskv1.ResolveAs_RESOLVE_AS_ACCEPT}[rng.IntN(2)]
		leaf.Node = t.node.name
		spec = &taskv1.ResolveSpec{TaskId: t.settles.id, LeafHash: t.settles.hash, As: t.as}
	case dice < 5:
		t.kind = "storage.mount"
		spec = &storagev1.MountSpec{Target: o.targets[rng.IntN(len(o.targets))], Source: &storagev1.MountSpec_Tmpfs{
			Tmpfs: &storagev1.TmpfsSource{SizeBytes: uint64(1+rng.IntN(2)) << 20}}}
		t.plan = rng.IntN(5) == 0
	case dice < 6:
		t.kind = "storage.unmount"
		spec = &storagev1.UnmountSpec{Target: o.targets[rng.IntN(len(o.targets))]}
	default:
		t.kind, t.argv = "system.command", []string{"/usr/bin/work", t.alias}
		c := &systemv1.CommandSpec{Argv: t.argv}
		switch rng.IntN(6) {
		case 0:
			t.exits = 3
			must(o.w.t, t.node.Do("result exit=3 "+strings.Join(t.argv, " ")))
		case 1:
			t.blocks = true
			must(o.w.t, t.node.Do("result block "+strings.Join(t.argv, " ")))
			leaf.Deadline = durationpb.New(time.Duration(5+rng.IntN(60)) * time.Second)
		}
		spec = c
	}
	if t.plan {
		leaf.Mode = taskv1.Mode_MODE_PLAN
	}
	leaf.Kind = t.kind
	leaf.Spec = o.marshal(spec)
	o.sign(t, leaf)
	o.orders = append(o.orders, t)
	return t
}

func (o *operator) marshal(m proto.Message) []byte {
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	must(o.w.t, err)
	return b
}

func (o *operator) sign(t *order, leaf *taskv1.TaskLeaf) {
	now := time.Now()
	window := []time.Duration{time.Minute, time.Hour, time.Hour}[o.w.rng.IntN(3)]
	env, leaves, err := envelope.SignTaskSet(
		envelope.Window{Cluster: o.tp.cluster[:], TrustRootVersion: o.tp.version, IssuedAt: now, NotAfter: now.Add(window)},
		[]*taskv1.TaskLeaf{leaf}, o.tp.key)
	must(o.w.t, err)
	hash := envelope.LeafHash(leaves[0].GetLeaf())
	t.hash = hash[:]
	t.request = &taskv1.CreateTasksRequest{RequestId: t.id, Envelope: env, Leaves: leaves}
}

// send makes one call at the server for an order that has one to make: create
// it, or cancel it. Its outcome may never be known; then it is made again.
func (o *operator) send(t *order) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.busy || t.refused != "" || t.created && !t.cancel {
		return
	}
	t.busy = true
	create := !t.created
	o.calls.Go(func() {
		var err error
		if create {
			_, err = o.client.CreateTasks(context.Background(), t.request)
		} else {
			_, err = o.client.CancelTask(context.Background(), &taskv1.CancelTaskRequest{Id: t.id, Reason: "the dice"})
		}
		t.mu.Lock()
		defer t.mu.Unlock()
		t.busy = false
		switch code := status.Code(err); {
		case err == nil && create:
			t.created = true
		case err == nil || !create && (code == codes.FailedPrecondition || code == codes.NotFound):
			t.cancel = false
		case code == codes.InvalidArgument || code == codes.FailedPrecondition || code == codes.AlreadyExists:
			t.refused = err.Error()
		}
	})
}

// open are the orders with a call to make.
func (o *operator) open() (out []*order) {
	for _, t := range o.orders {
		t.mu.Lock()
		if !t.busy && t.refused == "" && (!t.created || t.cancel) {
			out = append(out, t)
		}
		t.mu.Unlock()
	}
	return out
}

// get reads a task at the server; nil when there is none, or no server.
func (o *operator) get(t *order) *taskv1.Task {
	r, err := o.client.GetTask(context.Background(), &taskv1.GetTaskRequest{Id: t.id})
	if err != nil {
		return nil
	}
	return r.GetTask()
}

// held are the orders that the server says are held.
func (o *operator) held() (out []*order) {
	for _, t := range o.orders {
		if t.kind == "task.resolve" {
			continue
		}
		if task := o.get(t); task.GetState() == taskv1.TaskState_TASK_STATE_HELD {
			out = append(out, t)
		}
	}
	return out
}

// look notes the terminal states that the server tells, and that it does not
// change them.
func (o *operator) look() {
	for _, t := range o.orders {
		task := o.get(t)
		if task == nil {
			continue
		}
		was, ended := o.told[t.id]
		switch {
		case ended && task.GetState() != was:
			o.w.wrong("%s was told as %s and is %s", t.alias, was, task.GetState())
		case terminal(task.GetState()):
			o.told[t.id] = task.GetState()
		}
	}
}

func terminal(s taskv1.TaskState) bool {
	switch s {
	case taskv1.TaskState_TASK_STATE_SUCCEEDED, taskv1.TaskState_TASK_STATE_FAILED,
		taskv1.TaskState_TASK_STATE_CANCELLED, taskv1.TaskState_TASK_STATE_REFUSED,
		taskv1.TaskState_TASK_STATE_EXPIRED, taskv1.TaskState_TASK_STATE_ABANDONED:
		return true
	default:
		return false
	}
}
