package tasks

import "time"

// Limiter is a step that knows how long one attempt may take.
type Limiter interface {
	// Timeout is that time.
	Timeout() time.Duration
}
