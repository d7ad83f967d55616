package slurm

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	slurmv1 "github.com/gpuaas/millwright/proto/millwright/slurm/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
	"github.com/gpuaas/millwright/tasks/step"
)

// Join is the kind slurm.join.
type Join struct{}

var (
	_ tasks.Task[*slurmv1.JoinSpec]     = Join{}
	_ tasks.Intender[*slurmv1.JoinSpec] = Join{}
)

// JoinInfo describes slurm.join.
func JoinInfo() tasks.Info {
	return tasks.Info{
		Kind: "slurm.join", Revision: 4, Class: tasks.State,
		Since:   map[protoreflect.Name]uint32{"munge_key": 2, "packages": 3, "dynamic.gpus": 4},
		Summary: "make the node a member of a Slurm cluster, now and after each boot",
	}
}

// Validate implements [tasks.Task].
func (Join) Validate(s *slurmv1.JoinSpec) error {
	var p tasks.Problems
	validateJoin(&p, "", s)
	return p.Err()
}

// Locks implements [tasks.Task].
func (Join) Locks(s *slurmv1.JoinSpec) []tasks.Lock { return lockFor(s) }

// Intent implements [tasks.Intender].
func (Join) Intent(*slurmv1.JoinSpec) (string, tasks.IntentChange) {
	return memberKey, tasks.IntentSet
}

// member is what a spec asks for on this node.
type member struct {
	controllers []string
	dynamic     bool
	gres        string
	options     string // the file
}

// wanted works out a spec for the node that was surveyed.
func wanted(spec *slurmv1.JoinSpec, s *survey) member {
	m := member{controllers: spec.GetControllers()}
	flags := "--conf-server " + strings.Join(m.controllers, ",")
	if d := spec.GetDynamic(); d != nil {
		m.dynamic, m.gres = true, gresText(d.GetGres())
		if s.gpus != "" {
			m.gres = strings.TrimPrefix(m.gres+","+s.gpus, ",")
		}
		var conf []string
		if m.gres != "" {
			conf = append(conf, "Gres="+m.gres)
		}
		if f := d.GetFeatures(); len(f) > 0 {
			conf = append(conf, "Feature="+strings.Join(f, ","))
		}
		conf = append(conf, fmt.Sprintf("RealMemory=%d", s.memory(d.GetMemoryMarginPercent())))
		flags += " -Z --conf '" + strings.Join(conf, " ") + "'"
	} else {
		m.gres = gresText(spec.GetStatic().GetGres())
	}
	m.options = ownHeader + " What is changed here by hand is found and undone.\n" +
		serversMark + strings.Join(m.controllers, " ") + "\n" +
		"SLURMD_OPTIONS=\"" + flags + "\"\n"
	if spec.GetDynamic().GetGpus() {
		m.options += gpusMark + "\n"
	}
	if s.ownsKey() || s.key.ref != nil && s.key.other {
		m.options += keyMark + "\n"
	}
	m.options += s.packageMarks()
	return m
}

var realMemory = regexp.MustCompile(`RealMemory=(\d+)`)

// memory is what jobs get, in MiB. What a kernel has of it changes a little from
// boot to boot: a figure that was given and still fits stays.
func (s *survey) memory(margin uint32) uint64 {
	if margin == 0 {
		margin = defaultMargin
	}
	part := func(percent uint32) uint64 { return s.machine.RealMemoryMiB * uint64(100-percent) / 100 }
	if m := realMemory.FindStringSubmatch(s.options); m != nil {
		have, err := strconv.ParseUint(m[1], 10, 63)
		// Up to two percent of the machine may have come or gone.
		if err == nil && have <= part(max(margin, 2)-2) && have >= part(min(margin+2, 99)) {
			return have
		}
	}
	return part(margin)
}

// start is the step that ends a join, and how the controller must have the node.
func (s *survey) start(m member) *slurmv1.SlurmdStartStep {
	return &slurmv1.SlurmdStartStep{
		Node: s.machine.HostName, Controllers: m.controllers, Gres: m.gres, Dynamic: m.dynamic,
		ResumeOwners: []string{ownerLeave, ownerReconfigure},
	}
}

// Plan implements [tasks.Task].
func (Join) Plan(ctx context.Context, h host.Reader, spec *slurmv1.JoinSpec) (tasks.Plan, error) {
	s, err := lookFor(ctx, h, spec)
	if err != nil {
		return tasks.Plan{}, err
	}
	m := wanted(spec, s)
	diffs := s.differences(ctx, h, m)
	if len(diffs) == 0 {
		return tasks.Plan{}, nil
	}
	if s.onlyPackages(diffs) {
		return s.packages, nil
	}
	if err := s.elsewhere(m); err != nil {
		return tasks.Plan{}, err
	}
	if err := s.preflight(ctx, h, spec); err != nil {
		return tasks.Plan{}, err
	}
	if s.anew(m) && s.answered && s.node.Known && active(s.slurmd) && s.usable() {
		return tasks.Plan{}, unfit("node %s is a member with another description (%s): use slurm.reconfigure, which drains it first", s.node.Name, firstDifference(diffs))
	}
	if s.anew(m) && !s.answered && active(s.slurmd) {
		return tasks.Plan{}, unfit("whether node %s has jobs is not known, and it would get another description (%s): have the controller answer first, or stop %s: %v", s.machine.HostName, firstDifference(diffs), step.SlurmdUnit, s.silence)
	}
	if s.anew(m) && s.answered && step.ForeignDrain(s.node, ownerLeave, ownerReconfigure) {
		return tasks.Plan{}, unfit("node %s is drained by somebody else, %q, which the controller would forget when the node registers anew (%s): end that drain first", s.node.Name, s.node.Reason, firstDifference(diffs))
	}
	return tasks.Plan{Differences: diffs, Steps: append(slices.Clone(s.packages.Steps), s.joinSteps(m)...)}, nil
}

func firstDifference(diffs []tasks.Difference) string {
	return fmt.Sprintf("%s: have %q, want %q", diffs[0].Subject, diffs[0].Have, diffs[0].Want)
}

// usable reports whether the node may have jobs.
func (s *survey) usable() bool {
	return len(s.node.Jobs) > 0 || !s.node.Is("DOWN") && !s.node.Is("INVAL") && !s.node.Is("INVALID_REG")
}

// anew reports whether the controller has to forget the node first: it keeps the
// description with which a dynamic node first registered.
func (s *survey) anew(m member) bool {
	return s.dynamic() && description(s.options) != description(m.options) || s.node.Known && m.dynamic && (s.node.Gres != m.gres || s.node.Is("INVAL") || s.node.Is("INVALID_REG"))
}

// description is what a dynamic node says of itself.
func description(options string) string {
	_, conf, _ := strings.Cut(optionsLine(options), " --conf ")
	return conf
}

// joinSteps make the node a member.
func (s *survey) joinSteps(m member) []tasks.Step {
	steps := s.prepare(m)
	if s.dropIn != dropIn {
		if !s.dir {
			steps = append(steps, step.MakeDir(&taskv1.DirectoryStep{Path: dropInDir, Mode: 0o755}))
		}
		steps = append(steps, step.WriteFile(&taskv1.WriteFileStep{Path: dropInPath, Data: []byte(dropIn), Mode: fileMode}))
	}
	if s.options != m.options {
		steps = append(steps, step.WriteFile(&taskv1.WriteFileStep{Path: optionsPath, Data: []byte(m.options), Mode: fileMode}))
	}
	return append(steps, step.StartSlurmd(s.start(m)))
}

// prepare is what comes before any file is written.
func (s *survey) prepare(m member) []tasks.Step {
	var steps []tasks.Step
	if s.dropIn != dropIn {
		steps = append(steps, step.SetUnit(&taskv1.UnitStep{Unit: step.SlurmdUnit, Action: taskv1.UnitAction_UNIT_ACTION_DAEMON_RELOAD}))
	}
	if active(s.slurmd) && (s.dropIn != dropIn || s.options != m.options || s.node.Known && s.anew(m)) {
		steps = append(steps, step.StopSlurmd(&slurmv1.SlurmdStopStep{
			Node: s.machine.HostName, Controllers: m.controllers, Forget: s.answered && s.node.Known && s.anew(m),
		}))
	}
	return append(steps, s.keySteps()...)
}

// differences names all that is not as it should be.
func (s *survey) differences(ctx context.Context, h host.Reader, m member) []tasks.Difference {
	diffs := slices.Clone(s.packages.Differences)
	add := func(subject, have, want string) {
		if have != want {
			diffs = append(diffs, tasks.Difference{Subject: subject, Have: have, Want: want})
		}
	}
	add("options of slurmd", optionsLine(s.options), optionsLine(m.options))
	diffs = append(diffs, s.keyDifferences()...)
	if s.options != m.options && len(diffs) == 0 {
		add(optionsPath, "edited", "as written")
	}
	if s.dropIn != dropIn {
		add("drop-in "+dropInPath, map[bool]string{true: "edited"}[s.dropIn != ""], "as written")
	}
	for _, u := range []struct {
		name string
		st   host.UnitStatus
	}{{step.MungeUnit, s.munge}, {step.SlurmdUnit, s.slurmd}} {
		if !active(u.st) {
			add("unit "+u.name, u.st.Active, "active")
		}
		if !enabled(u.st) {
			add("unit "+u.name+" at boot", u.st.Enabled, "enabled")
		}
	}
	if !s.answered {
		if len(diffs) > 0 {
			return diffs
		}
		return nil // nothing on this node can change that; the check says so
	}
	return append(diffs, s.nodeDifferences(ctx, h, m)...)
}

// nodeDifferences is what the controller has otherwise. A node that does not
// respond for a moment is left to the check: it is normal after a resume.
func (s *survey) nodeDifferences(ctx context.Context, h host.Reader, m member) []tasks.Difference {
	want := m.gres
	have := strings.Join(s.node.States, "+")
	subject := "node " + s.machine.HostName + " in Slurm"
	// What a task that was abandoned has left: none that runs has it now, as each
	// needs the same lock.
	left := s.node.DrainedBy(ownerLeave) || s.node.DrainedBy(ownerReconfigure)
	switch {
	case !s.node.Known:
		return []tasks.Difference{{Subject: subject, Want: "registered"}}
	case s.node.Drained() && !s.node.Is("INVAL") && !s.node.Is("INVALID_REG") && !left:
		return nil // whoever drained it ends it; the check says so
	case s.node.Is("NOT_RESPONDING"):
		return nil
	case s.node.Is("DOWN"), s.node.Is("INVAL"), s.node.Is("INVALID_REG"), left, s.node.Is("UNKNOWN"):
		return []tasks.Difference{{Subject: subject, Have: have, Want: "IDLE"}}
	}
	err := step.CheckSlurmNode(ctx, h, s.start(m))
	var r *tasks.ReasonError
	if errors.As(err, &r) && r.Reason == tasks.ReasonSlurmGres {
		return []tasks.Difference{{Subject: subject + " resources", Have: s.node.Gres, Want: want}}
	}
	return nil
}

// optionsLine is what slurmd is started with.
func optionsLine(file string) string {
	for line := range strings.Lines(file) {
		if v, ok := strings.CutPrefix(strings.TrimSpace(line), "SLURMD_OPTIONS="); ok {
			return strings.Trim(v, `"`)
		}
	}
	return ""
}

// preflight refuses what cannot work.
func (s *survey) preflight(ctx context.Context, h host.Reader, spec *slurmv1.JoinSpec) error {
	for _, u := range []struct {
		name, pkg string
		st        host.UnitStatus
	}{{step.SlurmdUnit, "slurmd", s.slurmd}, {step.MungeUnit, "munge", s.munge}} {
		if u.st.Load == "not-found" && !s.coming() || u.st.Load == "masked" {
			return unfit("unit %s is %s: install the package %s, or unmask the unit", u.name, u.st.Load, u.pkg)
		}
	}
	if _, err := h.Lstat(ctx, siteConf); !errors.Is(err, fs.ErrNotExist) {
		if err != nil {
			return err
		}
		return unfit("/etc/slurm/slurm.conf is there, and Slurm's programs would read it instead of the controller's configuration: move it away")
	}
	if err := checkCgroup(ctx, h); err != nil {
		return err
	}
	if err := s.checkPackages(ctx, h, spec); err != nil {
		return err
	}
	if err := s.checkKey(ctx, h); err != nil {
		return err
	}
	list := spec.GetDynamic().GetGres()
	if spec.GetStatic() != nil {
		list = spec.GetStatic().GetGres()
	}
	var missing []string
	for _, g := range list {
		for _, f := range g.GetFiles() {
			info, err := h.Lstat(ctx, f)
			switch {
			case errors.Is(err, fs.ErrNotExist):
				missing = append(missing, f)
			case err != nil:
				return err
			case info.Mode&(fs.ModeDevice|fs.ModeSymlink) == 0:
				return unfit("%s is no device: Slurm would not give it to a job", f)
			}
		}
	}
	if len(missing) > 0 {
		return unfit("the node has no %s: load the device's driver first, or correct gres.files", strings.Join(missing, ", "))
	}
	return nil
}

// checkCgroup refuses a node without control groups: slurmd reads them always,
// whatever its configuration says, and ends without them.
func checkCgroup(ctx context.Context, h host.Reader) error {
	table, err := h.Mounts(ctx)
	if err != nil {
		return err
	}
	for _, m := range table {
		if m.FSType == "cgroup" || m.FSType == "cgroup2" {
			return nil
		}
	}
	return unfit("no control groups are mounted at /sys/fs/cgroup, and slurmd ends without them")
}

// Verify implements [tasks.Task]: the node has what was asked for, the
// controller has it so, and a job runs on it and is given a device.
func (Join) Verify(ctx context.Context, h host.Prober, spec *slurmv1.JoinSpec) error {
	return verifyMember(ctx, h, spec)
}

// Result implements [tasks.Task].
func (Join) Result(ctx context.Context, h host.Prober, spec *slurmv1.JoinSpec, _ [][]byte) (proto.Message, error) {
	return memberResult(ctx, h, spec.GetControllers())
}
