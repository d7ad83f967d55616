package command_test

import (
	"context"
	"errors"
	"path/filepath"
	"sync"
	"testing"

	"github.com/gpuaas/millwright/tasks/host"
)

// A stop that fails once is tried again: the command does not run on while its
// task is said to be held.
func TestStopIsTriedAgain(t *testing.T) {
	u, up := newUnits(t), filepath.Join(t.TempDir(), "up")
	failed := 0
	u.fail = func(verb string) error {
		if verb == "stop" && failed == 0 {
			failed++
			return errors.New("systemd does not want to")
		}
		return nil
	}
	ctx, stop := context.WithCancelCause(t.Context())
	defer stop(nil)
	var out host.Outcome
	var err error
	state := t.TempDir()
	var wg sync.WaitGroup
	wg.Go(func() { out, err = newRunner(u, state).Run(ctx, id, sh(`echo x > "$0"; exec sleep 1000`, up)) })
	eventually(t, "the program", func() bool { return exists(up) })
	stop(host.ErrStop)
	wg.Wait()
	if err != nil || out.Signal == 0 || failed != 1 {
		t.Errorf("outcome %+v, %v; %d stops failed", out, err, failed)
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if len(u.running) > 0 {
		t.Error("it runs on")
	}
}
