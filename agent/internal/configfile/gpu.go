package configfile

import (
	"fmt"
	"path/filepath"
	"slices"
	"time"
)

// gpu checks the section gpu.
func (f *file) gpu() (GPU, []error) {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if !slices.Contains([]string{"auto", "on", "off"}, f.GPU.Mode) {
		bad("gpu.mode: %q: want auto, on or off", f.GPU.Mode)
	}
	if p := f.GPU.Program; !filepath.IsAbs(p) || filepath.Clean(p) != p {
		bad("gpu.program: %q: want an absolute path without . or .. in it", p)
	}
	if p := f.GPU.Library; p != "" && (!filepath.IsAbs(p) || filepath.Clean(p) != p) {
		bad("gpu.library: %q: want an absolute path without . or .. in it, or leave it out for the system's", p)
	}
	period, err := time.ParseDuration(f.GPU.Period)
	if err != nil || period < time.Second || period > 10*time.Minute {
		bad("gpu.period: %q: want a duration of 1s to 10m, for example 10s", f.GPU.Period)
	}
	slow, err := time.ParseDuration(f.GPU.SlowPeriod)
	if err != nil || slow < period || slow > time.Hour {
		bad("gpu.slow_period: %q: want a duration of gpu.period to 1h, for example 1m", f.GPU.SlowPeriod)
	}
	return GPU{Mode: f.GPU.Mode, Program: f.GPU.Program, Library: f.GPU.Library, Period: period, SlowPeriod: slow}, errs
}
