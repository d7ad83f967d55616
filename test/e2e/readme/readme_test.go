// Package readme runs the commands of the repository's README.
package readme

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/gpuaas/millwright/test/cluster/clustertest"
	"github.com/gpuaas/millwright/test/testbed"
	"github.com/gpuaas/millwright/test/testbed/testbedtest"
)

// machines are the places that the README's commands are for.
var machines = map[string]string{"server": "n1", "operator": "n2", "node": "n3"}

// hosts are the names that the README gives to machines.
var hosts = map[string]string{"server": "n1", "gpu-001": "n3", "slurm": testbed.SlurmNode}

// block is one fenced block: where its commands are for, and what they are.
type block struct {
	where string
	line  int
	text  string
}

var fence = regexp.MustCompile("^```(.*)$")

// blocks returns the fenced blocks of shell commands, in order.
func blocks(readme string) (out []block, err error) {
	var open *block
	skip := false
	for i, line := range strings.Split(readme, "\n") {
		m := fence.FindStringSubmatch(line)
		switch {
		case m == nil && open != nil:
			open.text += line + "\n"
		case m == nil || skip:
			skip = skip && m == nil
		case open != nil:
			out = append(out, *open)
			open = nil
		case m[1] == "":
			skip = true // a picture
		default:
			where, ok := strings.CutPrefix(m[1], "sh ")
			if !ok || machines[where] == "" {
				return nil, fmt.Errorf("line %d: a block for %q: say sh and one of server, operator, node", i+1, m[1])
			}
			open = &block{where: where, line: i + 1}
		}
	}
	return out, nil
}

func read(t *testing.T, name string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(clustertest.Root(t), name))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestCommands(t *testing.T) {
	testbedtest.NeedRoot(t)
	all, err := blocks(read(t, "README.md"))
	if err != nil || len(all) < 8 {
		t.Fatalf("%d blocks of commands: %v", len(all), err)
	}
	bed := testbedtest.Up(t, testbed.Config{Nodes: 3, Storage: true, Slurm: true})
	w := world{t: t, bed: bed}
	w.prepare()
	for _, b := range all {
		w.run(b)
	}
}

// world is the machines of the README.
type world struct {
	t   *testing.T
	bed *testbed.Testbed
}

func (w world) machine(name string) *testbed.Node {
	w.t.Helper()
	n, err := w.bed.Node(name)
	if err != nil {
		w.t.Fatal(err)
	}
	return n
}

// prepare gives each machine the package that it is to install, and the names.
func (w world) prepare() {
	w.t.Helper()
	ctx := w.t.Context()
	for where, deb := range map[string]string{"server": "millwright-server.deb", "operator": "millwright-ctl.deb", "node": "millwright-agent.deb"} {
		n := w.machine(machines[where])
		data, err := os.ReadFile(filepath.Join(clustertest.Root(w.t), "dist", deb))
		if err != nil {
			w.t.Fatalf("%v: run make deb-all first", err)
		}
		if err := n.WriteFile(ctx, "/root/"+deb, data, 0o644); err != nil {
			w.t.Fatal(err)
		}
		if where == "node" { // a stand-in for GPUs, as the controller's gres.conf names them
			testbedtest.Exec(w.t, n, "sh", "-c", "mknod -m 666 /dev/mwgpu0 c 1 3; mknod -m 666 /dev/mwgpu1 c 1 3")
		}
		names := fmt.Sprintf("echo '%s server.example.org' >> /etc/hosts", w.machine(hosts["server"]).Addr())
		if _, err := n.Exec(ctx, "sh", "-c", names); err != nil {
			w.t.Fatal(err)
		}
	}
}

// run carries out one block. Copies between machines are done by hand, since
// the machines have no ssh; all else is done by the shell of the machine.
func (w world) run(b block) {
	w.t.Helper()
	var script strings.Builder
	for _, line := range strings.SplitAfter(b.text, "\n") {
		if !strings.HasPrefix(line, "scp ") {
			script.WriteString(line)
			continue
		}
		w.shell(b, script.String())
		script.Reset()
		w.copy(b, strings.Fields(line))
	}
	w.shell(b, script.String())
}

func (w world) shell(b block, script string) {
	w.t.Helper()
	if strings.TrimSpace(script) == "" {
		return
	}
	ctx, cancel := context.WithTimeout(w.t.Context(), 2*time.Minute)
	defer cancel()
	result, err := w.machine(machines[b.where]).Exec(ctx, "env", "HOME=/root", "sh", "-e", "-c", "cd /root\n"+script)
	if err != nil {
		w.t.Fatalf("README.md:%d, on the %s: %v\n%s\n%s%s", b.line, b.where, err, script, result.Stdout, result.Stderr)
	}
	w.t.Logf("README.md:%d, on the %s:\n%s\n%s%s", b.line, b.where, script, result.Stdout, result.Stderr)
}

func (w world) copy(b block, fields []string) {
	w.t.Helper()
	if len(fields) != 3 {
		w.t.Fatalf("README.md:%d: %v: want scp FROM TO", b.line, fields)
	}
	from, fromPath := w.place(b, fields[1])
	to, toPath := w.place(b, fields[2])
	data, err := from.ReadFile(w.t.Context(), fromPath)
	if err != nil {
		w.t.Fatalf("README.md:%d: %v", b.line, err)
	}
	mode, err := strconv.ParseUint(testbedtest.Exec(w.t, from, "stat", "--printf=%a", fromPath), 8, 32)
	if err != nil {
		w.t.Fatalf("README.md:%d: mode of %s: %v", b.line, fromPath, err)
	}
	// Unlike WriteFile, scp makes no directories.
	testbedtest.Exec(w.t, to, "test", "-d", filepath.Dir(toPath))
	if err := to.WriteFile(w.t.Context(), toPath, data, fs.FileMode(mode)); err != nil {
		w.t.Fatalf("README.md:%d: %v", b.line, err)
	}
}

// place reads an argument of scp: host:path, or a path below the home.
func (w world) place(b block, arg string) (*testbed.Node, string) {
	w.t.Helper()
	host, path, remote := strings.Cut(arg, ":")
	if !remote {
		return w.machine(machines[b.where]), filepath.Join("/root", arg)
	}
	if hosts[host] == "" {
		w.t.Fatalf("README.md:%d: unknown host %q", b.line, host)
	}
	return w.machine(hosts[host]), path
}

// TestMakeTargets asks that every make target that the README names exists.
// `make demo` is a suite of its own, and `make test` runs this one.
func TestMakeTargets(t *testing.T) {
	makefile := read(t, "Makefile") + read(t, "packaging/deb.mk")
	named := regexp.MustCompile("(?m)(?:`|^    )make ([a-z-]+)").FindAllStringSubmatch(read(t, "README.md"), -1)
	if len(named) < 5 {
		t.Fatalf("the README names %d make targets", len(named))
	}
	for _, m := range named {
		if !regexp.MustCompile(`(?m)^` + regexp.QuoteMeta(m[1]) + `:`).MatchString(makefile) {
			t.Errorf("the README says %q, and there is no such target", m[0])
		}
	}
}

// TestInlineCommands asks that every command that the README names in passing
// is run: by one of its blocks, or by a transcript of test/script.
func TestInlineCommands(t *testing.T) {
	readme := read(t, "README.md")
	all, err := blocks(readme)
	if err != nil {
		t.Fatal(err)
	}
	var run strings.Builder
	for _, b := range all {
		run.WriteString(b.text)
	}
	scripts, err := filepath.Glob(filepath.Join(clustertest.Root(t), "test/script/testdata/*/*.txtar"))
	if err != nil || len(scripts) == 0 {
		t.Fatalf("no transcripts (%v)", err)
	}
	for _, f := range scripts {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		run.Write(b)
	}
	named := regexp.MustCompile("`((?:millctl|millwrightd|millwright-server)(?: [a-z]+)+)").FindAllStringSubmatch(readme, -1)
	if len(named) < 5 {
		t.Fatalf("the README names %d commands in passing", len(named))
	}
	for _, m := range named {
		if !strings.Contains(run.String(), m[1]) {
			t.Errorf("nothing runs %q", m[1])
		}
	}
}

// TestLinks asks that every file that the README links to is there.
func TestLinks(t *testing.T) {
	for _, m := range regexp.MustCompile(`\]\(([^)#:]+)\)`).FindAllStringSubmatch(read(t, "README.md"), -1) {
		if _, err := os.Stat(filepath.Join(clustertest.Root(t), m[1])); err != nil {
			t.Errorf("a link leads nowhere: %v", err)
		}
	}
}
