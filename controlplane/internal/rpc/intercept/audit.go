package intercept

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
)

const (
	coalesceFor  = time.Minute
	maxCoalesced = 1 << 14
)

// LogAuditor is an [Auditor] that writes to a log. Calls whose record is
// coalesced are written once a minute for each caller, method and outcome, with
// the number of those that were left out before.
type LogAuditor struct {
	log *slog.Logger

	mu    sync.Mutex
	calls map[auditKey]*auditCount
}

type auditKey struct {
	caller, method string
	code           codes.Code
}

type auditCount struct {
	since   time.Time
	skipped int
}

// NewLogAuditor returns an auditor that writes to log.
func NewLogAuditor(log *slog.Logger) *LogAuditor {
	return &LogAuditor{log: log, calls: make(map[auditKey]*auditCount)}
}

// Audit writes r, unless it is coalesced with one before.
func (a *LogAuditor) Audit(r Record) {
	skipped := 0
	if r.Audit == AuditCoalesced {
		var write bool
		if skipped, write = a.coalesce(r); !write {
			return
		}
	}
	level := slog.LevelInfo
	if r.Denied {
		level = slog.LevelWarn
	}
	a.log.Log(context.Background(), level, "audit", "method", r.Method, "caller", r.Caller.Name(), "addr", r.Caller.Addr,
		"code", r.Code.String(), "message", r.Message, "denied", r.Denied, "skipped", skipped)
}

func (a *LogAuditor) coalesce(r Record) (skipped int, write bool) {
	key := auditKey{caller: r.Caller.limitKey(), method: r.Method, code: r.Code}
	a.mu.Lock()
	defer a.mu.Unlock()
	c, ok := a.calls[key]
	if ok && r.Time.Sub(c.since) < coalesceFor {
		c.skipped++
		return 0, false
	}
	if !ok {
		if len(a.calls) >= maxCoalesced {
			a.sweep(r.Time)
		}
		c = new(auditCount)
		a.calls[key] = c
	}
	skipped = c.skipped
	c.since, c.skipped = r.Time, 0
	return skipped, true
}

// sweep makes room: first what is old goes, and then, so that a flood of new
// callers cannot fill the memory, all of it.
func (a *LogAuditor) sweep(now time.Time) {
	for k, c := range a.calls {
		if now.Sub(c.since) >= coalesceFor {
			delete(a.calls, k)
		}
	}
	if len(a.calls) >= maxCoalesced {
		clear(a.calls)
	}
}
