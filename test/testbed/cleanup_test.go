package testbed_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gpuaas/millwright/test/testbed"
	"github.com/gpuaas/millwright/test/testbed/cli"
	"github.com/gpuaas/millwright/test/testbed/testbedtest"
)

// ownerVariable makes the test binary the owner of a testbed of that name.
const ownerVariable = "TESTBED_TEST_OWNER"

func TestMain(m *testing.M) {
	if name := os.Getenv(ownerVariable); name != "" {
		os.Exit(own(name))
	}
	os.Exit(m.Run())
}

// own makes a testbed, says so, and never takes it down.
func own(name string) int {
	args := []string{"up", "--owned", "--name", name, "-n", "1", "--storage"}
	if code := cli.Run(context.Background(), args, os.Stdin, os.Stderr, os.Stderr); code != 0 {
		return code
	}
	fmt.Println("up")
	_, _ = bufio.NewReader(os.Stdin).ReadString('\n')
	return 0
}

// leftovers looks for what a testbed of that name may leave, by means of its
// own: it asks nothing that Down asks.
func leftovers(t *testing.T, name string, number int) []string {
	t.Helper()
	if numberTaken(t, name, number) {
		number = -1
	}
	var left []string
	for _, glob := range []string{
		"/run/millwright-testbed/" + name, "/var/lib/millwright-testbed/" + name,
		"/sys/fs/cgroup/millwright-testbed-" + name, "/sys/fs/cgroup/*/millwright-testbed-" + name,
		fmt.Sprintf("/sys/class/net/mwt%d", number), fmt.Sprintf("/sys/class/net/mwt%d[nsx]*", number),
		fmt.Sprintf("/run/netns/mwt%d-*", number), fmt.Sprintf("/run/systemd/nspawn/*/mwt%d-*", number),
	} {
		found, err := filepath.Glob(glob)
		if err != nil {
			t.Fatal(err)
		}
		left = append(left, found...)
	}
	mounts, err := os.ReadFile("/proc/mounts")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, "/millwright-testbed/"+name+"/") {
			left = append(left, "mount "+line)
		}
	}
	return append(left, processesOf(t, name)...)
}

// numberTaken says whether a testbed of another name has the number by now.
func numberTaken(t *testing.T, name string, number int) bool {
	t.Helper()
	names, err := testbed.List()
	if err != nil {
		t.Fatal(err)
	}
	for _, other := range names {
		tb, err := testbed.Open(other, testbedtest.Log(t))
		if errors.Is(err, testbed.ErrNotUp) {
			continue // taken down meanwhile
		}
		if err != nil {
			t.Fatal(err)
		}
		if other != name && numberOf(tb) == number {
			return true
		}
	}
	return false
}

// processesOf returns what still runs with a testbed's name in its control
// group or its command line.
func processesOf(t *testing.T, name string) []string {
	t.Helper()
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for _, dir := range dirs {
		if dir == "/proc/"+strconv.Itoa(os.Getpid()) {
			continue
		}
		status, _ := os.ReadFile(dir + "/status") // it may have ended
		if bytes.Contains(status, []byte("\nState:\tZ")) {
			continue // it has ended; the machine's first process has to collect it
		}
		groups, _ := os.ReadFile(dir + "/cgroup")
		args, _ := os.ReadFile(dir + "/cmdline")
		if bytes.Contains(groups, []byte("/millwright-testbed-"+name+"/")) || bytes.Contains(args, []byte("millwright-testbed/"+name+"/")) {
			found = append(found, dir+" "+strings.ReplaceAll(string(args), "\x00", " "))
		}
	}
	return found
}

func numberOf(tb *testbed.Testbed) int { return int(tb.Address().As4()[2]) }

func nspawnLocks(t *testing.T) []string {
	t.Helper()
	locks, err := filepath.Glob("/run/systemd/nspawn/locks/*")
	if err != nil {
		t.Fatal(err)
	}
	return locks
}

func TestTwoStandSideBySide(t *testing.T) {
	a := testbedtest.Up(t, testbed.Config{Nodes: 1})
	ctx := t.Context()
	cfg := testbed.Config{Name: testbedtest.Name(t) + "b", Nodes: 1, Storage: true, Owned: true, Log: testbedtest.Log(t)}
	b, err := testbed.Up(ctx, cfg)
	if err != nil {
		t.Fatal(err)
	}
	if a.Address() == b.Address() {
		t.Errorf("both have the address %s", a.Address())
	}
	if _, err := testbed.Up(ctx, cfg); !errors.Is(err, testbed.ErrUp) {
		t.Errorf("a second one of the same name: got %v", err)
	}
	n1a, n1b := mustNode(t, a, "n1"), mustNode(t, b, "n1")
	testbedtest.Exec(t, n1a, "touch", "/var/mark")
	if _, err := n1b.ReadFile(ctx, "/var/mark"); err == nil {
		t.Error("n1 of one testbed sees a file of the other's")
	}
	if reaches(t, n1a, n1b.Addr().String()) {
		t.Error("the testbeds' networks are joined")
	}
	if len(leftovers(t, b.Name(), numberOf(b))) == 0 {
		t.Fatal("the search for leftovers finds nothing of a testbed that stands")
	}
	if err := testbed.Down(ctx, b.Name(), testbedtest.Log(t)); err != nil {
		t.Fatal(err)
	}
	if left := leftovers(t, b.Name(), numberOf(b)); len(left) != 0 {
		t.Errorf("left after down: %q", left)
	}
	if err := testbed.Down(ctx, b.Name(), testbedtest.Log(t)); !errors.Is(err, testbed.ErrNotUp) {
		t.Errorf("down of a testbed that is not up: got %v", err)
	}
	if got := testbedtest.Exec(t, n1a, "systemctl", "is-system-running"); got != "running\n" {
		t.Errorf("the other testbed's node: got %q", got)
	}
}

func TestInterruptedUpLeavesNothing(t *testing.T) {
	testbedtest.NeedRoot(t)
	for _, after := range []time.Duration{1, 20, 50, 100, 200, 300, 500, 800, 1200} {
		t.Run(fmt.Sprintf("%dms", after), func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), after*time.Millisecond)
			defer cancel()
			name := testbedtest.Name(t)
			tb, err := testbed.Up(ctx, testbed.Config{Name: name, Nodes: 3, Storage: true, Log: testbedtest.Log(t)})
			if err == nil {
				err = tb.Down(t.Context()) // it was faster
			} else if !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("got %v, want the deadline's error", err)
				err = nil
			} else {
				err = nil
			}
			if err != nil {
				t.Fatal(err)
			}
			// The links are named by number; another testbed may have this one's
			// by now, so they are searched for where only one can stand.
			if left := leftovers(t, name, -1); len(left) != 0 {
				t.Errorf("left after an interrupted up: %q", left)
			}
		})
	}
}

func TestSignalledUpCleansUp(t *testing.T) {
	testbedtest.NeedRoot(t)
	testbedtest.Up(t, testbed.Config{Nodes: 1}).Name() // the image is built by now
	binary := filepath.Join(t.TempDir(), "testbed")
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", binary, "./cmd/testbed").CombinedOutput(); err != nil {
		t.Fatalf("go build: %v: %s", err, out)
	}
	for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM} {
		name := testbedtest.Name(t) + "b"
		cmd := exec.CommandContext(t.Context(), binary, "up", "-n", "3", "--storage", "--name", name)
		cmd.Stdout, cmd.Stderr = t.Output(), t.Output()
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the first node's processes run", func() bool { return len(processesOf(t, name)) > 3 })
		if err := cmd.Process.Signal(sig); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait()
		if code := cmd.ProcessState.ExitCode(); code != 130 {
			t.Errorf("%v: exit status %d, want 130", sig, code)
		}
		if left := leftovers(t, name, -1); len(left) != 0 {
			t.Errorf("%v: left: %q", sig, left)
		}
	}
}

// startOwner runs a process that owns a testbed, until it is up.
func startOwner(t *testing.T, name string) *exec.Cmd {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), ownerVariable+"="+name)
	cmd.Stderr = t.Output()
	if _, err := cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(stdout).ReadString('\n'); line != "up\n" {
		t.Fatalf("owner: got %q, %v", line, err)
	}
	return cmd
}

func TestKilledOwnerTakesItsNodesAlong(t *testing.T) {
	tb := testbedtest.Up(t, testbed.Config{Nodes: 1})
	name := testbedtest.Name(t) + "b"
	owner := startOwner(t, name)
	other, err := testbed.Open(name, testbedtest.Log(t))
	if err != nil {
		t.Fatal(err)
	}
	if err := owner.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = owner.Wait()
	eventually(t, "the nodes end with their owner", func() bool { return len(processesOf(t, name)) == 0 })
	// The next up takes away the rest.
	next := testbed.Config{Name: testbedtest.Name(t) + "c", Nodes: 1, Owned: true, Log: testbedtest.Log(t)}
	third, err := testbed.Up(t.Context(), next)
	if err != nil {
		t.Fatal(err)
	}
	if err := third.Down(t.Context()); err != nil {
		t.Fatal(err)
	}
	if left := leftovers(t, name, numberOf(other)); len(left) != 0 {
		t.Errorf("left of the testbed whose owner was killed: %q", left)
	}
	if !mustNode(t, tb, "n1").IsOn() {
		t.Error("a testbed that stands was taken away too")
	}
}

func TestDownAfterItsKeepersWereKilled(t *testing.T) {
	testbedtest.NeedRoot(t)
	locksBefore := len(nspawnLocks(t))
	name := testbedtest.Name(t)
	if code := cli.Run(t.Context(), []string{"up", "--name", name, "-n", "2", "--storage"}, nil, t.Output(), t.Output()); code != 0 {
		t.Fatalf("up: exit status %d", code)
	}
	tb, err := testbed.Open(name, testbedtest.Log(t))
	if err != nil {
		t.Fatal(err)
	}
	killed := 0
	for _, file := range keeperProcs(t, name) {
		pid, err := strconv.Atoi(file)
		if err != nil {
			t.Fatal(err)
		}
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		killed++
	}
	if killed != 3 {
		t.Errorf("%d keepers, want one for each of 3 nodes", killed)
	}
	if code := cli.Run(t.Context(), []string{"down", "--name", name}, nil, t.Output(), t.Output()); code != 0 {
		t.Fatalf("down: exit status %d", code)
	}
	if left := leftovers(t, name, numberOf(tb)); len(left) != 0 {
		t.Errorf("left after down: %q", left)
	}
	if got := len(nspawnLocks(t)); got > locksBefore {
		t.Errorf("%d lock files of nspawn, %d before", got, locksBefore)
	}
}

func keeperProcs(t *testing.T, name string) []string {
	t.Helper()
	for _, glob := range []string{"/sys/fs/cgroup/*/", "/sys/fs/cgroup/"} {
		files, err := filepath.Glob(glob + "millwright-testbed-" + name + "/keepers/cgroup.procs")
		if err != nil {
			t.Fatal(err)
		}
		if len(files) > 0 {
			data, err := os.ReadFile(files[0])
			if err != nil {
				t.Fatal(err)
			}
			return strings.Fields(string(data))
		}
	}
	return nil
}

func TestConfigIsChecked(t *testing.T) {
	tests := map[string]struct {
		cfg  testbed.Config
		want string
	}{
		"no name":        {testbed.Config{Nodes: 1}, `name: ""`},
		"path in name":   {testbed.Config{Name: "../x", Nodes: 1}, `name: "../x"`},
		"too many nodes": {testbed.Config{Name: "x", Nodes: 65}, "nodes: 65"},
		"nothing":        {testbed.Config{Name: "x"}, "nodes: 0"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			tc.cfg.Log = testbedtest.Log(t)
			if _, err := testbed.Up(t.Context(), tc.cfg); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want %q in it", err, tc.want)
			}
		})
	}
	if _, err := testbed.Open("none", testbedtest.Log(t)); !errors.Is(err, testbed.ErrNotUp) {
		t.Errorf("open: got %v, want ErrNotUp", err)
	}
}
