package state_test

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/millwright/agent/internal/child"
	"github.com/gpuaas/millwright/agent/internal/state"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// fill puts n tasks that have ended into the state, as a command leaves them:
// its record, one step, its id and three events.
func fill(tb testing.TB, s *state.Store, n int) {
	tb.Helper()
	for at := 0; at < n; at += 500 {
		if err := s.Update(func(tx *state.Tx) error {
			for i := at; i < min(at+500, n); i++ {
				if err := done(tx, fmt.Sprintf("task-%08d", i)); err != nil {
					return err
				}
			}
			return nil
		}); err != nil {
			tb.Fatal(err)
		}
	}
}

func done(tx *state.Tx, id string) error {
	if err := tx.PutSeen(id, &agentv1.SeenRecord{LeafHash: make([]byte, 32), ForgetAfter: timestamppb.New(t0.Add(48 * time.Hour))}); err != nil {
		return err
	}
	var seq uint64
	for range 3 {
		var err error
		if seq, err = tx.Append(started(id)); err != nil {
			return err
		}
	}
	if err := tx.PutStep(id, 0, &agentv1.StepRecord{Phase: taskv1.StepPhase_STEP_PHASE_VERIFIED, BootId: "boot-a"}); err != nil {
		return err
	}
	return tx.PutTask(&agentv1.TaskRecord{
		TaskId: id, LeafHash: make([]byte, 32), AcceptSeq: seq, State: taskv1.TaskState_TASK_STATE_SUCCEEDED, Origin: state.OriginTask,
		Envelope: &taskv1.Envelope{Payload: make([]byte, 400)}, SignedLeaf: &taskv1.SignedLeaf{Leaf: make([]byte, 300)},
		Acknowledged: true, EndTime: timestamppb.New(t0),
	})
}

// BenchmarkInspect is what it costs to look at a state file before it is
// opened, by the number of tasks in its history.
func BenchmarkInspect(b *testing.B) {
	for _, n := range []int{0, 10_000, 100_000} {
		cfg := config(b.TempDir(), &fakeClock{now: t0})
		s, err := state.Open(b.Context(), cfg)
		if err != nil {
			b.Fatal(err)
		}
		fill(b, s, n)
		if err := s.Close(); err != nil {
			b.Fatal(err)
		}
		path := filepath.Join(cfg.Dir, "state.db")
		info, err := os.Stat(path)
		if err != nil {
			b.Fatal(err)
		}
		for _, how := range []struct {
			name string
			look func(string, time.Duration) (state.Facts, error)
		}{{"inspect", state.InspectFile}, {"full", state.CheckFile}} {
			b.Run(fmt.Sprintf("%s/%d-tasks", how.name, n), func(b *testing.B) {
				b.ReportMetric(float64(info.Size()>>20), "MiB")
				for b.Loop() {
					if _, err := how.look(path, time.Second); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}

// BenchmarkStart is what it takes to open the state as the agent does when it
// starts, with the look at the file by another process, by the number of done
// tasks in its history, all of them acknowledged, after the agent has closed it.
// The floor is that of a node that never had a task; "x" is how much longer it
// takes than with 1,000. TestStartIsFlat counts the pages.
func BenchmarkStart(b *testing.B) {
	thousand := 0.0
	for _, n := range []int{0, 1_000, 100_000} {
		cfg := config(b.TempDir(), &fakeClock{now: t0})
		exe, err := os.Executable()
		if err != nil {
			b.Fatal(err)
		}
		runner := child.New(child.Config{Logger: slog.New(slog.DiscardHandler)})
		cfg.Inspect = state.InAnotherProcess(runner.Run, exe)
		s, err := state.Open(b.Context(), cfg)
		if err != nil {
			b.Fatal(err)
		}
		fill(b, s, n)
		want, err := s.Head()
		if err != nil {
			b.Fatal(err)
		}
		if err := s.Update(func(tx *state.Tx) error { return tx.Acknowledge(want.LastSeq) }); err != nil {
			b.Fatal(err)
		}
		if err := s.Close(); err != nil {
			b.Fatal(err)
		}
		b.Run(fmt.Sprintf("%d-tasks", n), func(b *testing.B) {
			for b.Loop() {
				s, err := state.Open(b.Context(), cfg)
				if err != nil {
					b.Fatal(err)
				}
				if got, err := s.Head(); err != nil || got.JournalID != want.JournalID || got.LastSeq != want.LastSeq {
					b.Fatalf("opened %v, %v, want %v", got, err, want)
				}
				if err := s.Close(); err != nil {
					b.Fatal(err)
				}
			}
			took := b.Elapsed().Seconds() / float64(b.N)
			if n == 1_000 {
				thousand = took
			}
			if n > 0 && thousand > 0 {
				b.ReportMetric(took/thousand, "x")
			}
		})
	}
}
