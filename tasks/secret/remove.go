package secret

import (
	"context"
	"errors"
	"fmt"
	"io/fs"

	"google.golang.org/protobuf/proto"

	secretv1 "github.com/gpuaas/millwright/proto/millwright/secret/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
	"github.com/gpuaas/millwright/tasks/step"
)

// Remove is the kind secret.remove. It takes a secret's file from the node, and
// ends the intent of secret.place.
type Remove struct{}

var (
	_ tasks.Task[*secretv1.RemoveSpec]     = Remove{}
	_ tasks.Intender[*secretv1.RemoveSpec] = Remove{}
)

// RemoveInfo describes secret.remove.
func RemoveInfo() tasks.Info {
	return tasks.Info{
		Kind: "secret.remove", Revision: 1, Class: tasks.State,
		Summary: "remove the file of a secret from the node",
	}
}

// Validate implements [tasks.Task].
func (Remove) Validate(s *secretv1.RemoveSpec) error {
	var p tasks.Problems
	checkPath(&p, "path", s.GetPath())
	return p.Err()
}

// Locks implements [tasks.Task].
func (Remove) Locks(s *secretv1.RemoveSpec) []tasks.Lock {
	return []tasks.Lock{{Name: intentKey(s.GetPath())}}
}

// Intent implements [tasks.Intender].
func (Remove) Intent(s *secretv1.RemoveSpec) (string, tasks.IntentChange) {
	return intentKey(s.GetPath()), tasks.IntentRemove
}

// Plan implements [tasks.Task]. It takes away only what looks like the file of a
// secret: a regular file that others cannot read.
func (Remove) Plan(ctx context.Context, h host.Reader, s *secretv1.RemoveSpec) (tasks.Plan, error) {
	st, err := h.SecretState(ctx, s.GetPath(), nil)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return tasks.Plan{}, nil
	case err != nil:
		return tasks.Plan{}, unfit("%v", err)
	case st.Mode.Perm() != ownerReads && st.Mode.Perm() != groupReads:
		return tasks.Plan{}, unfit("%s has mode %#o, and so is no file of secret.place: remove it by hand", s.GetPath(), st.Mode.Perm())
	}
	return tasks.Plan{
		Steps:       []tasks.Step{step.RemoveSecret(&taskv1.SecretRemoveStep{Path: s.GetPath()})},
		Differences: []tasks.Difference{{Subject: "secret in " + s.GetPath(), Have: fmt.Sprintf("%#o %s:%s", st.Mode.Perm(), st.User, st.Group)}},
	}, nil
}

// Verify implements [tasks.Task].
func (Remove) Verify(ctx context.Context, h host.Prober, s *secretv1.RemoveSpec) error {
	_, err := h.Lstat(ctx, s.GetPath())
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	return fmt.Errorf("%s is there: %w", s.GetPath(), tasks.ErrNotSatisfied)
}

// Result implements [tasks.Task].
func (Remove) Result(_ context.Context, _ host.Prober, s *secretv1.RemoveSpec, _ [][]byte) (proto.Message, error) {
	return &secretv1.RemoveResult{Path: s.GetPath()}, nil
}
