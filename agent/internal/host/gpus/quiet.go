package gpus

import (
	"context"
	"sync"
	"time"
)

// quiet keeps the program that samples away while GPUs are changed, and a moment
// longer.
type quiet struct {
	quiesce func(ctx context.Context) (resume func(), err error)

	mu     sync.Mutex
	resume func()      // set while it is away; guarded by mu
	timer  *time.Timer // will let it come back; guarded by mu
}

// begin ends the program and keeps it ended.
func (q *quiet) begin(ctx context.Context) error {
	if q.quiesce == nil {
		return nil
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.timer != nil {
		q.timer.Stop()
		q.timer = nil
	}
	if q.resume != nil {
		return nil
	}
	resume, err := q.quiesce(ctx)
	q.resume = resume
	return err
}

// over lets it come back after a while, unless begin is called before.
func (q *quiet) over(after time.Duration) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.resume == nil {
		return
	}
	var mine *time.Timer
	mine = time.AfterFunc(after, func() {
		q.mu.Lock()
		defer q.mu.Unlock()
		if q.timer == mine {
			q.leave()
		}
	})
	q.timer = mine
}

// end lets it come back now.
func (q *quiet) end() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.leave()
}

func (q *quiet) leave() {
	if q.timer != nil {
		q.timer.Stop()
	}
	if q.resume != nil {
		q.resume()
	}
	q.resume, q.timer = nil, nil
}
