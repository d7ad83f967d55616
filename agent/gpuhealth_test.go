package agent

import (
	"errors"
	"log/slog"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/millwright/agent/internal/clock"
	gpuhealth "github.com/gpuaas/millwright/agent/internal/health"
	"github.com/gpuaas/millwright/agent/internal/state"
	healthv1 "github.com/gpuaas/millwright/proto/millwright/health/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// TestTell has edges written to a real journal whose disk refuses before the
// commit, and whose agent dies behind it: an edge is numbered and remembered, or
// neither, also for the next life.
func TestTell(t *testing.T) {
	boom := errors.New("boom")
	refuse := map[bool]bool{}
	cfg := state.Config{
		Dir: t.TempDir(), Node: "gpu-001", Generation: 1, BootID: "boot-a", Clock: clock.System{}, Logger: slog.New(slog.DiscardHandler),
		JustJoined: true, JoinFloor: time.Now(), Results: -1,
		Guard: func(written bool) error {
			if refuse[written] {
				return boom
			}
			return nil
		},
	}
	var n *node
	open := func() {
		if n != nil {
			if err := n.store.Close(); err != nil && !errors.Is(err, boom) {
				t.Fatal(err)
			}
		}
		s, err := state.Open(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		n, cfg.JustJoined = &node{store: s}, false
	}
	open()
	defer func() { _ = n.store.Close() }()
	edge := func(key string, number uint64) *healthv1.HealthEdge {
		return &healthv1.HealthEdge{Condition: &healthv1.Condition{Key: key, State: healthv1.State_STATE_RAISED}, Edge: number}
	}
	for _, tc := range []struct {
		key     string
		refused map[bool]bool
		durable bool
	}{
		{"gpu.lost/GPU-a", nil, true},
		{"gpu.lost/GPU-b", map[bool]bool{false: true}, false},
		{"gpu.lost/GPU-c", map[bool]bool{true: true}, true},
	} {
		refuse = tc.refused
		err := edges{n}.Tell(gpuhealth.Change{Edges: []*healthv1.HealthEdge{edge(tc.key, 1)}, Cursor: gpuhealth.Cursor{BootID: tc.key, Sequence: 7}})
		if (err == nil) != (tc.refused == nil) {
			t.Fatalf("%s: %v", tc.key, err)
		}
		refuse = nil
		open()
		known, err := edges{n}.Known()
		if err != nil {
			t.Fatal(err)
		}
		remembered := false
		for _, e := range known.Edges {
			remembered = remembered || proto.Equal(e, edge(tc.key, 1))
		}
		if told := framesOf(t, n, tc.key); remembered != tc.durable || (told == 1) != tc.durable || told > 1 || (known.Cursor.BootID == tc.key) != tc.durable {
			t.Errorf("%s: remembered %v, %d frames, cursor %v", tc.key, remembered, told, known.Cursor)
		}
	}
	gone := edge("gpu.lost/GPU-a", 2)
	gone.Forgotten = true
	if err := (edges{n}).Tell(gpuhealth.Change{Edges: []*healthv1.HealthEdge{gone}}); err != nil {
		t.Fatal(err)
	}
	known, err := edges{n}.Known()
	if err != nil || len(known.Edges) != 1 || framesOf(t, n, "gpu.lost/GPU-a") != 2 {
		t.Errorf("%v, %v", known, err)
	}
}

// framesOf counts the frames of the journal about a condition.
func framesOf(t *testing.T, n *node, key string) (count int) {
	t.Helper()
	err := n.store.View(func(tx *state.Tx) error {
		frames, _, err := tx.Frames(0, 1000)
		for _, f := range frames {
			ev := new(taskv1.Event)
			if err := proto.Unmarshal(f, ev); err != nil {
				return err
			}
			if ev.GetHealth().GetCondition().GetKey() == key {
				count++
			}
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return count
}
