package executor_test

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/millwright/agent/internal/executor"
	"github.com/gpuaas/millwright/agent/internal/gate"
	"github.com/gpuaas/millwright/agent/internal/state"
	"github.com/gpuaas/millwright/pki/envelope"
	"github.com/gpuaas/millwright/pki/trustroot"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/all"
)

var t0 = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// testClock goes on with the machine from t0, and can be moved.
type testClock struct {
	mu    sync.Mutex
	begun time.Time
	off   time.Duration // guarded by mu
}

func newClock() *testClock { return &testClock{begun: time.Now()} }

func (c *testClock) Boot() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return time.Since(c.begun) + c.off
}

func (c *testClock) Now() time.Time { return t0.Add(c.Boot()) }

func (c *testClock) move(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.off += d
}

// memoryDir is a directory in memory, where there is one: what is durable is
// tested by package state, and thousands of flushes take minutes.
func memoryDir(t testing.TB) string {
	t.Helper()
	const shm = "/dev/shm"
	if info, err := os.Stat(shm); err != nil || !info.IsDir() {
		return t.TempDir()
	}
	dir, err := os.MkdirTemp(shm, "millwright-executor-") //nolint:usetesting // t.TempDir is on the disk
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Errorf("remove %s: %v", dir, err)
		}
	})
	return dir
}

func openStore(t testing.TB, dir, boot string, clock *testClock) *state.Store {
	t.Helper()
	s, err := state.Open(t.Context(), state.Config{
		Dir: dir, Node: "gpu-001", Generation: 1, BootID: boot, Clock: clock,
		Logger: discard(), JustJoined: true, JoinFloor: t0.Add(-time.Hour),
		Results: -1, // it is in memory
	})
	if err != nil {
		t.Fatalf("open state: %v", err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Errorf("close state: %v", err)
		}
	})
	return s
}

// openGate lets everything through that can be decoded; package gate has its
// own tests.
type openGate struct{ reg *tasks.Registry }

func (g openGate) Admit(_ context.Context, env *taskv1.Envelope, signed *taskv1.SignedLeaf) (*gate.Admission, error) {
	leaf, set := new(taskv1.TaskLeaf), new(taskv1.TaskSet)
	if err := errors.Join(proto.Unmarshal(signed.GetLeaf(), leaf), proto.Unmarshal(env.GetPayload(), set)); err != nil {
		return nil, &gate.Refusal{Reason: "MALFORMED", Message: err.Error()}
	}
	kind, err := g.reg.Kind(leaf.GetKind())
	if err != nil {
		return nil, &gate.Refusal{Reason: gate.ReasonUnknownKind, Message: err.Error()}
	}
	spec, err := kind.DecodeSpec(leaf.GetRevision(), leaf.GetSpec())
	if err != nil {
		return nil, &gate.Refusal{Reason: gate.ReasonSpecInvalid, Message: err.Error()}
	}
	return &gate.Admission{
		Verified: trustroot.Verified{
			VerifiedSet: trustroot.VerifiedSet{
				TaskSet: set, RootVersion: 1,
				Authorizers: []*taskv1.Authorizer{{KeyId: "key", Name: "alice", Role: taskv1.KeyRole_KEY_ROLE_OPERATOR}},
			},
			Leaf: leaf, LeafHash: envelope.LeafHash(signed.GetLeaf()),
		},
		Kind: kind, Spec: spec,
	}, nil
}

func (g openGate) Start(ctx context.Context, env *taskv1.Envelope, signed *taskv1.SignedLeaf) (*gate.Admission, error) {
	return g.Admit(ctx, env, signed)
}

func (g openGate) Restore(ctx context.Context, env *taskv1.Envelope, signed *taskv1.SignedLeaf, _ uint64) (*gate.Admission, error) {
	return g.Admit(ctx, env, signed)
}

// assignment is a task as the server sends it. Its signature is not looked at
// here.
func assignment(id, kind string, spec proto.Message, change ...func(*taskv1.TaskLeaf)) *agentv1.Assignment {
	b, err := proto.Marshal(spec)
	if err != nil {
		panic(err)
	}
	revision := uint32(1)
	if k, err := all.Registry().Kind(kind); err == nil {
		revision = k.Needs(spec)
	}
	leaf := &taskv1.TaskLeaf{
		TaskId: id, Node: "gpu-001", Mode: taskv1.Mode_MODE_EXECUTE, Kind: kind, Revision: revision, Spec: b,
		AllowedImpact: []taskv1.Impact{taskv1.Impact_IMPACT_DRAIN, taskv1.Impact_IMPACT_SERVICE_RESTART, taskv1.Impact_IMPACT_GPU_RESET, taskv1.Impact_IMPACT_REBOOT},
	}
	for _, f := range change {
		f(leaf)
	}
	leafBytes, err := proto.Marshal(leaf)
	if err != nil {
		panic(err)
	}
	set, err := proto.Marshal(&taskv1.TaskSet{
		IssuedAt: timestamppb.New(t0), NotBefore: timestamppb.New(t0), NotAfter: timestamppb.New(t0.Add(24 * time.Hour)), Size: 1,
	})
	if err != nil {
		panic(err)
	}
	return &agentv1.Assignment{
		AssignmentId: "assignment-" + id, Envelope: &taskv1.Envelope{Payload: set}, SignedLeaf: &taskv1.SignedLeaf{Leaf: leafBytes},
	}
}

// runExecutor runs e until the function it returns is called, which waits for
// its end.
func runExecutor(ctx context.Context, e *executor.Executor) (stop func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	var wg sync.WaitGroup
	wg.Go(func() { _ = e.Run(ctx) })
	return func() {
		cancel(nil)
		wg.Wait()
	}
}

// waitEnded waits until the task has ended or is held.
func waitEnded(ctx context.Context, s *state.Store, id string) error {
	return waitEvent(ctx, s, func(ev *taskv1.Event) bool {
		return ev.GetFinished().GetTaskId() == id || ev.GetHeld().GetTaskId() == id
	})
}

// waitEvent waits until the journal has an event.
func waitEvent(ctx context.Context, s *state.Store, match func(*taskv1.Event) bool) error {
	for after := uint64(0); ; {
		_, frames, _, err := s.NextFrames(ctx, after, 100)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err != nil {
			return err
		}
		for _, f := range frames {
			ev := new(taskv1.Event)
			if err := proto.Unmarshal(f, ev); err != nil {
				return err
			}
			if after = ev.GetSeq(); match(ev) {
				return nil
			}
		}
	}
}

func discard() *slog.Logger { return slog.New(slog.DiscardHandler) }
