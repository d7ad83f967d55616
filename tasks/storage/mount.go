// Package storage has the kinds storage.mount and storage.unmount: a file system
// mounted through a native systemd unit, now and after each boot, and not
// mounted any more.
package storage

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	storagev1 "github.com/gpuaas/millwright/proto/millwright/storage/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
	"github.com/gpuaas/millwright/tasks/step"
)

// tmpfsRounding is the most by which the kernel rounds a size up: one page.
const tmpfsRounding = 64 << 10

// Mount is the kind storage.mount.
type Mount struct{}

var (
	_ tasks.Task[*storagev1.MountSpec]     = Mount{}
	_ tasks.Intender[*storagev1.MountSpec] = Mount{}
	_ tasks.Watcher[*storagev1.MountSpec]  = Mount{}
)

// MountInfo describes storage.mount.
func MountInfo() tasks.Info {
	return tasks.Info{
		Kind: "storage.mount", Revision: 3, Class: tasks.State,
		Since: map[protoreflect.Name]uint32{
			"nfs": 2, "lustre": 2, "weka": 2, "beegfs": 2, "cephfs": 2, "s3": 2, "device": 2, "wait": 2, "sentinel": 2,
			"wait_for_jobs": 3, "cephfs.key": 3, "s3.key": 3,
		},
		Summary: "mount a file system, now and after each boot",
	}
}

// Locks implements [tasks.Task]. A bind mount shares its source with others.
func (Mount) Locks(s *storagev1.MountSpec) []tasks.Lock {
	locks := []tasks.Lock{{Name: intentKey(s.GetTarget())}}
	if b := s.GetBind(); b != nil {
		locks = append(locks, tasks.Lock{Name: intentKey(b.GetPath()), Shared: true})
	}
	return locks
}

// Intent implements [tasks.Intender].
func (Mount) Intent(s *storagev1.MountSpec) (string, tasks.IntentChange) {
	return intentKey(s.GetTarget()), tasks.IntentSet
}

// Lost implements [tasks.Watcher]: nothing is mounted any more, or its client has
// died. Other drift stays as it is until somebody asks for a plan.
func (Mount) Lost(ctx context.Context, h host.Reader, spec *storagev1.MountSpec) (bool, error) {
	table, err := h.Mounts(ctx)
	if err != nil {
		return false, err
	}
	if _, depth := step.MountAt(table, spec.GetTarget()); depth == 0 {
		return true, nil
	}
	health, err := h.MountHealth(ctx, spec.GetTarget())
	return health == host.MountDisconnected, err
}

func intentKey(target string) string { return "mount:" + target }

// Plan implements [tasks.Task].
func (Mount) Plan(ctx context.Context, h host.Reader, spec *storagev1.MountSpec) (tasks.Plan, error) {
	s, err := look(ctx, h, spec.GetTarget())
	if err != nil {
		return tasks.Plan{}, err
	}
	content, err := unitFile(spec)
	if err != nil {
		return tasks.Plan{}, err
	}
	want, err := wantedNow(ctx, h, spec)
	if err != nil {
		return tasks.Plan{}, err
	}
	if err := s.lookKey(ctx, h, keyFileOf(spec)); err != nil {
		return tasks.Plan{}, err
	}
	diffs := s.differences(spec, want, content)
	if len(diffs) == 0 {
		return tasks.Plan{}, nil
	}
	missing, err := s.preflight(ctx, h, spec)
	if err != nil {
		return tasks.Plan{}, err
	}
	again := s.remount(spec, want, content)
	if (again || s.depth == 0) && spec.GetWait() == nil {
		if err := sourceOf(spec).needs.checkServers(ctx, h); err != nil {
			return tasks.Plan{}, err
		}
	}
	if again {
		if err := s.checkRelease(ctx, h); err != nil {
			return tasks.Plan{}, err
		}
	}
	p := tasks.Plan{Differences: diffs, Steps: s.steps(want, content, again, missing)}
	if again {
		p.Disturbs = s.disturbs("mounts "+s.target+" again", spec.GetWaitForJobs())
	}
	return p, nil
}

// wantedNow is wanted, with the name that the mount table has for a disk.
func wantedNow(ctx context.Context, h host.Reader, spec *storagev1.MountSpec) (*taskv1.MountUnitStep, error) {
	m := wanted(spec)
	if file := sourceOf(spec).needs.device; file != "" {
		now, err := deviceNow(ctx, h, file)
		if err != nil {
			return nil, err
		}
		if now != "" && now != file {
			m.OtherSources = append(m.OtherSources, now)
		}
	}
	return m, nil
}

// steps returns the steps to a mount: what is mounted first goes when it has to
// be mounted again.
func (s *survey) steps(want *taskv1.MountUnitStep, content string, again, missing bool) []tasks.Step {
	var steps []tasks.Step
	add := func(st tasks.Step) { steps = append(steps, st) }
	if again {
		add(s.stop())
	}
	if missing {
		add(step.MakeDir(&taskv1.DirectoryStep{Path: s.target, Mode: 0o755}))
	}
	if s.content != content || len(s.dropIns) > 0 {
		add(s.reload())
	}
	for _, d := range s.dropIns {
		add(step.RemoveFile(&taskv1.RemoveFileStep{Path: d.path}))
	}
	if s.content != content {
		add(step.WriteFile(&taskv1.WriteFileStep{Path: unitPath(s.target), Data: []byte(content), Mode: unitMode}))
	}
	steps = append(steps, s.keySteps()...)
	add(step.SetMount(want))
	return steps
}

// differences names all that is not as spec wants it.
func (s *survey) differences(spec *storagev1.MountSpec, want *taskv1.MountUnitStep, content string) []tasks.Difference {
	diffs := append(s.mountDifferences(spec, want), s.keyDifferences()...)
	if !s.written {
		diffs = append(diffs, tasks.Difference{Subject: "unit " + s.unit, Want: unitPath(s.target)})
	} else {
		diffs = append(diffs, compareUnits(s.unit, s.content, content)...)
	}
	for _, d := range s.dropIns {
		diffs = append(diffs, tasks.Difference{Subject: "unit " + s.unit + " drop-in", Have: d.path})
	}
	if s.written && s.status.NeedReload && s.content == content && len(s.dropIns) == 0 {
		diffs = append(diffs, tasks.Difference{Subject: "unit " + s.unit + " in systemd's memory", Have: "older than its file", Want: "as its file"})
	}
	if !s.enabled() {
		diffs = append(diffs, tasks.Difference{Subject: "unit " + s.unit + " at boot", Have: s.status.Enabled, Want: "enabled"})
	}
	return diffs
}

func (s *survey) mountDifferences(spec *storagev1.MountSpec, want *taskv1.MountUnitStep) []tasks.Difference {
	var diffs []tasks.Difference
	add := func(what, have, want string) {
		diffs = append(diffs, tasks.Difference{Subject: strings.TrimSpace("mount " + s.target + " " + what), Have: have, Want: want})
	}
	for _, d := range step.CompareMount(s.table, want) {
		add(d.What, d.Have, d.Want)
	}
	if t := spec.GetTmpfs(); t != nil && s.depth > 0 && s.mount.FSType == typeTmpfs {
		diffs = append(diffs, compareTmpfs(s.target, s.mount, t)...)
	}
	src := sourceOf(spec)
	if s.depth > 0 && s.mount.FSType == src.fstype {
		for _, o := range src.inForce {
			if have, same := o.shownBy(s.mount); !same {
				add("option "+o.key, have, o.want())
			}
		}
	}
	// One that hangs may answer again; what is dead never does.
	if s.depth > 0 && (s.health == host.MountDisconnected || s.health == host.MountStale) {
		add("state", string(s.health), "answering")
	}
	return diffs
}

// shownBy returns what a mount shows of an option, and whether that is what is
// wanted.
func (o optionInForce) shownBy(m host.Mount) (have string, same bool) {
	if o.flag {
		if slices.Contains(m.Super, o.key) || slices.Contains(m.Options, o.key) {
			return "set", true
		}
		return "not set", false
	}
	have, _ = option(m.Super, o.key)
	return have, have == o.value
}

func (o optionInForce) want() string {
	if o.flag {
		return "set"
	}
	return o.value
}

// compareTmpfs compares what the kernel shows of a tmpfs: the size rounded up
// to pages, and the mode; neither when it is the kernel's default.
func compareTmpfs(target string, m host.Mount, t *storagev1.TmpfsSource) []tasks.Difference {
	var diffs []tasks.Difference
	if have, ok := option(m.Super, "size"); ok && !sizeFits(have, t.GetSizeBytes()) {
		diffs = append(diffs, tasks.Difference{Subject: "mount " + target + " option size", Have: have, Want: fmt.Sprint(t.GetSizeBytes())})
	}
	have, ok := option(m.Super, "mode")
	if !ok {
		have = "1777"
	}
	h, errHave := strconv.ParseUint(have, 8, 32)
	w, errWant := strconv.ParseUint(tmpfsMode(t), 8, 32)
	if errHave != nil || errWant != nil || h != w {
		diffs = append(diffs, tasks.Difference{Subject: "mount " + target + " option mode", Have: have, Want: tmpfsMode(t)})
	}
	return diffs
}

func sizeFits(have string, want uint64) bool {
	kib, found := strings.CutSuffix(have, "k")
	n, err := strconv.ParseUint(kib, 10, 53)
	if err != nil {
		return false
	}
	if found {
		n <<= 10
	}
	return n >= want && n < want+tmpfsRounding
}

func option(options []string, key string) (string, bool) {
	for _, o := range options {
		if v, ok := strings.CutPrefix(o, key+"="); ok {
			return v, true
		}
	}
	return "", false
}

// remount reports whether what is mounted has to go first: the table shows
// something else, or the unit's own mount settings were others.
func (s *survey) remount(spec *storagev1.MountSpec, wantStep *taskv1.MountUnitStep, content string) bool {
	if s.depth == 0 {
		return false
	}
	if len(s.mountDifferences(spec, wantStep)) > 0 || s.key.other {
		return true
	}
	isMount := func(key string) bool { return strings.HasPrefix(key, "Mount.") }
	for _, d := range s.dropIns {
		if slices.ContainsFunc(settings(d.content).keys, isMount) {
			return true
		}
	}
	have, want := settings(s.content), settings(content)
	for _, key := range slices.Concat(have.keys, want.keys) {
		if isMount(key) && !slices.Equal(have.values[key], want.values[key]) {
			return true
		}
	}
	return false
}

// Verify implements [tasks.Task]: the mount table names the mount, the unit
// brings it back at boot, the file system states its size, and what is written
// to it can be read back.
func (Mount) Verify(ctx context.Context, h host.Prober, spec *storagev1.MountSpec) error {
	s, err := look(ctx, h, spec.GetTarget())
	if err != nil {
		return err
	}
	content, err := unitFile(spec)
	if err != nil {
		return err
	}
	want, err := wantedNow(ctx, h, spec)
	if err != nil {
		return err
	}
	if err := s.lookKey(ctx, h, keyFileOf(spec)); err != nil {
		return err
	}
	if diffs := s.differences(spec, want, content); len(diffs) > 0 {
		d := diffs[0]
		return fmt.Errorf("%s: have %q, want %q (differences in all: %d): %w", d.Subject, d.Have, d.Want, len(diffs), tasks.ErrNotSatisfied)
	}
	return s.probe(ctx, h, spec)
}

// probe asks the file system itself, in a child with a deadline.
func (s *survey) probe(ctx context.Context, h host.Prober, spec *storagev1.MountSpec) error {
	c, err := h.ProbeCapacity(ctx, s.target)
	if err != nil {
		return fmt.Errorf("ask %s for its size: %w", s.target, stateOf(err))
	}
	if want := spec.GetTmpfs().GetSizeBytes(); want > 0 && (c.TotalBytes < want || c.TotalBytes >= want+tmpfsRounding) {
		return fmt.Errorf("%s holds %d bytes, not %d: %w", s.target, c.TotalBytes, want, tasks.ErrNotSatisfied)
	}
	if f := spec.GetSentinel(); f != "" {
		file := path.Join(s.target, f)
		if err := h.ProbeFile(ctx, file); errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("sentinel %s is not there, so that this is not the file system that was meant: %w", file, tasks.ErrNotSatisfied)
		} else if err != nil {
			return fmt.Errorf("read sentinel %s: %w", file, stateOf(err))
		}
	}
	if spec.GetReadOnly() {
		if err := h.ProbeRead(ctx, s.target); err != nil {
			return fmt.Errorf("read %s: %w", s.target, stateOf(err))
		}
		return nil
	}
	if err := h.ProbeWrite(ctx, s.target); err != nil {
		return fmt.Errorf("write to %s and read back: %w", s.target, stateOf(err))
	}
	return nil
}

// stateOf names the state of a mount by what a probe of it met.
func stateOf(err error) error {
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("the mount is %s: %w", host.MountHung, err)
	case errors.Is(err, host.ErrDisconnected):
		return fmt.Errorf("the mount is %s, its client has died: %w: %w", host.MountDisconnected, tasks.ErrNotSatisfied, err)
	case errors.Is(err, host.ErrStale):
		return fmt.Errorf("the mount is %s, its server has another file system now: %w: %w", host.MountStale, tasks.ErrNotSatisfied, err)
	default:
		return err
	}
}

// Result implements [tasks.Task].
func (Mount) Result(ctx context.Context, h host.Prober, spec *storagev1.MountSpec, _ [][]byte) (proto.Message, error) {
	table, err := h.Mounts(ctx)
	if err != nil {
		return nil, err
	}
	m, depth := step.MountAt(table, spec.GetTarget())
	if depth == 0 {
		return nil, fmt.Errorf("nothing is mounted on %s: %w", spec.GetTarget(), tasks.ErrNotSatisfied)
	}
	c, err := h.ProbeCapacity(ctx, spec.GetTarget())
	if err != nil {
		return nil, fmt.Errorf("ask %s for its size: %w", spec.GetTarget(), err)
	}
	options := slices.Clone(m.Options)
	for _, o := range m.Super {
		if !slices.Contains(options, o) {
			options = append(options, o)
		}
	}
	return &storagev1.MountResult{
		Unit: MountUnit(spec.GetTarget()), Source: m.Source, Fstype: m.FSType,
		Options: strings.Join(options, ","), CapacityBytes: c.TotalBytes,
	}, nil
}
