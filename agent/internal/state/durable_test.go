package state_test

import (
	"context"
	"errors"
	"path/filepath"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/gpuaas/millwright/agent/internal/state"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// TestFramesAreDurableBeforeTheyAreSent stops a commit where bbolt has it in the
// file that readers see, and nobody has heard that it is on the disk: a reader
// of the outbox gets nothing of it until then.
func TestFramesAreDurableBeforeTheyAreSent(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		stop, stopped := make(chan struct{}), false
		cfg := config(filepath.Join(dir, "state"), &fakeClock{now: t0})
		cfg.Guard = func(written bool) error {
			if written && stopped {
				<-stop
			}
			return nil
		}
		s, err := state.Open(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close() //nolint:errcheck // the test is over
		stopped = true
		var group sync.WaitGroup
		group.Go(func() {
			err := s.Update(func(tx *state.Tx) error {
				_, err := tx.Append(&taskv1.Event{Payload: &taskv1.Event_Started{Started: &taskv1.TaskStarted{TaskId: "t"}}})
				return err
			})
			if err != nil {
				t.Errorf("Update() = %v", err)
			}
		})
		synctest.Wait()
		got := make(chan int, 1)
		ctx, cancel := context.WithCancel(t.Context())
		group.Go(func() {
			_, frames, _, err := s.NextFrames(ctx, 1, 10)
			if err != nil && !errors.Is(err, context.Canceled) {
				t.Errorf("NextFrames() = %v", err)
			}
			got <- len(frames)
		})
		synctest.Wait()
		select {
		case n := <-got:
			t.Errorf("NextFrames() gave %d frames of a commit that is under way", n)
		default:
		}
		if h, err := s.Head(); err != nil || h.LastSeq != 1 {
			t.Errorf("Head() = %+v, %v; want frame 1", h, err)
		}
		close(stop)
		if n := <-got; n != 1 {
			t.Errorf("NextFrames() gave %d frames after the commit, want 1", n)
		}
		cancel()
		group.Wait()
	})
}
