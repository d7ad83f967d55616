//go:build millwright_crash

package command_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/gpuaas/millwright/tasks/host"
)

// The shim is killed at each of its points: the program runs at most once, and
// what is told of it is true.
func TestShimCrashes(t *testing.T) {
	const once, never, unknown, known = 1, 0, true, false
	tests := map[string]struct {
		atMost  int
		unknown bool
	}{
		"shim.marker.before": {never, known}, // and that is said for good
		"shim.marker":        {never, unknown},
		"shim.started":       {once, unknown},
		"shim.exited":        {once, unknown},
		"shim.result.before": {once, unknown},
		"shim.result":        {once, known},
	}
	for point, want := range tests {
		t.Run(point, func(t *testing.T) {
			u, state, crashes := newUnits(t), t.TempDir(), t.TempDir()
			u.env = []string{"MILLWRIGHT_CRASH_DIR=" + crashes}
			if err := os.WriteFile(filepath.Join(crashes, "arm"), []byte(point), 0o600); err != nil {
				t.Fatal(err)
			}
			count := filepath.Join(t.TempDir(), "count")
			run := func() (host.Outcome, error) {
				return newRunner(u, state).Run(context.Background(), id, sh(`echo x >> "$0"; exit 7`, count))
			}
			out, err := run()
			if !exists(filepath.Join(crashes, "hit-"+point)) {
				t.Fatal("the point was not reached")
			}
			again, err2 := run()
			for _, e := range []error{err, err2} {
				if errors.Is(e, host.ErrNotStarted) != (point == "shim.marker.before") {
					t.Errorf("errors %v, %v", err, err2)
				}
				if errors.Is(e, host.ErrOutcomeUnknown) != want.unknown {
					t.Errorf("outcome %+v %+v, errors %v, %v", out, again, err, err2)
				}
			}
			if point == "shim.result" && (out.ExitCode != 7 || err != nil) {
				t.Errorf("outcome %+v, %v", out, err)
			}
			if b, err := os.ReadFile(count); len(b)/2 > want.atMost {
				t.Errorf("it ran %d times, %v", len(b)/2, err)
			}
		})
	}
}
