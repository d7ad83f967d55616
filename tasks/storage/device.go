package storage

import (
	"context"
	"errors"
	"io/fs"
	"path"
	"strings"

	storagev1 "github.com/gpuaas/millwright/proto/millwright/storage/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
)

const (
	typeExt4 = "ext4"
	typeXFS  = "xfs"
)

func devicePath(d *storagev1.DeviceSource) string {
	if d.GetUuid() != "" {
		return "/dev/disk/by-uuid/" + d.GetUuid()
	}
	return d.GetPath()
}

// deviceSource gives up a disk that does not come after 40 s: a boot would wait
// for it longer by itself.
func deviceSource(d *storagev1.DeviceSource) source {
	file := devicePath(d)
	return source{
		what: file, unitType: d.GetFstype(), options: []string{"nofail", "noatime"}, jobTimeout: "40",
		fstype: d.GetFstype(), shown: file, needs: needs{kernel: []string{d.GetFstype()}, device: file, holds: d.GetFstype()},
	}
}

func checkDevice(p *tasks.Problems, d *storagev1.DeviceSource) {
	switch uuid, file := d.GetUuid(), d.GetPath(); {
	case uuid != "" && file != "":
		p.Add("device.path", file, "is one too many beside device.uuid: give one of them")
	case uuid != "":
		if !isUUID(uuid) {
			p.Add("device.uuid", uuid, "must be a UUID in lower case: give the one that blkid shows")
		}
	case !checkPath(p, "device.path", file):
	default:
		dir := path.Dir(file)
		if dir != "/dev/disk/by-id" && dir != "/dev/disk/by-uuid" && dir != "/dev/disk/by-label" && dir != "/dev/disk/by-path" {
			p.Add("device.path", file, "must be a path below /dev/disk/by-id, by-uuid, by-label or by-path, since other names change at a boot: choose one that ls -l /dev/disk/by-id shows")
		}
	}
	if f := d.GetFstype(); f != typeExt4 && f != typeXFS {
		p.Add("device.fstype", f, "must be ext4 or xfs: give the one that blkid shows")
	}
}

func isUUID(s string) bool {
	if len(s) != 36 {
		return false
	}
	for i := range len(s) {
		dash := i == 8 || i == 13 || i == 18 || i == 23
		hex := s[i] >= '0' && s[i] <= '9' || s[i] >= 'a' && s[i] <= 'f'
		if dash != (s[i] == '-') || !dash && !hex {
			return false
		}
	}
	return true
}

// deviceNow returns the device that a stable path means now, or nothing when
// there is none: the mount table names that one.
func deviceNow(ctx context.Context, h host.Reader, file string) (string, error) {
	for range 8 {
		info, err := h.Lstat(ctx, file)
		if errors.Is(err, fs.ErrNotExist) {
			return "", nil
		}
		if err != nil {
			return "", err
		}
		if info.Mode&fs.ModeSymlink == 0 {
			return file, nil
		}
		if strings.HasPrefix(info.Target, "/") {
			file = path.Clean(info.Target)
		} else {
			file = path.Join(path.Dir(file), info.Target)
		}
	}
	return "", nil
}

// checkHolds refuses a device that is not there, or seen to hold something else
// than the file system that is to be mounted: the kernel's own word for that is
// "wrong fs type, bad option, bad superblock".
func checkHolds(ctx context.Context, h host.Reader, file, fstype string) error {
	now, err := deviceNow(ctx, h, file)
	if err != nil {
		return err
	}
	if now == "" {
		return unfit("disk %s is not there: look what ls -l /dev/disk/by-uuid shows", file)
	}
	if path.Dir(now) != "/dev" {
		return nil
	}
	list, err := h.Signatures(ctx, path.Base(now))
	if errors.Is(err, fs.ErrNotExist) {
		return nil // it went away just now, which the mount says better
	}
	if err != nil {
		return err
	}
	var types []string
	for _, sig := range list {
		if sig.Type == fstype {
			return nil
		}
		types = append(types, sig.Type)
	}
	if len(types) == 0 {
		return unfit("disk %s (%s) holds no file system, and device.fstype is %s: name another disk, or make one there", file, now, fstype)
	}
	return unfit("disk %s (%s) holds %s, and device.fstype is %s: say what it holds, or name another disk", file, now, strings.Join(types, ", "), fstype)
}
