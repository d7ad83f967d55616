package courier

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/gpuaas/millwright/tasks/host"
)

// liar is a control plane that answers each call with one error.
type liar struct {
	grpc.ClientConnInterface
	err error
}

func (l liar) Invoke(context.Context, string, any, any, ...grpc.CallOption) error { return l.err }

func same(id string) (string, error) { return id, nil }

// TestWords: what a control plane answers is told from one that is away, and its
// words do not fill the journal.
func TestWords(t *testing.T) {
	for code, want := range map[codes.Code]error{
		codes.NotFound: host.ErrSecretWrong, codes.FailedPrecondition: host.ErrSecretWrong, codes.InvalidArgument: host.ErrSecretWrong,
		codes.Unimplemented: host.ErrSecretWrong, codes.Unavailable: host.ErrSecretAway, codes.PermissionDenied: host.ErrSecretAway,
	} {
		c := New(same)
		c.set(liar{err: status.Error(code, strings.Repeat("é", 1<<20))})
		_, err := c.Fetch(t.Context(), "t", "key")
		if !errors.Is(err, want) || len(err.Error()) > 1024 || !strings.Contains(err.Error(), "key: é") {
			t.Errorf("%v: %d bytes, is %v: %v", code, len(err.Error()), want, errors.Is(err, want))
		}
	}
}

// TestNoSession waits for a session, and not for ever.
func TestNoSession(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begun := time.Now()
		if _, err := New(same).Fetch(t.Context(), "t", "key"); !errors.Is(err, host.ErrSecretAway) {
			t.Errorf("without a session: %v", err)
		}
		if waited := time.Since(begun); waited != Patience {
			t.Errorf("it waited %v, want %v", waited, Patience)
		}
	})
}
