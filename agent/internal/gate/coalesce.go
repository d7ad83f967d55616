package gate

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/gpuaas/millwright/agent/internal/clock"
)

// quietFor is how long a reason is not logged again.
const quietFor = time.Minute

// coalescer logs each reason at most once a minute, with the number of those
// that it left out, so that garbage fills no disk.
type coalescer struct {
	log   *slog.Logger
	clock clock.Clock

	mu      sync.Mutex
	reasons map[string]*quiet // by reason, of which there are few; guarded by mu
}

type quiet struct {
	since time.Duration
	left  int
}

func newCoalescer(log *slog.Logger, c clock.Clock) *coalescer {
	return &coalescer{log: log, clock: c, reasons: map[string]*quiet{}}
}

func (c *coalescer) said(ctx context.Context, err error) {
	reason, refused := reasonOf(err)
	c.mu.Lock()
	defer c.mu.Unlock()
	now := c.clock.Boot()
	q := c.reasons[reason]
	if q != nil && now-q.since < quietFor {
		q.left++
		return
	}
	left := 0
	if q != nil {
		left = q.left
	}
	c.reasons[reason] = &quiet{since: now}
	if refused {
		c.log.WarnContext(ctx, "task refused", "reason", reason, "err", err, "not_logged_before", left)
		return
	}
	c.log.WarnContext(ctx, "task deferred", "reason", reason, "err", err, "not_logged_before", left)
}

func reasonOf(err error) (reason string, refused bool) {
	var r *Refusal
	if errors.As(err, &r) {
		return r.Reason, true
	}
	var d *Deferral
	if errors.As(err, &d) {
		return d.Reason, false
	}
	return "", true
}
