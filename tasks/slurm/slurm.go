// Package slurm has the kinds slurm.join, slurm.leave, slurm.reconfigure,
// slurm.drain and slurm.resume: a node as a working member of a Slurm cluster,
// one that is no member any more, and one that takes no new jobs.
package slurm

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	slurmv1 "github.com/gpuaas/millwright/proto/millwright/slurm/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
	"github.com/gpuaas/millwright/tasks/step"
)

const (
	dropInDir = "/etc/systemd/system/slurmd.service.d"
	// It comes late among the drop-ins, and an administrator's can come later.
	dropInPath = dropInDir + "/90-millwright.conf"
	// optionsPath is read after the distribution's own file, and wins.
	optionsPath = "/etc/default/millwright-slurmd"
	fileMode    = 0o644
	memberKey   = "slurm:member"
	drainKey    = "slurm:drain"
	ownHeader   = "# Made by Millwright (slurm.join)."
	serversMark = "# Controllers: "
	gpusMark    = "# GPUs: as they are"
	ownTags     = "mw:"
)

// The tags of drains. Each ends only its own.
const (
	ownerDrain       = step.OwnerDrain
	ownerLeave       = "mw:leave"
	ownerReconfigure = "mw:reconfigure"
)

// dropIn makes the distribution's unit fit for a node without a slurm.conf of
// its own. Debian's is skipped without that file, and systemd calls it a
// success. The condition is emptied, and not replaced.
const dropIn = ownHeader + ` What is changed here by hand is found and undone.
[Unit]
ConditionPathExists=
Wants=munge.service
After=munge.service nvidia-persistenced.service

[Service]
EnvironmentFile=` + optionsPath + `
RuntimeDirectory=slurm
RuntimeDirectoryMode=0755
Restart=on-failure
RestartSec=5
`

// lock is what every kind of this package needs for itself.
func lock() []tasks.Lock { return []tasks.Lock{{Name: "slurm"}, {Name: "unit:" + step.SlurmdUnit}} }

// lockFor is that, and the packages' where a spec names some.
func lockFor(s *slurmv1.JoinSpec) []tasks.Lock {
	if len(s.GetPackages()) == 0 {
		return lock()
	}
	return append(lock(), tasks.Lock{Name: "packages"})
}

// unfit returns an error that refuses the task.
func unfit(format string, args ...any) error {
	return fmt.Errorf("%s: %w", fmt.Sprintf(format, args...), tasks.ErrPrecondition)
}

// survey is what a node has of Slurm.
type survey struct {
	machine  host.SlurmMachine
	slurmd   host.UnitStatus
	munge    host.UnitStatus
	options  string // the file of ours; empty: there is none
	dropIn   string
	dir      bool // the directory of drop-ins is there
	node     host.SlurmNode
	answered bool  // the controller did
	silence  error // why it did not
	key      keyState
	packages tasks.Plan // for what a spec names
	gpus     string     // as Slurm writes them, where the spec tells them
}

// lookFor surveys a node for what a spec asks of it.
func lookFor(ctx context.Context, h host.Reader, spec *slurmv1.JoinSpec) (*survey, error) {
	packages, err := lookPackages(ctx, h, spec.GetPackages())
	if err != nil {
		return nil, err
	}
	s, err := look(ctx, h, spec.GetControllers(), packages)
	if err != nil {
		return nil, err
	}
	if spec.GetDynamic().GetGpus() {
		all, err := step.GPUStates(ctx, h)
		if err != nil {
			return nil, err
		}
		s.gpus = step.GPUGres(all)
	}
	return s, s.lookKey(ctx, h, spec.GetMungeKey())
}

// look surveys a node, to which packages are about to come. Controllers are asked
// as the spec says, or as the file of ours does.
func look(ctx context.Context, h host.Reader, controllers []string, packages tasks.Plan) (*survey, error) {
	s := &survey{packages: packages}
	var err error
	if s.slurmd, err = h.Unit(ctx, step.SlurmdUnit); err != nil {
		return nil, err
	}
	if s.munge, err = h.Unit(ctx, step.MungeUnit); err != nil {
		return nil, err
	}
	if s.options, err = readOwn(ctx, h, optionsPath); err != nil {
		return nil, err
	}
	if s.dropIn, err = readOwn(ctx, h, dropInPath); err != nil {
		return nil, err
	}
	_, err = h.Lstat(ctx, dropInDir)
	if s.dir = err == nil; err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	if err := checkPrograms(ctx, h); err != nil {
		if s.coming() && errors.Is(err, tasks.ErrPrecondition) {
			err = s.lookMachine(ctx, h, controllers)
		}
		return s, err
	}
	if s.machine, err = h.SlurmMachine(ctx); err != nil {
		return nil, err
	}
	if len(controllers) == 0 {
		controllers = s.controllers()
	}
	s.node, err = h.SlurmNode(ctx, host.SlurmRef{Node: s.machine.HostName, Servers: controllers})
	if s.answered = err == nil; err != nil && !errors.Is(err, host.ErrSlurm) {
		return nil, err
	}
	s.silence = err
	return s, nil
}

// readOwn returns the content of a file of ours, or nothing when there is none.
func readOwn(ctx context.Context, h host.Reader, file string) (string, error) {
	info, err := h.Lstat(ctx, file)
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	if !info.Mode.IsRegular() {
		return "", unfit("%s is no regular file: remove it", file)
	}
	f, err := h.ReadFile(ctx, file)
	if err != nil {
		return "", err
	}
	if !strings.HasPrefix(string(f.Data), ownHeader) {
		return "", unfit("%s was not made by Millwright: remove it", file)
	}
	return string(f.Data), nil
}

// programs are what is needed, and Debian's package of each.
var programs = [][2]string{
	{"munged", "munge"}, {"munge", "munge"}, {"unmunge", "munge"}, {"slurmd", "slurmd"},
	{"scontrol", "slurm-client"}, {"squeue", "slurm-client"}, {"srun", "slurm-client"}, {"scancel", "slurm-client"},
}

// checkPrograms names all that is missing.
func checkPrograms(ctx context.Context, h host.Reader) error {
	var missing, packages []string
	for _, p := range programs {
		_, err := h.FindProgram(ctx, p[0])
		if errors.Is(err, fs.ErrNotExist) {
			missing = append(missing, p[0])
			if !slices.Contains(packages, p[1]) {
				packages = append(packages, p[1])
			}
			continue
		}
		if err != nil {
			return err
		}
	}
	if len(missing) > 0 {
		return unfit("the node lacks %s: install %s (the names are Debian's), in the controller's release, or name them in packages", strings.Join(missing, ", "), strings.Join(packages, ", "))
	}
	return nil
}

// joined reports whether the node joined by slurm.join.
func (s *survey) joined() bool { return s.options != "" }

// controllers are those that the node joined.
func (s *survey) controllers() []string {
	for line := range strings.Lines(s.options) {
		if list, ok := strings.CutPrefix(strings.TrimSpace(line), serversMark); ok {
			return strings.Fields(list)
		}
	}
	return nil
}

// elsewhere refuses a spec for another cluster than the node's own, where it may
// have jobs: while its slurmd runs, that is the cluster that answers. A list with
// one of the controllers that the node has is of the same cluster.
func (s *survey) elsewhere(m member) error {
	have := s.controllers()
	same := func(c string) bool {
		return slices.ContainsFunc(m.controllers, func(w string) bool { return withPort(w) == withPort(c) })
	}
	if len(have) == 0 || slices.ContainsFunc(have, same) {
		return nil
	}
	return unfit("the node is a member of the cluster of %s, and %s is none of its controllers: take it out with slurm.leave first, which drains it there; "+
		"if that cluster is no more, systemctl disable --now %s and remove %s", strings.Join(have, ", "), strings.Join(m.controllers, ", "), step.SlurmdUnit, optionsPath)
}

// withPort is a controller with its port, as it is usual.
func withPort(c string) string {
	if strings.Contains(c, ":") {
		return c
	}
	return c + ":6817"
}

// dynamic reports whether the node joined as a dynamic one.
func (s *survey) dynamic() bool { return strings.Contains(s.options, " -Z ") }

// active and enabled are of a unit.
func active(st host.UnitStatus) bool {
	return st.Active == "active" || st.Active == "activating" || st.Active == "reloading"
}

func enabled(st host.UnitStatus) bool { return st.Enabled == "enabled" }

// gresText is how Slurm writes resources.
func gresText(list []*slurmv1.Gres) string {
	var out []string
	for _, g := range list {
		parts := []string{g.GetName()}
		if g.GetType() != "" {
			parts = append(parts, g.GetType())
		}
		out = append(out, strings.Join(append(parts, fmt.Sprint(g.GetCount())), ":"))
	}
	return strings.Join(out, ",")
}
