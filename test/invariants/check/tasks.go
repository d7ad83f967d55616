package check

import (
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/millwright/pki/envelope"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// life is what the server's log says of a task, read in order.
type life struct {
	first   taskv1.TaskState // the first state that is an end
	last    taskv1.TaskState // the last of those that need no more: an end, or held
	settled bool             // a person's word about a lost journal ended it
	lost    bool             // it is held since its node no longer has its journal
}

// step reads the next state that the log gives.
func (l *life) step(s taskv1.TaskState) {
	if terminal(l.first) {
		return
	}
	l.lost = false
	if l.last = s; terminal(s) {
		l.first = s
	}
}

// frame reads what a node says of a task. Once the task is held because that
// journal is lost, only an end counts of what still comes of it: a stream of it
// may be read for a little longer, and what goes on there is over.
func (l *life) frame(e *taskv1.Event, current string) {
	late := l.lost && e.GetJournalId() != current
	switch {
	case e.GetFinished() != nil:
		l.step(e.GetFinished().GetState())
	case late:
	case e.GetHeld() != nil:
		l.step(taskv1.TaskState_TASK_STATE_HELD)
	default:
		l.step(taskv1.TaskState_TASK_STATE_RUNNING)
	}
}

// lives reads the log.
func (c *run) lives() map[string]*life {
	out := map[string]*life{}
	of := func(id string) *life {
		if out[id] == nil {
			out[id] = &life{}
		}
		return out[id]
	}
	current := map[string]string{} // the journal of each node, where it has had another
	for _, e := range c.h.Server.Entries {
		entry := e.GetEntry()
		switch {
		case entry.GetJournalChanged() != nil:
			current[entry.GetJournalChanged().GetNode()] = entry.GetJournalChanged().GetNewJournalId()
		case entry.GetTaskRefused() != nil:
			state := taskv1.TaskState_TASK_STATE_REFUSED
			if entry.GetTaskRefused().GetAnswer().GetReason() == "WINDOW_PASSED" {
				state = taskv1.TaskState_TASK_STATE_EXPIRED
			}
			of(entry.GetTaskRefused().GetTaskId()).step(state)
		case entry.GetTaskDecided() != nil:
			d := entry.GetTaskDecided()
			of(d.GetTaskId()).step(d.GetState())
			of(d.GetTaskId()).lost = d.GetReason() == "JOURNAL_LOST"
		case entry.GetNodeFrame() != nil && entry.GetNodeFrame().GetNotApplied() == "" && taskOf(e.GetEvent()) != "":
			of(taskOf(e.GetEvent())).frame(e.GetEvent(), current[entry.GetNodeFrame().GetNode()])
			if lost, ok := resolved(c.h.Server, e.GetEvent()); ok {
				of(lost).settled = true
			}
		}
	}
	return out
}

// resolved is the task that a task.resolve which has succeeded was about.
func resolved(s *Server, e *taskv1.Event) (id string, ok bool) {
	if e.GetFinished().GetState() != taskv1.TaskState_TASK_STATE_SUCCEEDED {
		return "", false
	}
	leaf, err := envelope.DecodeLeaf(s.Tasks[e.GetFinished().GetTaskId()].GetSignedLeaf().GetLeaf())
	if err != nil || leaf.GetKind() != "task.resolve" {
		return "", false
	}
	spec := new(taskv1.ResolveSpec)
	if err := proto.Unmarshal(leaf.GetSpec(), spec); err != nil {
		return "", false
	}
	return spec.GetTaskId(), true
}

// rows compares tasks with what the events say.
func (c *run) rows() {
	lives := c.lives()
	for id, row := range c.h.Server.Tasks {
		l, state := lives[id], row.GetTask().GetState()
		if l == nil {
			l = &life{}
		}
		switch ended := rests(state); {
		case l.settled && terminal(state) && !terminal(l.first):
		case ended && state != l.last:
			c.fail(Rows, row.GetTask().GetNode(), id, "the server shows %s, and its log says %s", state, l.last)
		case !ended && rests(l.last):
			c.fail(Rows, row.GetTask().GetNode(), id, "the server shows %s, and its log says %s", state, l.last)
		}
	}
	for id := range lives {
		if c.h.Server.Tasks[id] == nil {
			c.fail(Rows, "", id, "the log tells of it, and there is no such task")
		}
	}
	for _, n := range c.h.Nodes {
		ends := map[string]taskv1.TaskState{}
		for _, f := range n.Frames {
			if e := f.GetEvent(); e.GetFinished() != nil {
				ends[taskOf(e)] = e.GetFinished().GetState()
			} else if e.GetHeld() != nil {
				ends[taskOf(e)] = taskv1.TaskState_TASK_STATE_HELD
			}
		}
		for id, rec := range n.Tasks {
			if said, ok := ends[id]; ok && said != rec.GetState() && (terminal(said) || terminal(rec.GetState())) {
				c.fail(Rows, n.Name, id, "the node's journal holds it as %s, and its events say %s", rec.GetState(), said)
			}
		}
	}
}

// final looks for what was said of a task after its end.
func (c *run) final() {
	c.each(func(j journal, frames []frame) {
		ended := map[string]taskv1.TaskState{}
		for _, f := range frames {
			id := taskOf(f.event)
			if s, ok := ended[id]; ok && id != "" {
				c.fail(Final, j.node, id, "it ended as %s, and frame %d says more of it", s, f.event.GetSeq())
			}
			if s := f.event.GetFinished().GetState(); terminal(s) {
				ended[id] = s
			}
		}
	})
	ended := map[string]taskv1.TaskState{}
	for _, e := range c.h.Server.Entries {
		d := e.GetEntry().GetTaskDecided()
		if s, ok := ended[d.GetTaskId()]; ok && d != nil {
			c.fail(Final, d.GetNode(), d.GetTaskId(), "it ended as %s, and entry %d makes it %s", s, e.GetIndex(), d.GetState())
		}
		if terminal(d.GetState()) {
			ended[d.GetTaskId()] = d.GetState()
		}
		if f := e.GetEvent().GetFinished(); f != nil && e.GetEntry().GetNodeFrame().GetNotApplied() == "" {
			if _, ok := ended[f.GetTaskId()]; !ok {
				ended[f.GetTaskId()] = f.GetState()
			}
		}
	}
	for id, s := range ended {
		if row := c.h.Server.Tasks[id].GetTask(); row != nil && terminal(row.GetState()) && row.GetState() != s {
			c.fail(Final, row.GetNode(), id, "it ended as %s, and is %s now", s, row.GetState())
		}
	}
}

// What an event of a task is called here.
const (
	accepted, waiting, planned, started = "accepted", "waiting", "planned", "started"
	stepEnded, resumed, undoing         = "step ended", "resumed", "undoing"
	held, finished, nothing             = "held", "finished", "nothing"
	stepWaits                           = "step waits"
)

// follows is the life of a task: which events may come after which.
var follows = map[string][]string{
	nothing:   {accepted},
	accepted:  {waiting, planned, finished},
	waiting:   {waiting, planned, finished},
	planned:   {started, resumed, held, finished},
	started:   {stepWaits, stepEnded, resumed, undoing, held, finished},
	stepWaits: {stepWaits, stepEnded, resumed, undoing, held, finished},
	stepEnded: {stepWaits, stepEnded, resumed, undoing, held, finished},
	resumed:   {stepWaits, stepEnded, resumed, undoing, held, finished},
	undoing:   {resumed, held, finished},
	held:      {undoing, finished},
	finished:  {},
}

func nameOf(e *taskv1.Event) string {
	switch e.GetPayload().(type) {
	case *taskv1.Event_Accepted:
		return accepted
	case *taskv1.Event_Waiting:
		return waiting
	case *taskv1.Event_Planned:
		return planned
	case *taskv1.Event_Started:
		return started
	case *taskv1.Event_StepEnded:
		return stepEnded
	case *taskv1.Event_StepWaiting:
		return stepWaits
	case *taskv1.Event_Resumed:
		return resumed
	case *taskv1.Event_Undoing:
		return undoing
	case *taskv1.Event_Held:
		return held
	case *taskv1.Event_Finished:
		return finished
	}
	return nothing
}

// order follows each task through the journal.
func (c *run) order() {
	c.each(func(j journal, frames []frame) {
		if len(frames) == 0 || frames[0].event.GetSeq() != 1 {
			return // its beginning is not known
		}
		seen, steps, person := map[string][]string{}, map[string]int{}, map[string]bool{}
		for _, f := range frames {
			id, is := taskOf(f.event), nameOf(f.event)
			if id == "" {
				continue
			}
			before := nothing
			if n := len(seen[id]); n > 0 {
				before = seen[id][n-1]
			}
			if before != finished && !slices.Contains(follows[before], is) {
				c.fail(Order, j.node, id, "%s (frame %d) follows %s", is, f.event.GetSeq(), before)
			}
			if is == planned {
				steps[id] = len(f.event.GetPlanned().GetPlan().GetSteps())
			}
			person[id] = person[id] || is == held
			seen[id] = append(seen[id], is)
			if is == finished && !person[id] {
				c.end(j, f.event, seen[id], steps[id])
			}
		}
	})
}

// end asks whether a task that no person settled could end as it did.
func (c *run) end(j journal, e *taskv1.Event, seen []string, steps int) {
	f := e.GetFinished()
	began, back := slices.Contains(seen, started), slices.Contains(seen, undoing)
	verified := 0
	for _, s := range f.GetSteps() {
		if s.GetPhase() == taskv1.StepPhase_STEP_PHASE_VERIFIED {
			verified++
		}
	}
	switch f.GetState() {
	case taskv1.TaskState_TASK_STATE_SUCCEEDED:
		if back || verified != steps {
			c.fail(Order, j.node, f.GetTaskId(), "it succeeded with %d of %d steps verified (turned to undo: %t)", verified, steps, back)
		}
	case taskv1.TaskState_TASK_STATE_REFUSED, taskv1.TaskState_TASK_STATE_EXPIRED:
		if began {
			c.fail(Order, j.node, f.GetTaskId(), "it ended as %s after its first step", f.GetState())
		}
	default: // the others may end at any step
	}
}
