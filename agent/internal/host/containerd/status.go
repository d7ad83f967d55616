package containerd

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/gpuaas/millwright/agent/internal/containerlog"
	"github.com/gpuaas/millwright/tasks/host"
)

// lastLines is how much of a container's output explains its end.
const lastLines = 5

// Container implements [host.ContainerReader].
func (r *Runtime) Container(ctx context.Context, name string) (host.ContainerStatus, error) {
	var st host.ContainerStatus
	err := r.do(ctx, "look at container "+name, func(ctx context.Context, c *client.Client) (err error) {
		st, err = r.look(ctx, c, name)
		return err
	})
	return st, err
}

func (r *Runtime) look(ctx context.Context, c *client.Client, name string) (host.ContainerStatus, error) {
	ctr, err := c.LoadContainer(ctx, name)
	if errdefs.IsNotFound(err) {
		return host.ContainerStatus{}, nil
	}
	if err != nil {
		return host.ContainerStatus{}, err
	}
	info, err := ctr.Info(ctx, client.WithoutRefreshedMetadata)
	if err != nil {
		return host.ContainerStatus{}, err
	}
	st := host.ContainerStatus{
		Exists: true, Ours: info.Labels[labelRecord] != "", Record: recordOf(info), Image: info.Labels[labelImage],
	}
	if !st.Ours {
		return st, nil
	}
	task, err := ctr.Task(ctx, nil)
	if errdefs.IsNotFound(err) {
		return st, nil
	}
	if err != nil {
		return st, err
	}
	status, err := task.Status(ctx)
	if errdefs.IsNotFound(err) {
		return st, nil
	}
	if err != nil {
		return st, err
	}
	st.State, st.ExitCode = string(status.Status), int(status.ExitStatus)
	if status.Status != client.Running {
		st.OOMKilled = info.Labels[labelOOM] != "" && st.ExitCode == 128+int(unix.SIGKILL)
		st.LastLines, err = containerlog.LastLines(r.logDir(name), lastLines)
		return st, err
	}
	st.PID = int(task.Pid())
	return st, identify(&st, name)
}

// identify says whether the process that containerd names is the container's: it
// is alive and in the container's scope.
func identify(st *host.ContainerStatus, name string) error {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", st.PID))
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		st.State = "without a process"
		return nil
	}
	if err != nil {
		return err
	}
	groups, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", st.PID))
	if err != nil {
		return err
	}
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	if len(fields) < 20 {
		return fmt.Errorf("read /proc/%d/stat: it has %d fields", st.PID, len(fields))
	}
	if fields[0] == "Z" { // containerd has yet to hear of its end
		st.State = "ending"
		return nil
	}
	st.Process = fmt.Sprintf("%d since %s", st.PID, fields[19])
	for line := range strings.Lines(string(groups)) {
		if _, p, ok := strings.Cut(strings.TrimSpace(line), "/millwright.slice/"); ok && strings.HasSuffix(p, scope(name)) {
			st.ControlGroup, st.Running = "/millwright.slice/"+p, true
			return nil
		}
	}
	st.State = "outside its control group"
	return nil
}

// recordOf returns the record of a container when it is as it was written.
func recordOf(info containers.Container) []byte {
	e, ok := info.Extensions[extension]
	if !ok {
		return nil
	}
	var v wrapperspb.BytesValue
	if proto.Unmarshal(e.GetValue(), &v) != nil || digestOf(v.GetValue()) != info.Labels[labelRecord] {
		return nil
	}
	return v.GetValue()
}

// clear removes what is left under a name that has no container: processes, the
// snapshot, a lease and the output.
func (r *Runtime) clear(ctx context.Context, c *client.Client, name string) error {
	if err := r.clearLost(ctx, name); err != nil {
		return err
	}
	if err := c.SnapshotService(snapshotter).Remove(ctx, name); err != nil && !errdefs.IsNotFound(err) {
		return fmt.Errorf("remove the snapshot: %w", err)
	}
	_, release, err := lease(ctx, c, name) // one that a crash has left
	if err != nil {
		return err
	}
	release()
	return os.RemoveAll(r.logDir(name))
}

// clearLost ends what runs for a container that, as far as containerd knows, has
// no process: otherwise it would run twice.
func (r *Runtime) clearLost(ctx context.Context, name string) error {
	pids, err := shims(name)
	if err != nil {
		return err
	}
	for _, pid := range pids {
		r.cfg.Logger.WarnContext(ctx, "a shim was left", "container", name, "pid", pid)
		if err := unix.Kill(pid, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("end the shim %d that was left: %w", pid, err)
		}
	}
	u, err := r.cfg.Units.Unit(ctx, scope(name))
	if err != nil || u.Active != "active" {
		return err
	}
	r.cfg.Logger.WarnContext(ctx, "processes were left", "container", name, "unit", scope(name))
	return r.cfg.Units.StopUnit(ctx, scope(name))
}

// shims returns the shims of a container of ours.
func shims(name string) ([]int, error) {
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			continue // it has ended
		}
		args := strings.Split(string(b), "\x00")
		if filepath.Base(args[0]) != "containerd-shim-runc-v2" || !has(args, "-namespace", namespace) || !has(args, "-id", name) {
			continue
		}
		if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(f))); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

func has(args []string, key, value string) bool {
	for i := range len(args) - 1 {
		if args[i] == key && args[i+1] == value {
			return true
		}
	}
	return false
}
