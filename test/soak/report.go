package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/test/cluster"
	"github.com/gpuaas/millwright/test/invariants/check"
)

// quietWithin is how long all may take to come to rest after the last kill.
const quietWithin = 3 * time.Minute

// report waits until all is at rest, holds everything against what is
// promised, and prints the figures.
func report(ctx context.Context, c *cluster.Cluster, w *work, k *killer, out io.Writer) error {
	var last *check.History
	var lost []string
	began := time.Now()
	p := &person{c: c, settled: map[string]*taskv1.Task{}}
	err := check.Settle(ctx, quietWithin, nil, func(ctx context.Context) (*check.History, error) {
		h, err := histories(ctx, c, k.nodes)
		if err != nil {
			return nil, err
		}
		last, lost = h, w.complete(h)
		return h, p.settle(ctx, h)
	})
	var broken *check.Broken
	if err != nil && !errors.As(err, &broken) || last == nil {
		return err
	}
	more, lookErr := look(ctx, last, k.nodes)
	if lookErr != nil {
		return errors.Join(err, lookErr)
	}
	count := map[string]int{check.Kept: len(lost), check.Once: len(more.duplicated)}
	if broken != nil {
		for _, v := range broken.Unexpected {
			count[v.Invariant]++
		}
	}
	ran := 0
	for _, e := range last.Effects {
		ran += e.Count
	}
	_, _ = fmt.Fprintf(out, "killed      %d: agent %d, shim %d, server %d, in %.0f s\n", k.total(), k.killed[agent], k.killed[shim], k.killed[server], k.took.Seconds())
	_, _ = fmt.Fprintf(out, "tasks       %d: %s\n", len(last.Server.Tasks), ends(last))
	_, _ = fmt.Fprintf(out, "held        %s\n", p.counts())
	_, _ = fmt.Fprintf(out, "commands    %d ran; %d cancels; %d calls repeated with their request id, %d never answered\n", ran, w.cancels, w.repeated, w.refused)
	_, _ = fmt.Fprintf(out, "reboots     %d boots by %d tasks\n", more.boots, more.reboots)
	_, _ = fmt.Fprintf(out, "recorded    %d log entries of %d nodes; at rest %.0f s after the last kill\n", len(last.Server.Entries), len(last.Nodes), time.Since(began).Seconds())
	_, _ = fmt.Fprintf(out, "duplicated  %d\nlost        %d\n", count[check.Once], count[check.Kept])
	more.wrong = append(more.wrong, p.unexpected()...)
	others := len(more.wrong)
	for _, name := range check.Names() {
		if name != check.Once && name != check.Kept {
			others += count[name]
		}
	}
	_, _ = fmt.Fprintf(out, "otherwise   %d\n", others)
	for _, what := range slices.Concat(more.duplicated, more.wrong) {
		err = errors.Join(err, errors.New(what))
	}
	if len(lost) > 0 {
		err = errors.Join(err, fmt.Errorf("created, and not known to the server: %s", strings.Join(lost, ", ")))
	}
	return err
}

// ends counts tasks by how they ended.
func ends(h *check.History) string {
	n := map[string]int{}
	for _, row := range h.Server.Tasks {
		n[strings.ToLower(strings.TrimPrefix(row.GetTask().GetState().String(), "TASK_STATE_"))]++
	}
	var words []string
	for _, state := range slices.Sorted(maps.Keys(n)) {
		words = append(words, fmt.Sprintf("%s %d", state, n[state]))
	}
	return strings.Join(words, ", ")
}
