package agent

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/millwright/agent/internal/gate"
	"github.com/gpuaas/millwright/agent/internal/gpu"
	"github.com/gpuaas/millwright/agent/internal/local"
	"github.com/gpuaas/millwright/agent/internal/state"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// answers are the agent's answers on the local socket.
type answers Agent

var _ local.Node = (*answers)(nil)

// Status says how the agent is, also while it has no identity or no journal.
func (a *answers) Status(context.Context) (*agentv1.GetStatusResponse, error) {
	st := &agentv1.GetStatusResponse{Version: a.cfg.Version}
	n, problem := (*Agent)(a).current()
	s := (*Agent)(a).inSafeMode()
	switch {
	case n != nil:
		a.whole(st, n)
		st.Conditions, st.Floor = n.health.Conditions(), timestamppb.New(n.floor)
		locks, err := n.executor.Claims()
		if err != nil {
			return nil, err
		}
		st.Locks = locks
		return st, n.store.View(func(tx *state.Tx) error { return fill(tx, st) })
	case s != nil:
		a.whole(st, s.node)
		st.Conditions, st.SafeMode = safeHealth{s.node.health}.Conditions(), s.mode
	default:
		st.ConnectionError = problem.Error()
	}
	return st, nil
}

// GPUs returns the node's GPUs, or why they cannot be asked. It needs neither an
// identity nor a journal.
func (a *answers) GPUs(ctx context.Context) (*agentv1.ListGpusResponse, error) {
	inv, err := a.gpu.Inventory(ctx)
	r := &agentv1.ListGpusResponse{Status: a.gpu.Status(), Inventory: inv}
	if se := (*gpu.StateError)(nil); errors.As(err, &se) {
		r.Status = se.Status
		return r, nil
	}
	return r, err
}

// whole tells what a node knows that has joined, whether or not it has a journal.
func (a *answers) whole(st *agentv1.GetStatusResponse, n *node) {
	ses, e := n.session.Status(), n.enrolment
	cluster := e.Cluster()
	st.Node, st.Server = e.Node(), e.Server()
	st.Connected, st.ConnectionError, st.SessionEpoch = ses.Connected, ses.Err, ses.Epoch
	st.ClockOffset = durationpb.New(-ses.ClockOffset)
	st.SvidNotAfter = timestamppb.New(e.NotAfter())
	st.Clock = n.clockStatus()
	st.TrustRootVersion, st.Cluster = e.Trust().Version(), fmt.Sprintf("%x", cluster)
}

// fill tells what the journal knows.
func fill(tx *state.Tx, st *agentv1.GetStatusResponse) error {
	head, err := tx.Head()
	if err != nil {
		return err
	}
	st.JournalId, st.LastSeq, st.AcknowledgedSeq = head.JournalID, head.LastSeq, head.AckedSeq
	err = tx.Open(func(_ string, s taskv1.TaskState) error {
		st.UnfinishedTasks++
		if s == taskv1.TaskState_TASK_STATE_HELD {
			st.HeldTasks++
		}
		return nil
	})
	if err != nil {
		return err
	}
	return tx.Intents(func(i *agentv1.IntentRecord) error {
		i.SignedLeaf, i.Envelope = nil, nil
		st.Intents = append(st.Intents, i)
		return nil
	})
}

// Journal returns tasks of the journal.
func (a *answers) Journal(_ context.Context, r *agentv1.ListJournalRequest) (*agentv1.ListJournalResponse, error) {
	n, problem := (*Agent)(a).current()
	if n == nil {
		return nil, a.noJournal(problem)
	}
	out := new(agentv1.ListJournalResponse)
	err := n.store.View(func(tx *state.Tx) error {
		if r.GetTaskId() != "" {
			t, err := journalTask(tx, r.GetTaskId(), true)
			out.Tasks = append(out.Tasks, t)
			return err
		}
		return tx.Tasks(func(id string) (bool, error) {
			t, err := journalTask(tx, id, false)
			if err != nil {
				return false, err
			}
			if !r.GetUnfinishedOnly() || !state.Terminal(t.GetRecord().GetState()) {
				out.Tasks = append(out.Tasks, t)
			}
			return len(out.GetTasks()) < int(r.GetLimit()), nil
		})
	})
	if errors.Is(err, state.ErrNotFound) {
		err = fmt.Errorf("task %s is not in the journal: %w", r.GetTaskId(), local.ErrNotFound)
	}
	return out, err
}

// noJournal says why nothing can be told of the journal.
func (a *answers) noJournal(problem error) error {
	if s := (*Agent)(a).inSafeMode(); s != nil {
		return fmt.Errorf("the agent is in safe mode: %s: %s", s.mode.GetReason(), s.mode.GetMessage())
	}
	return fmt.Errorf("there is no journal yet: %w", problem)
}

// journalTask reads a task, without what only machines read.
func journalTask(tx *state.Tx, id string, withSteps bool) (*agentv1.JournalTask, error) {
	rec, err := tx.Task(id)
	if err != nil {
		return nil, err
	}
	leaf := new(taskv1.TaskLeaf)
	if err := proto.Unmarshal(rec.GetSignedLeaf().GetLeaf(), leaf); err != nil {
		return nil, fmt.Errorf("decode leaf of task %s: %w", id, err)
	}
	plan := new(taskv1.Plan)
	if err := proto.Unmarshal(rec.GetPlan(), plan); err != nil {
		return nil, fmt.Errorf("decode plan of task %s: %w", id, err)
	}
	t := &agentv1.JournalTask{Record: rec, Kind: leaf.GetKind()}
	rec.Envelope, rec.SignedLeaf, rec.Plan = nil, nil, nil
	for i, p := range plan.GetSteps() {
		if !withSteps {
			break
		}
		s, err := tx.Step(id, uint32(i))
		if err != nil {
			return nil, err
		}
		t.Steps = append(t.Steps, &agentv1.JournalStep{Planned: p, Outcome: &taskv1.StepOutcome{
			Phase: s.GetPhase(), Attempts: s.GetAttempts(), StartTime: s.GetStartTime(), EndTime: s.GetEndTime(),
			Error: s.GetError(), Command: s.GetCommand(),
		}})
	}
	return t, nil
}

// Resolve settles a held task by root's word.
func (a *answers) Resolve(ctx context.Context, r *agentv1.ResolveTaskRequest) (taskv1.TaskState, error) {
	n, problem := (*Agent)(a).current()
	if n == nil {
		return 0, a.noJournal(problem)
	}
	err := n.store.View(func(tx *state.Tx) error { _, err := tx.Task(r.GetTaskId()); return err })
	if errors.Is(err, state.ErrNotFound) {
		return 0, fmt.Errorf("task %s is not in the journal: %w", r.GetTaskId(), local.ErrNotFound)
	}
	if err != nil {
		return 0, err
	}
	as, err := n.executor.Resolve(ctx, r)
	var refusal *gate.Refusal
	if errors.As(err, &refusal) {
		return 0, fmt.Errorf("%w: %s", local.ErrNotHeld, refusal.Message)
	}
	return as, err
}

// Export gives all that the journal holds to emit.
func (a *answers) Export(_ context.Context, emit func(*agentv1.JournalLine) error) error {
	n, problem := (*Agent)(a).current()
	if n == nil {
		return fmt.Errorf("no journal is open (%w): name its file with --file: %w", problem, local.ErrNotFound)
	}
	return n.store.Export(emit)
}
