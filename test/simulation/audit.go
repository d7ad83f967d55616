package simulation

import (
	"context"
	"path/filepath"
	"slices"
	"strings"

	"github.com/gpuaas/millwright/agent"
	"github.com/gpuaas/millwright/controlplane"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	auditv1 "github.com/gpuaas/millwright/proto/millwright/audit/v1"
	"github.com/gpuaas/millwright/tasks/all"
	"github.com/gpuaas/millwright/test/invariants/check"
)

// audit looks at what is left on the disks once nothing runs any more.
func (w *world) audit() {
	for _, line := range w.replayed() {
		w.wrong("server: %s", line)
	}
	for _, n := range w.nodes {
		if err := n.journal(); err != nil {
			w.wrong("journal of %s: %v", n.name, err)
		}
	}
	for _, line := range w.broke() {
		w.wrong("history: %s", line)
	}
}

// broke holds the merged history of server and nodes against what is promised.
func (w *world) broke() (out []string) {
	h, err := w.history()
	if err != nil {
		return []string{err.Error()}
	}
	for _, v := range check.Check(h) {
		if !w.clockBetween(v) {
			out = append(out, v.String())
		}
	}
	return out
}

// clockBetween reports whether a violation is of the wall time that a node wrote
// beside a beginning, and its clock was set in this schedule: the window is
// checked first and the record made later, and the clock may be set between.
func (w *world) clockBetween(v check.Violation) bool {
	return v.Invariant == check.Authorised && strings.Contains(v.What, "outside of its window") &&
		slices.ContainsFunc(w.nodes, func(n *node) bool { return n.name == v.Node && n.clockSet })
}

func (w *world) history() (*check.History, error) {
	ctx := context.Background()
	h := &check.History{Server: check.NewServer(), Gone: map[string]string{}}
	cfg := controlplane.Config{StateDir: filepath.Join(w.dir, "server"), Registry: all.Registry(), Logger: w.log}
	if err := controlplane.Export(ctx, cfg, func(l *auditv1.LogLine) error { return h.Server.Add(l) }); err != nil {
		return nil, err
	}
	for i := len(w.nodes); i < maxNodes; i++ {
		h.Gone[nodeName(i)] = "this schedule has no such node"
	}
	for _, n := range w.nodes {
		journal := check.NewNode()
		add := func(l *agentv1.JournalLine) error { return journal.Add(l) }
		if err := agent.Export(ctx, filepath.Join(n.dir, "state"), filepath.Join(n.dir, "run"), add); err != nil {
			return nil, err
		}
		h.Nodes = append(h.Nodes, journal)
	}
	return h, nil
}

// replayed holds the server's rows against its log, read into an empty store.
func (w *world) replayed() []string {
	cfg := controlplane.Config{StateDir: filepath.Join(w.dir, "server"), Registry: all.Registry(), Logger: w.log}
	differ, err := controlplane.Replay(context.Background(), cfg, w.dir)
	if err != nil {
		differ = append(differ, "read its log into an empty store: "+err.Error())
	}
	return differ
}

// journal puts the node's journal to the code of millwrightd journal check.
func (n *node) journal() error { return agent.CheckJournal(filepath.Join(n.dir, "state")) }
