package ctl

import (
	"fmt"
	"strings"
	"time"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// printPlans writes what each node would do.
func (a *app) printPlans(tasks []*taskv1.Task) error {
	for i, t := range tasks {
		if i > 0 {
			if err := a.write([]byte("\n")); err != nil {
				return err
			}
		}
		if err := a.write([]byte(planText(t))); err != nil {
			return err
		}
	}
	return nil
}

// planText is the plan of one task, as lines.
func planText(t *taskv1.Task) string {
	var b strings.Builder
	fmt.Fprintf(&b, "Plan of %s on %s (task %s)\n", t.GetKind(), t.GetNode(), t.GetId())
	p := planOf(t)
	switch {
	case p == nil:
		fmt.Fprintf(&b, "  no plan: the task is %s\n", word(t.GetState()))
		return b.String()
	case len(p.GetSteps()) == 0:
		b.WriteString("  nothing to do\n")
	}
	if len(p.GetDifferences()) > 0 {
		b.WriteString("  Differences\n")
		for _, d := range p.GetDifferences() {
			fmt.Fprintf(&b, "    %s: has %s, wants %s\n", printable(d.GetSubject()), orNothing(d.GetHave()), orNothing(d.GetWant()))
		}
	}
	if len(p.GetSteps()) > 0 {
		b.WriteString("  Steps\n")
		for i, s := range p.GetSteps() {
			fmt.Fprintf(&b, "    %d  %s  (%s)\n", i, printable(s.GetTitle()), stepNote(s))
		}
	}
	b.WriteString(inTheWayText(p.GetInTheWay()))
	if len(p.GetImpact()) > 0 {
		words := make([]string, len(p.GetImpact()))
		for i, v := range p.GetImpact() {
			words[i] = word(v)
		}
		fmt.Fprintf(&b, "  It may cause: %s\n", strings.Join(words, ", "))
	}
	if len(t.GetPlanDigest()) > 0 {
		fmt.Fprintf(&b, "  Digest %x\n", t.GetPlanDigest())
	}
	return b.String()
}

// planOf is a task's plan. Of a task that only plans it is the result.
func planOf(t *taskv1.Task) *taskv1.Plan {
	p := &taskv1.Plan{}
	if t.GetPlan() == nil && t.GetResult().UnmarshalTo(p) == nil {
		return p
	}
	return t.GetPlan()
}

func stepNote(s *taskv1.PlannedStep) string {
	note := s.GetType()
	if !s.GetUndoable() {
		note += ", cannot be undone"
	}
	return printable(note)
}

func orNothing(s string) string {
	if s == "" {
		return "nothing"
	}
	return printable(s)
}

// inTheWayText says whose work a plan waits for.
func inTheWayText(list []*taskv1.InTheWay) string {
	var b strings.Builder
	for _, w := range list {
		fmt.Fprintf(&b, "  In the way: %s has node %s as %s", printable(w.GetManager()), printable(w.GetNode()), printable(w.GetState()))
		if w.GetReason() != "" {
			fmt.Fprintf(&b, " (%s)", printable(w.GetReason()))
		}
		if len(w.GetWork()) == 0 {
			b.WriteString(", and no job there")
		}
		b.WriteString("\n")
		for _, j := range w.GetWork() {
			fmt.Fprintf(&b, "    job %s of %s (%s) is %s", printable(j.GetId()), printable(j.GetOwner()), printable(j.GetName()), printable(j.GetState()))
			if end := j.GetEndTime(); end != nil {
				fmt.Fprintf(&b, ", until %s at most", end.AsTime().UTC().Format(time.RFC3339))
			}
			b.WriteString("\n")
		}
	}
	return b.String()
}
