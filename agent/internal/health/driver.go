package health

import (
	"strconv"
	"strings"

	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
	healthv1 "github.com/gpuaas/millwright/proto/millwright/health/v1"
)

// driverRule is a state of the driver in which it cannot be asked, as a
// condition of the node.
type driverRule struct {
	Rule
	state gpuv1.DriverState
}

func driverRules() []driverRule {
	node := func(state gpuv1.DriverState, code string, action healthv1.Action, title, meaning string) driverRule {
		return driverRule{Rule{
			Code: "node." + code, Severity: fatal, Action: action, Title: title, Meaning: meaning, Threshold: "at once",
		}, state}
	}
	return []driverRule{
		node(gpuv1.DriverState_DRIVER_STATE_UNRESPONSIVE, "driver_unresponsive", reboot, "driver does not answer",
			"A question to the driver did not come back. Programs that use the GPUs very likely hang too."),
		noAnswerYet(),
		node(gpuv1.DriverState_DRIVER_STATE_LIBRARY_MISSING, "library_missing", mend, "driver's library is missing",
			"libnvidia-ml.so.1 cannot be loaded: the driver is not installed, or not all of it."),
		node(gpuv1.DriverState_DRIVER_STATE_SYMBOL_MISSING, "symbol_missing", mend, "driver is too old",
			"The driver's library lacks a function without which nothing can be asked."),
		node(gpuv1.DriverState_DRIVER_STATE_VERSION_MISMATCH, "driver_mismatch", reload, "driver and library differ",
			"The kernel runs another version of the driver than its library: it was updated while it was in use. New programs on the GPUs fail."),
		node(gpuv1.DriverState_DRIVER_STATE_DRIVER_NOT_LOADED, "driver_not_loaded", reload, "driver is not loaded",
			"The kernel has not loaded the NVIDIA driver."),
		node(gpuv1.DriverState_DRIVER_STATE_CRASHED, "driver_crashed", support, "driver's library crashes",
			"The program that asks the driver died in a call of its library."),
		node(gpuv1.DriverState_DRIVER_STATE_PROGRAM_UNUSABLE, "gpu_program_unusable", mend, "millwright-gpu cannot be run",
			"The program that asks the driver is not there, or not of the agent's version."),
		node(gpuv1.DriverState_DRIVER_STATE_ERROR, "driver_error", support, "driver refuses",
			"The driver answers the first question with an error."),
	}
}

// noAnswerYet is told while a question still has time to be answered, so that a
// driver that hangs is told of before it is given up.
func noAnswerYet() driverRule {
	return driverRule{Rule{
		Code: "node.driver_no_answer", Severity: warning, Action: none, Title: "driver has not answered yet",
		Meaning: "A question to the driver takes unusually long. Without persistence mode a start initialises each GPU, which may take tens of seconds. " +
			"What stays without an answer becomes node.driver_unresponsive.",
		Threshold: "half a period, at least 1 s",
	}, gpuv1.DriverState_DRIVER_STATE_NO_ANSWER_YET}
}

// nodeRules are the other conditions of a node.
func nodeRules() []Rule {
	return []Rule{
		{
			Code: "node.gpu_count", Severity: fatal, Action: reboot, Title: "a GPU is missing",
			Meaning:   "The driver knows fewer GPUs than the PCI bus has, than were there before, or than the node should have. One may have fallen off the bus without a word.",
			Threshold: "1 fewer",
		},
		{
			Code: "node.kernel_log", Severity: warning, Action: mend, Title: "kernel log cannot be read",
			Meaning:   "Errors of NVSwitches, the texts of XIDs and GPUs that fall off the bus in silence cannot be seen.",
			Threshold: "at once",
		},
		{
			Code: "switch.link_detect", Severity: warning, Action: hardware, Title: "NVLink not detected",
			Meaning:   "The driver could not tell which NVLinks came up after a reset.",
			Threshold: "once",
		},
	}
}

// driverEvent is an event of the driver that is no XID and means something by
// itself. Those that only announce a value make the agent ask for it.
type driverEvent struct {
	Rule
	kind uint64 // NVML's bit
}

func driverEvents() []driverEvent {
	event := func(kind uint64, code string, s healthv1.Severity, a healthv1.Action, title, meaning string) driverEvent {
		return driverEvent{Rule{Code: "gpu." + code, Severity: s, Action: a, Title: title, Meaning: meaning, Threshold: "once"}, kind}
	}
	return []driverEvent{
		event(512, "ecc_storm", degraded, support, "storm of corrected memory errors", "The driver tells of many corrected memory errors at once."),
		event(2048, "retirement_failed", fatal, replace, "memory not retired", "Faulty memory could not be taken out of use."),
		event(4096, "poison", warning, healthv1.Action_ACTION_RESTART_APP, "poisoned data used", "A program used data that an uncorrected error had marked; only it is hurt."),
		event(8192, "poison_fatal", fatal, resetGPU, "poisoned data spread", "Data that an uncorrected error had marked was used beyond one program."),
		event(16384, "unavailable", fatal, resetGPU, "GPU is unavailable", "The driver tells that the GPU cannot be used."),
	}
}

// status takes whether the driver can be asked.
func (e *engine) status(s *gpuv1.DriverStatus, t moment) {
	e.driver = s
	switch s.GetState() {
	case gpuv1.DriverState_DRIVER_STATE_UNSPECIFIED, gpuv1.DriverState_DRIVER_STATE_STARTING, gpuv1.DriverState_DRIVER_STATE_QUIESCED:
		return // nothing new is known
	default:
	}
	found := false
	for _, r := range driverRules() {
		found = found || r.state == s.GetState()
	}
	for _, r := range driverRules() {
		f := well()
		switch {
		case r.state == s.GetState():
			f = raise(strings.TrimPrefix(s.GetState().String(), "DRIVER_STATE_"), "%s", s.GetMessage())
		case found:
			f = finding{state: unknown, reason: "DRIVER_NOT_ASKED", message: "the driver cannot be asked for another reason"}
		}
		f.source = healthv1.Source_SOURCE_AGENT
		e.judged(&r.Rule, subject{}, f, t)
	}
	if found && s.GetState() != gpuv1.DriverState_DRIVER_STATE_NO_ANSWER_YET { // what was known may be true still
		e.outdated(strings.TrimPrefix(s.GetState().String(), "DRIVER_STATE_"), s.GetMessage(), t)
	}
}

// outdated makes all that is asked of the driver stale. What happened stays.
func (e *engine) outdated(reason, message string, t moment) {
	for _, c := range e.conditions {
		if c.event || c.now.GetSource() == healthv1.Source_SOURCE_AGENT || c.now.GetState() == stale {
			continue
		}
		e.change(c, finding{state: stale, reason: reason, message: "last known: " + word(c.now.GetState()) + "; " + message}, t, c.now.GetLastTime())
	}
}

// word is a state for people.
func word(s healthv1.State) string {
	return strings.ToLower(strings.TrimPrefix(s.String(), "STATE_"))
}

// count compares the GPUs that the driver knows with those that should be there.
func (e *engine) count(known int, t moment) {
	pci := len(e.inventory.GetPciGpus())
	e.most = max(e.most, known)
	want, whose := e.most, "were there before"
	if pci > want {
		want, whose = pci, "are on the PCI bus"
	}
	if e.cfg.Expected > 0 {
		want, whose = e.cfg.Expected, "should be there (gpu.expected)"
	}
	f := well()
	if known < want {
		f = raise("FEWER", "the driver knows %d GPUs, and %d %s", known, want, whose)
		f.details = []string{"known", strconv.Itoa(known), "wanted", strconv.Itoa(want), "pci", strconv.Itoa(pci)}
		for i, gone := range e.roster.missing(e.inventory) {
			if i == mostNamed {
				f.message += " and others"
				break
			}
			f.message += []string{"; missing: ", ", "}[min(i, 1)] + gone
			f.details = append(f.details, detailMissing, gone)
		}
	}
	for _, r := range nodeRules() {
		if r.Code == "node.gpu_count" {
			e.judged(&r, subject{}, f, t)
		}
	}
}

// kernelLog takes whether the kernel's log can be read.
func (e *engine) kernelLog(err error, t moment) {
	f := well()
	if err != nil {
		f = raise("UNREADABLE", "%v", err)
	}
	f.source = healthv1.Source_SOURCE_AGENT
	for _, r := range nodeRules() {
		if r.Code == "node.kernel_log" {
			e.judged(&r, subject{}, f, t)
		}
	}
}
