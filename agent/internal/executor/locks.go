package executor

import (
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/gpuaas/millwright/tasks"
)

// lockTable gives out locks, first come, first served: a request waits for all
// that are held and all that are asked for before it and conflict with it. All
// locks of a request are given at once, so that none can wait for another in a
// circle.
type lockTable struct {
	mu    sync.Mutex
	order []*grant // held or asked for, in the order of the requests; guarded by mu
}

// grant is one task's locks.
type grant struct {
	owner string
	locks []tasks.Lock
	given chan struct{} // closed once they are held
	held  bool          // guarded by the table's mu
}

func newLockTable() *lockTable { return &lockTable{} }

// request asks for locks. The caller waits for the grant's channel, and calls
// release in any case.
func (l *lockTable) request(owner string, locks []tasks.Lock) *grant {
	l.mu.Lock()
	defer l.mu.Unlock()
	g := &grant{owner: owner, locks: locks, given: make(chan struct{})}
	l.order = append(l.order, g)
	l.settle()
	return g
}

// try gives the locks now or returns nil.
func (l *lockTable) try(owner string, locks []tasks.Lock) *grant {
	g := l.request(owner, locks)
	select {
	case <-g.given:
		return g
	default:
		l.release(g)
		return nil
	}
}

// release gives locks back, or takes a request back. A nil grant is fine.
func (l *lockTable) release(g *grant) {
	if g == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.order = slices.DeleteFunc(l.order, func(o *grant) bool { return o == g })
	l.settle()
}

// of returns the grant of an owner, or nil.
func (l *lockTable) of(owner string) *grant {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, g := range l.order {
		if g.owner == owner {
			return g
		}
	}
	return nil
}

// behind says in words what a grant waits for; empty when it is held.
func (l *lockTable) behind(g *grant) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if g.held {
		return ""
	}
	for _, other := range l.order {
		if other == g {
			break
		}
		if mine, theirs, ok := conflict(g.locks, other.locks); ok {
			verb := "which is held"
			if !other.held {
				verb = "which is asked for before"
			}
			return fmt.Sprintf("waits for %s: it conflicts with %s, %s by task %s", mine.Name, theirs.Name, verb, other.owner)
		}
	}
	return ""
}

// settle gives out what can be given. mu is held.
func (l *lockTable) settle() {
	for i, g := range l.order {
		if g.held {
			continue
		}
		free := !slices.ContainsFunc(l.order[:i], func(before *grant) bool {
			_, _, ok := conflict(g.locks, before.locks)
			return ok
		})
		if free {
			g.held = true
			close(g.given)
		}
	}
}

func conflict(a, b []tasks.Lock) (mine, theirs tasks.Lock, ok bool) {
	for _, x := range a {
		for _, y := range b {
			if (!x.Shared || !y.Shared) && overlap(x.Name, y.Name) {
				return x, y, true
			}
		}
	}
	return tasks.Lock{}, tasks.Lock{}, false
}

// overlap compares names in the hierarchy: node is above all, a name is above
// those that go on after a slash, and * stands for all that begin like it.
func overlap(a, b string) bool {
	return a == "node" || b == "node" || above(a, b) || above(b, a)
}

func above(a, b string) bool {
	if prefix, ok := strings.CutSuffix(a, "*"); ok {
		return strings.HasPrefix(b, prefix)
	}
	return a == b || strings.HasPrefix(b, strings.TrimSuffix(a, "/")+"/")
}

// shared returns the locks as a plan needs them.
func shared(locks []tasks.Lock) []tasks.Lock {
	out := slices.Clone(locks)
	for i := range out {
		out[i].Shared = true
	}
	return out
}
