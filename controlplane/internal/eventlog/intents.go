package eventlog

import (
	"fmt"
	"slices"
	"strings"

	serverv1 "github.com/gpuaas/millwright/proto/millwright/server/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
)

// intentsLost is the type of the condition of a node that may no longer restore
// by itself what tasks set up.
const intentsLost = "IntentsLost"

// namedIntents is how many lost intents that condition names.
const namedIntents = 10

// settleIntent notes what a task that its node carried out leaves on it. Set or
// ended anew, an intent is no longer lost.
func (t *Tx) settleIntent(task *taskv1.Task, event *taskv1.Event) error {
	if event.GetFinished().GetState() != taskv1.TaskState_TASK_STATE_SUCCEEDED {
		return nil
	}
	key, change := t.cfg.Intent(task)
	if change == tasks.IntentNone {
		return nil
	}
	node, err := t.nodeOrNew(task.GetNode())
	if err != nil {
		return err
	}
	node.Intents = without(node.GetIntents(), key)
	if change == tasks.IntentSet {
		node.Intents = with(node.GetIntents(), key)
	}
	node.LostIntents = without(node.GetLostIntents(), key)
	t.tellLost(node)
	return nil
}

// loseIntents notes that all intents of a node may have gone with its journal.
func (t *Tx) loseIntents(name string) error {
	node, err := t.nodeOrNew(name)
	if err != nil {
		return err
	}
	for _, key := range node.GetIntents() {
		node.LostIntents = with(node.GetLostIntents(), key)
	}
	node.Intents = nil
	t.tellLost(node)
	return nil
}

// loseIntentOf notes that a task whose outcome went with its node's journal may
// have set an intent, which the node does not know.
func (t *Tx) loseIntentOf(task *taskv1.Task) error {
	key, change := t.cfg.Intent(task)
	if change != tasks.IntentSet {
		return nil
	}
	node, err := t.nodeOrNew(task.GetNode())
	if err != nil {
		return err
	}
	node.LostIntents = with(node.GetLostIntents(), key)
	t.tellLost(node)
	return nil
}

// tellLost makes the node's condition say what is lost, if anything is.
func (t *Tx) tellLost(node *serverv1.NodeRow) {
	t.PutNode(node)
	lost := node.GetLostIntents()
	if len(lost) == 0 {
		ClearConditions(&node.Found, intentsLost)
		return
	}
	names := strings.Join(lost[:min(len(lost), namedIntents)], ", ")
	if more := len(lost) - namedIntents; more > 0 {
		names += fmt.Sprintf(" and %d more", more)
	}
	SetCondition(&node.Found, t.now, &taskv1.Condition{
		Type: intentsLost, Status: taskv1.ConditionStatus_CONDITION_STATUS_TRUE, Reason: ReasonJournalLost,
		Message: fmt.Sprintf("the node lost its journal and may no longer restore by itself: %s; create the tasks again that set these up, or that end them "+
			"(each stands here until one of them has succeeded, or the node joins anew)", names),
	})
}

// with returns the sorted keys with key among them.
func with(keys []string, key string) []string {
	i, there := slices.BinarySearch(keys, key)
	if there {
		return keys
	}
	return slices.Insert(keys, i, key)
}

// without returns keys without key.
func without(keys []string, key string) []string {
	return slices.DeleteFunc(keys, func(k string) bool { return k == key })
}
