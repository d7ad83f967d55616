package dispatch

import (
	"context"
	"errors"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	auditv1 "github.com/gpuaas/millwright/proto/millwright/audit/v1"
	serverv1 "github.com/gpuaas/millwright/proto/millwright/server/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"

	"github.com/gpuaas/millwright/controlplane/internal/crash"
	"github.com/gpuaas/millwright/controlplane/internal/eventlog"
	"github.com/gpuaas/millwright/controlplane/internal/store"
)

const (
	// silentBeats is how many heartbeats a node may miss.
	silentBeats = 3
	// flushEvery is how often the last words of nodes are stored.
	flushEvery = 15 * time.Second
)

// Run sweeps over the sessions and the queue until ctx ends, and then waits for
// the receiving goroutines, whose streams must have been ended.
func (d *Dispatcher) Run(ctx context.Context) error {
	defer d.receivers.Wait()
	tick := time.NewTicker(d.cfg.Sweep)
	defer tick.Stop()
	flushed := d.cfg.Boot()
	jumped := jump{log: d.cfg.Logger}
	jumped.begin(d.cfg.Now(), d.lastEntry(ctx), d.cfg.Boot())
	for {
		select {
		case <-ctx.Done():
			// The words are worth a moment; what is not stored of them is told
			// by the next session.
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
			defer cancel()
			return d.flush(ctx)
		case <-tick.C:
		}
		now, boot := d.cfg.Now(), d.cfg.Boot()
		for _, s := range d.all() {
			d.sweep(s, now, boot)
		}
		if boot-flushed >= flushEvery {
			flushed = boot
			if err := d.flush(ctx); err != nil && !errors.Is(err, context.Canceled) {
				d.cfg.Logger.Error("last words of nodes not stored", "err", err)
			}
		}
		if jumped.holds(now, boot, d.agree) {
			continue
		}
		if err := d.expire(ctx, now); err != nil && !errors.Is(err, context.Canceled) {
			d.cfg.Logger.Error("expired tasks not stored", "err", err)
		}
	}
}

// sweep does for one session what is due at a time.
func (d *Dispatcher) sweep(s *session, now time.Time, boot time.Duration) {
	s.mu.Lock()
	silent := boot - s.heardAt
	beat := boot-s.lastSent >= d.cfg.Heartbeat
	retry := !s.retryAt.IsZero() && !now.Before(s.retryAt)
	s.mu.Unlock()
	switch {
	case !now.Before(s.peer.NotAfter):
		s.fail(status.Errorf(codes.Unauthenticated, "the certificate of the node ended at %s; connect again with a new one",
			s.peer.NotAfter.UTC().Format(time.RFC3339)))
	case silent > silentBeats*d.cfg.Heartbeat:
		s.fail(status.Errorf(codes.DeadlineExceeded, "nothing was heard for %s", silent.Round(time.Second)))
	case beat || retry:
		s.want(func() {
			s.beatDue = s.beatDue || beat
			if retry {
				s.assignDue, s.retryAt = true, time.Time{}
			}
		})
	}
}

// expire ends the queued tasks whose window has passed.
func (d *Dispatcher) expire(ctx context.Context, now time.Time) error {
	for {
		due := 0
		err := d.cfg.Reader.View(ctx, func(v store.View) error {
			rows, err := v.DueTasks(now, 1)
			due = len(rows)
			return err
		})
		if err != nil || due == 0 {
			return err
		}
		crash.Point("server.expire.before")
		err = d.cfg.Log.Commit(ctx, func(tx *eventlog.Tx) error {
			rows, err := tx.DueTasks(now, page)
			if err != nil {
				return err
			}
			for _, row := range rows {
				if err := tx.Append(d.cfg.Actor, &auditv1.LogEntry{Entry: &auditv1.LogEntry_TaskDecided{TaskDecided: &auditv1.TaskDecided{
					TaskId: row.GetTask().GetId(), Node: row.GetTask().GetNode(), State: taskv1.TaskState_TASK_STATE_EXPIRED,
					Reason: "WINDOW_PASSED", Message: "the node did not take it before its window ended; create it again with a longer one",
				}}}); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
		crash.Point("server.expire.committed")
	}
}

// flush stores when nodes were last heard: those that have a session, and those
// whose session has ended since.
func (d *Dispatcher) flush(ctx context.Context) error {
	var rows []*serverv1.SeenRow
	for _, s := range d.all() {
		rows = append(rows, s.seen())
	}
	d.mu.Lock()
	for _, row := range d.left {
		rows = append(rows, row)
	}
	d.left = map[string]*serverv1.SeenRow{}
	d.mu.Unlock()
	for some := range slices.Chunk(rows, page) {
		crash.Point("server.seen.before")
		err := d.cfg.Log.Commit(ctx, func(tx *eventlog.Tx) error {
			for _, row := range some {
				tx.PutSeen(row)
			}
			return nil
		})
		if err != nil {
			return err
		}
		crash.Point("server.seen.committed")
	}
	return nil
}
