// Command suites runs the test suites that the repository requires and says,
// for each, what was required and what ran. A suite that is missing, runs no
// test, or skips one has failed: what is not shown is not there.
//
// The list in suites.go only grows.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"
)

// budget is what all suites may take together. Continuous integration ends
// after 90 minutes without a word, and building comes first.
const budget = 75 * time.Minute

// errTime is why a suite was ended, or not begun.
var errTime = errors.New("out of time")

func main() {
	only := flag.String("only", "", "run only these suites, by name, separated by commas")
	verbose := flag.Bool("v", false, "print the output of tests that pass, too")
	limit := flag.Duration("budget", budget, "what all suites may take together; those that are not done by then have failed")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	err := adoptOrphans()
	ok := false
	if err == nil {
		ok, err = run(ctx, selected(*only), *limit, *verbose)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	if !ok || err != nil {
		stop()
		os.Exit(1)
	}
}

func selected(only string) []suite {
	if only == "" {
		return required
	}
	names := strings.Split(only, ",")
	var out []suite
	for _, s := range required {
		if slices.Contains(names, s.name) {
			out = append(out, s)
		}
	}
	return out
}

func run(ctx context.Context, suites []suite, limit time.Duration, verbose bool) (ok bool, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("%w: the %s for all suites together are over", errTime, limit))
	defer cancel()
	var results []result
	for _, s := range suites {
		r := result{suite: s.name, limit: s.timeout, notRun: true, err: context.Cause(ctx)}
		if r.err == nil {
			fmt.Printf("=== suite %s: %s\n", s.name, s.about)
			r = s.run(ctx, os.Stdout, verbose)
			endLeft(ctx, r.verdict() == "ok")
		}
		results = append(results, r)
		fmt.Printf("=== suite %s: %s in %s\n", s.name, r.verdict(), r.took.Round(time.Second))
		if r.notRun {
			fmt.Printf("    it was not begun: %v\n", r.err)
		}
	}
	return report(suites, results)
}

// report prints what was required against what ran, the longest first: a suite
// without a result, or without a test that passed or failed, did not run.
func report(suites []suite, results []result) (ok bool, err error) {
	fmt.Println()
	w := tabwriter.NewWriter(os.Stdout, 0, 4, 2, ' ', 0)
	fmt.Fprintln(w, "SUITE\tVERDICT\tPASSED\tFAILED\tSKIPPED\tTIME\tAT MOST")
	passed, failed, ran := 0, 0, 0
	var took time.Duration
	ok = len(results) > 0 && len(results) == len(suites)
	byTime := slices.SortedStableFunc(slices.Values(results), func(a, b result) int { return cmp.Compare(b.took, a.took) })
	for _, r := range byTime {
		fmt.Fprintf(w, "%s\t%s\t%d\t%d\t%d\t%s\t%s\n", r.suite, r.verdict(), r.passed, r.failed, r.skipped, r.took.Round(time.Second), r.limit)
		passed += r.passed
		failed += r.failed
		took += r.took
		if r.passed+r.failed > 0 {
			ran++
		}
		if r.verdict() != "ok" {
			ok = false
			failed = max(failed, 1)
		}
	}
	if err := w.Flush(); err != nil {
		return false, fmt.Errorf("write the report: %w", err)
	}
	fmt.Printf("\n%d suites required, %d run, in %s\n", len(suites), ran, took.Round(time.Second))
	fmt.Printf("%d passed, %d failed\n", passed, failed)
	return ok, nil
}
