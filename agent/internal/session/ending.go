package session

import (
	"errors"
	"fmt"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/status"

	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
)

var (
	// errReplaced, errExpires and errJournal end a session that is well, to
	// begin another at once.
	errReplaced = errors.New("the node has a new identity")
	errExpires  = errors.New("the node's certificate is about to end")
	errJournal  = errors.New("the node has a new journal")

	errSilent    = errors.New("the server has said nothing for 2.5 heartbeats")
	errNoWelcome = errors.New("the server did not answer the Hello in time")
	errClosed    = errors.New("the server closed the stream")
	errProtocol  = errors.New("the server broke the protocol")
)

// ending is how a session ended.
type ending struct {
	err      error
	welcomed bool
	asked    time.Duration // from a DrainNotice
}

// planned reports whether the session ended so that another begins at once.
func (e ending) planned() bool {
	return errors.Is(e.err, errReplaced) || errors.Is(e.err, errJournal)
}

// retryAfter is the pause that the server asked for, 0 when it did not.
func (e ending) retryAfter() time.Duration {
	asked := e.asked
	var bye *goodbye
	if errors.As(e.err, &bye) {
		asked = max(asked, bye.after)
	}
	if st, ok := status.FromError(e.err); ok {
		for _, d := range st.Details() {
			if info, ok := d.(*errdetails.RetryInfo); ok {
				asked = max(asked, info.GetRetryDelay().AsDuration())
			}
		}
	}
	return asked
}

// goodbye is the server's last word as an error.
type goodbye struct {
	reason, message string
	after           time.Duration
}

func newGoodbye(g *agentv1.Goodbye) *goodbye {
	return &goodbye{reason: g.GetReason(), message: g.GetMessage(), after: g.GetReconnectAfter().AsDuration()}
}

func (g *goodbye) Error() string {
	return fmt.Sprintf("the server ended the session: %s: %s", g.reason, g.message)
}
