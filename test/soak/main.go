// Command soak kills the agent, the shim and the server of a cluster on real
// nodes at random, with SIGKILL, while tasks run, and then asks that nothing
// was done twice and nothing was lost: of what server and nodes recorded, and
// of the marks that commands left on the nodes' disks.
//
//	go run ./test/soak -kills 1000 -seed 1
//
// The seed decides who is killed and what is run; what falls together with
// what is up to the machine.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/gpuaas/millwright/test/cluster"
	"github.com/gpuaas/millwright/test/testbed"
)

const downTimeout = 2 * time.Minute

// options are the flags.
type options struct {
	kills, nodes int
	seed         uint64
}

func main() {
	o := options{}
	flag.IntVar(&o.kills, "kills", 1000, "how many processes are killed")
	flag.IntVar(&o.nodes, "nodes", 3, "on how many nodes")
	flag.Uint64Var(&o.seed, "seed", 1, "decides who is killed and what is run")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, o, os.Stdout)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "soak:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o options, out io.Writer) error {
	root, err := os.Getwd()
	if err != nil {
		return err
	}
	if _, err := os.Stat("dist/millwright-agent.deb"); err != nil {
		return fmt.Errorf("%w: run this as make soak, which builds it", err)
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	name := fmt.Sprintf("soak-%d", os.Getpid())
	bed, err := testbed.Up(ctx, testbed.Config{Name: name, Nodes: o.nodes, Owned: true, Log: log})
	if err != nil {
		return err
	}
	err = soak(ctx, o, bed, root, log, out)
	down, cancel := context.WithTimeout(context.WithoutCancel(ctx), downTimeout)
	defer cancel()
	return errors.Join(err, bed.Down(down))
}

func soak(ctx context.Context, o options, bed *testbed.Testbed, root string, log *slog.Logger, out io.Writer) error {
	c := cluster.New(bed, cluster.Config{Root: root, Policy: policy, Log: log})
	if err := c.Found(ctx); err != nil {
		return err
	}
	for _, n := range bed.Nodes() {
		if err := prepare(ctx, n); err != nil {
			return err
		}
		if err := c.Join(ctx, n); err != nil {
			return err
		}
		if err := allowReboots(ctx, n); err != nil {
			return err
		}
	}
	began := time.Now()
	_, _ = fmt.Fprintf(out, "%d nodes, %d kills, seed %d\n", o.nodes, o.kills, o.seed)
	w := newWork(c, bed.Nodes(), o.seed)
	stopWork := w.start(ctx)
	k := &killer{c: c, nodes: bed.Nodes(), killed: map[string]int{}, out: out}
	err := k.run(ctx, o)
	stopWork()
	if err != nil {
		return err
	}
	k.took = time.Since(began)
	return report(ctx, c, w, k, out)
}
