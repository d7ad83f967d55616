package health

import "time"

// The thresholds of memory. DCGM's limit for corrected errors is a number that
// its source calls a dummy; this one is Millwright's own.
const (
	correctedPerMinute = 100
	retiredMany        = 15 // the soft limit of DCGM's limits header
	retiredMost        = 63 // and its hard one
)

func memoryRules() []Rule {
	return []Rule{
		{
			Code: "gpu.row_remap_pending", Severity: degraded, Action: resetWhenIdle, Title: "row remapping waits for a reset",
			Meaning:   "A faulty memory row is replaced by a spare one at the next reset. What runs, and new work, is not hurt by it.",
			Threshold: "the driver says pending", judge: func(v *view) finding {
				if v.now.RemapPending == nil {
					return v.cannot("remap_pending")
				}
				return when(v.now.GetRemapPending(), "PENDING", "a row remapping takes effect at the next reset")
			},
		},
		{
			Code: "gpu.row_remap_failed", Severity: fatal, Action: replace, Title: "row remapping failed",
			Meaning:   "A faulty memory row could not be replaced. NVIDIA takes such a GPU back once its field diagnosis confirms it.",
			Threshold: "the driver says failed", judge: func(v *view) finding {
				if v.now.RemapFailed == nil {
					return v.cannot("remap_failed")
				}
				return when(v.now.GetRemapFailed(), "FAILED", "a row remapping failed")
			},
		},
		{
			Code: "gpu.spare_rows", Severity: warning, Action: support, Title: "few spare memory rows", slow: true,
			Meaning:   "A bank of memory has few spare rows left, or none: the next error there cannot be mended.",
			Threshold: "1 bank with few; degraded at 1 bank with none", judge: spareRows,
		},
	}
}

func eccRules() []Rule {
	return []Rule{
		{
			Code: "gpu.ecc_uncorrected", Severity: degraded, Action: resetGPU, Title: "uncorrected memory errors",
			Meaning:   "Memory held errors that could not be corrected since the driver was loaded. The XIDs beside them say whether they were contained.",
			Threshold: "1 since the driver was loaded", judge: func(v *view) finding {
				if v.now.EccUncorrectedVolatile == nil {
					return v.cannot("ecc_uncorrected_volatile")
				}
				n := v.now.GetEccUncorrectedVolatile()
				return when(n > 0, "ABOVE_THRESHOLD", "uncorrected memory errors since the driver was loaded").with("errors", n)
			},
		},
		{
			Code: "gpu.ecc_uncorrected_aggregate", Severity: info, Action: none, Title: "uncorrected memory errors in its life",
			Meaning:   "Memory held errors that could not be corrected at some time in the GPU's life.",
			Threshold: "1 in the GPU's life", judge: func(v *view) finding {
				if v.now.EccUncorrectedAggregate == nil {
					return v.cannot("ecc_uncorrected_aggregate")
				}
				n := v.now.GetEccUncorrectedAggregate()
				return when(n > 0, "ABOVE_THRESHOLD", "uncorrected memory errors in the GPU's life").with("errors", n)
			},
		},
		{
			Code: "gpu.ecc_corrected_rate", Severity: degraded, Action: support, Title: "many corrected memory errors",
			Meaning:   "Memory errors are corrected at a high rate. That costs speed, and uncorrected ones often follow.",
			Threshold: "100 in a minute", judge: func(v *view) finding {
				if v.now.EccCorrectedVolatile == nil {
					return v.cannot("ecc_corrected_volatile")
				}
				n := v.grew("ecc_corrected", v.now.GetEccCorrectedVolatile(), time.Minute)
				return when(n >= correctedPerMinute, "ABOVE_THRESHOLD", "many memory errors are corrected").with("in_a_minute", n, "threshold", correctedPerMinute)
			},
		},
		{
			Code: "gpu.sram_threshold", Severity: fatal, Action: replace, Title: "too many SRAM errors", slow: true,
			Meaning:   "The SRAM had more errors than NVIDIA's field diagnosis allows. SRAM has no spares.",
			Threshold: "the driver says exceeded", judge: func(v *view) finding {
				if v.now.SramThresholdExceeded == nil {
					return v.cannot("sram_threshold_exceeded")
				}
				return when(v.now.GetSramThresholdExceeded(), "ABOVE_THRESHOLD", "the driver's threshold of SRAM errors is exceeded").
					with("uncorrected", v.now.GetSramUncorrectedAggregate())
			},
		},
	}
}

// pageRules are of GPUs before Ampere.
func pageRules() []Rule {
	return []Rule{
		{
			Code: "gpu.pages_retired", Severity: degraded, Action: support, Title: "many memory pages retired", slow: true,
			Meaning:   "Pages of memory were taken out of use, on a GPU that has no spare rows.",
			Threshold: "15; fatal from 63 on", judge: retiredPages,
		},
		{
			Code: "gpu.retirement_pending", Severity: degraded, Action: reboot, Title: "page retirement waits for a reboot", slow: true,
			Meaning:   "A faulty page of memory is taken out of use when the driver is loaded again.",
			Threshold: "the driver says pending", judge: func(v *view) finding {
				if v.now.RetirementPending == nil {
					return v.cannot("retirement_pending")
				}
				return when(v.now.GetRetirementPending(), "PENDING", "a page retirement takes effect when the driver is loaded again")
			},
		},
	}
}

func spareRows(v *view) finding {
	if v.now.RemapBanksLow == nil || v.now.RemapBanksExhausted == nil {
		return v.cannot("remap_banks_low", "remap_banks_exhausted")
	}
	low, out := v.now.GetRemapBanksLow(), v.now.GetRemapBanksExhausted()
	if out > 0 {
		return raise("EXHAUSTED", "a bank of memory has no spare row left").as(degraded, support).with("banks_low", low, "banks_exhausted", out)
	}
	return when(low > 0, "LOW", "a bank of memory has few spare rows left").with("banks_low", low)
}

func retiredPages(v *view) finding {
	if v.now.RetiredPagesCorrected == nil || v.now.RetiredPagesUncorrected == nil {
		return v.cannot("retired_pages_corrected", "retired_pages_uncorrected")
	}
	n := v.now.GetRetiredPagesCorrected() + v.now.GetRetiredPagesUncorrected()
	if n >= retiredMost {
		return raise("ABOVE_THRESHOLD", "as many memory pages are retired as a GPU may have").as(fatal, replace).with("pages", n, "threshold", retiredMost)
	}
	return when(n >= retiredMany, "ABOVE_THRESHOLD", "many memory pages are retired").with("pages", n, "threshold", retiredMany)
}
