package health

import (
	"fmt"
	"strings"
	"time"

	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
)

// The thresholds of links. Replays of PCIe: 8 in a minute is what DCGM's limits
// header gives as the most that NVIDIA's resource manager recommends. NVLink: one
// replay or recovery, and 100 CRC errors a second, by the same header.
const (
	replaysPerMinute = 8
	replaysSustained = 80 // in ten minutes
	crcPerMinute     = 100 * 60
	fabricPatience   = 10 * time.Minute
)

func linkRules() []Rule {
	return []Rule{
		{
			Code: "gpu.pcie_replays", Severity: warning, Action: hardware, Title: "PCIe packets are sent again",
			Meaning:   "The link to the GPU loses packets. It may sit badly in its slot, or a riser or cable is bad.",
			Threshold: "8 in a minute; degraded at 80 in ten minutes", judge: pcieReplays,
		},
		{
			Code: "gpu.pcie_errors", Severity: degraded, Action: hardware, Title: "PCIe errors", slow: true,
			Meaning:   "The link to the GPU had errors that were not corrected.",
			Threshold: "1 in ten minutes", judge: pcieErrors,
		},
		{
			Code: "gpu.pcie_width", Severity: degraded, Action: hardware, Title: "PCIe link is narrow", slow: true,
			Meaning:   "The link to the GPU uses fewer lanes than GPU and slot have.",
			Threshold: "below the greatest of GPU and slot", judge: func(v *view) finding {
				if v.now.PcieWidth == nil {
					return v.cannot("pcie_width")
				}
				if v.of.PcieMaxWidth == nil {
					return finding{state: unknown, reason: "NO_LIMIT", message: "the driver does not say how wide the link can be"}
				}
				now, most := v.now.GetPcieWidth(), v.of.GetPcieMaxWidth()
				return when(now < most, "BELOW_MAXIMUM", "the PCIe link uses %d of %d lanes", now, most).with("width", now, "maximum", most)
			},
		},
		{
			Code: "gpu.pcie_generation", Severity: degraded, Action: hardware, Title: "PCIe link is slow", slow: true,
			Meaning:   "The link to the GPU runs at a lower generation than GPU and slot have, and the GPU is busy: an idle one saves power so.",
			Threshold: "below the greatest of GPU and slot while busy", judge: pcieGeneration,
		},
		{
			Code: "gpu.nvlink_down", Severity: fatal, Action: resetGPU, Title: "NVLink is down", slow: true,
			Meaning:   "A link between GPUs is down while others are up. Work on several GPUs is slow or fails.",
			Threshold: "1 link", judge: linksDown,
		},
		{
			Code: "gpu.nvlink_errors", Severity: warning, Action: hardware, Title: "NVLink errors",
			Meaning:   "A link between GPUs replays, recovers, or has CRC errors at a high rate.",
			Threshold: "1 replay, 1 recovery or 6,000 CRC errors in a minute", judge: linkErrors,
		},
		{
			Code: "gpu.nvlink_recovery_failed", Severity: degraded, Action: resetGPU, Title: "NVLink did not recover", slow: true,
			Meaning:   "A link between GPUs failed to recover from an error.",
			Threshold: "1 in ten minutes", judge: linkRecoveries,
		},
		{
			Code: "gpu.fabric", Severity: fatal, Action: resetGPU, Title: "NVLink fabric is not well", slow: true,
			Meaning:   "The GPU is not registered with the fabric of its switches, or the fabric is not well. Programs get CUDA error 802.",
			Threshold: "not complete for 10 minutes, or complete and not well", judge: fabric,
		},
	}
}

func pcieReplays(v *view) finding {
	if v.now.PcieReplays == nil {
		return v.cannot("pcie_replays")
	}
	minute := v.grew("pcie_replays", v.now.GetPcieReplays(), time.Minute)
	ten := v.grew("pcie_replays_sustained", v.now.GetPcieReplays(), 10*time.Minute)
	if ten >= replaysSustained {
		return raise("SUSTAINED", "PCIe packets are sent again all the time").as(degraded, hardware).with("in_ten_minutes", ten, "threshold", replaysSustained)
	}
	return when(minute >= replaysPerMinute, "ABOVE_THRESHOLD", "PCIe packets are sent again").with("in_a_minute", minute, "threshold", replaysPerMinute)
}

func pcieErrors(v *view) finding {
	if v.now.PcieFatalErrors == nil || v.now.PcieNonfatalErrors == nil {
		return v.cannot("pcie_fatal_errors", "pcie_nonfatal_errors")
	}
	f := v.grew("pcie_fatal", v.now.GetPcieFatalErrors(), 10*time.Minute)
	n := v.grew("pcie_nonfatal", v.now.GetPcieNonfatalErrors(), 10*time.Minute)
	return when(f+n > 0, "ABOVE_THRESHOLD", "PCIe errors that were not corrected").with("fatal", f, "not_fatal", n)
}

func pcieGeneration(v *view) finding {
	if v.now.PcieGeneration == nil {
		return v.cannot("pcie_generation")
	}
	if v.of.PcieMaxGeneration == nil {
		return finding{state: unknown, reason: "NO_LIMIT", message: "the driver does not say how fast the link can be"}
	}
	now, most := v.now.GetPcieGeneration(), v.of.GetPcieMaxGeneration()
	if now >= most {
		return well()
	}
	if v.now.GetGpuUtilizationPercent() == 0 {
		return finding{state: unknown, reason: "IDLE", message: "the GPU is idle, and may save power on its link", keep: true}
	}
	return raise("BELOW_MAXIMUM", "the PCIe link of a busy GPU runs at generation %d of %d", now, most).with("generation", now, "maximum", most)
}

func linksDown(v *view) finding {
	if len(v.now.GetNvlinks()) == 0 {
		return finding{state: unknown, reason: "NO_LINKS", message: "the GPU names no NVLink"}
	}
	var down []string
	known := 0
	for _, l := range v.now.GetNvlinks() {
		if l.Active == nil {
			continue
		}
		if known++; !l.GetActive() {
			down = append(down, fmt.Sprint(l.GetLink()))
		}
	}
	switch {
	case known == 0:
		return missing(linkUnknown(v.now.GetNvlinks()[0], "active"))
	case len(down) > 0 && !v.links:
		return finding{state: unknown, reason: "NONE_UP", message: "no NVLink of the node is up: they are not connected, or all down"}
	}
	return when(len(down) > 0, "DOWN", "%d of %d NVLinks are down", len(down), known).with("links", strings.Join(down, ","))
}

func linkUnknown(l *gpuv1.NvLinkSample, field string) *gpuv1.Unknown {
	for _, u := range l.GetUnknown() {
		if u.GetField() == field {
			return u
		}
	}
	return &gpuv1.Unknown{Field: field, Reason: gpuv1.UnknownReason_UNKNOWN_REASON_ERROR}
}

func linkErrors(v *view) finding {
	n := [3]*uint64{v.now.NvlinkReplayErrors, v.now.NvlinkRecoveryErrors, v.now.NvlinkCrcErrors}
	if n[0] == nil || n[1] == nil || n[2] == nil {
		var known bool // from Hopper on only each link for itself tells
		if n, known = linkSums(v.now.GetNvlinks()); !known {
			f := v.cannot("nvlink_replay_errors", "nvlink_recovery_errors", "nvlink_crc_errors")
			f.keep = len(v.now.GetNvlinks()) == 0
			return f
		}
	}
	replays := v.grew("nvlink_replay", *n[0], time.Minute)
	recoveries := v.grew("nvlink_recovery", *n[1], time.Minute)
	crc := v.grew("nvlink_crc", *n[2], time.Minute)
	return when(replays > 0 || recoveries > 0 || crc >= crcPerMinute, "ABOVE_THRESHOLD", "NVLink errors").
		with("replays", replays, "recoveries", recoveries, "crc_errors", crc)
}

// linkSums adds up what the links count.
func linkSums(links []*gpuv1.NvLinkSample) (n [3]*uint64, known bool) {
	var sum [3]uint64
	for _, l := range links {
		if l.ReplayErrors == nil || l.RecoveryErrors == nil || l.CrcErrors == nil {
			return n, false
		}
		sum[0], sum[1], sum[2] = sum[0]+l.GetReplayErrors(), sum[1]+l.GetRecoveryErrors(), sum[2]+l.GetCrcErrors()
	}
	return [3]*uint64{&sum[0], &sum[1], &sum[2]}, len(links) > 0
}

func linkRecoveries(v *view) finding {
	if len(v.now.GetNvlinks()) == 0 {
		return finding{state: unknown, reason: "NO_LINKS", message: "the GPU names no NVLink"}
	}
	var failed uint64
	known := false
	for _, l := range v.now.GetNvlinks() {
		if l.FailedRecoveries != nil {
			known, failed = true, failed+l.GetFailedRecoveries()
		}
	}
	if !known {
		return missing(linkUnknown(v.now.GetNvlinks()[0], "failed_recoveries"))
	}
	n := v.grew("nvlink_recovery_failed", failed, 10*time.Minute)
	return when(n > 0, "ABOVE_THRESHOLD", "NVLinks did not recover").with("in_ten_minutes", n)
}

// The states and summaries of a fabric, as NVML numbers them.
const (
	fabricNotSupported = 0
	fabricComplete     = 3
	fabricWell         = 1
	fabricLimited      = 3
)

func fabric(v *view) finding {
	f := v.now.GetFabric()
	switch {
	case f == nil:
		return v.cannot("fabric")
	case f.GetState() == fabricNotSupported:
		return finding{state: unknown, reason: "NOT_SUPPORTED", message: "the GPU has no NVLink fabric"}
	case f.GetState() != fabricComplete:
		if v.gpu.fabricSince == 0 {
			v.gpu.fabricSince = v.at
		}
		if v.at-v.gpu.fabricSince < fabricPatience {
			return finding{state: unknown, reason: "IN_PROGRESS", message: "the GPU is being registered with the fabric"}
		}
		return raise("NOT_COMPLETE", "the GPU was not registered with the fabric within %v", fabricPatience).with("state", f.GetState())
	}
	v.gpu.fabricSince = 0
	if f.GetStatus() != 0 {
		return raise("REGISTRATION_FAILED", "the GPU's registration with the fabric failed with %d", f.GetStatus()).with("status", f.GetStatus())
	}
	if bad := fabricMask(f.GetHealthMask()); f.HealthMask != nil && len(bad) > 0 {
		return raise("UNHEALTHY", "the fabric says: %s", strings.Join(bad, ", ")).with("mask", fmt.Sprintf("%#x", f.GetHealthMask()))
	}
	switch {
	case f.HealthSummary != nil && f.GetHealthSummary() == fabricLimited:
		return raise("LIMITED", "the fabric has less than its capacity").as(degraded, hardware)
	case f.HealthSummary != nil && f.GetHealthSummary() > fabricWell:
		return raise("UNHEALTHY", "the driver's summary of the fabric is %d", f.GetHealthSummary())
	}
	return well()
}

// fabricMask names what a health mask says is wrong. Two bits each are 1 for
// yes and 2 for no; the four bits of the configuration are 1 for right.
func fabricMask(mask uint32) (bad []string) {
	for _, m := range []struct {
		shift uint
		words string
	}{{0, "bandwidth is degraded"}, {2, "a route is being recovered"}, {4, "a route is not healthy"}, {6, "it recovers from an access timeout"}} {
		if mask>>m.shift&3 == 1 {
			bad = append(bad, m.words)
		}
	}
	if n := mask >> 8 & 0xf; n > 1 {
		bad = append(bad, fmt.Sprintf("its configuration is not right (%d)", n))
	}
	return bad
}
