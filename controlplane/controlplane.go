package controlplane

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthgrpc "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/gpuaas/millwright/controlplane/internal/board"
	"github.com/gpuaas/millwright/controlplane/internal/clock"
	"github.com/gpuaas/millwright/controlplane/internal/dispatch"
	"github.com/gpuaas/millwright/controlplane/internal/export"
	"github.com/gpuaas/millwright/controlplane/internal/fleet"
	"github.com/gpuaas/millwright/controlplane/internal/store/boltstore"
)

const (
	// drainTime is how long open calls have to end when the server stops.
	drainTime = 3 * time.Second
	// certificateTTL is the life of the server's own certificate.
	certificateTTL = 24 * time.Hour
)

// ErrStore is wrapped by the error of [Server.Run] when the store cannot be used,
// and starting again will not change that.
var ErrStore = errors.New("the server does not start")

// Server is a control plane. Run it once.
type Server struct{ cfg Config }

// New returns a server. Nothing is opened before [Server.Run].
func New(cfg Config) *Server {
	if cfg.Now == nil {
		cfg.Now = clock.Now
	}
	if cfg.Boot == nil {
		cfg.Boot = clock.Boot()
	}
	return &Server{cfg: cfg}
}

// Run serves until ctx ends, and returns once all has ended. It then has told
// the nodes to come back later, and has let open calls end for a moment.
func (s *Server) Run(ctx context.Context) (err error) {
	db, err := boltstore.Open(s.cfg.storePath(), boltstore.Guard(s.cfg.Guard), s.cfg.look(ctx))
	switch {
	case err != nil && ctx.Err() != nil:
		return nil // it is to stop before it has begun
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%w; a new server is founded with: millwright-server init", err)
	case errors.Is(err, boltstore.ErrDamaged):
		return fmt.Errorf("%w; nothing was changed: move the file away, restore store.db from a backup and start the server again; "+
			"the nodes tell it again what it lacks: %w", err, ErrStore)
	case errors.Is(err, boltstore.ErrNewer):
		return fmt.Errorf("%w; install the newer release again: %w", err, ErrStore)
	case err != nil:
		return fmt.Errorf("%w%s", err, otherOwner(s.cfg.StateDir))
	}
	// The writer outlives everything that writes.
	writing, stopWriter := context.WithCancel(context.WithoutCancel(ctx))
	ended := make(chan error, 1)
	runWriter(writing, db, ended)
	defer func() {
		stopWriter()
		err = errors.Join(err, <-ended, db.Close())
	}()
	p, err := s.assemble(writing, db)
	if err != nil {
		return err
	}
	return s.serve(ctx, p)
}

// runWriter runs the store's writer; how it ended comes through ended.
func runWriter(ctx context.Context, db *boltstore.Store, ended chan<- error) {
	var wg sync.WaitGroup
	wg.Go(func() { ended <- db.Run(ctx) })
}

// parts are what runs.
type parts struct {
	grpc     *grpc.Server
	health   *health.Server
	board    *board.Board
	dispatch *dispatch.Dispatcher
	fleet    *fleet.Fleet
	export   *export.Server
	metrics  http.Handler
	ready    func(context.Context) error // whether the store takes writes
	stopping chan struct{}               // closed once, when the server is about to stop
}

// serve runs the parts and stops them in their order.
func (s *Server) serve(ctx context.Context, p *parts) error {
	opening := context.WithoutCancel(ctx) // a server that is to stop at once stops in order
	listener, err := listen(opening, s.cfg.Listener, s.cfg.Listen)
	if err != nil {
		return err
	}
	httpListener, err := listen(opening, s.cfg.HTTPListener, s.cfg.HTTPListen)
	if err != nil {
		return errors.Join(err, listener.Close())
	}
	group, ctx := errgroup.WithContext(ctx)
	// The loops stop after the calls that they serve.
	loops, stopLoops := context.WithCancel(context.WithoutCancel(ctx))
	web := &http.Server{Handler: p.handler(), ReadHeaderTimeout: 5 * time.Second}
	group.Go(func() error {
		if err := p.grpc.Serve(listener); !errors.Is(err, grpc.ErrServerStopped) {
			return err
		}
		return nil
	})
	group.Go(func() error {
		if err := web.Serve(httpListener); !errors.Is(err, http.ErrServerClosed) {
			return err
		}
		return nil
	})
	group.Go(func() error { return p.dispatch.Run(loops) })
	group.Go(func() error { return p.fleet.Run(loops) })
	if s.cfg.Local == nil { // a simulation has no sockets
		group.Go(func() error { return p.export.Run(loops) })
	}
	group.Go(func() error { return watchdog(ctx, s.cfg.Logger, p.ready) })
	group.Go(func() error {
		<-ctx.Done()
		s.stop(ctx, p)
		stopLoops()
		return web.Close()
	})
	s.cfg.Logger.Info("serving", "addr", listener.Addr().String(), "http_addr", httpListener.Addr().String(), "advertised", s.cfg.AdvertiseAddress)
	p.health.SetServingStatus("", healthgrpc.HealthCheckResponse_SERVING)
	notify(s.cfg.Logger, notifyReady)
	err = group.Wait()
	stopLoops()
	return err
}

// stop tells everyone that the server goes away, and ends the calls.
func (s *Server) stop(ctx context.Context, p *parts) {
	s.cfg.Logger.Info("stopping", "cause", context.Cause(ctx))
	notify(s.cfg.Logger, notifyStopping)
	p.health.Shutdown()
	close(p.stopping)
	p.dispatch.Drain()
	var wg sync.WaitGroup
	graceful := make(chan struct{})
	wg.Go(func() {
		p.grpc.GracefulStop()
		close(graceful)
	})
	timer := time.NewTimer(drainTime)
	defer timer.Stop()
	select {
	case <-graceful:
	case <-timer.C:
		p.grpc.Stop()
	}
	wg.Wait()
}

func listen(ctx context.Context, given net.Listener, addr string) (net.Listener, error) {
	if given != nil {
		return given, nil
	}
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", addr, err)
	}
	return l, nil
}

// handler serves whether the server lives, whether it can do its work, and what
// it knows of GPUs as metrics.
func (p *parts) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { answer(w, nil) })
	mux.Handle("GET /metrics", p.metrics)
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, r *http.Request) {
		select {
		case <-p.stopping:
			answer(w, errors.New("the server is stopping"))
		default:
			answer(w, p.ready(r.Context()))
		}
	})
	return mux
}

func answer(w http.ResponseWriter, err error) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	text := "ok\n"
	if err != nil {
		w.WriteHeader(http.StatusServiceUnavailable)
		text = "not ready; the log says why\n"
	}
	_, _ = w.Write([]byte(text)) // the asker is gone when it fails
}
