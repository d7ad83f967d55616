package main

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/gpuaas/millwright/test/cluster"
	"github.com/gpuaas/millwright/test/invariants/check"
	"github.com/gpuaas/millwright/test/testbed"
)

const (
	program = "/usr/local/bin/soak-mark"
	marks   = "/var/lib/soak/marks"
	policy  = "version: 1\nrules:\n  - allow: storage.mount\n  - allow: storage.unmount\n  - allow: container.run\n  - allow: container.stop\n  - allow: system.reboot\n  - allow: task.resolve\n  - allow: system.command\n    argv: [\"" + program + "\"]\n"
	// script writes its mark, stays for a while, and exits as it is told.
	script = "#!/bin/sh\n# soak-mark KEY SECONDS CODE\nmkdir -p /var/lib/soak\necho \"$1\" >>" + marks + "\nsleep \"$2\"\nexit \"$3\"\n"
	// containerNames is how many containers a node may have.
	containerNames = 2
	// workers are how many callers each node has.
	workers = 3
	// callTime bounds one call, with the times that it finds no server.
	callTime = 30 * time.Second
	// calls is how often a call is repeated.
	calls = 10
)

// work makes tasks and remembers what it was told of them.
type work struct {
	c     *cluster.Cluster
	nodes []*testbed.Node
	seed  uint64

	mu      sync.Mutex
	tasks   map[string]string // what was created, and its node; guarded by mu
	keys    map[string]string // the mark of each command that was created, and its node; guarded by mu
	refused int               // calls that never got an answer; guarded by mu
	// repeated are calls that were made once more with the same request id;
	// guarded by mu.
	repeated int
	cancels  int // guarded by mu
}

func newWork(c *cluster.Cluster, nodes []*testbed.Node, seed uint64) *work {
	return &work{c: c, nodes: nodes, seed: seed, tasks: map[string]string{}, keys: map[string]string{}}
}

// start lets callers work until stop is called, which waits for their end.
func (w *work) start(ctx context.Context) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	for i, n := range w.nodes {
		for j := range workers {
			caller := &caller{w: w, node: n.Name(), name: fmt.Sprintf("%s-%d", n.Name(), j), rng: rand.New(rand.NewPCG(w.seed, uint64(i*workers+j)))}
			wg.Go(func() { caller.run(ctx) })
		}
	}
	return func() { cancel(); wg.Wait() }
}

// caller makes one task after the other.
type caller struct {
	w          *work
	node, name string
	rng        *rand.Rand
	made       int
}

func (c *caller) run(ctx context.Context) {
	for ctx.Err() == nil {
		c.one()
		pause := time.NewTimer(time.Duration(200+c.rng.IntN(800)) * time.Millisecond)
		select {
		case <-ctx.Done():
		case <-pause.C:
		}
		pause.Stop()
	}
}

// one makes a task, which is not cut off in the middle: what was created must
// be known.
func (c *caller) one() {
	ctx, cancel := context.WithTimeout(context.Background(), callTime)
	defer cancel()
	c.made++
	key := fmt.Sprintf("mark-%s-%d-end", c.name, c.made)
	target := fmt.Sprintf("/mnt/soak%d", c.rng.IntN(3))
	box := fmt.Sprintf("soak%d", c.rng.IntN(containerNames))
	switch n := c.rng.IntN(200); { // seldom, as they take long
	case n == 0:
		c.create(ctx, "", "system.reboot", "reason: soak\n", "--allow-impact", "reboot")
		return
	case n < 14:
		c.create(ctx, "", "container.run", container(box, c.rng.IntN(3)))
		return
	case n < 18:
		c.create(ctx, "", "container.stop", "name: "+box+"\n")
		return
	}
	switch n := c.rng.IntN(10); {
	case n < 5:
		c.create(ctx, key, "system.command", command(key, c.rng.IntN(3), 0))
	case n == 5:
		c.create(ctx, key, "system.command", command(key, 0, 3))
	case n == 6:
		if id := c.create(ctx, key, "system.command", command(key, 5, 0)); id != "" {
			c.cancel(ctx, id)
		}
	case n < 9:
		c.create(ctx, "", "storage.mount", "target: "+target+"\ntmpfs:\n  size_bytes: \"1048576\"\n")
	default:
		c.create(ctx, "", "storage.unmount", "target: "+target+"\n")
	}
}

func command(key string, seconds, code int) string {
	return fmt.Sprintf("argv: [%s, %s, \"%d\", \"%d\"]\n", program, key, seconds, code)
}

// create makes a task; the id is empty when no answer came. Then the task may
// be there all the same, and its mark is judged only where it shows.
func (c *caller) create(ctx context.Context, key, kind, spec string, flags ...string) string {
	flags = append(flags, "--request-id", uuid.NewString())
	ids, err := c.w.c.Run(ctx, kind, c.node, spec, flags...)
	again := 0
	for ; err != nil && again < calls; again++ { // the answer was lost, or the server is down
		ids, err = c.w.c.Run(ctx, kind, c.node, spec, flags...)
	}
	c.w.mu.Lock()
	defer c.w.mu.Unlock()
	c.w.repeated += again
	if err != nil || len(ids) != 1 {
		c.w.refused++
		return ""
	}
	c.w.tasks[ids[0]] = c.node
	if key != "" {
		c.w.keys[key] = c.node
	}
	return ids[0]
}

func (c *caller) cancel(ctx context.Context, id string) {
	_, err := c.w.c.Millctl(ctx, "task", "cancel", id, "--reason", "soak")
	c.w.mu.Lock()
	defer c.w.mu.Unlock()
	if err != nil {
		c.w.refused++
		return
	}
	c.w.cancels++
}

// complete adds the keys of commands that left no mark, and what was created
// and is not known to the server.
func (w *work) complete(h *check.History) (lost []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	missing := maps.Clone(w.keys)
	for _, e := range h.Effects {
		delete(missing, e.Key)
	}
	for key, node := range missing {
		h.Effects = append(h.Effects, check.Effect{Node: node, Key: key})
	}
	for id := range w.tasks {
		if h.Server.Tasks[id] == nil {
			lost = append(lost, id)
		}
	}
	return lost
}
