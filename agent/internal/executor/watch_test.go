package executor_test

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/types/known/wrapperspb"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks/host"
)

// keptTask is a switch that is looked after while the agent runs.
type keptTask struct{ switchTask }

func (t keptTask) Lost(_ context.Context, _ host.Reader, spec *wrapperspb.StringValue) (bool, error) {
	_, names := words(spec)
	return t.w.get(names[0]) == 0, nil
}

// TestIntentsWatched turns switches off by hand: the one whose kind is looked
// after comes back within a minute, but not while a task has it; a restore that
// fails is tried ever more seldom.
func TestIntentsWatched(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.accept(0, "switch.keep", "@k1 a")
		n.ended(0)
		n.accept(1, "switch.on", "@k2 b")
		n.ended(1)
		<-time.After(10 * time.Minute) // nothing is lost, and nothing is done
		n.w.want(t, map[string]int{"a": 1, "b": 1})
		n.w.put("a", 0)
		n.w.put("b", 0)
		<-time.After(time.Minute)
		n.w.want(t, map[string]int{"a": 1})
		restored := 0
		for _, ev := range n.events() {
			if ev.GetIntentChanged().GetState() == taskv1.IntentState_INTENT_STATE_RESTORED {
				restored++
			}
		}
		if restored != 1 {
			t.Errorf("%d restores were told, want 1", restored)
		}
		// A task that has the lock is not disturbed.
		held := make(chan struct{})
		n.w.on("apply c", func(context.Context) error { <-held; return nil })
		n.accept(2, "switch.on", "@k1 c")
		<-time.After(time.Second)
		n.w.put("a", 0)
		<-time.After(5 * time.Minute)
		if n.w.get("a") != 0 {
			t.Error("a was restored while a task had its lock")
		}
		close(held)
		n.ended(2)
		// What cannot be restored is tried, and ever more seldom.
		n.accept(3, "switch.keep", "@k4 d")
		n.ended(3)
		var tried atomic.Int64
		n.w.on("apply d", func(context.Context) error { tried.Add(1); return errBoom })
		n.w.put("d", 0)
		<-time.After(10 * time.Minute)
		soon := tried.Load()
		<-time.After(50 * time.Minute)
		tries := tried.Load()
		if soon < 2 || soon > 6 || tries-soon < 1 || tries-soon > 4 {
			t.Errorf("%d tries in 10 minutes and %d in 50 more, want them ever more seldom", soon, tries-soon)
		}
		n.w.on("apply d", nil)
		<-time.After(2 * time.Hour)
		if n.w.get("d") != 1 {
			t.Error("d was not restored once it could be")
		}
	})
}
