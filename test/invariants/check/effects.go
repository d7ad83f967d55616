package check

import (
	"bytes"
	"time"

	"github.com/gpuaas/millwright/pki/trustroot"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// startSlack is how long after its gate was asked a task's first step may
// begin: a plan is made in between, for two minutes at most.
const startSlack = 3 * time.Minute

// authorised verifies each acceptance anew, and asks that nothing was done
// without one.
func (c *run) authorised() {
	root, err := trustroot.Open(c.h.Server.Cluster.GetTrustChain(), c.h.Server.Cluster.GetCluster())
	if err != nil {
		c.fail(Authorised, "", "", "the trust chain does not hold: %v", err)
		return
	}
	c.each(func(j journal, frames []frame) {
		if len(frames) == 0 || frames[0].event.GetSeq() != 1 {
			return // who was accepted before is not known
		}
		floor := frames[0].event.GetJournalOpened().GetFloor().AsTime()
		by := map[string]*trustroot.Verified{}
		for _, f := range frames {
			id := taskOf(f.event)
			if a := f.event.GetAccepted(); a != nil {
				if v := c.acceptance(root, j, floor, a); v != nil {
					by[id] = v
				}
				continue
			}
			if id != "" && by[id] == nil {
				c.fail(Authorised, j.node, id, "frame %d says that it is %s, and nothing that was accepted authorises it", f.event.GetSeq(), nameOf(f.event))
				continue
			}
			c.allowed(j, by[id], f.event)
		}
	})
	c.intents()
}

// acceptance judges what a node accepted, and returns it when it should have.
func (c *run) acceptance(root *trustroot.Root, j journal, floor time.Time, a *taskv1.TaskAccepted) *trustroot.Verified {
	at, ok := root.At(a.GetTrustRootVersion())
	if !ok {
		c.fail(Authorised, j.node, a.GetTaskId(), "it was judged by version %d of the trust root, which is not known", a.GetTrustRootVersion())
		return nil
	}
	v, err := at.VerifyTaskSet(a.GetEnvelope(), a.GetSignedLeaf())
	if err != nil {
		c.fail(Authorised, j.node, a.GetTaskId(), "its signature does not hold: %v", err)
		return nil
	}
	switch {
	case v.Leaf.GetTaskId() != a.GetTaskId() || !bytes.Equal(v.LeafHash[:], a.GetLeafHash()):
		c.fail(Authorised, j.node, a.GetTaskId(), "what was signed is task %s with another leaf", v.Leaf.GetTaskId())
	case v.Leaf.GetNode() != j.node:
		c.fail(Authorised, j.node, a.GetTaskId(), "what was signed is for node %s", v.Leaf.GetNode())
	case !v.TaskSet.GetIssuedAt().AsTime().After(floor):
		c.fail(Authorised, j.node, a.GetTaskId(), "it was issued at %s, and the floor of journal %s is %s",
			v.TaskSet.GetIssuedAt().AsTime().Format(time.RFC3339), j.id, floor.Format(time.RFC3339))
	}
	return v
}

// allowed judges what was done to a node by what was signed.
func (c *run) allowed(j journal, v *trustroot.Verified, e *taskv1.Event) {
	switch {
	case e.GetPlanned() != nil:
		if kind := e.GetPlanned().GetPlan().GetKind(); kind != v.Leaf.GetKind() {
			c.fail(Authorised, j.node, taskOf(e), "the plan is of kind %s, and what was signed of %s", kind, v.Leaf.GetKind())
		}
	case e.GetStarted() != nil:
		at := e.GetWallTime().AsTime()
		if at.Before(v.TaskSet.GetNotBefore().AsTime()) || !at.Before(v.TaskSet.GetNotAfter().AsTime().Add(startSlack)) {
			c.fail(Authorised, j.node, taskOf(e), "it began at %s, outside of its window", at.Format(time.RFC3339))
		}
		if v.Leaf.GetMode() != taskv1.Mode_MODE_EXECUTE {
			c.fail(Authorised, j.node, taskOf(e), "it began, and was only to be planned")
		}
	}
}

// intents asks that what a node restores by itself was set up by a task that
// has succeeded.
func (c *run) intents() {
	succeeded := map[string]bool{}
	c.each(func(j journal, frames []frame) {
		for _, f := range frames {
			if f.event.GetFinished().GetState() == taskv1.TaskState_TASK_STATE_SUCCEEDED {
				succeeded[j.node+"/"+taskOf(f.event)] = true
			}
		}
	})
	c.each(func(j journal, frames []frame) {
		set := map[string]string{}
		for _, f := range frames {
			i := f.event.GetIntentChanged()
			switch i.GetState() {
			case taskv1.IntentState_INTENT_STATE_ACTIVE:
				if !succeeded[j.node+"/"+i.GetTaskId()] {
					c.fail(Authorised, j.node, i.GetTaskId(), "intent %s is in force, and its task has not succeeded", i.GetKey())
				}
				set[i.GetKey()] = i.GetTaskId()
			case taskv1.IntentState_INTENT_STATE_RESTORED:
				if set[i.GetKey()] != i.GetTaskId() || i.GetTaskId() == "" {
					c.fail(Authorised, j.node, i.GetTaskId(), "intent %s was restored, and is not one that its task has set", i.GetKey())
				}
			default: // what ends or rests is free to
			}
		}
	})
	for _, n := range c.h.Nodes {
		for key, in := range n.Intents {
			if !succeeded[n.Name+"/"+in.GetTaskId()] && n.Head.GetFirstSeq() == 1 {
				c.fail(Authorised, n.Name, in.GetTaskId(), "the node would restore %s, and that task has not succeeded", key)
			}
		}
	}
}

// once counts what may happen at most once.
func (c *run) once() {
	c.each(func(j journal, frames []frame) {
		plans := map[string]*taskv1.Plan{}
		ran := map[string]string{}
		accepts := map[string]int{}
		for _, f := range frames {
			id := taskOf(f.event)
			if p := f.event.GetPlanned(); p != nil {
				plans[id] = p.GetPlan()
			}
			if f.event.GetAccepted() != nil {
				if accepts[id]++; accepts[id] > 1 {
					c.fail(Once, j.node, id, "it was accepted again, in frame %d", f.event.GetSeq())
				}
			}
			if e := f.event.GetStepEnded(); e != nil {
				c.step(j, id, plans[id], int(e.GetStep()), e.GetOutcome(), ran)
			}
			for i, s := range append(f.event.GetFinished().GetSteps(), f.event.GetHeld().GetSteps()...) {
				c.step(j, id, plans[id], i, s, ran)
			}
		}
	})
	c.marks()
}

// step looks at one step that may be applied at most once.
func (c *run) step(j journal, id string, plan *taskv1.Plan, i int, s *taskv1.StepOutcome, ran map[string]string) {
	if i >= len(plan.GetSteps()) || plan.GetSteps()[i].GetEffect() != taskv1.Effect_EFFECT_AT_MOST_ONCE {
		return
	}
	if s.GetAttempts() > 1 {
		c.fail(Once, j.node, id, "step %d may be applied at most once, and was begun %d times", i, s.GetAttempts())
	}
	key, run := id+"/"+string(rune('0'+i)), s.GetCommand().GetInvocationId()
	if run == "" {
		return
	}
	if ran[key] != "" && ran[key] != run {
		c.fail(Once, j.node, id, "the command of step %d ran as %s and as %s", i, ran[key], run)
	}
	ran[key] = run
}

// marks compares the marks on the nodes with what became of their tasks.
func (c *run) marks() {
	began := map[string]bool{}
	c.each(func(_ journal, frames []frame) {
		for _, f := range frames {
			began[taskOf(f.event)] = began[taskOf(f.event)] || f.event.GetStarted() != nil
		}
	})
	tasks := c.keys()
	for _, e := range c.h.Effects {
		id := tasks[e.Node+"\x00"+e.Key]
		row := c.h.Server.Tasks[id].GetTask()
		switch {
		case e.Count > 1:
			c.fail(Once, e.Node, id, "its command ran %d times: mark %s", e.Count, e.Key)
		case e.Count == 1 && row == nil:
			c.fail(Authorised, e.Node, "", "mark %s is on the node, and belongs to no task of it", e.Key)
		case e.Count == 1 && !began[id]:
			c.fail(Authorised, e.Node, id, "mark %s is on the node, and its task never began", e.Key)
		case e.Count == 0 && row.GetState() == taskv1.TaskState_TASK_STATE_SUCCEEDED:
			c.fail(Kept, e.Node, id, "it succeeded, and its mark %s is not on the node", e.Key)
		}
	}
}

// keys finds the task whose spec holds each mark's key.
func (c *run) keys() map[string]string {
	out := map[string]string{}
	for id, row := range c.h.Server.Tasks {
		for _, e := range c.h.Effects {
			if row.GetTask().GetNode() == e.Node && bytes.Contains(row.GetSignedLeaf().GetLeaf(), []byte(e.Key)) {
				out[e.Node+"\x00"+e.Key] = id
			}
		}
	}
	return out
}

// quiet looks for what should have ended by now.
func (c *run) quiet() {
	for id, row := range c.h.Server.Tasks {
		t := row.GetTask()
		if _, gone := c.h.Gone[t.GetNode()]; !gone && !rests(t.GetState()) {
			c.fail(Quiet, t.GetNode(), id, "it is still %s for the server", t.GetState())
		}
	}
	for _, n := range c.h.Nodes {
		if _, gone := c.h.Gone[n.Name]; gone {
			continue
		}
		for id, rec := range n.Tasks {
			if !rests(rec.GetState()) {
				c.fail(Quiet, n.Name, id, "it is still %s on the node", rec.GetState())
			}
		}
		if h := n.Head; h.GetAcknowledgedSeq() != h.GetLastSeq() {
			c.fail(Quiet, n.Name, "", "%d of %d frames are acknowledged", h.GetAcknowledgedSeq(), h.GetLastSeq())
		}
	}
	for name, row := range c.h.Server.Nodes {
		_, gone := c.h.Gone[name]
		known := gone || row.GetEvicted() || row.GetGeneration() == 0
		for _, n := range c.h.Nodes {
			known = known || n.Name == name
		}
		if !known {
			c.fail(Quiet, name, "", "its journal is not here, and nothing says why")
		}
	}
}

func rests(s taskv1.TaskState) bool { return terminal(s) || s == taskv1.TaskState_TASK_STATE_HELD }
