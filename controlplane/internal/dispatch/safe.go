package dispatch

import (
	"time"

	serverv1 "github.com/gpuaas/millwright/proto/millwright/server/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"

	"github.com/gpuaas/millwright/controlplane/internal/eventlog"
)

// A node in safe mode has a session and no journal: its state is locked, newer
// than its agent, or cannot be read. That says nothing about the journal, so
// that nothing is held for it and nothing about it is stored; the node is shown
// as what it is, and is given no work.

const (
	conditionSafeMode = "SafeMode"
	worksMessage      = "another agent of this node has a session and its journal; stop one of the two"
	// worksAgain is when a node in safe mode may ask again: the session of the
	// agent before it can outlive its host for a while.
	worksAgain = 10 * time.Second
)

// safe stores a session in safe mode. Which host it is cannot be told, as it
// does not know its instance.
func (o *opening) safe(tx *eventlog.Tx, node *serverv1.NodeRow) {
	node.SessionEpoch++
	o.epoch = node.GetSessionEpoch()
	o.said(tx, node)
	eventlog.SetCondition(&node.Found, tx.Now(), &taskv1.Condition{
		Type: conditionSafeMode, Status: taskv1.ConditionStatus_CONDITION_STATUS_TRUE,
		Reason: shorten(o.hello.GetSafeMode().GetReason()), Message: shorten(o.hello.GetSafeMode().GetMessage()),
	})
}

// works reports whether the node has a session with its journal. A second agent
// that finds the state locked must not take its place.
func (d *Dispatcher) works(node string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	s := d.sessions[node]
	return s != nil && !s.safe
}
