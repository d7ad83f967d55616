package ctl

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/gpuaas/millwright/controlplane/internal/ctl/specfile"
	"github.com/gpuaas/millwright/pki"
	"github.com/gpuaas/millwright/pki/envelope"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
)

// runOptions are the flags of task run.
type runOptions struct {
	signOptions
	nodes        []string
	file         string
	plan         bool
	validateOnly bool
	deadline     time.Duration
	impact       []string
	project      string
	labels       []string
	secrets      []string
}

func (a *app) taskRunCmd() *cobra.Command {
	o := &runOptions{}
	cmd := &cobra.Command{
		Use:   "run KIND -n NODE[,NODE...] -f FILE",
		Short: "Sign a task for one or more nodes and send it",
		Long: `Sign a task for one or more nodes, with one signature, and send it.

FILE is the kind's spec in YAML or JSON; - reads it from standard input. All
mistakes in it are told at once, with their lines, before anything is signed.

Kinds:
` + a.kindList(),
		Example: `  millctl task run storage.mount -n gpu-001,gpu-002 -f mount.yaml --wait
  millctl task run storage.mount -n gpu-001 -f mount.yaml --plan
  echo 'argv: [/usr/bin/uptime]' | millctl task run system.command -n gpu-001 -f - --wait`,
		Args: exactly("KIND"),
		RunE: func(cmd *cobra.Command, args []string) error {
			leaves, window, err := a.prepare(args[0], o)
			if err != nil {
				return err
			}
			return a.online(func(ctx context.Context, c *client, _ []string) error {
				return a.run(ctx, c, leaves, o, window)
			})(cmd, args)
		},
	}
	f := cmd.Flags()
	f.StringSliceVarP(&o.nodes, "node", "n", nil, "the nodes; separate them by commas or repeat the flag")
	f.StringVarP(&o.file, "file", "f", "", "the spec, or - for standard input")
	f.BoolVar(&o.plan, "plan", false, "only plan: show what differs from the spec and the steps that would change it")
	f.BoolVar(&o.validateOnly, "validate-only", false, "only check, here and on the server; nothing is signed or stored")
	f.DurationVar(&o.deadline, "deadline", 0, "how long the task may run once started; 0: the kind's default")
	f.StringSliceVar(&o.impact, "allow-impact", nil, "disturbances that are allowed: drain, gpu-reset, service-restart, reboot")
	f.StringVar(&o.project, "project", "", "the project that the task belongs to")
	f.StringArrayVarP(&o.labels, "label", "l", nil, "a label as key=value; repeat the flag for more")
	f.StringArrayVar(&o.secrets, "secret", nil, "NAME=FILE: the value of a secret that the spec names, to take its digest from; needed for one that was not put from here")
	o.flags(cmd)
	a.outputFlag(cmd, formatName)
	return cmd
}

func (a *app) kindList() string {
	var b strings.Builder
	for _, k := range a.registry.Kinds() {
		fmt.Fprintf(&b, "  %-18s %s\n", k.Kind, k.Summary)
	}
	return strings.TrimRight(b.String(), "\n")
}

// prepare makes the leaves, and finds all that can be wrong without the server.
func (a *app) prepare(kindName string, o *runOptions) ([]*taskv1.TaskLeaf, envelope.Window, error) {
	window, err := o.window(a.now())
	if err != nil {
		return nil, window, err
	}
	if o.plan && o.validateOnly {
		return nil, window, usagef("--plan and --validate-only exclude each other: a plan is made by the node; keep one of them")
	}
	kind, err := a.registry.Kind(kindName)
	if err != nil {
		return nil, window, usagef("%w", err)
	}
	if err := checkNodes(o.nodes); err != nil {
		return nil, window, err
	}
	spec, err := a.readSpec(kind, o.file, o.secrets)
	if err != nil {
		return nil, window, err
	}
	leaf, err := o.leaf(kind, spec)
	if err != nil {
		return nil, window, err
	}
	leaves := make([]*taskv1.TaskLeaf, len(o.nodes))
	for i, node := range o.nodes {
		leaves[i] = proto.CloneOf(leaf)
		leaves[i].Node = node
		if leaves[i].TaskId, err = newTaskID(); err != nil {
			return nil, window, err
		}
	}
	return leaves, window, nil
}

func checkNodes(nodes []string) error {
	if len(nodes) == 0 {
		return usagef("--node is missing: name the nodes with -n NODE[,NODE...]; see them with: millctl node list")
	}
	for i, n := range nodes {
		if err := pki.CheckName(n); err != nil {
			return usagef("--node: %w", err)
		}
		if slices.Contains(nodes[:i], n) {
			return usagef("--node: %q is given twice; keep one", n)
		}
	}
	return nil
}

// readSpec reads and validates the spec in a file.
func (a *app) readSpec(kind *tasks.Kind, file string, secrets []string) (proto.Message, error) {
	var data []byte
	var err error
	name := file
	switch file {
	case "":
		return nil, usagef("--file is missing: give the spec of %s with -f FILE, or -f - for standard input", kind.Kind)
	case "-":
		name = "standard input"
		data, err = io.ReadAll(io.LimitReader(a.in, specfile.MaxBytes+1))
	default:
		data, err = os.ReadFile(file)
	}
	if err != nil {
		return nil, usagef("read spec: %w", err)
	}
	spec := kind.NewSpec()
	doc := specfile.Read(name, data, spec)
	if err := a.fillDigests(spec, secrets); err != nil {
		return nil, err
	}
	err = doc.Check(kind.Validate(spec))
	if problems := (specfile.Problems)(nil); errors.As(err, &problems) {
		return nil, usagef("the spec of %s is not valid:\n%w", kind.Kind, problems)
	} else if err != nil {
		return nil, usagef("%s: the spec of %s is not valid: %w", name, kind.Kind, err)
	}
	return spec, nil
}

// leaf is what the tasks have in common.
func (o *runOptions) leaf(kind *tasks.Kind, spec proto.Message) (*taskv1.TaskLeaf, error) {
	impact, err := o.impacts(kind)
	if err != nil {
		return nil, err
	}
	pairs, err := labels("label", o.labels)
	if err != nil {
		return nil, err
	}
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(spec)
	if err != nil {
		return nil, fmt.Errorf("encode spec of %s: %w", kind.Kind, err)
	}
	digests, err := tasks.SecretDigests(spec)
	if err != nil {
		return nil, usagef("%w", err)
	}
	leaf := &taskv1.TaskLeaf{
		SecretDigests: digests, Mode: taskv1.Mode_MODE_EXECUTE, Kind: kind.Kind, Revision: kind.Needs(spec), Spec: b,
		AllowedImpact: impact, Project: o.project, Labels: pairs, Reason: o.reason,
	}
	if o.plan {
		leaf.Mode = taskv1.Mode_MODE_PLAN
	}
	if o.deadline < 0 {
		return nil, usagef("--deadline: %s: must not be negative", o.deadline)
	}
	if o.deadline > 0 {
		leaf.Deadline = durationpb.New(o.deadline)
	}
	return leaf, nil
}

// impacts returns what is allowed. A kind that may do more is refused here,
// where a person can still say yes.
func (o *runOptions) impacts(kind *tasks.Kind) ([]taskv1.Impact, error) {
	var allowed []taskv1.Impact
	for _, s := range o.impact {
		n, err := enumFlag("allow-impact", s, taskv1.Impact(0).Descriptor())
		if err != nil {
			return nil, err
		}
		allowed = append(allowed, taskv1.Impact(n))
	}
	slices.Sort(allowed)
	allowed = slices.Compact(allowed)
	if o.plan {
		return allowed, nil
	}
	for _, i := range kind.Impact {
		if !slices.Contains(allowed, i) {
			name := strings.ReplaceAll(word(i), "_", "-")
			return nil, usagef("%s may cause %s on the node; allow it with --allow-impact %s", kind.Kind, name, name)
		}
	}
	return allowed, nil
}

// run sends what was prepared.
func (a *app) run(ctx context.Context, c *client, leaves []*taskv1.TaskLeaf, o *runOptions, window envelope.Window) error {
	if o.validateOnly {
		return a.validateOnly(ctx, c, leaves, o)
	}
	o.wait = o.wait || o.plan
	resp, err := a.submit(ctx, c, leaves, &o.signOptions, window)
	if err != nil {
		return err
	}
	if o.plan && a.format == formatTable {
		if err := a.printPlans(resp.GetTasks()); err != nil {
			return err
		}
		return a.verdict(resp.GetTasks())
	}
	return a.conclude(resp, o.wait)
}

// validateOnly asks the server whether it would take the tasks.
func (a *app) validateOnly(ctx context.Context, c *client, leaves []*taskv1.TaskLeaf, o *runOptions) error {
	req := &taskv1.CreateTasksRequest{RequestId: o.requestID, ValidateOnly: true}
	for _, l := range leaves {
		b, err := envelope.EncodeLeaf(l)
		if err != nil {
			return malformed(err)
		}
		req.Leaves = append(req.Leaves, &taskv1.SignedLeaf{Leaf: b})
	}
	if err := checkSize(req.GetLeaves()); err != nil {
		return err
	}
	resp, err := c.tasks.CreateTasks(ctx, req)
	if err != nil {
		return c.explainTasks(ctx, "validate tasks", err, leaves)
	}
	a.remark("valid for %d of %d nodes; nothing was signed or stored", len(leaves), len(leaves))
	if a.format == formatJSON {
		return a.printJSON(resp)
	}
	return nil
}
