package nodehost

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/user"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuaas/millwright/agent/internal/child"
	"github.com/gpuaas/millwright/agent/internal/crash"
	"github.com/gpuaas/millwright/agent/internal/host/command"
	"github.com/gpuaas/millwright/agent/internal/host/containerd"
	"github.com/gpuaas/millwright/agent/internal/host/disks"
	"github.com/gpuaas/millwright/agent/internal/host/files"
	"github.com/gpuaas/millwright/agent/internal/host/gpus"
	"github.com/gpuaas/millwright/agent/internal/host/mounts"
	"github.com/gpuaas/millwright/agent/internal/host/packages"
	"github.com/gpuaas/millwright/agent/internal/host/secrets"
	"github.com/gpuaas/millwright/agent/internal/host/slurm"
	"github.com/gpuaas/millwright/agent/internal/host/systemd"
	"github.com/gpuaas/millwright/agent/internal/shim"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks/host"
)

// surface is all that does not depend on a step.
type surface struct {
	*systemd.Conn
	*mounts.Table
	*containerd.Runtime
	*disks.Set
	network
	*packages.Native
	*slurm.Client
	gpuSet
	files   *files.Files
	secrets *secrets.Store
	probe   prober
}

// gpuSet names the GPUs: another part of the surface is a Set as well.
type gpuSet struct{ *gpus.Set }

// stepHost is the host of one step.
type stepHost struct {
	*surface
	commands *command.Runner
	id       shim.ID
}

// RunCommand implements host.Commander.
func (h stepHost) RunCommand(ctx context.Context, c host.Command) (host.Outcome, error) {
	return h.commands.Run(ctx, h.id, c)
}

// CommandOutput implements host.Commander.
func (h stepHost) CommandOutput(ctx context.Context) ([]byte, error) {
	if err := ctx.Err(); err != nil {
		return nil, context.Cause(ctx)
	}
	return h.head(taskv1.Stream_STREAM_STDOUT, maxOutput)
}

// maxOutput is what CommandOutput returns at most.
const maxOutput = 1 << 20

func (h stepHost) head(stream taskv1.Stream, most int) ([]byte, error) {
	b := make([]byte, most)
	n, err := h.commands.ReadHead(h.id, stream, b, 0)
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return b[:n], err
}

// ResetGPUsOnce implements host.GPUResetter.
func (h stepHost) ResetGPUsOnce(ctx context.Context, uuids []string, timeout time.Duration) (host.GPUReset, error) {
	return h.ResetOnce(ctx, stepCommand{h}, uuids, timeout)
}

// stepCommand is the one command of a step.
type stepCommand struct{ stepHost }

// Unit implements gpus.Once.
func (c stepCommand) Unit() string { return c.id.Unit() }

// Run implements gpus.Once.
func (c stepCommand) Run(ctx context.Context, cmd host.Command) (host.Outcome, error) {
	return c.RunCommand(ctx, cmd)
}

// Said implements gpus.Once.
func (c stepCommand) Said() (string, error) {
	const most = 16 << 10
	out, err := c.head(taskv1.Stream_STREAM_STDOUT, most)
	if err != nil {
		return "", err
	}
	rest, err := c.head(taskv1.Stream_STREAM_STDERR, most)
	return string(out) + " " + string(rest), err
}

// WriteSecret implements host.SecretWriter.
func (h stepHost) WriteSecret(ctx context.Context, path string, f host.SecretFile) error {
	return h.secrets.Write(ctx, h.secretStep(), path, f)
}

// RemoveSecret implements host.SecretWriter.
func (h stepHost) RemoveSecret(ctx context.Context, path string) error {
	return h.secrets.Remove(ctx, h.secretStep(), path)
}

// RestoreSecret implements host.SecretWriter.
func (h stepHost) RestoreSecret(ctx context.Context, path string) error {
	return h.secrets.Restore(ctx, h.secretStep(), path)
}

func (h stepHost) secretStep() secrets.Step {
	return secrets.Step{TaskID: h.id.TaskID, Step: h.id.Step}
}

// SecretState implements host.SecretReader.
func (s *surface) SecretState(ctx context.Context, path string, salt []byte) (host.SecretState, error) {
	return s.secrets.SecretState(ctx, path, salt)
}

func (s *surface) ReadFile(ctx context.Context, path string) (host.File, error) {
	return s.files.ReadFile(ctx, path)
}

func (s *surface) Lstat(ctx context.Context, path string) (host.FileInfo, error) {
	return s.files.Lstat(ctx, path)
}

func (s *surface) DirEmpty(ctx context.Context, path string) (bool, error) {
	return s.files.DirEmpty(ctx, path)
}

func (s *surface) ReadDir(ctx context.Context, path string) ([]string, error) {
	return s.files.ReadDir(ctx, path)
}

func (s *surface) WriteFile(ctx context.Context, path string, f host.File) error {
	return s.files.WriteFile(ctx, path, f)
}

func (s *surface) RemoveFile(ctx context.Context, path string) error {
	return s.files.RemoveFile(ctx, path)
}

func (s *surface) MakeDir(ctx context.Context, path string, mode fs.FileMode) error {
	return s.files.MakeDir(ctx, path, mode)
}

// RemoveDir asks the mount table of process 1 first: since the agent may be in
// another mount namespace, in which the kernel would remove the directory from
// under the mount.
func (s *surface) RemoveDir(ctx context.Context, path string) error {
	table, err := s.Mounts(ctx)
	if err != nil {
		return fmt.Errorf("remove directory %s: %w", path, err)
	}
	if m, ok := mounts.At(table, path); ok {
		return fmt.Errorf("remove directory %s: %s is mounted there: %w", path, m.Source, host.ErrBusy)
	}
	return s.files.RemoveDir(ctx, path)
}

func (s *surface) ProbeWrite(ctx context.Context, dir string) error {
	_, err := s.probe.run(ctx, "write", dir)
	return err
}

func (s *surface) ProbeRead(ctx context.Context, dir string) error {
	_, err := s.probe.run(ctx, "read", dir)
	return err
}

// ProbeFile implements host.Prober.
func (s *surface) ProbeFile(ctx context.Context, path string) error {
	_, err := s.probe.run(ctx, "file", path)
	return err
}

func (s *surface) ProbeCapacity(ctx context.Context, dir string) (host.Capacity, error) {
	out, err := s.probe.run(ctx, "capacity", dir)
	if err != nil {
		return host.Capacity{}, err
	}
	var c host.Capacity
	if _, err := fmt.Sscanf(out, "%d %d", &c.TotalBytes, &c.FreeBytes); err != nil {
		return host.Capacity{}, fmt.Errorf("probe capacity of %s: it said %q: %w", dir, out, err)
	}
	return c, nil
}

// BootID implements host.Facts.
func (*surface) BootID(ctx context.Context) (string, error) {
	if err := ctx.Err(); err != nil {
		return "", fmt.Errorf("read boot id: %w", err)
	}
	return shim.BootID()
}

// FindProgram implements host.Facts.
func (*surface) FindProgram(ctx context.Context, name string) (string, error) {
	return findProgram(ctx, name)
}

func findProgram(ctx context.Context, name string) (string, error) {
	if name != filepath.Base(name) || name == "." || name == ".." {
		return "", fmt.Errorf("find program %q: want a name without a directory: %w", name, fs.ErrInvalid)
	}
	for _, dir := range filepath.SplitList(shim.Path) {
		if err := ctx.Err(); err != nil {
			return "", fmt.Errorf("find program %s: %w", name, err)
		}
		path := filepath.Join(dir, name)
		if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
			return path, nil
		}
	}
	return "", fmt.Errorf("find program %s in %s: %w", name, shim.Path, fs.ErrNotExist)
}

// UserExists implements host.Facts.
func (*surface) UserExists(ctx context.Context, name string) (bool, error) {
	if err := ctx.Err(); err != nil {
		return false, fmt.Errorf("look for user %s: %w", name, err)
	}
	_, err := user.Lookup(name)
	var unknown user.UnknownUserError
	if errors.As(err, &unknown) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("look for user %s: %w", name, err)
	}
	return true, nil
}

// prober runs the agent's own executable for one probe.
type prober struct {
	children   *child.Runner
	executable string
	timeout    time.Duration
}

func (p prober) run(ctx context.Context, probe, dir string) (string, error) {
	crash.Point("host.probe.before")
	out, err := p.children.Probe(ctx, p.executable, probe, dir, p.timeout)
	crash.Point("host.probe.after")
	switch {
	case errors.Is(err, unix.ENOTCONN), errors.Is(err, unix.ECONNABORTED):
		err = fmt.Errorf("%w: %w", host.ErrDisconnected, err)
	case errors.Is(err, unix.ESTALE):
		err = fmt.Errorf("%w: %w", host.ErrStale, err)
	}
	return out, err
}
