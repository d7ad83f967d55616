package main

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks/all"
)

// Every kind that is compiled in has a story, and every story of a kind is of
// one that is.
func TestEveryKindHasAStory(t *testing.T) {
	var want, have []string
	for _, k := range all.Registry().Kinds() {
		want = append(want, k.Kind)
	}
	for _, s := range stories() {
		if s.custom == nil && !slices.Contains(have, s.kind) {
			have = append(have, s.kind)
		}
	}
	slices.Sort(want)
	slices.Sort(have)
	if diff := cmp.Diff(want, have); diff != "" {
		t.Errorf("kinds (-registry +stories):\n%s", diff)
	}
}

func find(t *testing.T, title string) story {
	t.Helper()
	for _, s := range stories() {
		if s.title() == title {
			return s
		}
	}
	t.Fatalf("no story %q", title)
	return story{}
}

// history is a task's, by its types and states.
func history(end taskv1.TaskState, types ...string) (out []*taskv1.TaskEvent) {
	for i, kind := range types {
		e := &taskv1.TaskEvent{Type: kind, Index: uint64(i + 1), State: taskv1.TaskState_TASK_STATE_RUNNING}
		if i == len(types)-1 {
			e.State = end
		}
		out = append(out, e)
	}
	return out
}

// The model finds what it is there to find.
func TestModel(t *testing.T) {
	order := map[string]int{"shim.marker": 1, "shim.started": 2, "shim.exited": 3}
	task := func(state taskv1.TaskState, reason string, undo taskv1.UndoState) *taskv1.Task {
		return &taskv1.Task{State: state, Reason: reason, Undo: undo}
	}
	kill := func(program, name, spot string) *injury {
		return &injury{point{Name: name, Program: program, Spot: spot}, 1, "kill"}
	}
	within := kill(agent, "executor.step.applied", "within")
	fails := &injury{point{Name: "host.write.after", Program: agent, Spot: "after"}, 1, "fail"}
	good := history(succeeded, "CREATED", "ASSIGNED", "ACCEPTED", "PLANNED", "STARTED", "RESUMED", "SUCCEEDED")
	done := task(succeeded, "", 0)
	unknown := task(held, "OUTCOME_UNKNOWN", 0)
	tests := []struct {
		name, story string
		injury      *injury
		seen        sight
		want        string
	}{
		{"command done", "system.command", within, sight{task: done, events: good, after: "runs=1"}, ""},
		{"command twice", "system.command", within, sight{task: done, events: good, after: "runs=2"}, "duplicated"},
		{"command never", "system.command", within, sight{task: done, events: good, after: "runs=0"}, "lost"},
		{"command held for no reason", "system.command", within, sight{task: unknown, events: history(held, "CREATED", "HELD"), after: "runs=1"}, "wrong"},
		{"shim killed", "system.command", kill(shim, "shim.exited", "unknown"), sight{task: unknown, events: history(held, "CREATED", "HELD"), after: "runs=1"}, ""},
		{"shim killed, and said to be done", "system.command", kill(shim, "shim.exited", "unknown"), sight{task: done, events: good, after: "runs=1"}, "wrong"},
		{"shim killed before it started", "system.command", kill(shim, "shim.marker", "unknown"), sight{task: unknown, events: history(held, "CREATED", "HELD"), after: "runs=1"}, "duplicated"},
		{"mount done", "storage.mount", within, sight{task: done, events: good, before: "a", after: "w"}, ""},
		{"mount half done", "storage.mount", within, sight{task: done, events: good, before: "a", after: "b"}, "wrong"},
		{"mount twice", "storage.mount", within, sight{task: done, events: good, before: "a", after: "mounts=2"}, "duplicated"},
		{"mount failed by a kill", "storage.mount", within, sight{task: task(failed, "STEP_FAILED", complete), events: good, before: "a", after: "a"}, "wrong"},
		{"mount undone", "storage.mount", fails, sight{task: task(failed, "STEP_FAILED", complete), events: good, before: "a", after: "a"}, ""},
		{"mount not undone", "storage.mount", fails, sight{task: task(failed, "STEP_FAILED", complete), events: good, before: "a", after: "b"}, "wrong"},
		{"mount undone that answers no more", "storage.mount", fails, sight{task: task(failed, "STEP_FAILED", complete), events: good, before: "a=yes", after: "a="}, "wrong"},
		{"dead mount that cannot answer again", "storage.unmount of a bucket that is in use, lazily", fails, sight{task: task(failed, "STEP_FAILED", complete), events: good, before: "a=yes", after: "a="}, ""},
		{"dead mount after a kill", "storage.unmount of a bucket that is in use, lazily", within, sight{task: done, events: good, before: "a=yes", after: "a="}, "wrong"},
		{"dead mount that is gone after the undo", "storage.unmount of a bucket that is in use, lazily", fails, sight{task: task(failed, "STEP_FAILED", complete), events: good, before: "a=yes", after: ""}, "wrong"},
		{"ended twice", "system.command", within, sight{task: done, after: "runs=1",
			events: append(history(succeeded, "CREATED", "SUCCEEDED"), history(succeeded, "a", "b", "SUCCEEDED")[2])}, "duplicated"},
		{"not ended", "system.command", within, sight{task: done, after: "runs=1", events: history(taskv1.TaskState_TASK_STATE_RUNNING, "CREATED", "STARTED")}, "lost"},
		{"not sent again", "system.command", kill(agent, "executor.accept.before", "unaccepted"), sight{task: done, events: good, after: "runs=1"}, "wrong"},
		{"accepted twice", "system.command", within, sight{task: done, after: "runs=1", events: history(succeeded, "CREATED", "ACCEPTED", "ACCEPTED", "SUCCEEDED")}, "duplicated"},
	}
	for _, test := range tests {
		err := judge(find(t, test.story), test.injury, order, test.seen, "w")
		got := ""
		if v, ok := err.(*verdict); ok { //nolint:errorlint // it is never wrapped
			got = v.sort
		}
		if got != test.want {
			t.Errorf("%s: %q, want %q (%v)", test.name, got, test.want, err)
		}
	}
}
