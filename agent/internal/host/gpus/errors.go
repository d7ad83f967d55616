package gpus

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/gpuaas/millwright/agent/internal/gpu/wire"
	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
	"github.com/gpuaas/millwright/tasks/host"
)

// meanings are what NVML's results mean for a task, by their numbers in nvml.h.
var meanings = map[int32]error{
	1:  host.ErrGPUDriver,        // UNINITIALIZED
	3:  host.ErrGPUUnsupported,   // NOT_SUPPORTED
	4:  host.ErrGPUPermission,    // NO_PERMISSION
	6:  host.ErrGPUUnknown,       // NOT_FOUND
	9:  host.ErrGPUDriver,        // DRIVER_NOT_LOADED
	10: host.ErrGPUUnresponsive,  // TIMEOUT
	13: host.ErrGPUUnsupported,   // FUNCTION_NOT_FOUND: the driver is too old
	15: host.ErrGPULost,          // GPU_IS_LOST
	16: host.ErrGPUResetRequired, // RESET_REQUIRED
	18: host.ErrGPUDriver,        // LIB_RM_VERSION_MISMATCH
	19: host.ErrGPUInUse,         // IN_USE
	23: host.ErrGPUResources,     // INSUFFICIENT_RESOURCES
	28: host.ErrGPUUnknown,       // GPU_NOT_FOUND
}

// failure is why a question has no answer.
func failure(f *gpuv1.ChildFailure) error {
	meaning := meanings[f.GetCode()]
	switch f.GetState() {
	case gpuv1.DriverState_DRIVER_STATE_LIBRARY_MISSING, gpuv1.DriverState_DRIVER_STATE_SYMBOL_MISSING,
		gpuv1.DriverState_DRIVER_STATE_VERSION_MISMATCH, gpuv1.DriverState_DRIVER_STATE_DRIVER_NOT_LOADED,
		gpuv1.DriverState_DRIVER_STATE_PROGRAM_UNUSABLE:
		meaning = host.ErrGPUDriver
	default: // the code says more
	}
	if meaning == nil {
		return errors.New(f.GetMessage())
	}
	return fmt.Errorf("%s: %w", f.GetMessage(), meaning)
}

// unread is the error of a part of the layout that the driver did not tell.
func unread(u *gpuv1.Unknown) error {
	err := fmt.Errorf("%s does not tell %s (NVML error %d)", u.GetFunction(), u.GetField(), u.GetCode())
	if m := meanings[u.GetCode()]; m != nil {
		return fmt.Errorf("%w: %w", err, m)
	}
	return err
}

// answer reads what millwright-gpu wrote. Without a whole answer nothing is
// known, since a call into the driver may end the process.
func answer(wrote []byte, otherwise string) (*gpuv1.ChildReply, error) {
	reply := &gpuv1.ChildReply{}
	if err := wire.Read(bytes.NewReader(wrote), reply); err != nil {
		return nil, fmt.Errorf("millwright-gpu gave no answer: %s: %w", strings.TrimSpace(otherwise), host.ErrGPUUnresponsive)
	}
	if f := reply.GetFailure(); f != nil {
		return nil, failure(f)
	}
	return reply, nil
}

// ended is the error of a program that did not end by itself. That the caller
// left is no word on the driver.
func ended(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return err
	}
	return fmt.Errorf("%w: %w", err, host.ErrGPUUnresponsive)
}
