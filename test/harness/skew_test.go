package harness_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/gpuaas/millwright/controlplane"
	"github.com/gpuaas/millwright/pki/envelope"
	systemv1 "github.com/gpuaas/millwright/proto/millwright/system/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/all"
	"github.com/gpuaas/millwright/tasks/step"
	"github.com/gpuaas/millwright/tasks/storage"
	"github.com/gpuaas/millwright/tasks/system"
	"github.com/gpuaas/millwright/test/harness"
)

// newer is the registry of a later release, in which both kinds have grown.
func newer() *tasks.Registry {
	r := tasks.NewRegistry()
	step.Register(r)
	command, mount := system.CommandInfo(), storage.MountInfo()
	command.Revision, mount.Revision = 3, 3
	tasks.Add(r, command, system.Command{})
	tasks.Add(r, mount, storage.Mount{})
	return r
}

// older is the registry of an earlier release, which had no mounts yet.
func older() *tasks.Registry {
	r := tasks.NewRegistry()
	step.Register(r)
	command := system.CommandInfo()
	command.Revision = 1
	tasks.Add(r, command, system.Command{})
	return r
}

func grown(l *taskv1.TaskLeaf) { l.Revision = 3 }

// TestServerFirst updates the server before the agents, as the order is: what an
// agent lacks is refused before it is stored, and what it has goes on.
func TestServerFirst(t *testing.T) {
	c := harness.New(t, func(cfg *controlplane.Config) { cfg.Registry = newer() })
	n := c.NewNode("gpu-001")
	n.Registry = older()
	if err := n.Do(fine); err != nil {
		t.Fatal(err)
	}
	n.Start()
	n.Connected()
	if task := c.Ended(c.Create(n, "system.command", command("/usr/bin/true")).GetId()); task.GetState() != taskv1.TaskState_TASK_STATE_SUCCEEDED {
		t.Errorf("a task of the revision that both know ended as %v: %s", task.GetState(), task.GetMessage())
	}
	for name, one := range map[string]struct {
		kind     string
		spec     proto.Message
		revision uint32
		says     []string
	}{
		"kind":     {"storage.mount", bind(), 1, []string{"storage.mount", "update it"}},
		"revision": {"system.command", command("/usr/bin/true"), 3, []string{"up to revision 1", "update its agent"}},
		"field": {
			"system.command", &systemv1.CommandSpec{Argv: []string{"/usr/bin/true"}, StopGrace: durationpb.New(time.Minute)}, 2,
			[]string{"up to revision 1", "update its agent"},
		},
	} {
		_, err := c.Tasks.CreateTasks(t.Context(), sign(t, c, n, one.kind, one.revision, one.spec))
		if status.Code(err) != codes.FailedPrecondition {
			t.Errorf("create a task of a newer %s = %v, want FailedPrecondition", name, err)
		}
		details := fmt.Sprint(status.Convert(err).Details())
		for _, want := range one.says {
			if !strings.Contains(details, want) {
				t.Errorf("create a task of a newer %s: %s; want %q in it", name, details, want)
			}
		}
	}
}

func command(argv ...string) *systemv1.CommandSpec { return &systemv1.CommandSpec{Argv: argv} }

func sign(t *testing.T, c *harness.Cluster, n *harness.Node, kind string, revision uint32, spec proto.Message) *taskv1.CreateTasksRequest {
	t.Helper()
	b, err := proto.Marshal(spec)
	if err != nil {
		t.Fatal(err)
	}
	env, leaves, err := envelope.SignTaskSet(c.Window(), []*taskv1.TaskLeaf{{
		TaskId: uuid.Must(uuid.NewV7()).String(), Node: n.Name, Mode: taskv1.Mode_MODE_EXECUTE, Kind: kind, Revision: revision, Spec: b,
	}}, c.Key())
	if err != nil {
		t.Fatal(err)
	}
	return &taskv1.CreateTasksRequest{RequestId: uuid.NewString(), Envelope: env, Leaves: leaves}
}

// TestAgentBackToAnOlderRelease takes an agent back while it has tasks that only
// the newer release knows: one not sent yet, and one in the middle of a command. None is lost, and nothing runs twice: what
// cannot be known is held for a person.
func TestAgentBackToAnOlderRelease(t *testing.T) {
	c := harness.New(t, func(cfg *controlplane.Config) { cfg.Registry = newer() })
	n := c.NewNode("gpu-001")
	n.Registry = newer()
	if err := n.Do(fine); err != nil {
		t.Fatal(err)
	}
	stop := n.Start()
	n.Connected()
	running := c.Create(n, "system.command", command("/usr/bin/work"), grown).GetId()
	c.Reached(running, started)
	stop()
	queued := c.Create(n, "system.command", command("/usr/bin/true", "queued"), grown).GetId()

	n.Registry = all.Registry()
	stop = n.Start()
	n.Connected()
	if task := c.Ended(queued); task.GetState() != taskv1.TaskState_TASK_STATE_REFUSED || task.GetReason() != "UNKNOWN_KIND" || !strings.Contains(task.GetMessage(), "update the agent") {
		t.Errorf("a task that was not sent is %v (%s: %s), want it refused, with the way out", task.GetState(), task.GetReason(), task.GetMessage())
	}
	if n.Runs("/usr/bin/true", "queued") != 0 {
		t.Error("a task that was refused has run")
	}
	task := c.Ended(running)
	if task.GetState() != taskv1.TaskState_TASK_STATE_HELD || !strings.Contains(task.GetMessage(), "install an agent that knows it") {
		t.Errorf("the task in the middle is %v (%s), want it held, with the way out", task.GetState(), task.GetMessage())
	}
	after := c.Ended(c.Create(n, "system.command", command("/usr/bin/true", "after")).GetId())
	if after.GetState() != taskv1.TaskState_TASK_STATE_SUCCEEDED {
		t.Errorf("a task of the older revision ended as %v: %s", after.GetState(), after.GetMessage())
	}
	stop()

	n.Registry = newer()
	n.Start()
	n.Connected()
	if again := c.Ended(running); !proto.Equal(again, task) {
		t.Errorf("with the newer agent back the held task is\n%v, and was\n%v", again, task)
	}
	if runs := n.Runs("/usr/bin/work"); runs != 1 {
		t.Errorf("the command in the middle was started %d times, want once", runs)
	}
}
