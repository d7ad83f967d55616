package state

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// Terminal reports whether a task in the state has ended.
func Terminal(s taskv1.TaskState) bool {
	switch s {
	case taskv1.TaskState_TASK_STATE_SUCCEEDED, taskv1.TaskState_TASK_STATE_FAILED,
		taskv1.TaskState_TASK_STATE_CANCELLED, taskv1.TaskState_TASK_STATE_REFUSED,
		taskv1.TaskState_TASK_STATE_EXPIRED, taskv1.TaskState_TASK_STATE_ABANDONED:
		return true
	default:
		return false
	}
}

// Task returns a task, or [ErrNotFound].
func (tx *Tx) Task(id string) (*agentv1.TaskRecord, error) {
	rec := new(agentv1.TaskRecord)
	return rec, tx.load(bucketTasks, []byte(id), rec)
}

// PutTask stores a task and keeps the indexes true. A state that has ended
// never changes: that is an error.
func (tx *Tx) PutTask(rec *agentv1.TaskRecord) error {
	id := []byte(rec.GetTaskId())
	if was := tx.get(bucketTasks, id); was != nil {
		old, err := tx.Task(rec.GetTaskId())
		if err != nil {
			return err
		}
		if Terminal(old.GetState()) && old.GetState() != rec.GetState() {
			return fmt.Errorf("task %s is %v and cannot become %v: %w", rec.GetTaskId(), old.GetState(), rec.GetState(), ErrInvariant)
		}
	}
	if Terminal(rec.GetState()) {
		if tx.get(bucketOpen, id) != nil {
			tx.delete(bucketOpen, id)
		}
	} else {
		tx.put(bucketOpen, id, []byte{byte(rec.GetState())})
	}
	if rec.GetAcceptSeq() != 0 {
		tx.put(bucketOrder, number(rec.GetAcceptSeq()), id)
	}
	return tx.store(bucketTasks, id, rec)
}

// Open calls fn with the id and the state of each task that has not ended.
func (tx *Tx) Open(fn func(id string, state taskv1.TaskState) error) error {
	return tx.scan(bucketOpen, nil, nil, func(k, v []byte) (bool, error) {
		if len(v) != 1 {
			return false, fmt.Errorf("open task %q: %w", k, ErrInvariant)
		}
		return true, fn(string(k), taskv1.TaskState(v[0]))
	})
}

// Tasks calls fn with the ids of tasks, the newest first, until it returns
// false.
func (tx *Tx) Tasks(fn func(id string) (bool, error)) error {
	c := tx.bolt.Bucket(bucketOrder).Cursor()
	for k, v := c.Last(); k != nil; k, v = c.Prev() {
		if more, err := fn(string(v)); err != nil || !more {
			return err
		}
	}
	return nil
}

// Step returns a step. One that was never stored is empty.
func (tx *Tx) Step(taskID string, step uint32) (*agentv1.StepRecord, error) {
	rec := new(agentv1.StepRecord)
	if err := tx.load(bucketSteps, stepKey(taskID, step), rec); err != nil && !errors.Is(err, ErrNotFound) {
		return nil, err
	}
	return rec, nil
}

// PutStep stores a step.
func (tx *Tx) PutStep(taskID string, step uint32, rec *agentv1.StepRecord) error {
	return tx.store(bucketSteps, stepKey(taskID, step), rec)
}

// Steps calls fn with each step of a task that was stored, in order.
func (tx *Tx) Steps(taskID string, fn func(step uint32, rec *agentv1.StepRecord) error) error {
	return tx.scan(bucketSteps, []byte(taskID+"/"), nil, func(k, _ []byte) (bool, error) {
		step := binary.BigEndian.Uint32(k[len(k)-4:])
		rec, err := tx.Step(taskID, step)
		if err != nil {
			return false, err
		}
		return true, fn(step, rec)
	})
}

// DeleteTask forgets a task of the node's own, which has no place in the order
// of acceptance, with its steps.
func (tx *Tx) DeleteTask(id string) error {
	tx.delete(bucketTasks, []byte(id))
	tx.delete(bucketOpen, []byte(id))
	return tx.deleteSteps(id)
}

// Seen returns what is remembered of a task id, or [ErrNotFound].
func (tx *Tx) Seen(taskID string) (*agentv1.SeenRecord, error) {
	rec := new(agentv1.SeenRecord)
	return rec, tx.load(bucketSeen, []byte(taskID), rec)
}

// PutSeen remembers a task id.
func (tx *Tx) PutSeen(taskID string, rec *agentv1.SeenRecord) error {
	tx.put(bucketForget, forgetKey(rec, taskID), nil)
	return tx.store(bucketSeen, []byte(taskID), rec)
}

// Issued tells when a task that is accepted was issued. Should the journal be
// lost, the floor of the next one is no lower, though the signer's clock was
// ahead of the node's.
func (tx *Tx) Issued(at time.Time) { tx.issued = latest(tx.issued, at) }

func forgetKey(rec *agentv1.SeenRecord, taskID string) []byte {
	return append(number(uint64(max(0, rec.GetForgetAfter().GetSeconds()))), taskID...)
}

// Intent returns an intent, or [ErrNotFound].
func (tx *Tx) Intent(key string) (*agentv1.IntentRecord, error) {
	rec := new(agentv1.IntentRecord)
	return rec, tx.load(bucketIntents, []byte(key), rec)
}

// PutIntent stores an intent under its key.
func (tx *Tx) PutIntent(rec *agentv1.IntentRecord) error {
	return tx.store(bucketIntents, []byte(rec.GetKey()), rec)
}

// DeleteIntent ends an intent. One that is not there is no error.
func (tx *Tx) DeleteIntent(key string) { tx.delete(bucketIntents, []byte(key)) }

// Intents calls fn with each intent, by key.
func (tx *Tx) Intents(fn func(*agentv1.IntentRecord) error) error {
	return tx.scan(bucketIntents, nil, nil, func(k, _ []byte) (bool, error) {
		rec, err := tx.Intent(string(k))
		if err != nil {
			return false, err
		}
		return true, fn(rec)
	})
}

// Closing remembers that the last event of a task has the number seq.
func (tx *Tx) Closing(seq uint64, taskID string) { tx.put(bucketClosing, number(seq), []byte(taskID)) }

// Closed calls fn with the tasks whose last event is acknowledged, at most
// limit of them, and forgets that they were closing.
func (tx *Tx) Closed(limit int, fn func(taskID string) error) error {
	acked := tx.acked()
	return tx.scan(bucketClosing, nil, nil, func(k, v []byte) (bool, error) {
		if binary.BigEndian.Uint64(k) > acked || limit == 0 {
			return false, nil
		}
		limit--
		tx.delete(bucketClosing, append([]byte(nil), k...))
		return true, fn(string(v))
	})
}

// Output is a command whose output has not all been uploaded.
type Output struct {
	TaskID string
	Step   uint32
}

// PutOutput remembers that a command is about to run.
func (tx *Tx) PutOutput(o Output) { tx.put(bucketOutputs, stepKey(o.TaskID, o.Step), nil) }

// HasOutput reports whether any output of the task is not all uploaded.
func (tx *Tx) HasOutput(taskID string) (bool, error) {
	found := false
	err := tx.scan(bucketOutputs, []byte(taskID+"/"), nil, func([]byte, []byte) (bool, error) {
		found = true
		return false, nil
	})
	return found, err
}

// deleteOutputs forgets the outputs of a task.
func (tx *Tx) deleteOutputs(taskID string) error {
	return tx.scan(bucketOutputs, []byte(taskID+"/"), nil, func(k, _ []byte) (bool, error) {
		tx.delete(bucketOutputs, append([]byte(nil), k...))
		return true, nil
	})
}

// DeleteOutput forgets a command's output.
func (tx *Tx) DeleteOutput(o Output) { tx.delete(bucketOutputs, stepKey(o.TaskID, o.Step)) }

// Outputs returns all commands whose output has not all been uploaded.
func (tx *Tx) Outputs() ([]Output, error) {
	var out []Output
	err := tx.scan(bucketOutputs, nil, nil, func(k, _ []byte) (bool, error) {
		id, step, ok := bytes.Cut(k, []byte("/"))
		if !ok || len(step) != 4 {
			return false, fmt.Errorf("output %q: %w", k, ErrInvariant)
		}
		out = append(out, Output{TaskID: string(id), Step: binary.BigEndian.Uint32(step)})
		return true, nil
	})
	return out, err
}

// BootID returns the boot in which the intents were last seen to, or "".
func (tx *Tx) BootID() string { return string(tx.get(bucketMeta, keyBoot)) }

// PutBootID remembers the boot in which the intents were seen to.
func (tx *Tx) PutBootID(id string) { tx.put(bucketMeta, keyBoot, []byte(id)) }

// Reboots returns the reboots that tasks have asked for.
func (tx *Tx) Reboots() (*agentv1.RebootLog, error) {
	out := new(agentv1.RebootLog)
	if err := tx.load(bucketMeta, keyReboots, out); err != nil && !errors.Is(err, ErrNotFound) {
		return nil, err
	}
	return out, nil
}

// PutReboots replaces the reboots that tasks have asked for.
func (tx *Tx) PutReboots(log *agentv1.RebootLog) error { return tx.store(bucketMeta, keyReboots, log) }

// What caused a task on the node; see TaskRecord.origin.
const (
	OriginTask      = agentv1.TaskOrigin_TASK_ORIGIN_ASSIGNED
	OriginReconcile = agentv1.TaskOrigin_TASK_ORIGIN_RECONCILE
)
