package script_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
	"google.golang.org/protobuf/encoding/protojson"

	"github.com/gpuaas/millwright/agent"
	"github.com/gpuaas/millwright/controlplane"
	nodev1 "github.com/gpuaas/millwright/proto/millwright/node/v1"
	"github.com/gpuaas/millwright/tasks/all"
	"github.com/gpuaas/millwright/tasks/tasktest/fakehost"
)

// TestCluster runs transcripts with the real control plane and real agents, in
// this process; only the nodes that the agents act upon are in memory. Besides
// exits and save they have:
//
//	found FOUNDING CONTEXT      found the control plane and start it
//	server stop|start           stop it, and start it again on the same port
//	agent NAME start|stop       start the node's agent with NAME.json as its join
//	                            bundle and policy.yaml as its policy, and stop it
//	node NAME VERB ARGS...      change the node: see fakehost.Node.Do
//	until PATTERN PROGRAM ARGS  run a program until its standard output matches
//	gpus NAME join|open|close   let a stand-in for a node with GPUs join with
//	                            NAME.json, and open and close its session
//	gpus NAME report|edge FILE  let it send a HealthReport or a HealthEdge
//	began NAME N                wait until the node has started N commands
func TestCluster(t *testing.T) {
	bin := build(t)
	testscript.Run(t, testscript.Params{
		Dir: filepath.Join("testdata", "cluster"),
		Setup: func(e *testscript.Env) error {
			environment(e, bin)
			c := &cluster{dir: e.WorkDir, nodes: map[string]*fakehost.Node{}, gpus: map[string]*gpuNode{}, running: map[string]*running{}}
			e.Values[clusterKey{}] = c
			e.Defer(func() {
				if err := c.stopAll(); err != nil {
					t.Errorf("stop cluster: %v", err)
				}
			})
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"exits": exits,
			"save":  save,
			"found": command(2, func(c *cluster, ts *testscript.TestScript, a []string) error {
				return c.found(ts.MkAbs(a[0]), ts.MkAbs(a[1]))
			}),
			"server": command(1, func(c *cluster, _ *testscript.TestScript, a []string) error { return c.tellServer(a[0]) }),
			"agent":  command(2, func(c *cluster, _ *testscript.TestScript, a []string) error { return c.tellAgent(a[0], a[1]) }),
			"node": command(2, func(c *cluster, _ *testscript.TestScript, a []string) error {
				return c.node(a[0]).Do(strings.Join(a[1:], " "))
			}),
			"gpus":  command(2, func(c *cluster, _ *testscript.TestScript, a []string) error { return c.tellGPUs(a[0], a[1], a[2:]) }),
			"until": until,
			"began": command(2, func(c *cluster, _ *testscript.TestScript, a []string) error { return c.began(a[0], a[1]) }),
		},
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
	})
}

type clusterKey struct{}

// command makes a command of a script that has at least n arguments.
func command(n int, do func(*cluster, *testscript.TestScript, []string) error) func(*testscript.TestScript, bool, []string) {
	return func(ts *testscript.TestScript, neg bool, args []string) {
		if neg || len(args) < n {
			ts.Fatalf("usage: at least %d arguments, and no !", n)
		}
		ts.Check(do(ts.Value(clusterKey{}).(*cluster), ts, args))
	}
}

// until runs a program again and again, for a while.
func until(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: until PATTERN PROGRAM ARGS...")
	}
	re, err := compile(args[0])
	ts.Check(err)
	ts.Check(poll(fmt.Sprintf("no match for %q", args[0]), func() bool {
		err := ts.Exec(args[1], args[2:]...)
		if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
			ts.Check(err)
		}
		return re.MatchString(ts.ReadFile("stdout"))
	}))
}

// poll waits until something holds, for a while.
func poll(otherwise string, holds func() bool) error {
	const patience = 30 * time.Second
	deadline := time.After(patience)
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for !holds() {
		select {
		case <-tick.C:
		case <-deadline:
			return fmt.Errorf("%s within %s", otherwise, patience)
		}
	}
	return nil
}

// cluster is a control plane with its nodes.
type cluster struct {
	dir     string
	address string
	nodes   map[string]*fakehost.Node
	gpus    map[string]*gpuNode
	running map[string]*running // by the node's name; "" is the control plane
}

// running is a program in this process.
type running struct {
	stop  context.CancelFunc
	group sync.WaitGroup
	err   error // how it ended; read it after group
}

// start runs a program.
func (c *cluster) start(name string, run func(context.Context) error) error {
	if c.running[name] != nil {
		return fmt.Errorf("%q runs already", name)
	}
	ctx, cancel := context.WithCancel(context.Background())
	r := &running{stop: cancel}
	r.group.Go(func() { r.err = run(ctx) })
	c.running[name] = r
	return nil
}

func (c *cluster) stop(name string) error {
	r := c.running[name]
	if r == nil {
		return fmt.Errorf("%q does not run", name)
	}
	delete(c.running, name)
	r.stop()
	r.group.Wait()
	return r.err
}

func (c *cluster) stopAll() error {
	var err error
	for _, n := range c.gpus {
		n.close()
		err = errors.Join(err, n.conn.Close())
	}
	for name := range c.running {
		err = errors.Join(err, c.stop(name))
	}
	return err
}

func (c *cluster) found(foundingFile, contextFile string) error {
	data, err := os.ReadFile(foundingFile)
	if err != nil {
		return err
	}
	bundle := &nodev1.FoundingBundle{}
	if err := protojson.Unmarshal(data, bundle); err != nil {
		return err
	}
	l, err := listen("127.0.0.1:0")
	if err != nil {
		return err
	}
	c.address = l.Addr().String()
	file, err := controlplane.Found(context.Background(), c.serverConfig(), bundle, "example.org")
	if err != nil {
		return err
	}
	out, err := protojson.Marshal(file)
	if err != nil {
		return err
	}
	if err := os.WriteFile(contextFile, out, 0o600); err != nil {
		return err
	}
	return c.serve(l)
}

func (c *cluster) serverConfig() controlplane.Config {
	return controlplane.Config{
		StateDir: filepath.Join(c.dir, "server"), AdvertiseAddress: c.address, Registry: all.Registry(),
		Logger: slog.New(slog.DiscardHandler), Version: "1.0.0", Sweep: 50 * time.Millisecond,
	}
}

func (c *cluster) serve(l net.Listener) error {
	http, err := listen("127.0.0.1:0")
	if err != nil {
		return err
	}
	cfg := c.serverConfig()
	cfg.Listener, cfg.HTTPListener = l, http
	return c.start("", controlplane.New(cfg).Run)
}

func (c *cluster) tellServer(what string) error {
	switch what {
	case "stop":
		return c.stop("")
	case "start":
		l, err := listen(c.address)
		if err != nil {
			return err
		}
		return c.serve(l)
	}
	return fmt.Errorf("server %s: stop or start", what)
}

func listen(address string) (net.Listener, error) {
	// While nobody listens, a client that tries again may be given the very port
	// as its own for a moment.
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	for {
		l, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
		if err == nil || !errors.Is(err, syscall.EADDRINUSE) || ctx.Err() != nil {
			return l, err
		}
	}
}

func (c *cluster) node(name string) *fakehost.Node {
	if c.nodes[name] == nil {
		c.nodes[name] = fakehost.New()
	}
	return c.nodes[name]
}

// began waits until a node has started so many commands.
func (c *cluster) began(name, count string) error {
	want, err := strconv.Atoi(count)
	if err != nil {
		return err
	}
	return poll("too few commands were started", func() bool { return c.node(name).Started() >= want })
}

func (c *cluster) tellAgent(name, what string) error {
	switch what {
	case "stop":
		return c.stop(name)
	case "start":
		dir := filepath.Join(c.dir, "nodes", name)
		for _, d := range []string{dir, filepath.Join(dir, "state"), filepath.Join(dir, "run")} {
			if err := os.MkdirAll(d, 0o700); err != nil {
				return err
			}
		}
		return c.start(name, agent.New(agent.Config{
			StateDir: filepath.Join(dir, "state"), RunDir: filepath.Join(dir, "run"),
			PolicyFile: filepath.Join(c.dir, "policy.yaml"), JoinFile: filepath.Join(c.dir, name+".json"),
			Executable: os.Args[0], Version: "1.0.0", Registry: all.Registry(),
			Logger: slog.New(slog.DiscardHandler), Hosts: c.node(name).Hosts(nil),
		}).Run)
	}
	return fmt.Errorf("agent %s %s: start or stop", name, what)
}
