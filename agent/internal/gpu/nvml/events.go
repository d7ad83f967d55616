//go:build cgo

package nvml

import (
	"time"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
	"google.golang.org/protobuf/types/known/timestamppb"

	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
)

// watch is the set of events that is waited for.
type watch struct {
	set   gonvml.EventSet
	of    []*device // for which it was made
	ready bool
}

// wanted are the events that mean something; single-bit errors are noise, which
// their storm is not.
const wanted = gonvml.EventTypeXidCriticalError | gonvml.EventTypeDoubleBitEccError | gonvml.EventTypeSingleBitEccErrorStorm |
	gonvml.EventTypeDramRetirementEvent | gonvml.EventTypeDramRetirementFailure | gonvml.EventTypeNonFatalPoisonError |
	gonvml.EventTypeFatalPoisonError | gonvml.EventTypeGpuUnavailableError | gonvml.EventTypeGpuRecoveryAction

const (
	mostEvents = 64                     // in one answer
	afterError = 500 * time.Millisecond // a set that fails at once must not spin
	noInstance = 0xFFFFFFFF
)

// Wait waits for the first event and takes those that are there with it. Where
// the driver tells no events it waits in vain.
func (l *Library) Wait(most time.Duration) ([]*gpuv1.GpuEvent, error) {
	all := l.all()
	if !l.watch.ready || len(all) > 0 && (len(l.watch.of) != len(all) || l.watch.of[0] != all[0]) {
		if !l.register(all) {
			pause(most)
			return nil, nil
		}
	}
	var out []*gpuv1.GpuEvent
	for wait := most; len(out) < mostEvents; wait = 0 {
		e, ret := call(l, "EventSetWait", func() (gonvml.EventData, gonvml.Return) {
			return l.api.EventSetWait(l.watch.set, uint32(wait.Milliseconds()))
		})
		switch {
		case ret == gonvml.SUCCESS:
			out = append(out, l.event(e))
			continue
		case ret == gonvml.ERROR_TIMEOUT || len(out) > 0:
			return out, nil
		}
		l.drop()
		pause(afterError)
		return nil, failed("EventSetWait", ret)
	}
	return out, nil
}

func pause(d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	<-timer.C
}

// register makes the set; it reports whether any GPU tells events.
func (l *Library) register(all []*device) bool {
	l.drop()
	set, ret := call(l, "EventSetCreate", l.api.EventSetCreate)
	if ret != gonvml.SUCCESS {
		return false
	}
	some := false
	for _, d := range all {
		if d.handle == nil {
			continue
		}
		can, ret := call(l, "DeviceGetSupportedEventTypes", func() (uint64, gonvml.Return) { return l.api.DeviceGetSupportedEventTypes(d.handle) })
		if ret != gonvml.SUCCESS || can&wanted == 0 {
			continue
		}
		_, ret = call(l, "DeviceRegisterEvents", func() (none, gonvml.Return) { return none{}, l.api.DeviceRegisterEvents(d.handle, can&wanted, set) })
		some = some || ret == gonvml.SUCCESS
	}
	l.watch = watch{set: set, of: all, ready: true}
	if !some {
		l.drop()
	}
	return some
}

// drop frees the set.
func (l *Library) drop() {
	if l.watch.ready {
		_, _ = call(l, "EventSetFree", func() (none, gonvml.Return) { return none{}, l.api.EventSetFree(l.watch.set) }) // the driver frees it with the process
	}
	l.watch = watch{}
}

func (l *Library) event(e gonvml.EventData) *gpuv1.GpuEvent {
	out := &gpuv1.GpuEvent{ReadAt: timestamppb.New(l.clock.Now()), Type: e.EventType, Data: e.EventData}
	for _, d := range l.watch.of {
		if d.handle == e.Device {
			out.Uuid, out.PciBusId = d.uuid, d.pci
		}
	}
	if e.GpuInstanceId != noInstance {
		out.GpuInstanceId = &e.GpuInstanceId
	}
	if e.ComputeInstanceId != noInstance {
		out.ComputeInstanceId = &e.ComputeInstanceId
	}
	return out
}
