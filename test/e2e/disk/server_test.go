package disk

import (
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	nodev1 "github.com/gpuaas/millwright/proto/millwright/node/v1"
	"github.com/gpuaas/millwright/test/cluster/clustertest"
)

// serverDisk mounts an ext4 of its own for the server's state.
func serverDisk(t *testing.T) string {
	t.Helper()
	dir, image := t.TempDir(), filepath.Join(t.TempDir(), "server.img")
	for _, argv := range [][]string{
		{"truncate", "-s", "400M", image},
		{"mkfs.ext4", "-q", "-m", "0", image},
		{"mount", "-o", "loop", image, dir},
	} {
		if out, err := exec.CommandContext(t.Context(), argv[0], argv[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v\n%s", argv, err, out)
		}
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// fill takes all room but so many bytes.
func fill(t *testing.T, dir string, leave uint64) {
	t.Helper()
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(filepath.Join(dir, "fill"), os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	more := int64(st.Bavail*uint64(st.Bsize) - leave)
	if err := unix.Fallocate(int(f.Fd()), 0, info.Size(), more); err != nil && leave > 0 {
		t.Fatal(err)
	}
	for block := make([]byte, 4096); leave == 0; {
		if _, err := f.Write(block); err != nil {
			break // there is no block left
		}
		if _, err := f.Seek(0, 2); err != nil {
			t.Fatal(err)
		}
	}
	if err := f.Sync(); err != nil && leave > 0 {
		t.Fatal(err)
	}
}

func ready(t *testing.T, c *clustertest.Cluster) int {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+c.HTTPAddress()+"/readyz", nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	return resp.StatusCode
}

// TestServerDisk fills the server's disk in two steps: no room for outputs, and
// no room at all.
func TestServerDisk(t *testing.T) {
	dir := serverDisk(t)
	c := clustertest.Up(t, clustertest.Config{Nodes: 1, ServerDir: dir})
	s := &site{Cluster: c, node: c.Machine("n1")}
	pid, err := c.ServerPID()
	if err != nil {
		t.Fatal(err)
	}
	if code := ready(t, c); code != http.StatusOK {
		t.Fatalf("/readyz: %d", code)
	}
	before := c.Start("system.command", "n1", slow)
	c.Await(before, running)
	c.Sh("n1", "until test -s /root/runs; do sleep 0.1; done")
	fill(t, dir, 0)
	acknowledged := refused(t, c)
	if code := ready(t, c); code != http.StatusServiceUnavailable {
		t.Errorf("/readyz: %d, want 503", code)
	}
	c.Sh("n1", "touch /root/go; until journalctl -u millwrightd.service | grep -q 'task ended.*"+before+"'; do sleep 0.1; done")
	s.stays(t)
	if task, err := c.Task(t.Context(), before); err != nil || task.GetState() != running {
		t.Errorf("the task is %s on a disk that takes nothing: %v", task.GetState(), err)
	}
	if err := os.Remove(filepath.Join(dir, "fill")); err != nil {
		t.Fatal(err)
	}
	s.honest(t, before)
	for _, id := range acknowledged {
		s.honest(t, id)
	}
	if code := ready(t, c); code != http.StatusOK {
		t.Errorf("/readyz: %d with room", code)
	}
	s.until(t, "all output is on the server", func() bool {
		out, err := c.Millctl(t.Context(), "task", "logs", before)
		return err == nil && strings.HasSuffix(strings.TrimSpace(out.Stdout), "end")
	})
	if now, err := c.ServerPID(); err != nil || now != pid {
		t.Errorf("the server was process %d and is %d: %v", pid, now, err)
	}
	t.Run("no room for outputs", func(t *testing.T) { paused(t, s.with(t), dir) })
}

// refused creates tasks until the store needs room that is not there, and
// returns those that were acknowledged.
func refused(t *testing.T, c *clustertest.Cluster) (ids []string) {
	t.Helper()
	for range 200 {
		more, err := c.Run(t.Context(), "system.command", "n1", quick)
		if err == nil {
			ids = append(ids, more...)
			continue
		}
		if said := fmt.Sprint(err); !strings.Contains(said, "cannot write to its disk") || !strings.Contains(said, "try again") {
			t.Errorf("the refusal does not say what is wrong and what to do: %s", said)
		}
		return ids
	}
	t.Fatal("200 tasks were created on a full disk")
	return nil
}

// stays checks over some heartbeats that the session of the node is the same.
func (s *site) stays(t *testing.T) {
	t.Helper()
	for range 20 {
		n, err := s.Node(t.Context(), "n1")
		if err != nil {
			t.Fatal(err)
		}
		if n.GetState() != nodev1.NodeState_NODE_STATE_CONNECTED {
			t.Fatalf("the node is %s", n.GetState())
		}
		s.Sh("n1", "sleep 0.5")
	}
	if n := strings.Count(s.Sh("n1", "journalctl -u millwrightd.service"), "session open"); n != 1 {
		t.Errorf("the node opened %d sessions, want one", n)
	}
}

// paused leaves room for the store and none for outputs: they come later.
func paused(t *testing.T, s *site, dir string) {
	fill(t, dir, 128<<20)
	id := s.Start("system.command", "n1", `argv: [/bin/echo, "it comes later"]`)
	s.honest(t, id)
	if code := ready(t, s.Cluster); code != http.StatusOK {
		t.Errorf("/readyz: %d, though the store has room", code)
	}
	files := filepath.Join(dir, "output", id, "*")
	if got, err := filepath.Glob(files); err != nil || len(got) > 0 {
		t.Errorf("output was stored in the room that is reserved: %v, %v", got, err)
	}
	if err := os.Remove(filepath.Join(dir, "fill")); err != nil {
		t.Fatal(err)
	}
	s.until(t, "the output comes", func() bool {
		out, err := s.Millctl(t.Context(), "task", "logs", id)
		return err == nil && strings.Contains(out.Stdout, "it comes later")
	})
}
