package tasktest

import (
	"context"
	"errors"
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
)

// ErrKilled is what everything returns that a killed process tries to do.
var ErrKilled = errors.New("process was killed")

// Task is what a runner carries out.
type Task struct {
	ID   string // a UUID of version 7
	Kind string
	Spec proto.Message
}

// Outcome is how a task ended, as the journal has it.
type Outcome struct {
	// State is SUCCEEDED, FAILED, REFUSED or HELD.
	State taskv1.TaskState
	// Undo says what became of its steps.
	Undo taskv1.UndoState
	// Reason is the code, and Message the words.
	Reason, Message string
	// Plan is the frozen plan; nil when there was none.
	Plan *taskv1.Plan
	// Result is the typed result of a task that succeeded.
	Result *anypb.Any
	// Steps are in the order of the plan.
	Steps []*taskv1.StepOutcome
}

// A Runner is an executor with a journal. The journal outlives each Run, and
// nothing else does: each call of Run is one life of the agent's process.
type Runner interface {
	// Run starts an executor on the journal and p's hosts, gives it task unless
	// the journal has it already, and returns how it ended once that is durable;
	// a held task counts as ended. Nothing of the executor goes on after it
	// returned.
	//
	// Around each durable write of the journal it calls p.Point, before and
	// after. When that returns an error, the process is dead: before the write,
	// the write must not happen; after it, it stands, and the executor must not
	// learn of it. When p was killed, ctx ends with ErrKilled as its cause, and
	// Run returns an error that wraps it.
	Run(ctx context.Context, p *Process, task Task) (Outcome, error)
}

// NewRunner makes a runner with an empty journal. What it needs for the journal
// it takes from t.TempDir, and gives it back in t.Cleanup.
type NewRunner func(t testing.TB, reg *tasks.Registry) Runner

// Hosts are the hosts of one process, as an executor needs them.
type Hosts interface {
	// ForStep returns the host of one step of a task.
	ForStep(taskID string, step uint32) host.Host
	// Prober returns a host for plans and checks.
	Prober() host.Prober
}
