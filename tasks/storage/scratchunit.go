package storage

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"strconv"
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
	// maxStripe is more NVMe drives than machines have.
	maxStripe = 32
)

// Validate implements [tasks.Task].
func (Scratch) Validate(s *storagev1.ScratchSpec) error {
	var p tasks.Problems
	checkTarget(&p, "target", s.GetTarget())
	switch n := len(s.GetDisks()); {
	case s.GetDisk() == nil && n == 0:
		p.Add("disk", "", "is required: name the disk by serial, or a loop device by loop_file; or several in disks")
	case s.GetDisk() != nil && n > 0:
		p.Add("disks", strconv.Itoa(n), "cannot be given with disk: leave one of them out")
	case n == 1 || n > maxStripe:
		p.Add("disks", strconv.Itoa(n), fmt.Sprintf("must be 2 to %d disks: for one, use disk", maxStripe))
	}
	seen := map[string]bool{}
	for i, d := range scratchDisks(s) {
		field := "disk"
		if s.GetDisk() == nil {
			field = fmt.Sprintf("disks[%d]", i)
		}
		checkScratchDisk(&p, field, d)
		name := step.DiskName(refOf(d))
		if seen[name] {
			p.Add(field, name, "is named twice: name each disk once")
		}
		seen[name] = true
	}
	if _, known := storagev1.ScratchFilesystem_name[int32(s.GetFilesystem())]; !known {
		p.Add("filesystem", fmt.Sprint(int32(s.GetFilesystem())), "is no known file system: leave it out for xfs, or choose ext4")
	}
	return p.Err()
}

func checkScratchDisk(p *tasks.Problems, field string, d *storagev1.ScratchDisk) {
	switch id := d.GetId().(type) {
	case *storagev1.ScratchDisk_Serial:
		_, bad := firstBad(id.Serial, "._-+:")
		if id.Serial == "" || bad || len(id.Serial) > maxSerial {
			p.Add(field+".serial", id.Serial, fmt.Sprintf("must be the serial number of a disk, of at most %d letters, digits and ._-+:, take what lsblk -d -o NAME,SERIAL shows", maxSerial))
		}
	case *storagev1.ScratchDisk_LoopFile:
		checkPath(p, field+".loop_file", id.LoopFile)
		if d.GetWipe() {
			p.Add(field+".wipe", "true", "is only for a disk known by its serial: erase the file by hand, or leave wipe out")
		}
	default:
		p.Add(field, "", "is required: name the disk by serial, or a loop device by loop_file")
	}
}

// scratchUnit returns the content of the mount unit of a spec. It mounts by UUID,
// since the kernel's names change; nofail and remote-fs.target are for a disk
// that is not there, or is empty: neither delays a boot, and the agent, which
// comes later, makes it anew.
func scratchUnit(s *storagev1.ScratchSpec) (string, error) {
	// What was erased once is no part of what should be.
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(Scratch{}.ForRestore(s))
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
	for _, d := range scratchDisks(s) {
		if serial := d.GetSerial(); serial != "" {
			lines = append(lines, serialKey+"="+serial)
		} else {
			lines = append(lines, loopKey+"="+d.GetLoopFile())
		}
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

// scratchRef names what the unit file of a scratch stands on; nil for the unit
// of anything else. The order of an array's disks is not in it and does not count
// here.
func scratchRef(u unitSettings) *taskv1.DiskRef {
	var refs []*taskv1.DiskRef
	for _, serial := range u.values["Unit."+serialKey] {
		refs = append(refs, &taskv1.DiskRef{Serial: serial})
	}
	for _, file := range u.values["Unit."+loopKey] {
		refs = append(refs, &taskv1.DiskRef{LoopFile: file})
	}
	switch len(refs) {
	case 0:
		return nil
	case 1:
		return refs[0]
	default:
		return &taskv1.DiskRef{Array: refs}
	}
}

func checkScratchTools(ctx context.Context, h host.Reader, fstype string) error {
	program, pack := "mkfs."+fstype, map[string]string{"xfs": "xfsprogs", "ext4": "e2fsprogs"}[fstype]
	_, err := h.FindProgram(ctx, program)
	if errors.Is(err, fs.ErrNotExist) {
		return unfit("program %s is missing: install package %s", program, pack)
	}
	return err
}
