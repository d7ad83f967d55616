package gpus

import (
	"context"
	"fmt"
	"strings"

	healthv1 "github.com/gpuaas/millwright/proto/millwright/health/v1"
	"github.com/gpuaas/millwright/tasks/host"
)

// GPUConditions implements host.GPUHealthReader.
func (s *Set) GPUConditions(ctx context.Context) ([]host.GPUCondition, error) {
	if s.cfg.Conditions == nil {
		return nil, fmt.Errorf("ask what the health rules say: the configuration says gpu.mode: off: %w", host.ErrGPUDriver)
	}
	all, err := s.cfg.Conditions(ctx)
	if err != nil {
		return nil, fmt.Errorf("ask what the health rules say: %w", err)
	}
	var out []host.GPUCondition
	for _, c := range all {
		one := host.GPUCondition{
			Code: c.GetCode(), UUID: c.GetGpuUuid(), PCI: c.GetPciBusId(), State: states[c.GetState()], Severity: severities[c.GetSeverity()],
			Reason: c.GetReason(), Title: c.GetTitle(), Message: c.GetMessage(),
		}
		if a := c.GetAction(); a != healthv1.Action_ACTION_NONE && a != healthv1.Action_ACTION_UNSPECIFIED {
			one.Action = strings.ToLower(strings.TrimPrefix(a.String(), "ACTION_"))
		}
		out = append(out, one)
	}
	return out, nil
}

// GPUIntents implements host.GPUHealthReader.
func (s *Set) GPUIntents(ctx context.Context) ([]host.GPUIntent, error) {
	if s.cfg.Intents == nil {
		return nil, nil
	}
	return s.cfg.Intents(ctx)
}

// A state that is not known here is stale, and a severity fatal: neither is well.
var (
	states = map[healthv1.State]host.GPUConditionState{
		healthv1.State_STATE_OK: host.GPUConditionOK, healthv1.State_STATE_RAISED: host.GPUConditionRaised,
		healthv1.State_STATE_UNKNOWN: host.GPUConditionUnknown, healthv1.State_STATE_STALE: host.GPUConditionStale,
	}
	severities = map[healthv1.Severity]host.GPUSeverity{
		healthv1.Severity_SEVERITY_INFO: host.GPUSeverityInfo, healthv1.Severity_SEVERITY_WARNING: host.GPUSeverityWarning,
		healthv1.Severity_SEVERITY_DEGRADED: host.GPUSeverityDegraded, healthv1.Severity_SEVERITY_FATAL: host.GPUSeverityFatal,
	}
)
