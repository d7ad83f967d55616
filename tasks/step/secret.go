package step

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"google.golang.org/protobuf/proto"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
)

const (
	// secretAttempts and secretBackOff bound how long a step waits for a control
	// plane that is away: about twenty minutes.
	secretAttempts = 8
	secretBackOff  = 10 * time.Second
)

type writeSecret struct{ args *taskv1.SecretWriteStep }

// WriteSecret returns the step that writes the value of a secret to a file. It
// is tried again while the value cannot be had.
func WriteSecret(args *taskv1.SecretWriteStep) tasks.Step { return writeSecret{args} }

func (s writeSecret) Args() proto.Message { return s.args }

func (s writeSecret) Title() string {
	return fmt.Sprintf("write secret %s to %s", s.args.GetSecret().GetName(), s.args.GetPath())
}

// Retry implements [tasks.Retrier].
func (s writeSecret) Retry() (uint32, time.Duration) { return secretAttempts, secretBackOff }

// Observe notes nothing: what stands there is kept outside the journal.
func (s writeSecret) Observe(ctx context.Context, h host.Reader) ([]byte, error) {
	_, err := h.SecretState(ctx, s.args.GetPath(), nil)
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return nil, err
}

// Apply does not ask for a value that is in place: after a crash the control plane
// may be away, or may have it no more, and the step must not end as one that has
// changed nothing.
func (s writeSecret) Apply(ctx context.Context, h host.Host) ([]byte, error) {
	if err := SecretInPlace(ctx, h, s.args); err == nil || !errors.Is(err, tasks.ErrNotSatisfied) {
		return nil, err
	}
	err := h.WriteSecret(ctx, s.args.GetPath(), host.SecretFile{
		Secret: HostSecret(s.args.GetSecret()), Mode: fs.FileMode(s.args.GetMode()).Perm(),
		User: s.args.GetUser(), Group: s.args.GetGroup(),
	})
	switch {
	case errors.Is(err, host.ErrSecretWrong):
		return nil, &tasks.ReasonError{Reason: tasks.ReasonSecretWrong, Unchanged: true, Err: err}
	case errors.Is(err, host.ErrSecretAway):
		return nil, tasks.Transient(&tasks.ReasonError{Reason: tasks.ReasonSecretAway, Unchanged: true, Err: err})
	}
	return nil, err
}

func (s writeSecret) Verify(ctx context.Context, h host.Prober) error {
	return SecretInPlace(ctx, h, s.args)
}

func (s writeSecret) Undo(ctx context.Context, h host.Host, _ []byte) error {
	return h.RestoreSecret(ctx, s.args.GetPath())
}

// HostSecret is a reference as the host takes it.
func HostSecret(ref *taskv1.SecretRef) host.Secret {
	return host.Secret{Name: ref.GetName(), Salt: ref.GetSalt(), SHA256: ref.GetSha256()}
}

// SecretInPlace returns nil if and only if the file is as the step would make
// it; an error that says what differs wraps [tasks.ErrNotSatisfied].
func SecretInPlace(ctx context.Context, h host.Reader, want *taskv1.SecretWriteStep) error {
	path := want.GetPath()
	st, err := h.SecretState(ctx, path, want.GetSecret().GetSalt())
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%s is not there: %w", path, tasks.ErrNotSatisfied)
	case err != nil:
		return err
	case !bytes.Equal(st.SHA256, want.GetSecret().GetSha256()):
		return fmt.Errorf("%s holds something else than the secret %s: %w", path, want.GetSecret().GetName(), tasks.ErrNotSatisfied)
	case st.Mode.Perm() != fs.FileMode(want.GetMode()).Perm():
		return fmt.Errorf("mode of %s is %#o, not %#o: %w", path, st.Mode.Perm(), want.GetMode(), tasks.ErrNotSatisfied)
	case st.User != want.GetUser() || st.Group != want.GetGroup():
		return fmt.Errorf("%s belongs to %s:%s, not %s:%s: %w", path, st.User, st.Group, want.GetUser(), want.GetGroup(), tasks.ErrNotSatisfied)
	}
	return nil
}

type removeSecret struct{ args *taskv1.SecretRemoveStep }

// RemoveSecret returns the step that removes the file of a secret.
func RemoveSecret(args *taskv1.SecretRemoveStep) tasks.Step { return removeSecret{args} }

func (s removeSecret) Args() proto.Message { return s.args }

func (s removeSecret) Title() string { return "remove the secret in " + s.args.GetPath() }

func (s removeSecret) Observe(ctx context.Context, h host.Reader) ([]byte, error) {
	_, err := h.SecretState(ctx, s.args.GetPath(), nil)
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return nil, err
}

func (s removeSecret) Apply(ctx context.Context, h host.Host) ([]byte, error) {
	return nil, h.RemoveSecret(ctx, s.args.GetPath())
}

func (s removeSecret) Verify(ctx context.Context, h host.Prober) error {
	_, err := h.Lstat(ctx, s.args.GetPath())
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	return fmt.Errorf("%s is there: %w", s.args.GetPath(), tasks.ErrNotSatisfied)
}

func (s removeSecret) Undo(ctx context.Context, h host.Host, _ []byte) error {
	return h.RestoreSecret(ctx, s.args.GetPath())
}
