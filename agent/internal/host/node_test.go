//go:build millwright_node

package nodehost_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gpuaas/millwright/agent/internal/child"
	"github.com/gpuaas/millwright/agent/internal/clock"
	"github.com/gpuaas/millwright/agent/internal/containerlog"
	nodehost "github.com/gpuaas/millwright/agent/internal/host"
	"github.com/gpuaas/millwright/agent/internal/shim"
	"github.com/gpuaas/millwright/tasks/host"
)

// TestMain makes the test binary the agent's executable: the shim and the probe.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case "shim":
			os.Exit(shim.Main(os.Args[2:], os.Stderr))
		case "container-log":
			os.Exit(containerlog.Main(os.Args[2:], os.Stderr))
		case "run", "exit", "hog":
			os.Exit(program(os.Args[1:]))
		case "hold-lock":
			os.Exit(lockMain(os.Args[2]))
		case "probe":
			os.Exit(child.ProbeMain(os.Args[2:], os.Stdout, os.Stderr))
		}
	}
	os.Exit(m.Run())
}

// needNode stops a test that changes a machine with a systemd of its own from
// doing so by mistake. The tag millwright_node builds these tests; test/e2e/host
// runs them in a node, with the variable set.
func needNode(t *testing.T) {
	t.Helper()
	if os.Getenv("MILLWRIGHT_NODE_TEST") != "1" {
		t.Fatal("this test changes a machine with systemd: it runs in a node, with MILLWRIGHT_NODE_TEST=1")
	}
}

// newNode returns the machine, with a state directory of its own.
func newNode(t *testing.T, state string) *nodehost.Node {
	t.Helper()
	return loggingNode(t, state, t.Output())
}

// loggingNode returns the machine, which logs to w.
func loggingNode(t *testing.T, state string, w io.Writer) *nodehost.Node {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	n := nodehost.New(nodehost.Config{
		StateDir: state, Executable: exe, Clock: clock.System{},
		Logger: slog.New(slog.NewTextHandler(w, nil)), ProbeTimeout: 2 * time.Second,
	})
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := n.Close(ctx); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return n
}

// taskID is one that no other test, and no earlier run, has.
func taskID(t *testing.T) string {
	t.Helper()
	return fmt.Sprintf("test-%s-%d", strings.ReplaceAll(strings.ToLower(t.Name()), "/", "-"), time.Now().UnixNano())
}

func newHost(t *testing.T) host.Host { return newNode(t, t.TempDir()).ForStep(taskID(t), 0) }

func eventually(t *testing.T, what string, cond func() bool) {
	t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.After(30 * time.Second); !cond(); {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("waited in vain for %s", what)
		}
	}
}

func exists(path string) bool { _, err := os.Stat(path); return err == nil }

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// systemctl runs systemctl and returns what it wrote.
func systemctl(t *testing.T, args ...string) string {
	t.Helper()
	out, err := exec.Command("systemctl", args...).CombinedOutput()
	t.Logf("systemctl %s: %v %s", strings.Join(args, " "), err, out)
	return strings.TrimSpace(string(out))
}

// writeUnit makes a unit that goes when the test ends.
func writeUnit(t *testing.T, h host.Host, name, text string) {
	t.Helper()
	path := filepath.Join("/etc/systemd/system", name)
	must(t, h.WriteFile(t.Context(), path, host.File{Data: []byte(text), Mode: 0o644}))
	must(t, h.Reload(t.Context()))
	t.Cleanup(func() {
		systemctl(t, "stop", name)
		systemctl(t, "disable", name)
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Error(err)
		}
		systemctl(t, "daemon-reload")
		systemctl(t, "reset-failed")
	})
}

func TestFacts(t *testing.T) {
	h := newNode(t, t.TempDir()).Prober()
	boot, err := h.BootID(t.Context())
	if err != nil || len(boot) != 36 {
		t.Errorf("boot id %q, %v", boot, err)
	}
	if p, err := h.FindProgram(t.Context(), "sh"); err != nil || !strings.HasSuffix(p, "/bin/sh") {
		t.Errorf("sh is %q, %v", p, err)
	}
	for name, want := range map[string]error{"no-such-program": fs.ErrNotExist, "../bin/sh": fs.ErrInvalid, "": fs.ErrInvalid} {
		if p, err := h.FindProgram(t.Context(), name); !errors.Is(err, want) {
			t.Errorf("%q is %q, %v", name, p, err)
		}
	}
	for name, want := range map[string]bool{"root": true, "no-such-user": false} {
		if got, err := h.UserExists(t.Context(), name); err != nil || got != want {
			t.Errorf("user %s: %v, %v", name, got, err)
		}
	}
	if known, err := h.FilesystemKnown(t.Context(), "tmpfs"); err != nil || !known {
		t.Errorf("tmpfs: %v, %v", known, err)
	}
	if _, ok := h.(host.FileWriter); ok {
		t.Error("the prober can write")
	}
}

func TestProbes(t *testing.T) {
	h, dir := newNode(t, t.TempDir()).Prober(), t.TempDir()
	must(t, h.ProbeWrite(t.Context(), dir))
	must(t, h.ProbeRead(t.Context(), dir))
	if c, err := h.ProbeCapacity(t.Context(), dir); err != nil || c.TotalBytes == 0 || c.FreeBytes > c.TotalBytes {
		t.Errorf("capacity %+v, %v", c, err)
	}
	if err := h.ProbeRead(t.Context(), filepath.Join(dir, "none")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("error %v", err)
	}
}

func TestUnitLife(t *testing.T) {
	needNode(t)
	h, name := newHost(t), "mwtest-life.service"
	if u, err := h.Unit(t.Context(), name); err != nil || u.Load != "not-found" {
		t.Errorf("before: %+v, %v", u, err)
	}
	if err := h.StartUnit(t.Context(), name); !errors.Is(err, host.ErrNoUnit) {
		t.Errorf("start before: %v", err)
	}
	must(t, h.StopUnit(t.Context(), name))
	must(t, h.SetUnitEnabled(t.Context(), name, false))
	writeUnit(t, h, name, "[Service]\nExecStart=/bin/sleep 1000\n[Install]\nWantedBy=multi-user.target\n")
	for range 2 {
		must(t, h.SetUnitEnabled(t.Context(), name, true))
		must(t, h.StartUnit(t.Context(), name))
	}
	u, err := h.Unit(t.Context(), name)
	if err != nil || u.Active != "active" || u.Sub != "running" || u.Enabled != "enabled" || u.Result != "success" ||
		len(u.Invocation) != 32 || !u.ConditionMet || u.Fragment != "/etc/systemd/system/"+name {
		t.Errorf("running: %+v, %v", u, err)
	}
	path := filepath.Join("/etc/systemd/system", name)
	must(t, h.WriteFile(t.Context(), path, host.File{Data: []byte("[Service]\nExecStart=/bin/sleep 2000\n[Install]\nWantedBy=multi-user.target\n"), Mode: 0o644}))
	must(t, os.Chtimes(path, time.Now(), time.Now().Add(time.Minute)))
	if u, err := h.Unit(t.Context(), name); err != nil || !u.NeedReload {
		t.Errorf("changed: %+v, %v", u, err)
	}
	for range 2 {
		must(t, h.SetUnitEnabled(t.Context(), name, false))
		must(t, h.StopUnit(t.Context(), name))
	}
	if u, err := h.Unit(t.Context(), name); err != nil || u.Active != "inactive" || u.Enabled != "disabled" {
		t.Errorf("stopped: %+v, %v", u, err)
	}
}

// A unit that does not get there is an error that says why, and a failure does
// not stick to the next attempt.
func TestUnitFails(t *testing.T) {
	needNode(t)
	h, name, flag := newHost(t), "mwtest-fails.service", filepath.Join(t.TempDir(), "ok")
	writeUnit(t, h, name, "[Unit]\nStartLimitIntervalSec=1h\nStartLimitBurst=2\n[Service]\nType=oneshot\nRemainAfterExit=yes\n"+
		"ExecStart=/bin/sh -c 'test -e "+flag+" || { echo the reason is here; exit 3; }'\n")
	for range 4 {
		err := h.StartUnit(t.Context(), name)
		if !errors.Is(err, host.ErrJob) || !strings.Contains(err.Error(), "Result=exit-code") {
			t.Fatalf("error %v", err)
		}
		if !strings.Contains(err.Error(), "the reason is here") {
			t.Errorf("the log is missing: %v", err)
		}
	}
	must(t, os.WriteFile(flag, nil, 0o600))
	must(t, h.StartUnit(t.Context(), name))

	bad := "mwtest-bad.mount"
	writeUnit(t, h, bad, "[Mount]\nWhat=tmpfs\nWhere=/somewhere/else\nType=tmpfs\n")
	if err := h.StartUnit(t.Context(), bad); !errors.Is(err, host.ErrJob) {
		t.Errorf("a mount unit with another name: %v", err)
	}
}

const mountPoint = "/mnt/mwtest"

func tmpfsUnit(t *testing.T, h host.Host) (name string) {
	t.Helper()
	name = "mnt-mwtest.mount"
	must(t, h.MakeDir(t.Context(), mountPoint, 0o755))
	t.Cleanup(func() { _ = os.Remove(mountPoint) }) // the cleanup of the unit runs first
	writeUnit(t, h, name, "[Mount]\nWhat=tmpfs\nWhere="+mountPoint+"\nType=tmpfs\nTimeoutSec=10\n")
	return name
}

func TestBusyMount(t *testing.T) {
	needNode(t)
	h := newHost(t)
	name := tmpfsUnit(t, h)
	must(t, h.StartUnit(t.Context(), name))
	if users, err := h.Users(t.Context(), mountPoint); err != nil || len(users) != 0 {
		t.Errorf("users of an idle mount: %v, %v", users, err)
	}
	if err := h.RemoveDir(t.Context(), mountPoint); !errors.Is(err, host.ErrBusy) {
		t.Errorf("the mount point was removed: %v", err)
	}
	busy := exec.Command("/bin/sleep", "1000")
	busy.Dir = mountPoint
	must(t, busy.Start())
	err := h.StopUnit(t.Context(), name)
	want := fmt.Sprintf("process %d (/bin/sleep 1000) by its cwd", busy.Process.Pid)
	if !errors.Is(err, host.ErrBusy) || !strings.Contains(err.Error(), want) {
		t.Errorf("error %v, want %s", err, want)
	}
	if u, err := h.Unit(t.Context(), name); err != nil || u.Active != "active" {
		t.Errorf("after: %+v, %v", u, err)
	}
	must(t, busy.Process.Kill())
	_ = busy.Wait() // it was killed
	must(t, h.StopUnit(t.Context(), name))
	must(t, h.RemoveDir(t.Context(), mountPoint))
}

// What a mount that failed has left behind is ended.
func TestFailedMountLeavesNothing(t *testing.T) {
	needNode(t)
	h, helper, pidFile := newHost(t), "/sbin/mount.mwtestbad", filepath.Join(t.TempDir(), "pid")
	must(t, os.WriteFile(helper, []byte("#!/bin/sh\nsleep 1000 & echo $! > "+pidFile+"\necho no such volume >&2\nexit 1\n"), 0o755))
	t.Cleanup(func() { must(t, os.Remove(helper)) })
	must(t, h.MakeDir(t.Context(), mountPoint, 0o755))
	t.Cleanup(func() { _ = os.Remove(mountPoint) }) // the cleanup of the unit runs first
	name := "mnt-mwtest.mount"
	writeUnit(t, h, name, "[Mount]\nWhat=srv:/v\nWhere="+mountPoint+"\nType=mwtestbad\nTimeoutSec=10\n")
	if err := h.StartUnit(t.Context(), name); !errors.Is(err, host.ErrJob) || !strings.Contains(err.Error(), "no such volume") {
		t.Errorf("error %v", err)
	}
	pid, err := os.ReadFile(pidFile)
	must(t, err)
	eventually(t, "its end", func() bool { return !exists("/proc/" + strings.TrimSpace(string(pid))) })
}

// Users are found by what they hold, in this mount namespace and in others.
func TestUsers(t *testing.T) {
	needNode(t)
	h := newHost(t)
	must(t, h.StartUnit(t.Context(), tmpfsUnit(t, h)))
	file := filepath.Join(mountPoint, "f")
	must(t, os.WriteFile(file, []byte("x"), 0o600))
	sleep, err := os.ReadFile("/bin/sleep")
	must(t, err)
	own := filepath.Join(mountPoint, "sleep")
	must(t, os.WriteFile(own, sleep, 0o755))
	for how, argv := range map[string][]string{
		"fd 3": {"/bin/sh", "-c", "exec 3< " + file + "; echo up; exec sleep 1000"},
		"exe":  {"/bin/sh", "-c", "echo up; exec " + own + " 1000"},
		"cwd":  {"/usr/bin/unshare", "--mount", "/bin/sh", "-c", "cd " + mountPoint + "; echo up; exec sleep 1000"},
		"root": {"/bin/sh", "-c", "mkdir -p " + mountPoint + "/r; echo up; exec unshare --root=" + mountPoint + " /sleep 1000"},
	} {
		t.Run(how, func(t *testing.T) {
			if how == "root" {
				copyLibraries(t, mountPoint)
			}
			c := exec.Command(argv[0], argv[1:]...)
			out, err := c.StdoutPipe()
			must(t, err)
			must(t, c.Start())
			_, err = out.Read(make([]byte, 8))
			must(t, err)
			eventually(t, "the user", func() bool {
				users, err := h.Users(t.Context(), mountPoint)
				must(t, err)
				for _, u := range users {
					if u.PID == c.Process.Pid && u.How == how {
						return true
					}
				}
				return false
			})
			must(t, c.Process.Kill())
			_ = c.Wait() // it was killed
		})
	}
}

// copyLibraries makes dynamically linked programs run with root as their root.
func copyLibraries(t *testing.T, root string) {
	t.Helper()
	out, err := exec.Command("/bin/sh", "-c", "ldd /bin/sleep | grep -o '/[^ ]*' | xargs cp --parents -L -t "+root).CombinedOutput()
	if err != nil {
		t.Fatalf("%v %s", err, out)
	}
}

// The connection survives what makes it break.
func TestSystemdRestarts(t *testing.T) {
	needNode(t)
	h, name := newHost(t), "mwtest-restart.service"
	writeUnit(t, h, name, "[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStartPre=/bin/sleep 2\nExecStart=/bin/true\n")
	for _, breakage := range [][]string{{"daemon-reexec"}, {"daemon-reload"}, {"restart", "dbus.service"}} {
		t.Run(breakage[0], func(t *testing.T) {
			must(t, h.StopUnit(t.Context(), name))
			var wg sync.WaitGroup
			var err error
			wg.Go(func() { err = h.StartUnit(t.Context(), name) })
			eventually(t, "the start", func() bool { return systemctl(t, "is-active", name) == "activating" })
			systemctl(t, breakage...)
			wg.Wait()
			must(t, err)
			if u, err := h.Unit(t.Context(), name); err != nil || u.Active != "active" {
				t.Errorf("after: %+v, %v", u, err)
			}
		})
	}
}
