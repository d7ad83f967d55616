// Package gpus asks and changes the node's GPUs.
package gpus

import (
	"context"

	"github.com/gpuaas/millwright/tasks/host"
)

// Set implements the GPU side of package host.
type Set struct{}

// GPUs implements host.GPUReader.
func (*Set) GPUs(context.Context) ([]host.GPU, error) { return nil, host.ErrGPUDriver }

// GPUState implements host.GPUReader.
func (*Set) GPUState(context.Context, string) (host.GPUState, error) {
	return host.GPUState{}, host.ErrGPUDriver
}

// GPUHolders implements host.GPUReader.
func (*Set) GPUHolders(context.Context, string) ([]host.GPUHolder, error) {
	return nil, host.ErrGPUDriver
}

// CDI implements host.CDIReader.
func (*Set) CDI(context.Context) (host.CDISpec, error) { return host.CDISpec{}, host.ErrGPUDriver }

// ResolveCDI implements host.CDIReader.
func (*Set) ResolveCDI(context.Context, string) ([]string, error) { return nil, host.ErrGPUDriver }

// SetMIGMode implements host.MIGWriter.
func (*Set) SetMIGMode(context.Context, string, bool) (host.MIGActivation, error) {
	return "", host.ErrGPUDriver
}

// CreateGPUInstance implements host.MIGWriter.
func (*Set) CreateGPUInstance(context.Context, string, host.MIGPlace) error {
	return host.ErrGPUDriver
}

// DestroyGPUInstance implements host.MIGWriter.
func (*Set) DestroyGPUInstance(context.Context, string, host.MIGPlace) error {
	return host.ErrGPUDriver
}

// CreateComputeInstance implements host.MIGWriter.
func (*Set) CreateComputeInstance(context.Context, string, host.MIGPlace, host.MIGComputePlace) error {
	return host.ErrGPUDriver
}

// DestroyComputeInstance implements host.MIGWriter.
func (*Set) DestroyComputeInstance(context.Context, string, host.MIGPlace, host.MIGComputePlace) error {
	return host.ErrGPUDriver
}

// SetGPUPersistence implements host.GPUWriter.
func (*Set) SetGPUPersistence(context.Context, string, bool) error { return host.ErrGPUDriver }

// ResetGPUs implements host.GPUWriter.
func (*Set) ResetGPUs(context.Context, []string) error { return host.ErrGPUDriver }

// WriteCDI implements host.GPUWriter.
func (*Set) WriteCDI(context.Context) error { return host.ErrGPUDriver }
