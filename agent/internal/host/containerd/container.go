package containerd

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"time"

	apievents "github.com/containerd/containerd/api/events"
	"github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/events"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/errdefs"
	"github.com/containerd/typeurl/v2"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/gpuaas/millwright/agent/internal/clock"
	"github.com/gpuaas/millwright/agent/internal/crash"
	"github.com/gpuaas/millwright/tasks/host"
)

// A start that was cut off is waited for: so often, so long each time.
const (
	cutOffTries = 75
	cutOffWait  = 200 * time.Millisecond
	// leftOverTries is when what is in the way of a start counts as left over: so
	// often containerd had no process under the name, and no shim was there.
	leftOverTries = 25
)

func digestOf(record []byte) string {
	sum := sha256.Sum256(record)
	return hex.EncodeToString(sum[:])
}

// CreateContainer implements [host.ContainerController].
func (r *Runtime) CreateContainer(ctx context.Context, want host.Container) error {
	return r.do(ctx, "create container "+want.Name, func(ctx context.Context, c *client.Client) error {
		old, err := c.ContainerService().Get(ctx, want.Name)
		switch {
		case err == nil && old.Labels[labelRecord] == "":
			return host.ErrNotOurs
		case err == nil && old.Labels[labelRecord] != digestOf(want.Record):
			return fmt.Errorf("another one has the name: %w", fs.ErrExist)
		case err == nil:
			return nil
		case !errdefs.IsNotFound(err):
			return err
		}
		if err := r.clear(ctx, c, want.Name); err != nil {
			return err
		}
		return r.create(ctx, c, want)
	})
}

func (r *Runtime) create(ctx context.Context, c *client.Client, want host.Container) error {
	image, err := c.GetImage(ctx, imageName(want.Image))
	if err != nil {
		return hostError(err)
	}
	config, err := image.Spec(ctx)
	if err != nil {
		return err
	}
	spec, err := specOptions(want, config.Config)
	if err != nil {
		return err
	}
	devices, err := r.devices(ctx, want.Devices)
	if err != nil {
		return err
	}
	spec = append(spec, devices...) // last: nothing may take away what they add
	if err := os.MkdirAll(r.logDir(want.Name), 0o700); err != nil {
		return err
	}
	ctx, release, err := lease(ctx, c, want.Name)
	if err != nil {
		return err
	}
	defer release()
	crash.Point("host.container.create.before")
	_, err = c.NewContainer(ctx, want.Name,
		client.WithImage(image), client.WithSnapshotter(snapshotter), client.WithNewSnapshot(want.Name, image),
		client.WithContainerLabels(map[string]string{
			labelRecord: digestOf(want.Record), labelImage: want.Image, labelGrace: want.StopGrace.String(),
		}),
		client.WithImageStopSignal(image, "SIGTERM"),
		client.WithContainerExtension(extension, wrapperspb.Bytes(want.Record)),
		client.WithRuntime(runtimeName, &options.Options{SystemdCgroup: true}),
		client.WithNewSpec(spec...))
	crash.Point("host.container.create.after")
	return err
}

// StartContainer implements [host.ContainerController]. It watches the container
// for a moment, so that one that runs out of memory at once is known to have.
func (r *Runtime) StartContainer(ctx context.Context, name string) error {
	return r.do(ctx, "start container "+name, func(ctx context.Context, c *client.Client) error {
		ctr, err := c.LoadContainer(ctx, name)
		if err != nil {
			return hostError(err)
		}
		labels, err := ctr.Labels(ctx)
		if err != nil {
			return err
		}
		if labels[labelRecord] == "" {
			return host.ErrNotOurs
		}
		watch, unwatch := context.WithCancel(ctx)
		defer unwatch()
		seen, lost := c.Subscribe(watch, `topic=="/tasks/oom"`)
		task, err := r.makeTask(ctx, c, ctr)
		if err != nil || task == nil {
			return err
		}
		crash.Point("host.container.start.made")
		exit, err := task.Wait(ctx)
		if err != nil {
			return err
		}
		if err := task.Start(ctx); err != nil {
			return fmt.Errorf("start its process: %w", err)
		}
		crash.Point("host.container.start.after")
		return r.settle(ctx, ctr, exit, seen, lost)
	})
}

// makeTask makes the container's process, not yet started, or returns nil when
// one runs already. A start that was cut off, as by the agent's end, goes on in
// containerd for a moment, or is being cleared away there: it is waited for.
func (r *Runtime) makeTask(ctx context.Context, c *client.Client, ctr client.Container) (client.Task, error) {
	for try := 1; ; try++ {
		st, err := r.look(ctx, c, ctr.ID())
		if err != nil || st.Running {
			return nil, err
		}
		// What is left of an earlier start, or of a start that was cut off, goes.
		if err := r.stopTask(ctx, ctr, ctr.ID(), 0); err != nil {
			return nil, err
		}
		crash.Point("host.container.start.before")
		task, err := ctr.NewTask(ctx, cio.BinaryIO(r.cfg.Executable, map[string]string{"container-log": r.logDir(ctr.ID())}))
		if err == nil {
			return task, nil
		}
		err = fmt.Errorf("make its process: %w", err)
		// The shim's directory has no error class of its own.
		taken := errdefs.IsAlreadyExists(err) || strings.Contains(err.Error(), "file exists")
		if !taken || try == cutOffTries || !clock.Sleep(ctx, cutOffWait) {
			return nil, err
		}
		if try >= leftOverTries {
			if err := r.removeLeftOver(ctx, ctr.ID(), err); err != nil {
				return nil, err
			}
		}
	}
}

// settle waits a moment for the container's end, and notes when that is for want
// of memory.
func (r *Runtime) settle(ctx context.Context, ctr client.Container, exit <-chan client.ExitStatus, seen <-chan *events.Envelope, lost <-chan error) error {
	timer := time.NewTimer(r.cfg.Settle)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-timer.C:
			return nil
		case <-exit:
			exit = nil // the word of the kernel may come later
			timer.Reset(min(r.cfg.Settle, 500*time.Millisecond))
		case <-lost: //nolint:errcheck // it is only known less well
			lost = nil
		case e := <-seen:
			if e == nil {
				seen = nil
				continue
			}
			if v, err := typeurl.UnmarshalAny(e.Event); err == nil {
				if oom, ok := v.(*apievents.TaskOOM); ok && oom.GetContainerID() == ctr.ID() {
					if _, err := ctr.SetLabels(ctx, map[string]string{labelOOM: "true"}); err != nil {
						return err
					}
				}
			}
		}
	}
}

// RemoveContainer implements [host.ContainerController].
func (r *Runtime) RemoveContainer(ctx context.Context, name string) error {
	return r.do(ctx, "remove container "+name, func(ctx context.Context, c *client.Client) error {
		ctr, err := c.LoadContainer(ctx, name)
		if errdefs.IsNotFound(err) {
			return r.clear(ctx, c, name)
		}
		if err != nil {
			return err
		}
		labels, err := ctr.Labels(ctx)
		if err != nil {
			return err
		}
		if labels[labelRecord] == "" {
			return host.ErrNotOurs
		}
		grace, err := time.ParseDuration(labels[labelGrace])
		if err != nil {
			grace = 10 * time.Second
		}
		if err := r.stopTask(ctx, ctr, name, grace); err != nil {
			return err
		}
		crash.Point("host.container.remove.stopped")
		// From here on it must be done, or a snapshot would be left.
		last, cancel := finishing(ctx)
		defer cancel()
		if err := ctr.Delete(last, client.WithSnapshotCleanup); err != nil && !errdefs.IsNotFound(err) {
			return err
		}
		crash.Point("host.container.remove.deleted")
		return r.clear(last, c, name)
	})
}

// stopTask ends the container's process, first with its stop signal when there is
// a grace, and deletes it. It then clears away what containerd has lost sight of:
// a process that still runs in the container's scope, and its shim.
func (r *Runtime) stopTask(ctx context.Context, ctr client.Container, name string, grace time.Duration) error {
	task, err := ctr.Task(ctx, nil)
	if err != nil && !errdefs.IsNotFound(err) {
		return err
	}
	if err == nil {
		if grace > 0 {
			if err := ask(ctx, ctr, task, grace); err != nil {
				return err
			}
		}
		last, cancel := finishing(ctx)
		defer cancel()
		if _, err := task.Delete(last, client.WithProcessKill); err != nil && !errdefs.IsNotFound(err) {
			return fmt.Errorf("end its process: %w", err)
		}
	}
	return r.clearLost(ctx, name)
}

// ask sends the stop signal and waits for the end as long as the grace goes.
func ask(ctx context.Context, ctr client.Container, task client.Task, grace time.Duration) error {
	st, err := task.Status(ctx)
	if err != nil || st.Status != client.Running {
		return ignoreNotFound(err)
	}
	signal, err := client.GetStopSignal(ctx, ctr, 15)
	if err != nil {
		return err
	}
	exit, err := task.Wait(ctx)
	if err != nil {
		return ignoreNotFound(err)
	}
	if err := task.Kill(ctx, signal); err != nil {
		return ignoreNotFound(err)
	}
	timer := time.NewTimer(grace)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-exit: // or containerd went away: then the next call says so
	case <-timer.C:
	}
	return nil
}

func ignoreNotFound(err error) error {
	if errdefs.IsNotFound(err) {
		return nil
	}
	return err
}

// ProbeContainer implements [host.Prober].
func (r *Runtime) ProbeContainer(ctx context.Context, name string) (host.ContainerStatus, error) {
	first, err := r.Container(ctx, name)
	if err != nil || !first.Running && first.PID == 0 {
		return first, err
	}
	if !clock.Sleep(ctx, r.cfg.Settle) {
		return first, fmt.Errorf("watch container %s: %w", name, context.Cause(ctx))
	}
	second, err := r.Container(ctx, name)
	if err == nil && second.Running && first.Running && second.Process != first.Process {
		second.Running, second.State = false, "started again and again"
	}
	return second, err
}
