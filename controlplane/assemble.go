package controlplane

import (
	"context"
	"fmt"

	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthgrpc "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/gpuaas/millwright/pki"
	"github.com/gpuaas/millwright/pki/ca"
	"github.com/gpuaas/millwright/pki/trustroot"
	agentpb "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	healthpb "github.com/gpuaas/millwright/proto/millwright/health/v1"
	nodepb "github.com/gpuaas/millwright/proto/millwright/node/v1"
	secretpb "github.com/gpuaas/millwright/proto/millwright/secret/v1"
	taskpb "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"

	"github.com/gpuaas/millwright/controlplane/internal/admit"
	"github.com/gpuaas/millwright/controlplane/internal/board"
	"github.com/gpuaas/millwright/controlplane/internal/dispatch"
	"github.com/gpuaas/millwright/controlplane/internal/eventlog"
	"github.com/gpuaas/millwright/controlplane/internal/export"
	"github.com/gpuaas/millwright/controlplane/internal/fleet"
	"github.com/gpuaas/millwright/controlplane/internal/metrics"
	"github.com/gpuaas/millwright/controlplane/internal/output"
	"github.com/gpuaas/millwright/controlplane/internal/rpc/agentv1"
	"github.com/gpuaas/millwright/controlplane/internal/rpc/enrolv1"
	healthrpc "github.com/gpuaas/millwright/controlplane/internal/rpc/healthv1"
	"github.com/gpuaas/millwright/controlplane/internal/rpc/intercept"
	"github.com/gpuaas/millwright/controlplane/internal/rpc/nodev1"
	"github.com/gpuaas/millwright/controlplane/internal/rpc/secretv1"
	"github.com/gpuaas/millwright/controlplane/internal/rpc/taskv1"
	"github.com/gpuaas/millwright/controlplane/internal/store/boltstore"
	"github.com/gpuaas/millwright/controlplane/internal/vault"
)

// site is what the parts of one server share.
type site struct {
	cfg    Config
	db     *boltstore.Store
	root   *trustroot.Root
	ca     *ca.CA
	id     pki.ID
	log    *eventlog.Log
	output *output.Store
	vault  *vault.Vault
}

// assemble makes the parts. It is the one place that knows all of them.
func (s *Server) assemble(ctx context.Context, db *boltstore.Store) (*parts, error) {
	w, err := s.site(ctx, db)
	if err != nil {
		return nil, err
	}
	p := &parts{stopping: make(chan struct{}), health: health.NewServer()}
	p.ready = db.Writable
	p.board = board.New(board.Config{Now: w.cfg.Now, Boot: w.cfg.Boot})
	p.dispatch = dispatch.New(dispatch.Config{
		Board: p.board,
		Log:   w.log, Reader: db, TrustUpdates: w.root.Since, Logger: w.cfg.Logger.With("component", "dispatch"),
		Actor: w.id.String(), Version: w.cfg.Version, Heartbeat: w.cfg.Heartbeat, Sweep: w.cfg.Sweep, Now: w.cfg.Now, Boot: w.cfg.Boot,
	})
	p.fleet = fleet.New(fleet.Config{
		Log: w.log, Reader: db, Sessions: p.dispatch, Board: p.board, Logger: w.cfg.Logger.With("component", "fleet"),
		Actor: w.id.String(), NodeID: w.nodeID, Now: w.cfg.Now,
		HistoryAge: w.cfg.HealthHistoryAge, HistoryCount: w.cfg.HealthHistoryCount,
	})
	p.metrics = metrics.Handler(metrics.Config{Board: p.board, Reader: db, Logger: w.cfg.Logger.With("component", "metrics"), Now: w.cfg.Now})
	p.export = export.New(w.cfg.StateDir, db)
	if err := p.fleet.Load(ctx); err != nil {
		return nil, err
	}
	return p, w.services(p)
}

// site opens what the parts share.
func (s *Server) site(ctx context.Context, db *boltstore.Store) (*site, error) {
	row, root, err := readCluster(ctx, db)
	if err != nil {
		return nil, fmt.Errorf("read cluster from %s: %w", s.cfg.storePath(), err)
	}
	w := &site{cfg: s.cfg, db: db, root: root}
	if w.id, err = pki.NewID(row.GetTrustDomain(), pki.RoleServer, row.GetServerId()); err != nil {
		return nil, err
	}
	if w.ca, err = ca.Load(s.cfg.caDir(), ca.Config{TrustDomain: row.GetTrustDomain(), Now: s.cfg.Now}); err != nil {
		return nil, err
	}
	if w.output, err = output.Open(s.cfg.outputDir(), output.Reserve); err != nil {
		return nil, err
	}
	if w.vault, err = vault.Open(s.cfg.secretsDir(), s.cfg.secretsKey()); err != nil {
		return nil, err
	}
	how := projection(s.cfg, root)
	how.Writer, how.Now = db, s.cfg.Now
	w.log = eventlog.New(how)
	return w, nil
}

// projection is how a log becomes rows; its writer and its clock are left out.
func projection(cfg Config, root *trustroot.Root) eventlog.Config {
	return eventlog.Config{
		Spec: specOf(cfg.Registry), Intent: intentOf(cfg.Registry), Authorizer: authorizer(root),
		Verify: func(env *taskpb.Envelope, signed *taskpb.SignedLeaf) error {
			_, err := root.VerifyTaskSet(env, signed)
			return err
		},
	}
}

// services registers the services, behind the chain that every call passes.
func (w *site) services(p *parts) error {
	log := w.cfg.Logger
	policy := intercept.Default()
	chain := intercept.New(intercept.Config{
		Policy: policy, Members: p.fleet, Auditor: intercept.NewLogAuditor(log.With("component", "audit")),
		Limits: intercept.DefaultLimits(), Log: log.With("component", "rpc"), Now: w.cfg.Now,
	})
	tls := pki.TLS{Source: ca.NewSource(w.ca, w.id, certificateTTL), TrustDomain: w.id.TrustDomain, Now: w.cfg.Now}
	register := func(r grpc.ServiceRegistrar) { w.register(r, p) }
	p.grpc = grpc.NewServer(chain.ServerOptions(tls)...)
	register(p.grpc)
	if w.cfg.Local != nil {
		w.cfg.Local(Services{Register: register, Unary: chain.Unary, Stream: chain.Stream})
	}
	return policy.Covers(p.grpc.GetServiceInfo())
}

// register makes the services and hands them to r.
func (w *site) register(r grpc.ServiceRegistrar, p *parts) {
	log := w.cfg.Logger
	root := func() *trustroot.Root { return w.root }
	healthgrpc.RegisterHealthServer(r, p.health)
	agentpb.RegisterAgentServiceServer(r, agentv1.New(agentv1.Config{
		Sessions: p.dispatch, Outputs: w.output, Secrets: w.vault, Members: p.fleet, Reader: w.db,
		Logger: log.With("component", "output"), Stopping: p.stopping, Now: w.cfg.Now,
	}))
	agentpb.RegisterEnrolmentServiceServer(r, enrolv1.New(enrolv1.Config{
		TrustDomain: w.id.TrustDomain, NodeTTL: w.cfg.NodeTTL, Tokens: p.fleet, Keys: p.fleet, Issuer: w.ca, Trust: w,
		Log: log.With("component", "enrolment"), Now: w.cfg.Now,
	}))
	taskpb.RegisterTaskServiceServer(r, taskv1.New(taskv1.Config{
		Log: w.log, Reader: w.db, Sessions: p.dispatch, Outputs: w.output,
		Admit: admit.New(admit.Config{Registry: w.cfg.Registry, Root: root, Now: w.cfg.Now}),
		Spec:  specOf(w.cfg.Registry), Actor: w.id.String(), Stopping: p.stopping,
	}))
	secretpb.RegisterSecretServiceServer(r, secretv1.New(secretv1.Config{Vault: w.vault, Log: w.log, Now: w.cfg.Now}))
	healthpb.RegisterHealthServiceServer(r, healthrpc.New(healthrpc.Config{
		Board: p.board, Reader: w.db, Changed: w.log.Changed, Stopping: p.stopping,
	}))
	nodepb.RegisterNodeServiceServer(r, nodev1.New(nodev1.Config{
		Fleet: p.fleet, Root: root, NodeAddress: w.cfg.AdvertiseAddress, Version: w.cfg.Version, Now: w.cfg.Now,
	}))
}

// TrustChain implements [enrolv1.TrustChain].
func (w *site) TrustChain(context.Context) ([]*taskpb.Envelope, error) { return w.root.Chain(), nil }

func (w *site) nodeID(name string) string {
	return pki.ID{TrustDomain: w.id.TrustDomain, Role: pki.RoleNode, Name: name}.String()
}

// specOf decodes the spec of a leaf; nil when its kind is not known.
func specOf(registry *tasks.Registry) func(*taskpb.TaskLeaf) *anypb.Any {
	return func(leaf *taskpb.TaskLeaf) *anypb.Any {
		kind, err := registry.Kind(leaf.GetKind())
		if err != nil {
			return nil
		}
		spec, err := kind.DecodeSpec(leaf.GetRevision(), leaf.GetSpec())
		if err != nil {
			return nil
		}
		out, err := anypb.New(spec)
		if err != nil {
			return nil
		}
		return out
	}
}

// intentOf says what a task does to the intents of its node.
func intentOf(registry *tasks.Registry) func(*taskpb.Task) (string, tasks.IntentChange) {
	return func(task *taskpb.Task) (string, tasks.IntentChange) {
		kind, err := registry.Kind(task.GetKind())
		if err != nil || task.GetMode() == taskpb.Mode_MODE_PLAN {
			return "", tasks.IntentNone
		}
		spec, err := task.GetSpec().UnmarshalNew()
		if err != nil {
			return "", tasks.IntentNone
		}
		return kind.Intent(spec)
	}
}
