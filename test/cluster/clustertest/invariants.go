package clustertest

import (
	"context"
	"sync"
	"time"

	"github.com/gpuaas/millwright/test/invariants/check"
)

// quietWithin is how long a cluster may take to come to rest at the end of a
// test, after all that it did to it.
const quietWithin = 90 * time.Second

// expectations are what a test says of its end.
type expectations struct {
	mu       sync.Mutex
	expected []check.Expected  // guarded by mu
	gone     map[string]string // guarded by mu
}

// Expect says that the test breaks an invariant of package check on purpose, on
// a node or, when it is empty, anywhere, and why that is no fault.
func (c *Cluster) Expect(invariant, node, why string) {
	c.end.mu.Lock()
	defer c.end.mu.Unlock()
	c.end.expected = append(c.end.expected, check.Expected{Invariant: invariant, Node: node, Why: why})
}

// Gone says that a node does not come to rest by the end of the test, and why:
// it is off, or its agent was removed.
func (c *Cluster) Gone(node, why string) {
	c.end.mu.Lock()
	defer c.end.mu.Unlock()
	c.end.gone[node] = why
}

// checkInvariants holds all that server and nodes recorded against what is
// promised, at the end of the test, while all still run.
func (c *Cluster) checkInvariants() {
	if c.t.Failed() || c.t.Skipped() {
		return
	}
	c.end.mu.Lock()
	defer c.end.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), 2*quietWithin)
	defer cancel()
	err := check.Settle(ctx, quietWithin, c.end.expected, func(ctx context.Context) (*check.History, error) {
		return c.Histories(ctx, c.end.gone, "")
	})
	if err != nil {
		c.t.Errorf("at the end of the test: %v", err)
	}
}
