package host

import (
	"context"
	"errors"
	"io/fs"
)

var (
	// ErrSecretAway is wrapped by the error of a secret whose value cannot be had
	// now: the control plane is not reached, or does not answer.
	ErrSecretAway = errors.New("the value of the secret cannot be had now")
	// ErrSecretWrong is wrapped by the error of a secret whose value the control
	// plane does not have, does not give, or gave and is not the one that was
	// signed.
	ErrSecretWrong = errors.New("not the secret that was signed")
)

// Secret names a value and binds it: the value whose SHA-256 after the salt is
// the one given. The value itself never passes through a step.
type Secret struct {
	Name   string
	Salt   []byte
	SHA256 []byte
}

// SecretFile is how the value of a secret stands in a file.
type SecretFile struct {
	Secret      Secret
	Mode        fs.FileMode // permission bits only
	User, Group string
}

// SecretState describes a file that holds a secret, without what it holds.
type SecretState struct {
	SHA256      []byte // over the salt that was asked with, then the content
	Mode        fs.FileMode
	User, Group string // names, or numbers that have none
}

// SecretReader observes files that hold secrets.
type SecretReader interface {
	// SecretState describes the file at path. A symbolic link there, anything else
	// that is no regular file, and more than [MaxSecret] bytes are an error.
	SecretState(ctx context.Context, path string, salt []byte) (SecretState, error)
}

// MaxSecret is the largest value of a secret in bytes.
const MaxSecret = 64 << 10

// SecretWriter changes files that hold secrets. Before the first change that a
// step makes to a path, what stands there is kept in a file of the step's own
// that only root can read, until the task has ended.
type SecretWriter interface {
	// WriteSecret gets the value and writes the file, atomically and durably. A
	// value that cannot be had now is an error that wraps [ErrSecretAway]; one
	// that is refused, or is not the one that is named, wraps [ErrSecretWrong],
	// and nothing was written.
	WriteSecret(ctx context.Context, path string, f SecretFile) error
	// RemoveSecret removes the file at path, if it is there.
	RemoveSecret(ctx context.Context, path string) error
	// RestoreSecret puts back what the step kept of path. When it kept nothing,
	// nothing was changed.
	RestoreSecret(ctx context.Context, path string) error
}
