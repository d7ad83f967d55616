package gpu

import (
	"fmt"
	"strings"

	"google.golang.org/protobuf/proto"

	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
)

// What an answer may hold. It is more than any node has, and so little that what
// the driver's library has damaged cannot fill the journal or the memory.
const (
	mostGPUs   = 256
	mostEvents = 1024
	mostName   = 96 // bytes of a UUID, or of a place on the PCI bus
	mostWords  = 1024
)

// nonsense is why a link ended: what came is no answer to what was asked. The
// library shares the memory of millwright-gpu, and may have written over it.
type nonsense struct {
	what string // was asked; empty when that is not known
	why  string
}

func (n *nonsense) Error() string { return "what millwright-gpu said is no answer: " + n.why }

// sound returns an error for a reply that is not what its question asks for.
func (q question) sound(r *gpuv1.ChildReply) error {
	odd := func(format string, args ...any) error {
		return &nonsense{q.what, fmt.Sprintf("asked for "+q.what+", "+format, args...)}
	}
	if f := r.GetFailure(); f != nil {
		if !refusal(f.GetState()) {
			return odd("it failed with the state %v", f.GetState())
		}
		return nil
	}
	var answer proto.Message
	var names []string
	count := 0
	switch q.request.GetAsk().(type) {
	case *gpuv1.ChildRequest_Start:
		answer, count = r.GetStarted(), int(r.GetStarted().GetGpus())
	case *gpuv1.ChildRequest_Inventory:
		answer, count = r.GetInventory(), len(r.GetInventory().GetGpus())
		for _, g := range r.GetInventory().GetGpus() {
			names = append(names, g.GetUuid(), g.GetPciBusId())
		}
	case *gpuv1.ChildRequest_Sample:
		answer, count = r.GetSample(), max(int(r.GetSample().GetCount()), len(r.GetSample().GetGpus()))
		for _, g := range r.GetSample().GetGpus() {
			names = append(names, g.GetUuid(), g.GetPciBusId())
		}
	case *gpuv1.ChildRequest_Events:
		answer = r.GetEvents()
		if n := len(r.GetEvents().GetEvents()); n > mostEvents {
			return odd("it told of %d events", n)
		}
		for _, e := range r.GetEvents().GetEvents() {
			names = append(names, e.GetUuid(), e.GetPciBusId())
		}
	}
	if answer == nil || !answer.ProtoReflect().IsValid() {
		return odd("it answered with something else")
	}
	if count > mostGPUs {
		return odd("it told of %d GPUs, and at most %d are believed", count, mostGPUs)
	}
	for _, name := range names {
		if len(name) > mostName {
			return odd("it named a GPU with %d bytes", len(name))
		}
	}
	return nil
}

// refusal is whether a state is one in which a driver refuses to answer.
func refusal(s gpuv1.DriverState) bool {
	switch s {
	case gpuv1.DriverState_DRIVER_STATE_LIBRARY_MISSING, gpuv1.DriverState_DRIVER_STATE_SYMBOL_MISSING, gpuv1.DriverState_DRIVER_STATE_VERSION_MISMATCH,
		gpuv1.DriverState_DRIVER_STATE_DRIVER_NOT_LOADED, gpuv1.DriverState_DRIVER_STATE_PROGRAM_UNUSABLE, gpuv1.DriverState_DRIVER_STATE_ERROR,
		gpuv1.DriverState_DRIVER_STATE_NO_GPUS:
		return true
	default:
		return false
	}
}

// words makes what a program or a library said fit for a message: protobuf takes
// only UTF-8, and one bad byte would end the session that has to tell of it.
func words(s string) string {
	return strings.ToValidUTF8(s[:min(len(s), mostWords)], "\uFFFD")
}
