package files

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"

	"github.com/gpuaas/millwright/agent/internal/crash"
)

// Owned is the content of a file, with who may read it.
type Owned struct {
	Data     []byte
	Mode     fs.FileMode
	UID, GID uint32
}

// ReadOwned returns the regular file at path, at most limit bytes of it; a
// larger one is an error. It follows no link at the end of path.
func (*Files) ReadOwned(ctx context.Context, path string, limit int64) (Owned, error) {
	if err := ctx.Err(); err != nil {
		return Owned{}, fmt.Errorf("read %s: %w", path, err)
	}
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return Owned{}, err
	}
	defer func() { _ = f.Close() }() // it was only read
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return Owned{}, &fs.PathError{Op: "stat", Path: path, Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return Owned{}, fmt.Errorf("read %s: it is not a regular file", path)
	}
	data, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err != nil {
		return Owned{}, err
	}
	if int64(len(data)) > limit {
		return Owned{}, fmt.Errorf("read %s: it has more than %d bytes", path, limit)
	}
	return Owned{Data: data, Mode: fs.FileMode(st.Mode & 0o777), UID: st.Uid, GID: st.Gid}, nil
}

// WriteOwned replaces the file at path, atomically and durably. At no time can
// anyone read it who may not read it in the end. The directory must belong to
// root or to the file's owner, and be writable by no one else: whoever can
// write to it could put another file there.
func (f *Files) WriteOwned(ctx context.Context, path string, o Owned) error {
	if err := crash.Fault("host.secret.write.before"); err != nil {
		return err
	}
	err := f.change(ctx, "write", path, func(dir int, base string) error {
		if err := ownedDir(dir, o.UID); err != nil {
			return err
		}
		temp := tempName(base)
		if err := unix.Unlinkat(dir, temp, 0); err != nil && !errors.Is(err, unix.ENOENT) {
			return err
		}
		if err := writeOwned(dir, temp, o); err != nil {
			_ = unix.Unlinkat(dir, temp, 0) // the error that matters is told
			return err
		}
		if err := crash.Fault("host.secret.write.temp"); err != nil {
			_ = unix.Unlinkat(dir, temp, 0) // the error that matters is told
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
	return crash.Fault("host.secret.write.after")
}

func writeOwned(dir int, name string, o Owned) error {
	fd, err := unix.Openat(dir, name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	file := os.NewFile(uintptr(fd), name)
	_, err = file.Write(o.Data)
	if err == nil {
		err = file.Chown(int(o.UID), int(o.GID))
	}
	if err == nil {
		err = file.Chmod(o.Mode.Perm())
	}
	if err == nil {
		err = file.Sync()
	}
	return errors.Join(err, file.Close())
}

// errOpenDir is a directory in which a secret is not safe.
var errOpenDir = errors.New("the directory can be written to by others than root and the file's owner")

func ownedDir(dir int, owner uint32) error {
	var st unix.Stat_t
	if err := unix.Fstat(dir, &st); err != nil {
		return err
	}
	if st.Uid != 0 && st.Uid != owner || st.Mode&0o002 != 0 || st.Mode&0o020 != 0 && st.Gid != 0 {
		return fmt.Errorf("%w: it has mode %#o and belongs to user %d and group %d", errOpenDir, st.Mode&0o7777, st.Uid, st.Gid)
	}
	return nil
}
