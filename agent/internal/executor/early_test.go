package executor_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

func (n *node) restored(key string) time.Time {
	n.t.Helper()
	n.until(func(ev *taskv1.Event) bool {
		c := ev.GetIntentChanged()
		return c.GetState() == taskv1.IntentState_INTENT_STATE_RESTORED && c.GetKey() == key
	})
	return time.Now()
}

// TestEarlyIntents: after a boot an intent whose goal does not come back by itself
// is restored at once, also where its key comes last; the others are given time.
func TestEarlyIntents(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		for i, kind := range []string{"switch.on", "switch.early"} {
			n.accept(i, kind, []string{"@k1 a", "@k2 b"}[i])
			n.ended(i)
		}
		n.halt()
		n.w.put("a", 0)
		n.w.put("b", 0)
		n.boot = "boot-2"
		n.open()
		booted := time.Now()
		n.start()
		if took := n.restored("k2").Sub(booted); took > time.Second {
			t.Errorf("the early one came back after %v", took)
		}
		if n.w.get("a") != 0 {
			t.Error("the other one was given no time to come back by itself")
		}
		if took := n.restored("k1").Sub(booted); took < 2*time.Minute {
			t.Errorf("the other one was restored after %v", took)
		}
	})
}

// TestEarlyIntentHangs: one that hangs, as a driver may, keeps no task from running
// and no other intent from its turn.
func TestEarlyIntentHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.accept(1, "switch.on", "@k1 a")
		n.ended(1)
		n.accept(2, "switch.early", "@k2 b")
		n.ended(2)
		n.halt()
		n.w.put("a", 0)
		n.w.put("b", 0)
		n.w.on("check k2", func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() })
		n.boot = "boot-2"
		n.open()
		booted := time.Now()
		n.start()
		n.accept(3, "switch.on", "@k3 c")
		want(t, n.ended(3), succeeded, noUndo, "")
		if took := time.Since(booted); took > time.Second {
			t.Errorf("a task took %v while an intent hangs", took)
		}
		n.restored("k1")
		n.w.on("check k2", nil)
		n.restored("k2")
	})
}

// TestEarlyIntentsAreTold: who waits for the early intents at boot is told once
// they are back, not before, and also by an agent that is started again.
func TestEarlyIntentsAreTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.accept(1, "switch.on", "@k1 a")
		n.ended(1)
		n.accept(2, "switch.early", "@k2 b")
		n.ended(2)
		n.halt()
		n.w.put("a", 0)
		n.w.put("b", 0)
		var told []int
		n.early = func() { told = append(told, n.w.get("b")) }
		n.w.on("check k2", func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() })
		n.boot = "boot-2"
		n.open()
		n.start()
		synctest.Wait()
		if len(told) > 0 {
			t.Error("they were told while the early one hangs")
		}
		n.w.on("check k2", nil)
		n.restored("k2")
		synctest.Wait()
		if len(told) != 1 || told[0] == 0 {
			t.Errorf("told at %v, want once, when it was back", told)
		}
		n.restored("k1")
		n.halt()
		n.open()
		n.start()
		synctest.Wait()
		if len(told) != 2 {
			t.Errorf("told %d times, want a second time by the agent that was started again", len(told))
		}
	})
}
