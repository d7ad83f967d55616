package harness_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/uuid"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/millwright/pki"
	"github.com/gpuaas/millwright/pki/envelope"
	systemv1 "github.com/gpuaas/millwright/proto/millwright/system/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/test/harness"
)

// TestController lets a program sign and send tasks with its own key and
// identity. The node runs what its policy allows to controllers, and refuses
// what it allows to operators alone.
func TestController(t *testing.T) {
	c := harness.New(t)
	n := c.NewNode("gpu-001")
	if err := n.Do("program /usr/bin/both\nprogram /usr/bin/person"); err != nil {
		t.Fatal(err)
	}
	policy := "version: 1\nrules:\n" +
		"  - allow: system.command\n    argv: [/usr/bin/both]\n    roles: [controller, operator]\n" +
		"  - allow: system.command\n    argv: [/usr/bin/person]\n    roles: [operator]\n"
	if err := os.WriteFile(filepath.Join(n.Dir, "policy.yaml"), []byte(policy), 0o600); err != nil {
		t.Fatal(err)
	}
	n.Start()
	n.Connected()
	tasks := taskv1.NewTaskServiceClient(c.Connect(c.Identity(pki.RoleController, "slurm")))
	for _, tc := range []struct {
		program, reason string
		state           taskv1.TaskState
		runs            int
	}{
		{"/usr/bin/both", "", taskv1.TaskState_TASK_STATE_SUCCEEDED, 1},
		{"/usr/bin/person", "POLICY_DENIED", taskv1.TaskState_TASK_STATE_REFUSED, 0},
	} {
		spec, err := proto.Marshal(&systemv1.CommandSpec{Argv: []string{tc.program, "x"}})
		if err != nil {
			t.Fatal(err)
		}
		leaf := &taskv1.TaskLeaf{
			TaskId: uuid.Must(uuid.NewV7()).String(), Node: n.Name, Mode: taskv1.Mode_MODE_EXECUTE, Kind: "system.command", Revision: 1, Spec: spec,
		}
		env, leaves, err := envelope.SignTaskSet(c.Window(), []*taskv1.TaskLeaf{leaf}, c.ControllerKey())
		if err != nil {
			t.Fatal(err)
		}
		r, err := tasks.CreateTasks(t.Context(), &taskv1.CreateTasksRequest{RequestId: uuid.NewString(), Envelope: env, Leaves: leaves})
		if err != nil {
			t.Fatal(err)
		}
		task := c.Ended(r.GetTasks()[0].GetId())
		if task.GetState() != tc.state || task.GetReason() != tc.reason || n.Runs(tc.program, "x") != tc.runs {
			t.Errorf("%s, signed by a controller, ran %d times and is %s %s: %s; want %d times, %s %s",
				tc.program, n.Runs(tc.program, "x"), task.GetState(), task.GetReason(), task.GetMessage(), tc.runs, tc.state, tc.reason)
		}
	}
	// The same, signed by an operator.
	byPerson := c.Ended(c.Create(n, "system.command", &systemv1.CommandSpec{Argv: []string{"/usr/bin/person", "y"}}).GetId())
	if byPerson.GetState() != taskv1.TaskState_TASK_STATE_SUCCEEDED {
		t.Errorf("signed by an operator it is %s: %s", byPerson.GetState(), byPerson.GetMessage())
	}
}
