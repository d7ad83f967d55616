// Package leak_test asks that an agent which has carried out 10,000 tasks holds
// no more than one that has carried out a few thousand.
package leak_test

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"github.com/google/uuid"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/millwright/controlplane"
	"github.com/gpuaas/millwright/pki/envelope"
	systemv1 "github.com/gpuaas/millwright/proto/millwright/system/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/test/harness"
)

const (
	rounds   = 4
	perRound = 2500
)

// held is what a process and a state directory hold.
type held struct {
	goroutines, descriptors int
	disk                    int64
}

// TestNothingLeaks carries out 10,000 tasks on one agent, every third of which
// fails, in four rounds with a week and more between them, so that what is kept
// for a while is let go. From the second round on, nothing may grow.
func TestNothingLeaks(t *testing.T) {
	c := harness.New(t, func(cfg *controlplane.Config) { cfg.NodeTTL = 100 * 24 * time.Hour })
	n := c.NewNode("gpu-001")
	if err := n.Do("program /usr/bin/true\nprogram /usr/bin/false\nresult exit=7 /usr/bin/false"); err != nil {
		t.Fatal(err)
	}
	var seen []held
	for round := range rounds {
		stop := n.Start()
		n.Connected()
		begin := time.Now()
		for from := 0; from < perRound; from += 500 {
			many(t, c, n, 500)
		}
		t.Logf("round %d: %d tasks in %v", round, perRound, time.Since(begin).Round(time.Millisecond))
		c.Settled(n)
		seen = append(seen, measure(t, n))
		stop()
		c.Pass(9 * 24 * time.Hour)
	}
	for round, now := range seen {
		t.Logf("after round %d: %+v", round, now)
		was := seen[min(round, 1)]
		if now.goroutines > was.goroutines+5 || now.descriptors > was.descriptors+3 {
			t.Errorf("round %d: %d goroutines and %d descriptors, and in round 1 %d and %d", round, now.goroutines, now.descriptors, was.goroutines, was.descriptors)
		}
		if now.disk > was.disk+was.disk/4 {
			t.Errorf("round %d: %d bytes of state, and in round 1 %d", round, now.disk, was.disk)
		}
	}
	if runs := n.Started(); runs != rounds*perRound {
		t.Errorf("%d commands were started, want %d", runs, rounds*perRound)
	}
}

// many creates commands with one signature and waits for their ends.
func many(t *testing.T, c *harness.Cluster, n *harness.Node, count int) {
	t.Helper()
	var leaves []*taskv1.TaskLeaf
	for i := range count {
		argv := []string{"/usr/bin/true", fmt.Sprint(i)}
		if i%3 == 0 {
			argv = []string{"/usr/bin/false"}
		}
		spec, err := proto.Marshal(&systemv1.CommandSpec{Argv: argv})
		if err != nil {
			t.Fatal(err)
		}
		leaves = append(leaves, &taskv1.TaskLeaf{
			TaskId: uuid.Must(uuid.NewV7()).String(), Node: n.Name, Mode: taskv1.Mode_MODE_EXECUTE, Kind: "system.command", Revision: 1, Spec: spec,
		})
	}
	env, signed, err := envelope.SignTaskSet(c.Window(), leaves, c.Key())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Tasks.CreateTasks(t.Context(), &taskv1.CreateTasksRequest{RequestId: uuid.NewString(), Envelope: env, Leaves: signed}); err != nil {
		t.Fatal(err)
	}
	for i, leaf := range leaves {
		want := taskv1.TaskState_TASK_STATE_SUCCEEDED
		if i%3 == 0 {
			want = taskv1.TaskState_TASK_STATE_FAILED
		}
		if task := c.Ended(leaf.GetTaskId()); task.GetState() != want {
			t.Fatalf("task %d ended as %v (%s), want %v", i, task.GetState(), task.GetMessage(), want)
		}
	}
}

func measure(t *testing.T, n *harness.Node) held {
	t.Helper()
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	h := held{goroutines: runtime.NumGoroutine(), descriptors: len(fds)}
	err = filepath.WalkDir(n.State(""), func(_ string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		info, err := d.Info()
		if err == nil {
			h.disk += info.Size()
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return h
}
