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
	// Open is how many streams may be open at once; 0 for none.
	Open int
}

// DefaultLimits are the limits of the product. They are wide for work and
// narrow for what a broken client repeats.
func DefaultLimits() map[Class]Limit {
	return map[Class]Limit{
		ClassSession: {PerSecond: 5, Burst: 30, Open: 64},
		ClassJoin:    {PerSecond: 10, Burst: 100},
		ClassRead:    {PerSecond: 500, Burst: 2000},
		ClassWrite:   {PerSecond: 200, Burst: 1000},
		ClassWatch:   {PerSecond: 50, Burst: 200, Open: 1000},
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
	buckets map[bucketKey]*bucket // guarded by mu
}

type bucketKey struct {
	class  Class
	caller string
}

type bucket struct {
	tokens  *rate.Limiter
	maxOpen int
	last    time.Time // guarded by limiter.mu
	open    int       // guarded by limiter.mu; streams
}

func newLimiter(limits map[Class]Limit) *limiter {
	return &limiter{limits: limits, buckets: make(map[bucketKey]*bucket)}
}

// take takes one token and returns the bucket that it came from, or nil and how
// long it takes until there is one. A class without a limit has no token.
func (l *limiter) take(class Class, caller string, now time.Time) (from *bucket, wait time.Duration) {
	limit, known := l.limits[class]
	if !known || limit.PerSecond <= 0 {
		return nil, time.Minute
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	b := l.bucket(bucketKey{class, caller}, limit, now)
	b.last = now
	if b.tokens.AllowN(now, 1) {
		return b, 0
	}
	return nil, time.Duration(float64(time.Second) / limit.PerSecond)
}

// open counts one more open stream of a caller, unless it has all that it may.
func (l *limiter) open(b *bucket) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if b.open >= b.maxOpen {
		return false
	}
	b.open++
	return true
}

// close takes back what open has counted.
func (l *limiter) close(b *bucket) {
	l.mu.Lock()
	defer l.mu.Unlock()
	b.open--
}

func (l *limiter) bucket(key bucketKey, limit Limit, now time.Time) *bucket {
	if b, ok := l.buckets[key]; ok {
		return b
	}
	if len(l.buckets) >= maxBuckets {
		for k, b := range l.buckets {
			if b.open == 0 && now.Sub(b.last) > bucketIdle {
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
	b := &bucket{tokens: rate.NewLimiter(rate.Limit(limit.PerSecond), limit.Burst), maxOpen: limit.Open}
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
