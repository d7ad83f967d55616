// Package storetest is what every store must do. A store's own test calls
// [Run].
package storetest

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/timestamppb"

	serverv1 "github.com/gpuaas/millwright/proto/millwright/server/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"

	"github.com/gpuaas/millwright/controlplane/internal/store"
)

// Store is what the suite needs of a store.
type Store interface {
	store.Writer
	store.Reader
}

// Opener opens an empty store whose writer runs. Reopen closes it and opens it
// again on the same data.
type Opener func(t *testing.T) (s Store, reopen func() Store)

// Run runs the suite.
func Run(t *testing.T, open Opener) {
	for name, test := range map[string]func(*testing.T, Opener){
		"Log":          testLog,
		"LogRefuses":   testLogRefuses,
		"Atomic":       testAtomic,
		"Serial":       testSerial,
		"Rows":         testRows,
		"TaskIndexes":  testTaskIndexes,
		"ListTasks":    testListTasks,
		"Nodes":        testNodes,
		"Frames":       testFrames,
		"Health":       testHealth,
		"Durable":      testDurable,
		"Generation":   testGeneration,
		"DecisionView": testDecisionView,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, open)
		})
	}
}

func update(t *testing.T, s Store, c *store.Change) {
	t.Helper()
	if err := s.Update(t.Context(), func(store.View) (*store.Change, error) { return c, nil }); err != nil {
		t.Fatalf("Update: %v", err)
	}
}

func view(t *testing.T, s Store, read func(store.View)) {
	t.Helper()
	if err := s.View(t.Context(), func(v store.View) error {
		read(v)
		return nil
	}); err != nil {
		t.Fatalf("View: %v", err)
	}
}

func check[V any](t *testing.T, what string, got V, err error, want V) {
	t.Helper()
	if err != nil {
		t.Errorf("%s: %v", what, err)
	} else if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
		t.Errorf("%s (-want +got):\n%s", what, diff)
	}
}

func notFound(t *testing.T, what string, err error) {
	t.Helper()
	if !errors.Is(err, store.ErrNotFound) {
		t.Errorf("%s: %v, want ErrNotFound", what, err)
	}
}

func entry(index uint64, task string) store.Entry {
	e := store.Entry{Index: index, Bytes: fmt.Appendf(nil, "entry %d", index)}
	if task != "" {
		e.Event = &taskv1.TaskEvent{Index: index, TaskId: task}
	}
	return e
}

// task is the row of a task that was created at an index.
func task(id, node string, index uint64, state taskv1.TaskState) *serverv1.TaskRow {
	return &serverv1.TaskRow{Task: &taskv1.Task{
		Id: id, Node: node, CreateIndex: index, State: state, Kind: "system.command",
		CreateTime: timestamppb.New(time.Unix(int64(index), 0)), NotAfter: timestamppb.New(time.Unix(1000+int64(index), 0)),
	}}
}

func ids(rows []*serverv1.TaskRow) []string {
	var out []string
	for _, r := range rows {
		out = append(out, r.GetTask().GetId())
	}
	return out
}

func testLog(t *testing.T, open Opener) {
	s, _ := open(t)
	view(t, s, func(v store.View) {
		if v.LastIndex() != 0 || v.Generation() != 1 {
			t.Errorf("an empty log ends at %d, generation %d", v.LastIndex(), v.Generation())
		}
		got, err := v.Entries(1, 10, 1000)
		check(t, "Entries of an empty log", got, err, nil)
	})
	update(t, s, &store.Change{Entries: []store.Entry{entry(1, "a"), entry(2, "b"), entry(3, "a")}})
	update(t, s, &store.Change{Entries: []store.Entry{entry(4, "")}})
	view(t, s, func(v store.View) {
		if v.LastIndex() != 4 {
			t.Errorf("LastIndex = %d, want 4", v.LastIndex())
		}
		for _, c := range []struct {
			from            uint64
			limit, maxBytes int
			want            []store.Entry
		}{
			{1, 10, 1000, []store.Entry{entry(1, "a"), entry(2, "b"), entry(3, "a"), entry(4, "")}},
			{0, 1, 1000, []store.Entry{entry(1, "a")}},
			{3, 10, 1000, []store.Entry{entry(3, "a"), entry(4, "")}},
			{1, 10, 1, []store.Entry{entry(1, "a")}},
			{5, 10, 1000, nil},
		} {
			got, err := v.Entries(c.from, c.limit, c.maxBytes)
			check(t, fmt.Sprintf("Entries(%d, %d, %d)", c.from, c.limit, c.maxBytes), got, err, c.want)
		}
		got, err := v.TaskEntries("a", 0, 10, 1000)
		check(t, "TaskEntries", got, err, []store.Entry{entry(1, "a"), entry(3, "a")})
		got, err = v.TaskEntries("a", 2, 10, 1000)
		check(t, "TaskEntries from 2", got, err, []store.Entry{entry(3, "a")})
	})
}

func testLogRefuses(t *testing.T, open Opener) {
	s, _ := open(t)
	update(t, s, &store.Change{Entries: []store.Entry{entry(1, "")}})
	for name, c := range map[string]*store.Change{
		"a gap":               {Entries: []store.Entry{entry(3, "")}},
		"an index twice":      {Entries: []store.Entry{entry(1, "")}},
		"no bytes":            {Entries: []store.Entry{{Index: 2}}},
		"a second in a gap":   {Entries: []store.Entry{entry(2, ""), entry(4, "")}},
		"a task without id":   {Tasks: []*serverv1.TaskRow{task("", "n", 1, taskv1.TaskState_TASK_STATE_QUEUED)}},
		"a task before all":   {Tasks: []*serverv1.TaskRow{task("x", "n", 0, taskv1.TaskState_TASK_STATE_QUEUED)}},
		"a zero byte in name": {Nodes: []*serverv1.NodeRow{{Name: "a\x00b"}}},
		"a short token hash":  {Tokens: []*serverv1.TokenRow{{TokenSha256: []byte("x")}}},
	} {
		if err := s.Update(t.Context(), func(store.View) (*store.Change, error) { return c, nil }); err == nil {
			t.Errorf("%s was taken", name)
		}
	}
	view(t, s, func(v store.View) {
		if v.LastIndex() != 1 {
			t.Errorf("LastIndex = %d after refusals, want 1", v.LastIndex())
		}
	})
}

var errRefused = errors.New("refused")

func testAtomic(t *testing.T, open Opener) {
	s, _ := open(t)
	err := s.Update(t.Context(), func(store.View) (*store.Change, error) {
		return &store.Change{Nodes: []*serverv1.NodeRow{{Name: "n"}}}, errRefused
	})
	if !errors.Is(err, errRefused) {
		t.Errorf("Update = %v, want the decision's own error", err)
	}
	err = s.Update(t.Context(), func(store.View) (*store.Change, error) {
		return &store.Change{Nodes: []*serverv1.NodeRow{{Name: "n"}}, Entries: []store.Entry{entry(7, "")}}, nil
	})
	if err == nil {
		t.Error("a change with a bad entry was taken")
	}
	err = s.Update(t.Context(), func(store.View) (*store.Change, error) { panic("at the disco") })
	if err == nil {
		t.Error("a decision that panics returned no error")
	}
	view(t, s, func(v store.View) {
		_, err := v.Node("n")
		notFound(t, "a node of refused changes", err)
	})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.Update(ctx, func(store.View) (*store.Change, error) { return nil, nil }); !errors.Is(err, context.Canceled) {
		t.Errorf("Update with a context that has ended = %v", err)
	}
}

func testSerial(t *testing.T, open Opener) {
	const writers, each = 16, 25
	s, _ := open(t)
	t.Run("writers", func(t *testing.T) {
		for range writers {
			t.Run("", func(t *testing.T) {
				t.Parallel()
				for range each {
					err := s.Update(t.Context(), func(v store.View) (*store.Change, error) {
						return &store.Change{Entries: []store.Entry{entry(v.LastIndex()+1, "")}}, nil
					})
					if err != nil {
						t.Errorf("Update: %v", err)
					}
				}
			})
		}
	})
	view(t, s, func(v store.View) {
		got, err := v.Entries(1, 10_000, 1<<20)
		if err != nil || len(got) != writers*each {
			t.Errorf("%d entries, %v; want %d", len(got), err, writers*each)
		}
	})
}

func testDecisionView(t *testing.T, open Opener) {
	s, _ := open(t)
	update(t, s, &store.Change{Nodes: []*serverv1.NodeRow{{Name: "n", BootId: "1"}}})
	err := s.Update(t.Context(), func(v store.View) (*store.Change, error) {
		row, err := v.Node("n")
		if err != nil {
			return nil, err
		}
		row.BootId = "2" // what a view returns is the caller's own
		again, err := v.Node("n")
		if err == nil && again.GetBootId() != "1" {
			t.Error("two reads share memory")
		}
		return nil, err
	})
	if err != nil {
		t.Fatal(err)
	}
	view(t, s, func(v store.View) {
		row, err := v.Node("n")
		check(t, "Node", row, err, &serverv1.NodeRow{Name: "n", BootId: "1"})
	})
}
