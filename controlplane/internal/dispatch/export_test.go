package dispatch

import (
	"log/slog"
	"time"
)

// Jump is [jump].
type Jump struct{ jump }

// NewJump returns a jump that has begun.
func NewJump(log *slog.Logger, now, last time.Time, boot time.Duration) *Jump {
	j := &Jump{jump{log: log}}
	j.begin(now, last, boot)
	return j
}

// Holds is [jump.holds].
func (j *Jump) Holds(now time.Time, boot time.Duration, agree func(time.Duration) (yes, no int)) bool {
	return j.holds(now, boot, agree)
}
