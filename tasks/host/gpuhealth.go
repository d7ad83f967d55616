package host

import "context"

// GPUConditionState is what is known of a condition.
type GPUConditionState string

// The states. What is unknown could not be asked for, and what is stale was known
// once: neither is well.
const (
	GPUConditionOK      GPUConditionState = "ok"
	GPUConditionRaised  GPUConditionState = "raised"
	GPUConditionUnknown GPUConditionState = "unknown"
	GPUConditionStale   GPUConditionState = "stale"
)

// GPUSeverity is how bad a condition is that is raised.
type GPUSeverity string

// The severities.
const (
	GPUSeverityInfo     GPUSeverity = "info"
	GPUSeverityWarning  GPUSeverity = "warning"
	GPUSeverityDegraded GPUSeverity = "degraded"
	// GPUSeverityFatal makes a node not ready.
	GPUSeverityFatal GPUSeverity = "fatal"
)

// GPUCondition is what the agent's health rules say of one thing.
type GPUCondition struct {
	// Code is its name, such as gpu.pcie_width.
	Code string
	// UUID is the GPU, and PCI its place; both empty: it is about the node.
	UUID, PCI string
	State     GPUConditionState
	Severity  GPUSeverity
	// Reason is a code, Title what it is, and Message what was found.
	Reason, Title, Message string
	// Action is what is recommended, such as reset_gpu, or empty.
	Action string
}

// GPUHealthReader knows what the agent's health rules say, and what its intents
// want.
type GPUHealthReader interface {
	// GPUConditions has the GPUs looked at anew, and returns all conditions by code
	// and GPU. While they cannot be looked at it returns what was known, as stale.
	// Where nobody looks after GPUs the error wraps [ErrGPUDriver].
	GPUConditions(ctx context.Context) ([]GPUCondition, error)
	// GPUIntents says of each intent in force that lays GPUs out whether it holds now,
	// by key.
	GPUIntents(ctx context.Context) ([]GPUIntent, error)
}

// GPUIntent is an intent that lays GPUs out.
type GPUIntent struct {
	// Key is its own, as the owner's file of a GPU has it.
	Key string
	// Problem is why it does not hold, or nothing.
	Problem string
}
