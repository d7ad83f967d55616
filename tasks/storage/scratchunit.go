package storage

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"google.golang.org/protobuf/proto"

	storagev1 "github.com/gpuaas/millwright/proto/millwright/storage/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
	"github.com/gpuaas/millwright/tasks/step"
)

const (
	// The disk of a scratch, in its unit file: the unmount finds it by these.
	serialKey = "X-Millwright-Serial"
	loopKey   = "X-Millwright-LoopFile"
	maxSerial = 128
)

// Validate implements [tasks.Task].
func (Scratch) Validate(s *storagev1.ScratchSpec) error {
	var p tasks.Problems
	checkTarget(&p, "target", s.GetTarget())
	switch id := s.GetDisk().GetId().(type) {
	case *storagev1.ScratchDisk_Serial:
		_, bad := firstBad(id.Serial, "._-+:")
		if id.Serial == "" || bad || len(id.Serial) > maxSerial {
			p.Add("disk.serial", id.Serial, fmt.Sprintf("must be the serial number of a disk, of at most %d letters, digits and ._-+:, take what lsblk -d -o NAME,SERIAL shows", maxSerial))
		}
	case *storagev1.ScratchDisk_LoopFile:
		checkPath(&p, "disk.loop_file", id.LoopFile)
		if s.GetDisk().GetWipe() {
			p.Add("disk.wipe", "true", "is only for a disk known by its serial: erase the file by hand, or leave wipe out")
		}
	default:
		p.Add("disk", "", "is required: name the disk by serial, or a loop device by loop_file")
	}
	if _, known := storagev1.ScratchFilesystem_name[int32(s.GetFilesystem())]; !known {
		p.Add("filesystem", fmt.Sprint(int32(s.GetFilesystem())), "is no known file system: leave it out for xfs, or choose ext4")
	}
	return p.Err()
}

// scratchUnit returns the content of the mount unit of a spec. It mounts by UUID,
// since the kernel's names change; nofail and remote-fs.target are for a disk
// that is not there, or is empty: neither delays a boot, and the agent, which
// comes later, makes it anew.
func scratchUnit(s *storagev1.ScratchSpec) (string, error) {
	same := proto.CloneOf(s)
	same.GetDisk().Wipe = false // what was erased once is no part of what should be
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(same)
	if err != nil {
		return "", fmt.Errorf("serialise spec: %w", err)
	}
	sum := sha256.Sum256(b)
	lines := []string{
		"# Made by Millwright (storage.scratch). What is changed here by hand is found and undone.",
		"[Unit]",
		"Description=Millwright scratch " + s.GetTarget(),
		"Before=remote-fs.target",
		specKey + "=sha256:" + hex.EncodeToString(sum[:]),
	}
	if serial := s.GetDisk().GetSerial(); serial != "" {
		lines = append(lines, serialKey+"="+serial)
	} else {
		lines = append(lines, loopKey+"="+s.GetDisk().GetLoopFile())
	}
	return strings.Join(append(lines,
		"", "[Mount]",
		"What="+byUUID+scratchUUID(s),
		"Where="+s.GetTarget(),
		"Type="+scratchType(s),
		"Options=noatime,nofail,nosuid,nodev",
		"TimeoutSec="+mountTimeout,
		"DirectoryMode=0755",
		"", "[Install]",
		"WantedBy=remote-fs.target",
	), "\n") + "\n", nil
}

// unitDifferences names what is not as it should be of the unit.
func (s *survey) unitDifferences(have, want string) []tasks.Difference {
	var diffs []tasks.Difference
	if !s.written {
		diffs = append(diffs, tasks.Difference{Subject: "unit " + s.unit, Want: unitPath(s.target)})
	} else {
		diffs = append(diffs, compareUnits(s.unit, have, want)...)
	}
	for _, d := range s.dropIns {
		diffs = append(diffs, tasks.Difference{Subject: "unit " + s.unit + " drop-in", Have: d.path})
	}
	if s.written && s.status.NeedReload && have == want && len(s.dropIns) == 0 {
		diffs = append(diffs, tasks.Difference{Subject: "unit " + s.unit + " in systemd's memory", Have: "older than its file", Want: "as its file"})
	}
	if !s.enabled() {
		diffs = append(diffs, tasks.Difference{Subject: "unit " + s.unit + " at boot", Have: s.status.Enabled, Want: "enabled"})
	}
	return diffs
}

// scratchSource returns the device that the unit file of a scratch means, as the
// mount table names it in this boot.
func scratchSource(ctx context.Context, h host.Reader, u unitSettings) (string, error) {
	d, err := step.FindDisk(ctx, h, &taskv1.DiskRef{Serial: u.setting("Unit." + serialKey), LoopFile: u.setting("Unit." + loopKey)})
	if err != nil {
		return "", err
	}
	return "/dev/" + d.Name, nil
}

func checkScratchTools(ctx context.Context, h host.Reader, fstype string) error {
	program, pack := "mkfs."+fstype, map[string]string{"xfs": "xfsprogs", "ext4": "e2fsprogs"}[fstype]
	_, err := h.FindProgram(ctx, program)
	if errors.Is(err, fs.ErrNotExist) {
		return unfit("program %s is missing: install package %s", program, pack)
	}
	return err
}
