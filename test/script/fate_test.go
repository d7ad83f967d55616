package script_test

import (
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	storagev1 "github.com/gpuaas/millwright/proto/millwright/storage/v1"
	systemv1 "github.com/gpuaas/millwright/proto/millwright/system/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// record adds an event and moves the task.
func (s *server) record(t *taskv1.Task, typ string, state taskv1.TaskState, reason, message, actor string) {
	t.State, t.Reason, t.Message = state, reason, message
	e := &taskv1.TaskEvent{
		Index: uint64(len(s.events)) + 1, TaskId: t.GetId(), Node: t.GetNode(), RecordTime: timestamppb.Now(), EventTime: timestamppb.Now(),
		Type: typ, State: state, Reason: reason, Message: message, Actor: actor,
	}
	s.events = append(s.events, e)
	t.UpdateIndex = e.GetIndex()
	s.announce()
}

// announce wakes whoever waits for a change.
func (s *server) announce() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// carryOut makes of a queued task what a node would: succeeded, exit7, refused,
// expired, held, or nothing for queued.
func (s *server) carryOut(t *taskv1.Task, fate string) {
	node := "spiffe://" + s.root.TrustDomain() + "/node/" + t.GetNode()
	step := func(typ string, state taskv1.TaskState, reason, message string) {
		s.record(t, typ, state, reason, message, node)
	}
	if t.GetKind() == "task.resolve" {
		fate = "succeeded"
		s.resolve(t, node)
	}
	if fate == "queued" {
		return
	}
	step("ASSIGNED", taskv1.TaskState_TASK_STATE_ASSIGNED, "", "")
	if fate == "expired" {
		step("EXPIRED", taskv1.TaskState_TASK_STATE_EXPIRED, "WINDOW_PASSED", "it was not begun in its window")
		t.EndTime = timestamppb.Now()
		return
	}
	step("ACCEPTED", taskv1.TaskState_TASK_STATE_ACCEPTED, "", "")
	t.AcceptTime = timestamppb.Now()
	if fate == "refused" {
		step("FINISHED", taskv1.TaskState_TASK_STATE_REFUSED, "POLICY_DENIED", "rule 3 of /etc/millwright/policy.yaml denies it")
		t.Undo, t.EndTime = taskv1.UndoState_UNDO_STATE_NOT_NEEDED, timestamppb.Now()
		return
	}
	s.plan(t)
	step("PLANNED", taskv1.TaskState_TASK_STATE_ACCEPTED, "", "")
	if t.GetMode() == taskv1.Mode_MODE_PLAN {
		step("FINISHED", taskv1.TaskState_TASK_STATE_SUCCEEDED, "", "")
		t.EndTime = timestamppb.Now()
		return
	}
	t.StartTime = timestamppb.Now()
	step("STARTED", taskv1.TaskState_TASK_STATE_RUNNING, "", "")
	s.finish(t, fate, step)
}

func (s *server) finish(t *taskv1.Task, fate string, step func(string, taskv1.TaskState, string, string)) {
	outcome := &taskv1.StepOutcome{
		Phase: taskv1.StepPhase_STEP_PHASE_VERIFIED, Attempts: 1,
		StartTime: timestamppb.New(time.Now().Add(-1500 * time.Millisecond)), EndTime: timestamppb.Now(),
	}
	t.Steps = []*taskv1.StepOutcome{outcome}
	if t.GetKind() == "system.command" {
		outcome.Command = &taskv1.CommandOutcome{
			InvocationId: "0123456789abcdef0123456789abcdef", Duration: durationpb.New(time.Second),
			Stdout: &taskv1.OutputSummary{TotalBytes: 9007199254740993, HeadSha256: []byte{0x01, 0xfe, 0xdc, 0xba, 0x98}},
		}
	}
	switch fate {
	case "succeeded":
		step("FINISHED", taskv1.TaskState_TASK_STATE_SUCCEEDED, "", "")
		if t.GetKind() == "storage.mount" {
			t.Result = mustAny(&storagev1.MountResult{Unit: "srv-data.mount", Source: "tmpfs", Fstype: "tmpfs"})
		}
		if outcome.GetCommand() != nil {
			t.Result = mustAny(&systemv1.CommandResult{Outcome: outcome.GetCommand()})
		}
	case "exit7":
		outcome.Phase, outcome.Error = taskv1.StepPhase_STEP_PHASE_OBSERVED, "/usr/bin/false exited with 7"
		if outcome.GetCommand() != nil {
			outcome.Command.ExitCode = 7
		}
		t.Undo = taskv1.UndoState_UNDO_STATE_NOT_POSSIBLE
		step("FINISHED", taskv1.TaskState_TASK_STATE_FAILED, "COMMAND_EXIT", "step 0: /usr/bin/false exited with 7")
	case "held":
		outcome.Phase = taskv1.StepPhase_STEP_PHASE_OBSERVED
		step("HELD", taskv1.TaskState_TASK_STATE_HELD, "OUTCOME_UNKNOWN", "the node rebooted while the command ran")
		return
	}
	t.EndTime = timestamppb.Now()
}

func (s *server) plan(t *taskv1.Task) {
	title := "run /usr/bin/true"
	if t.GetKind() == "storage.mount" {
		title = "start and enable srv-data.mount"
		t.Plan = &taskv1.Plan{Differences: []*taskv1.Difference{{Subject: "mount /srv/data", Want: "tmpfs"}}}
	} else {
		t.Plan = &taskv1.Plan{}
	}
	t.Plan.Kind = t.GetKind()
	t.Plan.Steps = []*taskv1.PlannedStep{{Type: "unit.set", Revision: 1, Title: title, Undoable: t.GetKind() == "storage.mount"}}
	t.PlanDigest = make([]byte, 32)
}

// resolve settles the held task that a task.resolve names.
func (s *server) resolve(t *taskv1.Task, node string) {
	spec := &taskv1.ResolveSpec{}
	if err := t.GetSpec().UnmarshalTo(spec); err != nil {
		panic(err)
	}
	held := s.find(spec.GetTaskId()).task
	state := taskv1.TaskState_TASK_STATE_ABANDONED
	if spec.GetAs() == taskv1.ResolveAs_RESOLVE_AS_ACCEPT {
		state = taskv1.TaskState_TASK_STATE_SUCCEEDED
	}
	held.AssertedBy = t.GetCreatedBy()
	s.record(held, "FINISHED", state, "", "", node)
}

func mustAny(m proto.Message) *anypb.Any {
	a, err := anypb.New(m)
	if err != nil {
		panic(err)
	}
	return a
}
