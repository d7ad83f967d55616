// Command mutants takes away one guard after the other, and asks that the tests
// notice. A guard is taken away by the go tool's overlay: the compiler reads a
// changed copy of one file, and the product has no seam for it.
//
//	go run ./test/mutants            all of them
//	go run ./test/mutants -only NAME one of them, with what its judge said
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"time"
)

// What a judge may take, and what it may take where it must be slow.
const (
	quickTime = 4 * time.Minute
	slowTime  = 8 * time.Minute
	// compileTime is on top of it.
	compileTime = 5 * time.Minute
)

// mutant is one guard that is taken away.
type mutant struct {
	name string
	// guards is the promise that it stands for.
	guards string
	// file is where it is, and old the text that is replaced by new. It must
	// be there exactly once.
	file, old, new string
	// judge are the packages whose tests must fail, and run which of them.
	judge []string
	run   string
	// packaged judges test the programs that are packaged: these are built
	// without the guard too, and with it again afterwards. They take longer.
	packaged bool
}

// changed is the content of the file without the guard.
func (m mutant) changed(root string) ([]byte, error) {
	b, err := os.ReadFile(filepath.Join(root, m.file))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", m.name, err)
	}
	if n := strings.Count(string(b), m.old); n != 1 {
		return nil, fmt.Errorf("%s: the text that it replaces is in %s %d times, want once: bring the list up to date", m.name, m.file, n)
	}
	return []byte(strings.Replace(string(b), m.old, m.new, 1)), nil
}

// overlay writes what the go tool needs to compile without the guard, and
// returns the file that names it.
func (m mutant) overlay(root, dir string) (string, error) {
	b, err := m.changed(root)
	if err != nil {
		return "", err
	}
	copied := filepath.Join(dir, m.name+".go")
	list, err := json.Marshal(map[string]map[string]string{"Replace": {filepath.Join(root, m.file): copied}})
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, m.name+".json")
	return path, errors.Join(os.WriteFile(copied, b, 0o600), os.WriteFile(path, list, 0o600))
}

func (m mutant) time() time.Duration {
	if m.packaged {
		return slowTime
	}
	return quickTime
}

// args are those of the go tool.
func (m mutant) args() []string {
	args := []string{"test", "-count=1", "-vet=off", "-failfast", "-timeout=" + m.time().String()}
	if m.run != "" {
		args = append(args, "-run="+m.run)
	}
	return append(args, m.judge...)
}

// verdict is what a judge said.
type verdict string

const (
	killed   verdict = "noticed"
	survived verdict = "NOT NOTICED"
	broken   verdict = "DOES NOT COMPILE"
	late     verdict = "TOOK TOO LONG"
	biased   verdict = "JUDGE FAILS WITHOUT IT" // and can say nothing
)

// judgement reads the output of go test.
func judgement(out string, err error) verdict {
	switch {
	case err == nil:
		return survived
	case strings.Contains(out, "[build failed]") || strings.Contains(out, "[setup failed]"):
		return broken
	case strings.Contains(out, "panic: test timed out"):
		return late
	case strings.Contains(out, "--- FAIL"):
		return killed
	}
	return broken
}

// ask runs the judge with an overlay, or without one. It goes by the
// environment, so that the programs that a test builds are built with it too.
func (m mutant) ask(ctx context.Context, root, overlay string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, m.time()+compileTime)
	defer cancel()
	if m.packaged {
		if out, err := command(ctx, root, overlay, "make", "-s", "deb").CombinedOutput(); err != nil {
			return string(out) + "[build failed]", fmt.Errorf("build the packages: %w", err)
		}
	}
	out, err := command(ctx, root, overlay, "go", m.args()...).CombinedOutput()
	return string(out), err
}

func command(ctx context.Context, root, overlay, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = root
	if overlay != "" {
		cmd.Env = append(os.Environ(), "GOFLAGS="+strings.TrimSpace(os.Getenv("GOFLAGS")+" -overlay="+overlay))
	}
	return cmd
}

// restore builds what was packaged without the guard with it again, also when
// the run was interrupted.
func (m mutant) restore(ctx context.Context, root string) error {
	if !m.packaged {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), compileTime)
	defer cancel()
	if out, err := command(ctx, root, "", "make", "-s", "deb").CombinedOutput(); err != nil {
		return fmt.Errorf("%s: dist holds packages without the guard; run make deb: %w\n%s", m.name, err, out)
	}
	return nil
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	err := run(ctx, os.Args[1:], os.Stdout)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "mutants:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, out io.Writer) error {
	only := ""
	flags := flag.NewFlagSet("mutants", flag.ContinueOnError)
	flags.StringVar(&only, "only", "", "only the mutant of this name, with what its judge said")
	if err := flags.Parse(args); err != nil {
		return err
	}
	root, err := os.Getwd()
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "mutants-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir) //nolint:errcheck // it is in the directory for temporary files
	good, bad, asked := map[string]bool{}, 0, 0
	for _, m := range mutants() {
		if only != "" && only != m.name {
			continue
		}
		asked++
		began := time.Now()
		v, said, err := m.try(ctx, root, dir, good)
		if err != nil {
			return err
		}
		if v != killed {
			bad++
		}
		fmt.Fprintf(out, "%-28s %-12s %5.1fs  %s\n", m.name, v, time.Since(began).Seconds(), m.guards)
		if only != "" || v == biased {
			fmt.Fprintln(out, said)
		}
	}
	fmt.Fprintf(out, "%d guards: %d noticed, %d not\n", asked, asked-bad, bad)
	if bad > 0 {
		return errors.New("a guard can go and no test says so")
	}
	return nil
}

// try asks the judge, which must be content with the product as it is.
func (m mutant) try(ctx context.Context, root, dir string, good map[string]bool) (v verdict, said string, err error) {
	overlay, err := m.overlay(root, dir)
	if err != nil {
		return "", "", err
	}
	if key := strings.Join(m.args(), " "); !good[key] {
		if said, err := m.ask(ctx, root, ""); err != nil {
			return biased, said, ctx.Err()
		}
		good[key] = true
	}
	said, failed := m.ask(ctx, root, overlay)
	if err := m.restore(ctx, root); err != nil {
		return "", "", err
	}
	if ctx.Err() != nil {
		return "", "", ctx.Err()
	}
	return judgement(said, failed), said, nil
}
