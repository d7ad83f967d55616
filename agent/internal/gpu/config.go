// Package gpu asks the NVIDIA driver of the node, through a program of its own,
// millwright-gpu: a call into the driver may crash it, end it with a missing
// symbol, or never return, and the agent goes on. The program is replaced with a
// growing pause; one that the kernel holds is abandoned, and no other is started
// beside it. Whether the driver can be asked is a state with words, and never
// "no GPUs" for want of an answer.
package gpu

import (
	"log/slog"
	"net"
	"syscall"
	"time"

	"github.com/gpuaas/millwright/agent/internal/child"
	"github.com/gpuaas/millwright/agent/internal/clock"
)

// Mode is whether the GPUs are asked.
type Mode string

// The modes.
const (
	// Auto asks while the PCI bus has an NVIDIA GPU, or a library is configured.
	Auto Mode = "auto"
	// On always asks.
	On Mode = "on"
	// Off never does.
	Off Mode = "off"
)

// Config is what a Supervisor needs. Fields without "optional" must be set.
type Config struct {
	// Mode is whether the GPUs are asked.
	Mode Mode
	// Program is the absolute path of millwright-gpu.
	Program string
	// Runner starts it.
	Runner *child.Runner
	// Logger is told of each change of the state.
	Logger *slog.Logger
	// Clock tells the time.
	Clock clock.Clock

	// Library is the NVML library; optional, the system's libnvidia-ml.so.1.
	Library string
	// Args and Env are added to the program's; optional. Tests use them.
	Args, Env []string
	// Sysfs is where the PCI bus is read; optional, /sys.
	Sysfs string
	// InitTimeout bounds the start of the driver: without persistence mode it
	// initialises each GPU; optional, 60 s.
	InitTimeout time.Duration
	// CallTimeout bounds every other question; optional, 5 s.
	CallTimeout time.Duration
	// EventWait is how long one question for events waits; optional, half of
	// Pause and at most 5 s.
	EventWait time.Duration
	// KillWait is how long a killed program has to vanish; optional, 2 s.
	KillWait time.Duration
	// Pause is the longest pause between two starts; optional, 10 s. The first
	// is a sixteenth of it.
	Pause time.Duration
	// Notice is how long a question has no answer before that is told; its
	// deadline may be later. Optional, half of Pause and at least 1 s.
	Notice time.Duration
	// Start starts the program; optional, Runner does. Tests use it.
	Start func(child.LongSpec) (Process, error)
}

// Process is a program that was started; [child.Long] says what its methods
// promise.
type Process interface {
	Conn() net.Conn
	Pid() int
	Gone() <-chan struct{}
	Kill() error
	End() (code int, signal syscall.Signal, said string)
}

func (c Config) withDefaults() Config {
	for _, d := range []struct {
		field *time.Duration
		value time.Duration
	}{
		{&c.InitTimeout, time.Minute}, {&c.CallTimeout, 5 * time.Second},
		{&c.KillWait, 2 * time.Second}, {&c.Pause, 10 * time.Second},
	} {
		if *d.field == 0 {
			*d.field = d.value
		}
	}
	if c.Notice == 0 {
		c.Notice = max(c.Pause/2, time.Second)
	}
	if c.EventWait == 0 {
		c.EventWait = min(5*time.Second, c.Pause/2)
	}
	if c.Sysfs == "" {
		c.Sysfs = "/sys"
	}
	if c.Start == nil {
		c.Start = func(s child.LongSpec) (Process, error) { return c.Runner.Start(s) }
	}
	return c
}
