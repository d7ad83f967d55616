package testbed

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

//go:embed keeper.sh
var keeperScript string

// processCgroup holds a program of the machine that belongs to the testbed. No
// node has such a name.
func processCgroup(name string) string { return "machine." + name }

// StartProcess starts a program of the machine that ends with the testbed, as a
// server that the nodes talk to. It returns once the program runs; its output
// is appended to ProcessLog(name). Names are like those of testbeds.
func (t *Testbed) StartProcess(name string, argv ...string) error {
	if !validName.MatchString(name) {
		return fmt.Errorf("name of a process: %q does not match %s", name, validName)
	}
	cgroup := processCgroup(name)
	if err := t.makeCgroup(cgroup); err != nil {
		return err
	}
	if pids, err := cgroupProcs(t.cgroupPaths(cgroup)); err != nil || len(pids) > 0 {
		return fmt.Errorf("process %s runs already, as %v: %w", name, pids, err)
	}
	if err := t.startKeeper(cgroup, t.ProcessLog(name), argv); err != nil {
		return fmt.Errorf("start process %s: %w", name, err)
	}
	return nil
}

// ProcessLog returns the file with the output of a StartProcess.
func (t *Testbed) ProcessLog(name string) string { return filepath.Join(t.Dir(), name+".log") }

// SignalProcess sends a signal to the program and what it started.
func (t *Testbed) SignalProcess(name string, sig syscall.Signal) error {
	pids, err := cgroupProcs(t.cgroupPaths(processCgroup(name)))
	if err != nil {
		return err
	}
	for _, pid := range pids {
		if err := syscall.Kill(pid, sig); err != nil && !errors.Is(err, syscall.ESRCH) {
			return fmt.Errorf("signal process %s: %w", name, err)
		}
	}
	return nil
}

// KillProcess kills the program and what it started, and waits until they have
// ended. It is no error when it does not run.
func (t *Testbed) KillProcess(ctx context.Context, name string) error {
	return killCgroup(ctx, t.cgroupPaths(processCgroup(name)))
}

// startKeeper runs keeper.sh over a command in a cgroup.
func (t *Testbed) startKeeper(cgroup, logFile string, argv []string) error {
	out, err := os.OpenFile(logFile, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return err
	}
	defer func() { _ = out.Close() }()
	owned := t.state.OwnerPID == os.Getpid()
	args := []string{"-c", joinScript + keeperScript, "keeper", strconv.FormatBool(owned),
		strings.Join(t.cgroupPaths(keeperCgroup), " "), strings.Join(t.cgroupPaths(cgroup), " "),
		"setpriv", "--bounding-set", deniedCapabilities, "--inh-caps", deniedCapabilities}
	cmd := exec.Command("sh", append(args, argv...)...) //nolint:noctx // the keeper outlives the call that starts it
	cmd.Stdout, cmd.Stderr = out, out
	cmd.Env = []string{"PATH=" + nodePath, "LANG=C.UTF-8", "JOIN_AND_EXEC=" + joinAndExec()}
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if owned {
		return t.startOwned(cmd)
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	return cmd.Process.Release()
}

// startOwned gives the keeper a pipe that closes when this process ends.
func (t *Testbed) startOwned(cmd *exec.Cmd) error {
	read, write, err := os.Pipe()
	if err != nil {
		return err
	}
	defer func() { _ = read.Close() }()
	cmd.ExtraFiles = []*os.File{read}
	if err := cmd.Start(); err != nil {
		return errors.Join(err, write.Close())
	}
	t.keepers.Go(func() {
		_ = cmd.Wait() // its status is nspawn's, which the console shows
		_ = write.Close()
	})
	return nil
}
