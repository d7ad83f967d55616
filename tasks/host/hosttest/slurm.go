package hosttest

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/gpuaas/millwright/tasks/host"
)

// The owners that the suite drains a node as.
const (
	owner    = "mw:suite"
	stranger = "mw:other"
)

func (e suite) slurm(t *testing.T) {
	ref := e.Slurm(t)
	h, p, ctx := e.host(t), e.Prober(), t.Context()
	undo(t, func(ctx context.Context) error { return h.ResumeSlurmNode(ctx, ref, owner) })
	m, err := p.SlurmMachine(ctx)
	if err != nil || m.Version == "" || m.RealMemoryMiB == 0 || m.HostName == "" {
		t.Errorf("SlurmMachine = %+v, %v", m, err)
	}
	if c, err := p.SlurmController(ctx, ref.Servers); err != nil || c.Version != m.Version {
		t.Errorf("SlurmController = %+v, %v; slurmd is %s", c, err, m.Version)
	}
	if n, err := p.SlurmNode(ctx, host.SlurmRef{Node: "absent", Servers: ref.Servers}); err != nil || n.Known {
		t.Errorf("SlurmNode of one that is not there = %+v, %v", n, err)
	}
	if err := h.DrainSlurmNode(ctx, host.SlurmRef{Node: "absent", Servers: ref.Servers}, owner, ""); !errors.Is(err, host.ErrSlurm) {
		t.Errorf("drain of a node that is not there: %v", err)
	}
	must(t, h.DeleteSlurmNode(ctx, host.SlurmRef{Node: "absent", Servers: ref.Servers}))
	if k, err := p.ProbeMunge(ctx); err != nil || k.Skew.Abs() > 2*time.Second {
		t.Errorf("ProbeMunge = %+v, %v", k, err)
	}
	must(t, p.ProbeSlurmServer(ctx, ref.Servers[0]))
	if n, err := p.ProbeSlurmJob(ctx, ref, ""); err != nil || n != 0 {
		t.Errorf("ProbeSlurmJob = %d, %v", n, err)
	}
	e.slurmDrain(t, ref)
	if err := h.DeleteSlurmNode(ctx, ref); !errors.Is(err, host.ErrNotOurs) {
		t.Errorf("delete of a node of the controller's slurm.conf: %v", err)
	}
	if n := e.slurmNode(t, ref); !n.Is("IDLE") {
		t.Errorf("after a refused delete: %+v", n)
	}
}

// slurmDrain drains and resumes, as one who may and as one who may not.
func (e suite) slurmDrain(t *testing.T, ref host.SlurmRef) {
	h, ctx := e.host(t), t.Context()
	if n := e.slurmNode(t, ref); !n.Known || !n.Is("IDLE") || n.Drained() || len(n.Jobs) > 0 || n.Version == "" {
		t.Fatalf("SlurmNode = %+v", n)
	}
	must(t, h.ResumeSlurmNode(ctx, ref, owner))
	for range 2 {
		must(t, h.DrainSlurmNode(ctx, ref, owner, "a test's"))
	}
	drained := e.slurmNode(t, ref)
	if !drained.DrainedBy(owner) || drained.DrainedBy(stranger) || drained.Reason != owner+": a test's" {
		t.Errorf("drained: %+v", drained)
	}
	if err := h.DrainSlurmNode(ctx, ref, stranger, ""); !errors.Is(err, host.ErrNotOurs) {
		t.Errorf("drain over another's: %v", err)
	}
	if err := h.ResumeSlurmNode(ctx, ref, stranger); !errors.Is(err, host.ErrNotOurs) {
		t.Errorf("resume of another's drain: %v", err)
	}
	if err := h.ReviveSlurmNode(ctx, ref, stranger); !errors.Is(err, host.ErrNotOurs) {
		t.Errorf("revival under another's drain: %v", err)
	}
	if n := e.slurmNode(t, ref); n.Reason != drained.Reason || !n.Drained() {
		t.Errorf("after a stranger tried: %+v", n)
	}
	if _, err := h.ProbeSlurmJob(ctx, ref, ""); !errors.Is(err, host.ErrSlurm) {
		t.Errorf("a job on a drained node: %v", err)
	}
	for range 2 {
		must(t, h.ReviveSlurmNode(ctx, ref, owner)) // it is not down
	}
	if n := e.slurmNode(t, ref); n.Drained() {
		t.Errorf("resumed: %+v", n)
	}
}

func (e suite) slurmNode(t *testing.T, ref host.SlurmRef) host.SlurmNode {
	t.Helper()
	n, err := e.Prober().SlurmNode(t.Context(), ref)
	must(t, err)
	return n
}
