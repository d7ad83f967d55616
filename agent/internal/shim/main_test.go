package shim_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gpuaas/millwright/agent/internal/shim"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// TestMain makes the test binary the shim, and the programs that it runs.
func TestMain(m *testing.M) {
	if len(os.Args) < 2 {
		os.Exit(m.Run())
	}
	if os.Args[1] == "shim" {
		os.Exit(shim.Main(os.Args[2:], os.Stderr))
	}
	if program, ok := programs[os.Args[1]]; ok {
		os.Exit(program(os.Args[2:]))
	}
	os.Exit(m.Run())
}

// programs are what the shim runs in these tests, by their first argument.
var programs = map[string]func(args []string) int{
	// exit CODE
	"exit": func(args []string) int { n, _ := strconv.Atoi(args[0]); return n },
	// emit BYTES: one line of a's, with no newline
	"emit": func(args []string) int {
		n, _ := strconv.Atoi(args[0])
		chunk := bytes.Repeat([]byte("a"), 64<<10)
		for n > 0 {
			k, err := os.Stdout.Write(chunk[:min(n, len(chunk))])
			if err != nil {
				return 1
			}
			n -= k
		}
		return 0
	},
	// count N: the numbers below N, a line each, on stderr
	"count": func(args []string) int {
		n, _ := strconv.Atoi(args[0])
		var b bytes.Buffer
		for i := range n {
			fmt.Fprintln(&b, i)
		}
		_, _ = io.Copy(os.Stderr, &b)
		return 0
	},
	// binary: every byte, so no valid UTF-8
	"binary": func([]string) int {
		for i := range 256 {
			_, _ = os.Stdout.Write([]byte{byte(i)})
		}
		return 0
	},
	// append FILE: one byte, to count how often it ran
	"append": func(args []string) int {
		f, err := os.OpenFile(args[0], os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o666)
		if err != nil {
			return 1
		}
		_, _ = f.WriteString("x")
		return 0
	},
	// leave FILE: leaves a process behind that keeps the pipe, and ends
	"leave": func(args []string) int {
		c := exec.Command(os.Args[0], "linger")
		c.Stdout, c.Stderr = os.Stdout, os.Stderr
		if err := c.Start(); err != nil {
			return 1
		}
		_, _ = fmt.Print("parent\n")
		return b2i(os.WriteFile(args[0], []byte(strconv.Itoa(c.Process.Pid)), 0o600) != nil)
	},
	// linger: stays, for a minute at most
	"linger": func([]string) int { <-time.After(time.Minute); return 0 },
	// wait FILE: makes FILE and stays until a signal ends it
	"wait": func(args []string) int {
		if err := os.WriteFile(args[0], nil, 0o600); err != nil {
			return 1
		}
		<-time.After(time.Minute)
		return 0
	},
	// stubborn FILE: like wait, but SIGTERM makes it exit 9
	"stubborn": func(args []string) int {
		ch := make(chan os.Signal, 1)
		signal.Notify(ch, syscall.SIGTERM)
		if err := os.WriteFile(args[0], nil, 0o600); err != nil {
			return 1
		}
		<-ch
		return 9
	},
	// where: the environment, the directory and the ids
	"where": func([]string) int {
		wd, _ := os.Getwd()
		fmt.Printf("%s\n%s\n%d:%d\n%d", strings.Join(os.Environ(), " "), wd, os.Getuid(), os.Getgid(), syscall.Getpgrp()-os.Getpid())
		return 0
	},
}

func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}

// self is the test binary.
func self(t *testing.T) string {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return exe
}

// newCommand makes the directory of a command that runs one of the programs.
func newCommand(t *testing.T, spec *taskv1.CommandStep) shim.Dir {
	t.Helper()
	dir, err := shim.ID{TaskID: "018f-test", Step: 3, Attempt: 1}.Dir(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if err := dir.WriteSpec(spec); err != nil {
		t.Fatal(err)
	}
	return dir
}

func program(t *testing.T, argv ...string) *taskv1.CommandStep {
	t.Helper()
	return &taskv1.CommandStep{Argv: append([]string{self(t)}, argv...)}
}

// shimFor is a shim of dir that was not started yet.
func shimFor(t *testing.T, dir shim.Dir, args ...string) *exec.Cmd {
	t.Helper()
	c := exec.CommandContext(t.Context(), self(t), append([]string{"shim"}, append(args, string(dir))...)...)
	c.Env = []string{"INVOCATION_ID=0123456789abcdef", "SECRET=hidden"}
	c.Stderr = &bytes.Buffer{}
	return c
}

// runShim runs a shim to its end and returns its exit code.
func runShim(t *testing.T, dir shim.Dir) int {
	t.Helper()
	c := shimFor(t, dir)
	err := c.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	t.Logf("shim: exit %d %s", c.ProcessState.ExitCode(), c.Stderr)
	return c.ProcessState.ExitCode()
}

// outcome runs the command and returns its recorded outcome.
func outcome(t *testing.T, dir shim.Dir) *taskv1.CommandOutcome {
	t.Helper()
	if code := runShim(t, dir); code != 0 {
		t.Fatalf("shim exited with %d", code)
	}
	rec, err := dir.Result()
	if err != nil {
		t.Fatal(err)
	}
	if rec.GetStartError() != "" {
		t.Fatalf("start error %q", rec.GetStartError())
	}
	return rec.GetOutcome()
}

// eventually waits until cond holds.
func eventually(t *testing.T, what string, cond func() bool) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.After(20 * time.Second); !cond(); {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("waited in vain for %s", what)
		}
	}
}

func exists(path string) bool { _, err := os.Stat(path); return err == nil }

func readFile(t *testing.T, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func inDir(dir shim.Dir, name string) string { return filepath.Join(string(dir), name) }
