package slurm

import (
	"context"
	"errors"
	"io/fs"
	"regexp"
	"strings"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	slurmv1 "github.com/gpuaas/millwright/proto/millwright/slurm/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
	"github.com/gpuaas/millwright/tasks/step"
)

// siteConf is where a site keeps Slurm's configuration on a node.
const siteConf = "/etc/slurm/slurm.conf"

// Asker asks Slurm before a task disturbs the jobs of a node.
type Asker struct{}

var _ tasks.Asker = Asker{}

// Ask implements [tasks.Asker]. A node is a member when slurm.join made it one,
// or its slurmd runs, or would at boot with a configuration of the site's: jobs
// go on without their slurmd.
func (Asker) Ask(ctx context.Context, h host.Reader, owner string, d tasks.Disturbance) (*tasks.Gate, error) {
	member, joined, controllers, err := membership(ctx, h)
	if err != nil || !member {
		return nil, err
	}
	m, err := h.SlurmMachine(ctx)
	if err != nil {
		return nil, unfit("whether jobs run on the node is not known: %v", err)
	}
	n, err := h.SlurmNode(ctx, host.SlurmRef{Node: m.HostName, Servers: controllers})
	switch {
	case errors.Is(err, host.ErrSlurm), errors.Is(err, fs.ErrNotExist):
		return nil, unfit("whether jobs run on node %s is not known, and a task that %s would disturb them: %v", m.HostName, d.What, err)
	case err != nil:
		return nil, err
	case !n.Known && joined:
		return nil, nil // it has the host's name there, and so nothing is started on it
	case !n.Known: // a site may give its nodes other names
		return nil, unfit("whether jobs run on the node is not known, and a task that %s would disturb them: its slurmd runs, or would at boot, and the controller knows no node %s: "+
			"name the node in slurm.conf as its host is named, or, if it is no member any more, systemctl disable --now %s", d.What, m.HostName, step.SlurmdUnit)
	}
	back := &slurmv1.SlurmReturnStep{Node: m.HostName, Controllers: controllers, Owner: owner, Rebooted: d.Reboots}
	if d.Reboots && !n.SlurmdStart.IsZero() {
		back.SlurmdStart = n.SlurmdStart.Unix()
	}
	g := &tasks.Gate{
		Before: step.AskSlurm(&slurmv1.SlurmAskStep{
			Node: m.HostName, Controllers: controllers, Owner: owner, Reason: "a task " + d.What, WaitForJobs: durationpb.New(d.Wait),
		}),
		After: step.ReturnSlurm(back), InTheWay: inTheWay(n),
	}
	return g, tellGPUs(ctx, h, g, n, controllers, d)
}

// tellGPUs has the node register again where its GPUs are others afterwards. One
// that joined without them being told as they are keeps its description: if that
// names GPUs, the controller would drain it as invalid.
func tellGPUs(ctx context.Context, h host.Reader, g *tasks.Gate, n host.SlurmNode, controllers []string, d tasks.Disturbance) error {
	if d.GPUs == nil {
		return nil
	}
	own, err := readOwn(ctx, h, optionsPath)
	if err != nil {
		return err
	}
	options, gres := withGPUs(own, *d.GPUs)
	switch {
	case !strings.Contains(own, gpusMark+"\n"):
		if have := gpuGres(n.Gres); have != "" && have != *d.GPUs {
			return unfit("Slurm has %q of node %s, and its GPUs are %q afterwards, so that the controller would drain it as invalid: "+
				"have it join as a dynamic node with gpus: true, or without GPUs", have, n.Name, *d.GPUs)
		}
		return nil
	case options == own:
		return nil
	case n.Drained() && !strings.HasPrefix(n.Reason, ownTags) || n.DrainedBy(ownerDrain):
		return unfit("node %s is drained by somebody else, %q, which the controller would forget when the node registers with its new GPUs: end that drain first", n.Name, n.Reason)
	}
	g.Stop = []tasks.Step{step.StopSlurmd(&slurmv1.SlurmdStopStep{Node: n.Name, Controllers: controllers, Forget: true, KeepDrain: true})}
	g.Tell = []tasks.Step{
		step.WriteFile(&taskv1.WriteFileStep{Path: optionsPath, Data: []byte(options), Mode: fileMode}),
		step.StartSlurmd(&slurmv1.SlurmdStartStep{Node: n.Name, Controllers: controllers, Gres: gres, Dynamic: true}),
	}
	return nil
}

var gresOption = regexp.MustCompile(`Gres=([^ '"]*) ?`)

// withGPUs returns options of slurmd with other GPUs, and the resources that they
// name then.
func withGPUs(options, gpus string) (out, gres string) {
	var keep []string
	if m := gresOption.FindStringSubmatch(options); m != nil {
		for _, one := range strings.Split(m[1], ",") {
			if one != "" && !strings.HasPrefix(one, "gpu:") {
				keep = append(keep, one)
			}
		}
	}
	if gpus != "" {
		keep = append(keep, gpus)
	}
	gres = strings.Join(keep, ",")
	options = gresOption.ReplaceAllString(options, "")
	if gres != "" {
		options = strings.Replace(options, "--conf '", "--conf 'Gres="+gres+" ", 1)
	}
	return options, gres
}

// gpuGres is what of a node's resources are GPUs.
func gpuGres(gres string) string {
	var out []string
	for _, one := range strings.Split(gres, ",") {
		if strings.HasPrefix(one, "gpu:") {
			out = append(out, one)
		}
	}
	return strings.Join(out, ",")
}

// membership reports whether the node may run jobs, whether slurm.join made it a
// member, and whom it is to ask.
func membership(ctx context.Context, h host.Reader) (member, joined bool, controllers []string, err error) {
	own, err := readOwn(ctx, h, optionsPath)
	if err != nil {
		return false, false, nil, err
	}
	if own != "" {
		return true, true, (&survey{options: own}).controllers(), nil
	}
	slurmd, err := h.Unit(ctx, step.SlurmdUnit)
	if err != nil || active(slurmd) {
		return err == nil, false, nil, err
	}
	_, err = h.Lstat(ctx, siteConf)
	if errors.Is(err, fs.ErrNotExist) {
		return false, false, nil, nil
	}
	return err == nil && (enabled(slurmd) || slurmd.Active == "failed"), false, nil, err
}

// inTheWay says what a node has now.
func inTheWay(n host.SlurmNode) *taskv1.InTheWay {
	w := &taskv1.InTheWay{Manager: "slurm", Node: n.Name, State: strings.Join(n.States, "+"), Reason: n.Reason}
	for _, j := range n.Jobs {
		r := &taskv1.RunningWork{Id: j.ID, Owner: j.User, State: strings.ToLower(j.State), Name: j.Name}
		if !j.End.IsZero() {
			r.EndTime = timestamppb.New(j.End)
		}
		w.Work = append(w.Work, r)
	}
	return w
}
