package packages

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"

	"github.com/gpuaas/millwright/agent/internal/child"
	"github.com/gpuaas/millwright/tasks/host"
)

// dnf are the packages of a node with rpm and dnf of version 4, as RHEL 8 and 9
// have it. A version is written as rpm does, [EPOCH:]VERSION-RELEASE.
type dnf struct{ *machine }

func (d *dnf) program(name string) string { return filepath.Join(d.cfg.Bin, name) }

// read runs a program that only reads.
func (d *dnf) read(ctx context.Context, argv ...string) (child.Result, error) {
	res, err := d.cfg.Children.Run(ctx, child.Spec{Argv: argv, Timeout: readTime, MaxOutput: 4 << 20})
	if errors.Is(err, fs.ErrNotExist) {
		err = fmt.Errorf("%w: %w", host.ErrNoPackageManager, err)
	}
	return res, err
}

var (
	rpmName    = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9+._-]*$`)
	rpmVersion = regexp.MustCompile(`^([0-9]+:)?[A-Za-z0-9.+~^_]+-[A-Za-z0-9.+~^_]+$`)
)

// checkRPM refuses what rpm and dnf could take for something else than a package.
func checkRPM(name, version string) error {
	if !rpmName.MatchString(name) {
		return fmt.Errorf("package %q: not a name of a package: %w", name, fs.ErrInvalid)
	}
	if version != "" && !rpmVersion.MatchString(version) {
		return fmt.Errorf("package %s: version %q: not a version and a release: %w", name, version, fs.ErrInvalid)
	}
	return nil
}

func checkRPMs(names []string) error {
	for _, n := range names {
		if err := checkRPM(n, ""); err != nil {
			return err
		}
	}
	return nil
}

// architectures are those whose packages are for this node.
func architectures() []string {
	native := runtime.GOARCH
	switch native {
	case "amd64":
		native = "x86_64"
	case "arm64":
		native = "aarch64"
	}
	return []string{native, "noarch"}
}

// PackageManager implements host.PackageReader.
func (d *dnf) PackageManager(context.Context) (host.PackageManager, error) {
	l, err := d.locks()
	if err != nil {
		return host.PackageManager{}, err
	}
	m := host.PackageManager{Name: host.DNF}
	if l.file == "" {
		m.HoldNeeds = versionlock
	}
	return m, nil
}

// rpmFormat is what is asked of each package: name, version and architecture.
const rpmFormat = `%{NAME}\t%|EPOCH?{%{EPOCH}:}:{}|%{VERSION}-%{RELEASE}\t%{ARCH}\n`

// Packages implements host.PackageReader.
func (d *dnf) Packages(ctx context.Context, names []string) ([]host.PackageStatus, error) {
	if len(names) == 0 {
		return nil, nil
	}
	if err := checkRPMs(names); err != nil {
		return nil, err
	}
	// It exits with the number of those that it does not know.
	res, err := d.read(ctx, append([]string{d.program("rpm"), "--query", "--queryformat", rpmFormat, "--"}, names...)...)
	if err != nil {
		return nil, fmt.Errorf("read packages: %w", err)
	}
	found, err := parseQuery(string(res.Stdout), names)
	if err != nil {
		return nil, fmt.Errorf("read packages: rpm exited with code %d: %w: %s", res.ExitCode, err, oneLine(res.Stderr))
	}
	brought, err := d.brought()
	if err != nil {
		return nil, err
	}
	half, err := d.underway()
	if err != nil {
		return nil, err
	}
	l, err := d.locks()
	if err != nil {
		return nil, err
	}
	out := make([]host.PackageStatus, 0, len(names))
	for _, n := range names {
		st := found[n]
		st.Name = n
		if _, ok := half[n]; ok && st.State == installed {
			st.State = "half-configured" // its scripts may not have run
		}
		st.Held = st.State != "" && l.holds(n)
		st.Ours = st.State == installed && brought[n] == st.Version
		out = append(out, st)
	}
	return out, nil
}

var (
	errQuery  = errors.New("not an answer of rpm")
	unknownTo = regexp.MustCompile(`^package (\S+) is not installed$`)
)

// parseQuery reads a line for each package that is installed: name, version and
// architecture, with tabs between. Each of names has an answer.
func parseQuery(text string, names []string) (map[string]host.PackageStatus, error) {
	found, answered := map[string]host.PackageStatus{}, map[string]bool{}
	for line := range strings.Lines(text) {
		line = strings.TrimSuffix(line, "\n")
		if m := unknownTo.FindStringSubmatch(line); m != nil {
			answered[m[1]] = true
			continue
		}
		f := strings.Split(line, "\t")
		if len(f) != 3 {
			return nil, fmt.Errorf("%q: %w", line, errQuery)
		}
		answered[f[0]] = true
		found[f[0]] = together(found[f[0]], host.Package{Name: f[0], Version: f[1], Architecture: f[2]})
	}
	for _, n := range names {
		if !answered[n] {
			return nil, fmt.Errorf("nothing is said of %s: %w", n, errQuery)
		}
	}
	return found, nil
}

// together adds an instance of a package to what is known of it. A package of
// another architecture, as for programs of 32 bits, only counts by itself; two
// of this node's are what an interrupted transaction leaves.
func together(have host.PackageStatus, p host.Package) host.PackageStatus {
	ours := slices.Contains(architectures(), p.Architecture)
	switch {
	case have.State == "", ours && !slices.Contains(architectures(), have.Architecture):
		return host.PackageStatus{Package: p, State: installed}
	case ours:
		have.State, have.Version = host.InstalledTwice, have.Version+" and "+p.Version
	}
	return have
}

// PackageVersions implements host.PackageReader.
func (d *dnf) PackageVersions(ctx context.Context, name string) ([]string, error) {
	if err := checkRPM(name, ""); err != nil {
		return nil, err
	}
	a, err := d.ask(ctx, question{Name: name})
	if err != nil {
		return nil, fmt.Errorf("look for package %s: %w", name, err)
	}
	return a.Versions, nil
}

// ReadPackage implements host.PackageReader.
func (d *dnf) ReadPackage(ctx context.Context, path string) (host.Package, host.PackageFile, error) {
	pkg, err := d.packageIn(ctx, path)
	if err != nil {
		return host.Package{}, host.PackageFile{}, err
	}
	sum, err := digest(path, io.Discard)
	if err != nil {
		return host.Package{}, host.PackageFile{}, err
	}
	return pkg, host.PackageFile{Path: path, SHA256: sum}, nil
}

func (d *dnf) packageIn(ctx context.Context, path string) (host.Package, error) {
	if err := regular(path); err != nil {
		return host.Package{}, err
	}
	// A signature says nothing that the digest, which was signed, does not.
	res, err := d.read(ctx, d.program("rpm"), "--query", "--nosignature", "--queryformat", rpmFormat, "--package", "--", path)
	if err != nil {
		return host.Package{}, fmt.Errorf("package file %s: %w", path, err)
	}
	f := strings.Split(strings.TrimSuffix(string(res.Stdout), "\n"), "\t")
	if res.ExitCode != 0 || len(f) != 3 {
		return host.Package{}, fmt.Errorf("package file %s: %s: %w", path, oneLine(res.Stderr), fs.ErrInvalid)
	}
	return host.Package{Name: f[0], Version: f[1], Architecture: f[2]}, checkRPM(f[0], f[1])
}

// versionlock is the package of the plugin that holds versions. dnf.conf's
// excludepkgs would hold them too, but dnf 4 reads its configuration from one
// file, which is the site's: it has no directory for others' parts of it.
const versionlock = "python3-dnf-plugin-versionlock"

// locklist is the plugin's file, of which each line is a package in a version,
// or with ! before it one that is not to be had.
type locklist struct {
	file  string // empty: the plugin is not there, or switched off
	lines []string
}

// locks reads what is held.
func (d *dnf) locks() (locklist, error) {
	conf := filepath.Join(d.cfg.Plugins, "versionlock.conf")
	b, err := os.ReadFile(conf)
	if errors.Is(err, fs.ErrNotExist) {
		return locklist{}, nil
	}
	if err != nil {
		return locklist{}, fmt.Errorf("read what is held: %w", err)
	}
	l := locklist{file: lockFile(string(b))}
	if l.file == "" {
		return l, nil
	}
	b, err = os.ReadFile(l.file)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return locklist{}, fmt.Errorf("read what is held: %w", err)
	}
	if text := strings.TrimSuffix(string(b), "\n"); text != "" {
		l.lines = strings.Split(text, "\n")
	}
	return l, nil
}

// lockFile returns the file that the plugin's configuration names, or nothing
// when the plugin is switched off.
func lockFile(conf string) string {
	file := ""
	for line := range strings.Lines(conf) {
		key, value, _ := strings.Cut(line, "=")
		switch key, value = strings.TrimSpace(key), strings.TrimSpace(value); key {
		case "enabled":
			if !slices.Contains([]string{"1", "yes", "true", "on"}, strings.ToLower(value)) {
				return ""
			}
		case "locklist":
			if filepath.IsAbs(value) {
				file = value
			}
		}
	}
	return file
}

// holds reports whether a line holds the package.
func (l locklist) holds(name string) bool {
	return slices.ContainsFunc(l.lines, func(line string) bool { return lockedBy(line) == name })
}

var lockLine = regexp.MustCompile(`^([^!#\s]\S*?)(-([0-9]+:)?[0-9*][^-\s]*(-[^-\s]+)?)?$`)

// lockedBy returns the name of the package that a line of the file holds, or
// nothing. The name stands alone or before a version.
func lockedBy(line string) string {
	m := lockLine.FindStringSubmatch(strings.TrimSpace(line))
	if m == nil {
		return ""
	}
	for _, arch := range architectures() {
		if name, ok := strings.CutSuffix(m[1], "."+arch); ok {
			return name
		}
	}
	return m[1]
}

// lockMark stands before a line that Millwright has added.
const lockMark = "# Added by Millwright"

// locked is what the file is with packages held.
func (l locklist) locked(list []host.PackageStatus) []string {
	out := slices.Clone(l.lines)
	for _, p := range list {
		version := p.Version
		if !strings.Contains(version, ":") {
			version = "0:" + version
		}
		out = append(out, lockMark, p.Name+"-"+version+".*")
	}
	return out
}

// unlocked is what the file is without what holds a package.
func (l locklist) unlocked(names []string) []string {
	var out []string
	for _, line := range l.lines {
		if !slices.Contains(names, lockedBy(line)) {
			out = append(out, line)
			continue
		}
		if n := len(out); n > 0 && out[n-1] == lockMark {
			out = out[:n-1]
		}
	}
	return out
}
