package slurm

import (
	"context"
	"errors"
	"fmt"
	"net"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/gpuaas/millwright/tasks/host"
)

// encoded finds the time in what unmunge writes.
var encoded = regexp.MustCompile(`(?m)^ENCODE_TIME:.*\((\d+)\)\s*$`)

// ProbeMunge implements host.SlurmProber.
func (c *Client) ProbeMunge(ctx context.Context) (host.MungeProbe, error) {
	cred, err := c.run(ctx, nil, nil, "munge", "--no-input")
	if err != nil {
		return host.MungeProbe{}, fmt.Errorf("have munged make a credential: %w", err)
	}
	out, err := c.run(ctx, nil, []byte(cred), "unmunge")
	now := c.cfg.Clock.Now()
	if err != nil {
		return host.MungeProbe{}, fmt.Errorf("have munged read a credential: %w", err)
	}
	m := encoded.FindStringSubmatch(out)
	if m == nil {
		return host.MungeProbe{}, fmt.Errorf("have munged read a credential: it said %q: %w", lastWords(out), host.ErrSlurm)
	}
	sec, err := strconv.ParseInt(m[1], 10, 63)
	if err != nil {
		return host.MungeProbe{}, fmt.Errorf("have munged read a credential: %w: %w", host.ErrSlurm, err)
	}
	at := time.Unix(sec, 0)
	return host.MungeProbe{Encoded: at, Skew: at.Sub(now).Round(time.Second)}, nil
}

// ProbeSlurmServer implements host.SlurmProber.
func (c *Client) ProbeSlurmServer(ctx context.Context, server string) error {
	ctx, cancel := context.WithTimeout(ctx, connectTimeout)
	defer cancel()
	address := c.servers([]string{server})[0]
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", address)
	if err != nil {
		return fmt.Errorf("connect to Slurm's controller at %s: %w", address, err)
	}
	if err := conn.Close(); err != nil {
		return fmt.Errorf("connect to Slurm's controller at %s: %w", address, err)
	}
	return nil
}

// connectTimeout bounds a connection to a controller.
const connectTimeout = 5 * time.Second

// immediate is how long a probe job waits for its resources, in seconds.
const immediate = "10"

// ProbeSlurmJob implements host.SlurmProber. The job prints which devices it was
// given, of whatever kind; none is asked for without gres.
func (c *Client) ProbeSlurmJob(ctx context.Context, ref host.SlurmRef, gres string) (int, error) {
	name, err := node(ref)
	if err != nil {
		return 0, err
	}
	// The name is the node's own, so that what a killed probe left is found.
	job := "millwright-probe-" + name
	argv := []string{"srun", "--nodelist=" + name, "--nodes=1", "--ntasks=1", "--time=1", "--immediate=" + immediate,
		"--job-name=" + job, "--quiet", "--export=NONE", "--input=none", "--chdir=/"}
	if gres != "" {
		argv = append(argv, "--gres="+gres)
	}
	argv = append(argv, "/bin/sh", "-c", `echo "devices=${SLURM_STEP_GPUS:-${CUDA_VISIBLE_DEVICES:-${SLURM_JOB_GPUS:-}}}"`)
	servers := c.servers(ref.Servers)
	out, err := c.run(ctx, servers, nil, argv...)
	if err != nil {
		_, cancelErr := c.run(context.WithoutCancel(ctx), servers, nil, "scancel", "--name="+job)
		return 0, errors.Join(fmt.Errorf("run a job on node %s: %w", name, err), cancelErr)
	}
	for line := range strings.Lines(out) {
		if list, ok := strings.CutPrefix(strings.TrimSpace(line), "devices="); ok {
			return len(strings.FieldsFunc(list, func(r rune) bool { return r == ',' })), nil
		}
	}
	return 0, fmt.Errorf("run a job on node %s: it wrote %q: %w", name, lastWords(out), host.ErrSlurm)
}
