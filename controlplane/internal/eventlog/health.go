package eventlog

import (
	"fmt"
	"strings"
	"unicode/utf8"

	auditv1 "github.com/gpuaas/millwright/proto/millwright/audit/v1"
	healthv1 "github.com/gpuaas/millwright/proto/millwright/health/v1"
	serverv1 "github.com/gpuaas/millwright/proto/millwright/server/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"

	"github.com/gpuaas/millwright/controlplane/internal/store"
)

// What the format allows of a condition.
const (
	// MaxConditions is how many conditions a node has at most.
	MaxConditions    = 1024
	maxConditionKey  = 128
	maxConditionText = 512
	maxDetails       = 16
	maxDetailName    = 64
	maxDetailValue   = 256
)

// CheckCondition returns an error for a condition that is larger than the format
// allows, or that has no name.
func CheckCondition(c *healthv1.Condition) error {
	if n := len(c.GetKey()); n == 0 || n > maxConditionKey || strings.IndexByte(c.GetKey(), 0) >= 0 {
		return fmt.Errorf("the key of a condition must have 1 to %d bytes, none of them zero; it has %d", maxConditionKey, n)
	}
	for _, text := range []string{c.GetCode(), c.GetGpuUuid(), c.GetPciBusId(), c.GetReason(), c.GetTitle(), c.GetMessage(), c.GetMeaning()} {
		if len(text) > maxConditionText || !utf8.ValidString(text) {
			return fmt.Errorf("condition %s: a text has %d bytes; at most %d are allowed", c.GetKey(), len(text), maxConditionText)
		}
	}
	if n := len(c.GetDetails()); n > maxDetails {
		return fmt.Errorf("condition %s: it has %d details; at most %d are allowed", c.GetKey(), n, maxDetails)
	}
	for _, d := range c.GetDetails() {
		if len(d.GetName()) > maxDetailName || len(d.GetValue()) > maxDetailValue {
			return fmt.Errorf("condition %s: a detail has %d and %d bytes; at most %d and %d are allowed",
				c.GetKey(), len(d.GetName()), len(d.GetValue()), maxDetailName, maxDetailValue)
		}
	}
	return nil
}

// health carries a change of a condition into the conditions of its node. What a
// journal says that the node no longer has is history only.
func (t *Tx) health(e *auditv1.LogEntry, f *auditv1.NodeFrame, event *taskv1.Event) error {
	c := event.GetHealth().GetCondition()
	if err := CheckCondition(c); err != nil {
		return err
	}
	node, err := t.nodeOrNew(f.GetNode())
	if err != nil {
		return err
	}
	if node.GetJournalId() != "" && node.GetJournalId() != event.GetJournalId() {
		t.healthOf = f.GetNode()
		return nil
	}
	kept, err := t.keptConditions(f.GetNode())
	if err != nil {
		return err
	}
	key := store.HealthKey{Node: f.GetNode(), Key: c.GetKey()}
	switch {
	case event.GetHealth().GetForgotten():
		delete(kept, c.GetKey())
		t.conditions[key] = nil
	case !kept[c.GetKey()] && len(kept) >= MaxConditions:
		return fmt.Errorf("condition %s: the node has %d conditions already, which is all that are kept", c.GetKey(), MaxConditions)
	default:
		kept[c.GetKey()] = true
		t.conditions[key] = &serverv1.HealthRow{
			Node: f.GetNode(), Condition: c, Index: e.GetIndex(), RecordTime: e.GetRecordTime(),
			JournalId: event.GetJournalId(), Edge: event.GetHealth().GetEdge(),
		}
	}
	t.healthOf = f.GetNode()
	return nil
}

// keptConditions are the keys of the conditions of a node, with the changes of
// this decision.
func (t *Tx) keptConditions(node string) (map[string]bool, error) {
	if kept, ok := t.kept[node]; ok {
		return kept, nil
	}
	rows, err := t.Health(node, MaxConditions)
	if err != nil {
		return nil, err
	}
	kept := make(map[string]bool, len(rows))
	for _, row := range rows {
		kept[row.GetCondition().GetKey()] = true
	}
	t.kept[node] = kept
	return kept, nil
}

// forgetHealth drops all conditions of a node: another host has its name, or its
// journal, which counts the changes, is another.
func (t *Tx) forgetHealth(node string) error {
	kept, err := t.keptConditions(node)
	for key := range kept {
		t.conditions[store.HealthKey{Node: node, Key: key}] = nil
	}
	clear(kept)
	return err
}

// TrimHealth takes a node's changes up to an entry out of its history. They stay
// in the log.
func (t *Tx) TrimHealth(node string, through uint64) {
	t.trims = append(t.trims, store.HealthTrim{Node: node, Through: through})
}

// healthChange is what the decision does to conditions.
func (t *Tx) healthChange() (rows []*serverv1.HealthRow, gone []store.HealthKey) {
	for key, row := range t.conditions {
		if row == nil {
			gone = append(gone, key)
		} else {
			rows = append(rows, row)
		}
	}
	return rows, gone
}
