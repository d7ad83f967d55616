package agent

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/gpuaas/millwright/agent/internal/child"
	"github.com/gpuaas/millwright/agent/internal/clock"
	"github.com/gpuaas/millwright/agent/internal/session"
	"github.com/gpuaas/millwright/agent/internal/state"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// openAgain is the pause between tries at a state that cannot be used.
const openAgain = 3 * time.Second

// Why the agent is in safe mode; see SafeMode.reason.
const (
	reasonLocked     = "STATE_LOCKED"
	reasonNewer      = "STATE_NEWER"
	reasonDiskFull   = "STATE_DISK_FULL"
	reasonUnreadable = "STATE_UNREADABLE"
)

// opener opens the journal.
type opener func(ctx context.Context) (*state.Store, error)

// opener returns what opens the journal of n.
func (a *Agent) opener(n *node, joined bool) opener {
	cfg := state.Config{
		Dir: a.cfg.StateDir, Node: n.enrolment.Node(), Generation: n.enrolment.Generation(), BootID: n.bootID,
		Clock: a.cfg.Clock, HighWater: n.time, Logger: a.log.With("component", "state"),
		JustJoined: joined, JoinFloor: n.enrolment.Floor(), IdentityNotBefore: n.enrolment.NotBefore(), Guard: a.cfg.Guard,
	}
	if a.cfg.Hosts == nil { // other hosts have no millwrightd to run
		runner := child.New(child.Config{Logger: a.log.With("component", "state")})
		cfg.Inspect = state.InAnotherProcess(runner.Run, a.cfg.Executable)
	} else {
		cfg.Results = -1 // nor a disk of their own: their state is often in memory
	}
	return func(ctx context.Context) (*state.Store, error) { return state.Open(ctx, cfg) }
}

// openState opens the journal of n. As long as it cannot be used and must not
// be touched, the agent is in safe mode: it keeps a session and takes no work.
func (a *Agent) openState(ctx context.Context, n *node, joined bool) error {
	open := a.opener(n, joined)
	store, err := open(ctx)
	for err != nil && ctx.Err() == nil && !errors.Is(err, errNewBundle) {
		store, err = a.safeMode(ctx, n, err, open)
	}
	n.store = store
	return err
}

// safe is an agent in safe mode.
type safe struct {
	node *node
	mode *agentv1.SafeMode
}

// safeMode keeps a session for diagnostics until the journal can be opened, or
// until it cannot for another reason.
func (a *Agent) safeMode(ctx context.Context, n *node, why error, open opener) (*state.Store, error) {
	s := &safe{node: n, mode: explain(why)}
	n.health = &health{node: n}
	n.session = session.New(session.Config{
		Identities: identity{n.enrolment}, Journal: noJournal{}, Tasks: s, Trust: trust{n.enrolment},
		Node: safeHealth{n.health}, Clock: n.cfg.Clock, Logger: n.log.With("component", "session"), Version: n.cfg.Version,
		Kinds: kinds(n.cfg.Registry), Dial: n.cfg.Dial, SafeMode: s.mode,
	})
	a.log.ErrorContext(ctx, "safe mode: no task is taken", "reason", s.mode.GetReason(), "err", why)
	a.status("safe mode: " + s.mode.GetMessage())
	a.setSafe(s)
	defer a.setSafe(nil)

	var store *state.Store
	err := why
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return n.enrolment.Run(ctx) })
	g.Go(func() error { return n.session.Run(ctx) })
	g.Go(func() error { return n.awaitBundle(ctx, stamp(n.cfg.JoinFile)) })
	g.Go(func() error {
		for clock.Sleep(ctx, openAgain) {
			if store, err = open(ctx); err == nil || explain(err).GetReason() != s.mode.GetReason() {
				return errSafeModeEnds
			}
		}
		return nil
	})
	if ended := g.Wait(); ended != nil && !errors.Is(ended, errSafeModeEnds) && store == nil {
		err = ended
	}
	if err == nil {
		a.log.InfoContext(ctx, "safe mode ends: the state can be used")
	}
	return store, err
}

var errSafeModeEnds = errors.New("safe mode ends")

func (a *Agent) setSafe(s *safe) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.safe = s
}

// inSafeMode returns what the agent is in safe mode, or nil.
func (a *Agent) inSafeMode() *safe {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.safe
}

// explain says in a code and in words why the state cannot be used.
func explain(err error) *agentv1.SafeMode {
	m := &agentv1.SafeMode{Reason: reasonUnreadable, Message: err.Error() + "; nothing was touched: see to the disk and the rights of the file; the agent goes on by itself"}
	switch {
	case errors.Is(err, state.ErrLocked):
		m.Reason, m.Message = reasonLocked, err.Error()
	case errors.Is(err, state.ErrNewerSchema):
		m.Reason, m.Message = reasonNewer, err.Error()
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		m.Reason, m.Message = reasonDiskFull, err.Error()+"; make room on the disk of the node: the agent goes on by itself"
	}
	return m
}

// Deliver sends a task back to the queue: a server that gives one knows nothing
// of safe mode.
func (s *safe) Deliver(_ context.Context, as *agentv1.Assignment) *agentv1.AssignmentAnswer {
	return &agentv1.AssignmentAnswer{AssignmentId: as.GetAssignmentId(), Answer: &agentv1.AssignmentAnswer_Deferred{Deferred: &agentv1.Deferred{
		Reason: "SAFE_MODE", Message: s.mode.GetReason() + ": " + s.mode.GetMessage(), RetryAfter: durationpb.New(time.Minute),
	}}}
}

// Cancel cannot be done: whatever runs is not known.
func (s *safe) Cancel(context.Context, *agentv1.CancelRequest) error {
	return fmt.Errorf("the agent is in safe mode: %s", s.mode.GetMessage())
}

// Unfinished is not known.
func (s *safe) Unfinished(context.Context) ([]*agentv1.UnfinishedTask, error) { return nil, nil }

// noJournal is the journal of a node that cannot open its own.
type noJournal struct{}

// Head is that of no journal.
func (noJournal) Head(context.Context) (session.Head, error) { return session.Head{}, nil }

// NextEvents waits for nothing.
func (noJournal) NextEvents(ctx context.Context, _ uint64, _ int) (string, [][]byte, bool, error) {
	<-ctx.Done()
	return "", nil, false, ctx.Err()
}

// Ack has nothing to note.
func (noJournal) Ack(context.Context, string, uint64) error { return nil }

// Behind says nothing about a journal that nobody can look at.
func (noJournal) Behind(context.Context, string, uint64) error {
	return errors.New("the server has frames of a journal without a name")
}

// safeHealth is what can be said without a journal.
type safeHealth struct{ *health }

// Conditions returns what is wrong, or not.
func (h safeHealth) Conditions() []*taskv1.Condition {
	now := []*taskv1.Condition{h.policy(), h.identity(), h.clock()}
	h.date(now)
	return now
}
