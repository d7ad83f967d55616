package executor

import "github.com/gpuaas/millwright/tasks"

// Conflict reports whether two locks conflict.
func Conflict(a, b tasks.Lock) bool {
	_, _, ok := conflict([]tasks.Lock{a}, []tasks.Lock{b})
	return ok
}

// LockTurns asks for locks in turn, ends the one that is numbered at each step,
// and returns which have their locks after each.
func LockTurns(asked []tasks.Lock, end []int) (held [][]int) {
	l := newLockTable()
	var grants []*grant
	for _, k := range asked {
		grants = append(grants, l.request("", []tasks.Lock{k}, false))
	}
	for _, e := range end {
		l.release(grants[e])
		var now []int
		for i, g := range grants {
			if g.held {
				now = append(now, i)
			}
		}
		held = append(held, now)
	}
	return held
}

// Stuck reports whether the locks of a task are those of one that is held for a
// person.
func (e *Executor) Stuck(id string) bool {
	g := e.locks.of(id)
	e.locks.mu.Lock()
	defer e.locks.mu.Unlock()
	return g != nil && g.stuck
}
