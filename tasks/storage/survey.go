package storage

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"

	"google.golang.org/protobuf/types/known/durationpb"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
	"github.com/gpuaas/millwright/tasks/step"
)

// survey is what a node has at a mount point. It is read from the mount table,
// from systemd and from unit files, and never from what is mounted.
type survey struct {
	target  string
	unit    string // the name of the mount unit
	status  host.UnitStatus
	table   []host.Mount
	mount   host.Mount // what is seen at the mount point
	depth   int        // how many mounts stand there
	written bool       // a unit file stands in /etc/systemd/system
	content string     // of the unit file
	dropIns []dropIn   // that change this unit alone
	health  host.MountHealth
	key     keyState
}

type dropIn struct{ path, content string }

// look surveys a mount point.
func look(ctx context.Context, h host.Reader, target string) (*survey, error) {
	s := &survey{target: target, unit: MountUnit(target)}
	var err error
	if s.status, err = h.Unit(ctx, s.unit); err != nil {
		return nil, err
	}
	if s.table, err = h.Mounts(ctx); err != nil {
		return nil, err
	}
	s.mount, s.depth = step.MountAt(s.table, target)
	if s.depth > 0 {
		if s.health, err = h.MountHealth(ctx, target); err != nil {
			return nil, err
		}
	}
	if s.content, s.written, err = readUnit(ctx, h, unitPath(target)); err != nil {
		return nil, err
	}
	if s.written && !owned(s.content) {
		return nil, unfit("unit file %s was not made by Millwright: remove it, or choose another mount point", unitPath(target))
	}
	own := s.status.Fragment == unitPath(target) || s.status.Fragment == "/proc/self/mountinfo"
	if f := s.status.Fragment; f != "" && !own && !s.written {
		return nil, unfit("unit %s is defined by %s (an entry of /etc/fstab appears below /run/systemd/generator): remove it there, or choose another mount point", s.unit, f)
	}
	return s, s.findDropIns(ctx, h)
}

// readUnit returns the content of a unit file, and false when there is none.
func readUnit(ctx context.Context, h host.Reader, file string) (string, bool, error) {
	info, err := h.Lstat(ctx, file)
	if errors.Is(err, fs.ErrNotExist) {
		return "", false, nil
	}
	if err != nil {
		return "", false, err
	}
	if !info.Mode.IsRegular() {
		// A link to /dev/null masks a unit.
		return "", false, unfit("unit file %s is no regular file (target %q): remove it, or choose another mount point", file, info.Target)
	}
	f, err := h.ReadFile(ctx, file)
	return string(f.Data), err == nil, err
}

// findDropIns finds the drop-ins of this unit. Those for all mounts, or for a
// prefix of the name, are the administrator's policy and stay.
func (s *survey) findDropIns(ctx context.Context, h host.Reader) error {
	for _, root := range []string{unitDir, "/run/systemd/system/"} {
		dir := root + s.unit + ".d"
		names, err := h.ReadDir(ctx, dir)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		for _, name := range names {
			if !strings.HasSuffix(name, ".conf") {
				continue
			}
			file := path.Join(dir, name)
			content, _, err := readUnit(ctx, h, file)
			if err != nil {
				return err
			}
			s.dropIns = append(s.dropIns, dropIn{file, content})
		}
	}
	for _, file := range s.status.DropIns {
		known := slices.ContainsFunc(s.dropIns, func(d dropIn) bool { return d.path == file })
		if !known && path.Base(path.Dir(file)) == s.unit+".d" && !strings.HasPrefix(file, unitDir) && !strings.HasPrefix(file, "/run/systemd/system/") {
			return unfit("drop-in %s changes unit %s: remove it, or choose another mount point", file, s.unit)
		}
	}
	return nil
}

// enabled reports whether the unit is started at boot.
func (s *survey) enabled() bool { return s.status.Enabled == "enabled" }

// stop returns the step that unmounts what the survey saw, and disables the
// unit.
func (s *survey) stop() tasks.Step { return step.SetMount(s.stopArgs()) }

func (s *survey) stopArgs() *taskv1.MountUnitStep {
	return &taskv1.MountUnitStep{
		Unit: s.unit, Where: s.target, Source: s.mount.Source, Fstype: s.mount.FSType,
		Action: taskv1.UnitAction_UNIT_ACTION_STOP,
	}
}

// reload returns the step that has systemd read the unit's file. Put before
// steps that change the file, it has systemd forget their change in the undo.
func (s *survey) reload() tasks.Step {
	return step.SetUnit(&taskv1.UnitStep{Unit: s.unit, Action: taskv1.UnitAction_UNIT_ACTION_DAEMON_RELOAD})
}

// checkRelease refuses to unmount what others stand on: systemd would stop
// their units with this one.
func (s *survey) checkRelease(ctx context.Context, h host.Reader) error {
	if s.depth == 0 {
		return nil
	}
	if below := step.MountsBelow(s.table, s.target); len(below) > 0 {
		return unfit("%s is mounted below %s: unmount it first", strings.Join(below, ", "), s.target)
	}
	for _, m := range s.table {
		if m.Dev != s.mount.Dev || m.Target == s.target {
			continue
		}
		content, found, err := readUnit(ctx, h, unitPath(m.Target))
		if errors.Is(err, tasks.ErrPrecondition) {
			continue
		}
		if err != nil {
			return err
		}
		if what := settings(content).setting("Mount.What"); found && step.Within(what, s.target) {
			return unfit("%s is mounted on %s: unmount that first", what, m.Target)
		}
	}
	return nil
}

// unfit returns an error that refuses the task.
func unfit(format string, args ...any) error {
	return fmt.Errorf("%s: %w", fmt.Sprintf(format, args...), tasks.ErrPrecondition)
}

// disturbs says what taking the mount away does to those who use it. Nobody can
// use what is not there, or what is dead.
func (s *survey) disturbs(what string, wait *durationpb.Duration) *tasks.Disturbance {
	if s.depth == 0 || s.health == host.MountDisconnected || s.health == host.MountStale {
		return nil
	}
	return &tasks.Disturbance{What: what, Wait: tasks.JobWait(wait)}
}
