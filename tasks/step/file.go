package step

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"

	"google.golang.org/protobuf/proto"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
)

type writeFile struct{ args *taskv1.WriteFileStep }

// WriteFile returns the step that writes a whole file. The directory above it
// must exist. What stood in the file before is kept for its undo.
func WriteFile(args *taskv1.WriteFileStep) tasks.Step { return writeFile{args} }

func (s writeFile) Args() proto.Message { return s.args }

func (s writeFile) Title() string { return "write file " + s.args.GetPath() }

func (s writeFile) Observe(ctx context.Context, h host.Reader) ([]byte, error) {
	return observeFile(ctx, h, s.args.GetPath())
}

func (s writeFile) Apply(ctx context.Context, h host.Host) ([]byte, error) {
	f := host.File{Data: s.args.GetData(), Mode: fs.FileMode(s.args.GetMode()).Perm()}
	return nil, h.WriteFile(ctx, s.args.GetPath(), f)
}

func (s writeFile) Verify(ctx context.Context, h host.Prober) error {
	f, err := h.ReadFile(ctx, s.args.GetPath())
	if err != nil {
		return err
	}
	if !bytes.Equal(f.Data, s.args.GetData()) {
		return fmt.Errorf("content of %s: %w", s.args.GetPath(), tasks.ErrNotSatisfied)
	}
	if want := fs.FileMode(s.args.GetMode()).Perm(); f.Mode.Perm() != want {
		return fmt.Errorf("mode of %s is %#o, not %#o: %w", s.args.GetPath(), f.Mode.Perm(), want, tasks.ErrNotSatisfied)
	}
	return nil
}

func (s writeFile) Undo(ctx context.Context, h host.Host, before []byte) error {
	return restoreFile(ctx, h, s.args.GetPath(), before)
}

type removeFile struct{ args *taskv1.RemoveFileStep }

// RemoveFile returns the step that removes a file. Its content is kept for the
// undo.
func RemoveFile(args *taskv1.RemoveFileStep) tasks.Step { return removeFile{args} }

func (s removeFile) Args() proto.Message { return s.args }

func (s removeFile) Title() string { return "remove file " + s.args.GetPath() }

func (s removeFile) Observe(ctx context.Context, h host.Reader) ([]byte, error) {
	return observeFile(ctx, h, s.args.GetPath())
}

func (s removeFile) Apply(ctx context.Context, h host.Host) ([]byte, error) {
	return nil, h.RemoveFile(ctx, s.args.GetPath())
}

func (s removeFile) Verify(ctx context.Context, h host.Prober) error {
	_, err := h.Lstat(ctx, s.args.GetPath())
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	return fmt.Errorf("%s is there: %w", s.args.GetPath(), tasks.ErrNotSatisfied)
}

func (s removeFile) Undo(ctx context.Context, h host.Host, before []byte) error {
	return restoreFile(ctx, h, s.args.GetPath(), before)
}

// observeFile returns the file as a WriteFileStep, and nothing when there is
// none. Anything but a regular file is refused: it could not be restored.
func observeFile(ctx context.Context, h host.Reader, path string) ([]byte, error) {
	info, err := h.Lstat(ctx, path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if !info.Mode.IsRegular() {
		return nil, fmt.Errorf("%s is not a regular file but %s", path, info.Mode.Type())
	}
	f, err := h.ReadFile(ctx, path)
	if err != nil {
		return nil, err
	}
	return encode(&taskv1.WriteFileStep{Path: path, Data: f.Data, Mode: uint32(f.Mode.Perm())})
}

func restoreFile(ctx context.Context, h host.Host, path string, before []byte) error {
	if len(before) == 0 {
		return h.RemoveFile(ctx, path)
	}
	var was taskv1.WriteFileStep
	if err := decode(before, &was); err != nil {
		return err
	}
	return h.WriteFile(ctx, path, host.File{Data: was.GetData(), Mode: fs.FileMode(was.GetMode()).Perm()})
}
