// Package courier asks the control plane for the values of secrets. It keeps
// none: a value is handed on and forgotten.
package courier

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/gpuaas/millwright/agent/internal/crash"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	"github.com/gpuaas/millwright/tasks/host"
)

// Patience is how long a value is waited for while there is no session. The
// step that wants it is tried again later.
const Patience = 30 * time.Second

// Courier fetches over the connection of the session. It is safe for concurrent
// use.
type Courier struct {
	// signed returns the id under which a task was signed: the node's own tasks
	// have another.
	signed func(taskID string) (string, error)

	mu      sync.Mutex
	conn    grpc.ClientConnInterface // nil: there is no session; guarded by mu
	changed chan struct{}            // closed when conn changes; guarded by mu
}

// New returns a courier without a connection.
func New(signed func(taskID string) (string, error)) *Courier {
	return &Courier{signed: signed, changed: make(chan struct{})}
}

// Serve lends the courier a connection until ctx ends.
func (c *Courier) Serve(ctx context.Context, conn grpc.ClientConnInterface) {
	c.set(conn)
	defer c.set(nil)
	<-ctx.Done()
}

func (c *Courier) set(conn grpc.ClientConnInterface) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.conn = conn
	close(c.changed)
	c.changed = make(chan struct{})
}

func (c *Courier) get() (grpc.ClientConnInterface, <-chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.conn, c.changed
}

// Fetch returns the value of a secret that a task's leaf names, as the control
// plane gives it. An error wraps [host.ErrSecretAway] or [host.ErrSecretWrong].
func (c *Courier) Fetch(ctx context.Context, taskID, reference string) ([]byte, error) {
	id, err := c.signed(taskID)
	if err != nil {
		return nil, fmt.Errorf("fetch secret %s: %w", reference, err)
	}
	ctx, cancel := context.WithTimeout(ctx, Patience)
	defer cancel()
	for {
		conn, changed := c.get()
		if conn == nil {
			select {
			case <-changed:
				continue
			case <-ctx.Done():
				return nil, fmt.Errorf("%w: %s: there is no session with the control plane", host.ErrSecretAway, reference)
			}
		}
		crash.Point("courier.fetch.before")
		resp, err := agentv1.NewAgentServiceClient(conn).FetchSecret(ctx, &agentv1.FetchSecretRequest{TaskId: id, Reference: reference})
		crash.Point("courier.fetch.after")
		if err != nil {
			return nil, fetchError(reference, err)
		}
		return resp.GetValue(), nil
	}
}

// maxWords bounds what the control plane says into the journal and the log.
const maxWords = 512

// fetchError tells what may pass from what will not.
func fetchError(reference string, err error) error {
	st := status.Convert(err)
	words := st.Message()
	words = strings.ToValidUTF8(words[:min(len(words), maxWords)], "")
	switch st.Code() {
	case codes.NotFound, codes.FailedPrecondition, codes.InvalidArgument, codes.Unimplemented:
		return fmt.Errorf("%w: %s: %s", host.ErrSecretWrong, reference, words)
	default:
		return fmt.Errorf("%w: %s: %s", host.ErrSecretAway, reference, words)
	}
}
