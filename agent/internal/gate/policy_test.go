package gate_test

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/gpuaas/millwright/agent/internal/gate"
)

func TestParsePolicyErrors(t *testing.T) {
	for _, tc := range []struct{ name, in, want string }{
		{"empty", "", "it is empty"},
		{"only a comment", "# nothing\n", "it is empty"},
		{"not yaml", "version: [", "line 1"},
		{"a list", "- version: 1\n", "line 1: the file must hold fields: version, rules"},
		{"no version", "rules: []\n", "line 1: version is missing"},
		{"newer version", "\nversion: 2\nrules: []\n", "line 2: version \"2\" is not known"},
		{"no rules", "version: 1\n", "rules is missing"},
		{"rules no list", "version: 1\nrules: all\n", "line 2: rules must be a list"},
		{"unknown key", "version: 1\nmode: off\nrules: []\n", "line 2: unknown field \"mode\""},
		{"unknown rule key", "version: 1\nrules:\n  - allow: a.b\n    role: [operator]\n", "line 4: unknown field \"role\""},
		{"twice", "version: 1\nversion: 1\nrules: []\n", "line 2"},
		{"rule twice", "version: 1\nrules:\n  - allow: a.b\n    allow: a.c\n", "line 4"},
		{"neither", "version: 1\nrules:\n  - roles: [operator]\n", "line 3: a rule has either allow or deny"},
		{"both", "version: 1\nrules:\n  - allow: a.b\n    deny: a.b\n", "line 3: a rule has either allow or deny"},
		{"no kind", "version: 1\nrules:\n  - allow: mount\n", "line 3: \"mount\" is no kind"},
		{"empty kind", "version: 1\nrules:\n  - allow:\n", "is no kind"},
		{"half a kind", "version: 1\nrules:\n  - allow: storage.mo*\n", "is no kind"},
		{"kind list", "version: 1\nrules:\n  - allow: [a.b]\n", "is no kind"},
		{"role", "version: 1\nrules:\n  - allow: a.b\n    roles: [root]\n", "line 4: roles: \"root\" is no role"},
		{"no roles", "version: 1\nrules:\n  - allow: a.b\n    roles: []\n", "line 4: roles must be a list that is not empty"},
		{"argv of another kind", "version: 1\nrules:\n  - allow: storage.mount\n    argv: [/bin/true]\n", "line 4: argv is only for system.command"},
		{"argv of all kinds", "version: 1\nrules:\n  - deny: \"*\"\n    argv: [/bin/true]\n", "line 4: argv is only for system.command"},
		{"relative program", "version: 1\nrules:\n  - allow: system.command\n    argv: [true]\n", "line 4"},
		{"relative text", "version: 1\nrules:\n  - allow: system.command\n    argv: [bin/true]\n", "no clean absolute path"},
		{"unclean program", "version: 1\nrules:\n  - allow: system.command\n    argv: [/bin/../true]\n", "no clean absolute path"},
		{"bad pattern", "version: 1\nrules:\n  - allow: system.command\n    argv: [\"/bin/[\"]\n", "is no pattern"},
		{"two documents", "version: 1\nrules: []\n---\nversion: 1\nrules: []\n", "more than one document"},
		{"alias", "version: 1\nrules: &r\n  - allow: a.b\n", "line 2: field \"rules\": anchors"},
		{"large", "version: 1\n#" + strings.Repeat("x", 300<<10), "larger than"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := gate.ParsePolicy("policy.yaml", []byte(tc.in))
			if err == nil || !strings.Contains(err.Error(), tc.want) || !strings.HasPrefix(err.Error(), "policy.yaml: ") {
				t.Errorf("ParsePolicy = %v, want policy.yaml and %q", err, tc.want)
			}
		})
	}
}

func TestDecide(t *testing.T) {
	p, err := gate.ParsePolicy("policy.yaml", []byte(`# the node's rules
version: 1
rules:
  - allow: storage.mount
  - deny: storage.*
  - deny: system.command
    argv: ["/usr/local/bin/wipe"]
  - allow: system.command
    roles: [operator]
    argv: ["/usr/bin/true", "/usr/local/bin/*"]
  - deny: system.command
  - allow: "*"
`))
	if err != nil {
		t.Fatal(err)
	}
	op := []string{"operator"}
	for _, tc := range []struct {
		req  gate.Request
		want bool
		line int
	}{
		{gate.Request{Kind: "storage.mount"}, true, 4},
		{gate.Request{Kind: "storage.unmount"}, false, 5},
		{gate.Request{Kind: "storages.mount"}, true, 12},
		{gate.Request{Kind: "system.command", Roles: op, Argv: []string{"/usr/bin/true", "-x"}}, true, 8},
		{gate.Request{Kind: "system.command", Roles: []string{"controller", "operator"}, Argv: []string{"/usr/bin/true"}}, true, 8},
		{gate.Request{Kind: "system.command", Roles: []string{"controller"}, Argv: []string{"/usr/bin/true"}}, false, 11},
		{gate.Request{Kind: "system.command", Roles: op, Argv: []string{"/usr/local/bin/job"}}, true, 8},
		{gate.Request{Kind: "system.command", Roles: op, Argv: []string{"/usr/local/bin/wipe"}}, false, 6},
		{gate.Request{Kind: "system.command", Roles: op, Argv: []string{"/usr/local/bin/sub/job"}}, false, 11},
		{gate.Request{Kind: "system.command", Roles: op, Argv: []string{"/usr/local/bin/../../bin/sh"}}, false, 11},
		{gate.Request{Kind: "system.command", Roles: op, Argv: []string{"true"}}, false, 11},
		{gate.Request{Kind: "system.command", Roles: op}, false, 11},
		{gate.Request{Kind: "task.resolve"}, true, 12},
	} {
		v := p.Decide(tc.req)
		if v.Allowed != tc.want || v.Line != tc.line {
			t.Errorf("Decide(%+v) = %v by line %d, want %v by line %d", tc.req, v.Allowed, v.Line, tc.want, tc.line)
		}
	}
}

// TestPackagedPolicy checks what a node allows as it is installed.
func TestPackagedPolicy(t *testing.T) {
	const file = "../../../packaging/config/policy.yaml"
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	p, err := gate.ParsePolicy(file, data)
	if err != nil {
		t.Fatal(err)
	}
	for kind, want := range map[string]bool{
		"storage.mount": true, "storage.unmount": true, "storage.scratch": false,
		"slurm.drain": true, "slurm.resume": true, "slurm.join": false, "slurm.reconfigure": false, "slurm.leave": false,
		"secret.place": false, "secret.remove": false,
		"container.run": false, "container.stop": true, "system.command": false, "system.reboot": false, "task.resolve": true,
		"no.such": false,
	} {
		if v := p.Decide(gate.Request{Kind: kind, Roles: []string{"operator"}}); v.Allowed != want {
			t.Errorf("%s: %s", kind, v.Message)
		}
		if want || kind == "no.such" {
			continue
		}
		if !strings.Contains(string(data), "  # - allow: "+kind+"\n") {
			t.Errorf("%s is denied, and no comment says how to allow it", kind)
		}
	}
}

func TestReadPolicy(t *testing.T) {
	file := filepath.Join(t.TempDir(), "policy.yaml")
	if _, err := gate.ReadPolicy(file); err == nil || !strings.Contains(err.Error(), "no policy file") {
		t.Errorf("ReadPolicy of a missing file = %v", err)
	}
	if err := os.WriteFile(file, []byte(allowAll), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := gate.ReadPolicy(file); err != nil {
		t.Errorf("ReadPolicy = %v", err)
	}
	for _, mode := range []os.FileMode{0o620, 0o602} {
		if err := os.Chmod(file, mode); err != nil {
			t.Fatal(err)
		}
		if _, err := gate.ReadPolicy(file); err == nil || !strings.Contains(err.Error(), "chmod go-w") {
			t.Errorf("ReadPolicy of mode %#o = %v, want a refusal with the way out", mode, err)
		}
	}
	if os.Geteuid() != 0 {
		return // who is not root cannot give the file away
	}
	if err := os.Chmod(file, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(file, 65534, 65534); err != nil {
		t.Fatal(err)
	}
	if _, err := gate.ReadPolicy(file); err == nil || !strings.Contains(err.Error(), "must belong to root") {
		t.Errorf("ReadPolicy of another user's file = %v", err)
	}
}

// TestPolicyNoFile wants that what is no regular file is refused at once: the
// open of a pipe waits for a writer, and heartbeats read the policy too.
func TestPolicyNoFile(t *testing.T) {
	dir := t.TempDir()
	pipe := filepath.Join(dir, "pipe")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{pipe, dir, "/dev/zero"} {
		if _, err := gate.ReadPolicy(path); err == nil || !strings.Contains(err.Error(), "not a regular file") {
			t.Errorf("ReadPolicy(%s) = %v, want that it is not a regular file", path, err)
		}
	}
}

// FuzzParsePolicy wants no panic, and that what is not understood is no policy:
// a policy that was read denies what no rule names.
func FuzzParsePolicy(f *testing.F) {
	for _, seed := range []string{
		allowAll, "version: 1\nrules: []\n", "version: 1\nrules:\n  - allow: system.command\n    argv: [\"/bin/*\"]\n    roles: [operator]\n",
		"a: &a [*a]", "version: 1\nrules: *x\n", "- - - -", "\x00", "version: 1\r\nrules: [{deny: '*'}]", "? [a]: b\n",
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := gate.ParsePolicy("policy.yaml", b)
		if (p == nil) == (err == nil) {
			t.Fatalf("ParsePolicy = %v, %v", p, err)
		}
		if err != nil {
			if !strings.HasPrefix(err.Error(), "policy.yaml: ") {
				t.Errorf("error %q does not name the file", err)
			}
			return
		}
		if v := p.Decide(gate.Request{Kind: "no.such"}); v.Allowed && !strings.Contains(string(b), "no.") && !strings.Contains(string(b), "*") {
			t.Errorf("policy %q allows a kind that it does not name", b)
		}
	})
}
