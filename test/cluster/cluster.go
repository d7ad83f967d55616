// Package cluster puts a whole Millwright on a testbed: the server on the
// machine, as a process of its own, agents on real nodes, installed from the
// packages, and millctl in between. It works as an operator would: through the
// programs and their files, never through their code.
package cluster

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/gpuaas/millwright/test/testbed"
)

// Release is the variant of the programs that users get.
const Release = ""

// Variants for tests, by their build tags.
const (
	// Crash kills itself at a named point when armed.
	Crash = "millwright_crash"
	// NoAdopt does not find running commands again.
	NoAdopt = "millwright_noadopt"
)

const (
	serverProcess = "server"
	trustDomain   = "testbed.example"
	operator      = "alice"
	// Each look starts a program: what takes long is looked at less often.
	pollEvery  = 50 * time.Millisecond
	pollShare  = 10
	pollAtMost = 400 * time.Millisecond
)

// Config says what to put where.
type Config struct {
	// Root is the repository; its bin and dist hold what was built.
	Root string
	// Agent and Server are the variants.
	Agent, Server string
	// Policy is the policy.yaml of every node; empty: that of the package.
	Policy string
	// Tracer is put before every command line of the server, such as strace
	// and its arguments; empty: nothing.
	Tracer []string
	// ServerDir is the server's state directory; empty: one in the testbed's.
	ServerDir string
	// Log is told what is done. It must be set.
	Log *slog.Logger
}

// Cluster is a server with its operator on a testbed. Its methods may be called
// concurrently.
type Cluster struct {
	cfg Config
	bed *testbed.Testbed
}

// New returns a cluster on a testbed that is up. It does nothing yet.
func New(bed *testbed.Testbed, cfg Config) *Cluster { return &Cluster{cfg: cfg, bed: bed} }

// Bed returns the testbed.
func (c *Cluster) Bed() *testbed.Testbed { return c.bed }

// Found makes the operator, founds the server, starts it, and adds the
// operator's context.
func (c *Cluster) Found(ctx context.Context) error {
	for _, dir := range []string{c.bed.HomeDir(), c.ServerDir(), c.CrashDir()} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return fmt.Errorf("make %s: %w", dir, err)
		}
	}
	config := fmt.Sprintf("version: 1\nlisten: %[1]s\nadvertise_address: %[1]s\nhttp_listen: %[2]s\nstate_dir: %[3]s\nheartbeat_interval: 2s\n",
		c.Address(), c.HTTPAddress(), c.ServerDir())
	if err := os.WriteFile(c.serverConfig(), []byte(config), 0o600); err != nil {
		return fmt.Errorf("write the server's config: %w", err)
	}
	founding, contextFile := c.file("founding.json"), c.file("context.json")
	if _, err := c.Millctl(ctx, "operator", "init", "--name", operator, "--trust-domain", trustDomain, "--out", founding); err != nil {
		return err
	}
	argv := append(slices.Clone(c.cfg.Tracer), c.binary("millwright-server", c.cfg.Server), "init", "--config", c.serverConfig(),
		"--trust-root", founding, "--trust-domain", trustDomain, "--context-out", contextFile)
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("found the server: %w\n%s", err, out)
	}
	if _, err := c.Millctl(ctx, "context", "add", contextFile); err != nil {
		return err
	}
	return c.StartServer(ctx)
}

// StartServer starts the server and waits until it is ready.
func (c *Cluster) StartServer(ctx context.Context) error {
	argv := append([]string{"env", "MILLWRIGHT_CRASH_DIR=" + c.CrashDir()}, c.cfg.Tracer...)
	argv = append(argv, c.binary("millwright-server", c.cfg.Server), "run", "--config", c.serverConfig())
	if err := c.bed.StartProcess(serverProcess, argv...); err != nil {
		return fmt.Errorf("start the server: %w", err)
	}
	err := c.poll(ctx, 20*time.Second, func() error { return c.ready(ctx) })
	if err != nil {
		log, _ := os.ReadFile(c.ServerLog())
		return fmt.Errorf("wait for the server: %w\n%s", err, tail(log, 2000))
	}
	return nil
}

// Serving reports whether the server answers that it is ready.
func (c *Cluster) Serving(ctx context.Context) bool { return c.ready(ctx) == nil }

func (c *Cluster) ready(ctx context.Context) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+c.HTTPAddress()+"/readyz", nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("/readyz: %s", resp.Status)
	}
	return nil
}

// KillServer kills the server with SIGKILL.
func (c *Cluster) KillServer(ctx context.Context) error { return c.bed.KillProcess(ctx, serverProcess) }

// StopServer asks the server to end in good order, and waits.
func (c *Cluster) StopServer(ctx context.Context) error {
	if err := c.bed.SignalProcess(serverProcess, syscall.SIGTERM); err != nil {
		return fmt.Errorf("stop the server: %w", err)
	}
	return c.poll(ctx, 20*time.Second, func() error {
		conn, err := (&net.Dialer{Timeout: time.Second}).DialContext(ctx, "tcp", c.Address())
		if err != nil {
			return nil //nolint:nilerr // nobody listens any more: that is what we wait for
		}
		return errors.Join(errors.New("the server still listens"), conn.Close())
	})
}

// Join installs the agent on a node and lets it join.
func (c *Cluster) Join(ctx context.Context, n *testbed.Node) error {
	if err := c.Install(ctx, n); err != nil {
		return err
	}
	return c.Enrol(ctx, n)
}

// Install installs the agent on a node and does not start it.
func (c *Cluster) Install(ctx context.Context, n *testbed.Node) error {
	deb := filepath.Join(c.cfg.Root, "dist", c.cfg.Agent, "millwright-agent.deb")
	if err := n.Install(ctx, deb); err != nil {
		return fmt.Errorf("install the agent on %s: %w", n.Name(), err)
	}
	if c.cfg.Policy != "" {
		if err := n.WriteFile(ctx, "/etc/millwright/policy.yaml", []byte(c.cfg.Policy), 0o644); err != nil {
			return err
		}
	}
	if c.cfg.Agent == Crash {
		dropin := "[Service]\nEnvironment=MILLWRIGHT_CRASH_DIR=/var/lib/millwright-crash\n"
		if err := n.WriteFile(ctx, "/etc/systemd/system/millwrightd.service.d/crash.conf", []byte(dropin), 0o644); err != nil {
			return err
		}
		if _, err := n.Exec(ctx, "mkdir", "-p", "/var/lib/millwright-crash"); err != nil {
			return err
		}
	}
	return nil
}

// Enrol starts the agent on a node with a join bundle, and waits until it is
// connected.
func (c *Cluster) Enrol(ctx context.Context, n *testbed.Node) error { return c.enrol(ctx, n) }

// Rejoin is Enrol for a node whose name has joined before.
func (c *Cluster) Rejoin(ctx context.Context, n *testbed.Node) error {
	return c.enrol(ctx, n, "--rejoin")
}

func (c *Cluster) enrol(ctx context.Context, n *testbed.Node, flags ...string) error {
	bundle := c.file("join-" + n.Name() + ".json")
	if err := os.RemoveAll(bundle); err != nil { // of an earlier time
		return err
	}
	if _, err := c.Millctl(ctx, append([]string{"node", "token", "create", n.Name(), "--out", bundle}, flags...)...); err != nil {
		return err
	}
	data, err := os.ReadFile(bundle)
	if err != nil {
		return err
	}
	if err := n.WriteFile(ctx, "/etc/millwright/join.json", data, 0o600); err != nil {
		return err
	}
	if _, err := n.Exec(ctx, "systemctl", "daemon-reload"); err != nil {
		return err
	}
	if _, err := n.Exec(ctx, "systemctl", "enable", "--now", "millwrightd.service"); err != nil {
		return err
	}
	return c.WaitConnected(ctx, n.Name())
}

// Output is what a program wrote, and how it ended.
type Output struct {
	Stdout, Stderr string
	Code           int
}

// Millctl runs millctl as the operator. An exit code other than 0 is an error;
// the output is there all the same.
func (c *Cluster) Millctl(ctx context.Context, args ...string) (Output, error) {
	return c.MillctlInput(ctx, "", args...)
}

// MillctlInput is Millctl with something on its standard input.
func (c *Cluster) MillctlInput(ctx context.Context, stdin string, args ...string) (Output, error) {
	cmd := c.MillctlCommand(ctx, args...)
	cmd.Stdin = strings.NewReader(stdin)
	var stdout, stderr strings.Builder
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	out := Output{Stdout: stdout.String(), Stderr: stderr.String(), Code: cmd.ProcessState.ExitCode()}
	if err != nil {
		return out, fmt.Errorf("millctl %s: %w\n%s%s", strings.Join(args, " "), err, out.Stdout, out.Stderr)
	}
	return out, nil
}

// Arm makes the next process of the crash variant end at the point: of the
// agent on the node, or of the server when n is nil.
func (c *Cluster) Arm(ctx context.Context, n *testbed.Node, point string) error {
	if n == nil {
		if err := os.RemoveAll(filepath.Join(c.CrashDir(), "hit-"+point)); err != nil {
			return err
		}
		return os.WriteFile(filepath.Join(c.CrashDir(), "arm"), []byte(point), 0o600)
	}
	if _, err := n.Exec(ctx, "rm", "-f", "/var/lib/millwright-crash/hit-"+point); err != nil {
		return err
	}
	return n.WriteFile(ctx, "/var/lib/millwright-crash/arm", []byte(point), 0o600)
}

// Hit reports whether the point was reached since it was armed.
func (c *Cluster) Hit(ctx context.Context, n *testbed.Node, point string) bool {
	if n == nil {
		_, err := os.Stat(filepath.Join(c.CrashDir(), "hit-"+point))
		return err == nil
	}
	_, err := n.Exec(ctx, "test", "-e", "/var/lib/millwright-crash/hit-"+point)
	return err == nil
}

// Address is the server's address.
func (c *Cluster) Address() string { return net.JoinHostPort(c.bed.Address().String(), "7443") }

// HTTPAddress is the address of the server's /readyz.
func (c *Cluster) HTTPAddress() string { return net.JoinHostPort(c.bed.Address().String(), "7480") }

// ServerDir is the server's state directory.
func (c *Cluster) ServerDir() string {
	if c.cfg.ServerDir != "" {
		return c.cfg.ServerDir
	}
	return c.file("server-state")
}

// ServerLog is the file that the server logs to.
func (c *Cluster) ServerLog() string { return c.bed.ProcessLog(serverProcess) }

// CrashDir is where the server's crash points are armed.
func (c *Cluster) CrashDir() string { return c.file("server-crash") }

func (c *Cluster) serverConfig() string { return c.file("server.yaml") }

func (c *Cluster) file(name string) string { return filepath.Join(c.bed.Dir(), name) }

func (c *Cluster) binary(name, variant string) string {
	return filepath.Join(c.cfg.Root, "bin", variant, name)
}

func (c *Cluster) poll(ctx context.Context, limit time.Duration, check func() error) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	began := time.Now()
	timer := time.NewTimer(0)
	defer timer.Stop()
	<-timer.C
	for {
		err := check()
		if err == nil {
			return nil
		}
		timer.Reset(min(max(pollEvery, time.Since(began)/pollShare), pollAtMost))
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", context.Cause(ctx), err)
		case <-timer.C:
		}
	}
}

func tail(b []byte, n int) []byte { return b[max(0, len(b)-n):] }
