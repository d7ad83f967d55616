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
		fstype: d.GetFstype(), shown: file, needs: needs{kernel: []string{d.GetFstype()}, device: file},
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
