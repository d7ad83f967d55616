package gpu

import (
	"context"
	"fmt"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/millwright/agent/internal/gpu/wire"
	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
)

// question is one question in its lane.
type question struct {
	lane    int
	what    string
	most    time.Duration // ends the link
	notice  time.Duration // tells that there is no answer yet
	request *gpuv1.ChildRequest
}

// The words for questions, in messages.
const (
	whatStart     = "its initialisation"
	whatInventory = "the inventory"
	whatFast      = "a fast sample"
	whatSlow      = "a slow sample"
	whatEvents    = "events"
)

func (s *Supervisor) startQuestion() question {
	ask := &gpuv1.ChildStart{Protocol: wire.Protocol, Library: s.cfg.Library}
	return question{queries, whatStart, s.cfg.InitTimeout, s.cfg.Notice, &gpuv1.ChildRequest{Ask: &gpuv1.ChildRequest_Start{Start: ask}}}
}

func (s *Supervisor) inventoryQuestion() question {
	return question{queries, whatInventory, s.cfg.CallTimeout, s.cfg.Notice, &gpuv1.ChildRequest{Ask: &gpuv1.ChildRequest_Inventory{Inventory: &gpuv1.ChildInventory{}}}}
}

func (s *Supervisor) sampleQuestion(tier gpuv1.Tier) question {
	what := whatFast
	if tier == gpuv1.Tier_TIER_SLOW {
		what = whatSlow
	}
	return question{queries, what, s.cfg.CallTimeout, s.cfg.Notice, &gpuv1.ChildRequest{Ask: &gpuv1.ChildRequest_Sample{Sample: &gpuv1.ChildSample{Tier: tier}}}}
}

func (s *Supervisor) eventsQuestion(wait time.Duration) question {
	return question{events, whatEvents, wait + s.cfg.CallTimeout, wait + s.cfg.Notice, &gpuv1.ChildRequest{Ask: &gpuv1.ChildRequest_Events{Events: &gpuv1.ChildEvents{WaitMilliseconds: uint32(wait.Milliseconds())}}}}
}

// questions are what a new child must answer before all is well: the inventory,
// and the one on which the last child ended, or a driver that hangs in a sample
// would be well again after each start.
func (s *Supervisor) questions(prove string) []question {
	out := []question{s.inventoryQuestion()}
	switch prove {
	case whatFast:
		out = append(out, s.sampleQuestion(gpuv1.Tier_TIER_FAST))
	case whatSlow:
		out = append(out, s.sampleQuestion(gpuv1.Tier_TIER_SLOW))
	case whatEvents:
		out = append(out, s.eventsQuestion(time.Millisecond))
	}
	return out
}

// Inventory reads what the GPUs are. Its error is a [StateError] while the
// driver cannot be asked.
func (s *Supervisor) Inventory(ctx context.Context) (*gpuv1.Inventory, error) {
	reply, err := s.ask(ctx, s.inventoryQuestion())
	if err != nil {
		return nil, err
	}
	inv := reply.GetInventory()
	if inv.PciGpus, err = pciGPUs(s.cfg.Sysfs); err != nil {
		return nil, err
	}
	return inv, nil
}

// Sample reads how the GPUs are; the slow tier holds the fast one. Its error is
// a [StateError] while the driver cannot be asked.
func (s *Supervisor) Sample(ctx context.Context, tier gpuv1.Tier) (*gpuv1.Sample, error) {
	reply, err := s.ask(ctx, s.sampleQuestion(tier))
	if err != nil {
		return nil, err
	}
	sample := reply.GetSample()
	sample.Calls = reply.GetCalls()
	return sample, nil
}

// Events waits a while for events, and returns none when none came. Events that
// happen while the driver cannot be asked are lost: the kernel's log has them.
// Its error is a [StateError] while the driver cannot be asked.
func (s *Supervisor) Events(ctx context.Context) ([]*gpuv1.GpuEvent, error) {
	reply, err := s.ask(ctx, s.eventsQuestion(s.cfg.EventWait))
	if err != nil {
		return nil, err
	}
	return reply.GetEvents().GetEvents(), nil
}

func (s *Supervisor) ask(ctx context.Context, q question) (*gpuv1.ChildReply, error) {
	s.mu.Lock()
	l, status := s.link, proto.CloneOf(s.status)
	s.mu.Unlock()
	if l == nil {
		return nil, &StateError{status}
	}
	reply, err := l.ask(ctx, q)
	if err != nil {
		return nil, err
	}
	if f := reply.GetFailure(); f != nil {
		return nil, fmt.Errorf("ask for %s: %w", q.what, &StateError{&gpuv1.DriverStatus{State: f.GetState(), Message: f.GetMessage()}})
	}
	return reply, nil
}

// Quiesce ends the program, so that the agent holds no GPU open, and keeps it
// ended until resume is called, once or more often. The error says who still
// holds them: a program that the kernel does not let go, or an end of ctx.
func (s *Supervisor) Quiesce(ctx context.Context) (resume func(), err error) {
	s.mu.Lock()
	s.quiet++
	s.mu.Unlock()
	s.nudge()
	resume = sync.OnceFunc(func() {
		s.mu.Lock()
		s.quiet--
		s.mu.Unlock()
		s.nudge()
		s.Retry()
	})
	for {
		changed := s.Changed()
		if p := s.held(); p != nil {
			resume()
			return nil, fmt.Errorf("let go of the GPUs: process %d was killed and the kernel holds it", p.Pid())
		}
		switch s.Status().GetState() {
		case gpuv1.DriverState_DRIVER_STATE_QUIESCED, gpuv1.DriverState_DRIVER_STATE_OFF:
			return resume, nil
		default: // not yet
		}
		select {
		case <-changed:
		case <-ctx.Done():
			resume()
			return nil, fmt.Errorf("let go of the GPUs: %w", context.Cause(ctx))
		}
	}
}

// nudge wakes whoever waits for a change.
func (s *Supervisor) nudge() {
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.changed)
	s.changed = make(chan struct{})
	s.Retry()
}
