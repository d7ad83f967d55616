package intercept

import (
	"fmt"
	"sync"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
)

// Limit is how often one caller may call the RPCs of a class.
type Limit struct {
	// PerSecond is the sustained rate.
	PerSecond float64
	// Burst is how many may come at once.
	Burst int
}

// DefaultLimits are the limits of the product. They are wide for work and
// narrow for what a broken client repeats.
func DefaultLimits() map[Class]Limit {
	return map[Class]Limit{
		ClassSession: {PerSecond: 5, Burst: 30},
		ClassJoin:    {PerSecond: 10, Burst: 100},
		ClassRead:    {PerSecond: 500, Burst: 2000},
		ClassWrite:   {PerSecond: 200, Burst: 1000},
		ClassWatch:   {PerSecond: 50, Burst: 200},
	}
}

const (
	maxBuckets = 1 << 16
	bucketIdle = 5 * time.Minute
)

// limiter keeps a token bucket for each class and caller, and a bounded number
// of them: callers beyond it share one for each class.
type limiter struct {
	limits map[Class]Limit

	mu      sync.Mutex
	buckets map[bucketKey]*bucket
}

type bucketKey struct {
	class  Class
	caller string
}

type bucket struct {
	tokens *rate.Limiter
	last   time.Time
}

func newLimiter(limits map[Class]Limit) *limiter {
	return &limiter{limits: limits, buckets: make(map[bucketKey]*bucket)}
}

// take takes one token, or says how long it takes until there is one. A class
// without a limit has no token.
func (l *limiter) take(class Class, caller string, now time.Time) (wait time.Duration, ok bool) {
	limit, known := l.limits[class]
	if !known || limit.PerSecond <= 0 {
		return time.Minute, false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	b := l.bucket(bucketKey{class, caller}, limit, now)
	b.last = now
	if b.tokens.AllowN(now, 1) {
		return 0, true
	}
	return time.Duration(float64(time.Second) / limit.PerSecond), false
}

func (l *limiter) bucket(key bucketKey, limit Limit, now time.Time) *bucket {
	if b, ok := l.buckets[key]; ok {
		return b
	}
	if len(l.buckets) >= maxBuckets {
		for k, b := range l.buckets {
			if now.Sub(b.last) > bucketIdle {
				delete(l.buckets, k)
			}
		}
	}
	if len(l.buckets) >= maxBuckets {
		key.caller = ""
		if b, ok := l.buckets[key]; ok {
			return b
		}
	}
	b := &bucket{tokens: rate.NewLimiter(rate.Limit(limit.PerSecond), limit.Burst)}
	l.buckets[key] = b
	return b
}

// exhausted is the answer to a caller that calls too often.
func exhausted(class Class, wait time.Duration) error {
	st := status.New(codes.ResourceExhausted, fmt.Sprintf("too many calls of the class %s: wait %s", class, wait))
	if with, err := st.WithDetails(&errdetails.RetryInfo{RetryDelay: durationpb.New(wait)}); err == nil {
		st = with
	}
	return st.Err()
}
