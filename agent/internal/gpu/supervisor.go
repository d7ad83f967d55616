package gpu

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/gpuaas/millwright/agent/internal/child"
	"github.com/gpuaas/millwright/agent/internal/clock"
	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
)

// Supervisor keeps a millwright-gpu and asks it. Run is called once; the other
// methods may be called at any time.
type Supervisor struct {
	cfg   Config
	retry chan struct{} // holds a token: do not wait any longer

	mu      sync.Mutex
	status  *gpuv1.DriverStatus // guarded by mu
	base    verdict             // of the status, but for an answer that is not there yet; guarded by mu
	waits   [2]string           // words on such answers, by lane; guarded by mu
	changed chan struct{}       // closed at a change; guarded by mu
	link    *link               // to a child that answers; guarded by mu
	stuck   Process             // killed and not gone; guarded by mu
	starts  uint64              // guarded by mu
	quiet   int                 // who asked for quiet; guarded by mu
	prove   string              // the question that must be answered once before all is well; guarded by mu
}

// New returns a Supervisor that does nothing until Run.
func New(cfg Config) *Supervisor {
	return &Supervisor{
		cfg: cfg.withDefaults(), retry: make(chan struct{}, 1), changed: make(chan struct{}),
		status: &gpuv1.DriverStatus{State: gpuv1.DriverState_DRIVER_STATE_STARTING, Message: "the agent is starting"},
	}
}

// Run keeps the program until ctx ends, and returns nil then. The program is
// gone when it returns, unless the kernel holds it.
func (s *Supervisor) Run(ctx context.Context) error {
	pause := s.cfg.Pause / 16
	for ctx.Err() == nil {
		if v, wanted := s.wanted(); !wanted {
			s.become(v)
			s.wait(ctx, s.cfg.Pause)
			continue
		}
		if p := s.held(); p != nil {
			select {
			case <-p.Gone():
				s.release()
			case <-ctx.Done():
			}
			continue
		}
		v, proven := s.live(ctx)
		if ctx.Err() != nil {
			return nil //nolint:nilerr // it was asked to end
		}
		if proven {
			pause = s.cfg.Pause / 16
		}
		s.become(v)
		if s.held() == nil && v.state != gpuv1.DriverState_DRIVER_STATE_QUIESCED {
			s.wait(ctx, pause)
			pause = min(2*pause, s.cfg.Pause)
		}
	}
	return nil
}

// wanted is whether a program is to run now, and what to say if not.
func (s *Supervisor) wanted() (verdict, bool) {
	if s.quieted() {
		return verdict{gpuv1.DriverState_DRIVER_STATE_QUIESCED, "the agent keeps its hands off the GPUs, for a change of theirs"}, false
	}
	switch s.cfg.Mode {
	case Off:
		return verdict{gpuv1.DriverState_DRIVER_STATE_OFF, "the configuration says gpu.mode: off"}, false
	case On:
		return verdict{}, true
	case Auto:
		if s.cfg.Library != "" {
			return verdict{}, true
		}
	}
	gpus, err := pciGPUs(s.cfg.Sysfs)
	switch {
	case err != nil:
		return verdict{gpuv1.DriverState_DRIVER_STATE_ERROR, err.Error()}, false
	case len(gpus) == 0:
		return verdict{gpuv1.DriverState_DRIVER_STATE_NO_GPUS, "the PCI bus has no NVIDIA GPU"}, false
	}
	return verdict{}, true
}

// wait waits, unless someone asks for another try.
func (s *Supervisor) wait(ctx context.Context, d time.Duration) {
	if clock.Wait(ctx, d, s.retry) {
		select {
		case <-s.retry: // the wait does not take the token
		default:
		}
	}
}

// Retry ends a pause: the program is started at once.
func (s *Supervisor) Retry() {
	select {
	case s.retry <- struct{}{}:
	default:
	}
}

func (s *Supervisor) held() Process {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.stuck
}

func (s *Supervisor) release() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stuck = nil
}

func (s *Supervisor) quieted() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.quiet > 0
}

// live is one life of the program. It returns when the program is gone, or held,
// with the verdict on it, and whether the driver had answered all.
func (s *Supervisor) live(ctx context.Context) (v verdict, proven bool) {
	s.mu.Lock()
	s.starts++
	s.mu.Unlock()
	if state := s.Status().GetState(); state == gpuv1.DriverState_DRIVER_STATE_QUIESCED {
		s.become(verdict{gpuv1.DriverState_DRIVER_STATE_STARTING, "millwright-gpu is started again after a change of the GPUs"})
	}
	p, err := s.cfg.Start(child.LongSpec{Argv: append([]string{s.cfg.Program}, s.cfg.Args...), Env: s.cfg.Env})
	if err != nil {
		return s.unstartable(err), false
	}
	l := newLink(p.Conn(), s.silent)
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	var reading sync.WaitGroup
	reading.Go(l.read)
	reading.Go(func() { s.untilQuiet(ctx); stop() })
	v, refusedIt := s.begin(ctx, l)
	if !refusedIt {
		proven = s.use(ctx, l, v)
	}
	stop()
	gone := s.end(p)
	p.Conn().Close() //nolint:errcheck // there is nobody at its other end
	reading.Wait()
	what, cause := l.ended()
	switch {
	case s.quieted() && gone:
		v, _ = s.wanted()
	case !refusedIt || !gone:
		v = s.after(p, gone, what, cause)
		s.mu.Lock()
		s.prove = what
		s.mu.Unlock()
	}
	return v, proven
}

// begin initialises the driver and has the questions answered on which an
// earlier life ended. It returns the state that it found, and whether that is
// the end of this life; a link that died says the rest.
func (s *Supervisor) begin(ctx context.Context, l *link) (v verdict, over bool) {
	s.mu.Lock()
	prove := s.prove
	s.mu.Unlock()
	reply, err := l.ask(ctx, s.startQuestion())
	if err != nil {
		return v, false
	}
	if f := reply.GetFailure(); f != nil {
		return refused(f), true
	}
	for _, q := range s.questions(prove) {
		reply, err := l.ask(ctx, q)
		if err != nil {
			return v, false
		}
		if f := reply.GetFailure(); f != nil {
			return refused(f), true
		}
	}
	n := reply.GetStarted().GetGpus()
	if n == 0 {
		return verdict{gpuv1.DriverState_DRIVER_STATE_NO_GPUS, "the driver answers and knows no GPU"}, false
	}
	return verdict{gpuv1.DriverState_DRIVER_STATE_OK, fmt.Sprintf("the driver answers for %d GPUs", n)}, false
}

// use lets others ask until the link or ctx ends.
func (s *Supervisor) use(ctx context.Context, l *link, v verdict) (proven bool) {
	if v.state == gpuv1.DriverState_DRIVER_STATE_UNSPECIFIED {
		return false // the link is dead
	}
	s.mu.Lock()
	s.link, s.prove = l, ""
	s.mu.Unlock()
	s.become(v)
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.link = nil
	}()
	select {
	case <-l.dead:
	case <-ctx.Done():
	}
	return true
}

// untilQuiet waits until quiet is wanted or ctx ends.
func (s *Supervisor) untilQuiet(ctx context.Context) {
	for {
		changed := s.Changed()
		if s.quieted() {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		}
	}
}

// end kills the program and reports whether it is gone. It remembers one that is
// not.
func (s *Supervisor) end(p Process) (gone bool) {
	if err := p.Kill(); err != nil {
		s.cfg.Logger.Warn("millwright-gpu not killed", "err", err)
	}
	timer := time.NewTimer(s.cfg.KillWait)
	defer timer.Stop()
	select {
	case <-p.Gone():
		return true
	case <-timer.C:
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stuck = p
	return false
}
