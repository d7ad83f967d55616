// Package configfile reads server.yaml. It is strict: an unknown key is an
// error with its line, so that a setting that is misspelt is not silently
// without effect.
package configfile

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
)

// version is the version of the format.
const version = 1

// maxSize bounds the file.
const maxSize = 1 << 20

// File is server.yaml, with defaults for what it leaves out.
type File struct {
	// Listen is the address of the gRPC port.
	Listen string
	// AdvertiseAddress is the address that nodes and operators dial. It has no
	// default.
	AdvertiseAddress string
	// HTTPListen is the address of /healthz, /readyz and /metrics.
	HTTPListen string
	// StateDir holds all that the server keeps.
	StateDir string
	// SecretsKeyFile is the key of the secrets at rest; empty: secrets.key in
	// StateDir.
	SecretsKeyFile string
	// LogLevel is the lowest level that is logged.
	LogLevel slog.Level
	// HeartbeatInterval is how often each side of a session says something.
	HeartbeatInterval time.Duration
	// NodeCertificateTTL is the life of a node's certificate.
	NodeCertificateTTL time.Duration
	// HealthHistoryAge and HealthHistoryCount bound the history of the conditions
	// of a node's GPUs.
	HealthHistoryAge   time.Duration
	HealthHistoryCount int
}

// Problems is every problem of one file. It is an error.
type Problems []string

// Error lists the problems, one a line.
func (p Problems) Error() string { return strings.Join(p, "\n") }

// Read reads the file at path.
func Read(path string) (*File, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("read config: %w", err)
	}
	data, err := io.ReadAll(io.LimitReader(f, maxSize+1))
	if err := errors.Join(err, f.Close()); err != nil {
		return nil, fmt.Errorf("read config %s: %w", path, err)
	}
	return Parse(path, data)
}

// Parse reads a file's content; name is what errors call it. The error is
// [Problems] when the content is wrong.
func Parse(name string, data []byte) (*File, error) {
	if len(data) > maxSize {
		return nil, Problems{fmt.Sprintf("%s: more than %d bytes", name, maxSize)}
	}
	var doc yaml.Node
	decoder := yaml.NewDecoder(strings.NewReader(string(data)))
	if err := decoder.Decode(&doc); err != nil {
		return nil, Problems{fmt.Sprintf("%s: %v", name, err)}
	}
	if err := decoder.Decode(new(yaml.Node)); !errors.Is(err, io.EOF) {
		return nil, Problems{name + ": more than one document; a config is one"}
	}
	f := &File{
		Listen: ":7443", HTTPListen: "127.0.0.1:7480", StateDir: "/var/lib/millwright-server",
		HeartbeatInterval: 15 * time.Second, NodeCertificateTTL: 24 * time.Hour,
		HealthHistoryAge: 90 * 24 * time.Hour, HealthHistoryCount: 10_000,
	}
	r := &reader{name: name, file: f}
	r.read(doc.Content[0])
	if len(r.problems) > 0 {
		return nil, r.problems
	}
	return f, nil
}

// reader reads one mapping and collects what is wrong with it.
type reader struct {
	name     string
	file     *File
	problems Problems
}

func (r *reader) add(n *yaml.Node, format string, args ...any) {
	r.problems = append(r.problems, fmt.Sprintf("%s:%d: %s", r.name, n.Line, fmt.Sprintf(format, args...)))
}

func (r *reader) read(root *yaml.Node) {
	if root.Kind != yaml.MappingNode {
		r.add(root, "a config is a mapping of keys to values")
		return
	}
	setters := r.file.setters()
	seen := map[string]bool{}
	for i := 0; i+1 < len(root.Content); i += 2 {
		key, value := root.Content[i], root.Content[i+1]
		set, known := setters[key.Value]
		switch {
		case !known:
			r.add(key, "unknown key %q; known keys: %s", key.Value, strings.Join(keys(setters), ", "))
		case seen[key.Value]:
			r.add(key, "key %q is given twice", key.Value)
		case value.Kind != yaml.ScalarNode:
			r.add(value, "%s: it must be a single value", key.Value)
		default:
			if err := set(value.Value); err != nil {
				r.add(value, "%s: %q: %v", key.Value, value.Value, err)
			}
		}
		seen[key.Value] = true
	}
	for _, key := range []string{"version", "advertise_address"} {
		if !seen[key] {
			r.add(root, "key %q is missing", key)
		}
	}
}

func keys(setters map[string]func(string) error) []string {
	var out []string
	for k := range setters {
		out = append(out, k)
	}
	slices.Sort(out)
	return out
}

// setters are the keys of the file.
func (f *File) setters() map[string]func(string) error {
	return map[string]func(string) error{
		"version": func(v string) error {
			if v != strconv.Itoa(version) {
				return fmt.Errorf("this release reads version %d", version)
			}
			return nil
		},
		"listen":            func(v string) error { f.Listen = v; return checkListen(v) },
		"http_listen":       func(v string) error { f.HTTPListen = v; return checkListen(v) },
		"advertise_address": func(v string) error { f.AdvertiseAddress = v; return checkDial(v) },
		"state_dir": func(v string) error {
			f.StateDir = v
			if !filepath.IsAbs(v) {
				return errors.New("it must be an absolute path")
			}
			return nil
		},
		"secrets_key_file": func(v string) error {
			f.SecretsKeyFile = v
			if !filepath.IsAbs(v) {
				return errors.New("it must be an absolute path")
			}
			return nil
		},
		"log_level": func(v string) error {
			if f.LogLevel.UnmarshalText([]byte(v)) != nil {
				return errors.New("it must be debug, info, warn or error")
			}
			return nil
		},
		"heartbeat_interval": func(v string) (err error) {
			f.HeartbeatInterval, err = duration(v, time.Second, 5*time.Minute)
			return err
		},
		"health_history_age": func(v string) (err error) {
			f.HealthHistoryAge, err = duration(v, time.Hour, 10*365*24*time.Hour)
			return err
		},
		"health_history_count": func(v string) (err error) {
			f.HealthHistoryCount, err = strconv.Atoi(v)
			if err != nil || f.HealthHistoryCount < 100 || f.HealthHistoryCount > 1_000_000 {
				return errors.New("it must be a number of changes between 100 and 1000000")
			}
			return nil
		},
		"node_certificate_ttl": func(v string) (err error) {
			f.NodeCertificateTTL, err = duration(v, 10*time.Minute, 90*24*time.Hour)
			return err
		},
	}
}

func duration(v string, low, high time.Duration) (time.Duration, error) {
	d, err := time.ParseDuration(v)
	if err != nil || d < low || d > high {
		return 0, fmt.Errorf("it must be a duration between %s and %s, such as %s", low, high, low)
	}
	return d, nil
}

func checkListen(v string) error {
	_, port, err := net.SplitHostPort(v)
	if err != nil || !isPort(port, 0) {
		return errors.New("it must be host:port or :port")
	}
	return nil
}

func checkDial(v string) error {
	host, port, err := net.SplitHostPort(v)
	if err != nil || host == "" || !isPort(port, 1) {
		return errors.New("it must be the host:port that nodes and operators dial, such as server.example.org:7443")
	}
	return nil
}

func isPort(s string, low int) bool {
	n, err := strconv.Atoi(s)
	return err == nil && n >= low && n <= 65535
}
