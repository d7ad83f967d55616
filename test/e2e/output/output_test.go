// Package output shows on a real node what becomes of the output of commands.
package output

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/test/cluster"
	"github.com/gpuaas/millwright/test/cluster/clustertest"
)

const (
	headLimit = 1 << 20
	tailLimit = 256 << 10
	mib       = 1 << 20

	agentLimit  = 64 * mib // VmHWM of the agent
	serverLimit = 32 * mib // growth of the server
)

const (
	succeeded = taskv1.TaskState_TASK_STATE_SUCCEEDED
	stdout    = taskv1.Stream_STREAM_STDOUT
	stderr    = taskv1.Stream_STREAM_STDERR
	complete  = taskv1.OutputState_OUTPUT_STATE_COMPLETE
	truncated = taskv1.OutputState_OUTPUT_STATE_TRUNCATED
)

// TestOutput lets a command write 200 MiB and follows it. In its middle, while
// the agent has its hands full, the others run.
func TestOutput(t *testing.T) {
	c := clustertest.Up(t, clustertest.Config{Nodes: 1})
	m := newMeter(t, c)
	f := startFlood(t, c)
	t.Run("the head is followed live", func(t *testing.T) { f.followHead(t) })
	others := startOthers(c)
	c.Sh("n1", "touch /root/go")
	for _, o := range others {
		t.Run(o.name, func(t *testing.T) { o.check(t, c) })
	}
	t.Run("a grandchild writes without end", func(t *testing.T) { endless(t, c.With(t)) })
	t.Run("200 MiB", func(t *testing.T) { f.check(t) })
	t.Run("agent and server stay small", func(t *testing.T) { m.check(t) })
}

// meter measures agent and server.
type meter struct {
	c             *clustertest.Cluster
	agent, server string // process ids
	before        uint64 // resident memory of the server, in bytes
}

func newMeter(t *testing.T, c *clustertest.Cluster) *meter {
	t.Helper()
	pid, err := c.ServerPID()
	if err != nil {
		t.Fatal(err)
	}
	m := &meter{c: c, agent: c.Sh("n1", "systemctl show -P MainPID millwrightd.service"), server: strconv.Itoa(pid)}
	m.before = m.ofServer(t, "VmRSS")
	// From here on VmHWM is the most since now.
	if err := os.WriteFile("/proc/"+m.server+"/clear_refs", []byte("5"), 0o200); err != nil {
		t.Fatal(err)
	}
	return m
}

func (m *meter) ofServer(t *testing.T, field string) uint64 {
	t.Helper()
	status, err := os.ReadFile("/proc/" + m.server + "/status")
	if err != nil {
		t.Fatal(err)
	}
	return memory(t, status, field)
}

func memory(t *testing.T, status []byte, field string) uint64 {
	t.Helper()
	n, err := cluster.MemoryOf(status, field)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// check is about the processes that were there at the beginning: one that was
// started anew has forgotten how large it was.
func (m *meter) check(t *testing.T) {
	if pid := m.c.Sh("n1", "systemctl show -P MainPID millwrightd.service"); pid != m.agent {
		t.Fatalf("the agent is process %s, and was %s", pid, m.agent)
	}
	agent := memory(t, []byte(m.c.Sh("n1", "cat /proc/"+m.agent+"/status")), "VmHWM")
	most := m.ofServer(t, "VmHWM")
	t.Logf("agent at most %d KiB; server %d KiB before, at most %d KiB", agent>>10, m.before>>10, most>>10)
	if agent > agentLimit {
		t.Errorf("the agent had %d bytes, want at most %d", agent, agentLimit)
	}
	if most > m.before+serverLimit {
		t.Errorf("the server grew from %d bytes to %d, want by at most %d", m.before, most, serverLimit)
	}
}

// command is the spec of a program.
func command(argv ...string) string {
	b, err := json.Marshal(map[string][]string{"argv": argv})
	if err != nil {
		panic(err) // texts can be encoded
	}
	return string(b)
}

// expected is what of one stream comes back.
type expected struct {
	stream taskv1.Stream
	all    []byte // what the command wrote
	open   bool   // something kept the stream open
}

func (e expected) head() []byte { return e.all[:min(len(e.all), headLimit)] }

func (e expected) tail() []byte {
	return e.all[max(len(e.head()), len(e.all)-tailLimit):]
}

func (e expected) kept() []byte { return append(bytes.Clone(e.head()), e.tail()...) }

func (e expected) state() taskv1.OutputState {
	if len(e.kept()) < len(e.all) {
		return truncated
	}
	return complete
}

// remark is what millctl says about bytes that were not kept.
func (e expected) remark() string {
	if e.state() == complete {
		return ""
	}
	return fmt.Sprintf("%d bytes in all, of which the first %d and the last %d were kept", len(e.all), headLimit, tailLimit)
}

// checkLogs follows the task to its end, then reads what the server has.
func (e expected) checkLogs(t *testing.T, c *clustertest.Cluster, id string) {
	t.Helper()
	stream := strings.ToLower(strings.TrimPrefix(e.stream.String(), "STREAM_"))
	for _, flags := range [][]string{{"-f"}, nil} {
		out, err := c.Millctl(t.Context(), append([]string{"task", "logs", id, "--stream", stream}, flags...)...)
		if err != nil {
			t.Fatal(err)
		}
		same(t, stream, []byte(out.Stdout), e.kept())
		if !strings.Contains(out.Stderr, e.remark()) {
			t.Errorf("%s: millctl remarks %q, want %q in it", stream, out.Stderr, e.remark())
		}
	}
}

// checkTask is about what the history says of the stream.
func (e expected) checkTask(t *testing.T, task *taskv1.Task) {
	t.Helper()
	for _, o := range task.GetOutputs() {
		if o.GetStream() != e.stream {
			continue
		}
		s := o.GetSummary()
		if o.GetState() != e.state() || s.GetTotalBytes() != uint64(len(e.all)) || s.GetOpenAtEnd() != e.open ||
			s.GetHeadBytes() != uint64(len(e.head())) || s.GetTailBytes() != uint64(len(e.tail())) {
			t.Errorf("%s is %v, want %s with %d bytes in all, open at the end: %t", e.stream, o, e.state(), len(e.all), e.open)
		}
		return
	}
	t.Errorf("task has outputs %v, want one of %s", task.GetOutputs(), e.stream)
}

// same compares bytes and names the first difference.
func same(t *testing.T, what string, got, want []byte) {
	t.Helper()
	if bytes.Equal(got, want) {
		return
	}
	i := 0
	for i < min(len(got), len(want)) && got[i] == want[i] {
		i++
	}
	t.Errorf("%s has %d bytes, want %d; the first difference is at %d: %x, want %x",
		what, len(got), len(want), i, got[i:min(len(got), i+16)], want[i:min(len(want), i+16)])
}
