package packages

import (
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/gpuaas/millwright/tasks/host"
)

// solver asks dnf by its own interface, in Python: what its command line says is
// a table for people, in columns of the terminal's width.
//
//go:embed solve.py
var solver string

// question is what the solver is asked.
type question struct {
	Architectures []string `json:"architectures"`
	// Name asks for the versions of one package.
	Name string `json:"name,omitempty"`
	// Install, Files and Remove ask what a change would change.
	Install []wanted `json:"install,omitempty"`
	Files   []string `json:"files,omitempty"`
	Remove  []string `json:"remove,omitempty"`
}

type wanted struct {
	Name         string `json:"name"`
	Version      string `json:"version"`
	Architecture string `json:"architecture"`
}

// answer is what it says: one of the first four when dnf will not.
type answer struct {
	Missing    string `json:"missing"`
	Repository string `json:"repository"`
	Problem    string `json:"problem"`
	Error      string `json:"error"`

	Versions []string `json:"versions"`
	Install  []wanted `json:"install"`
	Replace  []wanted `json:"replace"`
	Remove   []wanted `json:"remove"`
}

// refused is dnf's no in the terms of package host.
func (a answer) refused() error {
	conflict := strings.Contains(a.Problem, "conflicts with") || strings.Contains(a.Problem, "installed package") ||
		strings.Contains(a.Problem, "obsoletes") || strings.Contains(a.Problem, "protected packages")
	switch {
	case a.Missing != "":
		return fmt.Errorf("%w: dnf says: %s", host.ErrNoPackage, oneLine([]byte(a.Missing)))
	case a.Repository != "":
		return fmt.Errorf("%w: run dnf makecache; dnf says: %s", host.ErrNoPackage, oneLine([]byte(a.Repository)))
	case conflict:
		return fmt.Errorf("%w: dnf says: %s", host.ErrOtherPackages, oneLine([]byte(a.Problem)))
	case a.Problem != "":
		return fmt.Errorf("%w: dnf says: %s", host.ErrNoPackage, oneLine([]byte(a.Problem)))
	case a.Error != "":
		return fmt.Errorf("dnf says: %s", oneLine([]byte(a.Error)))
	}
	return nil
}

// parseAnswer reads the last line that the solver wrote: plugins of dnf may have
// written others.
func parseAnswer(out []byte) (answer, error) {
	var a answer
	out = bytes.TrimSpace(out)
	if err := json.Unmarshal(out[bytes.LastIndexByte(out, '\n')+1:], &a); err != nil {
		return a, fmt.Errorf("read dnf's answer %q: %w", oneLine(out), err)
	}
	return a, nil
}

var errInterpreter = errors.New("its first line names no interpreter")

// interpreter returns the command line of the Python in which dnf runs, by the
// first line of its program: it is not the same one everywhere.
func interpreter(program string) ([]string, error) {
	b, err := os.ReadFile(program)
	if err != nil {
		return nil, fmt.Errorf("look for dnf's interpreter: %w", err)
	}
	line, _, _ := strings.Cut(string(b[:min(len(b), 256)]), "\n")
	words := strings.Fields(strings.TrimPrefix(line, "#!"))
	if !strings.HasPrefix(line, "#!/") || len(words) == 0 {
		return nil, fmt.Errorf("look for dnf's interpreter in %s: %w", program, errInterpreter)
	}
	return words, nil
}

// ask asks the solver. It changes nothing; it waits where dnf does for another
// that fetches lists.
func (d *dnf) ask(ctx context.Context, q question) (answer, error) {
	q.Architectures = architectures()
	python, err := interpreter(d.program("dnf"))
	if err != nil {
		return answer{}, err
	}
	text, err := json.Marshal(q)
	if err != nil {
		return answer{}, fmt.Errorf("ask dnf: %w", err)
	}
	res, err := d.read(ctx, append(python, "-c", solver, string(text))...)
	if err != nil {
		return answer{}, fmt.Errorf("ask dnf: %w", err)
	}
	if res.ExitCode != 0 {
		return answer{}, fmt.Errorf("ask dnf: it exited with code %d: %s", res.ExitCode, lastOf(res.Stderr))
	}
	a, err := parseAnswer(res.Stdout)
	if err != nil {
		return a, err
	}
	return a, a.refused()
}

// lastOf is the end of what a program wrote, where Python says what was wrong.
func lastOf(b []byte) string {
	b = bytes.TrimSpace(b)
	return oneLine(b[max(0, len(b)-1000):])
}

// ResolvePackages implements host.PackageReader.
func (d *dnf) ResolvePackages(ctx context.Context, set host.PackageSet) (host.PackageChange, error) {
	if err := checkDigests(set.Files); err != nil {
		return host.PackageChange{}, err
	}
	q, inFile := question{}, map[string]bool{}
	for _, f := range set.Files {
		p, err := d.packageIn(ctx, f.Path)
		if err != nil {
			return host.PackageChange{}, err
		}
		inFile[p.Name] = true
		q.Files = append(q.Files, f.Path)
	}
	for _, p := range set.Packages {
		if err := checkRPM(p.Name, p.Version); err != nil {
			return host.PackageChange{}, err
		}
		if !inFile[p.Name] {
			q.Install = append(q.Install, wanted(p))
		}
	}
	a, err := d.ask(ctx, q)
	if err != nil {
		return host.PackageChange{}, err
	}
	return host.PackageChange{Install: pins(a.Install), Replace: pins(a.Replace), Remove: pins(a.Remove)}, nil
}

func pins(list []wanted) []host.Package {
	var out []host.Package
	for _, p := range list {
		out = append(out, host.Package(p))
	}
	return out
}
