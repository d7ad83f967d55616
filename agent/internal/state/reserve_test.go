package state_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/millwright/agent/internal/state"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// fullDisk is what became of a journal on a disk that is full.
type fullDisk struct {
	Room    string // what new tasks are told
	Ended   int    // tasks whose end became durable while it was full
	Free    uint64 // bytes that were free then
	Spent   string // what a writer that never stops is told in the end
	After   int    // tasks that ended once there was room, and the disk full again
	Checked string
	Err     string
}

const runs = 32 // as many tasks as an agent takes

// fullState works on a file system of its own that is full, in a mount namespace
// that ends with the process.
func fullState(dir string, reserve bool) int {
	var f fullDisk
	if err := f.work(dir, reserve); err != nil {
		f.Err = err.Error()
	}
	if err := json.NewEncoder(os.Stdout).Encode(f); err != nil {
		return 1
	}
	return 0
}

func (f *fullDisk) work(dir string, reserve bool) error {
	if err := unix.Mount("full", dir, "tmpfs", 0, "size=96m"); err != nil {
		return fmt.Errorf("mount: %w", err)
	}
	cfg := config(filepath.Join(dir, "state"), &fakeClock{now: t0})
	cfg.Reserve = 1 << 20
	if !reserve {
		cfg.Results = -1
	}
	s, err := state.Open(context.Background(), cfg)
	if err != nil {
		return err
	}
	begin := func(round string) error {
		for i := range runs {
			if err := s.Update(func(tx *state.Tx) error { return accept(tx, fmt.Sprint(round, i)) }); err != nil {
				return err
			}
		}
		return fillUp(filepath.Join(dir, "fill"))
	}
	if err := begin("first-"); err != nil {
		return err
	}
	if err := s.Room(); err != nil {
		f.Room = err.Error()
	}
	f.Ended = endAll(s, "first-")
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return err
	}
	f.Free = st.Bavail * uint64(st.Bsize)
	for i := range 10_000 {
		if err := s.Update(func(tx *state.Tx) error { return accept(tx, fmt.Sprint("more-", i)) }); err != nil {
			if f.Spent = err.Error(); !errors.Is(err, state.ErrWrite) || !state.DiskFull(err) {
				return err
			}
			break
		}
	}
	if err := os.Remove(filepath.Join(dir, "fill")); err != nil {
		return err
	}
	if err := begin("second-"); err != nil {
		return err
	}
	f.After = endAll(s, "second-")
	if err := s.Close(); err != nil {
		return err
	}
	return f.again(cfg)
}

// again opens what is there as the next agent does.
func (f *fullDisk) again(cfg state.Config) error {
	cfg.JustJoined = false
	s, err := state.Open(context.Background(), cfg)
	if err != nil {
		return err
	}
	if err := s.Check(); err != nil {
		f.Checked = err.Error()
	}
	ended := 0
	err = s.View(func(tx *state.Tx) error {
		return tx.Tasks(func(id string) (bool, error) {
			rec, err := tx.Task(id)
			if state.Terminal(rec.GetState()) {
				ended++
			}
			return true, err
		})
	})
	if ended != f.Ended+f.After {
		f.Checked += fmt.Sprintf(" %d tasks have ended, and %d were told", ended, f.Ended+f.After)
	}
	return errors.Join(err, s.Close())
}

func accept(tx *state.Tx, id string) error {
	if err := tx.PutSeen(id, &agentv1.SeenRecord{LeafHash: make([]byte, 32)}); err != nil {
		return err
	}
	seq, err := tx.Append(started(id))
	if err != nil {
		return err
	}
	return tx.PutTask(&agentv1.TaskRecord{
		TaskId: id, AcceptSeq: seq, State: taskv1.TaskState_TASK_STATE_WAITING, Origin: state.OriginTask,
		SignedLeaf: &taskv1.SignedLeaf{Leaf: make([]byte, 16<<10)},
	})
}

// endAll takes each task through its last steps and says how many ended.
func endAll(s *state.Store, round string) (ended int) {
	for i := range runs {
		id := fmt.Sprint(round, i)
		var err error
		for step := range uint32(4) {
			err = errors.Join(err, s.Update(func(tx *state.Tx) error {
				return tx.PutStep(id, step, &agentv1.StepRecord{Phase: taskv1.StepPhase_STEP_PHASE_VERIFIED, Before: make([]byte, 4<<10)})
			}))
		}
		if err == nil {
			err = s.Update(func(tx *state.Tx) error {
				rec, err := tx.Task(id)
				if err != nil {
					return err
				}
				if _, err := tx.Append(started(id)); err != nil {
					return err
				}
				rec.State, rec.EndTime = taskv1.TaskState_TASK_STATE_SUCCEEDED, timestamppb.New(t0)
				return tx.PutTask(rec)
			})
		}
		if err == nil {
			ended++
		}
	}
	return ended
}

// fillUp leaves no room at all on the file system of path.
func fillUp(path string) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	for b := make([]byte, 1<<20); ; {
		if _, err = f.Write(b); err != nil {
			if len(b) == 1 {
				break
			}
			b = make([]byte, max(1, len(b)/4096))
		}
	}
	if !errors.Is(err, unix.ENOSPC) {
		return errors.Join(err, f.Close())
	}
	return f.Close()
}

// TestResultsOnAFullDisk fills a real file system while as many tasks run as an
// agent takes. With the reserve each of them ends, durably; without it they do
// not, so that the reserve is what does it. A writer that never stops is told in
// the end, and once there is room all goes on without a restart.
func TestResultsOnAFullDisk(t *testing.T) {
	for _, how := range []string{"reserve", "none"} {
		t.Run(how, func(t *testing.T) {
			f := onFullDisk(t, how)
			t.Logf("%+v", f)
			if f.Err != "" || f.Checked != "" || f.Room == "" || f.Spent == "" {
				t.Errorf("%+v", f)
			}
			switch {
			case how == "none" && f.Ended == runs:
				t.Error("all tasks ended without a reserve: the disk was not full")
			case how == "reserve" && (f.Ended != runs || f.After != runs):
				t.Errorf("%d and %d tasks ended, want %d each time", f.Ended, f.After, runs)
			case how == "reserve" && f.Free > 1<<20:
				t.Errorf("%d bytes were free", f.Free)
			}
		})
	}
}

func onFullDisk(t *testing.T, how string) (f fullDisk) {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, exe, "full-state", t.TempDir(), how)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS}
	if os.Getuid() != 0 {
		cmd.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{HostID: os.Getuid(), Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{HostID: os.Getgid(), Size: 1}}
	}
	cmd.SysProcAttr.Unshareflags = syscall.CLONE_NEWNS // and what it mounts stays its own
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if err := json.Unmarshal(out, &f); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return f
}
