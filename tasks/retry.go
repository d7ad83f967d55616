package tasks

import (
	"context"
	"errors"
	"time"

	"github.com/gpuaas/millwright/tasks/host"
)

// Retrier is a step that may be tried again when an attempt fails for a reason
// that may pass; see [Transient]. Only a step whose effect is idempotent or
// check-then-act may be one.
type Retrier interface {
	// Retry returns how often it is tried in all, and the wait before the second
	// attempt, which doubles before each further one.
	Retry() (attempts uint32, backOff time.Duration)
}

// Delayer is a step that waits before its first attempt. A cancel ends the wait.
type Delayer interface {
	// Delay is that wait.
	Delay() time.Duration
}

// Prover is a step whose outcome is read from the node when its Apply was cut
// off, as by the reboot that it asked for.
type Prover interface {
	// Proof returns what Apply would have. It is called after Verify.
	Proof(ctx context.Context, h host.Prober) (out []byte, err error)
}

// Transient marks an error of Apply as one that may pass: a [Retrier] is tried
// again for it. All other errors are final. A nil error stays nil.
func Transient(err error) error {
	if err == nil {
		return nil
	}
	return &transient{err}
}

// IsTransient reports whether err, or an error that it wraps, was marked by
// [Transient].
func IsTransient(err error) bool {
	var t *transient
	return errors.As(err, &t)
}

type transient struct{ err error }

func (t *transient) Error() string { return t.err.Error() }
func (t *transient) Unwrap() error { return t.err }
