package arch_test

import (
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// rule forbids imports to packages below a directory. Paths of this module are
// given without the module's name; a trailing * matches any suffix.
type rule struct {
	from   string   // packages that it binds
	except []string // packages below from that it does not bind
	deny   []string // what they may not import
	allow  []string // exceptions to deny
	reason string
}

var rules = []rule{
	{
		from: "proto/millwright", deny: []string{"agent*", "controlplane*", "tasks*", "pki*", "test/*", "packaging*"},
		reason: "messages stand on nothing, so that everyone can stand on them",
	},
	{
		from: "pki", deny: []string{"agent*", "controlplane*", "tasks*", "test/*"},
		reason: "identity and signatures are public packages for both sides",
	},
	{
		from: "tasks", deny: []string{"agent*", "controlplane*", "pki*"},
		reason: "a task knows neither who asked nor who carries it out",
	},
	{
		from: "tasks/host", except: []string{"tasks/host/hosttest"}, deny: []string{"agent*", "controlplane*", "pki*", "proto*", "tasks*"},
		reason: "the host interfaces are about a node and nothing else",
	},
	{
		from: "tasks/container", deny: domainDenied, reason: domainReason,
	},
	{
		from: "tasks/storage", deny: domainDenied, reason: domainReason,
	},
	{
		from: "tasks/system", deny: domainDenied, reason: domainReason,
	},
	{
		from: "tasks/task", deny: domainDenied, reason: domainReason,
	},
	{
		from: "tasks/step", deny: append([]string{"tasks/container*", "tasks/storage*", "tasks/system*", "tasks/task*"}, domainDenied...),
		reason: "library steps are data and go through the host interfaces only",
	},
	{
		from: "agent", deny: []string{"controlplane*"},
		reason: "the node and the control plane share formats, not code",
	},
	{
		from: "controlplane", deny: []string{"agent*"},
		reason: "the node and the control plane share formats, not code",
	},
	{
		from: "controlplane", deny: []string{"tasks/step*", "github.com/coreos/go-systemd/v22/dbus", "github.com/godbus/dbus*"},
		reason: "the server carries nothing out; tasks/all links the steps, as data",
	},
	{
		from: "agent", except: []string{"agent/internal/host"}, deny: []string{"github.com/coreos/go-systemd/v22/dbus", "github.com/godbus/dbus*", "github.com/containerd/*"},
		reason: "only agent/internal/host touches systemd, containerd and mounts",
	},
	{
		from: "agent", except: []string{"agent/internal/child", "agent/internal/shim"}, deny: []string{"os/exec"},
		reason: "only the shim and the children run processes",
	},
	{
		from: "", except: []string{"agent/internal/gpu/nvml"}, deny: []string{"github.com/NVIDIA/go-nvml*"},
		reason: "a function that the driver's library lacks ends the process: one package looks before it calls",
	},
	{
		from: "", except: []string{"agent/internal/gpu/nvml", "agent/cmd/millwright-gpu"}, deny: []string{"agent/internal/gpu/nvml"},
		reason: "a call into the GPU driver may never return: millwright-gpu alone makes one, and the agent goes on without it",
	},
	{
		from: "agent/internal/gpu/serve", deny: []string{"agent/internal/child", "agent/internal/gpu"},
		reason: "millwright-gpu answers; what follows from an answer, or from none, is decided in the agent",
	},
	{
		from: "controlplane", except: []string{"controlplane/internal/store/look"}, deny: []string{"os/exec", "plugin"},
		reason: "the control plane runs nothing but itself, to look at its store",
	},
	{
		from: "", except: []string{"agent/internal/state", "controlplane/internal/store/boltstore"}, deny: []string{"go.etcd.io/bbolt", "database/sql"},
		reason: "only the state and store packages know how data lies on disk",
	},
	{
		from: "", except: []string{"agent/internal/gpu/nvml", "test/fakenvml"}, deny: []string{"github.com/NVIDIA/*"},
		reason: "a call that the driver lacks ends the process, and one that hangs pins it: only the child for GPUs links NVML",
	},
	{
		from: "", except: []string{"test"}, deny: []string{"test/*"},
		reason: "product code never depends on tests",
	},
	{
		from: "", deny: []string{"log", "github.com/sirupsen/*", "go.uber.org/zap*", "github.com/stretchr/*"},
		reason: "logs go through log/slog, tests through the standard library and go-cmp",
	},
}

var domainDenied = []string{"os", "os/exec", "net", "net/*", "syscall", "golang.org/x/sys*", "github.com/godbus/*", "github.com/coreos/*", "github.com/containerd/*"}

const domainReason = "a domain is a planner: it sees the node only through tasks/host"

func TestImportRules(t *testing.T) {
	for _, p := range packages(t) {
		for _, r := range rules {
			if !within(p.rel(), r.from) || slices.ContainsFunc(r.except, func(e string) bool { return within(p.rel(), e) }) {
				continue
			}
			for _, imp := range p.Imports {
				name := strings.TrimPrefix(imp, module+"/")
				if matches(name, r.deny) && !matches(name, r.allow) {
					t.Errorf("%s imports %s: %s", p.rel(), name, r.reason)
				}
			}
		}
	}
}

// TestDomainsDoNotSeeEachOther finds the domains by itself, so that a new one
// is bound too.
func TestDomainsDoNotSeeEachOther(t *testing.T) {
	library := []string{"tasks", "tasks/host", "tasks/host/hosttest", "tasks/step", "tasks/all", "tasks/tasktest", "tasks/tasktest/fakehost"}
	for _, p := range packages(t) {
		if !within(p.rel(), "tasks") || slices.Contains(library, p.rel()) {
			continue
		}
		for _, imp := range p.Imports {
			name, ours := strings.CutPrefix(imp, module+"/")
			ok := !ours || name == "tasks" || name == "tasks/host" || name == "tasks/step" || within(name, "proto") ||
				within(p.rel(), "tasks/mig") && within(name, "tasks/mig") || // a solver and names, which see no node
				name == "tasks/gpu/selector" // which GPUs a spec means
			if !ok || matches(name, domainDenied) {
				t.Errorf("%s imports %s: %s", p.rel(), name, domainReason)
			}
		}
	}
}

// TestServerLinksNoHost looks at all that the server binary links.
func TestServerLinksNoHost(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), "go", "list", "-deps", "./controlplane/cmd/millwright-server")
	cmd.Dir = root()
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("list what the server links: %v", err)
	}
	for _, imp := range strings.Fields(string(out)) {
		for _, bad := range []string{"github.com/godbus/dbus", "github.com/containerd/containerd", "github.com/NVIDIA/go-nvml", module + "/agent"} {
			if imp == bad || strings.HasPrefix(imp, bad+"/") {
				t.Errorf("the server links %s: it runs no tasks", imp)
			}
		}
	}
}

// TestAgentLinksNoNVML looks at all that the agent links, with cgo at hand.
func TestAgentLinksNoNVML(t *testing.T) {
	links := map[string]string{}
	for _, program := range []string{"millwrightd", "millwright-gpu"} {
		cmd := exec.CommandContext(t.Context(), "go", "list", "-deps", "./agent/cmd/"+program)
		cmd.Dir = root()
		cmd.Env = append(os.Environ(), "CGO_ENABLED=1")
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("list what %s links: %v", program, err)
		}
		links[program] = string(out)
	}
	if strings.Contains(links["millwrightd"], "go-nvml") || strings.Contains(links["millwrightd"], "agent/internal/gpu/nvml") {
		t.Error("the agent links NVML: a missing symbol would end it in the middle of a task")
	}
	if !strings.Contains(links["millwright-gpu"], "github.com/NVIDIA/go-nvml") {
		t.Error("millwright-gpu does not link NVML, so this test sees nothing")
	}
	for _, heavy := range []string{"google.golang.org/grpc\n", "go.etcd.io/bbolt"} {
		if strings.Contains(links["millwright-gpu"], heavy) {
			t.Errorf("millwright-gpu links %s: it is to be small", strings.TrimSpace(heavy))
		}
	}
}

// TestRulesBite makes sure that the matcher refuses what it should.
func TestRulesBite(t *testing.T) {
	for _, tc := range []struct {
		name string
		deny []string
		want bool
	}{
		{"agent/internal/state", []string{"agent*"}, true},
		{"net/http", []string{"net", "net/*"}, true},
		{"netip", []string{"net", "net/*"}, false},
		{"os/exec", []string{"os"}, false},
		{"os", []string{"os"}, true},
	} {
		if got := matches(tc.name, tc.deny); got != tc.want {
			t.Errorf("matches(%q, %q) = %v, want %v", tc.name, tc.deny, got, tc.want)
		}
	}
}

func within(name, dir string) bool {
	return dir == "" || name == dir || strings.HasPrefix(name, dir+"/")
}

func matches(name string, patterns []string) bool {
	return slices.ContainsFunc(patterns, func(p string) bool {
		if prefix, ok := strings.CutSuffix(p, "*"); ok {
			return strings.HasPrefix(name, prefix)
		}
		return name == p
	})
}
