package clock

import (
	"context"
	"time"
)

// SleepBy is [Sleep] by another clock.
func SleepBy(ctx context.Context, c Clock, d time.Duration) bool { return sleep(ctx, c, d, nil) }
