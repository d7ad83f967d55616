package controlplane_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/gpuaas/millwright/controlplane"
	"github.com/gpuaas/millwright/controlplane/internal/store"
	"github.com/gpuaas/millwright/controlplane/internal/store/boltstore"
	"github.com/gpuaas/millwright/pki"
	"github.com/gpuaas/millwright/pki/ca"
	"github.com/gpuaas/millwright/pki/pkitest"
	serverv1 "github.com/gpuaas/millwright/proto/millwright/server/v1"
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
	p.kill()
	hosts := enrol(b, w, sessions)
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

// enrol makes hosts of a server that is stopped, without its limit on joins.
func enrol(b testing.TB, w *world, n int) []*host {
	b.Helper()
	authority := must(ca.Load(filepath.Join(w.cfg.StateDir, "ca"), ca.Config{TrustDomain: pkitest.TrustDomain}))(b)
	db := must(boltstore.Open(filepath.Join(w.cfg.StateDir, "store.db")))(b)
	ctx, cancel := context.WithCancel(b.Context())
	var wg sync.WaitGroup
	wg.Go(func() { _ = db.Run(ctx) })
	change, hosts := &store.Change{}, make([]*host, n)
	for i := range hosts {
		name := fmt.Sprintf("n%d", i)
		change.Nodes = append(change.Nodes, &serverv1.NodeRow{Name: name, Generation: 1})
		key := must(pki.GenerateKey())(b)
		id := must(pki.NewID(pkitest.TrustDomain, pki.RoleNode, name))(b)
		chain := must(authority.Issue(ca.Request{ID: id, PublicKey: &key.PublicKey, TTL: time.Hour, Generation: 1}))(b)
		hosts[i] = newHost(w, name, 1, must(pki.NewIdentity(chain, key, authority.Roots()))(b))
	}
	err := db.Update(ctx, func(store.View) (*store.Change, error) { return change, nil })
	cancel()
	wg.Wait()
	if err = errors.Join(err, db.Close()); err != nil {
		b.Fatal(err)
	}
	return hosts
}
