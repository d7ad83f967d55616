package executor

import (
	"context"
	"errors"
	"time"

	"github.com/gpuaas/millwright/agent/internal/clock"
	"github.com/gpuaas/millwright/agent/internal/state"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// watchEvery is the time between two looks at what intents want.
const watchEvery = 30 * time.Second

// waiting is an intent whose restore has failed, and waits for its next try.
type waiting struct {
	pause time.Duration
	until time.Duration // by CLOCK_BOOTTIME
}

// watch restores what intents want and what is lost while the agent runs, such
// as a mount that somebody has unmounted by hand. It never queues before a task,
// and tries again ever more seldom. It returns when ctx ends.
func (e *Executor) watch(ctx context.Context) {
	late := map[string]waiting{}
	for clock.Sleep(ctx, watchEvery) {
		keys, err := e.activeIntents()
		if err != nil {
			e.log.ErrorContext(ctx, "intents cannot be read", "err", err)
			continue
		}
		for _, key := range keys {
			if e.cfg.Clock.Boot() < late[key].until {
				continue
			}
			err := e.lookAfter(ctx, key)
			switch {
			case ctx.Err() != nil:
				return
			case err == nil:
				delete(late, key)
			case !errors.Is(err, errTaken):
				pause := min(max(2*late[key].pause, watchEvery), maxRestoreAgain)
				late[key] = waiting{pause, e.cfg.Clock.Boot() + pause}
				e.log.WarnContext(ctx, "intent is not restored", "intent", key, "again_in", pause, "err", err)
			}
		}
	}
}

func (e *Executor) activeIntents() (keys []string, err error) {
	err = e.cfg.Journal.View(func(tx *state.Tx) error {
		return tx.Intents(func(in *agentv1.IntentRecord) error {
			if in.GetState() == taskv1.IntentState_INTENT_STATE_ACTIVE {
				keys = append(keys, in.GetKey())
			}
			return nil
		})
	})
	return keys, err
}

// lookAfter restores one intent when what it wants is lost.
func (e *Executor) lookAfter(ctx context.Context, key string) error {
	t, adm, _, err := e.claim(ctx, key)
	if t == nil {
		return err
	}
	defer t.releaseLocks()
	if !adm.Kind.Watched() {
		return nil
	}
	limited, unlimit := context.WithTimeout(ctx, stepTimeout)
	defer unlimit()
	var lost bool
	err = t.check(limited, func() (err error) {
		lost, err = adm.Kind.Lost(limited, e.cfg.Hosts.Prober(), adm.Spec)
		return err
	})
	if err != nil || !lost {
		return err
	}
	t.log.WarnContext(ctx, "intent is lost, and is restored", "intent", key)
	done, err := e.restore(ctx, t)
	if err == nil && !done {
		err = errors.New(t.rec.GetMessage())
	}
	return err
}
