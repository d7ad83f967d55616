package metrics

import "github.com/prometheus/client_golang/prometheus"

// value is one metric of a GPU that is read from a field of its sample. A field
// that is not known has no series: a zero would be a lie.
type value struct {
	name  string
	help  string
	field string // of millwright.gpu.v1.GpuSample
	scale float64
	kind  prometheus.ValueType
	label string // the value of the label kind of a metric that has one
	dcgm  string // what dcgm-exporter calls it; empty when it has none
}

const (
	gauge   = prometheus.GaugeValue
	counter = prometheus.CounterValue
)

// values are the metrics from samples. README.md has the table for people, and a
// test compares the two.
func values() []value {
	return []value{
		{"temperature_celsius", "Temperature of the GPU.", "gpu_celsius", 1, gauge, "", "DCGM_FI_DEV_GPU_TEMP"},
		{"memory_temperature_celsius", "Temperature of the GPU's memory.", "memory_celsius", 1, gauge, "", "DCGM_FI_DEV_MEMORY_TEMP"},
		{"power_watts", "What the GPU draws.", "power_milliwatts", 1e-3, gauge, "", "DCGM_FI_DEV_POWER_USAGE"},
		{"power_limit_watts", "The limit of that which is in force.", "power_limit_milliwatts", 1e-3, gauge, "", "DCGM_FI_DEV_POWER_MGMT_LIMIT"},
		{"sm_clock_hertz", "Clock of the multiprocessors.", "sm_clock_mhz", 1e6, gauge, "", "DCGM_FI_DEV_SM_CLOCK"},
		{"memory_clock_hertz", "Clock of the memory.", "memory_clock_mhz", 1e6, gauge, "", "DCGM_FI_DEV_MEM_CLOCK"},
		{"utilization_ratio", "How busy the multiprocessors are, from 0 to 1.", "gpu_utilization_percent", 1e-2, gauge, "", "DCGM_FI_DEV_GPU_UTIL"},
		{"memory_utilization_ratio", "How busy the memory is, from 0 to 1.", "memory_utilization_percent", 1e-2, gauge, "", "DCGM_FI_DEV_MEM_COPY_UTIL"},
		{"memory_used_bytes", "Memory that is used.", "memory_used_bytes", 1, gauge, "", "DCGM_FI_DEV_FB_USED"},
		{"memory_free_bytes", "Memory that is free.", "memory_free_bytes", 1, gauge, "", "DCGM_FI_DEV_FB_FREE"},
		{"ecc_errors_total", eccHelp, "ecc_corrected_volatile", 1, counter, "corrected", "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL"},
		{"ecc_errors_total", eccHelp, "ecc_uncorrected_volatile", 1, counter, "uncorrected", "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL"},
		{"ecc_lifetime_errors_total", lifeHelp, "ecc_corrected_aggregate", 1, counter, "corrected", "DCGM_FI_DEV_ECC_SBE_AGG_TOTAL"},
		{"ecc_lifetime_errors_total", lifeHelp, "ecc_uncorrected_aggregate", 1, counter, "uncorrected", "DCGM_FI_DEV_ECC_DBE_AGG_TOTAL"},
		{"remapped_rows", rowsHelp, "remapped_rows_corrected", 1, gauge, "corrected", "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS"},
		{"remapped_rows", rowsHelp, "remapped_rows_uncorrected", 1, gauge, "uncorrected", "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS"},
		{"row_remap_pending", "1 while a remapping waits for a reset.", "remap_pending", 1, gauge, "", "DCGM_FI_DEV_ROW_REMAP_PENDING"},
		{"row_remap_failure", "1 once a remapping has failed.", "remap_failed", 1, gauge, "", "DCGM_FI_DEV_ROW_REMAP_FAILURE"},
		{"pcie_replays_total", "Packets that PCIe sent again.", "pcie_replays", 1, counter, "", "DCGM_FI_DEV_PCIE_REPLAY_COUNTER"},
		{"nvlink_errors_total", linkHelp, "nvlink_crc_errors", 1, counter, "crc", "DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL"},
		{"nvlink_errors_total", linkHelp, "nvlink_replay_errors", 1, counter, "replay", "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL"},
		{"nvlink_errors_total", linkHelp, "nvlink_recovery_errors", 1, counter, "recovery", "DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL"},
		{"throttle_seconds_total", slowHelp, "throttle_power_cap_nanoseconds", 1e-9, counter, "power_cap", "DCGM_FI_DEV_POWER_VIOLATION"},
		{"throttle_seconds_total", slowHelp, "throttle_sw_thermal_nanoseconds", 1e-9, counter, "sw_thermal", "DCGM_FI_DEV_THERMAL_VIOLATION"},
		{"throttle_seconds_total", slowHelp, "throttle_hw_thermal_nanoseconds", 1e-9, counter, "hw_thermal", ""},
		{"throttle_seconds_total", slowHelp, "throttle_power_brake_nanoseconds", 1e-9, counter, "power_brake", ""},
		{"processes", "How many programs compute on the GPU.", "processes", 1, gauge, "", ""},
	}
}

// One help for all series of a metric.
const (
	eccHelp  = "ECC errors since the driver was loaded."
	lifeHelp = "ECC errors in the GPU's life."
	rowsHelp = "Rows of the memory that were remapped."
	linkHelp = "Errors of all NVLinks."
	slowHelp = "How long clocks were held down."
)
