// Package tasks is the contract between a kind of task and the agent.
//
// A kind is a typed spec, a plan made of steps that are data, and a proof that
// the node reached the spec. A task never carries out its own steps: it returns
// them, and the agent's executor journals each one before, between and after it
// touches the node, so that a crash at any instruction can be finished or undone
// afterwards.
//
// The control plane uses the same code to validate specs at admission, and
// never has a [host.Host].
package tasks

import (
	"context"
	"errors"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks/host"
)

var (
	// ErrIrreversible is returned by [Step.Undo] when nothing can be restored.
	// The executor goes on with the undo and reports it as not possible.
	ErrIrreversible = errors.New("step cannot be undone")
	// ErrPrecondition is wrapped by an error of [Task.Plan] when the node is not
	// fit for the spec: the task is refused and no step begins.
	ErrPrecondition = errors.New("node does not fit the spec")
	// ErrNotSatisfied is wrapped by an error of a Verify when the node was
	// reached and is not as it should be.
	ErrNotSatisfied = errors.New("not as the spec wants it")
	// ErrUnknownKind is returned for a kind or revision that this build lacks.
	ErrUnknownKind = errors.New("unknown kind")
	// ErrUnknownStep is returned for a step type or revision that this build lacks.
	ErrUnknownStep = errors.New("unknown step type")
)

// A Task turns one kind of spec into a plan. Implementations hold no state and
// are safe for concurrent use.
type Task[S proto.Message] interface {
	// Validate reports every problem in spec, as [Problems]. It is pure and
	// never panics: it is called at admission and again on the node.
	Validate(spec S) error
	// Locks names what the task needs for itself while it plans and runs. It is
	// pure, and called only with a spec that Validate accepts.
	Locks(spec S) []Lock
	// Plan returns the steps that take the node from its present state to spec,
	// and none when it is there. Everything that could differ between two runs
	// is decided here and frozen in the steps: planning twice on the same node
	// gives equal bytes. It only reads, and is called while the locks are held.
	// An error that wraps ErrPrecondition refuses the task.
	Plan(ctx context.Context, h host.Reader, spec S) (Plan, error)
	// Verify returns nil if and only if the node satisfies spec, whoever made it
	// so. Of an action kind, whose effect cannot be observed, it returns nil.
	Verify(ctx context.Context, h host.Prober, spec S) error
	// Result returns the typed result. It is called after Verify with what each
	// step's Apply returned.
	Result(ctx context.Context, h host.Prober, spec S, outs [][]byte) (proto.Message, error)
}

// Plan is what [Task.Plan] decides.
type Plan struct {
	// Steps are carried out in order.
	Steps []Step
	// Differences name what is not as the spec wants it.
	Differences []Difference
	// Impact is the disturbance of this plan beyond that of its kind.
	Impact []taskv1.Impact
	// Disturbs is what the steps do to others' work on the node; nil: nothing.
	// The registry puts steps around them that ask whose work it is.
	Disturbs *Disturbance
}

// Difference is one thing that is not as the spec wants it.
type Difference struct {
	Subject, Have, Want string
}

// A Step is one change to a node. It is data: Args holds all of it, and the
// [Registry] makes the same step from the same Args in another process.
type Step interface {
	// Args is the step as data.
	Args() proto.Message
	// Title says what it does, in words that begin in lower case.
	Title() string
	// Observe returns what Undo will need. It is durable before Apply is first
	// called, and Observe is not called again once it is.
	Observe(ctx context.Context, h host.Reader) (before []byte, err error)
	// Apply makes the change. Unless the step's effect says otherwise it may be
	// repeated on a node where it has half happened. What it returns is
	// journaled.
	Apply(ctx context.Context, h host.Host) (out []byte, err error)
	// Verify returns nil if and only if the change is in place.
	Verify(ctx context.Context, h host.Prober) error
	// Undo restores what Observe returned. It may be repeated, and works after
	// an Apply that failed midway.
	Undo(ctx context.Context, h host.Host, before []byte) error
}

// Class says whether a kind has a goal or an effect.
type Class int

// The classes.
const (
	// State kinds have a goal that can be observed: exactly once in effect.
	State Class = iota + 1
	// Action kinds have an effect that can only be counted: at most once.
	Action
)

// IntentChange is what a succeeded task does to the node's intents.
type IntentChange int

// The changes.
const (
	// IntentNone leaves the intents as they are.
	IntentNone IntentChange = iota
	// IntentSet puts the task's spec in force under the key.
	IntentSet
	// IntentRemove ends the intent under the key.
	IntentRemove
)

// Lock is a name that a task needs for itself. Names form a hierarchy at each
// slash: mount:/data conflicts with mount:/data/x, and node with everything.
type Lock struct {
	Name   string
	Shared bool
}

// Info is what the registry knows of a kind besides its code.
type Info struct {
	// Kind is the name, <domain>.<verb>.
	Kind string
	// Revision is the newest revision of its spec.
	Revision uint32
	// Since names the fields of the spec that came after revision 1, and the
	// revision that brought each. A task of a lower revision must not set it.
	Since map[protoreflect.Name]uint32
	// Class is state or action.
	Class Class
	// Impact is the disturbance that it may cause.
	Impact []taskv1.Impact
	// PassesHeld is set for a kind that does not wait for the locks of tasks that
	// are held for a person.
	PassesHeld bool
	// Early is set for a kind whose goal does not come back by itself after a boot,
	// and on which others wait: its intents are restored first, and at once.
	Early bool
	// Summary is one line for lists.
	Summary string
}
