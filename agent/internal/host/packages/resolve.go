package packages

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/gpuaas/millwright/agent/internal/child"
	"github.com/gpuaas/millwright/tasks/host"
)

// ReadPackage implements host.PackageReader.
func (a *apt) ReadPackage(ctx context.Context, path string) (host.Package, host.PackageFile, error) {
	pkg, err := a.packageIn(ctx, path)
	if err != nil {
		return host.Package{}, host.PackageFile{}, err
	}
	sum, err := digest(path, io.Discard)
	if err != nil {
		return host.Package{}, host.PackageFile{}, err
	}
	return pkg, host.PackageFile{Path: path, SHA256: sum}, nil
}

func (a *apt) packageIn(ctx context.Context, path string) (host.Package, error) {
	if err := regular(path); err != nil {
		return host.Package{}, err
	}
	res, err := a.read(ctx, "/usr/bin/dpkg-deb", "--field", path, "Package", "Version", "Architecture")
	if err != nil {
		return host.Package{}, fmt.Errorf("package file %s: %w", path, err)
	}
	if res.ExitCode != 0 {
		return host.Package{}, fmt.Errorf("package file %s: %s: %w", path, oneLine(res.Stderr), fs.ErrInvalid)
	}
	var p host.Package
	for line := range strings.Lines(string(res.Stdout)) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), ": ")
		switch key {
		case "Package":
			p.Name = value
		case "Version":
			p.Version = value
		case "Architecture":
			p.Architecture = value
		}
	}
	return p, check(p.Name, p.Version)
}

// regular refuses what is no file that can be read.
func regular(path string) error {
	if !filepath.IsAbs(path) {
		return fmt.Errorf("package file %q: not an absolute path: %w", path, fs.ErrInvalid)
	}
	info, err := os.Stat(path)
	if err != nil {
		return fmt.Errorf("package file: %w", err)
	}
	if !info.Mode().IsRegular() {
		return fmt.Errorf("package file %s: not a file: %w", path, fs.ErrInvalid)
	}
	return nil
}

// digest copies a file and returns its SHA-256.
func digest(path string, to io.Writer) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("package file: %w", err)
	}
	defer func() { _ = f.Close() }() // it was only read
	h := sha256.New()
	if _, err := io.Copy(io.MultiWriter(h, to), f); err != nil {
		return nil, fmt.Errorf("package file %s: %w", path, err)
	}
	return h.Sum(nil), nil
}

// ResolvePackages implements host.PackageReader.
func (a *apt) ResolvePackages(ctx context.Context, set host.PackageSet) (host.PackageChange, error) {
	if err := checkDigests(set.Files); err != nil {
		return host.PackageChange{}, err
	}
	words, err := a.arguments(ctx, set)
	if err != nil {
		return host.PackageChange{}, err
	}
	return a.simulate(ctx, "install", words)
}

func checkDigests(list []host.PackageFile) error {
	for _, f := range list {
		sum, err := digest(f.Path, io.Discard)
		if err != nil {
			return err
		}
		if !bytes.Equal(sum, f.SHA256) {
			return otherDigest(f.Path, sum, f.SHA256)
		}
	}
	return nil
}

func otherDigest(path string, have, want []byte) error {
	return fmt.Errorf("package file %s has the SHA-256 %x, want %x: %w", path, have, want, fs.ErrInvalid)
}

// arguments are those of apt-get install: a file where there is one for the
// package, else its name and version.
func (a *apt) arguments(ctx context.Context, set host.PackageSet) ([]string, error) {
	inFile := map[string]bool{}
	var words []string
	for _, f := range set.Files {
		p, err := a.packageIn(ctx, f.Path)
		if err != nil {
			return nil, err
		}
		inFile[p.Name] = true
		words = append(words, f.Path)
	}
	for _, p := range set.Packages {
		if err := check(p.Name, p.Version); err != nil {
			return nil, err
		}
		if inFile[p.Name] {
			continue
		}
		w := p.Name
		if p.Version != "" {
			w += "=" + p.Version
		}
		words = append(words, w)
	}
	return words, nil
}

// simulate asks apt what it would do. It changes nothing and takes no lock.
func (a *apt) simulate(ctx context.Context, verb string, words []string) (host.PackageChange, error) {
	argv := []string{"/usr/bin/apt-get", noCache, "-oDebug::NoLocking=1", "--simulate", "--yes",
		"--no-install-recommends", "-oAPT::Get::AutomaticRemove=false", "-oAPT::Get::Show-User-Simulation-Note=false", verb, "--"}
	res, err := a.read(ctx, append(argv, words...)...)
	if err != nil {
		return host.PackageChange{}, fmt.Errorf("ask apt-get to %s %s: %w", verb, strings.Join(words, " "), err)
	}
	if res.ExitCode != 0 {
		return host.PackageChange{}, aptError(res)
	}
	return parseSimulation(string(res.Stdout))
}

// aptError says why apt will not.
func aptError(res child.Result) error {
	text := oneLine(append(unmet(res.Stdout), res.Stderr...))
	for _, missing := range []string{"Unable to locate package", "was not found", "has no installation candidate", "unmet dependencies"} {
		if strings.Contains(text, missing) {
			return fmt.Errorf("%w: apt-get says: %s", host.ErrNoPackage, text)
		}
	}
	if strings.Contains(text, "Held packages were changed") {
		return fmt.Errorf("%w: apt-get says: %s", host.ErrOtherPackages, text)
	}
	return fmt.Errorf("apt-get exited with code %d: %s", res.ExitCode, text)
}

// unmet returns the part of apt's output that names dependencies which cannot be
// had.
func unmet(stdout []byte) []byte {
	i := bytes.Index(stdout, []byte("The following packages have unmet dependencies"))
	if i < 0 {
		return nil
	}
	return append(bytes.Clone(stdout[i:]), '\n')
}

// simulated is a line of a simulation, for example
//
//	Inst munge [0.5.14-1] (0.5.15-2 Debian:12.6/stable [amd64])
//	Remv munge [0.5.15-2]
var simulated = regexp.MustCompile(`^(Inst|Remv|Purg) (\S+)(?: \[([^\]]+)\])?(?: \((\S+)[^)]*\[([^\]]+)\]\))?`)

var errSimulation = errors.New("not a line of a simulation")

// parseSimulation reads what apt would do.
func parseSimulation(text string) (host.PackageChange, error) {
	var c host.PackageChange
	for line := range strings.Lines(text) {
		verb, _, _ := strings.Cut(line, " ")
		if verb != "Inst" && verb != "Remv" && verb != "Purg" {
			continue
		}
		m := simulated.FindStringSubmatch(line)
		if m == nil || verb == "Inst" && m[4] == "" {
			return c, fmt.Errorf("%q: %w", strings.TrimSpace(line), errSimulation)
		}
		switch {
		case verb != "Inst":
			c.Remove = append(c.Remove, host.Package{Name: m[2], Version: m[3]})
		case m[3] != "":
			c.Replace = append(c.Replace, host.Package{Name: m[2], Version: m[3], Architecture: m[5]})
		default:
			c.Install = append(c.Install, host.Package{Name: m[2], Version: m[4], Architecture: m[5]})
		}
	}
	return c, nil
}
