package shim_test

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/gpuaas/millwright/agent/internal/shim"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

func TestOutcomeIsRecorded(t *testing.T) {
	dir := newCommand(t, program(t, "exit", "7"))
	o := outcome(t, dir)
	if o.GetExitCode() != 7 || o.GetSignal() != 0 || o.GetTimedOut() || o.GetOomKilled() {
		t.Errorf("outcome %v", o)
	}
	boot, err := shim.BootID()
	if err != nil {
		t.Fatal(err)
	}
	if o.GetInvocationId() != "0123456789abcdef" || o.GetBootId() != boot {
		t.Errorf("invocation %q boot %q", o.GetInvocationId(), o.GetBootId())
	}
	rec, err := dir.Marker()
	if err != nil {
		t.Fatal(err)
	}
	if rec.GetTaskId() != "018f-test" || rec.GetStep() != 3 || rec.GetAttempt() != 1 || rec.GetBootId() != boot {
		t.Errorf("marker %v", rec)
	}
}

// The head and the tail are kept and the total is told, whatever is written.
func TestOutput(t *testing.T) {
	const head, tail = 1 << 20, 256 << 10
	var numbers bytes.Buffer
	for i := range 400000 {
		fmt.Fprintln(&numbers, i)
	}
	all := make([]byte, 256)
	for i := range all {
		all[i] = byte(i)
	}
	tests := map[string]struct {
		argv   []string
		stderr bool
		want   []byte
	}{
		"nothing":                  {argv: []string{"exit", "0"}},
		"binary":                   {argv: []string{"binary"}, want: all},
		"exactly the head":         {argv: []string{"emit", strconv.Itoa(head)}, want: bytes.Repeat([]byte("a"), head)},
		"one more than the head":   {argv: []string{"emit", strconv.Itoa(head + 1)}, want: bytes.Repeat([]byte("a"), head+1)},
		"exactly head and tail":    {argv: []string{"emit", strconv.Itoa(head + tail)}, want: bytes.Repeat([]byte("a"), head+tail)},
		"10 MB without a newline":  {argv: []string{"emit", "10000000"}, want: bytes.Repeat([]byte("a"), 10000000)},
		"many lines, on the other": {argv: []string{"count", "400000"}, stderr: true, want: numbers.Bytes()},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			dir := newCommand(t, program(t, tt.argv...))
			o := outcome(t, dir)
			got, stream := o.GetStdout(), taskv1.Stream_STREAM_STDOUT
			if tt.stderr {
				got, stream = o.GetStderr(), taskv1.Stream_STREAM_STDERR
			}
			wantHead := tt.want[:min(len(tt.want), head)]
			wantTail := tt.want[max(len(wantHead), len(tt.want)-tail):]
			if h := readFile(t, dir.HeadPath(stream)); !bytes.Equal(h, wantHead) {
				t.Errorf("head has %d bytes, want these %d", len(h), len(wantHead))
			}
			if b := readFile(t, dir.TailPath(stream)); !bytes.Equal(b, wantTail) {
				t.Errorf("tail has %d bytes, want these %d", len(b), len(wantTail))
			}
			headSum, tailSum := sha256.Sum256(wantHead), sha256.Sum256(wantTail)
			want := &taskv1.OutputSummary{
				TotalBytes: uint64(len(tt.want)), HeadBytes: uint64(len(wantHead)), TailBytes: uint64(len(wantTail)),
				HeadSha256: headSum[:], TailSha256: tailSum[:],
			}
			if !proto.Equal(got, want) {
				t.Errorf("summary\n got %v\nwant %v", got, want)
			}
		})
	}
}

// 200 MB pass in constant memory.
func TestMemory(t *testing.T) {
	passed := filepath.Join(t.TempDir(), "passed")
	dir := newCommand(t, &taskv1.CommandStep{Argv: []string{
		"/bin/sh", "-c", `"$0" emit 200000000; : > "$1"; exec sleep 60`, self(t), passed,
	}})
	c := shimFor(t, dir)
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the output", func() bool { return exists(passed) })
	status := readFile(t, fmt.Sprintf("/proc/%d/status", c.Process.Pid))
	var kib int
	_, after, _ := strings.Cut(string(status), "VmHWM:")
	if _, err := fmt.Sscanf(after, "%d kB", &kib); err != nil {
		t.Fatalf("%v in %s", err, status)
	}
	t.Logf("the shim took %d KiB", kib)
	if kib > maxShimKiB {
		t.Errorf("the shim took %d KiB, want at most %d", kib, maxShimKiB)
	}
	if err := errors.Join(c.Process.Signal(syscall.SIGTERM), c.Wait()); err != nil {
		t.Error(err)
	}
	rec, err := dir.Result()
	if err != nil {
		t.Fatal(err)
	}
	if n := rec.GetOutcome().GetStdout().GetTotalBytes(); n != 200000000 {
		t.Errorf("total %d", n)
	}
}

// What a command leaves behind may keep its pipe; the shim ends all the same.
func TestGrandchildKeepsThePipe(t *testing.T) {
	pidFile := filepath.Join(t.TempDir(), "pid")
	dir := newCommand(t, program(t, "leave", pidFile))
	begin := time.Now()
	o := outcome(t, dir)
	if d := time.Since(begin); d > 15*time.Second {
		t.Errorf("it took %s", d)
	}
	pid, err := strconv.Atoi(string(readFile(t, pidFile)))
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Errorf("the grandchild was not there to keep the pipe: %v", err)
	}
	if !o.GetStdout().GetOpenAtEnd() || o.GetExitCode() != 0 {
		t.Errorf("outcome %v", o)
	}
	if h := readFile(t, dir.HeadPath(taskv1.Stream_STREAM_STDOUT)); string(h) != "parent\n" {
		t.Errorf("head %q", h)
	}
}

// Of any number of shims one starts the program.
func TestStartedOnce(t *testing.T) {
	count := filepath.Join(t.TempDir(), "count")
	dir := newCommand(t, program(t, "append", count))
	codes := make([]int, 20)
	var wg sync.WaitGroup
	for i := range codes {
		c := shimFor(t, dir)
		wg.Go(func() {
			_ = c.Run() // the code tells
			codes[i] = c.ProcessState.ExitCode()
		})
	}
	wg.Wait()
	won := 0
	for _, code := range codes {
		switch code {
		case 0:
			won++
		case 3:
		default:
			t.Errorf("a shim exited with %d", code)
		}
	}
	if got := readFile(t, count); won != 1 || len(got) != 1 {
		t.Errorf("%d shims ran it, it ran %d times", won, len(got))
	}
	if code := runShim(t, dir); code != 3 {
		t.Errorf("a later shim exited with %d", code)
	}
	if _, err := dir.Result(); err != nil {
		t.Errorf("the result was lost: %v", err)
	}
}

func TestProgramCannotBeStarted(t *testing.T) {
	plain := filepath.Join(t.TempDir(), "plain")
	if err := os.WriteFile(plain, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	junk := filepath.Join(t.TempDir(), "junk")
	if err := os.WriteFile(junk, []byte("\x7fjunk"), 0o755); err != nil {
		t.Fatal(err)
	}
	tests := map[string]struct {
		spec *taskv1.CommandStep
		want error
		says string
	}{
		"missing program":       {&taskv1.CommandStep{Argv: []string{"/no/such"}}, fs.ErrNotExist, "/no/such"},
		"not executable":        {&taskv1.CommandStep{Argv: []string{plain}}, fs.ErrPermission, plain},
		"not a program":         {&taskv1.CommandStep{Argv: []string{junk}}, syscall.ENOEXEC, junk},
		"relative":              {&taskv1.CommandStep{Argv: []string{"true"}}, syscall.EINVAL, "absolute"},
		"no argv":               {&taskv1.CommandStep{}, syscall.EINVAL, "argv[0]"},
		"missing directory":     {&taskv1.CommandStep{Argv: []string{"/bin/true"}, WorkingDirectory: "/no/dir"}, fs.ErrNotExist, "working directory"},
		"directory is a file":   {&taskv1.CommandStep{Argv: []string{"/bin/true"}, WorkingDirectory: plain}, syscall.ENOTDIR, plain},
		"unknown user":          {&taskv1.CommandStep{Argv: []string{"/bin/true"}, User: "nobody-here"}, fs.ErrNotExist, `"nobody-here"`},
		"a zero in an argument": {&taskv1.CommandStep{Argv: []string{"/bin/true", "a\x00b"}}, syscall.EINVAL, "/bin/true"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			dir := newCommand(t, tt.spec)
			if code := runShim(t, dir); code != 0 {
				t.Fatalf("shim exited with %d", code)
			}
			rec, err := dir.Result()
			if err != nil {
				t.Fatal(err)
			}
			_, err = shim.Outcome(rec)
			if !errors.Is(err, tt.want) || !strings.Contains(err.Error(), tt.says) {
				t.Errorf("error %v (%q)", err, rec.GetStartError())
			}
		})
	}
}

func TestSurroundings(t *testing.T) {
	spec := program(t, "where")
	spec.WorkingDirectory = "/usr"
	spec.Environment = []string{"A=1", "B=two words"}
	want := fmt.Sprintf("PATH=%s A=1 B=two words\n/usr\n%d:%d\n0", shim.Path, os.Getuid(), os.Getgid())
	dir := newCommand(t, spec)
	if o := outcome(t, dir); o.GetExitCode() != 0 {
		t.Fatalf("outcome %v", o)
	}
	if diff := cmp.Diff(want, string(readFile(t, dir.HeadPath(taskv1.Stream_STREAM_STDOUT)))); diff != "" {
		t.Error(diff)
	}
}

// As root, the shim becomes the user for the command; otherwise the attempt is
// an error that is recorded.
func TestUser(t *testing.T) {
	dir := newCommand(t, &taskv1.CommandStep{Argv: []string{"/bin/sh", "-c", "id -u; id -g; id -G"}, User: "nobody"})
	if os.Getuid() != 0 {
		runShim(t, dir)
		rec, err := dir.Result()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := shim.Outcome(rec); !errors.Is(err, fs.ErrPermission) {
			t.Errorf("error %v", err)
		}
		return
	}
	outcome(t, dir)
	if got := string(readFile(t, dir.HeadPath(taskv1.Stream_STREAM_STDOUT))); got != "65534\n65534\n65534\n" {
		t.Errorf("ids %q", got)
	}
}

func TestTimeout(t *testing.T) {
	spec := program(t, "wait", filepath.Join(t.TempDir(), "up"))
	spec.Timeout = durationpb.New(300 * time.Millisecond)
	o := outcome(t, newCommand(t, spec))
	if !o.GetTimedOut() || o.GetSignal() != int32(syscall.SIGTERM) || o.GetExitCode() == 0 {
		t.Errorf("outcome %v", o)
	}
	if d := o.GetDuration().AsDuration(); d < 300*time.Millisecond || d > 5*time.Second {
		t.Errorf("duration %s", d)
	}
}

// SIGTERM to the shim stops the command, and how it ended is recorded.
func TestStop(t *testing.T) {
	tests := map[string]struct{ code, signal int32 }{
		"wait":     {-1, int32(syscall.SIGTERM)},
		"stubborn": {9, 0},
	}
	for name, want := range tests {
		t.Run(name, func(t *testing.T) {
			up := filepath.Join(t.TempDir(), "up")
			dir := newCommand(t, program(t, name, up))
			c := shimFor(t, dir)
			if err := c.Start(); err != nil {
				t.Fatal(err)
			}
			eventually(t, "the program", func() bool { return exists(up) })
			if err := c.Process.Signal(syscall.SIGTERM); err != nil {
				t.Fatal(err)
			}
			if err := c.Wait(); err != nil {
				t.Errorf("shim: %v", err)
			}
			rec, err := dir.Result()
			if err != nil {
				t.Fatal(err)
			}
			if o := rec.GetOutcome(); o.GetExitCode() != want.code || o.GetSignal() != want.signal || o.GetTimedOut() {
				t.Errorf("outcome %v", o)
			}
		})
	}
}

// The head can be read while the command runs.
func TestHeadIsLive(t *testing.T) {
	pidFile := filepath.Join(t.TempDir(), "pid")
	dir := newCommand(t, &taskv1.CommandStep{Argv: []string{"/bin/sh", "-c", `echo $$ > "$0"; echo early; exec sleep 60`, pidFile}})
	c := shimFor(t, dir)
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the first line", func() bool {
		b, err := os.ReadFile(dir.HeadPath(taskv1.Stream_STREAM_STDOUT))
		return err == nil && string(b) == "early\n"
	})
	eventually(t, "the running total", func() bool {
		b, err := os.ReadFile(dir.TotalsPath())
		return err == nil && len(b) == 16 && b[7] == 6
	})
	if err := c.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := c.Wait(); err != nil {
		t.Error(err)
	}
}

func TestIDs(t *testing.T) {
	for _, bad := range []string{"", "..", "a/b", "a b", strings.Repeat("a", 65), "ü"} {
		if d, err := (shim.ID{TaskID: bad}).Dir("/s"); err == nil {
			t.Errorf("task id %q gave %s", bad, d)
		}
	}
	id := shim.ID{TaskID: "018f-AB", Step: 4, Attempt: 2}
	dir, err := id.Dir("/var/lib/millwright")
	if err != nil || dir != "/var/lib/millwright/commands/018f-AB/4-2" {
		t.Errorf("directory %q, %v", dir, err)
	}
	if back, err := shim.ParseDir(string(dir)); err != nil || back != id {
		t.Errorf("parsed %v, %v", back, err)
	}
	if id.Unit() != "millwright-task-018f-AB-4-2.service" {
		t.Errorf("unit %s", id.Unit())
	}
	for _, bad := range []string{"/x/y", "/x/y-", "/x/1-x", "/1-1", "/x/-1-1"} {
		if id, err := shim.ParseDir(bad); err == nil {
			t.Errorf("%q parsed as %v", bad, id)
		}
	}
}
