package harness_test

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/gpuaas/millwright/agent"
	"github.com/gpuaas/millwright/controlplane"
	"github.com/gpuaas/millwright/pki"
	nodev1 "github.com/gpuaas/millwright/proto/millwright/node/v1"
	systemv1 "github.com/gpuaas/millwright/proto/millwright/system/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/test/harness"
)

// TestSpine is the main job: a node joins with a bundle, an operator signs a
// command, the node runs it once, and the history tells it. Then the agent
// restarts, and another task runs in the same journal.
func TestSpine(t *testing.T) {
	c := harness.New(t)
	n := c.NewNode("gpu-001")
	if err := n.Do("program /usr/bin/true\nprogram /usr/bin/false\nresult exit=7 /usr/bin/false now"); err != nil {
		t.Fatal(err)
	}
	stop := n.Start()
	first := n.Connected()
	if first.GetFacts().GetHostname() == "" || first.GetBootId() != n.BootID() || len(first.GetKinds()) < 4 || first.GetSessionEpoch() == 0 {
		t.Errorf("node = %v, want its facts, boot, kinds and epoch", first)
	}

	task := c.Ended(c.Create(n, "system.command", &systemv1.CommandSpec{Argv: []string{"/usr/bin/true", "a b"}}).GetId())
	if task.GetState() != taskv1.TaskState_TASK_STATE_SUCCEEDED || len(task.GetSteps()) != 1 || task.GetAcceptTime() == nil {
		t.Errorf("task = %v, want it succeeded with one step", task)
	}
	if runs := n.Runs("/usr/bin/true", "a b"); runs != 1 {
		t.Errorf("the command ran %d times, want once", runs)
	}
	history(t, c, task.GetId(), "CREATED", "ASSIGNED", "ACCEPTED", "PLANNED", "STARTED", "SUCCEEDED")

	stop()
	defer n.Start()()
	failed := c.Ended(c.Create(n, "system.command", &systemv1.CommandSpec{Argv: []string{"/usr/bin/false", "now"}}).GetId())
	if failed.GetState() != taskv1.TaskState_TASK_STATE_FAILED || failed.GetReason() != "COMMAND_EXIT" {
		t.Errorf("task = %v, want it failed with COMMAND_EXIT", failed)
	}
	again := n.Connected()
	if again.GetJournalId() != first.GetJournalId() || again.GetSessionEpoch() <= first.GetSessionEpoch() {
		t.Errorf("after a restart journal %s in epoch %d, want %s in a later one than %d",
			again.GetJournalId(), again.GetSessionEpoch(), first.GetJournalId(), first.GetSessionEpoch())
	}
	if r, err := c.Nodes.ListNodes(t.Context(), &nodev1.ListNodesRequest{}); err != nil || len(r.GetNodes()) != 1 {
		t.Errorf("ListNodes() = %v, %v; want one node", r, err)
	}
}

// TestCutAndServerRestart lets a command end while the node cannot reach the
// server, and another while there is none. Both are told as they were.
func TestCutAndServerRestart(t *testing.T) {
	c := harness.New(t)
	n := c.NewNode("gpu-001")
	if err := n.Do("program /usr/bin/work\nresult block /usr/bin/work 1\nresult block /usr/bin/work 2"); err != nil {
		t.Fatal(err)
	}
	n.Start()
	n.Connected()
	command := func(arg string) string {
		return c.Create(n, "system.command", &systemv1.CommandSpec{Argv: []string{"/usr/bin/work", arg}}, func(l *taskv1.TaskLeaf) {
			l.Deadline = durationpb.New(500 * time.Millisecond)
		}).GetId()
	}
	cut := command("1")
	c.Reached(cut, taskv1.TaskState_TASK_STATE_RUNNING)
	n.Cut()
	await(t, "the journal has the end of the command", func() bool { return n.Journal(cut).GetState() == taskv1.TaskState_TASK_STATE_FAILED })
	n.Heal()
	n.Connected()
	down := command("2")
	c.Reached(down, taskv1.TaskState_TASK_STATE_RUNNING)
	c.RestartServer(func() {
		await(t, "the journal has the end of the command", func() bool { return n.Journal(down).GetState() == taskv1.TaskState_TASK_STATE_FAILED })
	})
	for _, id := range []string{cut, down} {
		if task := c.Ended(id); task.GetState() != taskv1.TaskState_TASK_STATE_FAILED || len(task.GetSteps()) != 1 || task.GetSteps()[0].GetCommand().GetSignal() != 15 {
			t.Errorf("task = %v, want it failed by its deadline, the command stopped by signal 15", task)
		}
	}
	if started := n.Started(); started != 2 {
		t.Errorf("%d processes were started, want 2", started)
	}
}

// TestLostJournal deletes the journal while a command runs: nothing runs again,
// the task is held, and later work goes on in a new journal.
func TestLostJournal(t *testing.T) {
	c := harness.New(t)
	n := c.NewNode("gpu-001")
	if err := n.Do("program /usr/bin/work\nresult block /usr/bin/work 1"); err != nil {
		t.Fatal(err)
	}
	stop := n.Start()
	before := n.Connected()
	done := c.Ended(c.Create(n, "system.command", &systemv1.CommandSpec{Argv: []string{"/usr/bin/work", "0"}}).GetId())
	lost := c.Create(n, "system.command", &systemv1.CommandSpec{Argv: []string{"/usr/bin/work", "1"}}).GetId()
	c.Reached(lost, taskv1.TaskState_TASK_STATE_RUNNING)
	await(t, "it runs", func() bool { return n.Runs("/usr/bin/work", "1") == 1 }) // that was told before it is so
	stop()
	if err := os.Remove(n.State("state.db")); err != nil {
		t.Fatal(err)
	}
	n.Start()
	task := c.Ended(lost)
	if task.GetState() != taskv1.TaskState_TASK_STATE_HELD || task.GetReason() != "JOURNAL_LOST" || !strings.Contains(task.GetMessage(), "millctl task resolve") {
		t.Errorf("task = %v, want it held with JOURNAL_LOST and the way out", task)
	}
	if after := n.Connected(); after.GetJournalId() == before.GetJournalId() {
		t.Errorf("journal %s goes on though it was deleted", after.GetJournalId())
	}
	next := c.Ended(c.Create(n, "system.command", &systemv1.CommandSpec{Argv: []string{"/usr/bin/work", "2"}}).GetId())
	if next.GetState() != taskv1.TaskState_TASK_STATE_SUCCEEDED {
		t.Errorf("task = %v, want it succeeded", next)
	}
	again, err := c.Tasks.GetTask(t.Context(), &taskv1.GetTaskRequest{Id: done.GetId()})
	if err != nil || again.GetTask().GetState() != taskv1.TaskState_TASK_STATE_SUCCEEDED {
		t.Errorf("a task that had ended is now %v, %v", again, err)
	}
	if n.Runs("/usr/bin/work", "0") != 1 || n.Runs("/usr/bin/work", "1") != 1 || n.Started() != 3 {
		t.Errorf("%d processes were started, want each command once", n.Started())
	}
}

// TestRolledBackJournal puts back an older copy of the whole state, as a
// restored disk image does. Only the server can know: the node begins a new
// journal by itself, and nothing runs again.
func TestRolledBackJournal(t *testing.T) {
	c := harness.New(t)
	n := c.NewNode("gpu-001")
	if err := n.Do("program /usr/bin/work"); err != nil {
		t.Fatal(err)
	}
	work := func(arg string) *taskv1.Task {
		return c.Ended(c.Create(n, "system.command", &systemv1.CommandSpec{Argv: []string{"/usr/bin/work", arg}}).GetId())
	}
	stop := n.Start()
	before := n.Connected()
	work("1")
	stop()
	var copies [2][]byte
	files := []string{n.State("state.db"), n.State("state.mark")}
	for i, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		copies[i] = b
	}
	stop = n.Start()
	n.Connected()
	work("2")
	stop()
	for i, f := range files {
		if err := os.WriteFile(f, copies[i], 0o600); err != nil {
			t.Fatal(err)
		}
	}
	n.Start()
	await(t, "the node has a new journal", func() bool { return n.Connected().GetJournalId() != before.GetJournalId() })
	if task := work("3"); task.GetState() != taskv1.TaskState_TASK_STATE_SUCCEEDED {
		t.Errorf("task = %v, want it succeeded", task)
	}
	if n.Started() != 3 {
		t.Errorf("%d processes were started, want 3", n.Started())
	}
}

// TestRottenJournal has the medium lose a bit of a task that has ended, while the
// agent works. It finds that by itself, sets the journal aside, and goes on with
// another one; nothing runs again, and nothing that was told is lost.
func TestRottenJournal(t *testing.T) {
	c := harness.New(t)
	n := c.NewNode("gpu-001")
	if err := n.Do("program /usr/bin/work"); err != nil {
		t.Fatal(err)
	}
	work := func(arg string) *taskv1.Task {
		return c.Ended(c.Create(n, "system.command", &systemv1.CommandSpec{Argv: []string{"/usr/bin/work", arg}}).GetId())
	}
	stop := n.Start(func(cfg *agent.Config) { cfg.ScrubAfter = time.Hour })
	before, done := n.Connected(), work("1")
	c.Settled(n)
	rot(t, n.State("state.db"), "\n$"+done.GetId()) // the field of its id, in its record
	stop()
	n.Start(func(cfg *agent.Config) { cfg.ScrubAfter = 10 * time.Millisecond })
	await(t, "the node has a new journal", func() bool { return n.Connected().GetJournalId() != before.GetJournalId() })
	if aside, err := filepath.Glob(n.State("state.db.corrupt.*")); err != nil || len(aside) != 1 {
		t.Errorf("set aside: %v, %v; want one file", aside, err)
	}
	if task := work("2"); task.GetState() != taskv1.TaskState_TASK_STATE_SUCCEEDED {
		t.Errorf("task = %v, want it succeeded", task)
	}
	if n.Started() != 2 {
		t.Errorf("%d processes were started, want 2", n.Started())
	}
}

// rot changes the last byte of what, wherever it is in the file.
func rot(t *testing.T, path, what string) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	found := 0
	for at := strings.Index(string(b), what); at >= 0; found++ {
		last := at + len(what) - 1
		if _, err := f.WriteAt([]byte{b[last] ^ 1}, int64(last)); err != nil {
			t.Fatal(err)
		}
		next := strings.Index(string(b[last:]), what)
		if at = -1; next >= 0 {
			at = last + next
		}
	}
	if found == 0 {
		t.Fatalf("%s does not hold %q", path, what)
	}
}

// TestExpiredIdentity keeps a node away until its certificate has ended. It says
// so, and comes back by itself: it re-keys, or joins anew once it gets a bundle.
func TestExpiredIdentity(t *testing.T) {
	c := harness.New(t, func(cfg *controlplane.Config) { cfg.NodeTTL = 8 * time.Second })
	n := c.NewNode("gpu-001")
	n.Start()
	if first := n.Connected(); first.GetGeneration() != 1 {
		t.Errorf("generation = %d, want 1", first.GetGeneration())
	}
	n.Cut()
	await(t, "the node says that its certificate has ended", func() bool {
		return slices.ContainsFunc(n.Status().GetConditions(), func(c *taskv1.Condition) bool { return c.GetReason() == "IDENTITY_EXPIRED" })
	})
	n.Heal()
	await(t, "the node has re-keyed", func() bool { return n.Status().GetConnected() })
	if again := n.Connected(); again.GetGeneration() != 1 {
		t.Errorf("generation = %d after re-keying, want 1", again.GetGeneration())
	}
	ended := n.Status().GetSvidNotAfter().AsTime()
	n.Cut()
	await(t, "the next certificate has ended", func() bool { return time.Now().After(ended) && time.Now().After(n.Status().GetSvidNotAfter().AsTime()) })
	// It is too late to re-key: were it not, whichever came first would be right.
	c.Pass(pki.RekeyWithin)
	n.NewBundle()
	n.Heal()
	await(t, "the node is back", func() bool { return n.Connected().GetGeneration() == 2 })
}

// await polls until ok, for at most a minute.
func await(t *testing.T, what string, ok func() bool) {
	t.Helper()
	deadline := time.After(time.Minute)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-deadline:
			t.Fatalf("%s: not within a minute", what)
		case <-tick.C:
		}
	}
}

// history checks that the kinds of events occur in this order; others may lie
// between them.
func history(t *testing.T, c *harness.Cluster, id string, want ...string) {
	t.Helper()
	r, err := c.Tasks.ListTaskEvents(t.Context(), &taskv1.ListTaskEventsRequest{Id: id})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range r.GetEvents() {
		got = append(got, e.GetType())
	}
	left := want
	for _, g := range got {
		if len(left) > 0 && g == left[0] {
			left = left[1:]
		}
	}
	if len(left) > 0 || slices.Index(got, want[0]) != 0 {
		t.Errorf("history = %v, want %v in this order", got, want)
	}
}
