package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/millwright/agent/internal/clock"
	"github.com/gpuaas/millwright/agent/internal/courier"
	"github.com/gpuaas/millwright/agent/internal/enrol"
	"github.com/gpuaas/millwright/agent/internal/executor"
	"github.com/gpuaas/millwright/agent/internal/gate"
	"github.com/gpuaas/millwright/agent/internal/gpu"
	gpuhealth "github.com/gpuaas/millwright/agent/internal/health"
	nodehost "github.com/gpuaas/millwright/agent/internal/host"
	"github.com/gpuaas/millwright/agent/internal/output"
	"github.com/gpuaas/millwright/agent/internal/session"
	"github.com/gpuaas/millwright/agent/internal/state"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
)

var (
	// errNewJournal ends a node's work so that it begins anew with another
	// journal.
	errNewJournal = errors.New("a new journal must begin")
	// errNewBundle ends it so that the node joins again.
	errNewBundle = errors.New("there is a new join bundle")
	// errDamaged ends it so that the journal is looked at as a whole, and set aside.
	errDamaged = errors.New("the journal is damaged")
	// errClockReset ends it so that everything is read again by the clock that
	// root vouches for.
	errClockReset = errors.New("the clock was reset")
)

// node is a node that has joined and whose journal is open.
type node struct {
	cfg       Config
	log       *slog.Logger
	enrolment *enrol.Enrolment
	machine   *nodehost.Node
	hosts     Hosts
	store     *state.Store
	executor  *executor.Executor
	session   *session.Session
	uploader  *output.Uploader
	courier   *courier.Courier
	health    *health
	gpus      *gpu.Supervisor
	monitor   *gpuhealth.Monitor // nil: the GPUs are not looked after
	bootID    string
	floor     time.Time
	condemned chan struct{} // holds a token once the journal is to be replaced
	time      *clock.HighWater
	reset     chan struct{} // holds a token once root has reset the clock
}

// work opens the journal and works with it until ctx ends or the journal must
// be replaced.
func (a *Agent) work(ctx context.Context, e *enrol.Enrolment, joined bool) (err error) {
	n := &node{cfg: a.cfg, log: a.log, gpus: a.gpu, enrolment: e, condemned: make(chan struct{}, 1),
		time: a.time, reset: make(chan struct{}, 1)}
	// Whoever signed these was sure of the time, and the node has them since.
	known := later(e.NotBefore(), e.Floor())
	n.time.Load(known, known)
	n.courier = courier.New(n.signedID)
	n.machine = nodehost.New(nodehost.Config{
		StateDir: a.cfg.StateDir, Executable: a.cfg.Executable, Clock: a.cfg.Clock, Logger: a.log.With("component", "host"), Secrets: n.courier,
		GPUProgram: a.gpuProgram(), GPULibrary: a.cfg.GPULibrary, QuietGPUs: a.gpu.Quiesce, GPUConditions: n.gpuConditions(), GPUIntents: n.gpuIntents,
	})
	defer func() { err = errors.Join(err, n.close(ctx)) }()
	n.hosts = a.cfg.Hosts
	if n.hosts == nil {
		n.hosts = n.machine
	} else if taker, ok := n.hosts.(SecretTaker); ok {
		taker.TakeSecrets(n.courier.Fetch)
	}
	if n.bootID, err = n.hosts.Prober().BootID(ctx); err != nil {
		return fmt.Errorf("read boot id: %w", err)
	}
	if err := a.openState(ctx, n, joined); err != nil {
		return err
	}
	if err := n.build(); err != nil {
		return err
	}
	a.started(n)
	defer a.stopped(errors.New("the agent stops"))
	a.status("node " + e.Node())
	return n.run(ctx)
}

// build makes the parts. Nothing of them runs yet.
func (n *node) build() error {
	component := func(name string) *slog.Logger { return n.log.With("component", name) }
	if err := n.readFloor(); err != nil {
		return err
	}
	g := gate.New(gate.Config{
		Node: n.enrolment.Node(), Root: n.enrolment.Trust, Policy: n.cfg.PolicyFile, Registry: n.cfg.Registry,
		Floor: n.floor, Clock: n.time, Doubt: n.time.Doubt, Logger: component("gate"),
	})
	n.executor = executor.New(executor.Config{
		Journal: n.store, Gate: g, Hosts: n.hosts, Registry: n.cfg.Registry,
		Clock: n.time.Steady(), Logger: component("executor"), BootID: n.bootID, Room: n.store.Room,
		Reboots: executor.RebootBudget{Most: n.cfg.RebootsMost, Within: n.cfg.RebootsWithin}, Early: n.restored,
	})
	n.uploader = output.New(output.Config{
		Files: files{n.machine}, Ledger: ledger{n}, Clock: n.time.Steady(), Logger: component("output"),
		BytesPerSecond: n.cfg.OutputBytesPerSecond, Retention: n.cfg.OutputRetention,
	})
	if err := n.watchGPUs(); err != nil {
		return err
	}
	n.health = &health{node: n}
	n.session = session.New(session.Config{
		Identities: identity{n.enrolment}, Journal: journal{n.executor, n}, Tasks: n.executor, Trust: trust{n.enrolment},
		Node: n.health, Health: n.reports(), Clock: n.cfg.Clock, Logger: component("session"), Version: n.cfg.Version,
		Kinds: kinds(n.cfg.Registry), Credits: executor.Credits,
		Alongside: n.alongside, Wanted: n.uploader.Want, Refused: n.enrolment.Refused, ServerTime: func(server, _ time.Time) { n.time.ServerTime(server) }, Dial: n.cfg.Dial, Connect: n.cfg.Connect, Jitter: n.cfg.Jitter,
	})
	return nil
}

// RestoredFile is the file in the run directory that is there once what others
// wait for at boot is restored, as the layouts of GPUs are.
const RestoredFile = "restored"

// restored tells who waits for it at boot (millwright-restored.service).
func (n *node) restored() {
	if n.cfg.RunDir == "" {
		return
	}
	if err := os.WriteFile(filepath.Join(n.cfg.RunDir, RestoredFile), []byte(n.bootID+"\n"), 0o644); err != nil {
		n.log.Error("what waits at boot is not told that it may go on", "err", err)
	}
}

// alongside uses the connection of a session while it lasts.
func (n *node) alongside(ctx context.Context, conn grpc.ClientConnInterface) error {
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { n.courier.Serve(ctx, conn); return nil })
	g.Go(func() error { return n.uploader.Serve(ctx, conn) })
	return g.Wait()
}

// signedID returns the id in the leaf of a task, which is the task's own unless
// the node restores an intent.
func (n *node) signedID(taskID string) (id string, err error) {
	err = n.store.View(func(tx *state.Tx) error {
		rec, err := tx.Task(taskID)
		if err != nil {
			return err
		}
		leaf := new(taskv1.TaskLeaf)
		if err := proto.Unmarshal(rec.GetSignedLeaf().GetLeaf(), leaf); err != nil {
			return err
		}
		id = leaf.GetTaskId()
		return nil
	})
	if err != nil {
		return "", fmt.Errorf("find the signed id of task %s: %w", taskID, err)
	}
	return id, nil
}

// run runs the parts until ctx ends or one of them fails.
func (n *node) run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return n.enrolment.Run(ctx) })
	g.Go(func() error { return n.executor.Run(ctx) })
	g.Go(func() error { return n.session.Run(ctx) })
	g.Go(func() error { return n.uploader.Run(ctx) })
	g.Go(func() error { return n.keepTime(ctx) })
	if n.monitor != nil {
		g.Go(func() error { return n.monitor.Run(ctx) })
	}
	g.Go(func() error { return n.scrub(ctx) })
	g.Go(func() error { return n.awaitBundle(ctx, stamp(n.cfg.JoinFile)) })
	g.Go(func() error {
		select {
		case <-ctx.Done():
			return nil
		case <-n.condemned:
			return errNewJournal
		case <-n.reset:
			return errClockReset
		}
	})
	return g.Wait()
}

// awaitBundle ends the work when the certificate has ended and a bundle came
// that was not there before, and from time to time while the one that is there
// is still unused: the server may be back. While the certificate is good, a new
// bundle waits for the next start.
func (n *node) awaitBundle(ctx context.Context, before fileStamp) error {
	begin := n.cfg.Clock.Boot()
	for clock.Sleep(ctx, lookForBundle) {
		if n.time.Now().Before(n.enrolment.NotAfter()) {
			continue
		}
		again := n.cfg.Clock.Boot()-begin >= joinAgain && n.enrolment.Unused(n.cfg.JoinFile)
		if stamp(n.cfg.JoinFile) != before || again {
			return errNewBundle
		}
	}
	return nil
}

// close ends what holds the machine and the file, also after ctx has ended.
func (n *node) close(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	err := n.machine.Close(ctx)
	if n.store != nil {
		err = errors.Join(err, n.store.Close())
	}
	return err
}

// readFloor finds the time at or before which nothing may have been issued.
func (n *node) readFloor() error {
	n.floor = n.enrolment.Floor()
	err := n.store.View(func(tx *state.Tx) error {
		meta, err := tx.Journal()
		if t := meta.GetFloor().AsTime(); err == nil && t.After(n.floor) {
			n.floor = t
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("read floor of the journal: %w", err)
	}
	return nil
}

// alive returns an error when the journal does not answer.
func (n *node) alive(ctx context.Context) error {
	answered := make(chan error, 1)
	var g errgroup.Group
	g.Go(func() error {
		answered <- n.store.View(func(tx *state.Tx) error { _, err := tx.Head(); return err })
		return nil
	})
	n.session.Status()
	timer := time.NewTimer(n.cfg.Watchdog / 3)
	defer timer.Stop()
	select {
	case err := <-answered:
		return err
	case <-ctx.Done():
		return nil
	case <-timer.C:
		return errors.New("the journal does not answer")
	}
}

func kinds(r *tasks.Registry) []*agentv1.KindSupport {
	var out []*agentv1.KindSupport
	for _, k := range r.Kinds() {
		out = append(out, &agentv1.KindSupport{Kind: k.Kind, Revision: k.Revision})
	}
	return out
}
