package controlplane_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/gpuaas/millwright/controlplane"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// BenchmarkDispatch is the time from CreateTasks to the acknowledgement of the
// accepted event, over loopback TLS; the node's own disk is not in it.
func BenchmarkDispatch(b *testing.B) {
	w := newWorldWith(b, func(*controlplane.Config) {})
	h := w.join("n1")
	h.connect()
	var took []time.Duration
	for b.Loop() {
		req := w.request(w.leaf("n1"))
		begin := time.Now()
		resp, err := w.tasks.CreateTasks(b.Context(), req)
		if err != nil {
			b.Fatal(err)
		}
		id := resp.GetTasks()[0].GetId()
		h.accept(h.assignment(id))
		took = append(took, time.Since(begin))
		h.finish(id, taskv1.TaskState_TASK_STATE_SUCCEEDED)
		h.pending = nil
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Microseconds()), "p50-us")
	b.ReportMetric(float64(took[len(took)*99/100].Microseconds()), "p99-us")
}

// BenchmarkIdleSessions is the memory that a server in a process of its own
// needs for each session that is open and idle.
func BenchmarkIdleSessions(b *testing.B) {
	const sessions = 2000
	binary := filepath.Join(b.TempDir(), "millwright-server")
	if out, err := exec.CommandContext(b.Context(), "go", "build", "-o", binary, "./cmd/millwright-server").CombinedOutput(); err != nil {
		b.Fatalf("build: %v\n%s", err, out)
	}
	w, p := newProcess(b, binary)
	hosts := make([]*host, sessions)
	for i := range hosts {
		hosts[i] = w.join(fmt.Sprintf("n%d", i))
	}
	p.kill()
	p.start()
	for b.Loop() {
		before, begin := rss(b, p.cmd.Process.Pid), time.Now()
		var group errgroup.Group
		group.SetLimit(64)
		for _, h := range hosts {
			group.Go(func() error {
				h.connect()
				return nil
			})
		}
		if err := group.Wait(); err != nil {
			b.Fatal(err)
		}
		b.ReportMetric(time.Since(begin).Seconds(), "connect-s")
		b.ReportMetric(float64(rss(b, p.cmd.Process.Pid)-before)/sessions, "bytes/session")
	}
}

// rss is the resident memory of a process in bytes.
func rss(b *testing.B, pid int) int {
	b.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		b.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(text), "VmRSS:")
	n, err := strconv.Atoi(strings.Fields(rest)[0])
	if err != nil {
		b.Fatal(err)
	}
	return n << 10
}
