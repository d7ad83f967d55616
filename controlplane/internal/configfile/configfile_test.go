package configfile_test

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuaas/millwright/controlplane/internal/configfile"
)

const minimal = "version: 1\nadvertise_address: server.test:7443\n"

func TestParse(t *testing.T) {
	t.Parallel()
	want := &configfile.File{
		Listen: ":7443", HTTPListen: "127.0.0.1:7480", StateDir: "/var/lib/millwright-server", AdvertiseAddress: "server.test:7443",
		HeartbeatInterval: 15 * time.Second, NodeCertificateTTL: 24 * time.Hour,
		HealthHistoryAge: 2160 * time.Hour, HealthHistoryCount: 10_000,
	}
	got, err := configfile.Parse("server.yaml", []byte(minimal))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("defaults (-want +got):\n%s", diff)
	}
	got, err = configfile.Parse("server.yaml", []byte(minimal+`
listen: "[::1]:1"
http_listen: 127.0.0.1:0
state_dir: /srv/mw
log_level: debug
heartbeat_interval: 5s
node_certificate_ttl: 1h
health_history_age: 48h
health_history_count: 500
`))
	if err != nil {
		t.Fatal(err)
	}
	want = &configfile.File{Listen: "[::1]:1", HTTPListen: "127.0.0.1:0", StateDir: "/srv/mw", AdvertiseAddress: "server.test:7443",
		LogLevel: slog.LevelDebug, HeartbeatInterval: 5 * time.Second, NodeCertificateTTL: time.Hour,
		HealthHistoryAge: 48 * time.Hour, HealthHistoryCount: 500}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("all keys (-want +got):\n%s", diff)
	}
}

func TestParseRefuses(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, text string
		words      []string
	}{
		{"unknown key", minimal + "lisen: :1\n", []string{`server.yaml:3: unknown key "lisen"`, "listen"}},
		{"twice", minimal + "listen: :1\nlisten: :2\n", []string{`server.yaml:4: key "listen" is given twice`}},
		{"all at once", "version: 2\nlisten: x\nstate_dir: here\n", []string{"server.yaml:1: version", "server.yaml:2: listen", "server.yaml:3: state_dir", "advertise_address"}},
		{"missing", "listen: :1\n", []string{`"version" is missing`, `"advertise_address" is missing`}},
		{"not a mapping", "- a\n", []string{"server.yaml:1", "mapping"}},
		{"nested", minimal + "listen: [a]\n", []string{"server.yaml:3: listen"}},
		{"duration", minimal + "heartbeat_interval: 1ms\n", []string{"heartbeat_interval", `"1ms"`, "between"}},
		{"history", minimal + "health_history_age: 1s\nhealth_history_count: 7\n", []string{"health_history_age", `"1s"`, "health_history_count", `"7"`, "between 100 and"}},
		{"level", minimal + "log_level: loud\n", []string{"log_level", "debug, info, warn or error"}},
		{"dial address", "version: 1\nadvertise_address: :7443\n", []string{"server.yaml:2: advertise_address", "host:port"}},
		{"empty", "", []string{"server.yaml"}},
		{"two documents", minimal + "---\n" + minimal, []string{"more than one document"}},
		{"no yaml", "a: [", []string{"server.yaml"}},
		{"anchors", "version: &v 1\nadvertise_address: *v\n", []string{"server.yaml:2: advertise_address"}},
	} {
		_, err := configfile.Parse("server.yaml", []byte(c.text))
		var problems configfile.Problems
		if !errors.As(err, &problems) {
			t.Errorf("%s: Parse = %v, want Problems", c.name, err)
			continue
		}
		for _, word := range c.words {
			if !strings.Contains(err.Error(), word) {
				t.Errorf("%s: the error does not say %q:\n%v", c.name, word, err)
			}
		}
	}
}

func TestRead(t *testing.T) {
	t.Parallel()
	if _, err := configfile.Read(filepath.Join(t.TempDir(), "none")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("Read of nothing = %v", err)
	}
	path := filepath.Join(t.TempDir(), "server.yaml")
	if err := os.WriteFile(path, []byte(minimal+strings.Repeat("#", 2<<20)), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := configfile.Read(path); err == nil {
		t.Error("a file of 2 MiB was read")
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(minimal))
	f.Add([]byte("a: &a [*a]"))
	f.Fuzz(func(t *testing.T, b []byte) {
		file, err := configfile.Parse("f", b)
		if (file == nil) == (err == nil) {
			t.Errorf("Parse(%q) = %v, %v", b, file, err)
		}
	})
}
