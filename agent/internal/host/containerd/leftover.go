package containerd

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/coreos/go-systemd/v22/unit"

	"github.com/gpuaas/millwright/agent/internal/crash"
	"github.com/gpuaas/millwright/agent/internal/host/mounts"
	"github.com/gpuaas/millwright/tasks/host"
)

// taken finds the directory of a shim that containerd could not make, since it
// is there.
var taken = regexp.MustCompile(`mkdir (/[^ :]+): file exists`)

// leftOver returns the directory of the shim of a container of ours that an error
// of containerd names, or nothing when it names another one.
func leftOver(name, text string) string {
	m := taken.FindStringSubmatch(text)
	if m == nil || filepath.Clean(m[1]) != m[1] {
		return ""
	}
	parent, base := filepath.Split(m[1])
	if base != name || filepath.Base(parent) != namespace || filepath.Base(filepath.Dir(filepath.Clean(parent))) != "io.containerd.runtime.v2.task" {
		return ""
	}
	return m[1]
}

// removeLeftOver removes the directory that a start which was cut off has left.
// containerd looks for such ones only when it starts itself, and until then
// starts no container of the name. It is called when containerd has no process
// under the name and no shim runs.
func (r *Runtime) removeLeftOver(ctx context.Context, name string, cause error) error {
	dir := leftOver(name, cause.Error())
	if dir == "" {
		return nil
	}
	if pids, err := shims(name); err != nil || len(pids) > 0 {
		return err // one has come; the next try sees it
	}
	r.cfg.Logger.WarnContext(ctx, "a directory of a shim was left", "container", name, "dir", dir)
	crash.Point("host.container.leftover.before")
	if err := r.unmountBelow(ctx, dir); err != nil {
		return err
	}
	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("remove what is left of a start: %w", err)
	}
	crash.Point("host.container.leftover.after")
	return nil
}

// unmountBelow has systemd unmount what is mounted below a directory, as the
// container's own file system is: it must be gone before anything is deleted. The
// agent itself may not unmount.
func (r *Runtime) unmountBelow(ctx context.Context, dir string) error {
	for range 8 { // several can lie upon one another
		table, err := mounts.New(mounts.Config{}).Mounts(ctx)
		if err != nil {
			return err
		}
		i := slices.IndexFunc(table, func(m host.Mount) bool { return strings.HasPrefix(m.Target+"/", dir+"/") })
		if i < 0 {
			return nil
		}
		crash.Point("host.container.leftover.mounted")
		if err := r.cfg.Units.StopUnit(ctx, unit.UnitNamePathEscape(table[i].Target)+".mount"); err != nil {
			return fmt.Errorf("unmount what a start has left: %w", err)
		}
	}
	return fmt.Errorf("something is still mounted below %s, which a start has left: unmount it: %w", dir, fs.ErrExist)
}
