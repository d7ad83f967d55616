package storage

import (
	"context"
	"errors"
	"io/fs"
	"path"
	"strings"

	storagev1 "github.com/gpuaas/millwright/proto/millwright/storage/v1"
	"github.com/gpuaas/millwright/tasks/host"
	"github.com/gpuaas/millwright/tasks/step"
)

// preflight refuses a spec that the node is not fit for, and says whether the
// mount point has to be made.
func (s *survey) preflight(ctx context.Context, h host.Reader, spec *storagev1.MountSpec) (missing bool, err error) {
	if s.depth > 0 && !s.written {
		return false, unfit("mount point %s is in use: %s of type %s is mounted there, and not by Millwright: unmount it, or choose another mount point",
			s.target, s.mount.Source, s.mount.FSType)
	}
	if below := step.MountsBelow(s.table, s.target); s.depth == 0 && len(below) > 0 {
		return false, unfit("mounting on %s would hide %s: unmount that first, or choose another mount point", s.target, strings.Join(below, ", "))
	}
	missing, err = s.checkDirectory(ctx, h)
	if err != nil {
		return false, err
	}
	if b := spec.GetBind(); b != nil {
		return missing, s.checkBindSource(ctx, h, b.GetPath())
	}
	src := sourceOf(spec)
	if err := src.needs.check(ctx, h, s.table); err != nil {
		return false, err
	}
	if spec.GetNfs() != nil {
		if err := checkTransport(s.table, s.target, src); err != nil {
			return false, err
		}
	}
	return missing, nil
}

// checkDirectory looks at the mount point and the directories above it, and
// says whether one of them is missing.
func (s *survey) checkDirectory(ctx context.Context, h host.Reader) (missing bool, err error) {
	parent := path.Dir(s.target)
	if m, bad := step.MayHang(s.table, parent); bad {
		return false, unfit("mount point %s lies on %s of type %s at %s, which may stop answering: choose a mount point on a local file system",
			s.target, m.Source, m.FSType, m.Target)
	}
	for _, p := range step.Ancestry(s.target) {
		if p == s.target && s.depth > 0 {
			return false, nil // A look at it would ask what is mounted there.
		}
		missing, err := checkComponent(ctx, h, "mount point "+s.target, p)
		if err != nil || missing {
			return missing, err
		}
	}
	// A path that is ours may have been written to while nothing was mounted
	// there; it is mounted over, as it would be at boot.
	if s.written {
		return false, nil
	}
	empty, err := h.DirEmpty(ctx, s.target)
	if err != nil {
		return false, err
	}
	if !empty {
		return false, unfit("mount point %s is not empty, and what is in it would be hidden: move it away, or choose another mount point", s.target)
	}
	return false, nil
}

// checkBindSource looks at the source directory, as far as it cannot hang; what
// lies on another file system is left to the mount itself and its check.
func (s *survey) checkBindSource(ctx context.Context, h host.Reader, source string) error {
	for _, p := range step.Ancestry(source) {
		if _, bad := step.MayHang(s.table, p); bad {
			return nil
		}
		missing, err := checkComponent(ctx, h, "bind source "+source, p)
		if err != nil {
			return err
		}
		if missing {
			return unfit("bind source %s does not exist (%s is missing): make it, or name another directory", source, p)
		}
	}
	return nil
}

// checkComponent refuses a path that is not a directory, and says whether it is
// missing.
func checkComponent(ctx context.Context, h host.Reader, what, p string) (missing bool, err error) {
	info, err := h.Lstat(ctx, p)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return true, nil
	case err != nil:
		return false, err
	case info.Mode&fs.ModeSymlink != 0:
		return false, unfit("%s: %s is a symbolic link to %s, and systemd mounts on real paths only: name the real path", what, p, info.Target)
	case !info.Mode.IsDir():
		return false, unfit("%s: %s is not a directory: name a directory", what, p)
	}
	return false, nil
}

func checkKernel(ctx context.Context, h host.Reader, fstype string) error {
	known, err := h.FilesystemKnown(ctx, fstype)
	if err != nil {
		return err
	}
	if !known {
		return unfit("the kernel cannot mount %s: load or install its module", fstype)
	}
	return nil
}
