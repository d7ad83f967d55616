package harness

import (
	"context"
	"errors"
	"io/fs"
	"path/filepath"
	"time"

	"github.com/gpuaas/millwright/agent"
	"github.com/gpuaas/millwright/controlplane"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	auditv1 "github.com/gpuaas/millwright/proto/millwright/audit/v1"
	"github.com/gpuaas/millwright/test/invariants/check"
)

// quietWithin is how long server and agents may take to come to rest at the end
// of a test.
const quietWithin = 10 * time.Second

// Expect says that the test breaks an invariant on purpose, on the node of a
// name or, when it is empty, anywhere, and why that is no fault.
func (c *Cluster) Expect(invariant, node, why string) {
	c.expected = append(c.expected, check.Expected{Invariant: invariant, Node: node, Why: why})
}

// Gone says that the node does not come to rest by the end of the test, and
// why: its agent was stopped for good, it is cut off, or a task runs on.
func (n *Node) Gone(why string) { n.gone = why }

// check holds all that was recorded against what is promised, once, at the end
// of the test and before anything is stopped by it.
func (c *Cluster) check() {
	if c.checked || c.t.Failed() || c.t.Skipped() {
		return
	}
	c.checked = true
	if err := check.Settle(context.Background(), quietWithin, c.expected, c.history); err != nil {
		c.t.Errorf("at the end of the test: %v", err)
	}
}

func (c *Cluster) history(ctx context.Context) (*check.History, error) {
	h := &check.History{Server: check.NewServer(), Gone: map[string]string{}}
	if err := controlplane.Export(ctx, c.cfg, func(l *auditv1.LogLine) error { return h.Server.Add(l) }); err != nil {
		return nil, err
	}
	for _, n := range c.nodes {
		if n.gone != "" {
			h.Gone[n.Name] = n.gone
		}
		journal := check.NewNode()
		err := agent.Export(ctx, filepath.Join(n.Dir, "state"), filepath.Join(n.Dir, "run"), func(l *agentv1.JournalLine) error { return journal.Add(l) })
		if errors.Is(err, fs.ErrNotExist) {
			continue // it never joined
		}
		if err != nil {
			return nil, err
		}
		h.Nodes = append(h.Nodes, journal)
	}
	return h, nil
}
