// Package task has the kind task.resolve, by which a person settles a held task
// with a signed word.
package task

import (
	"context"
	"encoding/hex"
	"fmt"
	"regexp"

	"google.golang.org/protobuf/proto"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
)

// KindResolve is the name of task.resolve. The executor carries it out itself:
// what it changes is the journal and not the node.
const KindResolve = "task.resolve"

// Resolve is the kind task.resolve. It has no steps and takes no lock.
type Resolve struct{}

var _ tasks.Task[*taskv1.ResolveSpec] = Resolve{}

// ResolveInfo describes task.resolve.
func ResolveInfo() tasks.Info {
	return tasks.Info{
		Kind: KindResolve, Revision: 1, Class: tasks.Action,
		Summary: "settle a held task: undo it, accept it as done, or abandon it",
	}
}

// Validate implements [tasks.Task].
func (Resolve) Validate(s *taskv1.ResolveSpec) error {
	var p tasks.Problems
	if !taskID(s.GetTaskId()) {
		p.Add("task_id", s.GetTaskId(), "must be the id of a task, a UUID of version 7 in lower case: copy it from millctl task list --state held")
	}
	if n := len(s.GetLeafHash()); n != 32 {
		p.Add("leaf_hash", hex.EncodeToString(s.GetLeafHash()), fmt.Sprintf("must be the 32 bytes of the held task's leaf hash, not %d: copy it from millctl task get", n))
	}
	switch s.GetAs() {
	case taskv1.ResolveAs_RESOLVE_AS_UNDO, taskv1.ResolveAs_RESOLVE_AS_ACCEPT, taskv1.ResolveAs_RESOLVE_AS_ABANDON:
	case taskv1.ResolveAs_RESOLVE_AS_UNSPECIFIED:
		p.Add("as", "", "is required: use undo, accept or abandon")
	default:
		p.Add("as", s.GetAs().String(), "is not known: use undo, accept or abandon")
	}
	return p.Err()
}

func taskID(s string) bool {
	return regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$`).MatchString(s)
}

// Locks implements [tasks.Task]: none, since the held task keeps its own.
func (Resolve) Locks(*taskv1.ResolveSpec) []tasks.Lock { return nil }

// Plan implements [tasks.Task]: there is nothing to do on the node.
func (Resolve) Plan(context.Context, host.Reader, *taskv1.ResolveSpec) (tasks.Plan, error) {
	return tasks.Plan{}, nil
}

// Verify implements [tasks.Task]: the journal says whether it was done.
func (Resolve) Verify(context.Context, host.Prober, *taskv1.ResolveSpec) error { return nil }

// Result implements [tasks.Task]: the executor makes the result, which only it
// knows.
func (Resolve) Result(context.Context, host.Prober, *taskv1.ResolveSpec, [][]byte) (proto.Message, error) {
	return nil, nil
}
