package slurm

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"

	slurmv1 "github.com/gpuaas/millwright/proto/millwright/slurm/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
	"github.com/gpuaas/millwright/tasks/step"
)

const (
	mungeUser = "munge"
	mungeDir  = "/etc/munge"
	keyMode   = 0o400
	// keyMark says that the key was written by slurm.join, and goes with
	// slurm.leave. One that was there stays.
	keyMark = "# The munge key came with it."
)

// keyFile is the step that puts the cluster's key where munged reads it.
func keyFile(ref *taskv1.SecretRef) *taskv1.SecretWriteStep {
	return &taskv1.SecretWriteStep{Path: step.MungeKey, Secret: ref, Mode: keyMode, User: mungeUser, Group: mungeUser}
}

// keyState is what a node has of the key that a spec names.
type keyState struct {
	ref     *taskv1.SecretRef // nil: the spec names none
	there   bool              // a key is
	other   bool              // what is there is not that one, or there is none
	misfit  string            // whose it is and who may read it, when that is wrong
	inPlace bool              // nothing is to do
}

// lookKey compares the node's key with the one that a spec names.
func (s *survey) lookKey(ctx context.Context, h host.Reader, ref *taskv1.SecretRef) error {
	if ref == nil {
		return nil
	}
	want := keyFile(ref)
	s.key = keyState{ref: ref, other: true}
	st, err := h.SecretState(ctx, step.MungeKey, ref.GetSalt())
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return unfit("%v", err)
	}
	s.key.there, s.key.other = true, string(st.SHA256) != string(ref.GetSha256())
	if have := owned(uint32(st.Mode.Perm()), st.User, st.Group); have != owned(want.GetMode(), want.GetUser(), want.GetGroup()) {
		s.key.misfit = have
	}
	s.key.inPlace = !s.key.other && s.key.misfit == ""
	return nil
}

func owned(mode uint32, user, group string) string {
	return fmt.Sprintf("%#o %s:%s", mode, user, group)
}

// stale reports whether munged may run with another key than the right one that
// is on disk: it reads its key only when it starts, and the controller does not
// trust it.
func (s *survey) stale() bool {
	return s.key.inPlace && active(s.munge) && !s.answered && step.SlurmDistrusts(s.silence)
}

// keyDifferences names what is wrong with the key. What it holds is not shown,
// nor any digest of it.
func (s *survey) keyDifferences() []tasks.Difference {
	subject := "munge key in " + step.MungeKey
	wanted := "the secret " + s.key.ref.GetName()
	switch {
	case s.key.ref == nil:
		return nil
	case !s.key.there:
		return []tasks.Difference{{Subject: subject, Want: wanted}}
	case s.key.other:
		return []tasks.Difference{{Subject: subject, Have: "another key", Want: wanted}}
	case s.key.misfit != "":
		return []tasks.Difference{{Subject: subject, Have: s.key.misfit, Want: owned(keyMode, mungeUser, mungeUser)}}
	case s.stale():
		return []tasks.Difference{{Subject: "munged", Have: "not trusted by the controller", Want: "restarted with the key on disk"}}
	}
	return nil
}

// keySteps have munged run with the key. The step before the write has munged
// read the old key when all of it is undone.
func (s *survey) keySteps() []tasks.Step {
	write := s.key.ref != nil && !s.key.inPlace
	restart := active(s.munge) && (s.key.ref != nil && s.key.other || s.stale())
	var steps []tasks.Step
	if write && restart {
		steps = append(steps, step.Munge(&slurmv1.MungeStep{Phase: slurmv1.MungePhase_MUNGE_PHASE_BEFORE, Restart: true}))
	}
	if write {
		steps = append(steps, step.WriteSecret(keyFile(s.key.ref)))
	}
	if restart || !active(s.munge) || !enabled(s.munge) {
		steps = append(steps, step.Munge(&slurmv1.MungeStep{Phase: slurmv1.MungePhase_MUNGE_PHASE_AFTER, Restart: restart}))
	}
	return steps
}

// ownsKey reports whether the node's key came by slurm.join.
func (s *survey) ownsKey() bool { return strings.Contains(s.options, keyMark) }

// checkKey refuses a node that cannot take the key.
func (s *survey) checkKey(ctx context.Context, h host.Reader) error {
	if s.key.ref == nil {
		return nil
	}
	if _, err := h.FindProgram(ctx, "munged"); s.coming() && errors.Is(err, fs.ErrNotExist) {
		return nil // munge's package brings the user and the directory
	}
	ok, err := h.UserExists(ctx, mungeUser)
	if err != nil {
		return err
	}
	if !ok {
		return unfit("the node has no user %s, to whom the key belongs: install the package munge", mungeUser)
	}
	info, err := h.Lstat(ctx, mungeDir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return unfit("the directory %s is not there: install the package munge", mungeDir)
	case err == nil && !info.Mode.IsDir():
		return unfit("%s is no directory but %s", mungeDir, info.Mode.Type())
	}
	return err
}

// withoutKey adds the steps that take the cluster's key away from a node that
// got it by slurm.join. Without a key munged does not run.
func (s *survey) withoutKey(ctx context.Context, h host.Reader, steps []tasks.Step) ([]tasks.Step, error) {
	if !s.ownsKey() {
		return steps, nil
	}
	_, err := h.SecretState(ctx, step.MungeKey, nil)
	if errors.Is(err, fs.ErrNotExist) {
		return steps, nil
	}
	if err != nil {
		return nil, unfit("%v", err)
	}
	return append(steps,
		step.SetUnit(&taskv1.UnitStep{Unit: step.MungeUnit, Action: taskv1.UnitAction_UNIT_ACTION_STOP}),
		step.RemoveSecret(&taskv1.SecretRemoveStep{Path: step.MungeKey})), nil
}
