package alerts_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"
)

const dir = "../../packaging/prometheus"

// promtool returns the program: the system's, or that of Debian's package
// prometheus, unpacked into the user's cache. It fails the test when there is
// none, and never skips it.
func promtool(t *testing.T) string {
	t.Helper()
	if path, err := exec.LookPath("promtool"); err == nil {
		return path
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Fatalf("find a place for promtool: %v", err)
	}
	program := filepath.Join(cache, "millwright-test", "usr", "bin", "promtool")
	if exec.CommandContext(t.Context(), program, "--version").Run() == nil {
		return program
	}
	work := t.TempDir()
	if err := os.Chmod(work, 0o755); err != nil { // apt-get drops root to write here
		t.Fatal(err)
	}
	if err := fetch(t.Context(), work); err != nil {
		if out, update := output(t.Context(), work, "apt-get", "update", "-q"); update != nil {
			t.Fatalf("fetch promtool: %v; apt-get update: %v\n%s", err, update, out)
		}
		if err := fetch(t.Context(), work); err != nil {
			t.Fatalf("fetch promtool, from Debian's package prometheus: %v", err)
		}
	}
	for _, argv := range [][]string{
		{"sh", "-c", "dpkg-deb --fsys-tarfile prometheus_*.deb | tar -x ./usr/bin/promtool"},
		{"mkdir", "-p", filepath.Dir(program)},
		{"cp", "usr/bin/promtool", program + ".new"},
		{"mv", program + ".new", program},
	} {
		if out, err := output(t.Context(), work, argv...); err != nil {
			t.Fatalf("unpack promtool: %v: %v\n%s", argv, err, out)
		}
	}
	return program
}

func fetch(ctx context.Context, work string) error {
	out, err := output(ctx, work, "apt-get", "download", "-q", "prometheus")
	if err != nil {
		return errors.Join(err, errors.New(out))
	}
	return nil
}

func output(ctx context.Context, work string, argv ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Dir = work
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func TestPromtool(t *testing.T) {
	program := promtool(t)
	if out, err := output(t.Context(), dir, program, "check", "rules", "gpu.rules.yaml"); err != nil || !strings.Contains(out, "SUCCESS") {
		t.Fatalf("promtool check rules: %v\n%s", err, out)
	}
	if out, err := output(t.Context(), dir, program, "test", "rules", "gpu.rules.test.yaml"); err != nil || !strings.Contains(out, "SUCCESS") {
		t.Fatalf("promtool test rules: %v\n%s", err, out)
	}
}

// TestPromtoolNotices changes each rule so that it is wrong: the tests of the
// alert must fail then.
func TestPromtoolNotices(t *testing.T) {
	program := promtool(t)
	whole, tests := read(t, "gpu.rules.yaml"), read(t, "gpu.rules.test.yaml")
	matchers := regexp.MustCompile(`\{[^}]*\}`)
	for i, r := range rules(t) {
		for what, change := range map[string]func(*rule){
			"never fires": func(r *rule) { r.Expr = "(" + r.Expr + ") unless on () vector(1)" },
			"fires at once and at anything": func(r *rule) {
				r.For = ""
				r.Expr = strings.NewReplacer("== 1", ">= 0", "== 0", ">= 0", "> 0", ">= 0").Replace(matchers.ReplaceAllString(r.Expr, ""))
			},
		} {
			t.Run(r.Alert+" "+what, func(t *testing.T) {
				t.Parallel()
				var file file
				if err := yaml.Unmarshal(whole, &file); err != nil {
					t.Fatal(err)
				}
				change(&file.Groups[0].Rules[i])
				work := t.TempDir()
				write(t, filepath.Join(work, "gpu.rules.yaml"), must(yaml.Marshal(file))(t))
				write(t, filepath.Join(work, "gpu.rules.test.yaml"), only(t, tests, r.Alert))
				out, err := output(t.Context(), work, program, "test", "rules", "gpu.rules.test.yaml")
				if exit := (*exec.ExitError)(nil); !errors.As(err, &exit) || !strings.Contains(out, r.Alert) {
					t.Errorf("its test passes: %v\n%s", err, out)
				}
			})
		}
	}
}

// only keeps the tests of one alert.
func only(t *testing.T, tests []byte, alert string) []byte {
	t.Helper()
	var all map[string]any
	if err := yaml.Unmarshal(tests, &all); err != nil {
		t.Fatal(err)
	}
	all["tests"] = slices.DeleteFunc(all["tests"].([]any), func(test any) bool {
		return !bytes.Contains(must(yaml.Marshal(test))(t), []byte("alertname: "+alert+"\n"))
	})
	if len(all["tests"].([]any)) == 0 {
		t.Fatalf("no test of %s", alert)
	}
	return must(yaml.Marshal(all))(t)
}

// TestEveryAlertIsTested wants each alert to fire in a test, and to say what to
// type next.
func TestEveryAlertIsTested(t *testing.T) {
	tests := read(t, "gpu.rules.test.yaml")
	if len(rules(t)) < 9 {
		t.Errorf("%d alerts; nine were there", len(rules(t)))
	}
	for _, r := range rules(t) {
		if !bytes.Contains(tests, []byte("alertname: "+r.Alert+"\n        exp_alerts:\n          - ")) {
			t.Errorf("%s fires in no test", r.Alert)
		}
		if r.Labels["severity"] == "" || r.Annotations["summary"] == "" || !strings.Contains(r.Annotations["description"], "millctl ") {
			t.Errorf("%s: severity, summary, or what to type next is missing", r.Alert)
		}
	}
}

type file struct {
	Groups []struct {
		Name  string `yaml:"name"`
		Rules []rule `yaml:"rules"`
	} `yaml:"groups"`
}

type rule struct {
	Alert       string            `yaml:"alert"`
	Expr        string            `yaml:"expr"`
	For         string            `yaml:"for,omitempty"`
	Labels      map[string]string `yaml:"labels"`
	Annotations map[string]string `yaml:"annotations"`
}

func rules(t *testing.T) []rule {
	t.Helper()
	var f file
	if err := yaml.Unmarshal(read(t, "gpu.rules.yaml"), &f); err != nil {
		t.Fatal(err)
	}
	return f.Groups[0].Rules
}

func read(t *testing.T, name string) []byte {
	t.Helper()
	return must(os.ReadFile(filepath.Join(dir, name)))(t)
}

func write(t *testing.T, path string, b []byte) {
	t.Helper()
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
}

// must fails the test on an error: must(f())(t).
func must[V any](v V, err error) func(*testing.T) V {
	return func(t *testing.T) V {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}
