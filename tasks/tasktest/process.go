package tasktest

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/gpuaas/millwright/tasks/tasktest/fakehost"
)

// errInjected is the failure that a fault makes a host call return.
var errInjected = errors.New("injected failure")

// Process is one life of the agent's process on a node. It dies at a point that
// the suite chose, and from then on nothing that it does has an effect. It is
// safe for concurrent use.
type Process struct {
	node *fakehost.Node
	kill context.CancelCauseFunc
	trouble

	// mu guards all that follows.
	mu     sync.Mutex
	points int // passed so far
	at     string
	dead   bool
	calls  int
	failed string // what has failed
	broken fakehost.Op
	made   map[string]bool // methods that change the node and were called before that
	down   bool            // it died because the node was rebooted
}

// trouble is what a process meets. The zero value is none.
type trouble struct {
	dieAt       int  // the point at which it dies
	failAt      int  // the host call that fails
	onlyChanges bool // failAt counts only calls that change the node
}

// newProcess starts a life. The context ends when the process dies.
func newProcess(ctx context.Context, n *fakehost.Node, tr trouble) (context.Context, *Process) {
	ctx, kill := context.WithCancelCause(ctx)
	return ctx, &Process{node: n, kill: kill, trouble: tr}
}

// reborn is the process that the node starts after a reboot. What is to happen
// to it is counted on.
func (p *Process) reborn(ctx context.Context) (context.Context, *Process) {
	ctx, next := newProcess(ctx, p.node, p.trouble)
	p.mu.Lock()
	defer p.mu.Unlock()
	next.points, next.calls, next.failed = p.points, p.calls, p.failed
	return ctx, next
}

// rebooted reports whether the process died because it rebooted the node.
func (p *Process) rebooted() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.down
}

// Hosts returns the node as this process sees it.
func (p *Process) Hosts() Hosts { return p.node.Hosts(p.hook) }

// Point is a place at which the process may die. It returns an error that wraps
// [ErrKilled] when it does, and ever after.
func (p *Process) Point(name string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.dead {
		return fmt.Errorf("at %s: %w", name, ErrKilled)
	}
	p.points++
	if p.points != p.dieAt {
		return nil
	}
	p.dead, p.at = true, name
	p.kill(ErrKilled)
	return fmt.Errorf("at %s: %w", name, ErrKilled)
}

// died reports whether the process died, and where.
func (p *Process) died() (string, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.at, p.dead
}

// fault names the host call that failed, if the process came that far.
func (p *Process) fault() (string, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.failed, p.failed != ""
}

// hook makes host calls crash and fail. Changes are points; all calls can fail
// before they begin, and changes after they were made.
func (p *Process) hook(ctx context.Context, op fakehost.Op) error {
	if op.Change {
		if err := p.Point(fmt.Sprintf("%s %s, phase %d", op.Name, op.Object, op.Phase)); err != nil {
			return err
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if op.Name == "Reboot" && op.Phase == fakehost.After && !p.dead {
		p.dead, p.down, p.at = true, true, "the reboot"
		p.kill(ErrKilled)
	}
	if p.dead {
		return fmt.Errorf("%s %s: %w", op.Name, op.Object, ErrKilled)
	}
	if ctx.Err() != nil {
		return fmt.Errorf("%s %s: %w", op.Name, op.Object, context.Cause(ctx))
	}
	if op.Change && op.Phase == fakehost.Before && p.failed == "" { // later ones are the undo's
		if p.made == nil {
			p.made = map[string]bool{}
		}
		p.made[op.Name] = true
	}
	if op.Phase == fakehost.During || op.Phase == fakehost.After && !op.Change || p.onlyChanges && !op.Change {
		return nil
	}
	p.calls++
	if p.calls != p.failAt {
		return nil
	}
	p.failed = fmt.Sprintf("%s %s, phase %d", op.Name, op.Object, op.Phase)
	p.broken = fakehost.Op{Name: op.Name, Phase: op.Phase}
	return fmt.Errorf("%s %s: %w", op.Name, op.Object, errInjected)
}

// tell adds what the process has done, and what has failed, to a count.
func (p *Process) tell(n *count) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for name := range p.made {
		n.changes[name] = true
	}
	if p.failed != "" {
		n.failures++
		n.failed[p.broken] = true
	}
}
