package main

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// verdict is what is wrong with a case. It is an error.
type verdict struct {
	sort string // duplicated, lost or wrong
	why  string
}

func (v *verdict) Error() string { return v.sort + ": " + v.why }

func wrong(format string, args ...any) error { return &verdict{"wrong", fmt.Sprintf(format, args...)} }
func lostWork(format string, args ...any) error {
	return &verdict{"lost", fmt.Sprintf(format, args...)}
}

// effect says what has become of the node.
type effect int

const (
	asWanted effect = iota // as after a run without a kill
	asBefore               // as before the task
	whatever               // a person has to look
)

// end is one right way to end.
type end struct {
	state  taskv1.TaskState
	reason string             // empty: any
	undo   []taskv1.UndoState // empty: any
	effect effect             // of a kind with a goal
	runs   []int              // of an action
}

// ends are the right ways in which a story can end after an injury: the model.
// It knows the point's spot, the kind's class, and whether the process was
// killed or a call failed. order is the place of each point in its registry.
func ends(s story, i *injury, order map[string]int) []end {
	clean := end{state: s.state, reason: s.reason, undo: []taskv1.UndoState{s.undo}, runs: []int{1}}
	if s.idle {
		clean.runs = []int{0}
	}
	if s.state == refused {
		clean.undo = nil
	}
	if i == nil {
		return []end{clean}
	}
	if s.ways != nil {
		return s.ways(*i, clean)
	}
	notStarted := end{state: failed, reason: "COMMAND_NOT_STARTED", undo: []taskv1.UndoState{notNeeded}, runs: []int{0}}
	switch {
	case i.point.Program == shim && i.point.Spot == "unstarted" && s.first != "":
		// The second life of the agent may find that nothing was started, and start it.
		return []end{clean, notStarted}
	case i.point.Program == shim && i.point.Spot == "unstarted":
		return []end{notStarted}
	case i.point.Program == shim && i.point.Spot == "unknown":
		unknown := end{state: held, reason: "OUTCOME_UNKNOWN", runs: []int{1}}
		switch at, start := order[i.point.Name], order["shim.started"]; {
		case at < start:
			unknown.runs = []int{0}
		case at == start:
			unknown.runs = []int{0, 1} // it was started; whether it got to its first line is open
		}
		return []end{unknown}
	case i.point.Program == agent && s.idle && s.first != "":
		// Until it is final that nothing was started, another life of the agent may start it.
		return []end{clean, {state: succeeded, runs: []int{1}}}
	case i.mode == "fail" && s.action:
		stepFailed := notStarted
		stepFailed.reason = "STEP_FAILED"
		return []end{clean, notStarted, stepFailed}
	case i.mode == "fail":
		out := []end{clean, {state: failed, undo: []taskv1.UndoState{complete, notNeeded}, effect: asBefore}}
		if s.state != succeeded { // the undo itself may be what fails
			out = append(out, end{state: held, reason: "UNDO_FAILED", effect: whatever})
		}
		return out
	}
	return []end{clean}
}

// sight is what was seen of a case.
type sight struct {
	task   *taskv1.Task
	before string // facts of the node
	after  string
	events []*taskv1.TaskEvent
}

// judge holds what was seen against the model. wanted are the facts of a run
// without injury.
func judge(s story, i *injury, order map[string]int, seen sight, wanted string) error {
	if err := judgeHistory(s, i, seen.events); err != nil {
		return err
	}
	allowed := ends(s, i, order)
	var matches []end
	for _, e := range allowed {
		ok := e.state == seen.task.GetState() && (e.reason == "" || e.reason == seen.task.GetReason()) &&
			(len(e.undo) == 0 || slices.Contains(e.undo, seen.task.GetUndo()))
		if ok {
			matches = append(matches, e)
		}
	}
	if len(matches) == 0 {
		return wrong("it ended %s %s (%s): %s", seen.task.GetState(), seen.task.GetReason(), seen.task.GetUndo(), seen.task.GetMessage())
	}
	if s.action {
		return judgeRuns(matches, seen.after)
	}
	return judgeState(s, matches, seen, wanted)
}

func judgeRuns(matches []end, facts string) error {
	n, err := strconv.Atoi(strings.TrimPrefix(facts, "runs="))
	if err != nil {
		return wrong("it cannot be seen how often it ran: %q", facts)
	}
	low, high := n, n
	for _, e := range matches {
		if slices.Contains(e.runs, n) {
			return nil
		}
		low, high = min(low, slices.Min(e.runs)), max(high, slices.Max(e.runs))
	}
	if n == high {
		return &verdict{"duplicated", fmt.Sprintf("it ran %d times", n)}
	}
	return lostWork("it ran %d times", n)
}

func judgeState(s story, matches []end, seen sight, wanted string) error {
	for _, e := range matches {
		back := seen.after == seen.before || seen.after == strings.TrimSuffix(seen.before, s.loses)
		if e.effect == whatever || e.effect == asWanted && seen.after == wanted || e.effect == asBefore && back {
			return nil
		}
	}
	if strings.Contains(seen.after, "mounts=2") {
		return &verdict{"duplicated", "mounted twice"}
	}
	return wrong("it ended %s, and the node is\n%s\nwanted\n%s\nbefore\n%s", seen.task.GetState(), seen.after, wanted, seen.before)
}

// judgeHistory asks that a task ends once and last, that its events are in
// order and none is late, and that it went back to the queue only where the node
// did not know it.
func judgeHistory(s story, i *injury, events []*taskv1.TaskEvent) error {
	count := map[string]int{}
	var last *taskv1.TaskEvent
	ended := 0
	for _, e := range events {
		count[e.GetType()]++
		if e.GetLate() {
			return wrong("%s came after the end", e.GetType())
		}
		if last != nil && e.GetIndex() <= last.GetIndex() {
			return wrong("%s has the index %d after %d", e.GetType(), e.GetIndex(), last.GetIndex())
		}
		if e.GetState() >= succeeded && e.GetState() != held {
			ended++
		}
		last = e
	}
	for _, once := range []string{"CREATED", "ACCEPTED", "PLANNED", "STARTED", "UNDOING", "HELD"} {
		if count[once] > 1 {
			return &verdict{"duplicated", fmt.Sprintf("%s stands %d times in the history", once, count[once])}
		}
	}
	kills := 2 // one of the story, one of the case
	switch {
	case ended > 1:
		return &verdict{"duplicated", fmt.Sprintf("%d events end the task", ended)}
	case last == nil || ended == 0 && last.GetState() != held:
		return lostWork("no event ends the task")
	case ended == 1 && (last.GetState() < succeeded || last.GetState() == held):
		return wrong("%s came after the end", last.GetType())
	case count["REQUEUED"] > kills || count["RESUMED"] > kills:
		return wrong("it was requeued %d times and resumed %d times", count["REQUEUED"], count["RESUMED"])
	case i != nil && i.point.Spot == "unaccepted" && i.nth == 1 && s.custom == nil && count["REQUEUED"] != 1:
		return wrong("the node did not know it, and it was requeued %d times", count["REQUEUED"])
	}
	return nil
}
