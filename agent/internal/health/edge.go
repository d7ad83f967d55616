package health

import (
	"strconv"

	"google.golang.org/protobuf/proto"

	healthv1 "github.com/gpuaas/millwright/proto/millwright/health/v1"
)

// Known is what an earlier life of the agent told, by this journal.
type Known struct {
	// Edges are the last one of each key.
	Edges []*healthv1.HealthEdge
	// Cursor is how far the kernel's log was read for them.
	Cursor Cursor
}

// Change is what is told at one time: all of it becomes durable, or nothing.
type Change struct {
	// Edges are new.
	Edges []*healthv1.HealthEdge
	// Cursor goes with them.
	Cursor Cursor
}

// restore takes what was told before. What happened before a boot is over.
func (e *engine) restore(k Known, t moment) {
	e.cursor = k.Cursor
	for _, edge := range k.Edges {
		c := &condition{now: proto.CloneOf(edge.GetCondition()), told: edge, seen: t.boot}
		c.event = happens(c.now.GetCode())
		c.settles = c.now.GetSeverity() <= warning
		c.heard = map[healthv1.Source]uint64{c.now.GetSource(): c.now.GetCount()}
		e.conditions[c.now.GetKey()] = c
		if c.now.GetKey() == "node.gpu_count" {
			e.roster.restore(c.now)
		}
		for _, d := range c.now.GetDetails() {
			if c.now.GetKey() == "node.gpu_count" && d.GetName() == "wanted" {
				e.most, _ = strconv.Atoi(d.GetValue()) // a GPU that is missing is missed also by the next life
			}
		}
	}
	if k.Cursor.BootID != "" && k.Cursor.BootID != e.cfg.BootID {
		e.over(func(*condition) bool { return true }, reasonRebooted, t)
	}
	if e.cursor.BootID != e.cfg.BootID {
		e.cursor = Cursor{BootID: e.cfg.BootID}
	}
}

// happens reports whether a code is of what happens, and not of what is asked
// for.
func happens(code string) bool {
	for _, r := range gpuRules() {
		if r.Code == code {
			return false
		}
	}
	for _, r := range driverRules() {
		if r.Code == code {
			return false
		}
	}
	return code != "node.gpu_count" && code != "node.kernel_log"
}

// edges are the changes that are not told yet, one for each condition. A first
// look that finds nothing wrong is none, nor is the way from there to unknown and
// back: an edge begins with something that is raised.
func (e *engine) edges() []*healthv1.HealthEdge {
	var out []*healthv1.HealthEdge
	for _, c := range e.all() {
		if edge := c.edge(); edge != nil {
			out = append(out, edge)
		}
	}
	return out
}

func (c *condition) edge() *healthv1.HealthEdge {
	before := c.told.GetCondition()
	gone := c.now.GetReason() == reasonReplaced && !c.told.GetForgotten()
	quietBefore := c.told == nil || before.GetState() == ok || c.told.GetForgotten()
	same := before.GetState() == c.now.GetState() && before.GetSeverity() == c.now.GetSeverity() && before.GetAction() == c.now.GetAction()
	switch {
	case c.told != nil && gone:
	case c.changes == 0, quietBefore && !c.was, c.told != nil && same && c.changes < 2:
		return nil
	}
	return &healthv1.HealthEdge{
		Condition: proto.CloneOf(c.now), Previous: before.GetState(), Folded: max(c.changes, 1) - 1,
		Edge: c.told.GetEdge() + 1, Forgotten: gone,
	}
}

// told notes that the edges are durable.
func (e *engine) told(edges []*healthv1.HealthEdge) {
	for _, edge := range edges {
		c := e.conditions[edge.GetCondition().GetKey()]
		c.told, c.changes, c.was = edge, 0, false
		if edge.GetForgotten() {
			delete(e.conditions, edge.GetCondition().GetKey())
			e.version++
		}
	}
}
