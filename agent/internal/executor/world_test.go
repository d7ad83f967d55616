package executor_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/gpuaas/millwright/agent/internal/executor"
	"github.com/gpuaas/millwright/agent/internal/state"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
)

// world is a node that has nothing but switches. Its kinds turn them on, one by
// a step, and undo turns them back. Hooks make any call wait or fail.
type world struct {
	mu       sync.Mutex
	switches map[string]int                         // how often each was applied and not undone; guarded by mu
	started  map[string]bool                        // programs that were started; guarded by mu
	calls    []string                               // guarded by mu
	hooks    map[string]func(context.Context) error // by call, such as "apply a"; guarded by mu
	after    map[string]func(context.Context) error // the same, after the change; guarded by mu
}

func newWorld() *world {
	return &world{switches: map[string]int{}, started: map[string]bool{}, hooks: map[string]func(context.Context) error{}, after: map[string]func(context.Context) error{}}
}

// on sets a hook; nil removes it.
func (w *world) on(call string, fn func(context.Context) error) { w.set(w.hooks, call, fn) }

// onAfter sets a hook for when the change was made.
func (w *world) onAfter(call string, fn func(context.Context) error) { w.set(w.after, call, fn) }

func (w *world) set(m map[string]func(context.Context) error, call string, fn func(context.Context) error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	m[call] = fn
}

func (w *world) call(ctx context.Context, call string, change func()) error {
	w.mu.Lock()
	w.calls = append(w.calls, call)
	before, after := w.hooks[call], w.after[call]
	w.mu.Unlock()
	if before != nil {
		if err := before(ctx); err != nil {
			return err
		}
	}
	w.mu.Lock()
	change()
	w.mu.Unlock()
	if after != nil {
		return after(ctx)
	}
	return nil
}

func (w *world) get(name string) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.switches[name]
}

func (w *world) put(name string, n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.switches[name] = n
}

func (w *world) state() map[string]int {
	w.mu.Lock()
	defer w.mu.Unlock()
	out := maps.Clone(w.switches)
	maps.DeleteFunc(out, func(_ string, n int) bool { return n == 0 })
	return out
}

func (w *world) count(call string) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := 0
	for _, c := range w.calls {
		if c == call {
			n++
		}
	}
	return n
}

// toggle is a step that turns one switch on. Its effect is in its type.
type toggle struct {
	w    *world
	name string
	args proto.Message
}

func (s toggle) Args() proto.Message { return s.args }
func (s toggle) Title() string       { return "turn on " + s.name }

func (s toggle) Observe(ctx context.Context, _ host.Reader) (before []byte, err error) {
	err = s.w.call(ctx, "observe "+s.name, func() { before = []byte{byte(s.w.switches[s.name])} })
	return before, err
}

func (s toggle) Apply(ctx context.Context, _ host.Host) ([]byte, error) {
	err := s.w.call(ctx, "apply "+s.name, func() { s.w.switches[s.name] = 1 })
	return []byte("out of " + s.name), err
}

func (s toggle) Verify(ctx context.Context, _ host.Prober) error {
	on := false
	if err := s.w.call(ctx, "verify "+s.name, func() { on = s.w.switches[s.name] > 0 }); err != nil {
		return err
	}
	if !on {
		return fmt.Errorf("switch %s is off: %w", s.name, tasks.ErrNotSatisfied)
	}
	return nil
}

func (s toggle) Undo(ctx context.Context, _ host.Host, before []byte) error {
	return s.w.call(ctx, "undo "+s.name, func() { s.w.switches[s.name] = int(before[0]) })
}

// counter counts each apply: it must never happen twice for one step.
type counter struct{ toggle }

func (s counter) Apply(ctx context.Context, _ host.Host) ([]byte, error) {
	err := s.w.call(ctx, "apply "+s.name, func() { s.w.switches[s.name]++ })
	return []byte("out of " + s.name), err
}

// program is a command: it cannot be undone, and a host that is asked again
// finds it again and never starts it twice.
type program struct{ counter }

func (s program) Apply(ctx context.Context, _ host.Host) ([]byte, error) {
	err := s.w.call(ctx, "apply "+s.name, func() {
		if !s.w.started[s.name] {
			s.w.started[s.name] = true
			s.w.switches[s.name]++
		}
	})
	return []byte("out of " + s.name), err
}

func (s program) Outcome(out []byte) (*taskv1.CommandOutcome, error) {
	return &taskv1.CommandOutcome{InvocationId: string(out)}, nil
}

func (s program) Verify(context.Context, host.Prober) error { return nil }

func (s program) Undo(context.Context, host.Host, []byte) error {
	return fmt.Errorf("program %s: %w", s.name, tasks.ErrIrreversible)
}

// stubborn is a toggle that may be tried three times.
type stubborn struct{ toggle }

func (stubborn) Retry() (uint32, time.Duration) { return 3, 10 * time.Second }

// switchTask plans from words such as "a check:b once:c reboot:d": the steps
// for the switches that are off. The first word also names the lock, unless the
// spec begins with "@lock ".
type switchTask struct {
	w      *world
	intent tasks.IntentChange
	action bool
}

func words(spec *wrapperspb.StringValue) (lock string, out []string) {
	out = strings.Fields(spec.GetValue())
	if l, ok := strings.CutPrefix(out[0], "@"); ok {
		return l, out[1:]
	}
	return "switch:" + out[0], out
}

func (t switchTask) Validate(spec *wrapperspb.StringValue) error {
	if spec.GetValue() == "" {
		return tasks.Problems{{Field: "value", Rule: "must not be empty"}}
	}
	return nil
}

func (t switchTask) Locks(spec *wrapperspb.StringValue) []tasks.Lock {
	lock, _ := words(spec)
	return []tasks.Lock{{Name: lock}}
}

func (t switchTask) Plan(ctx context.Context, _ host.Reader, spec *wrapperspb.StringValue) (tasks.Plan, error) {
	lock, names := words(spec)
	if err := t.w.call(ctx, "plan "+lock, func() {}); err != nil {
		return tasks.Plan{}, err
	}
	p := tasks.Plan{Disturbs: &tasks.Disturbance{What: "turns switches"}}
	for _, word := range names {
		s := t.w.step(word)
		if !t.action && t.w.get(nameOf(word)) > 0 {
			continue
		}
		p.Steps = append(p.Steps, s)
		p.Differences = append(p.Differences, tasks.Difference{Subject: "switch " + nameOf(word), Have: "off", Want: "on"})
	}
	return p, nil
}

func nameOf(word string) string { return word[strings.Index(word, ":")+1:] }

func (w *world) step(word string) tasks.Step {
	effect, name, ok := strings.Cut(word, ":")
	if !ok {
		name = word
	}
	switch {
	case !ok:
		return toggle{w, name, &wrapperspb.StringValue{Value: name}}
	case effect == "only":
		return toggle{w, name, &wrapperspb.StringValue{Value: name}}
	case effect == "wait":
		return asker{toggle{w, name, &taskv1.FilesystemMakeStep{Label: name}}}
	case effect == "retry":
		return stubborn{toggle{w, name, &taskv1.DirectoryStep{Path: name}}}
	case effect == "check":
		return counter{toggle{w, name, &wrapperspb.BytesValue{Value: []byte(name)}}}
	case effect == "once":
		return program{counter{toggle{w, name, &taskv1.RemoveFileStep{Path: name}}}}
	default:
		return counter{toggle{w, name, &taskv1.UnitStep{Unit: name}}}
	}
}

func (t switchTask) Verify(ctx context.Context, _ host.Prober, spec *wrapperspb.StringValue) error {
	lock, names := words(spec)
	if err := t.w.call(ctx, "check "+lock, func() {}); err != nil || t.action {
		return err
	}
	for _, word := range names {
		if t.w.get(nameOf(word)) == 0 && !strings.HasPrefix(word, "only:") {
			return fmt.Errorf("switch %s is off: %w", nameOf(word), tasks.ErrNotSatisfied)
		}
	}
	return nil
}

func (t switchTask) Result(_ context.Context, _ host.Prober, spec *wrapperspb.StringValue, outs [][]byte) (proto.Message, error) {
	all := make([]string, len(outs))
	for i, o := range outs {
		all[i] = string(o)
	}
	return wrapperspb.String(strings.Join(all, ",")), nil
}

// ForRestore leaves out the words that begin with "only:".
func (t switchTask) ForRestore(spec *wrapperspb.StringValue) *wrapperspb.StringValue {
	all := slices.DeleteFunc(strings.Fields(spec.GetValue()), func(word string) bool { return strings.HasPrefix(word, "only:") })
	return wrapperspb.String(strings.Join(all, " "))
}

func (t switchTask) Intent(spec *wrapperspb.StringValue) (string, tasks.IntentChange) {
	lock, _ := words(spec)
	return lock, t.intent
}

// resolveTask stands for tasks/task, whose steps the executor never asks for.
type resolveTask struct{}

func (resolveTask) Validate(*taskv1.ResolveSpec) error     { return nil }
func (resolveTask) Locks(*taskv1.ResolveSpec) []tasks.Lock { return nil }
func (resolveTask) Plan(context.Context, host.Reader, *taskv1.ResolveSpec) (tasks.Plan, error) {
	return tasks.Plan{}, errors.New("not planned")
}
func (resolveTask) Verify(context.Context, host.Prober, *taskv1.ResolveSpec) error { return nil }
func (resolveTask) Result(context.Context, host.Prober, *taskv1.ResolveSpec, [][]byte) (proto.Message, error) {
	return nil, nil
}

func (w *world) registry() *tasks.Registry {
	r := w.kinds()
	r.AddAsker(manager{w})
	step := func(name string, e taskv1.Effect) tasks.StepInfo {
		return tasks.StepInfo{Type: name, Revision: 1, Effect: e, Undoable: e != taskv1.Effect_EFFECT_AT_MOST_ONCE}
	}
	tasks.AddStep(r, step("toggle", taskv1.Effect_EFFECT_IDEMPOTENT), func(a *wrapperspb.StringValue) tasks.Step { return w.step(a.GetValue()) })
	tasks.AddStep(r, step("retry", taskv1.Effect_EFFECT_IDEMPOTENT), func(a *taskv1.DirectoryStep) tasks.Step { return w.step("retry:" + a.GetPath()) })
	tasks.AddStep(r, step("wait", taskv1.Effect_EFFECT_IDEMPOTENT), func(a *taskv1.FilesystemMakeStep) tasks.Step { return w.step("wait:" + a.GetLabel()) })
	tasks.AddStep(r, step("check", taskv1.Effect_EFFECT_CHECK_THEN_ACT), func(a *wrapperspb.BytesValue) tasks.Step { return w.step("check:" + string(a.GetValue())) })
	tasks.AddStep(r, step("once", taskv1.Effect_EFFECT_AT_MOST_ONCE), func(a *taskv1.RemoveFileStep) tasks.Step { return w.step("once:" + a.GetPath()) })
	tasks.AddStep(r, step("reboot", taskv1.Effect_EFFECT_REBOOT), func(a *taskv1.UnitStep) tasks.Step { return w.step("reboot:" + a.GetUnit()) })
	return r
}

// kinds is the registry of an agent that knows the kinds and none of the steps.
func (w *world) kinds() *tasks.Registry {
	r := tasks.NewRegistry()
	info := func(kind string, class tasks.Class) tasks.Info {
		return tasks.Info{Kind: kind, Revision: 1, Class: class}
	}
	tasks.Add(r, info("switch.on", tasks.State), switchTask{w: w, intent: tasks.IntentSet})
	tasks.Add(r, info("switch.keep", tasks.State), keptTask{switchTask{w: w, intent: tasks.IntentSet}})
	tasks.Add(r, info("switch.forget", tasks.State), switchTask{w: w, intent: tasks.IntentRemove})
	tasks.Add(r, info("switch.press", tasks.Action), switchTask{w: w, action: true})
	early := info("switch.early", tasks.State)
	early.Early = true
	tasks.Add(r, early, switchTask{w: w, intent: tasks.IntentSet})
	past := info("node.press", tasks.Action)
	past.PassesHeld = true
	tasks.Add(r, past, switchTask{w: w, action: true})
	tasks.Add(r, info("task.resolve", tasks.Action), resolveTask{})
	return r
}

// noHosts is for kinds that never touch a host.
// anyRoom is a disk with room.
func anyRoom() error { return nil }

type noHosts struct{}

func (noHosts) ForStep(string, uint32) host.Host { return nil }
func (noHosts) Prober() host.Prober              { return nil }

// node is an agent's executor on a world, which can be stopped and started.
type node struct {
	t       *testing.T
	w       *world
	clock   *testClock
	store   *state.Store
	dir     string
	boot    string
	gate    executor.Gate
	journal func(*state.Store) executor.Journal
	early   func() // of the executor that is opened next
	e       *executor.Executor
	stop    func()
}

func newNode(t *testing.T) *node {
	w := newWorld()
	n := &node{t: t, w: w, clock: newClock(), dir: memoryDir(t), boot: "boot-1"}
	n.gate = openGate{w.registry()}
	n.journal = func(s *state.Store) executor.Journal { return s }
	n.open()
	n.start()
	t.Cleanup(func() {
		n.stop()
		if err := n.store.Check(); err != nil {
			t.Errorf("Check: %v", err)
		}
		if err := n.store.Close(); err != nil {
			t.Errorf("close state: %v", err)
		}
	})
	return n
}

func (n *node) open() {
	n.t.Helper()
	s, err := state.Open(n.t.Context(), state.Config{
		Results: -1, // it is in memory
		Dir:     n.dir, Node: "gpu-001", Generation: 1, BootID: n.boot, Clock: n.clock,
		Logger: discard(), JustJoined: true, JoinFloor: t0.Add(-time.Hour),
	})
	if err != nil {
		n.t.Fatalf("open state: %v", err)
	}
	n.store = s
	n.e = executor.New(executor.Config{
		Journal: n.journal(s), Gate: n.gate, Hosts: noHosts{}, Registry: n.w.registry(),
		Clock: n.clock, Logger: discard(), BootID: n.boot, Room: anyRoom, Reboots: executor.RebootBudget{Most: 3, Within: 24 * time.Hour}, Early: n.early,
	})
}

func (n *node) start() { n.stop = runExecutor(n.t.Context(), n.e) }

// restart is a new life of the agent, in the boot that is given.
func (n *node) restart(boot string) {
	n.t.Helper()
	n.halt()
	n.boot = boot
	n.open()
	n.start()
}

func (n *node) halt() {
	n.t.Helper()
	n.stop()
	if err := n.store.Check(); err != nil {
		n.t.Errorf("Check: %v", err)
	}
	if err := n.store.Close(); err != nil {
		n.t.Fatal(err)
	}
}

func taskID(i int) string { return fmt.Sprintf("01890000-0000-7000-8000-%012d", i) }

func (n *node) deliver(i int, kind, spec string, change ...func(*taskv1.TaskLeaf)) *agentv1.AssignmentAnswer {
	return n.e.Deliver(n.t.Context(), assignment(taskID(i), kind, wrapperspb.String(spec), change...))
}

// patience is how long a test waits for what must come: in a bubble, where
// timers go on for ever, it ends what would never come.
const patience = time.Hour

// accept delivers a task that must be accepted.
func (n *node) accept(i int, kind, spec string, change ...func(*taskv1.TaskLeaf)) {
	n.t.Helper()
	if a := n.deliver(i, kind, spec, change...); a.GetAccepted() == nil {
		n.t.Fatalf("Deliver(%d, %s, %q) = %v, want accepted", i, kind, spec, a)
	}
}

// ended waits for the end of a task, or until it is held.
func (n *node) ended(i int) *agentv1.TaskRecord {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(n.t.Context(), patience)
	defer cancel()
	if err := waitEnded(ctx, n.store, taskID(i)); err != nil {
		n.t.Fatalf("wait for task %d: %v", i, err)
	}
	return n.record(i)
}

func (n *node) record(i int) *agentv1.TaskRecord {
	n.t.Helper()
	var rec *agentv1.TaskRecord
	if err := n.store.View(func(tx *state.Tx) (err error) {
		rec, err = tx.Task(taskID(i))
		return err
	}); err != nil {
		n.t.Fatalf("task %d: %v", i, err)
	}
	return rec
}

func (n *node) steps(i int) []*agentv1.StepRecord {
	n.t.Helper()
	var out []*agentv1.StepRecord
	if err := n.store.View(func(tx *state.Tx) error {
		return tx.Steps(taskID(i), func(_ uint32, sr *agentv1.StepRecord) error {
			out = append(out, sr)
			return nil
		})
	}); err != nil {
		n.t.Fatal(err)
	}
	return out
}

// until waits for an event.
func (n *node) until(match func(*taskv1.Event) bool) {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(n.t.Context(), patience)
	defer cancel()
	if err := waitEvent(ctx, n.store, match); err != nil {
		n.t.Fatalf("wait for event: %v", err)
	}
}

func (n *node) events() []*taskv1.Event {
	n.t.Helper()
	var out []*taskv1.Event
	if err := n.store.View(func(tx *state.Tx) error {
		frames, _, err := tx.Frames(0, 10000)
		for _, f := range frames {
			ev := new(taskv1.Event)
			if err := proto.Unmarshal(f, ev); err != nil {
				return err
			}
			out = append(out, ev)
		}
		return err
	}); err != nil {
		n.t.Fatal(err)
	}
	return out
}

// story is the names of the events about a task, in order.
func (n *node) story(i int) string {
	var out []string
	for _, ev := range n.events() {
		m := ev.ProtoReflect()
		fd := m.WhichOneof(m.Descriptor().Oneofs().ByName("payload"))
		about := m.Get(fd).Message()
		id := about.Descriptor().Fields().ByName("task_id")
		if id != nil && about.Get(id).String() == taskID(i) {
			out = append(out, string(fd.Name()))
		}
	}
	return strings.Join(out, " ")
}

func want(t *testing.T, rec *agentv1.TaskRecord, s taskv1.TaskState, undo taskv1.UndoState, reason string) {
	t.Helper()
	if rec.GetState() != s || rec.GetUndo() != undo || rec.GetReason() != reason {
		t.Errorf("task is %v, undo %v, reason %s (%s), want %v, %v, %s", rec.GetState(), rec.GetUndo(), rec.GetReason(), rec.GetMessage(), s, undo, reason)
	}
}

func (w *world) want(t *testing.T, want map[string]int) {
	t.Helper()
	if got := w.state(); !maps.Equal(got, want) {
		t.Errorf("switches = %v, want %v", got, want)
	}
}

const (
	succeeded = taskv1.TaskState_TASK_STATE_SUCCEEDED
	failed    = taskv1.TaskState_TASK_STATE_FAILED
	cancelled = taskv1.TaskState_TASK_STATE_CANCELLED
	refused   = taskv1.TaskState_TASK_STATE_REFUSED
	expired   = taskv1.TaskState_TASK_STATE_EXPIRED
	abandoned = taskv1.TaskState_TASK_STATE_ABANDONED
	held      = taskv1.TaskState_TASK_STATE_HELD

	noUndo      = taskv1.UndoState_UNDO_STATE_UNSPECIFIED
	notNeeded   = taskv1.UndoState_UNDO_STATE_NOT_NEEDED
	complete    = taskv1.UndoState_UNDO_STATE_COMPLETE
	notPossible = taskv1.UndoState_UNDO_STATE_NOT_POSSIBLE
)
