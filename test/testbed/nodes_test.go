package testbed_test

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gpuaas/millwright/test/testbed"
	"github.com/gpuaas/millwright/test/testbed/testbedtest"
)

func mustNode(t *testing.T, tb *testbed.Testbed, name string) *testbed.Node {
	t.Helper()
	n, err := tb.Node(name)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func bootID(t *testing.T, n *testbed.Node) string {
	t.Helper()
	id, err := n.BootID(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// reaches says whether from gets an answer from to, by one packet.
func reaches(t *testing.T, from *testbed.Node, to string) bool {
	t.Helper()
	_, err := from.Exec(t.Context(), "ping", "-c1", "-W1", to)
	var exited *testbed.ExitError
	if err != nil && !errors.As(err, &exited) {
		t.Fatal(err)
	}
	return err == nil
}

func TestNodesAreMachinesOfTheirOwn(t *testing.T) {
	tb := testbedtest.Up(t, testbed.Config{Nodes: 2})
	n1, n2 := mustNode(t, tb, "n1"), mustNode(t, tb, "n2")
	for _, n := range tb.Nodes() {
		if got := strings.TrimSpace(testbedtest.Exec(t, n, "systemctl", "is-system-running")); got != "running" {
			t.Errorf("node %s: systemd reports %q, want running", n.Name(), got)
		}
		if got := strings.TrimSpace(testbedtest.Exec(t, n, "hostname")); got != n.Name() {
			t.Errorf("hostname: got %q, want %q", got, n.Name())
		}
		testbedtest.Exec(t, n, "busctl", "--quiet", "call", "org.freedesktop.systemd1", "/org/freedesktop/systemd1",
			"org.freedesktop.DBus.Peer", "Ping")
		if !reaches(t, n, "server") {
			t.Errorf("node %s does not reach the machine by the name server", n.Name())
		}
	}
	if !reaches(t, n1, "n2") || !reaches(t, n2, "n1") {
		t.Error("the nodes do not reach each other by name")
	}
	machineBoot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		t.Fatal(err)
	}
	ids := []string{strings.TrimSpace(string(machineBoot)), bootID(t, n1), bootID(t, n2)}
	if ids[0] == ids[1] || ids[1] == ids[2] || ids[0] == ids[2] {
		t.Errorf("boot ids of the machine, n1 and n2: %v, want three", ids)
	}
	if a, b := testbedtest.Exec(t, n1, "cat", "/etc/machine-id"), testbedtest.Exec(t, n2, "cat", "/etc/machine-id"); a == b {
		t.Errorf("both nodes have the machine id %s", a)
	}
	// What one node writes is not in the other.
	if err := n1.WriteFile(t.Context(), "/etc/only-n1/file", []byte("x\x00y"), 0o640); err != nil {
		t.Fatal(err)
	}
	if got, err := n1.ReadFile(t.Context(), "/etc/only-n1/file"); err != nil || string(got) != "x\x00y" {
		t.Errorf("read back: got %q, %v", got, err)
	}
	if got := testbedtest.Exec(t, n1, "stat", "-c", "%a %U", "/etc/only-n1/file"); got != "640 root\n" {
		t.Errorf("mode and owner: got %q", got)
	}
	var exited *testbed.ExitError
	if _, err := n2.ReadFile(t.Context(), "/etc/only-n1/file"); !errors.As(err, &exited) {
		t.Errorf("n2 reads n1's file: %v", err)
	}
}

func TestNodesCannotTouchTheMachine(t *testing.T) {
	tb := testbedtest.Up(t, testbed.Config{Nodes: 1})
	n := mustNode(t, tb, "n1")
	const sysModule, sysTime = 16, 25
	for _, process := range []string{"1", "self"} {
		line := testbedtest.Exec(t, n, "grep", "^CapBnd:", "/proc/"+process+"/status")
		caps, err := strconv.ParseUint(strings.Fields(line)[1], 16, 64)
		if err != nil {
			t.Fatal(err)
		}
		if caps&(1<<sysTime) != 0 || caps&(1<<sysModule) != 0 {
			t.Fatalf("process %s of the node may set the clock or load modules: %x", process, caps)
		}
	}
	// Through exec, and in a unit. Both only try to set what it is already.
	for _, argv := range [][]string{
		{"sh", "-c", `date --set="@$(date +%s.%N)"`},
		{"systemd-run", "--quiet", "--wait", "--pipe", "sh", "-c", `date --set="@$(date +%s.%N)"`},
	} {
		_, err := n.Exec(t.Context(), argv...)
		var exited *testbed.ExitError
		if !errors.As(err, &exited) || !strings.Contains(err.Error(), "Operation not permitted") {
			t.Errorf("%v: got %v, want not permitted", argv, err)
		}
	}
}

func TestNodeHasItsOwnCgroups(t *testing.T) {
	tb := testbedtest.Up(t, testbed.Config{Nodes: 1})
	n := mustNode(t, tb, "n1")
	// Whoever may write the controllers can limit what it runs.
	_, err := n.Exec(t.Context(), "systemd-run", "--quiet", "--wait", "--pipe", "--property=TasksMax=3",
		"sh", "-c", "sleep 1 & sleep 1 & sleep 1 & wait")
	if err == nil || !strings.Contains(err.Error(), "Cannot fork") {
		t.Errorf("five processes where three may be: got %v, want a fork that fails", err)
	}
	testbedtest.Exec(t, n, "systemd-run", "--quiet", "--wait", "--pipe", "--property=TasksMax=9",
		"sh", "-c", "sleep 0 & sleep 0 & sleep 0 & wait")
	pid := testbedtest.Exec(t, n, "systemctl", "show", "--value", "--property=ControlGroup", "dbus.service")
	if got := strings.TrimSpace(pid); got != "/system.slice/dbus.service" {
		t.Errorf("control group of dbus in the node: got %q; it is not the node's own root", got)
	}
}

func TestContainerdRunsAContainer(t *testing.T) {
	tb := testbedtest.Up(t, testbed.Config{Nodes: 1})
	n := mustNode(t, tb, "n1")
	image := writeImage(t, buildStatic(t, `package main

import "os"

func main() {
	if os.Getpid() != 1 {
		panic("not in a process namespace of its own")
	}
	os.Stdout.WriteString("hello from a container\n")
	os.Exit(3)
}
`))
	data, err := os.ReadFile(image)
	if err != nil {
		t.Fatal(err)
	}
	if err := n.WriteFile(t.Context(), "/root/image.tar", data, 0o644); err != nil {
		t.Fatal(err)
	}
	testbedtest.Exec(t, n, "ctr", "images", "import", "--digests", "/root/image.tar")
	res, err := n.Exec(t.Context(), "ctr", "run", "--rm", imageName, "c1")
	if string(res.Stdout) != "hello from a container\n" || res.Code != 3 {
		t.Errorf("container: got %q, exit status %d, want its greeting and 3: %v", res.Stdout, res.Code, err)
	}
}

func TestExec(t *testing.T) {
	tb := testbedtest.Up(t, testbed.Config{Nodes: 1})
	n := mustNode(t, tb, "n1")
	res, err := n.Exec(t.Context(), "sh", "-c", "echo out; echo err >&2; exit 7")
	var exited *testbed.ExitError
	if !errors.As(err, &exited) || exited.Result.Code != 7 {
		t.Errorf("got %v, want exit status 7", err)
	}
	if string(res.Stdout) != "out\n" || string(res.Stderr) != "err\n" || res.Code != 7 {
		t.Errorf("got %q, %q, %d", res.Stdout, res.Stderr, res.Code)
	}
	if _, err := n.Exec(t.Context()); err == nil {
		t.Error("no command: got no error")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if _, err := n.Exec(ctx, "sleep", "7531"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("past the deadline: got %v", err)
	}
	eventually(t, "the command is killed with its context", func() bool {
		_, err := n.Exec(t.Context(), "pgrep", "-f", "^sleep 7531")
		return err != nil
	})
}

func TestRebootGivesANewBoot(t *testing.T) {
	tb := testbedtest.Up(t, testbed.Config{Nodes: 1})
	n := mustNode(t, tb, "n1")
	if err := n.WriteFile(t.Context(), "/var/kept", []byte("kept"), 0o644); err != nil {
		t.Fatal(err)
	}
	testbedtest.Exec(t, n, "touch", "/run/lost")
	before := bootID(t, n)
	var running sync.WaitGroup
	defer running.Wait()
	for range 2 {
		// A command that runs meanwhile ends with the boot, and does not delay it.
		running.Go(func() {
			if _, err := n.Exec(t.Context(), "sleep", "1000"); err == nil {
				t.Error("a command outlived the boot that it ran in")
			}
		})
		eventually(t, "the command runs", func() bool {
			_, err := n.Exec(t.Context(), "pgrep", "-f", "^sleep 1000")
			return err == nil
		})
		start := time.Now()
		if err := n.Reboot(t.Context()); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(start); took > time.Minute {
			t.Errorf("the reboot took %s", took)
		}
	}
	if bootID(t, n) == before {
		t.Error("the boot id is the same after a reboot")
	}
	if got := testbedtest.Exec(t, n, "cat", "/var/kept"); got != "kept" {
		t.Errorf("file on disk: got %q", got)
	}
	if _, err := n.ReadFile(t.Context(), "/run/lost"); err == nil {
		t.Error("a file of /run outlived the reboot")
	}
	if !reaches(t, n, "server") {
		t.Error("no network after the reboot")
	}
}

func TestKillEndsEverythingAtOnce(t *testing.T) {
	tb := testbedtest.Up(t, testbed.Config{Nodes: 2})
	n1, n2 := mustNode(t, tb, "n1"), mustNode(t, tb, "n2")
	testbedtest.Exec(t, n1, "systemd-run", "--quiet", "--unit=long", "sh", "-c", "trap 'touch /var/said-goodbye' TERM; sleep 1000 & wait")
	before := bootID(t, n1)
	if err := n1.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n1.IsOn() {
		t.Error("the node runs after a power cut")
	}
	if _, err := n1.Exec(t.Context(), "true"); !errors.Is(err, testbed.ErrOff) {
		t.Errorf("exec on a node that is off: got %v", err)
	}
	if err := n1.Kill(t.Context()); !errors.Is(err, testbed.ErrOff) {
		t.Errorf("a second power cut: got %v", err)
	}
	if reaches(t, n2, "n1") {
		t.Error("a node that is off answers")
	}
	if err := n1.Logs(t.Context(), t.Output(), "--lines=1"); err != nil {
		t.Errorf("journal of a node that is off: %v", err)
	}
	if err := n1.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := n1.Start(t.Context()); err == nil {
		t.Error("a node that runs was started again")
	}
	if bootID(t, n1) == before {
		t.Error("the boot id is the same after a power cut")
	}
	if _, err := n1.ReadFile(t.Context(), "/var/said-goodbye"); err == nil {
		t.Error("a process was told of the power cut")
	}
	if !reaches(t, n2, "n1") {
		t.Error("the node does not answer after its start")
	}
}

// reachesSoon is reaches, but when it should be true it gives the kernel time to
// find the neighbour's address again.
func reachesSoon(t *testing.T, n *testbed.Node, host string, want bool) bool {
	t.Helper()
	for range 10 {
		if reaches(t, n, host) == want {
			return want
		}
		if !want {
			break
		}
	}
	return !want
}

func TestCutIsSilentAndLasts(t *testing.T) {
	tb := testbedtest.Up(t, testbed.Config{Nodes: 2})
	n1, n2 := mustNode(t, tb, "n1"), mustNode(t, tb, "n2")
	assertCut := func(when string, want bool) {
		t.Helper()
		if got := !reachesSoon(t, n1, "server", !want); got != want {
			t.Errorf("%s: cut from the machine: %v, want %v", when, got, want)
		}
		if got := !reachesSoon(t, n2, "n1", !want); got != want {
			t.Errorf("%s: cut from n2: %v, want %v", when, got, want)
		}
		if n1.IsCut() != want {
			t.Errorf("%s: IsCut: got %v, want %v", when, n1.IsCut(), want)
		}
	}
	assertCut("at first", false)
	for range 2 {
		if err := n1.Cut(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	assertCut("after cut", true)
	if got := testbedtest.Exec(t, n1, "cat", "/sys/class/net/host0/carrier"); got != "1\n" {
		t.Errorf("carrier of a cut node: got %q: it is told of the cut", got)
	}
	if err := n1.Reboot(t.Context()); err != nil {
		t.Fatal(err)
	}
	assertCut("after a reboot", true)
	if err := errors.Join(n1.Kill(t.Context()), n1.Start(t.Context())); err != nil {
		t.Fatal(err)
	}
	assertCut("after a power cut", true)
	for range 2 {
		if err := n1.Heal(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	assertCut("after heal", false)
}

func TestInstall(t *testing.T) {
	tb := testbedtest.Up(t, testbed.Config{Nodes: 1})
	n := mustNode(t, tb, "n1")
	dir := filepath.Join(t.TempDir(), "hello")
	writeFile(t, filepath.Join(dir, "DEBIAN/control"), "Package: testbed-hello\nVersion: 1\nArchitecture: all\nMaintainer: nobody\nDescription: test\n")
	writeFile(t, filepath.Join(dir, "usr/share/hello"), "hello\n")
	deb := filepath.Join(t.TempDir(), "hello.deb")
	if out, err := exec.CommandContext(t.Context(), "dpkg-deb", "--build", "--root-owner-group", dir, deb).CombinedOutput(); err != nil {
		t.Fatalf("dpkg-deb: %v: %s", err, out)
	}
	if err := n.Install(t.Context(), deb); err != nil {
		t.Fatal(err)
	}
	if got := testbedtest.Exec(t, n, "cat", "/usr/share/hello"); got != "hello\n" {
		t.Errorf("installed file: got %q", got)
	}
	writeFile(t, deb, "no package")
	if err := n.Install(t.Context(), deb); err == nil {
		t.Error("a broken package: got no error")
	}
}

func TestVolumeIsSharedAndOutlivesItsServersReboot(t *testing.T) {
	tb := testbedtest.Up(t, testbed.Config{Nodes: 2, Storage: true})
	for _, name := range []string{"n1", "n2"} {
		testbedtest.Exec(t, mustNode(t, tb, name), "mount", "-t", "glusterfs", "storage:/"+testbed.Volume, "/mnt")
	}
	n1, n2 := mustNode(t, tb, "n1"), mustNode(t, tb, "n2")
	if got := testbedtest.Exec(t, n1, "findmnt", "--noheadings", "--output", "FSTYPE,SOURCE", "/mnt"); strings.Join(strings.Fields(got), " ") != "fuse.glusterfs storage:/v1" {
		t.Errorf("mount: got %q", got)
	}
	if err := n1.WriteFile(t.Context(), "/mnt/shared", []byte("by n1"), 0o644); err != nil {
		t.Fatal(err)
	}
	if got := testbedtest.Exec(t, n2, "cat", "/mnt/shared"); got != "by n1" {
		t.Errorf("n2 reads %q", got)
	}
	if err := mustNode(t, tb, testbed.StorageNode).Reboot(t.Context()); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the volume is there after a reboot of its server", func() bool {
		_, err := n2.Exec(t.Context(), "timeout", "5", "cat", "/mnt/shared")
		return err == nil
	})
}

func TestProcessesBelongToTheTestbed(t *testing.T) {
	tb := testbedtest.Up(t, testbed.Config{Nodes: 1})
	if err := tb.StartProcess("No Name", "true"); err == nil {
		t.Error("a bad name: got no error")
	}
	if err := tb.StartProcess("server", "sh", "-c", "echo started; exec sleep 8642"); err != nil {
		t.Fatal(err)
	}
	running := func() bool {
		out, _ := exec.CommandContext(t.Context(), "pgrep", "-f", "^sleep 8642").Output()
		return len(out) > 0
	}
	eventually(t, "the process runs", running)
	if err := tb.StartProcess("server", "true"); err == nil {
		t.Error("a second one of that name: got no error")
	}
	if out, err := os.ReadFile(tb.ProcessLog("server")); err != nil || string(out) != "started\n" {
		t.Errorf("its log: got %q, %v", out, err)
	}
	if err := tb.KillProcess(t.Context(), "server"); err != nil {
		t.Fatal(err)
	}
	if running() {
		t.Error("it runs after KillProcess")
	}
	if err := tb.StartProcess("server", "sleep", "8642"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the process runs again", running)
	if err := tb.Down(t.Context()); err != nil {
		t.Fatal(err)
	}
	if running() {
		t.Error("it runs after Down")
	}
}
