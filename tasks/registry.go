package tasks

import (
	"cmp"
	"context"
	"crypto/sha256"
	"fmt"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/proto/strict"
	"github.com/gpuaas/millwright/proto/text"
	"github.com/gpuaas/millwright/tasks/host"
)

// Registry knows the kinds and step types of a build. It is filled explicitly
// by package all and not changed afterwards; reading it is safe for concurrent
// use.
type Registry struct {
	kinds map[string]*Kind
	steps map[string]stepType
	// askers are asked before a plan disturbs the node.
	askers []Asker
}

type stepType struct {
	info StepInfo
	open func(args []byte) (Step, error)
	name protoreflect.FullName
}

// StepInfo is what the registry knows of a step type.
type StepInfo struct {
	// Type is the name, for example file.write.
	Type string
	// Revision is the revision of its arguments.
	Revision uint32
	// Effect says what may be done when an outcome was not recorded.
	Effect taskv1.Effect
	// Undoable says whether Undo can restore what was.
	Undoable bool
}

// Kind is a registered kind with its spec type erased.
type Kind struct {
	Info
	newSpec  func() proto.Message
	validate func(proto.Message) error
	locks    func(proto.Message) []Lock
	plan     func(context.Context, host.Reader, proto.Message) (Plan, error)
	verify   func(context.Context, host.Prober, proto.Message) error
	result   func(context.Context, host.Prober, proto.Message, [][]byte) (proto.Message, error)
	intent   func(proto.Message) (string, IntentChange)
	deadline func(proto.Message) time.Duration
	lost     func(context.Context, host.Reader, proto.Message) (bool, error)
	again    func(proto.Message) proto.Message
}

// NewRegistry returns an empty registry.
func NewRegistry() *Registry {
	return &Registry{kinds: map[string]*Kind{}, steps: map[string]stepType{}}
}

// Intender is a task that leaves or ends an intent.
type Intender[S proto.Message] interface {
	// Intent returns the intent's key and what becomes of it.
	Intent(spec S) (key string, change IntentChange)
}

// DefaultDeadline is how long a task may run when neither its leaf nor its kind
// says otherwise.
const DefaultDeadline = 10 * time.Minute

// Deadliner is a task that needs another deadline than [DefaultDeadline].
type Deadliner[S proto.Message] interface {
	// Deadline returns how long a task with spec may run once it was started.
	Deadline(spec S) time.Duration
}

// Watcher is a task whose goal may be lost while the agent runs, in a way that a
// cheap look shows. Its intent is then restored without waiting for a boot.
type Watcher[S proto.Message] interface {
	// Lost reports whether what spec wants is gone. It is asked again and again: it
	// touches nothing that may hang, and what merely differs is not lost.
	Lost(ctx context.Context, h host.Reader, spec S) (bool, error)
}

// Restorer is a task whose spec may allow what only the signer's own task is to do,
// such as to erase a disk, and no restore of its intent.
type Restorer[S proto.Message] interface {
	// ForRestore returns the spec as a restore has it. The intent's key, the locks
	// and what Verify wants are the same.
	ForRestore(spec S) S
}

// Add registers t. It panics on a duplicate: a programming error that any test
// finds that builds the registry.
func Add[S proto.Message](r *Registry, info Info, t Task[S]) {
	if _, dup := r.kinds[info.Kind]; dup {
		panic("tasks: duplicate kind " + info.Kind)
	}
	var zero S
	k := &Kind{
		Info:     info,
		newSpec:  func() proto.Message { return zero.ProtoReflect().New().Interface() },
		validate: func(m proto.Message) error { return t.Validate(m.(S)) },
		locks:    func(m proto.Message) []Lock { return t.Locks(m.(S)) },
		plan: func(ctx context.Context, h host.Reader, m proto.Message) (Plan, error) {
			return t.Plan(ctx, h, m.(S))
		},
		verify: func(ctx context.Context, h host.Prober, m proto.Message) error {
			return t.Verify(ctx, h, m.(S))
		},
		result: func(ctx context.Context, h host.Prober, m proto.Message, outs [][]byte) (proto.Message, error) {
			return t.Result(ctx, h, m.(S), outs)
		},
		intent:   func(proto.Message) (string, IntentChange) { return "", IntentNone },
		deadline: func(proto.Message) time.Duration { return DefaultDeadline },
		again:    func(m proto.Message) proto.Message { return m },
	}
	if d, ok := t.(Deadliner[S]); ok {
		k.deadline = func(m proto.Message) time.Duration { return d.Deadline(m.(S)) }
	}
	if w, ok := t.(Watcher[S]); ok {
		k.lost = func(ctx context.Context, h host.Reader, m proto.Message) (bool, error) { return w.Lost(ctx, h, m.(S)) }
	}
	if a, ok := t.(Restorer[S]); ok {
		k.again = func(m proto.Message) proto.Message { return a.ForRestore(m.(S)) }
	}
	if i, ok := t.(Intender[S]); ok {
		k.intent = func(m proto.Message) (string, IntentChange) { return i.Intent(m.(S)) }
	}
	r.kinds[info.Kind] = k
}

// AddStep registers a step type, whose arguments are messages of type A.
func AddStep[A proto.Message](r *Registry, info StepInfo, open func(A) Step) {
	if _, dup := r.steps[info.Type]; dup {
		panic("tasks: duplicate step type " + info.Type)
	}
	var zero A
	r.steps[info.Type] = stepType{
		info: info,
		name: zero.ProtoReflect().Descriptor().FullName(),
		open: func(b []byte) (Step, error) {
			m := zero.ProtoReflect().New().Interface()
			if err := proto.Unmarshal(b, m); err != nil {
				return nil, fmt.Errorf("decode arguments of step %s: %w", info.Type, err)
			}
			return open(m.(A)), nil
		},
	}
}

// Kinds returns all kinds, by name.
func (r *Registry) Kinds() []*Kind {
	out := make([]*Kind, 0, len(r.kinds))
	for _, k := range r.kinds {
		out = append(out, k)
	}
	slices.SortFunc(out, func(a, b *Kind) int { return cmp.Compare(a.Kind, b.Kind) })
	return out
}

// Kind returns a kind by name, or an error that wraps [ErrUnknownKind] and
// lists those that are known.
func (r *Registry) Kind(name string) (*Kind, error) {
	if k, ok := r.kinds[name]; ok {
		return k, nil
	}
	known := make([]string, 0, len(r.kinds))
	for _, k := range r.Kinds() {
		known = append(known, k.Kind)
	}
	return nil, fmt.Errorf("kind %q: %w; known kinds: %v", name, ErrUnknownKind, known)
}

// NewSpec returns an empty spec message of the kind.
func (k *Kind) NewSpec() proto.Message { return k.newSpec() }

// DecodeSpec decodes the spec bytes of a leaf. An unknown field, an undefined
// enum number or a field given twice anywhere in it is an error.
func (k *Kind) DecodeSpec(revision uint32, b []byte) (proto.Message, error) {
	if revision == 0 || revision > k.Revision {
		return nil, fmt.Errorf("kind %s revision %d: %w; the newest known is %d", k.Kind, revision, ErrUnknownKind, k.Revision)
	}
	m := k.newSpec()
	if err := strict.Unmarshal(b, m); err != nil {
		return nil, fmt.Errorf("decode spec of %s: %w", k.Kind, err)
	}
	if least, field := k.needs(m); least > revision {
		return nil, fmt.Errorf("decode spec of %s: %s is a field of revision %d, and the task is of revision %d: sign it as revision %d, or leave the field out",
			k.Kind, field, least, revision, least)
	}
	return m, nil
}

// Needs returns the lowest revision of the kind that has all that spec says, so
// that nodes with an older agent take what they can carry out.
func (k *Kind) Needs(spec proto.Message) uint32 {
	least, _ := k.needs(spec)
	return least
}

// needs returns that revision, and the field that asks for it.
func (k *Kind) needs(spec proto.Message) (least uint32, field protoreflect.Name) {
	least = 1
	k.needsOf(spec.ProtoReflect(), "", &least, &field)
	return least, field
}

// needsOf looks at the fields of one message, and of those in it, which Since
// names after the field that holds them: node.munge_key.
func (k *Kind) needsOf(m protoreflect.Message, at protoreflect.Name, least *uint32, field *protoreflect.Name) {
	m.Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		name := at + f.Name()
		if since := k.Since[name]; since > *least {
			*least, *field = since, name
		}
		switch {
		case f.Message() == nil || f.IsMap():
		case f.IsList():
			for i := range v.List().Len() {
				k.needsOf(v.List().Get(i).Message(), name+".", least, field)
			}
		default:
			k.needsOf(v.Message(), name+".", least, field)
		}
		return true
	})
}

// Validate reports every problem of spec as [Problems].
func (k *Kind) Validate(spec proto.Message) error { return k.validate(spec) }

// Locks returns the names that a task with spec needs.
func (k *Kind) Locks(spec proto.Message) []Lock { return k.locks(spec) }

// Verify reports whether the node satisfies spec.
func (k *Kind) Verify(ctx context.Context, h host.Prober, spec proto.Message) error {
	return k.verify(ctx, h, spec)
}

// Result returns the typed result as an Any.
func (k *Kind) Result(ctx context.Context, h host.Prober, spec proto.Message, outs [][]byte) (*anypb.Any, error) {
	m, err := k.result(ctx, h, spec, outs)
	if err != nil || m == nil {
		return nil, err
	}
	b, err := text.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("serialise result of %s: %w", k.Kind, err)
	}
	return &anypb.Any{TypeUrl: "type.googleapis.com/" + string(m.ProtoReflect().Descriptor().FullName()), Value: b}, nil
}

// Deadline returns how long a task with spec may run when its leaf does not say.
func (k *Kind) Deadline(spec proto.Message) time.Duration { return k.deadline(spec) }

// Watched reports whether [Kind.Lost] can tell anything.
func (k *Kind) Watched() bool { return k.lost != nil }

// Lost reports whether what spec wants is gone, as [Watcher] says.
func (k *Kind) Lost(ctx context.Context, h host.Reader, spec proto.Message) (bool, error) {
	if k.lost == nil {
		return false, nil
	}
	return k.lost(ctx, h, spec)
}

// ForRestore returns spec as a restore of its intent has it.
func (k *Kind) ForRestore(spec proto.Message) proto.Message { return k.again(spec) }

// Intent returns what a succeeded task with spec does to the node's intents.
func (k *Kind) Intent(spec proto.Message) (string, IntentChange) { return k.intent(spec) }

// Plan plans spec and seals the steps. The bytes and their SHA-256 are the same
// for the same plan.
func (r *Registry) Plan(ctx context.Context, h host.Reader, k *Kind, spec proto.Message) (*taskv1.Plan, error) {
	p, err := k.plan(ctx, h, spec)
	if err != nil {
		return nil, err
	}
	out := &taskv1.Plan{Kind: k.Kind, Revision: k.Needs(spec), Impact: slices.Concat(k.Impact, p.Impact)}
	if len(p.Steps) == 0 {
		out.Impact = nil
	}
	for _, d := range p.Differences {
		out.Differences = append(out.Differences, &taskv1.Difference{Subject: d.Subject, Have: d.Have, Want: d.Want})
	}
	steps, err := r.gate(ctx, h, k, spec, p, out)
	if err != nil {
		return nil, err
	}
	for _, s := range steps {
		sealed, err := r.Seal(s)
		if err != nil {
			return nil, err
		}
		out.Steps = append(out.Steps, sealed)
	}
	return out, nil
}

// Seal returns a step as data.
func (r *Registry) Seal(s Step) (*taskv1.PlannedStep, error) {
	args := s.Args()
	name := args.ProtoReflect().Descriptor().FullName()
	for _, t := range r.steps {
		if t.name != name {
			continue
		}
		b, err := proto.MarshalOptions{Deterministic: true}.Marshal(args)
		if err != nil {
			return nil, fmt.Errorf("seal step %s: %w", t.info.Type, err)
		}
		p := &taskv1.PlannedStep{
			Type: t.info.Type, Revision: t.info.Revision, Args: b,
			Effect: t.info.Effect, Title: s.Title(), Undoable: t.info.Undoable,
		}
		if l, ok := s.(Limiter); ok {
			p.Timeout = durationpb.New(l.Timeout())
		}
		if d, ok := s.(Delayer); ok && d.Delay() > 0 {
			p.StartDelay = durationpb.New(d.Delay())
		}
		if w, ok := s.(Waiter); ok {
			p.WaitMost = durationpb.New(w.WaitMost())
		}
		_, p.Gate = s.(GateStep)
		return p, retrying(s, p)
	}
	return nil, fmt.Errorf("seal step with arguments %s: %w", name, ErrUnknownStep)
}

// retrying notes in p what may be tried again. It is an error of the step's type
// when that is one that must not be applied twice.
func retrying(s Step, p *taskv1.PlannedStep) error {
	r, ok := s.(Retrier)
	if !ok {
		return nil
	}
	if p.GetEffect() != taskv1.Effect_EFFECT_IDEMPOTENT && p.GetEffect() != taskv1.Effect_EFFECT_CHECK_THEN_ACT {
		return fmt.Errorf("seal step %s: its effect is %s, so that it cannot be tried again", p.GetType(), p.GetEffect())
	}
	attempts, backOff := r.Retry()
	p.MaxAttempts, p.BackOff = attempts, durationpb.New(backOff)
	return nil
}

// Open returns the step that was sealed.
func (r *Registry) Open(p *taskv1.PlannedStep) (Step, error) {
	t, ok := r.steps[p.GetType()]
	if !ok || p.GetRevision() == 0 || p.GetRevision() > t.info.Revision {
		return nil, fmt.Errorf("open step %q revision %d: %w", p.GetType(), p.GetRevision(), ErrUnknownStep)
	}
	return t.open(p.GetArgs())
}

// MarshalPlan returns the deterministic bytes of a plan and their SHA-256. Who is
// in the way just now is no part of them.
func MarshalPlan(p *taskv1.Plan) (b []byte, digest []byte, err error) {
	if len(p.GetInTheWay()) > 0 {
		p = proto.CloneOf(p)
		p.InTheWay = nil
	}
	b, err = text.Marshal(p)
	if err != nil {
		return nil, nil, fmt.Errorf("serialise plan of %s: %w", p.GetKind(), err)
	}
	sum := sha256.Sum256(b)
	return b, sum[:], nil
}
