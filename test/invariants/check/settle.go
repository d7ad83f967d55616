package check

import (
	"context"
	"fmt"
	"time"
)

// Expected is a violation that a test causes on purpose.
type Expected struct {
	// Invariant is what it breaks.
	Invariant string
	// Node is where; empty: anywhere.
	Node string
	// Why it is no fault.
	Why string
}

// Judge splits violations into those that nobody expected, and returns the
// expectations that nothing met: they are stale.
func Judge(found []Violation, expected []Expected) (unexpected []Violation, stale []Expected) {
	met := make([]bool, len(expected))
	for _, v := range found {
		known := false
		for i, e := range expected {
			if e.Invariant == v.Invariant && (e.Node == "" || e.Node == v.Node) {
				met[i], known = true, true
			}
		}
		if !known {
			unexpected = append(unexpected, v)
		}
	}
	for i, e := range expected {
		if !met[i] {
			stale = append(stale, e)
		}
	}
	return unexpected, stale
}

// again is the pause between two looks.
const again = 200 * time.Millisecond

// Settle collects the history again and again until only what is expected is
// wrong with it, at most for limit: that is the bounded time after which all is
// quiet. What is still wrong then is the error.
func Settle(ctx context.Context, limit time.Duration, expected []Expected, collect func(context.Context) (*History, error)) error {
	deadline := time.NewTimer(limit)
	defer deadline.Stop()
	tick := time.NewTicker(again)
	defer tick.Stop()
	for {
		problem := look(ctx, expected, collect)
		if problem == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", context.Cause(ctx), problem)
		case <-deadline.C:
			return fmt.Errorf("after %v: %w", limit, problem)
		case <-tick.C:
		}
	}
}

// Broken is the error of a history with violations.
type Broken struct {
	Unexpected []Violation
	Stale      []Expected
}

// Error lists all of them.
func (b *Broken) Error() string {
	text := "invariants do not hold:"
	for _, v := range b.Unexpected {
		text += "\n  " + v.String()
	}
	for _, e := range b.Stale {
		text += fmt.Sprintf("\n  expected and not found: %s on %q (%s)", e.Invariant, e.Node, e.Why)
	}
	return text
}

func look(ctx context.Context, expected []Expected, collect func(context.Context) (*History, error)) error {
	h, err := collect(ctx)
	if err != nil {
		return fmt.Errorf("collect the histories: %w", err)
	}
	unexpected, stale := Judge(Check(h), expected)
	if len(unexpected)+len(stale) > 0 {
		return &Broken{unexpected, stale}
	}
	return nil
}
