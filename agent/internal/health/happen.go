package health

import (
	"fmt"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/millwright/agent/internal/health/kernel"
	"github.com/gpuaas/millwright/agent/internal/health/xid"
	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
	healthv1 "github.com/gpuaas/millwright/proto/millwright/health/v1"
)

const (
	// quiet is after how long without another one a thing that hurt only a
	// program is over.
	quiet = 10 * time.Minute
	// again is within which time the same thing after a reset or a boot means that
	// these did not help.
	again = 14 * 24 * time.Hour
)

// Why a thing that happened is over.
const (
	reasonQuiet     = "QUIET"
	reasonReset     = "RESET"
	reasonRebooted  = "REBOOTED"
	reasonCancelled = "CANCELLED"
	reasonRecovered = "RECOVERED"
)

// The events of NVML that an agent acts on by themselves.
const eventXID = 8

// takeEvent takes what the driver told by itself. It reports whether the GPUs
// should be looked at at once.
func (e *engine) takeEvent(ev *gpuv1.GpuEvent, t moment) (look bool) {
	at := subject{ev.GetUuid(), kernel.NormalPCI(ev.GetPciBusId())}
	if ev.GetType() == eventXID {
		e.xid(happening{number: int(min(ev.GetData(), 9999)), at: at, from: healthv1.Source_SOURCE_DRIVER_EVENT}, t)
		return true
	}
	for _, d := range driverEvents() {
		if d.kind == ev.GetType() {
			e.happened(&d.Rule, happening{at: at, from: healthv1.Source_SOURCE_DRIVER_EVENT, words: d.Title}, t)
		}
	}
	return true
}

// takeLine takes what a record of the kernel's log reports, which happened at t.
func (e *engine) takeLine(sequence uint64, reports []kernel.Report, t moment, now time.Duration) (look bool) {
	if e.cursor.BootID == e.cfg.BootID && sequence <= e.cursor.Sequence {
		return false
	}
	for _, rep := range reports {
		e.cursor = Cursor{e.cfg.BootID, sequence}
		look = true
		h := happening{number: rep.Number, at: e.at(rep.PCI), from: healthv1.Source_SOURCE_KERNEL_LOG, words: rep.Detail, line: &rep, old: now-t.boot >= quiet}
		switch rep.Kind {
		case kernel.XID:
			e.xid(h, t)
		case kernel.SXID:
			e.sxid(h, t)
		case kernel.OffBus:
			e.happened(&Rule{
				Code: "gpu.off_bus", Severity: fatal, Action: reboot, Title: "GPU has fallen off the bus",
				Meaning: "The GPU does not answer on PCIe any more.",
			}, h, t)
		case kernel.LinkDetect:
			h.at = subject{}
			for _, r := range nodeRules() {
				if r.Code == "switch.link_detect" {
					e.happened(&r, h, t)
				}
			}
		}
	}
	return look
}

// at is the GPU at a place of the PCI bus.
func (e *engine) at(pci string) subject { return subject{e.uuids[pci], pci} }

// happening is one thing that happened.
type happening struct {
	number int
	at     subject
	from   healthv1.Source
	words  string
	line   *kernel.Report // nil: it was no line
	old    bool           // it was over already when the agent read of it
}

// xid takes an XID.
func (e *engine) xid(h happening, t moment) {
	row := e.xids.Row(h.number)
	severity, action := severityOf(row.Severity), actionOf(row.Action)
	if row.LineDecides && h.line != nil {
		switch h.line.Fatal {
		case kernel.Fatal:
			severity, action = fatal, resetGPU
		case kernel.NonFatal:
			severity, action = warning, none
		case kernel.Unsaid: // the table says it
		}
	}
	if h.number == graphicsException && h.line != nil && !row.Overridden {
		action = e.repeats(&h, action)
	}
	if row.DriverDecides && h.line != nil && h.line.Recovery >= 0 && h.at.uuid != "" {
		n := uint32(h.line.Recovery) // four hexadecimal digits
		e.gpuState(h.at.uuid).toldAction = &n
		for _, r := range deviceRules() {
			if r.Code == "gpu.recovery_action" {
				e.judged(&r, h.at, recoveryFinding(n, healthv1.Source_SOURCE_KERNEL_LOG), t)
			}
		}
	}
	e.happened(&Rule{
		Code: fmt.Sprintf("gpu.xid.%d", h.number), Severity: severity, Action: action,
		Title: fmt.Sprintf("XID %d: %s", h.number, row.Title), Meaning: row.Meaning,
	}, h, t)
	for _, n := range row.Clears {
		if c := e.conditions[h.at.key(fmt.Sprintf("gpu.xid.%d", n))]; c != nil && c.now.GetState() == raised {
			e.change(c, finding{state: ok, reason: reasonCancelled, message: fmt.Sprintf("XID %d ended it", h.number)}, t, c.now.GetLastTime())
		}
	}
}

// sxid takes an error of an NVSwitch. A fatal one takes a reset of all GPUs and
// switches together, for which a reboot stands.
func (e *engine) sxid(h happening, t moment) {
	r := &Rule{
		Code: fmt.Sprintf("switch.sxid.%d", h.number), Severity: warning, Action: none,
		Title: fmt.Sprintf("NVSwitch SXid %d", h.number), Meaning: "An NVSwitch reports an error that it recovered from.",
	}
	if h.line.Fatal == kernel.Fatal {
		r.Severity, r.Action = fatal, reboot
		r.Meaning = "An NVSwitch reports a fatal error. All GPUs and switches of the node must be reset together."
	}
	h.at.uuid = ""
	e.happened(r, h, t)
}

// happened raises what happened, or counts it when it is raised already.
func (e *engine) happened(r *Rule, h happening, t moment) {
	if h.old && r.Severity <= warning && e.conditions[h.at.key(r.Code)] == nil {
		return
	}
	c := e.find(r, h)
	if c == nil {
		return
	}
	if c.now.GetState() != raised {
		c.heard = map[healthv1.Source]uint64{}
		e.tried(c, t)
	}
	severity, action := r.Severity, escalated(r.Action, c.now.GetAttempts())
	if h.line == nil && c.heard[healthv1.Source_SOURCE_KERNEL_LOG] > 0 {
		severity, action = c.now.GetSeverity(), c.now.GetAction() // the line knew more
	}
	if e.asks(h.at.uuid) != 0 && (action == resetGPU || action == reboot) {
		action, _ = driverAction(e.asks(h.at.uuid))
	}
	// Line and event tell of the same things: the one that told of more is right.
	c.heard[h.from]++
	c.now.Count = max(c.heard[healthv1.Source_SOURCE_KERNEL_LOG], c.heard[healthv1.Source_SOURCE_DRIVER_EVENT])
	words := h.words
	if words == "" && c.now.GetState() == raised {
		words = c.now.GetMessage()
	}
	c.now.Title, c.now.Meaning, c.now.Number = r.Title, r.Meaning, uint32(h.number) // bounded by who reads it
	c.settles = severity <= warning
	e.change(c, finding{state: raised, reason: "HAPPENED", message: words, severity: severity, action: action, source: h.from}, t, timestamppb.New(t.wall))
	c.seen = t.boot
}

// find returns the condition of a thing that happens, and makes it if need be:
// one for each thing up to a bound, and one for all beyond it.
func (e *engine) find(r *Rule, h happening) *condition {
	for _, at := range []subject{h.at, {pci: h.at.pci}} {
		if c := e.conditions[at.key(r.Code)]; c != nil && (c.now.GetPciBusId() == h.at.pci || h.at.pci == "") {
			return c
		}
	}
	n, elsewhere := 0, 0
	for _, c := range e.conditions {
		if c.event && e.roster[c.now.GetGpuUuid()] == "" {
			elsewhere++
		}
		if c.event && c.now.GetPciBusId() == h.at.pci && c.now.GetGpuUuid() == h.at.uuid {
			n++
		}
	}
	tooMany := e.roster[h.at.uuid] == "" && elsewhere >= mostElsewhere
	if n >= mostEvents || tooMany {
		r.Code, r.Title = "gpu.events_more", "more kinds of errors than are kept"
		r.Severity, r.Action, r.Meaning = fatal, support, "So many different errors come from one place that they are no longer told one by one."
		if tooMany {
			h.at, r.Meaning = subject{}, "So many different errors come from places that are no GPU of this node that they are no longer told one by one."
		}
		if c := e.conditions[h.at.key(r.Code)]; c != nil {
			return c
		}
	}
	c := e.add(h.at.key(r.Code), r, h.at)
	if c != nil {
		c.event = true
	}
	return c
}

// tried counts a reset or a reboot that did not help.
func (e *engine) tried(c *condition, t moment) {
	done := c.now.GetReason() == reasonReset || c.now.GetReason() == reasonRebooted || c.now.GetReason() == reasonRecovered
	if c.now.GetState() == ok && done && t.wall.Sub(c.now.GetSince().AsTime()) < again {
		c.now.Attempts++
	} else if c.now.GetState() != ok || !done {
		c.now.Attempts = 0
	}
}

// escalated is what is recommended after so many resets or reboots without a
// lasting effect: a reboot after one reset, and then a person.
func escalated(a healthv1.Action, attempts uint32) healthv1.Action {
	switch {
	case a == resetGPU && attempts == 1:
		return reboot
	case (a == resetGPU || a == reboot) && attempts >= 2:
		return hold
	}
	return a
}

// asks is the driver's own verdict on a GPU; 0 for none.
func (e *engine) asks(uuid string) uint32 {
	if g := e.gpus[uuid]; g != nil && g.lastAction != 0 {
		return g.lastAction
	} else if g != nil && g.toldAction != nil {
		return *g.toldAction
	}
	return 0
}

// settled ends what happened to a GPU before it was reset, and before the driver
// took back what it had asked for.
func (e *engine) settled(v *view, at subject, t moment) {
	g, reason := v.gpu, ""
	counts := []uint64{
		v.now.GetThrottlePowerCapNanoseconds(), v.now.GetThrottleSwThermalNanoseconds(), v.now.GetThrottleHwThermalNanoseconds(),
		v.now.GetThrottlePowerBrakeNanoseconds(), v.now.GetEccCorrectedVolatile(), v.now.GetEccUncorrectedVolatile(), v.now.GetPcieReplays(),
	}
	if v.now.EccUncorrectedVolatile != nil || v.now.PcieReplays != nil {
		for i, n := range g.sinceReset {
			if counts[i] < n {
				reason = reasonReset
			}
		}
		g.sinceReset = counts
	}
	away := v.says(gpuv1.UnknownReason_UNKNOWN_REASON_GPU_LOST) || v.says(gpuv1.UnknownReason_UNKNOWN_REASON_RESET_REQUIRED)
	if g.away && !away {
		reason = reasonReset
	}
	g.away = away
	if v.now.RecoveryAction != nil {
		if v.now.GetRecoveryAction() == 0 && g.lastAction != 0 {
			reason = reasonRecovered
		}
		g.lastAction = v.now.GetRecoveryAction()
	}
	if reason != "" {
		e.over(func(c *condition) bool { return c.now.GetGpuUuid() == at.uuid || c.now.GetPciBusId() == at.pci }, reason, t)
	}
}

// over ends all that happened and that which picks.
func (e *engine) over(which func(*condition) bool, reason string, t moment) {
	for _, c := range e.all() {
		if c.event && c.now.GetState() == raised && which(c) {
			e.change(c, finding{state: ok, reason: reason, message: "it did not happen since"}, t, c.now.GetLastTime())
		}
	}
}

func severityOf(s xid.Severity) healthv1.Severity {
	i := slices.Index([]xid.Severity{xid.Info, xid.Warning, xid.Degraded, xid.Fatal}, s)
	return healthv1.Severity(i + 1) // one of four
}

func actionOf(a xid.Action) healthv1.Action {
	switch a {
	case xid.None:
	case xid.RestartApp:
		return healthv1.Action_ACTION_RESTART_APP
	case xid.UpdateSoftware:
		return healthv1.Action_ACTION_UPDATE_SOFTWARE
	case xid.ResetGPU:
		return resetGPU
	case xid.Reboot:
		return reboot
	case xid.CheckPower:
		return power
	case xid.ContactSupport:
		return support
	}
	return none
}
