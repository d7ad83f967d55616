package main

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/gpuaas/millwright/test/cluster"
	"github.com/gpuaas/millwright/test/testbed"
)

// What is killed.
const (
	agent  = "agent"
	shim   = "shim"
	server = "server"
)

// killer kills.
type killer struct {
	c      *cluster.Cluster
	nodes  []*testbed.Node
	killed map[string]int
	took   time.Duration
	out    io.Writer
}

func (k *killer) total() int { return k.killed[agent] + k.killed[shim] + k.killed[server] }

// run kills until it has killed as many as are asked for. Only a process that
// was there and is gone counts.
func (k *killer) run(ctx context.Context, o options) error {
	rng := rand.New(rand.NewPCG(o.seed, 0))
	for k.total() < o.kills {
		pause := time.NewTimer(time.Duration(500+rng.IntN(700)) * time.Millisecond)
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-pause.C:
		}
		what, n := agent, k.nodes[rng.IntN(len(k.nodes))]
		switch r := rng.IntN(20); {
		case r < 2:
			what = server
		case r < 9:
			what = shim
		}
		did, err := k.kill(ctx, what, n)
		if err != nil {
			return fmt.Errorf("kill %s on %s: %w", what, n.Name(), err)
		}
		if !did {
			continue
		}
		if k.killed[what]++; k.total()%50 == 0 {
			_, _ = fmt.Fprintf(k.out, "  %d killed: %d agents, %d shims, %d servers\n", k.total(), k.killed[agent], k.killed[shim], k.killed[server])
		}
	}
	return nil
}

func (k *killer) kill(ctx context.Context, what string, n *testbed.Node) (bool, error) {
	line := `pid=$(systemctl show -p MainPID --value millwrightd); test "$pid" != 0 && kill -9 "$pid" && echo killed; true`
	switch what {
	case server:
		if err := k.c.KillServer(ctx); err != nil {
			return false, err
		}
		return true, k.c.StartServer(ctx)
	case shim:
		line = `pid=$(pgrep -f '^[^ ]*millwrightd shim /' | shuf -n 1); test -n "$pid" && kill -9 "$pid" && echo killed; true`
	}
	out, err := n.Exec(ctx, "sh", "-c", line)
	if err != nil { // it may be booting
		return false, awaitUp(ctx, n)
	}
	return strings.Contains(string(out.Stdout), "killed"), nil
}
