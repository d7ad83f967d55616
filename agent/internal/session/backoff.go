package session

import "time"

const (
	firstPause = time.Second
	longPause  = time.Minute
	// steady is how long a session must have lasted for the pauses to begin
	// small again; else a server that drops each stream at once is hammered.
	steady = 10 * time.Second
	// longestAsked bounds what a server may ask for, so that a mistaken answer
	// does not silence a node for days.
	longestAsked = 15 * time.Minute
)

// backoff is exponential with full jitter, so that a fleet that lost its
// server does not come back on the same tick.
type backoff struct {
	attempt int
	jitter  func(time.Duration) time.Duration
}

func (b *backoff) reset() { b.attempt = 0 }

// next returns a pause between 0 and 1 s the first time, and at most 1 minute
// later on.
func (b *backoff) next() time.Duration {
	ceiling := longPause
	if b.attempt < 6 {
		ceiling = min(longPause, firstPause<<b.attempt)
		b.attempt++
	}
	return b.jitter(ceiling) + 1
}

// after returns a pause that is no shorter than what the server asked for.
func (b *backoff) after(asked time.Duration) time.Duration {
	return min(max(asked, 0), longestAsked) + b.next()
}
