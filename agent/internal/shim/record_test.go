package shim_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/millwright/agent/internal/shim"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// A shim that is killed leaves a marker and no result; its death is noted by the
// next invocation of systemd and nothing is made up.
func TestShimIsKilled(t *testing.T) {
	up := filepath.Join(t.TempDir(), "up")
	dir := newCommand(t, program(t, "wait", up))
	c := shimFor(t, dir)
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the program", func() bool { return exists(up) })
	if err := c.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = c.Wait() // it was killed

	other := shimFor(t, dir, "--post")
	other.Env = []string{"INVOCATION_ID=another", "SERVICE_RESULT=success"}
	post := shimFor(t, dir, "--post")
	post.Env = append(post.Env, "SERVICE_RESULT=oom-kill", "EXIT_CODE=killed", "EXIT_STATUS=KILL")
	for _, c := range []*exec.Cmd{other, post} {
		if err := c.Run(); err != nil {
			t.Fatalf("post: %v %s", err, c.Stderr)
		}
	}
	if got, want := dir.Death(), "the shim ended with result oom-kill (killed, KILL)"; got != want {
		t.Errorf("death %q, want %q", got, want)
	}
	if _, err := dir.Result(); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("result: %v", err)
	}
	if code := runShim(t, dir); code != 3 {
		t.Errorf("the next shim exited with %d", code)
	}
}

// After a recorded end, post changes nothing.
func TestPostAfterResult(t *testing.T) {
	dir := newCommand(t, program(t, "exit", "0"))
	outcome(t, dir)
	if err := shimFor(t, dir, "--post").Run(); err != nil {
		t.Fatal(err)
	}
	if d := dir.Death(); d != "" {
		t.Errorf("death %q", d)
	}
}

// Records as a loss of power may leave them are never taken for an end.
func TestDamagedRecords(t *testing.T) {
	whole, err := proto.Marshal(&agentv1.CommandRecord{
		TaskId: "t", Outcome: &taskv1.CommandOutcome{ExitCode: 1, InvocationId: "i"},
	})
	if err != nil {
		t.Fatal(err)
	}
	for n := range len(whole) {
		dir := newCommand(t, program(t, "exit", "0"))
		if err := os.WriteFile(inDir(dir, "result"), whole[:n], 0o600); err != nil {
			t.Fatal(err)
		}
		if rec, err := dir.Result(); !errors.Is(err, shim.ErrRecord) {
			t.Errorf("%d of %d bytes: %v %v", n, len(whole), rec, err)
		}
	}
	dir := newCommand(t, program(t, "exit", "0"))
	if err := os.WriteFile(inDir(dir, "start"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if code := runShim(t, dir); code != 3 {
		t.Errorf("with an empty marker the shim exited with %d", code)
	}
}

// A burnt command can never be started, and says why.
func TestBurn(t *testing.T) {
	count := filepath.Join(t.TempDir(), "count")
	dir := newCommand(t, program(t, "append", count))
	why := fmt.Errorf("start unit: %w", syscall.ECONNREFUSED)
	if err := dir.Burn(&agentv1.CommandRecord{TaskId: "018f-test"}, why); err != nil {
		t.Fatal(err)
	}
	if code := runShim(t, dir); code != 3 || exists(count) {
		t.Errorf("the shim exited with %d", code)
	}
	rec, err := dir.Result()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := shim.Outcome(rec); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("error %v", err)
	}
	if err := dir.Burn(&agentv1.CommandRecord{}, why); !errors.Is(err, fs.ErrExist) {
		t.Errorf("a second burn: %v", err)
	}
}
