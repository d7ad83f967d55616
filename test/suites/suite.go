package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os/exec"
	"slices"
	"strings"
	"time"
)

// suite is a set of packages whose tests are one claim.
type suite struct {
	name     string
	about    string
	packages []string
	tags     string
	timeout  time.Duration
	parallel int    // packages at a time; 0: the go command's choice
	race     bool   // with the race detector
	show     string // the test whose output is printed also when it passes
}

// result is what ran.
type result struct {
	suite                   string
	passed, failed, skipped int
	took, limit             time.Duration
	err                     error
	notRun                  bool // its turn never came
}

// verdict is ok, or the reason why not.
func (r result) verdict() string {
	switch {
	case r.notRun:
		return "NOT RUN"
	case r.failed > 0:
		return "FAILED"
	case r.err != nil:
		return "BROKEN"
	case r.skipped > 0:
		return "SKIPPED"
	case r.passed == 0:
		return "EMPTY"
	}
	return "ok"
}

// line is one line of go test -json.
type line struct {
	Action  string
	Package string
	Test    string
	Output  string
}

// building is what a suite may take beyond its tests: the compiler's time.
const building = 3 * time.Minute

// run runs the suite and returns when all that it started has ended, whatever
// that does: once the suite's time is over, or ctx ends, it is made to.
func (s suite) run(ctx context.Context, out io.Writer, verbose bool) result {
	begin := time.Now()
	r := result{suite: s.name, limit: s.timeout}
	ctx, cancel := context.WithTimeoutCause(ctx, s.timeout+building, fmt.Errorf("%w: suite %s has not ended after %s", errTime, s.name, s.timeout+building))
	defer cancel()
	pkgs, err := s.expand(ctx)
	if err == nil {
		both := &shared{w: out}
		err = await(ctx, exec.Command("go", append(s.args(), pkgs...)...), both, func(stdout io.Reader) error { //nolint:noctx // await ends it
			return read(stdout, both, s.show, verbose, &r)
		})
	}
	var exit *exec.ExitError
	if err != nil && (r.failed == 0 || !errors.As(err, &exit)) {
		r.err = err
		fmt.Fprintln(out, err)
	}
	r.took = time.Since(begin)
	return r
}

func (s suite) args() []string {
	args := []string{"test", "-json", "-count=1", fmt.Sprintf("-timeout=%s", s.timeout)}
	if s.tags != "" {
		args = append(args, "-tags="+s.tags)
	}
	if s.race {
		args = append(args, "-race")
	}
	if s.parallel > 0 {
		args = append(args, fmt.Sprintf("-p=%d", s.parallel))
	}
	return args
}

// expand lists the packages, leaving out those that another suite has: a
// pattern that begins with a minus sign takes packages away.
func (s suite) expand(ctx context.Context) ([]string, error) {
	var want, drop []string
	for _, p := range s.packages {
		if rest, ok := strings.CutPrefix(p, "-"); ok {
			drop = append(drop, rest)
		} else {
			want = append(want, p)
		}
	}
	out, err := exec.CommandContext(ctx, "go", append([]string{"list", "-tags=" + s.tags}, want...)...).Output()
	if err != nil {
		return nil, fmt.Errorf("list packages of suite %s: %w", s.name, err)
	}
	var pkgs []string
	for _, p := range strings.Fields(string(out)) {
		keep := true
		for _, d := range drop {
			keep = keep && !strings.Contains(p+"/", "/millwright/"+d+"/")
		}
		if keep {
			pkgs = append(pkgs, p)
		}
	}
	return pkgs, nil
}

// read counts tests, not their subtests' parents twice, and prints the output
// of those that fail, and of those that never ended: that is where a program
// that was made to end says what it waited for.
func read(in io.Reader, out io.Writer, show string, verbose bool, r *result) error {
	kept := map[string][]string{}
	sc := bufio.NewScanner(in)
	sc.Buffer(nil, 64<<20)
	for sc.Scan() {
		var l line
		if json.Unmarshal(sc.Bytes(), &l) != nil {
			fmt.Fprintln(out, sc.Text())
			continue
		}
		key := l.Package + "\x00" + l.Test
		switch l.Action {
		case "run":
			kept[key] = nil
		case "output":
			if verbose || l.Test == "" && !strings.HasPrefix(l.Output, "ok ") && !strings.HasPrefix(l.Output, "PASS") && !strings.HasPrefix(l.Output, "?") {
				fmt.Fprint(out, l.Output)
			} else {
				kept[key] = append(kept[key], l.Output)
			}
		case "pass", "skip", "fail":
			r.count(l)
			if l.Action == "fail" || l.Test != "" && (l.Action == "skip" || l.Test == show) {
				fmt.Fprint(out, strings.Join(kept[key], ""))
			}
			delete(kept, key)
		case "build-output", "build-fail":
			fmt.Fprint(out, l.Output)
		}
	}
	for _, key := range slices.Sorted(maps.Keys(kept)) {
		pkg, test, _ := strings.Cut(key, "\x00")
		if test == "" {
			continue
		}
		fmt.Fprintf(out, "--- NEVER ENDED: %s %s\n%s", pkg, test, strings.Join(kept[key], ""))
		r.failed++
	}
	return sc.Err()
}

func (r *result) count(l line) {
	switch {
	case l.Test == "" && l.Action == "fail":
		r.failed++
	case l.Test == "":
	case l.Action == "pass":
		r.passed++
	case l.Action == "fail":
		r.failed++
	case l.Action == "skip":
		r.skipped++
	}
}
