package executor_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/gpuaas/millwright/agent/internal/executor"
	"github.com/gpuaas/millwright/agent/internal/gate"
	"github.com/gpuaas/millwright/agent/internal/state"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// rivalJournal has another come to just before the next write, and wait behind
// it.
type rivalJournal struct {
	*state.Store

	mu    sync.Mutex
	rival func()        // guarded by mu; nil: none comes
	first chan struct{} // closed once the write is done that the rival came before
}

func (j *rivalJournal) Update(fn func(*state.Tx) error) error {
	j.mu.Lock()
	rival, first := j.rival, j.first
	j.rival = nil
	j.mu.Unlock()
	if rival != nil {
		go rival()
		synctest.Wait() // it has looked at the task, and is about to write
		defer close(first)
	} else if first != nil {
		<-first
	}
	return j.Store.Update(fn)
}

// TestTwoWordsAtOnce has two people ask at one time that a held task be undone:
// one is told that it is too late, and the locks of the undo that goes on are not
// those of a held task, which a reboot may pass.
func TestTwoWordsAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		j := &rivalJournal{}
		n.journal = func(s *state.Store) executor.Journal { j.Store = s; return j }
		n.restart("boot-1")
		n.w.on("apply b", fail)
		n.w.on("undo a", fail)
		n.accept(1, "switch.on", "@l a b")
		want(t, n.ended(1), held, noUndo, "UNDO_FAILED")
		synctest.Wait()
		goOn := make(chan struct{})
		n.w.on("undo a", func(context.Context) error { <-goOn; return nil })
		undo := func() error {
			_, err := n.e.Resolve(t.Context(), &agentv1.ResolveTaskRequest{TaskId: taskID(1), As: taskv1.ResolveAs_RESOLVE_AS_UNDO, Reason: "now"})
			return err
		}
		second := make(chan error, 1)
		j.mu.Lock()
		j.rival, j.first = func() { second <- undo() }, make(chan struct{})
		j.mu.Unlock()
		if err := undo(); err != nil {
			t.Errorf("the first: %v", err)
		}
		if err, refusal := <-second, (*gate.Refusal)(nil); !errors.As(err, &refusal) {
			t.Errorf("the second: %v, want a refusal", err)
		}
		synctest.Wait()
		if n.e.Stuck(taskID(1)) {
			t.Error("a reboot may pass the locks of an undo that goes on")
		}
		close(goOn)
		n.until(func(ev *taskv1.Event) bool { return ev.GetFinished().GetTaskId() == taskID(1) })
		want(t, n.record(1), failed, complete, "UNDO_FAILED")
	})
}
