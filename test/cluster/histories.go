package cluster

import (
	"bytes"
	"context"
	"fmt"
	"os/exec"
	"slices"
	"strings"

	"github.com/gpuaas/millwright/test/invariants/check"
)

// ExportLog returns the server's event log, as its own program exports it.
func (c *Cluster) ExportLog(ctx context.Context) (string, error) {
	cmd := exec.CommandContext(ctx, c.binary("millwright-server", c.cfg.Server), "log", "export", "--config", c.serverConfig())
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("export the log: %w\n%s", err, stderr.Bytes())
	}
	return stdout.String(), nil
}

// Histories exports what the server and all nodes that have joined recorded.
// Of the nodes in gone, which says why, nothing is asked that cannot be had.
// marks is a file of the nodes to which commands write one line each time that
// they run; empty: there is none.
func (c *Cluster) Histories(ctx context.Context, gone map[string]string, marks string) (*check.History, error) {
	export, err := c.ExportLog(ctx)
	if err != nil {
		return nil, err
	}
	h := &check.History{Gone: gone}
	if h.Server, err = check.ReadServer(strings.NewReader(export)); err != nil {
		return nil, err
	}
	for _, n := range c.bed.Nodes() {
		if row := h.Server.Nodes[n.Name()]; row.GetGeneration() == 0 {
			continue // it never joined
		}
		out, err := n.Exec(ctx, "millwrightd", "journal", "export")
		if _, ok := gone[n.Name()]; ok && err != nil {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("export the journal of %s: %w\n%s", n.Name(), err, out.Stderr)
		}
		journal, err := check.ReadNode(bytes.NewReader(out.Stdout))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", n.Name(), err)
		}
		h.Nodes = append(h.Nodes, journal)
		if marks == "" {
			continue
		}
		out, err = n.Exec(ctx, "sh", "-c", "test ! -e "+marks+" || cat "+marks)
		if err != nil {
			return nil, fmt.Errorf("read the marks of %s: %w", n.Name(), err)
		}
		effects, err := check.ReadEffects(n.Name(), strings.NewReader(string(out.Stdout)))
		if err != nil {
			return nil, err
		}
		h.Effects = slices.Concat(h.Effects, effects)
	}
	return h, nil
}
