package configfile

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/gpuaas/millwright/agent/internal/health/xid"
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
	if f.GPU.Expected < 0 || f.GPU.Expected > 64 {
		bad("gpu.expected: %d: want 0 to 64; 0 for as many as there were", f.GPU.Expected)
	}
	if p := f.GPU.KernelLog; p != "" && (!filepath.IsAbs(p) || filepath.Clean(p) != p) {
		bad("gpu.kernel_log: %q: want an absolute path without . or .. in it, or \"\" for none", p)
	}
	xids, err := overrides(f.GPU.XIDs)
	if err != nil {
		bad("gpu.xid_overrides: %w", err)
	}
	return GPU{
		Mode: f.GPU.Mode, Program: f.GPU.Program, Library: f.GPU.Library, Period: period, SlowPeriod: slow,
		Expected: f.GPU.Expected, XIDs: xids, KernelLog: f.GPU.KernelLog,
	}, errs
}

// mostOverrides bounds the file of overrides, in bytes.
const mostOverrides = 1 << 20

// overrides reads the operator's own words on XIDs, as a file with the one key
// xids, and asks that the table takes them.
func overrides(path string) ([]xid.Override, error) {
	if path == "" {
		return nil, nil
	}
	if !filepath.IsAbs(path) || filepath.Clean(path) != path {
		return nil, fmt.Errorf("%q: want an absolute path without . or .. in it", path)
	}
	r, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	var f struct {
		XIDs []xid.Override `yaml:"xids"`
	}
	dec := yaml.NewDecoder(io.LimitReader(r, mostOverrides))
	dec.KnownFields(true)
	if err := dec.Decode(&f); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	table, err := xid.Builtin()
	if err != nil {
		return nil, err
	}
	if _, err := table.With(f.XIDs); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return f.XIDs, nil
}
