// Package health says what is wrong with the GPUs of a node: conditions with
// their severity, what they mean and what to do, from what the driver says when
// asked and by itself, and from the kernel's log. Nothing here changes a GPU: an
// action is a recommendation.
//
// What cannot be known is unknown, what is no longer known is stale, and neither
// is ever taken for well.
package health

import (
	"fmt"
	"strings"
	"time"

	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
	healthv1 "github.com/gpuaas/millwright/proto/millwright/health/v1"
)

// The states, severities and actions under short names.
const (
	ok      = healthv1.State_STATE_OK
	raised  = healthv1.State_STATE_RAISED
	unknown = healthv1.State_STATE_UNKNOWN
	stale   = healthv1.State_STATE_STALE

	info     = healthv1.Severity_SEVERITY_INFO
	warning  = healthv1.Severity_SEVERITY_WARNING
	degraded = healthv1.Severity_SEVERITY_DEGRADED
	fatal    = healthv1.Severity_SEVERITY_FATAL

	none          = healthv1.Action_ACTION_NONE
	resetWhenIdle = healthv1.Action_ACTION_RESET_WHEN_IDLE
	resetGPU      = healthv1.Action_ACTION_RESET_GPU
	reboot        = healthv1.Action_ACTION_REBOOT
	hold          = healthv1.Action_ACTION_HOLD
	replace       = healthv1.Action_ACTION_REPLACE
	support       = healthv1.Action_ACTION_CONTACT_SUPPORT
	hardware      = healthv1.Action_ACTION_CHECK_HARDWARE
	cooling       = healthv1.Action_ACTION_CHECK_COOLING
	power         = healthv1.Action_ACTION_CHECK_POWER
	mend          = healthv1.Action_ACTION_MEND_CONFIGURATION
	reload        = healthv1.Action_ACTION_RELOAD_DRIVER
)

// Rule is what a condition is. Of one that has no judge the code is its only
// tie to what raises it.
type Rule struct {
	// Code is its name.
	Code string
	// Severity and Action are those while it holds, unless what was seen says
	// otherwise.
	Severity healthv1.Severity
	Action   healthv1.Action
	// Title and Meaning are for people.
	Title, Meaning string
	// Threshold is when it is raised, for people.
	Threshold string

	slow  bool // judged by what only a slow sample has
	judge func(*view) finding
}

// finding is what a judge found.
type finding struct {
	state    healthv1.State
	reason   string
	message  string
	severity healthv1.Severity // 0: the rule's
	action   healthv1.Action   // 0: the rule's
	source   healthv1.Source   // 0: the driver
	details  []string          // name, value, name, value
	keep     bool              // it could not be looked at this time: what was found last counts
}

func well() finding { return finding{state: ok, reason: "WITHIN_LIMITS"} }

func raise(reason, format string, args ...any) finding {
	return finding{state: raised, reason: reason, message: fmt.Sprintf(format, args...)}
}

func (f finding) as(s healthv1.Severity, a healthv1.Action) finding {
	f.severity, f.action = s, a
	return f
}

func (f finding) with(details ...any) finding {
	for _, d := range details {
		f.details = append(f.details, fmt.Sprint(d))
	}
	return f
}

// when is raised with the words if it holds.
func when(holds bool, reason, format string, args ...any) finding {
	if holds {
		return raise(reason, format, args...)
	}
	return well()
}

// view is one GPU at one time.
type view struct {
	now    *gpuv1.GpuSample
	of     *gpuv1.Gpu // what it is; empty while not known
	gpu    *gpuState
	links  bool // some GPU of the node has a link that is up
	at     time.Duration
	period time.Duration
}

// cannot is the finding on a value that is not set: why the driver cannot say.
func (v *view) cannot(fields ...string) finding {
	for _, name := range fields {
		for _, u := range v.now.GetUnknown() {
			if u.GetField() == name {
				return missing(u)
			}
		}
	}
	return finding{state: unknown, reason: "NOT_READ", message: "the value was not read: " + strings.Join(fields, ", ")}
}

func missing(u *gpuv1.Unknown) finding {
	reason := strings.TrimPrefix(u.GetReason().String(), "UNKNOWN_REASON_")
	words := map[gpuv1.UnknownReason]string{
		gpuv1.UnknownReason_UNKNOWN_REASON_NOT_SUPPORTED:  "this GPU, as it is configured now, has no such value",
		gpuv1.UnknownReason_UNKNOWN_REASON_SYMBOL_MISSING: "the driver is too old to say it",
		gpuv1.UnknownReason_UNKNOWN_REASON_NO_PERMISSION:  "the driver does not tell it to the agent",
		gpuv1.UnknownReason_UNKNOWN_REASON_GPU_LOST:       "the driver cannot reach the GPU",
		gpuv1.UnknownReason_UNKNOWN_REASON_RESET_REQUIRED: "the GPU does not answer before a reset",
	}[u.GetReason()]
	if words == "" {
		words = "the driver answered with an error"
	}
	return finding{state: unknown, reason: reason, message: fmt.Sprintf("%s: %s (%s: %d)", u.GetField(), words, u.GetFunction(), u.GetCode())}
}

// grew returns by how much a counter grew within span, scaled to it when it was
// looked at less often.
func (v *view) grew(name string, value uint64, span time.Duration) uint64 {
	return v.gpu.counter(name, span).grew(v.at, value)
}

// counter remembers a number that only rises, over a span of time.
type counter struct {
	span   time.Duration
	points []point // the oldest first, at most pointsKept and one
}

type point struct {
	at    time.Duration
	value uint64
}

// pointsKept bounds what is remembered of one counter.
const pointsKept = 60

// grew adds a value. One that is lower than the last begins anew: the driver was
// loaded again or the GPU was reset.
func (c *counter) grew(at time.Duration, value uint64) uint64 {
	n := len(c.points)
	if n > 0 && value < c.points[n-1].value {
		c.points, n = c.points[:0], 0
	}
	if n > 1 && at-c.points[n-2].at < c.span/pointsKept {
		c.points[n-1] = point{at, value} // closer than what counts
	} else {
		c.points = append(c.points, point{at, value})
	}
	first := 0
	for first < len(c.points)-2 && at-c.points[first].at > c.span {
		first++
	}
	c.points = append(c.points[:0], c.points[first:]...)
	growth, elapsed := value-c.points[0].value, at-c.points[0].at
	if elapsed > c.span {
		return uint64(float64(growth) * float64(c.span) / float64(elapsed))
	}
	return growth
}
