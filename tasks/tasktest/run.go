package tasktest

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"testing"
	"testing/synctest"

	"google.golang.org/protobuf/proto"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/tasktest/fakehost"
)

const (
	succeeded = taskv1.TaskState_TASK_STATE_SUCCEEDED
	failed    = taskv1.TaskState_TASK_STATE_FAILED
	refused   = taskv1.TaskState_TASK_STATE_REFUSED
	held      = taskv1.TaskState_TASK_STATE_HELD
)

// Run puts every case to every question, and asks that each change of the node
// was made to fail in one of them.
func Run(t *testing.T, runner NewRunner, reg *tasks.Registry, cases []Case) {
	t.Helper()
	for _, m := range put(t, runner, reg, cases).missing() {
		t.Errorf("%s: a case must come by it", m)
	}
}

// Sample puts some of the cases to every question.
func Sample(t *testing.T, runner NewRunner, reg *tasks.Registry, cases []Case) {
	t.Helper()
	put(t, runner, reg, cases)
}

func put(t *testing.T, runner NewRunner, reg *tasks.Registry, cases []Case) *counts {
	t.Helper()
	done := &counts{}
	for _, c := range cases {
		t.Run(c.Name, func(t *testing.T) {
			names := suite{c: c}
			done.of(c.Kind, func(n *count) { n.cases++ })
			for i, named := range names.checks() {
				t.Run(named.name, func(t *testing.T) {
					// In a bubble what waits takes no time.
					synctest.Test(t, func(t *testing.T) {
						s := suite{reg: reg, c: c, runner: func() Runner { return runner(t, reg) }, update: updating(), done: done}
						if err := s.checks()[i].f(t.Context()); err != nil {
							t.Fatal(err)
						}
					})
				})
			}
		})
	}
	t.Logf("done to the kinds:\n%s", done)
	return done
}

// Update is the name of the flag that makes Run write golden files. The test's
// package declares it, as a bool.
const Update = "update"

func updating() bool {
	f := flag.Lookup(Update)
	return f != nil && f.Value.String() == "true"
}

// Check puts one case to every question and returns the first wrong answer.
// It is how the suite itself is tested.
func Check(ctx context.Context, t testing.TB, runner NewRunner, reg *tasks.Registry, c Case) error {
	s := suite{reg: reg, c: c, runner: func() Runner { return runner(t, reg) }}
	for _, check := range s.checks() {
		if err := check.f(ctx); err != nil {
			return fmt.Errorf("%s: %w", check.name, err)
		}
	}
	return nil
}

type suite struct {
	reg    *tasks.Registry
	c      Case
	runner func() Runner
	update bool
	done   *counts // nil: nobody asks
}

type check struct {
	name string
	f    func(context.Context) error
}

func (s suite) checks() []check {
	checks := []check{{"plan", s.plan}, {"once", s.once}}
	if s.c.has("refused") {
		return checks
	}
	checks = append(checks,
		check{"crash and restart", func(ctx context.Context) error { return s.crash(ctx, false, trouble{}) }},
		check{"crash and reboot", func(ctx context.Context) error { return s.crash(ctx, true, trouble{}) }},
		check{"failures", s.failures},
	)
	if s.c.deep {
		checks = append(checks, check{"failures with crashes", s.failuresWithCrashes})
	}
	return checks
}

func (s suite) kind() *tasks.Kind {
	k, err := s.reg.Kind(s.c.Kind)
	if err != nil {
		panic(err) // The case was loaded with this registry.
	}
	return k
}

// task returns the n-th task with the case's spec.
func (s suite) task(n int) Task {
	return Task{ID: fmt.Sprintf("01890000-0000-7000-8000-%012d", n), Kind: s.c.Kind, Spec: proto.Clone(s.c.Spec)}
}

// plan checks the golden plan, that planning twice gives equal bytes, and that
// steps survive sealing.
func (s suite) plan(ctx context.Context) error {
	n, err := s.c.node(ctx, s.reg)
	if err != nil {
		return err
	}
	p, err := s.reg.Plan(ctx, n.Hosts(nil).Prober(), s.kind(), s.c.Spec)
	if errors.Is(err, tasks.ErrPrecondition) {
		return s.c.golden(s.update, "refused", err.Error())
	}
	if err != nil {
		return fmt.Errorf("plan: %w", err)
	}
	again, err := s.reg.Plan(ctx, n.Hosts(nil).Prober(), s.kind(), proto.Clone(s.c.Spec))
	if err != nil {
		return fmt.Errorf("plan again: %w", err)
	}
	b, _, err := tasks.MarshalPlan(p)
	if err != nil {
		return err
	}
	if c, _, err := tasks.MarshalPlan(again); err != nil || !bytes.Equal(b, c) {
		return fmt.Errorf("planning twice on one node gave different bytes (%w)", err)
	}
	for _, sealed := range p.GetSteps() {
		st, err := s.reg.Open(sealed)
		if err != nil {
			return err
		}
		if resealed, err := s.reg.Seal(st); err != nil || !proto.Equal(sealed, resealed) {
			return fmt.Errorf("step %s is another after it was sealed and opened: %v, %w", sealed.GetType(), resealed, err)
		}
	}
	text, err := renderPlan(s.reg, p)
	if err != nil {
		return err
	}
	return s.c.golden(s.update, "plan", text)
}

// life runs a task until it has ended or its process died.
func (s suite) life(ctx context.Context, r Runner, n *fakehost.Node, t Task, tr trouble) (Outcome, *Process, error) {
	alive, p := newProcess(ctx, n, tr)
	defer func() { p.kill(nil) }()
	o, err := r.Run(alive, p, t)
	for p.rebooted() {
		p.kill(nil)
		alive, p = p.reborn(ctx)
		o, err = r.Run(alive, p, t)
	}
	if at, dead := p.died(); dead && err == nil {
		return o, p, fmt.Errorf("the runner returned %s although its process died at %s", renderOutcome(o), at)
	} else if dead {
		return o, p, nil
	}
	return o, p, err
}

// once runs the task without any trouble, and then again.
func (s suite) once(ctx context.Context) error {
	n, err := s.c.node(ctx, s.reg)
	if err != nil {
		return err
	}
	was := n.Dump()
	r := s.runner()
	o, _, err := s.life(ctx, r, n, s.task(1), trouble{})
	if err != nil {
		return err
	}
	if err := s.c.golden(s.update, "outcome", renderOutcome(o)); err != nil {
		return fmt.Errorf("%w\n%s", err, o.Message)
	}
	if err := s.c.golden(s.update, "after", n.Dump()); err != nil {
		return err
	}
	if s.kind().Class == tasks.Action {
		return s.actionEnd(o, n, o)
	}
	if o.State != succeeded {
		return s.end(o, n, ends{was: was})
	}
	after := n.Dump()
	o, _, err = s.life(ctx, r, n, s.task(2), trouble{})
	if err != nil {
		return fmt.Errorf("second run: %w", err)
	}
	if o.State != succeeded || len(o.Plan.GetSteps()) > 0 || len(o.Plan.GetDifferences()) > 0 || n.Dump() != after {
		return fmt.Errorf("second run: %s with %d steps, differences %v: %s", renderOutcome(o), len(o.Plan.GetSteps()), o.Plan.GetDifferences(), o.Message)
	}
	return nil
}
