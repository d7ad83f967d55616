// Package secret has the kinds that bring the values of secrets to nodes, and
// take them away. A spec names a secret and the digest of its value; the value
// goes from the control plane into one file, and is in no plan, step, record or
// event.
package secret

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"

	"google.golang.org/protobuf/proto"

	secretv1 "github.com/gpuaas/millwright/proto/millwright/secret/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
	"github.com/gpuaas/millwright/tasks/step"
)

// Place is the kind secret.place. The value of a secret stands in a file that
// only its owner can read.
type Place struct{}

var (
	_ tasks.Task[*secretv1.PlaceSpec]     = Place{}
	_ tasks.Intender[*secretv1.PlaceSpec] = Place{}
)

// PlaceInfo describes secret.place.
func PlaceInfo() tasks.Info {
	return tasks.Info{
		Kind: "secret.place", Revision: 1, Class: tasks.State,
		Summary: "put the value of a secret into a file that only its owner can read",
	}
}

const (
	ownerReads = 0o400
	groupReads = 0o440
	root       = "root"
)

// Validate implements [tasks.Task].
func (Place) Validate(s *secretv1.PlaceSpec) error {
	var p tasks.Problems
	checkPath(&p, "path", s.GetPath())
	tasks.CheckSecret(&p, "secret", s.GetSecret())
	checkName(&p, "user", s.GetUser())
	checkName(&p, "group", s.GetGroup())
	return p.Err()
}

// Locks implements [tasks.Task].
func (Place) Locks(s *secretv1.PlaceSpec) []tasks.Lock {
	return []tasks.Lock{{Name: intentKey(s.GetPath())}}
}

// Intent implements [tasks.Intender].
func (Place) Intent(s *secretv1.PlaceSpec) (string, tasks.IntentChange) {
	return intentKey(s.GetPath()), tasks.IntentSet
}

func intentKey(p string) string { return "secret:" + p }

// file is the step that the spec asks for.
func file(s *secretv1.PlaceSpec) *taskv1.SecretWriteStep {
	out := &taskv1.SecretWriteStep{Path: s.GetPath(), Secret: s.GetSecret(), Mode: ownerReads, User: s.GetUser(), Group: s.GetGroup()}
	if out.GetUser() == "" {
		out.User = root
	}
	if out.GetGroup() == "" {
		out.Group = out.GetUser()
	}
	if s.GetGroupReadable() {
		out.Mode = groupReads
	}
	return out
}

// Plan implements [tasks.Task].
func (Place) Plan(ctx context.Context, h host.Reader, s *secretv1.PlaceSpec) (tasks.Plan, error) {
	want := file(s)
	if err := checkOwner(ctx, h, want.GetUser()); err != nil {
		return tasks.Plan{}, err
	}
	if err := checkDir(ctx, h, path.Dir(want.GetPath())); err != nil {
		return tasks.Plan{}, err
	}
	diff := tasks.Difference{Subject: "secret " + want.GetSecret().GetName() + " in " + want.GetPath(), Want: describe(want)}
	err := step.SecretInPlace(ctx, h, want)
	switch {
	case err == nil:
		return tasks.Plan{}, nil
	case !errors.Is(err, tasks.ErrNotSatisfied):
		return tasks.Plan{}, unfit("%v", err)
	}
	st, err := h.SecretState(ctx, want.GetPath(), want.GetSecret().GetSalt())
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return tasks.Plan{}, err
	default:
		same := string(st.SHA256) == string(want.GetSecret().GetSha256())
		if !same && !s.GetReplace() {
			return tasks.Plan{}, unfit("%s is there and holds something else: set replace when it may go, or choose another path", want.GetPath())
		}
		diff.Have = fmt.Sprintf("%#o %s:%s", st.Mode.Perm(), st.User, st.Group)
		if !same {
			diff.Have = "another content, " + diff.Have
		}
	}
	return tasks.Plan{Steps: []tasks.Step{step.WriteSecret(want)}, Differences: []tasks.Difference{diff}}, nil
}

func describe(want *taskv1.SecretWriteStep) string {
	return fmt.Sprintf("%#o %s:%s", want.GetMode(), want.GetUser(), want.GetGroup())
}

// Verify implements [tasks.Task].
func (Place) Verify(ctx context.Context, h host.Prober, s *secretv1.PlaceSpec) error {
	return step.SecretInPlace(ctx, h, file(s))
}

// Result implements [tasks.Task].
func (Place) Result(_ context.Context, _ host.Prober, s *secretv1.PlaceSpec, _ [][]byte) (proto.Message, error) {
	return &secretv1.PlaceResult{Path: s.GetPath()}, nil
}

func unfit(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{tasks.ErrPrecondition}, args...)...)
}

func checkOwner(ctx context.Context, h host.Reader, user string) error {
	ok, err := h.UserExists(ctx, user)
	if err == nil && !ok {
		return unfit("the node has no user %s: make it first, or leave user out", user)
	}
	return err
}

func checkDir(ctx context.Context, h host.Reader, dir string) error {
	info, err := h.Lstat(ctx, dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return unfit("the directory %s is not there: make it first", dir)
	case err != nil:
		return err
	case !info.Mode.IsDir():
		return unfit("%s is no directory but %s", dir, info.Mode.Type())
	}
	return nil
}
