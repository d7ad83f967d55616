// Package configfile reads the agent's configuration, agent.yaml. The file is
// strict: a key that is not known is an error that names its line and the keys
// that are.
package configfile

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"
	"unicode"

	"go.yaml.in/yaml/v3"

	"github.com/gpuaas/millwright/agent/internal/health/xid"
)

// Version is the newest version of the format that is read.
const Version = 1

// DefaultPath is where the file is looked for.
const DefaultPath = "/etc/millwright/agent.yaml"

// maxBytes bounds the file.
const maxBytes = 1 << 20

// Config is what the file says, with the defaults filled in.
type Config struct {
	// Server is the control plane's address; empty: the join bundle's.
	Server string
	// StateDir holds the journal, the identity and the commands' files.
	StateDir string
	// RunDir holds the local socket.
	RunDir string
	// PolicyFile is the node's own policy.
	PolicyFile string
	// JoinFile is the join bundle, read while the node has no identity.
	JoinFile string
	// SocketGroup may read the status over the local socket; empty: root only.
	SocketGroup string
	// Labels are told to the control plane.
	Labels map[string]string
	// LogLevel is the lowest level that is logged.
	LogLevel slog.Level
	// OutputBytesPerSecond is the pace of the outputs.
	OutputBytesPerSecond int
	// OutputRetention is how long outputs are kept that the server never
	// acknowledged.
	OutputRetention time.Duration
	// RebootsMost is how many reboots tasks may ask for within RebootsWithin.
	RebootsMost   int
	RebootsWithin time.Duration
	// GPU is how the GPUs are asked.
	GPU GPU
}

// GPU is the section gpu.
type GPU struct {
	// Mode is auto, on or off.
	Mode string
	// Program is millwright-gpu.
	Program string
	// Library is the NVML library; empty: the system's.
	Library string
	// Period is how often what changes by the second is read.
	Period time.Duration
	// SlowPeriod is how often the rest is.
	SlowPeriod time.Duration
	// Expected is how many GPUs the node should have; 0: as many as there were.
	Expected int
	// XIDs are the operator's own words on XIDs, from the file xid_overrides.
	XIDs []xid.Override
	// KernelLog is where errors of GPUs are looked for; empty: nowhere.
	KernelLog string
}

// file is the format.
type file struct {
	Version     int               `yaml:"version"`
	Server      string            `yaml:"server"`
	StateDir    string            `yaml:"state_dir"`
	RunDir      string            `yaml:"run_dir"`
	PolicyFile  string            `yaml:"policy_file"`
	JoinFile    string            `yaml:"join_file"`
	SocketGroup string            `yaml:"socket_group"`
	Labels      map[string]string `yaml:"labels"`
	LogLevel    string            `yaml:"log_level"`
	Output      struct {
		BytesPerSecond int    `yaml:"bytes_per_second"`
		Retention      string `yaml:"retention"`
	} `yaml:"output"`
	Reboots struct {
		Most   int    `yaml:"most"`
		Within string `yaml:"within"`
	} `yaml:"reboots"`
	GPU struct {
		Mode       string `yaml:"mode"`
		Program    string `yaml:"program"`
		Library    string `yaml:"library"`
		Period     string `yaml:"period"`
		SlowPeriod string `yaml:"slow_period"`
		Expected   int    `yaml:"expected"`
		XIDs       string `yaml:"xid_overrides"`
		KernelLog  string `yaml:"kernel_log"`
	} `yaml:"gpu"`
}

// defaults is the file that says nothing.
func defaults() file {
	f := file{
		StateDir: "/var/lib/millwright", RunDir: "/run/millwright",
		PolicyFile: "/etc/millwright/policy.yaml", JoinFile: "/etc/millwright/join.json", LogLevel: "info",
	}
	f.Output.BytesPerSecond = 256 << 10
	f.Output.Retention = "168h"
	f.Reboots.Most, f.Reboots.Within = 3, "24h"
	f.GPU.Mode, f.GPU.Program = "auto", "/usr/libexec/millwright/millwright-gpu"
	f.GPU.Period, f.GPU.SlowPeriod, f.GPU.KernelLog = "10s", "1m", "/dev/kmsg"
	return f
}

// Load reads the file at path. Its error names all that is wrong in it.
func Load(path string) (Config, error) {
	f, err := os.Open(path)
	if err != nil {
		return Config{}, fmt.Errorf("read configuration: %w", err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxBytes+1))
	if err != nil {
		return Config{}, fmt.Errorf("read configuration: %w", err)
	}
	c, err := Parse(b)
	if err != nil {
		return Config{}, fmt.Errorf("configuration %s:\n%w", path, err)
	}
	return c, nil
}

// Parse reads the file's content. Its error is a join of one for each problem,
// each beginning with its line or its field.
func Parse(b []byte) (Config, error) {
	if len(b) > maxBytes {
		return Config{}, fmt.Errorf("it has more than %d bytes", maxBytes)
	}
	f := defaults()
	var root yaml.Node
	dec := yaml.NewDecoder(bytes.NewReader(b))
	switch err := dec.Decode(&root); {
	case errors.Is(err, io.EOF):
		return Config{}, errors.New("version: missing: write version: 1")
	case err != nil:
		return Config{}, err
	}
	if err := dec.Decode(new(yaml.Node)); !errors.Is(err, io.EOF) {
		return Config{}, errors.New("it has more than one document; keep one")
	}
	if err := newer(&root); err != nil {
		return Config{}, err // its keys may be unknown for that reason
	}
	if err := unknownKeys(root.Content[0], &f); err != nil {
		return Config{}, err
	}
	if err := root.Decode(&f); err != nil {
		return Config{}, err
	}
	return f.config()
}

// newer refuses a version that this agent does not know, before its keys.
func newer(root *yaml.Node) error {
	var v struct {
		Version int `yaml:"version"`
	}
	if err := root.Decode(&v); err == nil && v.Version > Version {
		return fmt.Errorf("version: %d is newer than %d, the newest that this agent reads: install a newer agent", v.Version, Version)
	}
	return nil
}

func (f *file) config() (Config, error) {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if f.Version != Version {
		bad("version: %d: write version: %d", f.Version, Version)
	}
	if f.Server != "" && !hostPort.MatchString(f.Server) {
		bad("server: %q: want host:port, for example mw.example.org:7443", f.Server)
	}
	for _, p := range []struct{ field, path string }{
		{"state_dir", f.StateDir}, {"run_dir", f.RunDir}, {"policy_file", f.PolicyFile}, {"join_file", f.JoinFile},
	} {
		if !filepath.IsAbs(p.path) || filepath.Clean(p.path) != p.path {
			bad("%s: %q: want an absolute path without . or .. in it", p.field, p.path)
		}
	}
	for k, v := range f.Labels {
		if !labelKey.MatchString(k) {
			bad("labels: key %q: want lower-case letters, digits and -._/ , at most 63 bytes", k)
		}
		if len(v) > 63 || strings.ContainsFunc(v, func(r rune) bool { return !unicode.IsPrint(r) }) {
			bad("labels: value %q of %s: want at most 63 bytes of printable text", v, k)
		}
	}
	level, ok := levels[f.LogLevel]
	if !ok {
		bad("log_level: %q: want debug, info, warn or error", f.LogLevel)
	}
	if f.Output.BytesPerSecond < 16<<10 || f.Output.BytesPerSecond > 1<<30 {
		bad("output.bytes_per_second: %d: want 16384 to 1073741824", f.Output.BytesPerSecond)
	}
	keep, err := time.ParseDuration(f.Output.Retention)
	if err != nil || keep < time.Hour || keep > 90*24*time.Hour {
		bad("output.retention: %q: want a duration of 1h to 2160h, for example 168h", f.Output.Retention)
	}
	if f.Reboots.Most < 0 || f.Reboots.Most > 1000 {
		bad("reboots.most: %d: want 0 to 1000; 0 keeps tasks from rebooting the node", f.Reboots.Most)
	}
	within, err := time.ParseDuration(f.Reboots.Within)
	if err != nil || within < time.Minute || within > 30*24*time.Hour {
		bad("reboots.within: %q: want a duration of 1m to 720h, for example 24h", f.Reboots.Within)
	}
	gpu, wrong := f.gpu()
	errs = append(errs, wrong...)
	return Config{
		GPU:         gpu,
		RebootsMost: f.Reboots.Most, RebootsWithin: within,
		Server: f.Server, StateDir: f.StateDir, RunDir: f.RunDir, PolicyFile: f.PolicyFile, JoinFile: f.JoinFile,
		SocketGroup: f.SocketGroup, Labels: f.Labels, LogLevel: level,
		OutputBytesPerSecond: f.Output.BytesPerSecond, OutputRetention: keep,
	}, errors.Join(errs...)
}

var (
	hostPort = regexp.MustCompile(`^([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}$`)
	labelKey = regexp.MustCompile(`^[a-z0-9._/-]{1,63}$`)
	levels   = map[string]slog.Level{"debug": slog.LevelDebug, "info": slog.LevelInfo, "warn": slog.LevelWarn, "error": slog.LevelError}
)
