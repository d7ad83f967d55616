package check

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"slices"
	"strings"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// The invariants.
const (
	// Chain: indexes of the log and seqs of each journal have no gap that is
	// not recorded, and each hash is of the bytes that it stands for.
	Chain = "chain"
	// Kept: what the server acknowledged it has, with the same bytes, and
	// nothing that the node did not write; once quiet, all of the node.
	Kept = "kept"
	// Rows: tasks are what the events say, on the server and on the node.
	Rows = "rows"
	// Final: a task that has ended stays as it ended.
	Final = "final"
	// Authorised: whatever is done to a node has a signature or an intent.
	Authorised = "authorised"
	// Order: the events of a task come in an order that its life allows.
	Order = "order"
	// Once: nothing that may happen at most once happened twice.
	Once = "once"
	// Quiet: after the faults, all tasks end or are held, and all is
	// acknowledged.
	Quiet = "quiet"
)

// Names are all invariants.
func Names() []string { return []string{Chain, Kept, Rows, Final, Authorised, Order, Once, Quiet} }

// Violation is a promise that was broken.
type Violation struct {
	Invariant string
	// Node and Task are where, as far as it is one of them.
	Node, Task string
	What       string
}

// String is the violation in one line.
func (v Violation) String() string {
	where := strings.Join(slices.DeleteFunc([]string{v.Node, v.Task}, func(s string) bool { return s == "" }), ", task ")
	if where == "" {
		where = "the log"
	}
	return fmt.Sprintf("%s: %s: %s", v.Invariant, where, v.What)
}

// run is one check of a history.
type run struct {
	h     *History
	sent  map[journal][]frame // what the server has, in the order of its log
	found []Violation
}

// journal names one journal of one node.
type journal struct{ node, id string }

// frame is an event where it stands.
type frame struct {
	event      *taskv1.Event
	bytes      []byte
	generation uint64
	notApplied string
	index      uint64 // in the log
}

// Check returns all violations, in the order of [Names].
func Check(h *History) []Violation {
	c := &run{h: h, sent: map[journal][]frame{}}
	for _, e := range h.Server.Entries {
		if f := e.GetEntry().GetNodeFrame(); f != nil {
			j := journal{f.GetNode(), f.GetJournalId()}
			c.sent[j] = append(c.sent[j], frame{e.GetEvent(), f.GetFrame(), f.GetGeneration(), f.GetNotApplied(), e.GetIndex()})
		}
	}
	for _, check := range []func(){c.chain, c.kept, c.rows, c.final, c.authorised, c.order, c.once, c.quiet} {
		check()
	}
	return c.found
}

func (c *run) fail(invariant, node, task, format string, args ...any) {
	c.found = append(c.found, Violation{invariant, node, task, fmt.Sprintf(format, args...)})
}

// each calls fn with each journal that is known, once: as its node has it where
// that has its beginning, and otherwise as the server has it.
func (c *run) each(fn func(j journal, frames []frame)) {
	for _, n := range c.h.Nodes {
		fn(journal{n.Name, n.Head.GetMeta().GetJournalId()}, c.whole(n))
	}
	for _, j := range sortedKeys(c.sent) {
		if !slices.ContainsFunc(c.h.Nodes, func(n *Node) bool { return j == journal{n.Name, n.Head.GetMeta().GetJournalId()} }) {
			fn(j, c.sent[j])
		}
	}
}

// whole is a node's journal, with what the node no longer keeps as the server
// has it.
func (c *run) whole(n *Node) []frame {
	var out []frame
	for _, f := range c.sent[journal{n.Name, n.Head.GetMeta().GetJournalId()}] {
		if f.event.GetSeq() < n.Head.GetFirstSeq() {
			out = append(out, f)
		}
	}
	for _, f := range n.Frames {
		out = append(out, frame{event: f.GetEvent(), bytes: f.GetBytes(), generation: n.Head.GetMeta().GetGeneration()})
	}
	return out
}

func sortedKeys[V any](m map[journal]V) []journal {
	var out []journal
	for j := range m {
		out = append(out, j)
	}
	slices.SortFunc(out, func(a, b journal) int { return strings.Compare(a.node+"/"+a.id, b.node+"/"+b.id) })
	return out
}

// taskOf is the task that an event is about, and "" for one about none. What
// becomes of an intent outlives its task.
func taskOf(e *taskv1.Event) string {
	for _, id := range []string{
		e.GetAccepted().GetTaskId(), e.GetWaiting().GetTaskId(), e.GetPlanned().GetTaskId(), e.GetStarted().GetTaskId(),
		e.GetStepEnded().GetTaskId(), e.GetFinished().GetTaskId(), e.GetHeld().GetTaskId(), e.GetUndoing().GetTaskId(), e.GetResumed().GetTaskId(),
		e.GetStepWaiting().GetTaskId(),
	} {
		if id != "" {
			return id
		}
	}
	return ""
}

func terminal(s taskv1.TaskState) bool { return s >= taskv1.TaskState_TASK_STATE_SUCCEEDED }

func hashOf(b []byte) []byte {
	sum := sha256.Sum256(b)
	return sum[:]
}

func same(hash, b []byte) bool { return bytes.Equal(hash, hashOf(b)) }
