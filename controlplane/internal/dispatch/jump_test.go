package dispatch_test

import (
	"log/slog"
	"testing"
	"time"

	"github.com/gpuaas/millwright/controlplane/internal/dispatch"
)

// TestJump says when tasks may expire after the server's clock has moved.
func TestJump(t *testing.T) {
	const year = 365 * 24 * time.Hour
	begin := time.Date(2026, time.November, 1, 12, 0, 0, 0, time.UTC)
	type tick struct {
		wall, boot time.Duration // since the beginning
		yes, no    int           // nodes whose clocks agree, or do not
		held       bool
	}
	for _, tt := range []struct {
		name string
		last time.Duration // the newest entry of the log, before the beginning
		then []tick
	}{
		{"nothing", time.Minute, []tick{{time.Second, time.Second, 0, 0, false}, {2 * time.Second, 2 * time.Second, 0, 0, false}}},
		{"suspend of 8 hours", time.Minute, []tick{{8 * time.Hour, 8 * time.Hour, 0, 0, false}}},
		{"+1h, and back", time.Minute, []tick{
			{time.Hour, time.Second, 0, 0, true}, {time.Hour + time.Second, 2 * time.Second, 0, 3, true}, {3 * time.Second, 3 * time.Second, 0, 0, false},
		}},
		{"+1h was right: the nodes agree", time.Minute, []tick{{time.Hour, time.Second, 0, 0, true}, {time.Hour + time.Minute, time.Minute, 2, 1, false},
			{time.Hour + 2*time.Minute, 2 * time.Minute, 0, 0, false}}},
		{"+10y, and no one to ask for a day", time.Minute, []tick{
			{10 * year, time.Second, 0, 0, true}, {10*year + 23*time.Hour, 23 * time.Hour, 0, 0, true}, {10*year + 25*time.Hour, 25 * time.Hour, 0, 0, false},
		}},
		{"-1h, and right again", time.Minute, []tick{{-time.Hour, time.Second, 0, 0, false}, {2 * time.Second, 2 * time.Second, 0, 0, true},
			{time.Minute, time.Minute, 1, 0, false}}},
		{"-10y", time.Minute, []tick{{-10 * year, time.Second, 0, 0, false}}},
		{"an hour off", time.Hour, []tick{{time.Second, time.Second, 0, 0, false}}},
		{"off for three days, and a node agrees", 72 * time.Hour, []tick{{time.Second, time.Second, 0, 0, true}, {time.Minute, time.Minute, 1, 0, false}}},
		{"started ten years ahead", 10 * year, []tick{{time.Second, time.Second, 0, 0, true}, {time.Minute, time.Minute, 0, 5, true}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			j := dispatch.NewJump(slog.New(slog.DiscardHandler), begin, begin.Add(-tt.last), time.Hour)
			for i, k := range tt.then {
				got := j.Holds(begin.Add(k.wall), time.Hour+k.boot, func(time.Duration) (int, int) { return k.yes, k.no })
				if got != k.held {
					t.Errorf("tick %d: held %v, want %v", i, got, k.held)
				}
			}
		})
	}
}
