package taskv1

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/millwright/pki/envelope"
	"github.com/gpuaas/millwright/pki/trustroot"
	auditv1 "github.com/gpuaas/millwright/proto/millwright/audit/v1"
	serverv1 "github.com/gpuaas/millwright/proto/millwright/server/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/proto/rpcerr"

	"github.com/gpuaas/millwright/controlplane/internal/admit"
	"github.com/gpuaas/millwright/controlplane/internal/crash"
	"github.com/gpuaas/millwright/controlplane/internal/eventlog"
	"github.com/gpuaas/millwright/controlplane/internal/rpc/intercept"
	"github.com/gpuaas/millwright/controlplane/internal/store"
)

// CreateTasks stores the tasks of a signed set, all or none.
func (s *Service) CreateTasks(ctx context.Context, req *taskv1.CreateTasksRequest) (*taskv1.CreateTasksResponse, error) {
	form, err := s.cfg.Admit.Form(req)
	if err != nil {
		return nil, err
	}
	if req.GetValidateOnly() {
		return s.validate(ctx, form)
	}
	caller := intercept.CallerFrom(ctx).Name()
	var known []*serverv1.TaskRow
	err = s.cfg.Reader.View(ctx, func(v store.View) (err error) {
		known, err = s.repeated(v, caller, form)
		return err
	})
	if err != nil || known != nil {
		return response(known, true), err
	}
	set, err := s.cfg.Admit.Signed(form)
	if err != nil {
		return nil, err
	}
	if err := s.admissible(ctx, form); err != nil {
		return nil, err
	}
	c := &creation{service: s, caller: caller, form: form, set: set}
	crash.Point("server.create.before")
	if err := s.cfg.Log.Commit(ctx, c.decide); err != nil {
		return nil, err
	}
	crash.Point("server.create.committed")
	for _, row := range c.rows {
		s.cfg.Sessions.Wake(row.GetTask().GetNode())
	}
	return response(c.rows, c.existed), nil
}

// validate says whether a request would be taken. Nothing is stored, and the
// leaves need no signature; one that is there must be good.
func (s *Service) validate(ctx context.Context, form *admit.Request) (*taskv1.CreateTasksResponse, error) {
	if form.Envelope != nil {
		if _, err := s.cfg.Admit.Signed(form); err != nil {
			return nil, err
		}
	}
	if err := s.admissible(ctx, form); err != nil {
		return nil, err
	}
	out := &taskv1.CreateTasksResponse{}
	for _, l := range form.Leaves {
		out.Tasks = append(out.Tasks, &taskv1.Task{
			Id: l.Leaf.GetTaskId(), Node: l.Leaf.GetNode(), Kind: l.Leaf.GetKind(), Revision: l.Leaf.GetRevision(),
			Mode: l.Leaf.GetMode(), Spec: s.cfg.Spec(l.Leaf), LeafHash: l.Hash[:],
		})
	}
	return out, nil
}

func (s *Service) admissible(ctx context.Context, form *admit.Request) error {
	return s.cfg.Reader.View(ctx, func(v store.View) error { return s.cfg.Admit.Tasks(v, form) })
}

// creation is the decision to store a request.
type creation struct {
	service *Service
	caller  string
	form    *admit.Request
	set     *trustroot.VerifiedSet

	rows    []*serverv1.TaskRow
	existed bool
}

func (c *creation) decide(tx *eventlog.Tx) error {
	known, err := c.service.repeated(tx, c.caller, c.form)
	if err != nil || known != nil {
		c.rows, c.existed = known, true
		return err
	}
	if err := c.check(tx); err != nil {
		return err
	}
	var keys []string
	for _, a := range c.set.Authorizers {
		keys = append(keys, a.GetKeyId())
	}
	request := &serverv1.RequestRow{Caller: c.caller, RequestId: c.form.ID}
	for i, l := range c.form.Leaves {
		created := &auditv1.TaskCreated{
			TaskId: l.Leaf.GetTaskId(), Node: l.Leaf.GetNode(), RequestId: c.form.ID,
			EnvelopeSha256: c.set.PayloadSHA256[:], SignedLeaf: l.Signed, KeyIds: keys,
		}
		if i == 0 {
			created.Envelope = c.form.Envelope
		}
		if err := tx.Append(c.caller, &auditv1.LogEntry{Entry: &auditv1.LogEntry_TaskCreated{TaskCreated: created}}); err != nil {
			return err
		}
		row, err := tx.Task(l.Leaf.GetTaskId())
		if err != nil {
			return err
		}
		request.TaskIds = append(request.TaskIds, l.Leaf.GetTaskId())
		c.rows = append(c.rows, row)
	}
	tx.PutRequest(request)
	return nil
}

// check looks again at what may have changed since the request was admitted,
// and at the ids of the tasks.
func (c *creation) check(tx *eventlog.Tx) error {
	var taken []rpcerr.Violation
	for i, l := range c.form.Leaves {
		node, err := tx.Node(l.Leaf.GetNode())
		if err != nil {
			return err
		}
		if node.GetEvicted() {
			return rpcerr.New(codes.FailedPrecondition, "NODE_EVICTED", "node %s was evicted just now", l.Leaf.GetNode())
		}
		row, err := tx.Task(l.Leaf.GetTaskId())
		if errors.Is(err, store.ErrNotFound) {
			continue
		}
		if err != nil {
			return err
		}
		rule := "a task with this id and the same content exists already, made by another request; look at it with: millctl task get " + l.Leaf.GetTaskId()
		if path, _, _ := c.service.difference(row, l.Leaf); path != "" {
			rule = "a task with this id exists already and differs in " + path + "; give every task an id of its own"
		}
		taken = append(taken, rpcerr.Violation{Field: fmt.Sprintf("leaves[%d].task_id", i), Value: l.Leaf.GetTaskId(), Rule: rule})
	}
	if len(taken) == 0 {
		return nil
	}
	out := rpcerr.Invalid("TASK_EXISTS", taken...)
	out.Code = codes.AlreadyExists
	return out
}

// repeated returns the tasks of an earlier request with the same id, if there
// was one and it asked for the same.
func (s *Service) repeated(v store.View, caller string, form *admit.Request) ([]*serverv1.TaskRow, error) {
	request, err := v.Request(caller, form.ID)
	if errors.Is(err, store.ErrNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if have, want := len(form.Leaves), len(request.GetTaskIds()); have != want {
		return nil, conflict("leaves", fmt.Sprintf("%d tasks", want), fmt.Sprintf("%d", have))
	}
	rows := make([]*serverv1.TaskRow, len(form.Leaves))
	for i, id := range request.GetTaskIds() {
		if rows[i], err = v.Task(id); err != nil {
			return nil, err
		}
		if path, had, has := s.difference(rows[i], form.Leaves[i].Leaf); path != "" {
			return nil, conflict(fmt.Sprintf("leaves[%d].%s", i, path), had, has)
		}
	}
	return rows, nil
}

func conflict(path, had, has string) error {
	out := rpcerr.Invalid("REQUEST_CONFLICT", rpcerr.Violation{Field: path, Value: has,
		Rule: fmt.Sprintf("the request with this request_id had %s here; use a new request_id for new tasks", had)})
	out.Code = codes.AlreadyExists
	return out
}

// difference returns the first field in which a leaf asks for something else
// than a stored task. The id is the client's to choose anew, and salts of
// secret digests are random.
func (s *Service) difference(row *serverv1.TaskRow, leaf *taskv1.TaskLeaf) (path, had, has string) {
	stored, err := envelope.DecodeLeaf(row.GetSignedLeaf().GetLeaf())
	if err != nil {
		return "leaf", "another one", "this one"
	}
	a, b := proto.CloneOf(stored), proto.CloneOf(leaf)
	for _, l := range []*taskv1.TaskLeaf{a, b} {
		l.TaskId, l.Spec = "", nil
		for _, d := range l.GetSecretDigests() {
			d.Salt, d.Sha256 = nil, nil
		}
	}
	if path, had, has = firstDifference(a.ProtoReflect(), b.ProtoReflect()); path != "" {
		return path, had, has
	}
	x, errX := s.cfg.Spec(stored).UnmarshalNew()
	y, errY := s.cfg.Spec(leaf).UnmarshalNew()
	if errX != nil || errY != nil {
		return "spec", "another one", "this one"
	}
	if path, had, has = firstDifference(x.ProtoReflect(), y.ProtoReflect()); path != "" {
		return "spec." + path, had, has
	}
	return "", "", ""
}

func response(rows []*serverv1.TaskRow, existed bool) *taskv1.CreateTasksResponse {
	out := &taskv1.CreateTasksResponse{AlreadyExisted: existed}
	for _, row := range rows {
		out.Tasks = append(out.Tasks, brief(row))
	}
	return out
}
