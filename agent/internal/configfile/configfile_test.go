package configfile_test

import (
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuaas/millwright/agent/internal/configfile"
)

func TestDefaults(t *testing.T) {
	got, err := configfile.Parse([]byte("version: 1\n"))
	if err != nil {
		t.Fatal(err)
	}
	want := configfile.Config{
		StateDir: "/var/lib/millwright", RunDir: "/run/millwright", PolicyFile: "/etc/millwright/policy.yaml",
		JoinFile: "/etc/millwright/join.json", LogLevel: slog.LevelInfo,
		OutputBytesPerSecond: 262144, OutputRetention: 7 * 24 * time.Hour, RebootsMost: 3, RebootsWithin: 24 * time.Hour,
		GPU: configfile.GPU{Mode: "auto", Program: "/usr/libexec/millwright/millwright-gpu", Period: 10 * time.Second, SlowPeriod: time.Minute, KernelLog: "/dev/kmsg"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("Parse (-want +got):\n%s", diff)
	}
}

func TestAllFields(t *testing.T) {
	got, err := configfile.Parse([]byte(`
version: 1
server: "[fd00::1]:7443"
state_dir: /s
run_dir: /r
policy_file: /p
join_file: /j
socket_group: ops
labels: {pool: "a 1", gpu/model: h100}
log_level: debug
output:
  bytes_per_second: 65536
  retention: 24h
reboots:
  most: 0
  within: 1h
gpu:
  mode: "on"
  program: /g
  library: /l.so
  period: 5s
  slow_period: 2m
  expected: 8
  kernel_log: /k
`))
	if err != nil {
		t.Fatal(err)
	}
	want := configfile.Config{
		Server: "[fd00::1]:7443", StateDir: "/s", RunDir: "/r", PolicyFile: "/p", JoinFile: "/j", SocketGroup: "ops",
		Labels: map[string]string{"pool": "a 1", "gpu/model": "h100"}, LogLevel: slog.LevelDebug,
		OutputBytesPerSecond: 65536, OutputRetention: 24 * time.Hour, RebootsMost: 0, RebootsWithin: time.Hour,
		GPU: configfile.GPU{Mode: "on", Program: "/g", Library: "/l.so", Period: 5 * time.Second, SlowPeriod: 2 * time.Minute, Expected: 8, KernelLog: "/k"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("Parse (-want +got):\n%s", diff)
	}
}

func TestProblems(t *testing.T) {
	for _, tc := range []struct {
		name, in string
		want     []string
	}{
		{"empty", "", []string{"version: missing"}},
		{"comment only", "# nothing\n", []string{"version: missing"}},
		{"no version", "log_level: info\n", []string{"version: 0: write version: 1"}},
		{"newer", "version: 2\nnew_key: 1\n", []string{"version: 2 is newer than 1", "install a newer agent"}},
		{"unknown key", "version: 1\n\nlog_leval: info\n", []string{`line 3: unknown key "log_leval"`, "log_level", "state_dir"}},
		{"unknown nested key", "version: 1\noutput:\n  rate: 1\n", []string{`line 3: output: unknown key "rate"`, "bytes_per_second, retention"}},
		{"two unknown keys", "version: 1\na: 1\nb: 1\n", []string{`line 2: unknown key "a"`, `line 3: unknown key "b"`}},
		{"twice", "version: 1\nrun_dir: /a\nrun_dir: /b\n", []string{"line 3", "run_dir", "already defined"}},
		{"no mapping", "version: 1\noutput: 5\n", []string{"line 2: output: want keys with values"}},
		{"a list", "- version\n", []string{"line 1: want keys with values"}},
		{"wrong type", "version: 1\nlabels: [a]\n", []string{"line 2"}},
		{"two documents", "version: 1\n---\nversion: 1\n", []string{"more than one document"}},
		{"all at once", "version: 1\nserver: x\nstate_dir: a/b\nrun_dir: /a/../b\nlog_level: loud\nlabels: {A: b, c: \"\\x01\"}\noutput: {bytes_per_second: 1, retention: soon}\n",
			[]string{`server: "x"`, `state_dir: "a/b"`, `run_dir: "/a/../b"`, `log_level: "loud"`, `key "A"`, "of c", "bytes_per_second: 1:", `retention: "soon"`}},
		{"the GPUs", "version: 1\ngpu: {mode: maybe, program: x, library: y, period: 3ms, slow_period: 1ms, expected: 65, kernel_log: k, xid_overrides: /no/such}\n",
			[]string{`gpu.mode: "maybe"`, `gpu.program: "x"`, `gpu.library: "y"`, `gpu.period: "3ms"`, `gpu.slow_period: "1ms"`, "gpu.expected: 65", `gpu.kernel_log: "k"`, "gpu.xid_overrides: open /no/such"}},
		{"not yaml", "version: [1\n", []string{"yaml"}},
		{"large", "version: 1\n#" + strings.Repeat("x", 1<<20), []string{"more than 1048576 bytes"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := configfile.Parse([]byte(tc.in))
			if err == nil {
				t.Fatal("Parse() = nil, want an error")
			}
			for _, w := range tc.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("Parse() = %v\nwant it to say %q", err, w)
				}
			}
		})
	}
}

func TestLoadNamesTheFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "agent.yaml")
	if _, err := configfile.Load(path); err == nil || !strings.Contains(err.Error(), path) {
		t.Errorf("Load() = %v, want an error that names %s", err, path)
	}
	if err := os.WriteFile(path, []byte("version: 1\nx: 1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := configfile.Load(path); err == nil || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "line 2") {
		t.Errorf("Load() = %v, want an error that names %s and line 2", err, path)
	}
}

// TestPackagedFile reads the file that the package installs, as it is and with
// all that it comments out, which is every key with its default.
func TestPackagedFile(t *testing.T) {
	b, err := os.ReadFile("../../../packaging/config/agent.yaml")
	if err != nil {
		t.Fatal(err)
	}
	want, err := configfile.Parse([]byte("version: 1\n"))
	if err != nil {
		t.Fatal(err)
	}
	if got, err := configfile.Parse(b); err != nil || !cmp.Equal(want, got) {
		t.Errorf("Parse(packaged file) = %+v, %v; want the defaults", got, err)
	}
	setting := regexp.MustCompile(`(?m)^# (( *)[a-z_]+:.*)$`)
	all := setting.ReplaceAllString(string(b), "$1")
	got, err := configfile.Parse([]byte(all))
	if err != nil {
		t.Fatalf("Parse(packaged file with all settings) = %v\n%s", err, all)
	}
	if got.Server == "" || got.SocketGroup == "" || len(got.Labels) == 0 {
		t.Errorf("the packaged file does not show server, socket_group and labels: %+v", got)
	}
	got.Server, got.SocketGroup, got.Labels = "", "", nil
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("what the packaged file shows is not the default (-default +shown):\n%s", diff)
	}
	for _, key := range []string{"server", "state_dir", "run_dir", "policy_file", "join_file", "socket_group", "labels", "log_level", "output", "bytes_per_second", "retention"} {
		if !strings.Contains(string(b), key+":") {
			t.Errorf("the packaged file does not show %s", key)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte("version: 1\noutput: {retention: 2h}\nlabels: {a: b}\n"))
	f.Add([]byte("version: 1\n---\n&a [*a]"))
	f.Add([]byte("? {a: b}\n: c"))
	f.Fuzz(func(t *testing.T, b []byte) {
		c, err := configfile.Parse(b)
		if err == nil && (!filepath.IsAbs(c.StateDir) || c.OutputBytesPerSecond <= 0) {
			t.Errorf("Parse(%q) took %+v", b, c)
		}
	})
}

// An operator's own words on XIDs are read, and one that the table does not take
// is told with its file.
func TestXIDOverrides(t *testing.T) {
	path := filepath.Join(t.TempDir(), "xids.yaml")
	for _, tc := range []struct{ text, want string }{
		{"xids:\n  - {xid: \"31\", severity: fatal, action: reset_gpu, reason: ticket 12}\n", ""},
		{"xids:\n  - {xid: \"31\", severity: loud}\n", path + `: xids[0].severity: "loud"`},
		{"ids: []\n", "field ids not found"},
	} {
		if err := os.WriteFile(path, []byte(tc.text), 0o600); err != nil {
			t.Fatal(err)
		}
		c, err := configfile.Parse([]byte("version: 1\ngpu: {xid_overrides: " + path + "}\n"))
		switch {
		case tc.want == "" && (err != nil || len(c.GPU.XIDs) != 1 || c.GPU.XIDs[0].Reason != "ticket 12"):
			t.Errorf("%v, %v", c.GPU.XIDs, err)
		case tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)):
			t.Errorf("%v, want %q", err, tc.want)
		}
	}
}
