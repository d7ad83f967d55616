package health

import (
	"strings"
	"time"

	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
	healthv1 "github.com/gpuaas/millwright/proto/millwright/health/v1"
)

const (
	// slowSpan and slowShare: held down for a twentieth of five minutes.
	slowSpan  = 5 * time.Minute
	slowShare = slowSpan / 20
	// nearShutdown is how close to its end a temperature is fatal, in degrees.
	nearShutdown = 5
)

func heatRules() []Rule {
	return []Rule{
		{
			Code: "gpu.hw_thermal_slowdown", Severity: degraded, Action: cooling, Title: "slowed down for heat",
			Meaning:   "The hardware holds the clocks down because the GPU is too hot.",
			Threshold: "5 % of five minutes", judge: func(v *view) finding {
				return v.held("throttle_hw_thermal_nanoseconds", v.now.ThrottleHwThermalNanoseconds, "the hardware held the clocks down for heat")
			},
		},
		{
			Code: "gpu.power_brake", Severity: degraded, Action: power, Title: "slowed down by the power brake",
			Meaning:   "The power supply told the GPU to hold its clocks down.",
			Threshold: "5 % of five minutes", judge: func(v *view) finding {
				return v.held("throttle_power_brake_nanoseconds", v.now.ThrottlePowerBrakeNanoseconds, "the power brake held the clocks down")
			},
		},
		{
			Code: "gpu.sw_thermal_slowdown", Severity: info, Action: none, Title: "clocks lowered for heat",
			Meaning:   "The driver lowers the clocks to keep the temperature: usual under load in a warm room.",
			Threshold: "5 % of five minutes", judge: func(v *view) finding {
				return v.held("throttle_sw_thermal_nanoseconds", v.now.ThrottleSwThermalNanoseconds, "the driver lowered the clocks for heat")
			},
		},
		{
			Code: "gpu.temperature", Severity: degraded, Action: cooling, Title: "GPU is too hot",
			Meaning:   "The GPU is hotter than in any normal work. It slows down, and then switches itself off.",
			Threshold: "above the driver's limit; fatal 5 degrees below its shutdown", judge: func(v *view) finding {
				return hot(v, "gpu_celsius", v.now.GpuCelsius, v.of.GpuMaxCelsius, v.of.ShutdownCelsius)
			},
		},
		{
			Code: "gpu.memory_temperature", Severity: degraded, Action: cooling, Title: "GPU memory is too hot",
			Meaning:   "The GPU's memory is hotter than in any normal work.",
			Threshold: "above the driver's limit", judge: func(v *view) finding {
				return hot(v, "memory_celsius", v.now.MemoryCelsius, v.of.MemoryMaxCelsius, nil)
			},
		},
	}
}

func (v *view) held(field string, value *uint64, words string) finding {
	if value == nil {
		return v.cannot(field)
	}
	n := time.Duration(v.grew(field, *value, slowSpan))
	return when(n >= slowShare, "ABOVE_THRESHOLD", "%s", words).with("of_five_minutes", n.Round(time.Millisecond), "threshold", slowShare)
}

func hot(v *view, field string, now, most, shutdown *uint32) finding {
	if now == nil {
		return v.cannot(field)
	}
	if shutdown != nil && *shutdown > nearShutdown && *now >= *shutdown-nearShutdown {
		return raise("NEAR_SHUTDOWN", "it is about to switch itself off for heat").as(fatal, cooling).with("celsius", *now, "shutdown", *shutdown)
	}
	if most == nil || *most == 0 {
		return finding{state: unknown, reason: "NO_LIMIT", message: "the driver does not say how hot it may be"}
	}
	return when(*now > *most, "ABOVE_THRESHOLD", "it is hotter than in any normal work").with("celsius", *now, "limit", *most)
}

func deviceRules() []Rule {
	return []Rule{
		{
			Code: "gpu.recovery_action", Severity: fatal, Action: resetGPU, Title: "the driver asks for a recovery",
			Meaning:   "The driver says by itself what the GPU needs. That counts before any table of errors.",
			Threshold: "any but none", judge: recovery,
		},
		{
			Code: "gpu.lost", Severity: fatal, Action: reboot, Title: "GPU is lost",
			Meaning:   "The driver cannot reach the GPU any more.",
			Threshold: "the driver says lost, for any value", judge: func(v *view) finding {
				return when(v.says(gpuv1.UnknownReason_UNKNOWN_REASON_GPU_LOST), "GPU_LOST", "the driver cannot reach the GPU any more")
			},
		},
		{
			Code: "gpu.reset_required", Severity: fatal, Action: resetGPU, Title: "GPU must be reset",
			Meaning:   "The driver says that the GPU must be reset before it works again.",
			Threshold: "the driver says so, for any value", judge: func(v *view) finding {
				return when(v.says(gpuv1.UnknownReason_UNKNOWN_REASON_RESET_REQUIRED), "RESET_REQUIRED", "the driver wants the GPU to be reset")
			},
		},
		{
			Code: "gpu.inforom", Severity: degraded, Action: support, Title: "infoROM is corrupt",
			Meaning:   "The board's small store of settings and counts is damaged: what it says of the GPU's life cannot be trusted.",
			Threshold: "the driver says corrupt", judge: func(v *view) finding {
				if v.of.InforomValid == nil {
					return inventoryUnknown(v.of, "inforom_valid")
				}
				return when(!v.of.GetInforomValid(), "CORRUPT", "the driver finds the infoROM corrupt")
			},
		},
		{
			Code: "gpu.ecc_mode_pending", Severity: degraded, Action: resetWhenIdle, Title: "ECC mode waits for a reset", slow: true,
			Meaning:   "Someone changed the ECC mode, and it takes effect at the next reset.",
			Threshold: "mode now and mode after a reset differ", judge: func(v *view) finding {
				return pending(v, "ecc_enabled", v.now.EccEnabled, v.now.EccPending)
			},
		},
		{
			Code: "gpu.mig_mode_pending", Severity: degraded, Action: resetWhenIdle, Title: "MIG mode waits for a reset", slow: true,
			Meaning:   "Someone changed the MIG mode, and it takes effect at the next reset.",
			Threshold: "mode now and mode after a reset differ", judge: func(v *view) finding {
				return pending(v, "mig_enabled", v.now.MigEnabled, v.now.MigPending)
			},
		},
	}
}

func inventoryUnknown(g *gpuv1.Gpu, field string) finding {
	for _, u := range g.GetUnknown() {
		if u.GetField() == field {
			return missing(u)
		}
	}
	return finding{state: unknown, reason: "NOT_READ", message: "the value was not read: " + field}
}

// says reports whether any value of the GPU, or of its links, is missing for
// the reason.
func (v *view) says(reason gpuv1.UnknownReason) bool {
	for _, u := range v.now.GetUnknown() {
		if u.GetReason() == reason {
			return true
		}
	}
	return false
}

func pending(v *view, field string, now, next *bool) finding {
	if now == nil || next == nil {
		return v.cannot(field)
	}
	return when(*now != *next, "RESET_PENDING", "%s is %v and becomes %v at the next reset", strings.TrimSuffix(field, "_enabled"), *now, *next)
}

// recovery is the driver's own verdict: asked for, or as XID 154 told it where
// the driver cannot be asked.
func recovery(v *view) finding {
	if v.now.RecoveryAction != nil {
		v.gpu.toldAction = nil
		return recoveryFinding(v.now.GetRecoveryAction(), healthv1.Source_SOURCE_DRIVER)
	}
	if v.gpu.toldAction != nil {
		return recoveryFinding(*v.gpu.toldAction, healthv1.Source_SOURCE_KERNEL_LOG)
	}
	return v.cannot("recovery_action")
}

func recoveryFinding(n uint32, from healthv1.Source) finding {
	action, words := driverAction(n)
	f := when(n != 0, "DRIVER_VERDICT", "the driver asks: %s", words).with("recovery_action", n)
	f.action, f.source = action, from
	return f
}

// driverAction is what NVML's number of a recovery action recommends.
func driverAction(n uint32) (healthv1.Action, string) {
	switch n {
	case 0:
		return none, "nothing"
	case 1:
		return resetGPU, "reset the GPU"
	case 2:
		return reboot, "reboot the node"
	case 3:
		return healthv1.Action_ACTION_DRAIN_PEERS, "take the work off the GPU's peers"
	case 4:
		return resetGPU, "take the work off the GPU and reset it"
	case 5:
		return healthv1.Action_ACTION_RECOVER_IMEX_DOMAIN, "recover the IMEX domain"
	case 6:
		return healthv1.Action_ACTION_RESET_BUS, "reset the GPU's bus"
	case 7:
		return healthv1.Action_ACTION_POWER_CYCLE, "switch the machine off and on"
	}
	return support, "something that this agent does not know"
}
