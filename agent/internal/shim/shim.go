// Package shim is the wrapper of every command that the agent runs: the program
// millwrightd shim DIR, alone in a transient unit, which outlives the agent.
//
// It starts the command that the directory describes at most once, whatever
// crashes: it makes an exclusive marker durable before it starts anything. It
// keeps the first and the last bytes of what the command writes in constant
// memory, and makes the outcome durable before it exits. A directory with a
// marker and without a result is one whose outcome is not known; nothing here
// ever makes up for it.
package shim

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/signal"
	"runtime/debug"
	"strings"
	"syscall"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/millwright/agent/internal/child"
	"github.com/gpuaas/millwright/agent/internal/clock"
	"github.com/gpuaas/millwright/agent/internal/crash"
	"github.com/gpuaas/millwright/agent/internal/host/files"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
)

// Path is the PATH of every command.
const Path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// The exit codes of the shim.
const (
	exitRecorded = 0 // the command's end is durable, whatever it was
	exitError    = 1
	exitUsage    = 2
	exitTaken    = 3 // the command was started before
)

const (
	// stopGrace is what a command that is to stop has between SIGTERM and SIGKILL
	// when nothing else was asked for.
	stopGrace = 10 * time.Second
	// drainGrace is how long the output of a command that has ended may still
	// come, when something that it left behind keeps the pipe.
	drainGrace = 2 * time.Second
)

// StopTimeout is how long the unit of a shim has to stop, by the time that its
// command is given; it is longer than the shim takes to stop its command. After
// it systemd kills whatever is left in the unit.
func StopTimeout(grace time.Duration) time.Duration {
	return graceOr(grace) + drainGrace + time.Second
}

func graceOr(grace time.Duration) time.Duration {
	if grace <= 0 {
		return stopGrace
	}
	return grace
}

// Main is millwrightd shim. Its arguments are the command's directory, or --post
// and the directory, as systemd runs it when a shim has ended. It returns the
// exit code.
func Main(args []string, stderr io.Writer) int {
	post := len(args) == 2 && args[0] == "--post"
	if !post && len(args) != 1 {
		_, _ = fmt.Fprintln(stderr, "usage: millwrightd shim [--post] DIRECTORY") // nobody else to tell
		return exitUsage
	}
	dir := Dir(args[len(args)-1])
	do := func() error { return run(dir) }
	if post {
		do = func() error { return recordDeath(dir) }
	}
	err := do()
	if err == nil {
		return exitRecorded
	}
	_, _ = fmt.Fprintf(stderr, "shim: %v\n", err) // nobody else to tell
	if errors.Is(err, fs.ErrExist) {
		return exitTaken
	}
	return exitError
}

// run carries out the command of dir and makes its end durable.
func run(dir Dir) error {
	// What the agent links costs memory that the shim does not need to grow.
	debug.SetGCPercent(20)
	id, err := ParseDir(string(dir))
	if err != nil {
		return err
	}
	boot, err := BootID()
	if err != nil {
		return err
	}
	stop := make(chan os.Signal, 4)
	signal.Notify(stop, syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP)
	defer signal.Stop(stop)

	spec, err := dir.Spec()
	if err != nil {
		return err
	}
	rec := &agentv1.CommandRecord{
		TaskId: id.TaskID, Step: id.Step, Attempt: id.Attempt,
		BootId: boot, InvocationId: os.Getenv("INVOCATION_ID"),
		StartTime: timestamppb.New(clock.System{}.Now()),
	}
	if _, err := dir.Marker(); !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("command in %s: it was started before: %w", dir, fs.ErrExist)
	}
	crash.Point("shim.reserve.before")
	if err := dir.reserve(); err != nil {
		return err
	}
	crash.Point("shim.marker.before")
	if err := dir.Take(rec); err != nil {
		return err
	}
	crash.Point("shim.marker")
	c := &command{dir: dir, spec: spec, clock: clock.System{}, stop: stop}
	outcome, err := c.run()
	crash.Point("shim.result.before")
	if err != nil {
		rec.StartError = child.FormatError(err)
	} else {
		outcome.InvocationId, outcome.BootId = rec.InvocationId, rec.BootId
		rec.Outcome = outcome
	}
	if err := dir.writeResult(rec); err != nil {
		return err
	}
	crash.Point("shim.result")
	return nil
}

// recordDeath runs after the shim. When the shim of this invocation left no
// result, it notes how the shim ended, for whoever has to judge.
func recordDeath(dir Dir) error {
	if _, err := dir.Result(); err == nil {
		return nil
	}
	marker, err := dir.Marker()
	if err == nil && marker.GetInvocationId() != os.Getenv("INVOCATION_ID") {
		return nil // this shim started nothing
	}
	how := fmt.Sprintf("the shim ended with result %s (%s, %s)\n",
		env("SERVICE_RESULT"), env("EXIT_CODE"), env("EXIT_STATUS"))
	crash.Point("shim.death.before")
	if err := files.Replace(dir.path("death"), []byte(how), 0o600); err != nil {
		return err
	}
	crash.Point("shim.death.after")
	return nil
}

func env(name string) string {
	if v := os.Getenv(name); v != "" {
		return v
	}
	return "unknown"
}

// BootID is the id of the running boot.
func BootID() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("read boot id: %w", err)
	}
	return strings.TrimSpace(string(b)), nil
}
