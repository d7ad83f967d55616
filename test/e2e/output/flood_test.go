package output

import (
	"bytes"
	"encoding/binary"
	"io"
	"os/exec"
	"strings"
	"testing"
	"time"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/test/cluster/clustertest"
)

const (
	blocks = 3200 // of 64 KiB, which are 200 MiB
	before = 20   // of them more than the head
)

// flood writes 200 MiB, and waits before most of it. Each byte tells where it
// belongs, so that one which is lost, doubled or misplaced is seen.
const flood = `
binmode STDOUT; $| = 1;
my $rest = pack("n*", 0..32765);
sub blocks { for my $i ($_[0]..$_[1]-1) { print pack("N", $i), $rest } }
print pack("C*", 0..255), "\xff\xfe\xc3\x28\xed\xa0\x80";
blocks(0, 20);
for (1..1200) { last if -e "/root/go"; select(undef, undef, undef, 0.1) }
-e "/root/go" or exit 9;
blocks(20, 3200);
print "end\x00\xff";
`

func floodBytes() []byte {
	rest := make([]byte, 0, 65532)
	for i := range 32766 {
		rest = binary.BigEndian.AppendUint16(rest, uint16(i))
	}
	var b bytes.Buffer
	for i := range 256 {
		b.WriteByte(byte(i))
	}
	b.WriteString("\xff\xfe\xc3\x28\xed\xa0\x80")
	for i := range uint32(blocks) {
		b.Write(binary.BigEndian.AppendUint32(nil, i))
		b.Write(rest)
	}
	b.WriteString("end\x00\xff")
	return b.Bytes()
}

// flooding is the command that writes 200 MiB, and someone who follows it.
type flooding struct {
	c      *clustertest.Cluster
	id     string
	want   expected
	follow *exec.Cmd
	live   io.Reader
	got    []byte
	remark strings.Builder
}

func startFlood(t *testing.T, c *clustertest.Cluster) *flooding {
	t.Helper()
	f := &flooding{c: c, want: expected{stream: stdout, all: floodBytes()}}
	f.id = c.Start("system.command", "n1", command("/usr/bin/perl", "-e", flood))
	f.follow = c.MillctlCommand(t.Context(), "task", "logs", f.id, "-f", "--stream", "stdout")
	f.follow.Stderr = &f.remark
	var err error
	if f.live, err = f.follow.StdoutPipe(); err == nil {
		err = f.follow.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// followHead takes the whole head while the command still runs.
func (f *flooding) followHead(t *testing.T) {
	late := time.AfterFunc(time.Minute, func() { _ = f.follow.Process.Kill() })
	defer late.Stop()
	f.got = make([]byte, headLimit)
	if n, err := io.ReadFull(f.live, f.got); err != nil {
		t.Fatalf("%d bytes of the head came within a minute: %v; remarks %q", n, err, f.remark.String())
	}
	same(t, "the live head", f.got, f.want.head())
	task := f.c.Await(f.id, taskv1.TaskState_TASK_STATE_RUNNING)
	for _, o := range task.GetOutputs() {
		if o.GetStream() == stdout && o.GetState() != taskv1.OutputState_OUTPUT_STATE_OPEN {
			t.Errorf("while the command runs its output is %s", o.GetState())
		}
	}
}

// check is about the end: what was followed is what can be read afterwards.
func (f *flooding) check(t *testing.T) {
	late := time.AfterFunc(2*time.Minute, func() { _ = f.follow.Process.Kill() })
	defer late.Stop()
	rest, err := io.ReadAll(f.live)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.follow.Wait(); err != nil {
		t.Fatalf("logs -f: %v; remarks %q", err, f.remark.String())
	}
	same(t, "what was followed", append(f.got, rest...), f.want.kept())
	if !strings.Contains(f.remark.String(), f.want.remark()) {
		t.Errorf("logs -f remarks %q, want %q in it", f.remark.String(), f.want.remark())
	}
	task := f.c.End(f.id)
	if task.GetState() != succeeded {
		t.Fatalf("state %s: %s %s", task.GetState(), task.GetReason(), task.GetMessage())
	}
	f.want.checkLogs(t, f.c, f.id)
	task = f.c.End(f.id)
	f.want.checkTask(t, task)
	expected{stream: stderr}.checkTask(t, task)
}
