package nodehost

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/gpuaas/millwright/agent/internal/child"
	"github.com/gpuaas/millwright/agent/internal/clock"
)

// journal reads the log of units, to explain an error. It never adds one.
type journal struct{ children *child.Runner }

// What a process wrote last may reach the journal after its unit has failed, so
// it is looked for a few times.
const (
	journalTries = 6
	journalPause = 100 * time.Millisecond
)

// lastLines returns the last lines that the processes of a unit logged since a
// time, and those of systemd about it. They are empty when the log cannot be
// read in time. The invocation would not do to find them: the journal looks it
// up late, and it is gone when a unit fails at once.
func (j journal) lastLines(ctx context.Context, unit string, since time.Time) []string {
	from := fmt.Sprintf("--since=@%d.%06d", since.Unix(), since.Nanosecond()/1000)
	var own []string
	for range journalTries {
		if own = j.read(ctx, 6, from, "_SYSTEMD_UNIT="+unit); len(own) > 0 {
			break
		}
		clock.Sleep(ctx, journalPause)
	}
	return append(own, j.read(ctx, 3, from, "_PID=1", "UNIT="+unit)...)
}

func (j journal) read(ctx context.Context, lines int, matches ...string) []string {
	argv := []string{"/usr/bin/journalctl", "--quiet", "--no-pager", "--output=cat", "--lines=" + strconv.Itoa(lines)}
	res, err := j.children.Run(ctx, child.Spec{
		Argv: append(argv, matches...), Timeout: 3 * time.Second, Key: "journalctl", MaxOutput: 16 << 10,
	})
	if err != nil || res.ExitCode != 0 {
		return nil
	}
	var out []string
	for line := range strings.Lines(strings.ToValidUTF8(string(res.Stdout), "?")) {
		const limit = 300
		if line = strings.TrimSpace(line); line != "" {
			out = append(out, line[:min(len(line), limit)])
		}
	}
	return out
}
