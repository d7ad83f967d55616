package slurm

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"regexp"
	"slices"
	"strconv"
	"strings"

	slurmv1 "github.com/gpuaas/millwright/proto/millwright/slurm/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
	"github.com/gpuaas/millwright/tasks/step"
)

const (
	// packageMark and packageFileMark say in the options file what slurm.join
	// installed, and the files that held some of it: that goes with slurm.leave.
	packageMark     = "# Package: "
	packageFileMark = "# Package file: "
)

// brought is what slurm.join has installed, or is about to.
type brought struct {
	names []string // sorted
	files []*taskv1.PackageFile
}

// lookPackages plans what a spec's packages need.
func lookPackages(ctx context.Context, h host.Reader, list []*taskv1.NodePackage) (tasks.Plan, error) {
	if len(list) == 0 {
		return tasks.Plan{}, nil
	}
	wants := make([]step.PackageWant, 0, len(list))
	for _, p := range list {
		sum, err := hex.DecodeString(p.GetSha256())
		if err != nil {
			return tasks.Plan{}, unfit("package %s: sha256 is not of hexadecimal digits: %v", p.GetName(), err)
		}
		wants = append(wants, step.PackageWant{Name: p.GetName(), Version: p.GetVersion(), File: p.GetFile(), SHA256: sum, Hold: !p.GetNoHold()})
	}
	return step.PlanPackages(ctx, h, wants)
}

// installs returns what a plan for packages installs; nothing when it only
// holds some.
func installs(p tasks.Plan) []*taskv1.PackagePin {
	var out []*taskv1.PackagePin
	for _, s := range p.Steps {
		if args, ok := s.Args().(*taskv1.PackageInstallStep); ok {
			out = append(out, args.GetPackages()...)
		}
	}
	return out
}

// coming reports whether packages are about to be installed, so that what is
// missing may come with them.
func (s *survey) coming() bool { return len(installs(s.packages)) > 0 }

// brought returns what slurm.join has installed on this node, by its options
// file.
func (s *survey) brought() brought {
	var b brought
	for line := range strings.Lines(s.options) {
		line = strings.TrimSpace(line)
		if name, ok := strings.CutPrefix(line, packageMark); ok {
			b.names = append(b.names, name)
		}
		if words, ok := strings.CutPrefix(line, packageFileMark); ok {
			digits, path, _ := strings.Cut(words, " ")
			if sum, err := hex.DecodeString(digits); err == nil && path != "" {
				b.files = append(b.files, &taskv1.PackageFile{Path: path, Sha256: sum})
			}
		}
	}
	return b
}

// packageMarks are the lines about packages of the options file.
func (s *survey) packageMarks() string {
	b := s.brought()
	for _, p := range installs(s.packages) {
		if !slices.Contains(b.names, p.GetName()) {
			b.names = append(b.names, p.GetName())
		}
	}
	for _, st := range s.packages.Steps {
		if args, ok := st.Args().(*taskv1.PackageInstallStep); ok {
			b.files = append(b.files, args.GetFiles()...)
		}
	}
	slices.Sort(b.names)
	var lines strings.Builder
	for _, n := range b.names {
		lines.WriteString(packageMark + n + "\n")
	}
	seen := map[string]bool{}
	for _, f := range b.files {
		line := fmt.Sprintf("%s%x %s\n", packageFileMark, f.GetSha256(), f.GetPath())
		if !seen[line] {
			lines.WriteString(line)
		}
		seen[line] = true
	}
	return lines.String()
}

// onlyPackages reports whether nothing but packages is to do: slurmd need not be
// started anew for a hold.
func (s *survey) onlyPackages(diffs []tasks.Difference) bool {
	return len(s.packages.Differences) > 0 && len(diffs) == len(s.packages.Differences)
}

// withoutPackages adds to a plan the removal of what slurm.join installed. Its
// configuration stays: scripts of Debian's packages that purge delete whole
// directories, and with them what the site has put there since.
func (s *survey) withoutPackages(ctx context.Context, h host.Reader, p *tasks.Plan) error {
	b := s.brought()
	if len(b.names) == 0 {
		return nil
	}
	removal, err := step.PlanRemoval(ctx, h, b.names, b.files, false)
	if err != nil {
		return err
	}
	p.Steps = append(p.Steps, removal.Steps...)
	p.Differences = append(p.Differences, removal.Differences...)
	return nil
}

// lookMachine surveys a node on which some programs are only coming.
func (s *survey) lookMachine(ctx context.Context, h host.Reader, controllers []string) error {
	var err error
	if s.machine, err = h.SlurmMachine(ctx); errors.Is(err, fs.ErrNotExist) {
		s.machine, err = kernelMachine(ctx, h)
	}
	if err != nil {
		return err
	}
	s.node, err = h.SlurmNode(ctx, host.SlurmRef{Node: s.machine.HostName, Servers: controllers})
	if s.answered = err == nil; err != nil && !errors.Is(err, host.ErrSlurm) && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	s.silence = err
	return nil
}

var memTotal = regexp.MustCompile(`(?m)^MemTotal: +(\d+) kB$`)

// kernelMachine is what slurmd will say of the machine when it is there: it has
// the memory and the name from the kernel too.
func kernelMachine(ctx context.Context, h host.Reader) (host.SlurmMachine, error) {
	mem, err := h.ReadFile(ctx, "/proc/meminfo")
	if err != nil {
		return host.SlurmMachine{}, fmt.Errorf("find the machine's memory: %w", err)
	}
	name, err := h.ReadFile(ctx, "/proc/sys/kernel/hostname")
	if err != nil {
		return host.SlurmMachine{}, fmt.Errorf("find the machine's name: %w", err)
	}
	m := memTotal.FindSubmatch(mem.Data)
	if m == nil {
		return host.SlurmMachine{}, errors.New("find the machine's memory: /proc/meminfo has no MemTotal")
	}
	kib, err := strconv.ParseUint(string(m[1]), 10, 63)
	short, _, _ := strings.Cut(strings.TrimSpace(string(name.Data)), ".")
	return host.SlurmMachine{HostName: short, RealMemoryMiB: kib / 1024}, err
}

// checkPackages refuses packages with which the node could not be a member.
func (s *survey) checkPackages(ctx context.Context, h host.Reader, spec *slurmv1.JoinSpec) error {
	if !s.coming() {
		return nil
	}
	manager, err := h.PackageManager(ctx)
	if err != nil {
		return err
	}
	key := "its package brings none" // those for rpm leave that to a program of theirs
	if manager.Name == host.Apt {
		if err := s.checkPurge(ctx, h); err != nil {
			return err
		}
		key = "its package makes a random key, which no controller trusts"
	}
	if _, err := h.FindProgram(ctx, "munged"); errors.Is(err, fs.ErrNotExist) && spec.GetMungeKey() == nil {
		return unfit("munge_key is needed: munge is not installed, and %s; give munge_key: {name: NAME}", key)
	}
	var slurmd string
	for _, p := range installs(s.packages) {
		if strings.HasSuffix(p.GetName(), "slurmd") {
			slurmd = upstream(p.GetVersion())
		}
	}
	if slurmd == "" || !s.answered {
		return nil // the step that starts slurmd asks again, and is undone
	}
	c, err := h.SlurmController(ctx, spec.GetControllers())
	if err != nil && !errors.Is(err, host.ErrSlurm) {
		return err
	}
	if err == nil && step.SlurmNewer(slurmd, c.Version) {
		return unfit("packages: slurmd %s is newer than the controller, which is %s: name the controller's release, or upgrade the controller first", slurmd, c.Version)
	}
	return nil
}

// purges are paths that the scripts of Debian's packages delete when the packages
// are purged, as they are when their installation is undone: by package.
var purges = map[string]string{"munge": step.MungeKey, "slurm-wlm-basic-plugins": "/etc/slurm"}

// checkPurge refuses packages whose undo would delete what is there already.
func (s *survey) checkPurge(ctx context.Context, h host.Reader) error {
	for _, p := range installs(s.packages) {
		path, ok := purges[p.GetName()]
		if !ok {
			continue
		}
		list, err := h.Packages(ctx, []string{p.GetName()})
		if err != nil {
			return err
		}
		if list[0].State != "" {
			continue // undone, it is only removed
		}
		switch info, err := h.Lstat(ctx, path); {
		case errors.Is(err, fs.ErrNotExist):
			continue
		case err != nil:
			return err
		case info.Mode.IsDir():
			empty, err := h.DirEmpty(ctx, path)
			if err != nil {
				return err
			}
			if empty {
				continue
			}
		}
		return unfit("%s is there, and the package %s, which is not, deletes it if the join is undone: move it away first", path, p.GetName())
	}
	return nil
}

// upstream is a version without the epoch and the revision of its package.
func upstream(version string) string {
	if _, rest, ok := strings.Cut(version, ":"); ok {
		version = rest
	}
	v, _, _ := strings.Cut(version, "-")
	return v
}
