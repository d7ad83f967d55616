package harness_test

import (
	"flag"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/uuid"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/millwright/pki/envelope"
	storagev1 "github.com/gpuaas/millwright/proto/millwright/storage/v1"
	systemv1 "github.com/gpuaas/millwright/proto/millwright/system/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/test/harness"
)

// record writes the files that this release leaves, for later ones to read. A
// file that is there is never written again.
var record = flag.String("record", "", "write testdata/release/`VERSION`.tar.gz")

const (
	fine    = "program /usr/bin/true\nprogram /usr/bin/false\nresult exit=7 /usr/bin/false\nprogram /usr/bin/work\nresult block /usr/bin/work\nresult block /usr/bin/work on\ndir /export"
	started = taskv1.TaskState_TASK_STATE_RUNNING
)

func bind() *storagev1.MountSpec {
	return &storagev1.MountSpec{Target: "/data", Source: &storagev1.MountSpec_Bind{Bind: &storagev1.BindSource{Path: "/export"}}}
}

// TestRecordRelease leaves a node with tasks of all kinds of ends, one in the
// middle of a command, one that waits for its time, and one that was not sent.
func TestRecordRelease(t *testing.T) {
	file := filepath.Join(t.TempDir(), "now.tar.gz")
	if *record != "" {
		file = filepath.Join("testdata", "release", *record+".tar.gz")
		if _, err := os.Stat(file); err == nil {
			t.Fatalf("%s is there: what a release has written does not change", file)
		}
	}
	c := harness.New(t)
	n := c.NewNode("gpu-001")
	n.Gone("it is saved in the middle of its work")
	if err := n.Do(fine); err != nil {
		t.Fatal(err)
	}
	command := func(argv ...string) string {
		return c.Create(n, "system.command", &systemv1.CommandSpec{Argv: argv}).GetId()
	}
	stop := n.Start()
	n.Connected()
	ids := map[string]string{
		"succeeded": command("/usr/bin/true"), "failed": command("/usr/bin/false"),
		"mounted": c.Create(n, "storage.mount", bind()).GetId(), "held": command("/usr/bin/work"),
	}
	for _, id := range []string{"succeeded", "failed", "mounted"} {
		c.Ended(ids[id])
	}
	c.Reached(ids["held"], started)
	stop()
	n.Reboot()
	stop = n.Start()
	c.Ended(ids["held"])
	ids["waiting"] = later(t, c, n, time.Now().Add(30*time.Minute))
	c.Reached(ids["waiting"], taskv1.TaskState_TASK_STATE_WAITING)
	ids["running"] = command("/usr/bin/work", "on")
	if task := c.Reached(ids["running"], started); task.GetState() != started {
		t.Fatalf("the command that is to be in the middle is %v", task.GetState())
	}
	stop()
	ids["queued"] = command("/usr/bin/true", "queued")
	c.StopServer()
	c.Save(file, *record, ids, n)
	if *record == "" {
		goOn(t, file)
	}
}

// later creates a command that may not begin before a time.
func later(t *testing.T, c *harness.Cluster, n *harness.Node, begin time.Time) string {
	t.Helper()
	spec, err := proto.Marshal(&systemv1.CommandSpec{Argv: []string{"/usr/bin/true", "later"}})
	if err != nil {
		t.Fatal(err)
	}
	w := c.Window()
	w.NotBefore = begin
	leaf := &taskv1.TaskLeaf{
		TaskId: uuid.Must(uuid.NewV7()).String(), Node: n.Name, Mode: taskv1.Mode_MODE_EXECUTE, Kind: "system.command", Revision: 1, Spec: spec,
	}
	env, leaves, err := envelope.SignTaskSet(w, []*taskv1.TaskLeaf{leaf}, c.Key())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Tasks.CreateTasks(t.Context(), &taskv1.CreateTasksRequest{RequestId: uuid.NewString(), Envelope: env, Leaves: leaves}); err != nil {
		t.Fatal(err)
	}
	return leaf.GetTaskId()
}

// TestEveryRelease goes on from the files of every release before.
func TestEveryRelease(t *testing.T) {
	files, err := filepath.Glob("testdata/release/*.tar.gz")
	if err != nil || len(files) == 0 {
		t.Fatalf("files of earlier releases: %v, %v; want at least one", files, err)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) { goOn(t, file) })
	}
}

// goOn starts the server and the node from saved files, a minute later.
func goOn(t *testing.T, file string) {
	c, saved, nodes := harness.Load(t, file, time.Minute)
	n := nodes["gpu-001"]
	n.Gone("what the release has left running and waiting goes on")
	if err := n.Do(fine); err != nil {
		t.Fatal(err)
	}
	before := map[string]*taskv1.Task{}
	for name, id := range saved.Tasks {
		before[name] = c.Reached(id, taskv1.TaskState_TASK_STATE_QUEUED)
	}
	n.Start()
	n.Connected()
	for name, want := range map[string]taskv1.TaskState{
		"succeeded": taskv1.TaskState_TASK_STATE_SUCCEEDED, "failed": taskv1.TaskState_TASK_STATE_FAILED,
		"mounted": taskv1.TaskState_TASK_STATE_SUCCEEDED, "held": taskv1.TaskState_TASK_STATE_HELD,
		"running": started, "waiting": taskv1.TaskState_TASK_STATE_WAITING, "queued": taskv1.TaskState_TASK_STATE_SUCCEEDED,
	} {
		task := c.Reached(saved.Tasks[name], want)
		if task.GetState() != want {
			t.Errorf("task %q is %v (%s: %s), want %v", name, task.GetState(), task.GetReason(), task.GetMessage(), want)
		}
		if old := before[name]; old.GetState() == want && want != started && !proto.Equal(old, task) {
			t.Errorf("task %q changed by the update:\n%v\n%v", name, old, task)
		}
		if record := n.Journal(saved.Tasks[name]); record.GetState() != want {
			t.Errorf("the journal has task %q as %v, want %v", name, record.GetState(), want)
		}
	}
	again := c.Ended(c.Create(n, "system.command", &systemv1.CommandSpec{Argv: []string{"/usr/bin/true", "new"}}).GetId())
	if again.GetState() != taskv1.TaskState_TASK_STATE_SUCCEEDED {
		t.Errorf("a new task ended as %v (%s)", again.GetState(), again.GetMessage())
	}
}
