package testbed

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// deniedCapabilities would reach out of a node: its clock and its modules are
// the machine's. The form is that of setpriv.
const deniedCapabilities = "-sys_time,-sys_module"

const pollInterval = 50 * time.Millisecond

// bootTimeout bounds what takes a second or two, so that a node that hangs
// fails a test and does not hang it too.
const bootTimeout = 2 * time.Minute

// execCgroup holds what Exec starts in the node. It is beside the node's own,
// which the node's systemd keeps in order.
func (n *Node) execCgroup() string { return n.name + ".exec" }

// allCgroups returns the folders of all that runs in the node.
func (n *Node) allCgroups() []string {
	return append(n.testbed.cgroupPaths(n.name), n.testbed.cgroupPaths(n.execCgroup())...)
}

// ErrOff is returned for a node that does not run.
var ErrOff = errors.New("node is off")

// Node is one node of a testbed. Its methods may be called concurrently, but
// Start, Kill and Reboot only by one goroutine at a time.
type Node struct {
	testbed *Testbed
	name    string
	addr    netip.Addr
}

// Name returns the node's name, which is its host name too.
func (n *Node) Name() string { return n.name }

// IsFixture reports whether the node serves something to the others.
func (n *Node) IsFixture() bool { return n.name == StorageNode || n.name == SlurmNode }

// Addr returns the node's address.
func (n *Node) Addr() netip.Addr { return n.addr }

func (n *Node) dir(part string) string { return filepath.Join(n.testbed.Dir(), n.name, part) }

func (n *Node) consoleFile() string { return n.dir("console.log") }

// create makes the node's root. The network and the cgroups come with Start.
func (n *Node) create(ctx context.Context) error {
	for _, part := range []string{"upper", "work", "root", "containerd", "brick"} {
		if err := os.MkdirAll(n.dir(part), 0o755); err != nil {
			return err
		}
	}
	options := fmt.Sprintf("lowerdir=%s,upperdir=%s,workdir=%s", imageRoot(n.testbed.state.Image), n.dir("upper"), n.dir("work"))
	if _, err := run(ctx, "mount", "-t", "overlay", "overlay", "-o", options, n.dir("root")); err != nil {
		return err
	}
	if err := n.makeStateDisk(ctx); err != nil {
		return err
	}
	id := make([]byte, 16)
	if _, err := rand.Read(id); err != nil {
		return err
	}
	for path, data := range map[string]string{
		"etc/hostname":   n.name + "\n",
		"etc/hosts":      n.testbed.state.hostsFile(),
		"etc/machine-id": hex.EncodeToString(id) + "\n",
	} {
		if err := os.WriteFile(filepath.Join(n.dir("root"), path), []byte(data), 0o644); err != nil {
			return err
		}
	}
	return nil
}

func (s state) hostsFile() string {
	var b strings.Builder
	fmt.Fprintf(&b, "127.0.0.1 localhost\n%s server\n", s.bridgeAddr())
	for i, name := range s.nodeNames() {
		fmt.Fprintf(&b, "%s %s\n", s.nodeAddr(i), name)
	}
	return b.String()
}

// Start boots a node that is off and waits until its systemd reports it as
// running.
func (n *Node) Start(ctx context.Context) error {
	if _, err := n.initPID(); !errors.Is(err, ErrOff) {
		return errors.Join(err, fmt.Errorf("node %s runs already", n.name))
	}
	if err := n.makeLink(ctx); err != nil {
		return fmt.Errorf("node %s: %w", n.name, err)
	}
	if err := errors.Join(n.testbed.makeCgroup(n.name), n.testbed.makeCgroup(n.execCgroup())); err != nil {
		return fmt.Errorf("node %s: %w", n.name, err)
	}
	if err := n.testbed.startKeeper(n.name, n.consoleFile(), n.nspawnArgs()); err != nil {
		return fmt.Errorf("node %s: %w", n.name, err)
	}
	return n.WaitRunning(ctx)
}

func (n *Node) nspawnArgs() []string {
	s := n.testbed.state
	netns := "/run/netns/" + s.netns(n.name)
	args := []string{
		// It is in the node's network already when it mounts the node's /sys.
		"nsenter", "--net=" + netns, "--",
		"systemd-nspawn", "--quiet", "--directory=" + n.dir("root"), "--kill-signal=SIGRTMIN+3",
		"--register=no", "--keep-unit", // the machine may have no systemd of its own
		"--machine=" + s.machine(n.name), "--hostname=" + n.name,
		"--network-namespace-path=" + netns,
		"--link-journal=no", "--resolv-conf=off", "--timezone=off", "--console=pipe",
		"--capability=all", "--drop-capability=CAP_SYS_TIME,CAP_SYS_MODULE",
		"--system-call-filter=@keyring bpf @mount @privileged", // containerd and runc need them
		"--bind=/dev/fuse",
		// An overlay cannot stand on an overlay.
		"--bind=" + n.dir("containerd") + ":/var/lib/containerd",
		"--bind=" + n.dir("brick") + ":" + brickDir,
	}
	return append(append(args, n.stateDiskArgs()...), "/usr/local/sbin/testbed-init")
}

// WaitRunning waits until the node's systemd reports the state running. A
// degraded node is an error that names the failed units.
func (n *Node) WaitRunning(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, bootTimeout)
	defer cancel()
	var last string
	err := poll(ctx, pollInterval, func() (bool, error) {
		res, err := n.Exec(ctx, "systemctl", "is-system-running")
		last = strings.TrimSpace(string(res.Stdout))
		if last == "degraded" {
			failed, err := n.Exec(ctx, "systemctl", "--failed", "--no-legend", "--plain")
			return false, errors.Join(fmt.Errorf("degraded: %s", failed.Stdout), err)
		}
		if last == "" && err != nil {
			last = err.Error()
		}
		return last == "running", nil
	})
	if err != nil {
		return fmt.Errorf("node %s: wait until systemd is running, which last said %q: %w; its console is in %s", n.name, last, err, n.consoleFile())
	}
	return nil
}

// BootID returns the id of the node's boot.
func (n *Node) BootID(ctx context.Context) (string, error) {
	data, err := n.ReadFile(ctx, "/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(data)), err
}

// Reboot reboots the node in good order and waits until it runs again.
func (n *Node) Reboot(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, bootTimeout)
	defer cancel()
	before, err := n.initPID()
	if err != nil {
		return err
	}
	started := processStart(before)
	// The command may end with the node, so its own end says nothing.
	_, rebootErr := n.Exec(ctx, "systemctl", "reboot")
	err = poll(ctx, pollInterval, func() (bool, error) {
		return processStart(before) != started && n.IsOn(), nil
	})
	if err != nil {
		return fmt.Errorf("node %s: wait for a new boot: %w; its console is in %s", n.name, errors.Join(err, rebootErr), n.consoleFile())
	}
	return n.WaitRunning(ctx)
}

// Kill is the power cut: all processes of the node end at once, and none of
// them or their connections says a word more on the network. What the node had
// written, also without fsync, is still there after Start, as the machine keeps
// its page cache.
func (n *Node) Kill(ctx context.Context) error {
	pid, err := n.initPID()
	if err != nil {
		return err
	}
	if err := n.plug(ctx, true, Both); err != nil {
		return err
	}
	// With its first process the kernel ends every process of the namespace.
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
		return fmt.Errorf("node %s: kill: %w", n.name, err)
	}
	err = poll(ctx, 10*time.Millisecond, func() (bool, error) {
		pids, err := cgroupProcs(n.allCgroups())
		return len(pids) == 0, err
	})
	if err != nil {
		return fmt.Errorf("node %s: wait for its processes to end: %w", n.name, err)
	}
	// The keeper sees nspawn end and leaves. The namespace's sockets go with it.
	if err := deleteNodeLink(ctx, n.testbed.state, n.name); err != nil {
		return fmt.Errorf("node %s: %w", n.name, err)
	}
	for _, path := range n.allCgroups() {
		if err := removeCgroup(ctx, path); err != nil {
			return fmt.Errorf("node %s: %w", n.name, err)
		}
	}
	return nil
}

// IsOn says whether the node runs.
func (n *Node) IsOn() bool {
	_, err := n.initPID()
	return err == nil
}

// PID returns the id of the node's first process, as the machine sees it, or an
// error that wraps ErrOff. All that runs in the node descends from it.
func (n *Node) PID() (int, error) { return n.initPID() }

// initPID returns the id of the node's first process, as the machine sees it,
// or ErrOff.
func (n *Node) initPID() (int, error) {
	pids, err := cgroupProcs(n.testbed.cgroupPaths(n.name))
	if err != nil {
		return 0, err
	}
	for _, pid := range pids {
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		if err != nil {
			continue // ended meanwhile
		}
		_, after, _ := strings.Cut(string(status), "\nNSpid:")
		line, _, _ := strings.Cut(after, "\n")
		// Containers in the node have a first process too, one level deeper.
		if ids := strings.Fields(line); len(ids) == 2 && ids[1] == "1" {
			return pid, nil
		}
	}
	return 0, fmt.Errorf("node %s: %w", n.name, ErrOff)
}

// Logs writes the node's journal to w; args are further ones of journalctl. It
// works while the node is off too. With the argument -f it ends with ctx.
func (n *Node) Logs(ctx context.Context, w io.Writer, args ...string) error {
	journal := filepath.Join(n.dir("root"), "var/log/journal")
	cmd := exec.CommandContext(ctx, "journalctl", append([]string{"--no-pager", "--directory=" + journal}, args...)...)
	cmd.Stdout, cmd.Stderr = w, w
	return cmd.Run()
}
