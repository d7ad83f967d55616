package powerloss_test

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/test/cluster/clustertest"
)

// calls are all system calls that can change a file or a directory, those that
// make changes durable, and those that tell somebody something. What a program
// changes by another one than these, package powerloss cannot see; it refuses
// those that it knows of and cannot follow.
const calls = "open,openat,openat2,creat,close,write,writev,pwrite64,pwritev,pwritev2,lseek,ftruncate,truncate,fallocate," +
	"fsync,fdatasync,sync_file_range,sync,syncfs,rename,renameat,renameat2,link,linkat,unlink,unlinkat,mkdir,mkdirat,rmdir,symlink,symlinkat," +
	"copy_file_range,sendfile,splice,sendto,sendmsg,execve"

func tracer(to string, more ...string) []string {
	return append([]string{"strace", "-f", "-ttt", "-y", "-xx", "-q", "-s", "4194304", "-e", "trace=" + calls, "-e", "signal=none", "-o", to}, more...)
}

// recording is what a run of the whole product left.
type recording struct {
	agent, server string              // the traces
	serverDir     string              // the server's state directory
	told          []telling           // what millctl was told
	commands      map[string]string   // the mark in the command line, by task id
	outputs       map[string][]string // the server's files with output, by task id
}

// telling is an answer that a client has.
type telling struct {
	at  time.Time
	ids []string // tasks that exist
}

// record runs the release programs under strace: a server from its founding on,
// a node from its joining on, and tasks of every kind that needs no other
// machine.
func record(t *testing.T) *recording {
	t.Helper()
	needStrace(t)
	dir := t.TempDir()
	r := &recording{
		agent: filepath.Join(dir, "agent.trace"), server: filepath.Join(dir, "server.trace"),
		commands: map[string]string{}, outputs: map[string][]string{},
	}
	c := clustertest.Up(t, clustertest.Config{Nodes: 1, Apart: true, Tracer: tracer(r.server, "-A")})
	r.serverDir = c.ServerDir()
	n := c.Machine("n1")
	if err := c.Install(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	pid, err := n.PID()
	if err != nil {
		t.Fatal(err)
	}
	stop := attach(t, pid, r.agent)
	if err := c.Enrol(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	r.work(t, c)
	c.Sh("n1", "systemctl stop millwrightd.service")
	if err := c.StopServer(t.Context()); err != nil {
		t.Fatal(err)
	}
	stop()
	return r
}

// work gives the node its tasks and waits until all is told and acknowledged.
func (r *recording) work(t *testing.T, c *clustertest.Cluster) {
	t.Helper()
	start := func(kind, spec string) string {
		id := c.Start(kind, "n1", spec)
		r.told = append(r.told, telling{time.Now(), []string{id}})
		return id
	}
	var ids []string
	for i, script := range []string{"echo one", "echo two >&2; exit 3", "head -c 300000 /dev/zero | tr '\\0' x"} {
		mark := fmt.Sprintf("powerloss-%d", i)
		id := start("system.command", fmt.Sprintf(`argv: [/bin/sh, -c, "%s", %s]`, strings.ReplaceAll(script, `\`, `\\`), mark))
		r.commands[id] = mark
		ids = append(ids, id)
	}
	mount := start("storage.mount", "tmpfs: {size_bytes: 1048576}\ntarget: /mnt/powerloss")
	for _, id := range ids {
		c.End(id)
	}
	if task := c.End(mount); task.GetState() != taskv1.TaskState_TASK_STATE_SUCCEEDED {
		t.Fatalf("mount: %s: %s", task.GetReason(), task.GetMessage())
	}
	c.End(start("storage.unmount", "target: /mnt/powerloss"))
	// The agent deletes what it need not keep any more.
	c.Sh("n1", "for i in $(seq 300); do rmdir /var/lib/millwright/commands 2>/dev/null; test -e /var/lib/millwright/commands/* || exit 0; sleep 0.1; done; exit 1")
	for id := range r.commands {
		files, err := filepath.Glob(filepath.Join(c.ServerDir(), "output", id, "*"))
		if err != nil || len(files) == 0 {
			t.Fatalf("the server has no output of task %s: %v", id, err)
		}
		r.outputs[id] = files
	}
}

func needStrace(t *testing.T) {
	t.Helper()
	if _, err := exec.LookPath("strace"); err == nil {
		return
	}
	if out, err := exec.CommandContext(t.Context(), "apt-get", "install", "-y", "-q", "strace").CombinedOutput(); err != nil {
		t.Fatalf("install strace: %v\n%s", err, out)
	}
}

// attach traces a process and all that it starts, until the function that it
// returns is called.
func attach(t *testing.T, pid int, to string) func() {
	t.Helper()
	argv := tracer(to, "-p", strconv.Itoa(pid))
	var said bytes.Buffer
	cmd := exec.CommandContext(t.Context(), argv[0], argv[1:]...)
	cmd.Stderr = &said
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	deadline := time.Now().Add(10 * time.Second)
	for !traced(pid) {
		if time.Now().After(deadline) {
			t.Fatalf("strace does not trace: %s", &said)
		}
		<-time.After(10 * time.Millisecond)
	}
	return func() {
		_ = cmd.Process.Signal(syscall.SIGINT)
		_ = cmd.Wait() // interrupted, as asked
	}
}

func traced(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	return err == nil && !bytes.Contains(b, []byte("TracerPid:\t0\n"))
}
