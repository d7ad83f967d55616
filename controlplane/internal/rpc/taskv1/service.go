// Package taskv1 serves TaskService: how operators and controllers create
// tasks, read their history and stop them.
package taskv1

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/gpuaas/millwright/pki/trustroot"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	serverv1 "github.com/gpuaas/millwright/proto/millwright/server/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/proto/rpcerr"

	"github.com/gpuaas/millwright/controlplane/internal/admit"
	"github.com/gpuaas/millwright/controlplane/internal/clock"
	"github.com/gpuaas/millwright/controlplane/internal/eventlog"
	"github.com/gpuaas/millwright/controlplane/internal/output"
	"github.com/gpuaas/millwright/controlplane/internal/store"
)

// Log is the event log.
type Log interface {
	// Commit is [eventlog.Log.Commit].
	Commit(ctx context.Context, decide func(*eventlog.Tx) error) error
	// Changed is [eventlog.Log.Changed].
	Changed() <-chan struct{}
}

// Admitter judges requests; see [admit.Admitter].
type Admitter interface {
	Form(*taskv1.CreateTasksRequest) (*admit.Request, error)
	Signed(*admit.Request) (*trustroot.VerifiedSet, error)
	Tasks(store.View, *admit.Request) error
}

// Sessions are the streams of nodes.
type Sessions interface {
	// Wake says that there may be work for a node.
	Wake(node string)
	// Cancel asks a node to stop a task.
	Cancel(node, taskID string)
	// WantOutput asks a node for output, and reports whether it has a session.
	WantOutput(node, taskID string) bool
}

// Outputs is what commands wrote; see [output.Store].
type Outputs interface {
	Describe(*taskv1.Task) ([]*taskv1.Output, error)
	Read(key output.Key, part agentv1.OutputPart, offset uint64, b []byte) (int, error)
	Changed() <-chan struct{}
}

// Config is what the service needs.
type Config struct {
	// Log commits what is decided.
	Log Log
	// Reader reads the store.
	Reader store.Reader
	// Admit judges requests to create tasks.
	Admit Admitter
	// Sessions are the streams of nodes.
	Sessions Sessions
	// Outputs is what commands wrote.
	Outputs Outputs
	// Spec returns the typed spec of a leaf, or nil when its kind is not known.
	Spec func(*taskv1.TaskLeaf) *anypb.Any
	// Actor is the server's own SPIFFE id.
	Actor string
	// Stopping is closed when the server is about to stop: what streams then
	// ends.
	Stopping <-chan struct{}
	// Now is the wall clock; nil means the machine's.
	Now func() time.Time
}

// Service serves TaskService. It is safe for concurrent use.
type Service struct {
	taskv1.UnimplementedTaskServiceServer
	cfg Config
}

// New returns the service.
func New(cfg Config) *Service {
	if cfg.Now == nil {
		cfg.Now = clock.Now
	}
	return &Service{cfg: cfg}
}

const (
	idLength  = 36
	minPrefix = 4
	nearIDs   = 5
)

// find returns the one task with an id or a prefix of it.
func find(v store.View, id string) (*serverv1.TaskRow, error) {
	if len(id) == idLength {
		row, err := v.Task(id)
		if errors.Is(err, store.ErrNotFound) {
			return nil, unknownTask(id)
		}
		return row, err
	}
	if len(id) < minPrefix || len(id) > idLength || strings.Trim(id, "0123456789abcdef-") != "" {
		return nil, rpcerr.Invalid("MALFORMED", rpcerr.Violation{Field: "id", Value: clip(id),
			Rule: fmt.Sprintf("it must be a task's id, or at least the first %d characters of one", minPrefix)})
	}
	ids, err := v.TaskIDs(id, nearIDs+1)
	switch {
	case err != nil:
		return nil, err
	case len(ids) == 0:
		return nil, unknownTask(id)
	case len(ids) > 1:
		more := ""
		if len(ids) > nearIDs {
			ids, more = ids[:nearIDs], ", and more"
		}
		return nil, rpcerr.New(codes.InvalidArgument, "AMBIGUOUS_ID", "id %s fits several tasks: %s%s; give more of it", id, strings.Join(ids, ", "), more)
	}
	return v.Task(ids[0])
}

func unknownTask(id string) error {
	return rpcerr.New(codes.NotFound, "UNKNOWN_TASK", "no task has the id %s; see: millctl task list", id)
}

// brief is a task as lists show it.
func brief(row *serverv1.TaskRow) *taskv1.Task {
	t := proto.CloneOf(row.GetTask())
	t.Plan, t.Steps, t.Outputs = nil, nil, nil
	return t
}

// whole is a task with all that is known of it.
func (s *Service) whole(row *serverv1.TaskRow) (*taskv1.Task, error) {
	t := proto.CloneOf(row.GetTask())
	outputs, err := s.cfg.Outputs.Describe(t)
	t.Outputs = outputs
	return t, err
}

// clip keeps a value in a message short.
func clip(s string) string {
	if len(s) > 100 {
		return s[:100] + "..."
	}
	return s
}

func stateWord(s taskv1.TaskState) string {
	return strings.ToLower(strings.TrimPrefix(s.String(), "TASK_STATE_"))
}
