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
	order []*grant      // held or asked for, in the order of the requests; guarded by mu
	moved chan struct{} // closed and made anew whenever the order changes; guarded by mu
}

// grant is one task's locks.
type grant struct {
	owner string
	locks []tasks.Lock
	past  bool          // it does not wait for those whose task is held for a person
	given chan struct{} // closed once they are held
	held  bool          // guarded by the table's mu
	stuck bool          // its task is held for a person; guarded by the table's mu
}

func newLockTable() *lockTable { return &lockTable{moved: make(chan struct{})} }

// request asks for locks. The caller waits for the grant's channel, and calls
// release in any case. One that goes past held tasks does not wait for them.
func (l *lockTable) request(owner string, locks []tasks.Lock, past bool) *grant {
	l.mu.Lock()
	defer l.mu.Unlock()
	g := &grant{owner: owner, locks: locks, past: past, given: make(chan struct{})}
	l.order = append(l.order, g)
	l.settle()
	return g
}

// try gives the locks now or returns nil.
func (l *lockTable) try(owner string, locks []tasks.Lock) *grant {
	g := l.request(owner, locks, false)
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

// stick notes that the task of a grant is held for a person. A nil grant is
// fine.
func (l *lockTable) stick(g *grant) {
	if g == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	g.stuck = true
	l.settle()
}

// unstick notes that the task of a grant is no longer held for a person. While
// one that went past it has its locks it names that one, and changes nothing. A
// nil grant is fine.
func (l *lockTable) unstick(g *grant) (past string, ok bool) {
	if g == nil {
		return "", true
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, other := range l.order {
		if _, _, clash := conflict(g.locks, other.locks); clash && other != g && other.held {
			return other.owner, false
		}
	}
	g.stuck = false
	l.settle()
	return "", true
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

// behind says in words what a grant waits for, empty when it is held, and
// returns a channel that is closed when that may have changed.
func (l *lockTable) behind(g *grant) (string, <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if g.held {
		return "", l.moved
	}
	for _, other := range l.order {
		if other == g {
			break
		}
		mine, theirs, ok := g.waitsFor(other)
		if !ok {
			continue
		}
		verb := "which is held"
		switch {
		case !other.held:
			verb = "which is asked for before"
		case other.stuck:
			verb = "which is kept until a person settles it,"
		}
		return fmt.Sprintf("waits for %s: it conflicts with %s, %s by task %s", mine.Name, theirs.Name, verb, other.owner), l.moved
	}
	return "", l.moved
}

// claim is a grant as it is told.
type claim struct {
	owner       string
	locks       []tasks.Lock
	held, stuck bool
	behind      []string // the owners for which it waits
}

// claims returns all grants, in the order of their requests.
func (l *lockTable) claims() []claim {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := make([]claim, len(l.order))
	for i, g := range l.order {
		out[i] = claim{owner: g.owner, locks: slices.Clone(g.locks), held: g.held, stuck: g.stuck}
		for _, before := range l.order[:i] {
			if _, _, ok := g.waitsFor(before); ok && !g.held {
				out[i].behind = append(out[i].behind, before.owner)
			}
		}
	}
	return out
}

// settle gives out what can be given, and tells all who wait that something has
// moved. mu is held.
func (l *lockTable) settle() {
	for i, g := range l.order {
		if g.held {
			continue
		}
		free := !slices.ContainsFunc(l.order[:i], func(before *grant) bool {
			_, _, ok := g.waitsFor(before)
			return ok
		})
		if free {
			g.held = true
			close(g.given)
		}
	}
	close(l.moved)
	l.moved = make(chan struct{})
}

// waitsFor reports whether g has to wait for one that asked before it, and for
// which of its locks.
func (g *grant) waitsFor(before *grant) (mine, theirs tasks.Lock, ok bool) {
	if g.past && before.stuck {
		return tasks.Lock{}, tasks.Lock{}, false
	}
	return conflict(g.locks, before.locks)
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
