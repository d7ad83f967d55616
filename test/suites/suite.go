package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
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
	took                    time.Duration
	err                     error
}

// verdict is ok, or the reason why not.
func (r result) verdict() string {
	switch {
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

func (s suite) run(ctx context.Context, out io.Writer, verbose bool) result {
	begin := time.Now()
	r := result{suite: s.name}
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
	pkgs, err := s.expand(ctx)
	if err != nil {
		r.err = err
		fmt.Fprintln(out, err)
		return r
	}
	cmd := exec.CommandContext(ctx, "go", append(args, pkgs...)...)
	// A stop reaches the tests as an interrupt first, so that they clean up.
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = time.Minute
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: false}
	cmd.Stderr = out
	stdout, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err == nil {
		read(stdout, out, s.show, verbose, &r)
		err = cmd.Wait()
	}
	var exit *exec.ExitError
	if err != nil && (r.failed == 0 || !errors.As(err, &exit)) {
		r.err = err
		fmt.Fprintln(out, err)
	}
	r.took = time.Since(begin)
	return r
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
// of those that fail.
func read(in io.Reader, out io.Writer, show string, verbose bool, r *result) {
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
