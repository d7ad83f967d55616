package state

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"

	"google.golang.org/protobuf/proto"

	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// Check reads the whole journal and returns all that contradicts itself, each
// wrapping [ErrInvariant]: frames form one chain up to the head; the indexes
// name what is there; a task that has not ended is remembered as seen; one that
// runs has a plan; no step is beyond the one before it.
func (s *Store) Check() error {
	var found []error
	err := s.View(func(tx *Tx) (err error) {
		found, err = check(tx)
		return err
	})
	return errors.Join(append(found, err)...)
}

func check(tx *Tx) (found []error, err error) {
	for _, part := range []func(*Tx) ([]error, error){checkChain, checkTasks, checkIndexes} {
		bad, err := part(tx)
		found = append(found, bad...)
		if err != nil {
			return found, err
		}
	}
	return found, nil
}

func wrong(format string, args ...any) error {
	return fmt.Errorf("%s: %w", fmt.Sprintf(format, args...), ErrInvariant)
}

func readable(b []byte, m proto.Message) bool { return proto.Unmarshal(b, m) == nil }

func checkChain(tx *Tx) (bad []error, err error) {
	meta, err := tx.Journal()
	if err != nil {
		return nil, err
	}
	h, err := tx.head()
	if err != nil {
		return nil, err
	}
	c := &chain{meta: meta}
	err = tx.scan(bucketFrames, nil, nil, func(k, v []byte) (bool, error) {
		c.frame(k, v)
		return true, nil
	})
	bad = c.end(h)
	if tx.acked() > h.seq {
		bad = append(bad, wrong("frame %d is acknowledged, and the last one is %d", tx.acked(), h.seq))
	}
	return bad, err
}

// chain takes frames in order and notes what does not hold together.
type chain struct {
	meta *agentv1.JournalMeta
	last head
	bad  []error
}

func (c *chain) frame(k, v []byte) {
	if len(k) != 8 {
		c.bad = append(c.bad, wrong("frame %x has no number", k))
		return
	}
	seq, ev := binary.BigEndian.Uint64(k), new(taskv1.Event)
	if !readable(v, ev) {
		c.bad = append(c.bad, wrong("frame %d cannot be decoded", seq))
		return
	}
	if ev.GetSeq() != seq || ev.GetJournalId() != c.meta.GetJournalId() {
		c.bad = append(c.bad, wrong("frame %d says that it is %d of journal %s", seq, ev.GetSeq(), ev.GetJournalId()))
	}
	switch {
	case seq == 1 && !bytes.Equal(ev.GetPrevHash(), firstHash(c.meta)):
		c.bad = append(c.bad, wrong("frame 1 does not begin the chain of its node"))
	case c.last.seq != 0 && (seq != c.last.seq+1 || !bytes.Equal(ev.GetPrevHash(), c.last.hash)):
		c.bad = append(c.bad, wrong("frame %d does not follow frame %d", seq, c.last.seq))
	}
	sum := sha256.Sum256(v)
	c.last = head{seq: seq, hash: sum[:]}
}

// end holds the last frame against the head.
func (c *chain) end(h head) []error {
	if c.last.seq != 0 && (c.last.seq != h.seq || !bytes.Equal(c.last.hash, h.hash)) {
		c.bad = append(c.bad, wrong("the head is frame %d, and the last frame is %d", h.seq, c.last.seq))
	}
	return c.bad
}

func checkTasks(tx *Tx) (bad []error, err error) {
	err = tx.scan(bucketTasks, nil, nil, func(k, _ []byte) (bool, error) {
		rec, err := tx.Task(string(k))
		if err != nil {
			return false, err
		}
		got, err := checkTask(tx, rec)
		bad = append(bad, got...)
		return true, err
	})
	return bad, err
}

func checkTask(tx *Tx, rec *agentv1.TaskRecord) (bad []error, err error) {
	id := rec.GetTaskId()
	open := tx.get(bucketOpen, []byte(id))
	if Terminal(rec.GetState()) {
		if open != nil {
			bad = append(bad, wrong("task %s has ended and is still open", id))
		}
	} else {
		if len(open) != 1 || taskv1.TaskState(open[0]) != rec.GetState() {
			bad = append(bad, wrong("task %s is %v and not open as that", id, rec.GetState()))
		}
		if _, err := tx.Seen(id); err != nil && rec.GetOrigin() == OriginTask {
			bad = append(bad, wrong("task %s is not remembered as seen", id))
		}
	}
	if rec.GetState() == taskv1.TaskState_TASK_STATE_RUNNING && len(rec.GetPlanDigest()) == 0 {
		bad = append(bad, wrong("task %s runs without a plan", id))
	}
	if len(rec.GetPlan()) == 0 {
		return bad, nil
	}
	plan := new(taskv1.Plan)
	if !readable(rec.GetPlan(), plan) {
		return append(bad, wrong("plan of task %s cannot be decoded", id)), nil
	}
	if sum := sha256.Sum256(rec.GetPlan()); !bytes.Equal(sum[:], rec.GetPlanDigest()) {
		bad = append(bad, wrong("plan of task %s is not what its digest says", id))
	}
	steps, err := checkSteps(tx, rec, len(plan.GetSteps()))
	return append(bad, steps...), err
}

// checkSteps finds a step that was begun before the one in front of it was
// verified; only after a reboot may an earlier one be done again. Steps past
// the end of the plan are found too.
func checkSteps(tx *Tx, rec *agentv1.TaskRecord, planned int) (bad []error, err error) {
	id, next := rec.GetTaskId(), 0
	before := &agentv1.StepRecord{Phase: taskv1.StepPhase_STEP_PHASE_VERIFIED}
	err = tx.scan(bucketSteps, []byte(id+"/"), nil, func(k, _ []byte) (bool, error) {
		i := binary.BigEndian.Uint32(k[len(k)-4:])
		sr, err := tx.Step(id, i)
		if err != nil {
			return false, err
		}
		switch {
		case int(i) >= planned:
			bad = append(bad, wrong("task %s has a step %d, and its plan has %d", id, i, planned))
		case int(i) != next:
			bad = append(bad, wrong("task %s has a step %d and none before it", id, i))
		case !rec.GetUndoing() && sr.GetPhase() != taskv1.StepPhase_STEP_PHASE_UNSPECIFIED &&
			before.GetPhase() != taskv1.StepPhase_STEP_PHASE_VERIFIED && before.GetBootId() == sr.GetBootId():
			bad = append(bad, wrong("step %d of task %s is %v, and the one before it is %v", i, id, sr.GetPhase(), before.GetPhase()))
		}
		next, before = int(i)+1, sr
		return true, nil
	})
	return bad, err
}

func checkIndexes(tx *Tx) (bad []error, err error) {
	for _, index := range [][]byte{bucketOpen, bucketOrder, bucketClosing} {
		err := tx.scan(index, nil, nil, func(k, v []byte) (bool, error) {
			id := v
			if bytes.Equal(index, bucketOpen) {
				id = k
			}
			if tx.get(bucketTasks, id) == nil {
				bad = append(bad, wrong("%s names task %s, which is not there", index, id))
			}
			return true, nil
		})
		if err != nil {
			return bad, err
		}
	}
	return bad, nil
}
