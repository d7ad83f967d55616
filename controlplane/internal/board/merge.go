package board

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	healthv1 "github.com/gpuaas/millwright/proto/millwright/health/v1"
	serverv1 "github.com/gpuaas/millwright/proto/millwright/server/v1"
)

// Node returns the health of a node with its conditions, by key. rows are what
// the store has of them.
func (b *Board) Node(node string, rows []*serverv1.HealthRow) *healthv1.NodeHealth {
	out, s := b.Status(node), b.snapshot(node)
	out.Conditions = conditions(&s, rows, out.GetReason(), out.GetMessage())
	return out
}

// conditions lays what the log has over what was reported: the newer counts, by
// the node's clock. A condition that the newest whole report does not name is no
// longer kept. With a reason why it is not of now, all is stale.
func conditions(s *state, rows []*serverv1.HealthRow, reason, message string) []*healthv1.NodeCondition {
	known := make(map[string]*healthv1.Condition, len(s.conditions)+len(rows))
	for key, c := range s.conditions {
		known[key] = c
	}
	for _, row := range rows {
		c := row.GetCondition()
		if s.conditions == nil || toldAt(c).After(s.wholeAt) {
			known[c.GetKey()] = c
		}
	}
	out := make([]*healthv1.NodeCondition, 0, len(known))
	for _, c := range known {
		n := &healthv1.NodeCondition{Condition: c, LastState: c.GetState()}
		if reason != "" {
			n.Condition = proto.CloneOf(c)
			n.Condition.State = healthv1.State_STATE_STALE
			n.Condition.Reason, n.Condition.Message = reason, message
			if c.GetState() == healthv1.State_STATE_RAISED {
				n.Condition.Message = "it was raised when the node last spoke (" + c.GetMessage() + "); " + message
			}
		}
		out = append(out, n)
	}
	slices.SortFunc(out, func(a, b *healthv1.NodeCondition) int {
		return strings.Compare(a.GetCondition().GetKey(), b.GetCondition().GetKey())
	})
	return out
}

// toldAt is when a condition was last seen to be as it is.
func toldAt(c *healthv1.Condition) time.Time {
	since, last := c.GetSince().AsTime(), c.GetLastTime().AsTime()
	if last.After(since) {
		return last
	}
	return since
}

// raised reports whether a condition was raised when its node last spoke, and
// hurts.
func raised(c *healthv1.NodeCondition) bool {
	return c.GetLastState() == healthv1.State_STATE_RAISED && c.GetCondition().GetSeverity() > healthv1.Severity_SEVERITY_INFO
}

// notOK are the conditions that a person wants to see.
func notOK(all []*healthv1.NodeCondition) []*healthv1.NodeCondition {
	return slices.DeleteFunc(slices.Clone(all), func(c *healthv1.NodeCondition) bool {
		return c.GetCondition().GetState() == healthv1.State_STATE_OK
	})
}

// WorstFirst orders conditions: those that are raised first, by severity.
func WorstFirst(list []*healthv1.NodeCondition) {
	rank := func(c *healthv1.NodeCondition) int {
		if c.GetLastState() == healthv1.State_STATE_RAISED {
			return 1 + int(c.GetCondition().GetSeverity())
		}
		return 0
	}
	slices.SortStableFunc(list, func(a, b *healthv1.NodeCondition) int { return cmp.Compare(rank(b), rank(a)) })
}
