package main

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/test/cluster"
	"github.com/gpuaas/millwright/test/invariants/check"
)

// person does what a held task asks for: a person looks at the node, and settles
// it. Until then it keeps its locks, and what waits for them waits.
type person struct {
	c       *cluster.Cluster
	settled map[string]*taskv1.Task // as they were held
}

// settle gives up each task that is held, as one whose effect nobody can know.
// It fails until none is.
func (p *person) settle(ctx context.Context, h *check.History) error {
	n := 0
	for id, row := range h.Server.Tasks {
		t := row.GetTask()
		if t.GetState() != taskv1.TaskState_TASK_STATE_HELD {
			continue
		}
		n++
		if p.settled[id] != nil {
			continue
		}
		if _, err := p.c.Millctl(ctx, "task", "resolve", id, "--as", "abandon", "--reason", "soak"); err != nil {
			return fmt.Errorf("settle task %s, which is held: %w", id, err)
		}
		p.settled[id] = t
	}
	if n > 0 {
		return fmt.Errorf("%d tasks are held, and being settled", n)
	}
	return nil
}

// unexpected are the tasks that were held and had no cause to be: the outcome of
// a command whose shim was killed cannot be known, and of nothing else.
func (p *person) unexpected() (out []string) {
	for id, t := range p.settled {
		if t.GetKind() != "system.command" || t.GetReason() != "OUTCOME_UNKNOWN" {
			out = append(out, fmt.Sprintf("task %s (%s) was held: %s: %s", id, t.GetKind(), t.GetReason(), t.GetMessage()))
		}
	}
	return out
}

// counts says how many were held for what.
func (p *person) counts() string {
	n := map[string]int{}
	for _, t := range p.settled {
		n[t.GetKind()+" "+t.GetReason()]++
	}
	words := []string{fmt.Sprintf("%d, and settled", len(p.settled))}
	for _, what := range slices.Sorted(maps.Keys(n)) {
		words = append(words, fmt.Sprintf("%d %s", n[what], what))
	}
	return strings.Join(words, ", ")
}
