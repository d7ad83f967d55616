// Package files reads and writes files durably and atomically. No function
// follows a symbolic link at the end of a path; what is above it is held open
// by descriptor while it works, so that it cannot be swapped meanwhile.
package files

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/gpuaas/millwright/agent/internal/crash"
	"github.com/gpuaas/millwright/tasks/host"
)

// MaxRead is the most that [Files.ReadFile] reads.
const MaxRead = 4 << 20

// Files implements host.FileReader and host.FileWriter. It is safe for
// concurrent use. Changes of one path are made one at a time; others do not
// wait for them, since one below a mount that hangs may take for ever.
type Files struct {
	mu   sync.Mutex
	busy map[string]chan struct{} // paths that are being changed, each closed when that has ended; guarded by mu
}

// New returns a Files.
func New() *Files { return &Files{busy: map[string]chan struct{}{}} }

// change calls do with the directory of path held open, and with path for
// itself.
func (f *Files) change(ctx context.Context, op, path string, do func(dir int, base string) error) error {
	mine := make(chan struct{})
	for {
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("%s %s: %w", op, path, err)
		}
		f.mu.Lock()
		other := f.busy[path]
		if other == nil {
			f.busy[path] = mine
		}
		f.mu.Unlock()
		if other == nil {
			break
		}
		select {
		case <-other:
		case <-ctx.Done():
		}
	}
	defer func() {
		f.mu.Lock()
		delete(f.busy, path)
		f.mu.Unlock()
		close(mine)
	}()
	return inParent(op, path, do)
}

// ReadFile implements host.FileReader. A symbolic link and anything else that
// is not a regular file is an error.
func (*Files) ReadFile(ctx context.Context, path string) (host.File, error) {
	if err := ctx.Err(); err != nil {
		return host.File{}, fmt.Errorf("read %s: %w", path, err)
	}
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return host.File{}, err
	}
	defer func() { _ = f.Close() }() // it was only read
	info, err := f.Stat()
	if err != nil {
		return host.File{}, err
	}
	if !info.Mode().IsRegular() {
		return host.File{}, fmt.Errorf("read %s: it is not a regular file but %s", path, info.Mode().Type())
	}
	data, err := io.ReadAll(io.LimitReader(f, MaxRead+1))
	if err != nil {
		return host.File{}, err
	}
	if len(data) > MaxRead {
		return host.File{}, fmt.Errorf("read %s: it has more than %d bytes", path, MaxRead)
	}
	return host.File{Data: data, Mode: info.Mode().Perm()}, nil
}

// Lstat implements host.FileReader. It asks the kernel only for what it has at
// hand, so that the root of a mount that hangs can be described.
func (*Files) Lstat(ctx context.Context, path string) (host.FileInfo, error) {
	if err := ctx.Err(); err != nil {
		return host.FileInfo{}, fmt.Errorf("lstat %s: %w", path, err)
	}
	var st unix.Statx_t
	flags := unix.AT_SYMLINK_NOFOLLOW | unix.AT_STATX_DONT_SYNC | unix.AT_NO_AUTOMOUNT
	if err := unix.Statx(unix.AT_FDCWD, path, flags, unix.STATX_TYPE|unix.STATX_MODE|unix.STATX_SIZE, &st); err != nil {
		return host.FileInfo{}, &fs.PathError{Op: "lstat", Path: path, Err: err}
	}
	info := host.FileInfo{Mode: fileMode(st.Mode), Size: int64(st.Size)}
	if info.Mode.Type() == fs.ModeSymlink {
		target, err := os.Readlink(path)
		if err != nil {
			return host.FileInfo{}, err
		}
		info.Target = target
	}
	return info, nil
}

func fileMode(m uint16) fs.FileMode {
	mode := fs.FileMode(m & 0o777)
	switch m & unix.S_IFMT {
	case unix.S_IFDIR:
		mode |= fs.ModeDir
	case unix.S_IFLNK:
		mode |= fs.ModeSymlink
	case unix.S_IFIFO:
		mode |= fs.ModeNamedPipe
	case unix.S_IFSOCK:
		mode |= fs.ModeSocket
	case unix.S_IFBLK:
		mode |= fs.ModeDevice
	case unix.S_IFCHR:
		mode |= fs.ModeDevice | fs.ModeCharDevice
	}
	for bit, flag := range map[uint16]fs.FileMode{
		unix.S_ISUID: fs.ModeSetuid, unix.S_ISGID: fs.ModeSetgid, unix.S_ISVTX: fs.ModeSticky,
	} {
		if m&bit != 0 {
			mode |= flag
		}
	}
	return mode
}

// DirEmpty implements host.FileReader.
func (*Files) DirEmpty(ctx context.Context, path string) (bool, error) {
	if err := ctx.Err(); err != nil {
		return false, fmt.Errorf("read directory %s: %w", path, err)
	}
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return false, err
	}
	defer func() { _ = f.Close() }() // it was only read
	_, err = f.Readdirnames(1)
	if errors.Is(err, io.EOF) {
		return true, nil
	}
	return false, err
}

// maxEntries is the most that [Files.ReadDir] returns.
const maxEntries = 10000

// ReadDir implements host.FileReader.
func (*Files) ReadDir(ctx context.Context, path string) ([]string, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("read directory %s: %w", path, err)
	}
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }() // it was only read
	names, err := f.Readdirnames(maxEntries + 1)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	if len(names) > maxEntries {
		return nil, fmt.Errorf("read directory %s: it has more than %d entries", path, maxEntries)
	}
	slices.Sort(names)
	return names, nil
}

// WriteFile implements host.FileWriter. The new file belongs to the caller's
// user. It is an error when a directory is there.
func (f *Files) WriteFile(ctx context.Context, path string, file host.File) error {
	if err := crash.Fault("host.write.before"); err != nil {
		return err
	}
	err := f.change(ctx, "write", path, func(dir int, base string) error {
		// The name is always the same, so that what a crash left is found again.
		temp := tempName(base)
		if err := unix.Unlinkat(dir, temp, 0); err != nil && !errors.Is(err, unix.ENOENT) {
			return err
		}
		if err := writeNew(dir, temp, file.Data, file.Mode); err != nil {
			_ = unix.Unlinkat(dir, temp, 0) // the error that matters is told
			return err
		}
		if err := crash.Fault("host.write.temp"); err != nil {
			return err
		}
		if err := unix.Renameat(dir, temp, dir, base); err != nil {
			_ = unix.Unlinkat(dir, temp, 0) // the error that matters is told
			return err
		}
		return unix.Fsync(dir)
	})
	if err != nil {
		return err
	}
	return crash.Fault("host.write.after")
}

func tempName(base string) string {
	const limit = 255 - len(tempSuffix) - 1
	return "." + base[:min(len(base), limit)] + tempSuffix
}

const tempSuffix = ".millwright.tmp"

// TempOf returns the name of the file that was to be written when name is what a
// write that was cut off has left, and otherwise name. [Files.RemoveFile] removes
// both.
func TempOf(name string) string {
	if base, ok := strings.CutSuffix(name, tempSuffix); ok && strings.HasPrefix(base, ".") {
		return base[1:]
	}
	return name
}

func writeNew(dir int, name string, data []byte, mode fs.FileMode) error {
	fd, err := unix.Openat(dir, name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	file := os.NewFile(uintptr(fd), name)
	_, err = file.Write(data)
	if err == nil {
		err = file.Chmod(mode) // the umask does not matter
	}
	if err == nil {
		err = file.Sync()
	}
	return errors.Join(err, file.Close())
}

// RemoveFile implements host.FileWriter. A directory there is an error.
func (f *Files) RemoveFile(ctx context.Context, path string) error {
	if err := crash.Fault("host.remove.before"); err != nil {
		return err
	}
	err := f.change(ctx, "remove", path, func(dir int, base string) error {
		for _, name := range []string{tempName(base), base} {
			if err := unix.Unlinkat(dir, name, 0); err != nil && !errors.Is(err, unix.ENOENT) {
				return err
			}
		}
		return unix.Fsync(dir)
	})
	if errors.Is(err, fs.ErrNotExist) {
		err = nil // the directory is not there either
	}
	if err != nil {
		return err
	}
	return crash.Fault("host.remove.after")
}

// MakeDir implements host.FileWriter. A directory that exists keeps its mode;
// something else there is an error.
func (f *Files) MakeDir(ctx context.Context, path string, mode fs.FileMode) error {
	if err := crash.Fault("host.mkdir.before"); err != nil {
		return err
	}
	err := f.change(ctx, "make directory", path, func(dir int, base string) error {
		return makeDir(dir, base, mode)
	})
	if err != nil {
		return err
	}
	return crash.Fault("host.mkdir.after")
}

func makeDir(dir int, base string, mode fs.FileMode) error {
	err := unix.Mkdirat(dir, base, uint32(mode.Perm()))
	if errors.Is(err, unix.EEXIST) {
		var st unix.Statx_t
		flags := unix.AT_SYMLINK_NOFOLLOW | unix.AT_STATX_DONT_SYNC | unix.AT_NO_AUTOMOUNT
		if err := unix.Statx(dir, base, flags, unix.STATX_TYPE, &st); err != nil {
			return err
		}
		if st.Mode&unix.S_IFMT != unix.S_IFDIR {
			return unix.ENOTDIR
		}
		return unix.Fsync(dir) // it may have been made just before a crash
	}
	if err != nil {
		return err
	}
	if err := unix.Fchmodat(dir, base, uint32(mode.Perm()), 0); err != nil {
		return err
	}
	return unix.Fsync(dir)
}

// RemoveDir implements host.FileWriter. The kernel refuses to remove what is
// not empty and what is a mount point.
func (f *Files) RemoveDir(ctx context.Context, path string) error {
	if err := crash.Fault("host.rmdir.before"); err != nil {
		return err
	}
	err := f.change(ctx, "remove directory", path, func(dir int, base string) error {
		if err := unix.Unlinkat(dir, base, unix.AT_REMOVEDIR); err != nil && !errors.Is(err, unix.ENOENT) {
			return err
		}
		return unix.Fsync(dir)
	})
	if errors.Is(err, fs.ErrNotExist) {
		err = nil // what is above is not there either
	}
	if err != nil {
		return err
	}
	return crash.Fault("host.rmdir.after")
}

// inParent calls do with the directory of path held open.
func inParent(op, path string, do func(dir int, base string) error) error {
	if !filepath.IsAbs(path) || filepath.Clean(path) != path || path == "/" {
		return &fs.PathError{Op: op, Path: path, Err: fs.ErrInvalid}
	}
	dir, err := unix.Open(filepath.Dir(path), unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return &fs.PathError{Op: op, Path: path, Err: err}
	}
	defer func() { _ = unix.Close(dir) }() // it was synced
	if err := do(dir, filepath.Base(path)); err != nil {
		return &fs.PathError{Op: op, Path: path, Err: err}
	}
	return nil
}
