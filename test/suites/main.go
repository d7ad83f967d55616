// Command suites runs the test suites that the repository requires and says,
// for each, what was required and what ran. A suite that is missing, runs no
// test, or skips one has failed: what is not shown is not there.
//
// The list in suites.go only grows.
package main

import (
	"context"
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

func main() {
	only := flag.String("only", "", "run only these suites, by name, separated by commas")
	verbose := flag.Bool("v", false, "print the output of tests that pass, too")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	ok, err := run(ctx, selected(*only), *verbose)
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

func run(ctx context.Context, suites []suite, verbose bool) (ok bool, err error) {
	var results []result
	for _, s := range suites {
		fmt.Printf("=== suite %s: %s\n", s.name, s.about)
		r := s.run(ctx, os.Stdout, verbose)
		results = append(results, r)
		fmt.Printf("=== suite %s: %s in %s\n", s.name, r.verdict(), r.took.Round(time.Second))
	}
	return report(suites, results)
}

// report prints what was required against what ran: a suite without a result,
// or without a test that passed or failed, did not run.
func report(suites []suite, results []result) (ok bool, err error) {
	fmt.Println()
	w := tabwriter.NewWriter(os.Stdout, 0, 4, 2, ' ', 0)
	fmt.Fprintln(w, "SUITE\tVERDICT\tPASSED\tFAILED\tSKIPPED\tTIME")
	passed, failed, ran := 0, 0, 0
	ok = len(results) > 0 && len(results) == len(suites)
	for _, r := range results {
		fmt.Fprintf(w, "%s\t%s\t%d\t%d\t%d\t%s\n", r.suite, r.verdict(), r.passed, r.failed, r.skipped, r.took.Round(time.Second))
		passed += r.passed
		failed += r.failed
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
	fmt.Printf("\n%d suites required, %d run\n", len(suites), ran)
	fmt.Printf("%d passed, %d failed\n", passed, failed)
	return ok, nil
}
