package command

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/gpuaas/millwright/agent/internal/host/files"
	"github.com/gpuaas/millwright/agent/internal/shim"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// Output is what a stream of a command has written until now.
type Output struct {
	// Total is the number of all bytes.
	Total uint64
	// Head is the number of bytes in the head, which grows up to 1 MiB.
	Head uint64
	// Tail is the number of bytes in the tail, at most 256 KiB; 0 until the end.
	Tail uint64
	// Ended says that nothing of it changes any more.
	Ended bool
}

// Output describes a stream. It is fs.ErrNotExist for a command that was not
// started, or whose output was deleted.
func (r *Runner) Output(id shim.ID, stream taskv1.Stream) (Output, error) {
	dir, err := id.Dir(r.cfg.StateDir)
	if err != nil {
		return Output{}, err
	}
	rec, err := dir.Result()
	if err == nil {
		o := rec.GetOutcome().GetStdout()
		if stream == taskv1.Stream_STREAM_STDERR {
			o = rec.GetOutcome().GetStderr()
		}
		return Output{Total: o.GetTotalBytes(), Head: o.GetHeadBytes(), Tail: o.GetTailBytes(), Ended: true}, nil
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return Output{}, fmt.Errorf("read output of a command: %w", err)
	}
	info, err := os.Stat(dir.HeadPath(stream))
	if err != nil {
		return Output{}, fmt.Errorf("read output of a command: %w", err)
	}
	out := Output{Head: uint64(info.Size())}
	out.Total = max(out.Head, total(dir, stream))
	return out, nil
}

// total reads the running total; what was not written yet counts as nothing.
func total(dir shim.Dir, stream taskv1.Stream) uint64 {
	b, err := os.ReadFile(dir.TotalsPath())
	if err != nil || len(b) < 16 {
		return 0
	}
	if stream == taskv1.Stream_STREAM_STDERR {
		b = b[8:]
	}
	return binary.BigEndian.Uint64(b)
}

// ReadHead reads from the head like an io.ReaderAt.
func (r *Runner) ReadHead(id shim.ID, stream taskv1.Stream, p []byte, offset int64) (int, error) {
	return r.readAt(id, p, offset, func(d shim.Dir) string { return d.HeadPath(stream) })
}

// ReadTail reads from the tail like an io.ReaderAt.
func (r *Runner) ReadTail(id shim.ID, stream taskv1.Stream, p []byte, offset int64) (int, error) {
	return r.readAt(id, p, offset, func(d shim.Dir) string { return d.TailPath(stream) })
}

func (r *Runner) readAt(id shim.ID, p []byte, offset int64, path func(shim.Dir) string) (int, error) {
	dir, err := id.Dir(r.cfg.StateDir)
	if err != nil {
		return 0, err
	}
	f, err := os.Open(path(dir))
	if err != nil {
		return 0, fmt.Errorf("read output of a command: %w", err)
	}
	defer func() { _ = f.Close() }() // it was only read
	n, err := f.ReadAt(p, offset)
	if err != nil && !errors.Is(err, io.EOF) {
		return n, fmt.Errorf("read output of a command: %w", err)
	}
	return n, err
}

// List returns the ids that have a directory. What has another name than a
// command's directory is passed over.
func (r *Runner) List() ([]shim.ID, error) {
	dirs, err := filepath.Glob(filepath.Join(r.cfg.StateDir, "commands", "*", "*"))
	if err != nil {
		return nil, fmt.Errorf("list commands: %w", err)
	}
	var out []shim.ID
	for _, d := range dirs {
		if id, err := shim.ParseDir(d); err == nil {
			out = append(out, id)
		}
	}
	return out, nil
}

// Delete deletes all directories of a task.
func (r *Runner) Delete(taskID string) error {
	dir, err := shim.ID{TaskID: taskID}.Dir(r.cfg.StateDir)
	if err != nil {
		return fmt.Errorf("delete commands: %w", err)
	}
	task := filepath.Dir(string(dir))
	if err := os.RemoveAll(task); err != nil {
		return fmt.Errorf("delete commands: %w", err)
	}
	if err := files.SyncDir(filepath.Dir(task)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("delete commands: %w", err)
	}
	return nil
}
