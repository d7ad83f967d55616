package simulation

import (
	"context"
	"path/filepath"

	"github.com/gpuaas/millwright/agent"
	"github.com/gpuaas/millwright/controlplane"
	"github.com/gpuaas/millwright/tasks/all"
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
