package testbed

import (
	"bytes"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

const nodePath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

//go:embed join.sh
var joinScript string

// joinAndExec joins the cgroups of its first argument, then becomes the command
// that follows.
func joinAndExec() string { return joinScript + "join $1\nshift\nexec \"$@\"\n" }

// Result is what a command in a node did.
type Result struct {
	// Stdout and Stderr are all that it wrote.
	Stdout, Stderr []byte
	// Code is its exit status, or -1 when there is none.
	Code int
}

// ExitError is the error of a command that ended, but not with status 0.
type ExitError struct {
	Node   string
	Argv   []string
	Result Result
}

// Error names node, command and status, and quotes the end of what it wrote.
func (e *ExitError) Error() string {
	said := lastBytes(e.Result.Stderr, 2000)
	if len(said) == 0 {
		said = lastBytes(e.Result.Stdout, 2000)
	}
	return fmt.Sprintf("node %s: %s: exit status %d: %s", e.Node, strings.Join(e.Argv, " "), e.Result.Code, said)
}

// Exec runs a command as root in the node and waits for it. When ctx ends first
// the command is killed. The result holds what was written also with an error,
// which is an *ExitError when the command ended with another status than 0.
func (n *Node) Exec(ctx context.Context, argv ...string) (Result, error) {
	return n.execWith(ctx, nil, argv)
}

func (n *Node) execWith(ctx context.Context, stdin []byte, argv []string) (Result, error) {
	var stdout, stderr bytes.Buffer
	err := n.Stream(ctx, bytes.NewReader(stdin), &stdout, &stderr, argv...)
	res := Result{Stdout: stdout.Bytes(), Stderr: stderr.Bytes()}
	if err != nil {
		res.Code = -1
	}
	var exited *ExitError
	if errors.As(err, &exited) {
		res.Code = exited.Result.Code
		exited.Result = res
	}
	return res, err
}

// Stream is Exec with the command's streams connected to the caller's; the
// result in its *ExitError holds only the status.
func (n *Node) Stream(ctx context.Context, stdin io.Reader, stdout, stderr io.Writer, argv ...string) error {
	if len(argv) == 0 {
		return errors.New("no command to run was given")
	}
	pid, err := n.initPID()
	if err != nil {
		return err
	}
	cmd := n.command(ctx, pid, argv)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, stdout, stderr
	err = runContinued(cmd)
	// A node that shuts down waits for the command, which is not its first
	// process's child, until that hears of the end of any child, or for 90 s.
	_ = syscall.Kill(pid, syscall.SIGCHLD)
	var exited *exec.ExitError
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("node %s: %s: %w", n.name, strings.Join(argv, " "), context.Cause(ctx))
	case errors.As(err, &exited):
		return &ExitError{Node: n.name, Argv: argv, Result: Result{Code: exited.ExitCode()}}
	}
	return err
}

// runContinued runs a command and keeps it from staying stopped: a node that
// shuts down stops its processes for a moment, nsenter stops itself with them,
// and nobody else would wake it.
func runContinued(cmd *exec.Cmd) error {
	if err := cmd.Start(); err != nil {
		return err
	}
	done := make(chan struct{})
	var waking sync.WaitGroup
	waking.Go(func() {
		ticker := time.NewTicker(4 * pollInterval)
		defer ticker.Stop()
		for {
			select {
			case <-done:
				return
			case <-ticker.C:
				_ = cmd.Process.Signal(syscall.SIGCONT)
			}
		}
	})
	err := cmd.Wait()
	close(done)
	waking.Wait()
	return err
}

// command returns the command that runs argv as root in the node whose first
// process is pid. It cannot set the clock.
func (n *Node) command(ctx context.Context, pid int, argv []string) *exec.Cmd {
	cgroups := strings.Join(n.testbed.cgroupPaths(n.execCgroup()), " ")
	cmd := exec.CommandContext(ctx, "sh", append([]string{"-c", joinAndExec(), "exec", cgroups,
		"nsenter", "--target", strconv.Itoa(pid), "--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup", "--root", "--wd", "--",
		"setpriv", "--bounding-set", deniedCapabilities, "--inh-caps", deniedCapabilities, "--pdeathsig", "KILL",
	}, argv...)...)
	// What the command leaves running may hold its streams.
	cmd.WaitDelay = time.Second
	cmd.Env = []string{"PATH=" + nodePath, "HOME=/root", "LANG=C.UTF-8", "TERM=" + os.Getenv("TERM")}
	return cmd
}

// ReadFile returns what a file of the node holds.
func (n *Node) ReadFile(ctx context.Context, path string) ([]byte, error) {
	res, err := n.Exec(ctx, "cat", "--", path)
	return res.Stdout, err
}

// WriteFile writes a file of the node, with the folders above it, in one
// rename.
func (n *Node) WriteFile(ctx context.Context, path string, data []byte, mode fs.FileMode) error {
	const script = `set -e; mkdir -p -- "$(dirname -- "$1")"; t=$(mktemp -- "$1.XXXXXX")
cat >"$t"; chmod -- "$2" "$t"; mv -f -- "$t" "$1"`
	_, err := n.execWith(ctx, data, []string{"sh", "-c", script, "write", path, fmt.Sprintf("%04o", mode.Perm())})
	return err
}

// Install installs a Debian package of the machine in the node, or a newer one
// over it. What the package depends on has to be there: a node has no archive.
func (n *Node) Install(ctx context.Context, deb string) error {
	data, err := os.ReadFile(deb)
	if err != nil {
		return err
	}
	path := "/root/" + filepath.Base(deb)
	if err := n.WriteFile(ctx, path, data, 0o644); err != nil {
		return err
	}
	_, err = n.Exec(ctx, "env", "DEBIAN_FRONTEND=noninteractive", "dpkg", "--install", path)
	return err
}
