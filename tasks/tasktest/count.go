package tasktest

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/gpuaas/millwright/tasks/tasktest/fakehost"
)

// counts is what was done to the cases of each kind.
type counts struct {
	mu    sync.Mutex
	kinds map[string]*count // guarded by mu
}

// count is what was done to one kind.
type count struct {
	cases, crashes, failures int
	changes                  map[string]bool // methods that change the node and were called
	failed                   map[fakehost.Op]bool
}

// of changes the count of a kind.
func (c *counts) of(kind string, do func(*count)) {
	if c == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.kinds == nil {
		c.kinds = map[string]*count{}
	}
	if c.kinds[kind] == nil {
		c.kinds[kind] = &count{changes: map[string]bool{}, failed: map[fakehost.Op]bool{}}
	}
	do(c.kinds[kind])
}

// missing are the changes of the node that a kind makes and that were never made
// to fail, before or after they were done.
func (c *counts) missing() (out []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for kind, n := range c.kinds {
		for name := range n.changes {
			for _, phase := range []fakehost.Phase{fakehost.Before, fakehost.After} {
				if name == "Reboot" && phase == fakehost.After {
					continue // whoever called it is gone by then
				}
				if n.failures > 0 && !n.failed[fakehost.Op{Name: name, Phase: phase}] {
					out = append(out, fmt.Sprintf("%s: %s never failed in phase %d", kind, name, phase))
				}
			}
		}
	}
	slices.Sort(out)
	return out
}

// String is a line for each kind.
func (c *counts) String() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	var b strings.Builder
	for _, kind := range slices.Sorted(maps.Keys(c.kinds)) {
		n := c.kinds[kind]
		fmt.Fprintf(&b, "%s: %d cases, %d crashes, %d failures of host calls; changes that failed before and after: %s\n", kind,
			n.cases, n.crashes, n.failures, strings.Join(slices.Sorted(maps.Keys(n.changes)), " "))
	}
	return b.String()
}
