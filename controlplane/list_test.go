package controlplane_test

import (
	"context"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// list reads all pages.
func (w *world) list(req *taskv1.ListTasksRequest, between func()) []string {
	w.t.Helper()
	var ids []string
	for {
		resp, err := w.tasks.ListTasks(w.ctx(), req)
		if err != nil {
			w.t.Fatalf("ListTasks: %v", err)
		}
		for _, task := range resp.GetTasks() {
			ids = append(ids, task.GetId())
		}
		if req.PageToken = resp.GetNextPageToken(); req.PageToken == "" {
			return ids
		}
		between()
	}
}

func TestListDuringWrites(t *testing.T) {
	t.Parallel()
	const total = 5000
	w := newWorld(t)
	h := w.join("n1")
	h.connect()
	existing := map[string]bool{}
	for len(existing) < total {
		leaves := make([]*taskv1.TaskLeaf, 500)
		for i := range leaves {
			leaves[i] = w.leaf("n1")
		}
		for _, task := range w.create(leaves...) {
			existing[task.GetId()] = true
		}
	}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() { // new tasks all the while
		for {
			select {
			case <-stop:
				return
			default:
				w.create(w.leaf("n1"), w.leaf("n1"))
			}
		}
	})
	seen := map[string]int{}
	pages := 0
	for _, id := range w.list(&taskv1.ListTasksRequest{PageSize: 100}, func() {
		pages++
		w.create(w.leaf("n1")) // and one between any two pages, for sure
		if pages%10 == 0 {     // and old ones move on
			id := h.leafOf(h.accept1()).GetTaskId()
			h.finish(id, taskv1.TaskState_TASK_STATE_FAILED)
		}
	}) {
		seen[id]++
	}
	close(stop)
	wg.Wait()
	if pages < total/100-1 {
		t.Errorf("%d pages", pages)
	}
	for id := range existing {
		if seen[id] != 1 {
			t.Errorf("task %s was seen %d times", id, seen[id])
		}
	}
}

func TestListFilters(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.join("n1")
	w.join("n2")
	h.credits = 1
	h.connect()
	labelled := w.leaf("n2")
	labelled.Labels = []*taskv1.Label{{Key: "rack", Value: "7"}, {Key: "team", Value: "ml"}}
	labelled.Project = "p1"
	planned := w.leaf("n2")
	planned.Mode = taskv1.Mode_MODE_PLAN
	a := w.create(w.leaf("n1"))[0]
	h.accept(h.assignment(a.GetId()))
	middle := time.Now()
	b, c := w.create(labelled)[0], w.create(planned)[0]
	all := []string{c.GetId(), b.GetId(), a.GetId()}
	for _, tc := range []struct {
		name string
		req  *taskv1.ListTasksRequest
		want []string
	}{
		{"all, newest first", &taskv1.ListTasksRequest{}, all},
		{"node", &taskv1.ListTasksRequest{Nodes: []string{"n2"}}, all[:2]},
		{"nodes", &taskv1.ListTasksRequest{Nodes: []string{"n1", "n2"}}, all},
		{"prefix of a node", &taskv1.ListTasksRequest{Nodes: []string{"n"}}, nil},
		{"state", &taskv1.ListTasksRequest{States: []taskv1.TaskState{taskv1.TaskState_TASK_STATE_ACCEPTED}}, all[2:]},
		{"kind", &taskv1.ListTasksRequest{Kinds: []string{"task.resolve", "storage.mount"}}, nil},
		{"kinds", &taskv1.ListTasksRequest{Kinds: []string{"storage.mount", "system.command"}}, all},
		{"label", &taskv1.ListTasksRequest{Labels: []*taskv1.Label{{Key: "rack", Value: "7"}}}, all[1:2]},
		{"labels that no task has", &taskv1.ListTasksRequest{Labels: []*taskv1.Label{{Key: "rack", Value: "7"}, {Key: "team", Value: "x"}}}, nil},
		{"project", &taskv1.ListTasksRequest{Project: "p1"}, all[1:2]},
		{"after", &taskv1.ListTasksRequest{CreatedAfter: timestamppb.New(middle)}, all[:2]},
		{"before", &taskv1.ListTasksRequest{CreatedBefore: timestamppb.New(middle)}, all[2:]},
	} {
		for _, size := range []int32{1, 2, 100} {
			tc.req.PageSize, tc.req.PageToken = size, ""
			if diff := cmp.Diff(tc.want, w.list(tc.req, func() {})); diff != "" {
				t.Errorf("%s, pages of %d (-want +got):\n%s", tc.name, size, diff)
			}
		}
	}
	resp, err := w.tasks.ListTasks(w.ctx(), &taskv1.ListTasksRequest{PageSize: 1})
	if err != nil {
		t.Fatal(err)
	}
	for name, req := range map[string]*taskv1.ListTasksRequest{
		"token of another filter": {PageSize: 1, PageToken: resp.GetNextPageToken(), Project: "x"},
		"token that is none":      {PageToken: "x"},
		"page size":               {PageSize: 1001},
		"negative page size":      {PageSize: -1},
		"undefined state":         {States: []taskv1.TaskState{99}},
		"empty node":              {Nodes: []string{""}},
	} {
		if _, err := w.tasks.ListTasks(w.ctx(), req); status.Code(err) != codes.InvalidArgument {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestWatchResumes(t *testing.T) {
	t.Parallel()
	const events = 200
	w := newWorld(t)
	h := w.join("n1")
	h.connect()
	token := w.watchToken()
	var want []string
	record := func(id, kind string) { want = append(want, id+" "+kind) }
	var got []string
	var last uint64
	for len(got) < events {
		if len(got) == len(want) {
			if len(got) == events/2 {
				w.restart()
				h.connect()
			}
			id := w.create(w.leaf("n1"))[0].GetId()
			h.accept(h.assignment(id))
			h.finish(id, taskv1.TaskState_TASK_STATE_SUCCEEDED)
			for _, kind := range []string{"CREATED", "ASSIGNED", "ACCEPTED", "SUCCEEDED"} {
				record(id, kind)
			}
		}
		ev, next := w.watchOne(token)
		token = next
		if ev.GetIndex() <= last {
			t.Fatalf("event %d came after %d", ev.GetIndex(), last)
		}
		last = ev.GetIndex()
		got = append(got, ev.GetTaskId()+" "+ev.GetType())
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
}

// watchOne watches from a token until one event has come, and kills the watch.
func (w *world) watchOne(token string) (*taskv1.TaskEvent, string) {
	w.t.Helper()
	ctx, cancel := context.WithCancel(w.ctx())
	defer cancel()
	stream, err := w.tasks.WatchTasks(ctx, &taskv1.WatchTasksRequest{ResumeToken: token})
	if err != nil {
		w.t.Fatalf("WatchTasks: %v", err)
	}
	for {
		m, err := stream.Recv()
		if err != nil {
			w.t.Fatalf("watch: %v", err)
		}
		if m.GetEvent() != nil {
			return m.GetEvent(), m.GetResumeToken()
		}
	}
}

func TestWatchFollowsAndFilters(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h, other := w.join("n1"), w.join("n2")
	h.connect()
	other.connect()
	stream, err := w.tasks.WatchTasks(w.ctx(), &taskv1.WatchTasksRequest{Nodes: []string{"n1"}})
	if err != nil {
		t.Fatal(err)
	}
	first, err := stream.Recv()
	if err != nil || first.GetEvent() != nil || first.GetResumeToken() == "" {
		t.Fatalf("the first message of a watch from now = %v, %v; want a token alone", first, err)
	}
	w.create(w.leaf("n2"))
	id := w.create(w.leaf("n1"))[0].GetId()
	h.accept(h.assignment(id))
	var got []string
	for len(got) < 3 {
		m, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		if m.GetEvent().GetTaskId() != id {
			t.Errorf("event of another node: %v", m)
		}
		got = append(got, m.GetEvent().GetType())
		if m.GetEvent().GetType() == "ACCEPTED" && m.GetEvent().GetNodeEvent().GetAccepted() == nil {
			t.Error("the node's own event is missing")
		}
	}
	if !slices.Equal(got, []string{"CREATED", "ASSIGNED", "ACCEPTED"}) {
		t.Errorf("events = %v", got)
	}
	w.shut() // the watch must not hold it up
	if _, err := stream.Recv(); status.Code(err) != codes.Unavailable {
		t.Errorf("the watch of a server that stops ended with %v", err)
	}
}

func TestWatchTokensThatAreNotGood(t *testing.T) {
	t.Parallel()
	w, other := newWorld(t), newWorld(t)
	other.join("n1")
	for range 5 {
		other.create(other.leaf("n1"))
	}
	for name, c := range map[string]struct {
		token string
		code  codes.Code
	}{
		"garbage": {"garbage", codes.InvalidArgument},
		"ahead":   {other.watchToken(), codes.OutOfRange},
	} {
		stream, err := w.tasks.WatchTasks(w.ctx(), &taskv1.WatchTasksRequest{ResumeToken: c.token})
		if err == nil {
			_, err = stream.Recv()
		}
		if status.Code(err) != c.code {
			t.Errorf("%s: %v, want %s", name, err, c.code)
		}
		if c.code == codes.OutOfRange && !strings.Contains(err.Error(), "list again") {
			t.Errorf("%s: no way out in %v", name, err)
		}
	}
}

// accept1 accepts the next assignment.
func (h *host) accept1() *agentv1.Assignment {
	h.w.t.Helper()
	a := h.assignment("")
	h.accept(a)
	return a
}
