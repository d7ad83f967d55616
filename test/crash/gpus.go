package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/google/uuid"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/test/fakenvml"
)

// migs are mig.configure on a fresh GPU in persistence mode that needs a reset, and
// on one that changes it at once and has another layout, for an undo to come back
// to. The driver's library is a stand-in.
func migs() []story {
	layout := func(instances string) string {
		return "layouts:\n- select: {all: true}\n  instances: [" + instances + "]\nallow_reset: true\n"
	}
	first := story{
		kind: "mig.configure", facts: migFacts, state: succeeded, prepare: func(string) string { return "true" },
		spec: func(string) string { return layout("{profile: 3g.40gb, count: 1}, {profile: 1g.10gb, count: 2}") },
		setup: func(ctx context.Context, t *trial) error {
			return partition(ctx, t, "A100-80", "; fakenvml-state set 0 persistence=1")
		},
	}
	first.create = func(ctx context.Context, t *trial) (string, error) {
		return created(t.operator(ctx, t.story.spec(t.label), "task", "run", "mig.configure", "-n", t.node.Name(), "-f", "-", "-o", "json",
			"--allow-impact", "gpu-reset", "--request-id", uuid.NewString()))
	}
	again := first
	again.variant = "that repartitions"
	again.setup = func(ctx context.Context, t *trial) error {
		if err := partition(ctx, t, "H100", ""); err != nil {
			return err
		}
		return t.done(ctx, "mig.configure", layout("{profile: 2g.20gb, count: 1}, {profile: 3g.40gb, count: 1}"))
	}
	first.slow, again.slow = true, true
	again.strikes = "host.mig." // it has another layout to come back to
	// Those without a layout come first: one that a node has is restored on each
	// GPU that it gets.
	return append(gpuKinds(), first, again)
}

// gpuKinds are gpu.reset of a GPU with a MIG layout, in persistence mode, and
// gpu.diagnose with a stand-in for dcgmi.
func gpuKinds() []story {
	reset := story{
		kind: "gpu.reset", action: true, state: succeeded, prepare: func(string) string { return "true" },
		spec:  func(string) string { return "select: {all: true}\nwhen: RESET_WHEN_FORCE\n" },
		facts: func(string) string { return resetFacts },
		setup: func(ctx context.Context, t *trial) error {
			return partition(ctx, t, "H100", countResets+"; fakenvml-state set 0 persistence=1 mig_current=1 mig_pending=1")
		},
	}
	reset.create = func(ctx context.Context, t *trial) (string, error) {
		return created(t.operator(ctx, t.story.spec(t.label), "task", "run", "gpu.reset", "-n", t.node.Name(), "-f", "-", "-o", "json",
			"--allow-impact", "gpu-reset", "--request-id", uuid.NewString()))
	}
	diagnose := story{
		kind: "gpu.diagnose", action: true, state: succeeded, prepare: func(string) string { return "true" },
		spec:  func(string) string { return "dcgm_level: 1\n" },
		facts: func(string) string { return "echo runs=$(cat /run/fakenvml/runs 2>/dev/null | wc -l)" },
		setup: func(ctx context.Context, t *trial) error { return partition(ctx, t, "H100", standInDCGM) },
	}
	reset.ways, diagnose.ways = resetWays, diagnoseWays
	reset.slow, diagnose.slow = true, true
	return []story{reset, diagnose}
}

// resetWays: a reset that did not begin is undone, one of which nothing is known is
// held, and one that was made is not undone when something fails afterwards.
func resetWays(i injury, clean end) []end {
	switch {
	case i.point.Program == shim && i.point.Spot == "unstarted":
		return []end{{state: failed, reason: "GPU_RESET", undo: []taskv1.UndoState{complete}, runs: []int{0}}}
	case i.point.Program == shim && i.point.Spot == "unknown":
		return []end{{state: held, reason: "OUTCOME_UNKNOWN", runs: []int{0, 1}}}
	case i.mode == "fail":
		return []end{
			clean, {state: failed, undo: []taskv1.UndoState{complete, notNeeded}, runs: []int{0}},
			{state: failed, undo: []taskv1.UndoState{complete, notPossible}, runs: []int{1}},
		}
	}
	return []end{clean}
}

// diagnoseWays: what became of dcgmi is found, and never run again.
func diagnoseWays(i injury, clean end) []end {
	clean.runs = []int{1}
	switch {
	case i.point.Program == shim && i.point.Spot == "unstarted":
		clean.runs = []int{0}
	case i.point.Program == shim && i.point.Spot == "unknown":
		clean.runs = []int{0, 1}
	case i.mode == "fail":
		clean.runs = []int{0, 1}
		return []end{clean, {state: failed, runs: []int{0, 1}}}
	}
	return []end{clean}
}

const (
	// countResets notes each run of nvidia-smi that resets.
	countResets = `; printf '#!/bin/sh\ncase "$*" in *--gpu-reset*) echo run >> /run/fakenvml/runs;; esac\nexec /usr/local/bin/nvidia-smi "$@"\n' > /usr/local/sbin/nvidia-smi; chmod 755 /usr/local/sbin/nvidia-smi`
	// standInDCGM says that all is well, and notes each run.
	standInDCGM = `; printf '#!/bin/sh\necho run >> /run/fakenvml/runs\necho %s\n' "'{\"DCGM Diagnostic\":{\"test_categories\":[{\"tests\":[{\"name\":\"software\",\"results\":[{\"entity_group\":\"GPU\",\"entity_id\":0,\"status\":\"Pass\"}]}]}]}}'" > /usr/local/bin/dcgmi; chmod 755 /usr/local/bin/dcgmi`
	// resetFacts tell how often it was reset. What a reset takes with it is told by
	// the story of its kind in test/e2e.
	resetFacts = `echo runs=$(cat /run/fakenvml/runs 2>/dev/null | wc -l)`
)

// partition gives the node one fresh GPU, and nothing of an earlier trial. The
// script and is run once the GPU is there.
func partition(ctx context.Context, t *trial, product, and string) error {
	lib, err := fakenvml.Build(ctx, fakenvml.Variant{})
	if err != nil {
		return err
	}
	for from, to := range map[string]string{
		"libnvidia-ml.so.1": "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1", "fakenvml-state": "/usr/local/bin/fakenvml-state", "nvidia-smi": "/usr/local/bin/nvidia-smi",
	} {
		b, err := os.ReadFile(filepath.Join(lib.Dir, from))
		if err != nil {
			return err
		}
		if err := t.node.WriteFile(ctx, to, b, 0o755); err != nil {
			return err
		}
	}
	if _, err := t.sh(ctx, `set -e; systemctl stop millwrightd.service; test -e `+configKept+` || cp /etc/millwright/agent.yaml `+configKept+`
cp `+configKept+` /etc/millwright/agent.yaml; rm -rf /run/fakenvml /run/cdi/millwright-gpu.json /etc/millwright/mig; mkdir -p /run/fakenvml; ln -s /dev /run/fakenvml/dev
fakenvml-state create `+product+and+`; nvidia-smi -L >/dev/null
printf 'gpu:\n  mode: on\n  period: 1s\n  slow_period: 2s\n' >> /etc/millwright/agent.yaml
systemctl start millwrightd.service`); err != nil {
		return err
	}
	return t.connected(ctx)
}

// migFacts tell the mode, the layout, which MIG devices containers can have, and
// whose the layout is. Ids and UUIDs are new each time. The whole GPU is in a
// specification after an undo that was not there before: it is right.
func migFacts(string) string {
	return fmt.Sprintf(`echo mode=$(nvidia-smi --query-gpu=mig.mode.current,mig.mode.pending,persistence_mode --format=csv,noheader 2>/dev/null | tr -d ' ') \
 instances=$(nvidia-smi mig -lgi 2>/dev/null | awk '{print $4 "@" $7}' | tr '\n' ' ') devices=$(nvidia-smi -L 2>/dev/null | grep -c MIG) \
 cdi=$(cat %s 2>/dev/null | grep -c '"name": "MIG-') owners=$(ls /etc/millwright/mig 2>/dev/null | wc -l) temporary=$(ls -A /run/cdi 2>/dev/null | grep -vc '^millwright-gpu.json$') intent=$(millwrightd status | grep -c mig:)`, "/run/cdi/millwright-gpu.json")
}
