package executor

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/gpuaas/millwright/agent/internal/clock"
	"github.com/gpuaas/millwright/agent/internal/gate"
	"github.com/gpuaas/millwright/agent/internal/state"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
)

// Limits of what the node takes on.
const (
	// Credits is how many tasks may be accepted and unfinished.
	Credits = 32
	// OutboxLimit is the size of unacknowledged frames at which new tasks are
	// deferred.
	OutboxLimit = 48 << 20
	// MaxEvents is how many events a task causes at most.
	MaxEvents = 12
)

// Journal is the durable store. [state.Store] is one.
type Journal interface {
	// Update makes what fn writes durable, all or nothing, before it returns.
	Update(fn func(*state.Tx) error) error
	// View reads what is durable.
	View(fn func(*state.Tx) error) error
	// NextFrames returns frames that follow after, and waits for them.
	NextFrames(ctx context.Context, after uint64, limit int) (journalID string, frames [][]byte, gap bool, err error)
	// UnackedBytes is the size of the frames that the server does not have.
	UnackedBytes() int64
	// Sweep forgets what need not be kept any longer.
	Sweep(now time.Time) error
}

// Gate decides about tasks. [gate.Gate] is one; its errors are [*gate.Refusal]
// and [*gate.Deferral].
type Gate interface {
	// Admit decides about a task that was delivered.
	Admit(ctx context.Context, env *taskv1.Envelope, signed *taskv1.SignedLeaf) (*gate.Admission, error)
	// Start decides about an accepted task before it begins.
	Start(ctx context.Context, env *taskv1.Envelope, signed *taskv1.SignedLeaf) (*gate.Admission, error)
	// Restore decides whether what a task has left may be brought back.
	Restore(ctx context.Context, env *taskv1.Envelope, signed *taskv1.SignedLeaf, rootVersion uint64) (*gate.Admission, error)
}

// Hosts are the node, as tasks see it.
type Hosts interface {
	// ForStep returns the host of one step of a task.
	ForStep(taskID string, step uint32) host.Host
	// Prober returns the host for plans and checks.
	Prober() host.Prober
}

// Keeper is a [Hosts] that keeps something of a task until it has ended, besides
// the journal: what secrets a step has overwritten.
type Keeper interface {
	// Forget deletes what is kept of a task.
	Forget(ctx context.Context, taskID string) error
	// Kept returns the tasks of which something is kept.
	Kept() ([]string, error)
}

// Config is what an executor needs. All fields must be set, but Early.
type Config struct {
	Journal  Journal
	Gate     Gate
	Hosts    Hosts
	Registry *tasks.Registry
	Clock    clock.Clock
	Logger   *slog.Logger
	// BootID is the kernel's boot id.
	BootID string
	// Room says why the node's disk has no room for one more task, or nil.
	Room func() error
	// Reboots bounds how often tasks reboot the node.
	Reboots RebootBudget
	// Early is called once in each run, when no intent of an early kind has to be
	// waited for any more: each is as it should be, or a task sees to it.
	Early func()
}

// Executor carries tasks out. Its methods are safe for concurrent use; Run is
// called once. What Deliver accepts before Run begins is carried out by it.
type Executor struct {
	cfg   Config
	log   *slog.Logger
	locks *lockTable
	wake  chan struct{} // holds a token when tasks are pending

	mu      sync.Mutex
	live    map[string]*task // tasks that a goroutine has or will get; guarded by mu
	pending []*task          // tasks that wait for their goroutine; guarded by mu
	broken  error            // why the journal could not be written last; guarded by mu
	inCall  map[string]int   // calls to the node that go on, by task; guarded by mu

	// calls are the calls to the node. Those that hang are not waited for.
	calls sync.WaitGroup
}

// New returns an executor that does nothing until Run.
func New(cfg Config) *Executor {
	return &Executor{
		cfg: cfg, log: cfg.Logger, locks: newLockTable(),
		wake: make(chan struct{}, 1), live: map[string]*task{}, inCall: map[string]int{},
	}
}

const (
	sweepEvery = time.Hour
	// patience is the wait between tries to go on after the journal refused.
	patience    = time.Second
	maxPatience = time.Minute
)

// Run carries on with the tasks that have not ended, and then with those that
// are accepted, until ctx ends. It returns nil once nothing of it goes on,
// calls to the node excepted that hang and were given up. Commands that run are
// left running, to be found again.
func (e *Executor) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	if err := e.resumeAll(ctx); err != nil {
		return err
	}
	e.forgetEnded(ctx)
	wg.Go(func() { e.sweep(ctx) })
	wg.Go(func() {
		e.reconcile(ctx)
		e.watch(ctx)
	})
	for ctx.Err() == nil {
		for _, t := range e.take() {
			t.prepare(ctx)
			wg.Go(func() { e.run(ctx, t) })
		}
		select {
		case <-ctx.Done():
		case <-e.wake:
		}
	}
	return nil
}

// launch hands a task to Run, once.
func (e *Executor) launch(t *task) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if t2 := e.live[t.id]; t2 != nil {
		t2.once = false // it may be about to end, and looks once more then
		return
	}
	e.live[t.id] = t
	e.pending = append(e.pending, t)
	select {
	case e.wake <- struct{}{}:
	default:
	}
}

func (e *Executor) take() []*task {
	e.mu.Lock()
	defer e.mu.Unlock()
	out := e.pending
	e.pending = nil
	return out
}

// run carries a task on until it has ended, is held, or ctx ends.
func (e *Executor) run(ctx context.Context, t *task) {
	for pause := patience; ; pause = min(2*pause, maxPatience) {
		e.mu.Lock()
		t.once = true
		e.mu.Unlock()
		err := t.carryOn(ctx)
		if e.left(t, err == nil || ctx.Err() != nil) {
			return
		}
		if err == nil {
			continue
		}
		t.log.ErrorContext(ctx, "task stopped where it is", "err", err, "again_in", pause)
		if !clock.Sleep(ctx, pause) {
			return
		}
	}
}

// left forgets a task that has ended, is held or is to stop, unless it was
// launched anew meanwhile.
func (e *Executor) left(t *task, over bool) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !over || !t.once {
		return false
	}
	delete(e.live, t.id)
	return true
}

func (e *Executor) sweep(ctx context.Context) {
	for {
		if err := e.cfg.Journal.Sweep(e.cfg.Clock.Now()); err != nil {
			e.log.ErrorContext(ctx, "sweep of the journal ended early", "err", err)
		}
		if !clock.Sleep(ctx, sweepEvery) {
			return
		}
		e.forgetEnded(ctx)
	}
}
