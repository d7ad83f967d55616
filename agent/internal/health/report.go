package health

import (
	"fmt"
	"strings"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
	healthv1 "github.com/gpuaas/millwright/proto/millwright/health/v1"
)

// mostGPUs bounds a report.
const mostGPUs = 64

// report is how the GPUs are now.
func (e *engine) report(whole bool, number uint64, t moment) *healthv1.HealthReport {
	r := &healthv1.HealthReport{
		BootId: e.cfg.BootID, Number: number, ReportTime: timestamppb.New(t.wall), Whole: whole,
		Period: durationpb.New(e.cfg.Period), Driver: proto.CloneOf(e.driver), XidTable: e.xids.Version,
	}
	if e.sample != nil {
		r.Sample = proto.CloneOf(e.sample)
		r.Sample.Gpus = r.Sample.Gpus[:min(len(r.Sample.Gpus), mostGPUs)]
	}
	if !whole {
		return r
	}
	if e.inventory != nil {
		r.Inventory = proto.CloneOf(e.inventory)
		r.Inventory.Gpus = r.Inventory.Gpus[:min(len(r.Inventory.Gpus), mostGPUs)]
		r.Inventory.Topology = r.Inventory.Topology[:min(len(r.Inventory.Topology), mostGPUs*(mostGPUs-1)/2)]
	}
	for _, c := range e.all() {
		r.Conditions = append(r.Conditions, proto.CloneOf(c.now))
	}
	return r
}

// concerned reports whether the node has to do with GPUs, as far as is known.
func (e *engine) concerned() bool {
	switch e.driver.GetState() {
	case gpuv1.DriverState_DRIVER_STATE_OFF:
		return false
	case gpuv1.DriverState_DRIVER_STATE_STARTING, gpuv1.DriverState_DRIVER_STATE_NO_GPUS:
		if len(e.inventory.GetGpus()) > 0 || e.cfg.Expected > 0 {
			return true
		}
		for _, c := range e.conditions {
			if c.now.GetState() == raised {
				return true
			}
		}
		return false
	default:
		return true
	}
}

// Ready is whether work that needs the node's GPUs should come to it.
type Ready struct {
	// State is OK, RAISED for not ready, or UNKNOWN.
	State healthv1.State
	// Reason is a code, and Message the same in words.
	Reason, Message string
}

// ready judges the node; nil where it has no GPUs to judge.
func (e *engine) ready() *Ready {
	state := e.driver.GetState()
	var bad []*healthv1.Condition
	stales := 0
	for _, c := range e.all() {
		switch {
		case c.now.GetState() == raised && c.now.GetSeverity() == fatal:
			bad = append(bad, c.now)
		case c.now.GetState() == stale:
			stales++
		}
	}
	switch {
	case state == gpuv1.DriverState_DRIVER_STATE_OFF:
		return nil
	case len(bad) > 0:
		words := bad[0].GetTitle()
		if bad[0].GetGpuUuid() != "" {
			words = bad[0].GetGpuUuid() + ": " + words
		}
		if len(bad) > 1 {
			words += fmt.Sprintf("; and %d more", len(bad)-1)
		}
		reason := strings.ToUpper(strings.NewReplacer(".", "_").Replace(bad[0].GetCode()))
		return &Ready{State: raised, Reason: reason, Message: words}
	case state == gpuv1.DriverState_DRIVER_STATE_NO_GPUS && e.cfg.Expected == 0:
		return nil
	case state != gpuv1.DriverState_DRIVER_STATE_OK:
		return &Ready{State: unknown, Reason: "DRIVER_" + strings.TrimPrefix(state.String(), "DRIVER_STATE_"), Message: e.driver.GetMessage()}
	case e.sample == nil, stales > 0:
		return &Ready{State: unknown, Reason: "NO_SAMPLE", Message: "the GPUs were not looked at lately"}
	}
	return &Ready{State: ok, Reason: "READY", Message: fmt.Sprintf("%d GPUs", len(e.sample.GetGpus()))}
}
