package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// stubborn is a suite that hangs, beside two programs that hold its output, do
// not end by a signal that can be refused, and have it in their first line who
// they are. One of them leaves the process group.
const stubborn = `package stubborn

import (
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"testing"
)

func TestHangs(t *testing.T) {
	t.Log("this was said before")
	for i := range 2 {
		cmd := exec.Command("sh", "-c", "trap '' QUIT INT TERM HUP; echo $$ > $0/child-$1; while :; do sleep 1; done", os.Getenv("MARKS"), fmt.Sprint(i))
		cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: i == 1}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
	}
	hangingHere()
}

func hangingHere() { select {} }
`

// TestHangingSuiteEnds ends a suite as at the end of its time, and asks that it
// says where it hung, that the runner goes on, and that nothing of it is left.
func TestHangingSuiteEnds(t *testing.T) {
	if err := adoptOrphans(); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for name, text := range map[string]string{"go.mod": "module example.org/millwright/stubborn\n\ngo 1.25\n", "stubborn_test.go": stubborn} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	t.Chdir(dir)
	t.Setenv("MARKS", dir)
	ctx, cancel := context.WithCancelCause(t.Context())
	var out strings.Builder
	s := suite{name: "stubborn", packages: []string{"./..."}, timeout: time.Hour}
	ended := make(chan result, 1)
	go func() { ended <- s.run(ctx, &out, false) }()
	pids := awaitPids(dir, 2)
	if pids == nil {
		cancel(errTime)
		t.Fatalf("the suite did not begin: %v\n%s", (<-ended).err, out.String())
	}
	begin := time.Now()
	cancel(fmt.Errorf("%w: by a test", errTime))
	var r result
	select {
	case r = <-ended:
	case <-time.After(3 * lastWords):
		t.Fatalf("the suite has not ended %s after it was told to", 3*lastWords)
	}
	if r.verdict() != "FAILED" || r.err == nil {
		t.Errorf("verdict %s, %v; want FAILED and why", r.verdict(), r.err)
	}
	for _, want := range []string{"out of time: by a test", "NEVER ENDED", "TestHangs", "this was said before", "SIGQUIT", "goroutine ", "stubborn.hangingHere("} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("nothing says %q:\n%s", want, out.String())
		}
	}
	endLeft(t.Context(), true)
	for _, pid := range pids {
		if err := syscall.Kill(pid, 0); err == nil {
			t.Errorf("process %d of the suite still runs", pid)
		}
	}
	t.Logf("ended %s after it was told to", time.Since(begin).Round(time.Millisecond))
}

// awaitPids reads the process ids that the suite wrote down; nil: it did not.
func awaitPids(dir string, want int) []int {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(2 * time.Minute); time.Now().Before(deadline); <-tick.C {
		var pids []int
		for i := range want {
			b, _ := os.ReadFile(filepath.Join(dir, fmt.Sprintf("child-%d", i))) // not there yet
			if pid, err := strconv.Atoi(strings.TrimSpace(string(b))); err == nil {
				pids = append(pids, pid)
			}
		}
		if len(pids) == want {
			return pids
		}
	}
	return nil
}

// TestBudget asks that suites whose turn does not come have failed, in no time.
func TestBudget(t *testing.T) {
	suites := []suite{{name: "a", packages: []string{"./..."}}, {name: "b", packages: []string{"./..."}}}
	begin := time.Now()
	ok, err := run(t.Context(), suites, 0, false)
	if ok || err != nil || time.Since(begin) > 5*time.Second {
		t.Errorf("without time left: %t, %v after %s", ok, err, time.Since(begin))
	}
	if got := (result{notRun: true, passed: 1}).verdict(); got != "NOT RUN" {
		t.Errorf("verdict of a suite that was not begun: %s", got)
	}
}

// TestLimits asks that no suite may take so long that the rest has no time left.
func TestLimits(t *testing.T) {
	for _, s := range required {
		if s.timeout <= 0 || s.timeout > 30*time.Minute {
			t.Errorf("suite %s may take %s", s.name, s.timeout)
		}
	}
}
