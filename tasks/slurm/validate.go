package slurm

import (
	"fmt"
	"path"
	"regexp"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	slurmv1 "github.com/gpuaas/millwright/proto/millwright/slurm/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
)

const (
	maxControllers = 8
	maxGres        = 16
	maxFeatures    = 32
	maxCount       = 1024
	maxWait        = 7 * 24 * time.Hour
	maxReason      = 120
	defaultMargin  = 5
	maxMargin      = 50
)

// Names go unquoted into a configuration that Slurm reads, so that they hold
// nothing that it, systemd or a list could read otherwise.
var (
	word      = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$`)
	oneHost   = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?$`)
	plainPath = regexp.MustCompile(`^/[A-Za-z0-9._/-]{1,200}$`)
)

func validateJoin(p *tasks.Problems, at string, s *slurmv1.JoinSpec) {
	checkControllers(p, at+"controllers", s.GetControllers())
	if s.GetMungeKey() != nil {
		tasks.CheckSecret(p, at+"munge_key", s.GetMungeKey())
	}
	checkPackages(p, at+"packages", s.GetPackages())
	switch m := s.GetMembership().(type) {
	case *slurmv1.JoinSpec_Dynamic:
		checkGres(p, at+"dynamic.gres", m.Dynamic.GetGres())
		checkFeatures(p, at+"dynamic.features", m.Dynamic.GetFeatures())
		if n := m.Dynamic.GetMemoryMarginPercent(); n > maxMargin {
			p.Add(at+"dynamic.memory_margin_percent", fmt.Sprint(n), fmt.Sprintf("must be between 1 and %d; leave it out for %d", maxMargin, defaultMargin))
		}
	case *slurmv1.JoinSpec_Static:
		checkGres(p, at+"static.gres", m.Static.GetGres())
	default:
		p.Add(at+"dynamic", "", "is required, or static: say dynamic: {} for a node that tells the controller what it has, static: {} for one of the controller's slurm.conf")
	}
}

// oneRelease are packages of Slurm that must be of one version on a node. The
// others whose names begin like theirs have versions of their own.
var oneRelease = regexp.MustCompile(`^(slurmd|slurm-client|slurm-(wlm|smd)(-.*)?|slurm-slurmd|slurm)$`)

func checkPackages(p *tasks.Problems, field string, list []*taskv1.NodePackage) {
	tasks.CheckPackages(p, field, list)
	var first *taskv1.NodePackage
	for i, pkg := range list {
		switch {
		case pkg.GetVersion() == "" || !oneRelease.MatchString(pkg.GetName()):
		case first == nil:
			first = pkg
		case pkg.GetVersion() != first.GetVersion():
			p.Add(fmt.Sprintf("%s[%d].version", field, i), pkg.GetVersion(), fmt.Sprintf("must be that of %s, which is %s: all of a node's Slurm is of one version", first.GetName(), first.GetVersion()))
		}
	}
}

func checkControllers(p *tasks.Problems, field string, list []string) {
	if len(list) == 0 {
		p.Add(field, "", "is required: name the controllers, as HOST or HOST:PORT, the primary first")
	}
	if len(list) > maxControllers {
		p.Add(field, fmt.Sprint(len(list)), fmt.Sprintf("must be %d at most", maxControllers))
	}
	seen := map[string]bool{}
	for i, c := range list {
		at := fmt.Sprintf("%s[%d]", field, i)
		name, port, hasPort := strings.Cut(c, ":")
		n, err := strconv.ParseUint(port, 10, 16)
		switch {
		case !oneHost.MatchString(name) || hasPort && (err != nil || n == 0):
			p.Add(at, c[:min(len(c), 80)], "must be HOST or HOST:PORT: for example ctl:6817")
		case seen[c]:
			p.Add(at, c, "is named twice")
		}
		seen[c] = true
	}
}

func checkGres(p *tasks.Problems, field string, list []*slurmv1.Gres) {
	if len(list) > maxGres {
		p.Add(field, fmt.Sprint(len(list)), fmt.Sprintf("must be %d at most", maxGres))
	}
	seen := map[string]bool{}
	for i, g := range list {
		at := fmt.Sprintf("%s[%d]", field, i)
		if !word.MatchString(g.GetName()) {
			p.Add(at+".name", g.GetName(), "must be a word of letters, digits, dots, hyphens and underscores: for example gpu")
		}
		if g.GetType() != "" && !word.MatchString(g.GetType()) {
			p.Add(at+".type", g.GetType(), "must be such a word: for example h100")
		}
		if g.GetCount() < 1 || g.GetCount() > maxCount {
			p.Add(at+".count", fmt.Sprint(g.GetCount()), fmt.Sprintf("must be between 1 and %d", maxCount))
		}
		if key := g.GetName() + ":" + g.GetType(); seen[key] {
			p.Add(at, key, "is given twice: give it once, with the whole count")
		} else {
			seen[key] = true
		}
		checkFiles(p, at+".files", g)
	}
}

func checkFiles(p *tasks.Problems, field string, g *slurmv1.Gres) {
	if n := len(g.GetFiles()); n > 0 && n != int(g.GetCount()) {
		p.Add(field, fmt.Sprint(n), fmt.Sprintf("must be as many as count, which is %d, or left out", g.GetCount()))
	}
	for i, f := range g.GetFiles() {
		if !plainPath.MatchString(f) || path.Clean(f) != f {
			p.Add(fmt.Sprintf("%s[%d]", field, i), f[:min(len(f), 80)], "must be an absolute, clean path: for example /dev/nvidia0")
		}
	}
}

func checkFeatures(p *tasks.Problems, field string, list []string) {
	if len(list) > maxFeatures {
		p.Add(field, fmt.Sprint(len(list)), fmt.Sprintf("must be %d at most", maxFeatures))
	}
	seen := map[string]bool{}
	for i, f := range list {
		if !word.MatchString(f) || seen[f] {
			p.Add(fmt.Sprintf("%s[%d]", field, i), f, "must be a word of letters, digits, dots, hyphens and underscores, given once: for example mw")
		}
		seen[f] = true
	}
}

func checkWait(p *tasks.Problems, d *durationpb.Duration) {
	if d != nil && (!d.IsValid() || d.AsDuration() < 0 || d.AsDuration() > maxWait) {
		p.Add("wait_for_jobs", fmt.Sprint(d.AsDuration()), fmt.Sprintf("must be between 0 and %v", maxWait))
	}
}

func checkReason(p *tasks.Problems, s string) {
	bad := func(r rune) bool { return r < ' ' || r == 0x7f || strings.ContainsRune(`"'[]\`, r) }
	if len(s) > maxReason || strings.ContainsFunc(s, bad) || strings.TrimSpace(s) != s {
		p.Add("reason", s[:min(len(s), 80)], fmt.Sprintf("must be one line of at most %d bytes, without quotes, brackets and backslashes", maxReason))
	}
}
