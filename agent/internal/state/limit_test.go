package state_test

import (
	"errors"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"github.com/gpuaas/millwright/agent/internal/child"
	"github.com/gpuaas/millwright/agent/internal/state"
)

// hungry is a reader that a damaged file at path makes ask for what no machine
// here has, at once or little by little, or read for ever.
func hungry(how, path string) int {
	if err := state.LimitSelf(path, 1, os.Stderr); err != nil {
		return 1
	}
	step := 24 << 30
	switch how {
	case "slowly":
		step = 1 << 20
	case "for ever":
		for {
			runtime.Gosched()
		}
	}
	var got [][]byte
	for total := 0; total < 24<<30; total += step {
		got = append(got, make([]byte, step)) // not touched: only its room is asked for
	}
	runtime.KeepAlive(got)
	return 0
}

// reader is this test binary without the race detector, which dies of the limit of
// memory in its own way, as no product does.
func reader(t *testing.T) string {
	t.Helper()
	exe := filepath.Join(t.TempDir(), "reader")
	if out, err := exec.CommandContext(t.Context(), "go", "test", "-race=false", "-c", "-o", exe, ".").CombinedOutput(); err != nil {
		t.Fatalf("build the reader: %v\n%s", err, out)
	}
	return exe
}

// TestHungryReader bounds the process that looks at a state file: what asks for
// too much is damage, within seconds, and the machine does not feel it.
func TestHungryReader(t *testing.T) {
	exe := reader(t)
	path := filepath.Join(lived(t).Dir, "state.db")
	runner := child.New(child.Config{Logger: slog.New(slog.DiscardHandler)})
	for _, how := range []string{"at once", "slowly", "for ever"} {
		t.Run(how, func(t *testing.T) {
			begin := time.Now()
			_, err := state.Verified(runner.Run(t.Context(), child.Spec{
				Argv: []string{exe, "hungry-state", how, path}, Timeout: time.Minute, Key: "hungry-state",
			}))
			if !errors.Is(err, state.ErrDamaged) {
				t.Errorf("it is %v, want damaged", err)
			}
			if d := time.Since(begin); d > 20*time.Second {
				t.Errorf("it took %v", d)
			}
		})
	}
}
