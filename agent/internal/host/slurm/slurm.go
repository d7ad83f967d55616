// Package slurm asks and changes a Slurm cluster through its own programs, each
// a child process with a deadline.
//
// What they print is read as text: it is the same in all releases, where the
// JSON of a release is not that of the next. What cannot be understood is an
// error, never "idle", "drained" or "gone".
package slurm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/gpuaas/millwright/agent/internal/child"
	"github.com/gpuaas/millwright/agent/internal/clock"
	"github.com/gpuaas/millwright/agent/internal/crash"
	"github.com/gpuaas/millwright/tasks/host"
)

// Config is what a [Client] needs.
type Config struct {
	// Children runs Slurm's programs.
	Children *child.Runner
	// Find returns the path of a program, or an error that wraps fs.ErrNotExist.
	Find func(ctx context.Context, name string) (string, error)
	// Clock is the agent's clock.
	Clock clock.Clock
	// Timeout bounds each program; unset: 20 s. A controller that does not answer
	// takes Slurm's programs 9 s to give up.
	Timeout time.Duration
}

// Client implements host.SlurmReader, host.SlurmProber and host.SlurmChanger. It
// is safe for concurrent use.
type Client struct{ cfg Config }

// New returns a Client. It does no I/O.
func New(cfg Config) *Client {
	if cfg.Timeout == 0 {
		cfg.Timeout = 20 * time.Second
	}
	return &Client{cfg: cfg}
}

// run runs one of Slurm's programs to its end. One that exits with a code other
// than 0 is an error that wraps host.ErrSlurm, and has its last words.
func (c *Client) run(ctx context.Context, servers []string, input []byte, argv ...string) (string, error) {
	name := argv[0]
	program, err := c.cfg.Find(ctx, name)
	if err != nil {
		return "", err
	}
	s := child.Spec{
		Argv: append([]string{program}, argv[1:]...), Timeout: c.cfg.Timeout, MaxOutput: 1 << 20,
		Input: input, Environment: []string{"SLURM_TIME_FORMAT=standard"},
	}
	if len(servers) > 0 {
		s.Environment = append(s.Environment, "SLURM_CONF_SERVER="+strings.Join(servers, ","))
	}
	crash.Point("host.slurm.before")
	res, err := c.cfg.Children.Run(ctx, s)
	crash.Point("host.slurm.after")
	if err != nil {
		return "", fmt.Errorf("%s: %w: %w", strings.Join(argv, " "), host.ErrSlurm, err)
	}
	out := strings.ToValidUTF8(string(res.Stdout), "?")
	if res.ExitCode != 0 {
		return out, &exitError{
			argv: argv, code: res.ExitCode,
			words: lastWords(out + "\n" + strings.ToValidUTF8(string(res.Stderr), "?")),
		}
	}
	return out, nil
}

// exitError is a program that exited with a code other than 0.
type exitError struct {
	argv  []string
	code  int
	words string
}

func (e *exitError) Error() string {
	return fmt.Sprintf("%s: exit code %d: %s", strings.Join(e.argv, " "), e.code, e.words)
}

// Unwrap makes it an answer that was not one.
func (e *exitError) Unwrap() error { return host.ErrSlurm }

// lastWords joins the lines that a program wrote, the last 600 bytes of them.
func lastWords(s string) string {
	var lines []string
	for line := range strings.Lines(s) {
		if line = strings.TrimSpace(line); line != "" {
			lines = append(lines, line)
		}
	}
	const limit = 600
	all := strings.Join(lines, "; ")
	return strings.ToValidUTF8(all[max(0, len(all)-limit):], "")
}

// node returns the name that a reference means.
func node(ref host.SlurmRef) (string, error) {
	if ref.Node != "" {
		return ref.Node, nil
	}
	name, err := os.Hostname()
	if err != nil {
		return "", fmt.Errorf("find the machine's name in Slurm: %w", err)
	}
	short, _, _ := strings.Cut(name, ".")
	return short, nil
}

// SlurmNode implements host.SlurmReader.
func (c *Client) SlurmNode(ctx context.Context, ref host.SlurmRef) (host.SlurmNode, error) {
	name, err := node(ref)
	if err != nil {
		return host.SlurmNode{}, err
	}
	servers := c.servers(ref.Servers)
	out, err := c.run(ctx, servers, nil, "scontrol", "show", "node", name)
	var exit *exitError
	if errors.As(err, &exit) && unknown(exit.words, name) {
		return host.SlurmNode{Name: name}, nil
	}
	if err != nil {
		return host.SlurmNode{}, fmt.Errorf("ask Slurm for node %s: %w", name, err)
	}
	n, err := parseNode(out)
	if err != nil || n.Name != name {
		return host.SlurmNode{}, fmt.Errorf("ask Slurm for node %s: it answered %q: %w: %w", name, lastWords(out), host.ErrSlurm, err)
	}
	out, err = c.run(ctx, servers, nil, "squeue", "--noheader", "--nodelist="+name, "--states=running,completing,suspended,configuring,stopped,resizing,signaling,stage_out",
		"--format=%i|%u|%T|%e|%j")
	if err != nil {
		return host.SlurmNode{}, fmt.Errorf("ask Slurm for the jobs on node %s: %w", name, err)
	}
	n.Jobs, err = parseJobs(out)
	return n, err
}

// unknown reports whether words say that the controller has no such node. Only
// its own words count: any other error leaves the question open.
func unknown(words, name string) bool {
	return strings.Contains(words, "Node "+name+" not found") || strings.Contains(words, "Invalid node name specified")
}

// servers returns the controllers with their ports.
func (c *Client) servers(named []string) []string {
	out := make([]string, 0, len(named))
	for _, s := range named {
		if !strings.Contains(s, ":") {
			s += ":6817"
		}
		out = append(out, s)
	}
	return out
}

// SlurmController implements host.SlurmReader.
func (c *Client) SlurmController(ctx context.Context, servers []string) (host.SlurmController, error) {
	out, err := c.run(ctx, c.servers(servers), nil, "scontrol", "show", "config")
	if err != nil {
		return host.SlurmController{}, fmt.Errorf("ask Slurm's controller for its version: %w", err)
	}
	k := parseConfig(out)
	v := host.SlurmController{Version: k["SLURM_VERSION"], Name: controllerName(k)}
	if v.Version == "" {
		return host.SlurmController{}, fmt.Errorf("ask Slurm's controller for its version: it answered %q: %w", lastWords(out), host.ErrSlurm)
	}
	return v, nil
}

// SlurmMachine implements host.SlurmReader.
func (c *Client) SlurmMachine(ctx context.Context) (host.SlurmMachine, error) {
	out, err := c.run(ctx, nil, nil, "slurmd", "-V")
	if err != nil {
		return host.SlurmMachine{}, fmt.Errorf("ask slurmd for its version: %w", err)
	}
	fields := strings.Fields(out)
	if len(fields) == 0 {
		return host.SlurmMachine{}, fmt.Errorf("ask slurmd for its version: it said nothing: %w", host.ErrSlurm)
	}
	m := host.SlurmMachine{Version: fields[len(fields)-1]}
	if out, err = c.run(ctx, nil, nil, "slurmd", "-C"); err != nil {
		return host.SlurmMachine{}, fmt.Errorf("ask slurmd for the machine: %w", err)
	}
	return m, parseMachine(out, &m)
}
