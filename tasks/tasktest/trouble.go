package tasktest

import (
	"context"
	"fmt"
	"slices"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/tasktest/fakehost"
)

// maxPoints bounds the loops of a suite whose runner never gets through.
const maxPoints = 2000

// ends are the two descriptions of the node that are right.
type ends struct {
	was, spec string
	reachable bool // there is a run that ends as the spec wants it
	// bare is was, before the agent has restored the layouts of GPUs after the reboot:
	// that is no matter of a task that has not begun.
	bare string
	// The layouts of GPUs in both.
	wasGPUs, specGPUs fakehost.Layouts
}

// ends computes them: the node before the task, and after a run without
// trouble; both after a reboot when one is part of the question, once the agent
// has started the containers that intents want.
func (s suite) ends(ctx context.Context, reboot bool) (ends, Outcome, error) {
	n, err := s.c.node(ctx, s.reg)
	if err != nil {
		return ends{}, Outcome{}, err
	}
	o, _, err := s.life(ctx, s.runner(), n, s.task(1), trouble{})
	if err != nil {
		return ends{}, Outcome{}, err
	}
	before, err := s.c.node(ctx, s.reg)
	if err != nil {
		return ends{}, Outcome{}, err
	}
	e := ends{}
	if reboot {
		for _, n := range []*fakehost.Node{n, before} {
			gpus := n.Layouts()
			n.Reboot()
			n.RestartContainers()
			e.bare = n.Dump()
			n.RestoreGPUs(gpus)
		}
	}
	e.was, e.wasGPUs = before.Dump(), before.Layouts()
	if o.State == succeeded {
		e.spec, e.specGPUs, e.reachable = n.Dump(), n.Layouts(), true
		return e, o, nil
	}
	// What stood in the way may be gone after the reboot.
	again, _, err := s.life(ctx, s.runner(), before, s.task(1), trouble{})
	if again.State == succeeded {
		e.spec, e.specGPUs, e.reachable = before.Dump(), before.Layouts(), true
	}
	return e, o, err
}

// crash kills the process at every point, once each, and lets a second process
// finish what it left.
func (s suite) crash(ctx context.Context, reboot bool, tr trouble) error {
	want, clean, err := s.ends(ctx, reboot)
	if err != nil {
		return err
	}
	for at := 1; at <= maxPoints; at++ {
		n, err := s.c.node(ctx, s.reg)
		if err != nil {
			return err
		}
		fresh := n.Dump()
		r := s.runner()
		tr.dieAt = at
		_, p, err := s.life(ctx, r, n, s.task(1), tr)
		if err != nil {
			return err
		}
		where, dead := p.died()
		if !dead {
			if at == 1 {
				return fmt.Errorf("the runner passed no point at which it could die")
			}
			return nil
		}
		s.done.of(s.c.Kind, func(n *count) { n.crashes++ })
		want := want
		if reboot {
			if untouched := n.Dump(); untouched != fresh {
				want.bare = ""
			}
			n.Reboot()
		}
		o, _, err := s.life(ctx, r, n, s.task(1), trouble{})
		if err != nil {
			return fmt.Errorf("killed at point %d (%s), then: %w", at, where, err)
		}
		if reboot {
			n.RestartContainers()
			if o.State == succeeded {
				n.RestoreGPUs(want.specGPUs)
			} else {
				n.RestoreGPUs(want.wasGPUs)
			}
		}
		if reboot && o.State == succeeded && reboots(o.Plan) {
			continue // whoever rebooted the node, it is rebooted
		}
		if s.kind().Class == tasks.Action {
			err = s.actionEnd(o, n, clean)
			if reboot && o.State == succeeded && want.reachable && clean.State != succeeded {
				err = once(n) // what stood in its way is gone with the reboot
			}
		} else {
			err = s.end(o, n, want)
		}
		if err != nil && o.State == succeeded && !want.reachable { // what it lacked has come meanwhile
			err = s.kind().Verify(ctx, n.Hosts(nil).Prober(), s.c.Spec)
		}
		if err != nil {
			return fmt.Errorf("killed at point %d (%s): %w", at, where, err)
		}
	}
	return fmt.Errorf("the runner passed more than %d points", maxPoints)
}

// reboots reports whether a plan's goal is another boot.
func reboots(p *taskv1.Plan) bool {
	return slices.ContainsFunc(p.GetSteps(), func(s *taskv1.PlannedStep) bool {
		return s.GetEffect() == taskv1.Effect_EFFECT_REBOOT
	})
}

// failures makes every host call fail, once each: before it did anything, and
// changes after they were made, too.
func (s suite) failures(ctx context.Context) error {
	return s.eachFailure(ctx, trouble{}, func(_ trouble, o Outcome, n *fakehost.Node, want ends, clean Outcome) error {
		if s.kind().Class == tasks.Action {
			return once(n)
		}
		// When the task fails anyway, this failure may hit its undo.
		if o.State == held && clean.State == failed {
			return nil
		}
		return s.end(o, n, want)
	})
}

// failuresWithCrashes makes every change fail, before and after it was made,
// with a crash at every point of each.
func (s suite) failuresWithCrashes(ctx context.Context) error {
	return s.eachFailure(ctx, trouble{onlyChanges: true}, func(tr trouble, _ Outcome, _ *fakehost.Node, _ ends, _ Outcome) error {
		return s.crash(ctx, false, tr)
	})
}

func (s suite) eachFailure(ctx context.Context, tr trouble, judge func(trouble, Outcome, *fakehost.Node, ends, Outcome) error) error {
	want, clean, err := s.ends(ctx, false)
	if err != nil {
		return err
	}
	for at := 1; at <= maxPoints; at++ {
		n, err := s.c.node(ctx, s.reg)
		if err != nil {
			return err
		}
		tr.failAt = at
		r := s.runner()
		o, p, err := s.life(ctx, r, n, s.task(1), tr)
		what, reached := p.fault()
		if err != nil && reached {
			// The failure ended the process, and the next one goes on.
			o, _, err = s.life(ctx, r, n, s.task(1), trouble{})
		}
		if err != nil {
			return fmt.Errorf("host call %d (%s) failed: %w", at, what, err)
		}
		s.done.of(s.c.Kind, func(n *count) { p.tell(n) })
		if !reached {
			if at == 1 && !tr.onlyChanges {
				return fmt.Errorf("the runner made no host call")
			}
			return nil
		}
		if err := judge(tr, o, n, want, clean); err != nil {
			return fmt.Errorf("host call %d (%s) failed: %w", at, what, err)
		}
	}
	return fmt.Errorf("the runner made more than %d host calls", maxPoints)
}

// end checks that a state kind has ended in one of the two right ways, and that
// its outcome says which.
func (s suite) end(o Outcome, n *fakehost.Node, want ends) error {
	got := n.Dump()
	switch {
	case o.State == succeeded && want.reachable && got == want.spec:
		return nil
	case (o.State == refused || o.State == failed) && want.bare != "" && got == want.bare:
		return nil
	case o.State == refused && got == want.was:
		return nil
	case o.State == failed && o.Undo != taskv1.UndoState_UNDO_STATE_NOT_POSSIBLE && got == want.was:
		return nil
	case o.State == failed && o.Undo == taskv1.UndoState_UNDO_STATE_NOT_POSSIBLE && s.c.unrestorable:
		return nil
	case o.State == held && s.c.unrestorable:
		return nil
	}
	return fmt.Errorf("ended %s%s\nand the node is\n%s\nIt was\n%s\nthe spec is\n%s", renderOutcome(o), o.Message, got, want.was, want.spec)
}

// once checks that the effect of an action happened at most once.
func once(n *fakehost.Node) error {
	if effects := n.Started() + n.Reboots(); effects > 1 {
		return fmt.Errorf("it happened %d times: %s", effects, n.Dump())
	}
	return nil
}

// actionEnd checks that the effect of an action happened at most once, and that
// its outcome is the one of a run without trouble, or held.
func (s suite) actionEnd(o Outcome, n *fakehost.Node, clean Outcome) error {
	if err := once(n); err != nil {
		return err
	}
	if o.State == held {
		return nil
	}
	if o.State != clean.State || o.Reason != clean.Reason {
		return fmt.Errorf("ended %s%s\nwithout trouble it ends %s", renderOutcome(o), o.Message, renderOutcome(clean))
	}
	return nil
}
