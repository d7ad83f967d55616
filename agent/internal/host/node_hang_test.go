//go:build millwright_node

package nodehost_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuaas/millwright/agent/internal/child"
	"github.com/gpuaas/millwright/tasks/host"
)

const hungPoint = "/mnt/mwtest-hung"

// mountHung mounts a FUSE file system that answers the first message, as it
// must, and takes all others without an answer: who touches it cannot even be
// killed. It returns what ends it.
func mountHung(t *testing.T) (end func()) {
	t.Helper()
	must(t, os.MkdirAll(hungPoint, 0o755))
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	must(t, err)
	options := fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", fd)
	must(t, unix.Mount("hung", hungPoint, "fuse", 0, options))
	dev := os.NewFile(uintptr(fd), "/dev/fuse")
	var wg sync.WaitGroup
	wg.Go(func() { swallow(t, dev) })
	var once sync.Once
	end = func() {
		once.Do(func() {
			must(t, unix.Unmount(hungPoint, unix.MNT_DETACH))
			must(t, dev.Close())
			wg.Wait()
			must(t, os.Remove(hungPoint))
		})
	}
	t.Cleanup(end)
	return end
}

func swallow(t *testing.T, dev *os.File) {
	buf := make([]byte, 1<<20)
	for {
		n, err := dev.Read(buf)
		if err != nil {
			return // it is closed
		}
		const fuseInit = 26
		if n < 40 || binary.NativeEndian.Uint32(buf[4:]) != fuseInit {
			continue
		}
		out := make([]byte, 16+64) // the header and struct fuse_init_out
		binary.NativeEndian.PutUint32(out, uint32(len(out)))
		copy(out[8:16], buf[8:16])                    // the message's number
		binary.NativeEndian.PutUint32(out[16:], 7)    // the protocol
		binary.NativeEndian.PutUint32(out[20:], 31)   //
		binary.NativeEndian.PutUint32(out[36:], 4096) // the largest write
		if _, err := dev.Write(out); err != nil {
			t.Errorf("answer of the file system: %v", err)
		}
	}
}

// A mount that hangs harms nobody but the probe's child: that is given up in
// time, a second one is not piled upon it, and all that need not touch the file
// system answers.
func TestHungMount(t *testing.T) {
	needNode(t)
	end := mountHung(t)
	h := newNode(t, t.TempDir()).Prober()
	within := func(what string, limit time.Duration, do func() error) error {
		t.Helper()
		begin := time.Now()
		err := do()
		if d := time.Since(begin); d > limit {
			t.Errorf("%s took %s", what, d)
		}
		return err
	}
	err := within("the probe", 4*time.Second, func() error { return h.ProbeRead(t.Context(), hungPoint) })
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("the probe: %v", err)
	}
	err = within("the second probe", time.Second, func() error { return h.ProbeWrite(t.Context(), hungPoint) })
	if !errors.Is(err, child.ErrStuck) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("the second probe: %v", err)
	}
	must(t, within("lstat", time.Second, func() error { _, err := h.Lstat(t.Context(), hungPoint); return err }))
	must(t, within("users", time.Second, func() error { _, err := h.Users(t.Context(), hungPoint); return err }))
	must(t, within("mounts", time.Second, func() error { _, err := h.Mounts(t.Context()); return err }))
	end()
	eventually(t, "the probe to be free again", func() bool {
		return !errors.Is(h.ProbeRead(t.Context(), hungPoint), child.ErrStuck)
	})
}

// A change on a mount that hangs waits for it, and keeps no other change from
// the disk. A second one at the same place waits no longer than it may.
func TestChangesBesideHungMount(t *testing.T) {
	needNode(t)
	end := mountHung(t)
	h := newNode(t, t.TempDir()).ForStep("t", 0)
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	var two sync.WaitGroup
	answers := make(chan error, 2)
	for range 2 {
		two.Go(func() { answers <- h.MakeDir(ctx, hungPoint+"/a", 0o700) })
	}
	answered := func(what string, c <-chan error) error {
		t.Helper()
		select {
		case err := <-c:
			return err
		case <-time.After(5 * time.Second):
			t.Errorf("%s hangs", what)
			return nil
		}
	}
	if err := answered("the second change", answers); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("the second change: %v", err)
	}
	beside := filepath.Join(t.TempDir(), "b")
	other := make(chan error, 1)
	two.Go(func() {
		other <- errors.Join(h.MakeDir(t.Context(), beside, 0o700),
			h.WriteFile(t.Context(), filepath.Join(beside, "c"), host.File{Data: []byte("x"), Mode: 0o600}))
	})
	must(t, answered("a change elsewhere", other))
	end()
	two.Wait()
}
