package container

import (
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"

	containerv1 "github.com/gpuaas/millwright/proto/millwright/container/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
	"github.com/gpuaas/millwright/tasks/step"
)

const (
	minMemory   = 8 << 20
	maxMemory   = 1 << 50
	maxCPU      = 1 << 20
	maxList     = 256
	maxString   = 32 << 10
	maxSpecSize = 128 << 10 // of all arguments and variables: the kernel's limit is near
)

// hidden are directories of the node that no container may see, or hold: they
// are the keys to the node, or would take it over.
var hidden = []string{
	"/dev", "/proc", "/sys", "/etc/millwright", "/run/containerd", "/run/dbus", "/run/millwright", "/run/systemd",
	"/var/lib/containerd", "/var/lib/millwright", "/var/lib/millwright-server",
}

// taken are directories of the container that are not the user's.
var taken = []string{"/dev", "/proc", "/sys"}

// Validate implements [tasks.Task].
func (Run) Validate(s *containerv1.RunSpec) error {
	var p tasks.Problems
	checkName(&p, s.GetName())
	checkImage(&p, s.GetImage())
	checkWords(&p, s)
	if d := s.GetWorkingDirectory(); d != "" {
		checkPath(&p, "working_directory", d)
	}
	if u := s.GetUser(); u != "" && !regexp.MustCompile(`^[0-9]{1,9}(:[0-9]{1,9})?$`).MatchString(u) {
		p.Add("user", u, "must be UID or UID:GID, as numbers of at most nine digits: for example 1000:1000")
	}
	checkMounts(&p, s.GetMounts())
	checkDevices(&p, s.GetDevices())
	checkResources(&p, s.GetResources())
	if g := s.GetStopGrace(); g != nil && (!g.IsValid() || g.AsDuration() < 0 || g.AsDuration() > step.MaxStopGrace) {
		p.Add("stop_grace", fmt.Sprint(g.AsDuration()), fmt.Sprintf("must be between 0 and %v", step.MaxStopGrace))
	}
	return p.Err()
}

func checkName(p *tasks.Problems, name string) {
	switch {
	case name == "":
		p.Add("name", name, "is required: name the container")
	case len(name) > 48 || !regexp.MustCompile(`^[a-z0-9]+(-[a-z0-9]+)*$`).MatchString(name):
		p.Add("name", name[:min(len(name), 80)], "must be lower-case letters, digits and single hyphens between them, at most 48: for example web-1")
	}
}

func checkImage(p *tasks.Problems, i *containerv1.Image) {
	switch d := i.GetDigest(); {
	case d == "":
		p.Add("image.digest", d, "is required: give the digest of the image's manifest, which skopeo inspect shows")
	case !regexp.MustCompile(`^sha256:[0-9a-f]{64}$`).MatchString(d):
		p.Add("image.digest", d[:min(len(d), 80)], "must be sha256: and 64 lower-case hexadecimal digits: a tag may be another image tomorrow")
	}
	switch i.GetSource().(type) {
	case *containerv1.Image_OciArchive:
		checkPath(p, "image.oci_archive", i.GetOciArchive())
	default:
		p.Add("image.source", "", "is required: give oci_archive, the path of an archive on the node")
	}
}

// checkWords reports what is wrong with arguments and environment.
func checkWords(p *tasks.Problems, s *containerv1.RunSpec) {
	total := 0
	if len(s.GetArgv()) > maxList {
		p.Add("argv", fmt.Sprintf("%d words", len(s.GetArgv())), fmt.Sprintf("must have at most %d words", maxList))
	}
	for i, a := range s.GetArgv() {
		field := fmt.Sprintf("argv[%d]", i)
		if i == 0 && a == "" {
			p.Add(field, a, "is required: name the program")
		}
		checkWord(p, field, a)
		total += len(a)
	}
	if len(s.GetEnvironment()) > maxList {
		p.Add("environment", fmt.Sprintf("%d variables", len(s.GetEnvironment())), fmt.Sprintf("must have at most %d variables", maxList))
	}
	seen := map[string]bool{}
	for i, e := range s.GetEnvironment() {
		field := fmt.Sprintf("environment[%d]", i)
		key, _, ok := strings.Cut(e, "=")
		if !ok || !regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`).MatchString(key) {
			p.Add(field, key, "must be KEY=VALUE, KEY of letters, digits and _, not beginning with a digit")
		} else if seen[key] {
			p.Add(field, key, "is set twice: set each variable once")
		}
		seen[key] = true
		checkWord(p, field, e)
		total += len(e)
	}
	if total > maxSpecSize {
		p.Add("argv", fmt.Sprintf("%d bytes with the environment", total), fmt.Sprintf("must have at most %d bytes with the environment: put the rest into a file and mount it", maxSpecSize))
	}
}

func checkWord(p *tasks.Problems, field, value string) {
	if strings.ContainsRune(value, 0) {
		p.Add(field, "", "may not hold a zero byte")
	}
	if len(value) > maxString {
		p.Add(field, value[:64]+"...", fmt.Sprintf("must have at most %d bytes", maxString))
	}
}

// checkPath reports what is wrong with a path.
func checkPath(p *tasks.Problems, field, value string) bool {
	switch {
	case value == "":
		p.Add(field, value, "is required: give an absolute path")
	case len(value) > 4095:
		p.Add(field, value[:64]+"...", "is longer than 4095 bytes: shorten it")
	case strings.ContainsFunc(value, func(r rune) bool { return r < ' ' || r == 0x7f }):
		p.Add(field, "", "may not hold control characters")
	case !strings.HasPrefix(value, "/"):
		p.Add(field, value, "must be an absolute path: begin it with /")
	case path.Clean(value) != value:
		p.Add(field, value, fmt.Sprintf("must be a clean path, without //, /./, /../ or a slash at its end: write %q", path.Clean(value)))
	default:
		return true
	}
	return false
}

func checkMounts(p *tasks.Problems, mounts []*containerv1.BindMount) {
	if len(mounts) > maxList {
		p.Add("mounts", fmt.Sprintf("%d mounts", len(mounts)), fmt.Sprintf("must be at most %d", maxList))
	}
	var targets []string
	for i, m := range mounts {
		source, target := fmt.Sprintf("mounts[%d].source", i), fmt.Sprintf("mounts[%d].target", i)
		if checkPath(p, source, m.GetSource()) {
			for _, dir := range hidden {
				if step.Within(m.GetSource(), dir) || step.Within(dir, m.GetSource()) {
					p.Add(source, m.GetSource(), "is, is in, or holds "+dir+", which no container may see: choose another directory")
					break
				}
			}
		}
		if checkPath(p, target, m.GetTarget()) {
			switch {
			case m.GetTarget() == "/" || slices.ContainsFunc(taken, func(d string) bool { return step.Within(m.GetTarget(), d) }):
				p.Add(target, m.GetTarget(), "must not be /, nor in /dev, /proc or /sys: choose another path in the container")
			case slices.Contains(targets, m.GetTarget()):
				p.Add(target, m.GetTarget(), "is mounted on twice: name each path once")
			}
			targets = append(targets, m.GetTarget())
		}
	}
}

func checkDevices(p *tasks.Problems, devices []string) {
	const most = 64
	if len(devices) > most {
		p.Add("devices", fmt.Sprintf("%d devices", len(devices)), fmt.Sprintf("must be at most %d", most))
	}
	for i, d := range devices {
		field := fmt.Sprintf("devices[%d]", i)
		if !regexp.MustCompile(`^` + regexp.QuoteMeta(host.CDIKind) + `=(GPU|MIG)-[0-9a-zA-Z-]{1,60}$`).MatchString(d) {
			p.Add(field, d[:min(len(d), 80)], "must be the CDI name of a GPU or MIG device, such as "+host.CDIKind+"=MIG-1b2c...")
		} else if slices.Contains(devices[:i], d) {
			p.Add(field, d, "is named twice: name each device once")
		}
	}
}

func checkResources(p *tasks.Problems, r *containerv1.Resources) {
	if m := r.GetMemoryBytes(); m != 0 && (m < minMemory || m > maxMemory) {
		p.Add("resources.memory_bytes", fmt.Sprint(m), fmt.Sprintf("must be at least %d (8 MiB) and at most 1 PiB: leave it out for no limit", minMemory))
	}
	if c := r.GetCpuMillis(); c != 0 && (c < 10 || c > maxCPU) {
		p.Add("resources.cpu_millis", fmt.Sprint(c), fmt.Sprintf("must be between 10 and %d: 1000 is one processor; leave it out for no limit", maxCPU))
	}
}
