// Command crash kills agent, shim and server, as whole programs on real nodes,
// at every crash point that their fault builds declare, in the middle of every
// kind of task, and lets every change of the host fail. A model judges each
// outcome. It needs root and what `make crash` builds.
//
// Which point a kind comes by is found out by a run without a kill. A point that
// no kind comes by fails the suite, and so does a case that ends otherwise than
// the model allows.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"time"
)

// limit is the time that the whole may take.
const limit = 25 * time.Minute

// options are the flags.
type options struct {
	point, kind, program string
	nodes, servers       int
	verbose              bool
}

func main() {
	var o options
	flag.StringVar(&o.point, "point", "", "only points whose names begin so")
	flag.StringVar(&o.kind, "kind", "", "only this kind, or kind and variant as the table prints them")
	flag.StringVar(&o.program, "program", "", "only this program: agent, shim or server")
	flag.IntVar(&o.nodes, "nodes", 5, "nodes on which agents and shims are killed")
	flag.IntVar(&o.servers, "servers", 3, "servers that are killed, each with a node of its own")
	flag.BoolVar(&o.verbose, "v", false, "print each case, and what the testbed does")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, o)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "crash: FAILED:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o options) error {
	begin := time.Now()
	level := slog.LevelWarn
	if o.verbose {
		level = slog.LevelInfo
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level}))
	points, err := enumerate(ctx)
	if err != nil {
		return err
	}
	if err := checkElsewhere(".", unreached(), points); err != nil {
		return err
	}
	s := &suite{options: o, log: log, points: points, report: newReport(points)}
	err = s.run(ctx)
	took := time.Since(begin)
	ok := s.report.show(os.Stdout, took, o)
	if took > limit {
		err = errors.Join(err, fmt.Errorf("it took %s, and may take %s", took.Round(time.Second), limit))
	}
	if err == nil && !ok {
		err = errors.New("not all is as it must be")
	}
	return err
}
