package controlplane_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	nodev1 "github.com/gpuaas/millwright/proto/millwright/node/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

func TestTaskLife(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.join("gpu-001")
	h.connect()
	created := w.create(w.leaf("gpu-001"))[0]
	if got := created.GetState(); got != taskv1.TaskState_TASK_STATE_QUEUED {
		t.Errorf("created task is %s, want QUEUED", got)
	}
	h.accept(h.assignment(created.GetId()))
	if got := w.task(created.GetId()).GetState(); got != taskv1.TaskState_TASK_STATE_ACCEPTED {
		t.Errorf("accepted task is %s", got)
	}
	h.run(created.GetId())
	task := w.task(created.GetId())
	if task.GetState() != taskv1.TaskState_TASK_STATE_SUCCEEDED || task.GetAcceptTime() == nil || task.GetStartTime() == nil || task.GetEndTime() == nil {
		t.Errorf("task at its end: %v", task)
	}
	if got := task.GetCreatedBy(); got != "spiffe://test.example/operator/alice" {
		t.Errorf("created_by = %q", got)
	}
	if got := task.GetAuthorizedBy(); len(got) != 1 || got[0].GetName() != "alice" {
		t.Errorf("authorized_by = %v", got)
	}
	want := []string{"CREATED", "ASSIGNED", "ACCEPTED", "PLANNED", "STARTED", "STEP_ENDED", "SUCCEEDED"}
	if diff := cmp.Diff(want, w.history(created.GetId())); diff != "" {
		t.Errorf("history (-want +got):\n%s", diff)
	}
	resp, err := w.nodes.GetNode(w.ctx(), &nodev1.GetNodeRequest{Name: "gpu-001"})
	if err != nil || resp.GetNode().GetState() != nodev1.NodeState_NODE_STATE_CONNECTED || resp.GetNode().GetAcknowledgedSeq() != h.lastSeq() {
		t.Errorf("GetNode = %v, %v", resp, err)
	}
}

func TestTaskLifeOverRestart(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.join("gpu-001")
	h.connect()
	id := w.create(w.leaf("gpu-001"))[0].GetId()
	h.accept(h.assignment(id))
	w.restart()
	h.connect()
	if got := h.welcome.GetResendFrom(); got != h.lastSeq()+1 {
		t.Errorf("resend_from = %d, want %d", got, h.lastSeq()+1)
	}
	h.run(id)
	if got := w.task(id).GetState(); got != taskv1.TaskState_TASK_STATE_SUCCEEDED {
		t.Errorf("task is %s", got)
	}
}
