package executor

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/millwright/agent/internal/gate"
	"github.com/gpuaas/millwright/agent/internal/state"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
)

// kindResolve is carried out by the executor itself: it is about a task and not
// about the node.
const kindResolve = "task.resolve"

// Optional events leave room for those that a task must be able to cause until
// it ends: planned and started, then undoing, held, an intent and finished.
// Those about steps leave room for two more that say that the task was resumed.
const (
	maxBeforePlan = MaxEvents - 6
	maxAfterPlan  = MaxEvents - 4
	maxWithSteps  = maxAfterPlan - 2
)

// task is one task in the hands of its goroutine.
type task struct {
	e   *Executor
	id  string
	log *slog.Logger

	// What the journal said when it was last read or written.
	rec   *agentv1.TaskRecord
	leaf  *taskv1.TaskLeaf
	kind  *tasks.Kind
	spec  proto.Message
	plan  *taskv1.Plan
	steps []*agentv1.StepRecord

	fresh   *agentv1.TaskRecord // what begins a task that the journal does not have
	grant   *grant              // its locks; asked for or held
	resumed bool                // whether it was taken up in this life of the agent
	once    bool                // nobody has launched it again; guarded by the executor's mu

	cancel cancelSwitch
}

func (e *Executor) newTask(id string) *task {
	return &task{e: e, id: id, log: e.log.With("task_id", id)}
}

// load reads the task from the journal.
func (t *task) load() error {
	return t.e.cfg.Journal.View(func(tx *state.Tx) error {
		rec, err := tx.Task(t.id)
		if err != nil {
			return err
		}
		t.rec = rec
		if rec.GetCancelRequested() {
			t.cancel.on()
		}
		t.plan, t.steps = nil, nil
		if len(rec.GetPlanDigest()) == 0 {
			return nil
		}
		t.plan = new(taskv1.Plan)
		if err := proto.Unmarshal(rec.GetPlan(), t.plan); err != nil {
			return fmt.Errorf("decode plan of task %s: %w", t.id, err)
		}
		for i := range t.plan.GetSteps() {
			sr, err := tx.Step(t.id, uint32(i))
			if err != nil {
				return err
			}
			t.steps = append(t.steps, sr)
		}
		return nil
	})
}

// open decodes the leaf and the spec of a task that was verified when it was
// accepted.
func (t *task) open() error {
	leaf := new(taskv1.TaskLeaf)
	if err := proto.Unmarshal(t.rec.GetSignedLeaf().GetLeaf(), leaf); err != nil {
		return fmt.Errorf("decode leaf of task %s: %w", t.id, err)
	}
	t.leaf = leaf
	t.log = t.e.log.With("task_id", t.id, "kind", leaf.GetKind())
	kind, err := t.e.cfg.Registry.Kind(leaf.GetKind())
	if err != nil {
		return err
	}
	t.kind = kind
	t.spec, err = kind.DecodeSpec(leaf.GetRevision(), leaf.GetSpec())
	return err
}

func (t *task) admit(adm *gate.Admission) {
	t.leaf, t.kind, t.spec = adm.Leaf, adm.Kind, adm.Spec
	t.log = t.e.log.With("task_id", t.id, "kind", adm.Leaf.GetKind())
}

func (t *task) planOnly() bool { return t.leaf.GetMode() == taskv1.Mode_MODE_PLAN }

func (t *task) resolves() bool {
	return t.leaf.GetKind() == kindResolve && !t.planOnly()
}

// quiet reports whether the server does not know the task: it restores an
// intent.
func (t *task) quiet() bool { return t.rec.GetOrigin() == state.OriginReconcile }

// errJournal is wrapped by an error that stops the task where it is.
var errJournal = errors.New("journal cannot be written")

// errStale is returned by a change that no longer fits the record.
var errStale = errors.New("the task has changed meanwhile")

// commit changes the task's record, and what fn writes beside it, in one
// transaction. An error wraps errJournal, or is errStale.
func (t *task) commit(fn func(tx *state.Tx, rec *agentv1.TaskRecord) error) error {
	var next *agentv1.TaskRecord
	err := t.e.update(func(tx *state.Tx) error {
		rec, err := tx.Task(t.id)
		if errors.Is(err, state.ErrNotFound) && t.fresh != nil {
			rec, err = proto.CloneOf(t.fresh), nil
		}
		if err != nil {
			return err
		}
		next = rec
		if state.Terminal(rec.GetState()) {
			return errStale
		}
		if err := fn(tx, rec); err != nil {
			return err
		}
		if t.quiet() && state.Terminal(rec.GetState()) {
			return tx.DeleteTask(t.id) // its event tells of it
		}
		return tx.PutTask(rec)
	})
	if err != nil {
		return err
	}
	t.rec = next
	return nil
}

// update writes to the journal and remembers whether that worked.
func (e *Executor) update(fn func(*state.Tx) error) error {
	err := e.cfg.Journal.Update(fn)
	e.mu.Lock()
	if err == nil {
		e.broken = nil
	} else if errors.Is(err, state.ErrWrite) {
		e.broken = err
	}
	e.mu.Unlock()
	if err != nil && !errors.Is(err, errStale) {
		return fmt.Errorf("%w: %w", errJournal, err)
	}
	return err
}

// emit appends an event of the task and counts it.
func (t *task) emit(tx *state.Tx, rec *agentv1.TaskRecord, ev *taskv1.Event) error {
	if t.quiet() {
		return nil
	}
	rec.Events++
	_, err := tx.Append(ev)
	return err
}

// emitOptional appends an event while there is room for it.
func (t *task) emitOptional(tx *state.Tx, rec *agentv1.TaskRecord, ev *taskv1.Event) error {
	limit := uint32(maxBeforePlan)
	if len(rec.GetPlanDigest()) > 0 {
		limit = maxAfterPlan
	}
	if rec.GetEvents() >= limit {
		return nil
	}
	return t.emit(tx, rec, ev)
}

func (e *Executor) now() *timestamppb.Timestamp { return timestamppb.New(e.cfg.Clock.Now()) }

// outcomes are the steps as events tell them.
func outcomes(steps []*agentv1.StepRecord) []*taskv1.StepOutcome {
	out := make([]*taskv1.StepOutcome, len(steps))
	for i, sr := range steps {
		out[i] = outcome(sr)
	}
	return out
}

func outcome(sr *agentv1.StepRecord) *taskv1.StepOutcome {
	return &taskv1.StepOutcome{
		Phase: sr.GetPhase(), Attempts: sr.GetAttempts(), StartTime: sr.GetStartTime(), EndTime: sr.GetEndTime(),
		Error: sr.GetError(), Command: sr.GetCommand(),
	}
}

// panicked is the error of a task's code that panicked.
type panicked struct{ value any }

func (p *panicked) Error() string { return fmt.Sprintf("panic: %v", p.value) }

// guard calls code of a task and turns a panic into an error.
func (t *task) guard(fn func() error) (err error) {
	defer func() {
		if r := recover(); r != nil {
			t.log.Error("code of a task panicked", "panic", fmt.Sprint(r), "stack", string(debug.Stack()))
			err = &panicked{r}
		}
	}()
	return fn()
}

// cancelSwitch carries a person's wish to stop a task to its goroutine.
type cancelSwitch struct {
	mu   sync.Mutex
	set  bool                    // guarded by mu
	stop context.CancelCauseFunc // ends what can be stopped, if anything; guarded by mu
}

// errCancelled is the cause of a context that ends because of a cancel.
var errCancelled = fmt.Errorf("%w: the task is cancelled", host.ErrStop)

func (c *cancelSwitch) on() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.set = true
	if c.stop != nil {
		c.stop(errCancelled)
	}
}

func (c *cancelSwitch) isOn() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.set
}

// bind returns a context that a cancel ends. The goroutine of the task has one
// at a time.
func (c *cancelSwitch) bind(ctx context.Context) (context.Context, func()) {
	ctx, stop := context.WithCancelCause(ctx)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.set {
		stop(errCancelled)
	}
	c.stop = stop
	return ctx, func() {
		c.mu.Lock()
		c.stop = nil
		c.mu.Unlock()
		stop(nil)
	}
}

func sameHash(a, b []byte) bool { return len(a) > 0 && bytes.Equal(a, b) }
