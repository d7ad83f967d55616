package script_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
)

// TestMillctl runs transcripts against a stand-in of the control plane, which
// can also be told to fail. Besides the commands of testscript they have:
//
//	exits CODE PROGRAM ARGS...   run a program, which must exit with the code
//	found FOUNDING CONTEXT       found the cluster, as millwright-server init does
//	serve, down                  start the server again, and stop it
//	server COMMAND ARGS...       tell the server what to do: see server.tell
//	save NAME PATTERN            set $NAME to what the pattern's group matches in
//	                             the last standard output
func TestMillctl(t *testing.T) {
	bin := build(t)
	testscript.Run(t, testscript.Params{
		Dir: filepath.Join("testdata", "standin"),
		Setup: func(e *testscript.Env) error {
			environment(e, bin)
			s := newServer(t)
			e.Values[serverKey{}] = s
			e.Defer(s.down)
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"exits":  exits,
			"found":  found,
			"serve":  serve,
			"down":   down,
			"server": tell,
			"save":   save,
		},
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
	})
}

// environment is what a person's shell would set.
func environment(e *testscript.Env, bin string) {
	e.Setenv("PATH", bin+string(os.PathListSeparator)+e.Getenv("PATH"))
	e.Setenv("HOME", e.WorkDir)
	e.Setenv("MILLWRIGHT_HOME", filepath.Join(e.WorkDir, "home"))
	e.Setenv("TZ", "UTC")
}

// build makes the program that the transcripts run.
func build(t *testing.T) string {
	t.Helper()
	bin := t.TempDir()
	cmd := exec.CommandContext(t.Context(), "go", "build", "-o", filepath.Join(bin, "millctl"), "github.com/gpuaas/millwright/controlplane/cmd/millctl")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build millctl: %v\n%s", err, out)
	}
	return bin
}

type serverKey struct{}

func serverOf(ts *testscript.TestScript) *server {
	return ts.Value(serverKey{}).(*server)
}

func exits(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: exits CODE PROGRAM ARGS...")
	}
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	got := 0
	err = ts.Exec(args[1], args[2:]...)
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		got = exit.ExitCode()
	} else {
		ts.Check(err)
	}
	if got != want {
		ts.Fatalf("exit code %d, want %d", got, want)
	}
}

func found(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 2 {
		ts.Fatalf("usage: found FOUNDING CONTEXT")
	}
	ts.Check(serverOf(ts).found(ts.MkAbs(args[0]), ts.MkAbs(args[1])))
}

func serve(ts *testscript.TestScript, _ bool, _ []string) { ts.Check(serverOf(ts).serve()) }

func down(ts *testscript.TestScript, _ bool, _ []string) { serverOf(ts).down() }

func tell(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) == 0 {
		ts.Fatalf("usage: server COMMAND ARGS...")
	}
	if args[0] == "context" && len(args) == 4 {
		args[1], args[2] = ts.MkAbs(args[1]), ts.MkAbs(args[2])
	}
	ts.Check(serverOf(ts).tell(args))
}

func save(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 2 {
		ts.Fatalf("usage: save NAME PATTERN")
	}
	value, err := match(args[1], ts.ReadFile("stdout"))
	ts.Check(err)
	ts.Setenv(args[0], value)
}

func match(pattern, text string) (string, error) {
	re, err := compile(pattern)
	if err != nil {
		return "", err
	}
	m := re.FindStringSubmatch(text)
	if len(m) != 2 {
		return "", fmt.Errorf("%q has no match with one group in %q", pattern, strings.TrimSpace(text))
	}
	return m[1], nil
}
