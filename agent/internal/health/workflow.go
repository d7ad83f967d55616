package health

import (
	"cmp"
	"fmt"

	healthv1 "github.com/gpuaas/millwright/proto/millwright/health/v1"
)

const (
	// graphicsException is the XID whose workflow looks at where it happened.
	graphicsException = 13
	// sameUnit is under how many processes one unit must fail before the GPU is
	// suspected and not the programs. It is Millwright's own number: NVIDIA's
	// workflow says "repeat", and one program that is started again and again
	// fails where it began.
	sameUnit = 3
	// mostUnits bounds what is kept of one GPU, which has up to 72 of them.
	mostUnits = 128
)

// exceptions are the processes that failed on each unit of a GPU.
type exceptions map[string]map[string]bool

// repeats follows the workflow of XID 13: where it comes back on the same unit,
// whatever runs there, the GPU is to be tested, and otherwise the program. It
// looks at what happened since the condition was raised.
func (e *engine) repeats(h *happening, action healthv1.Action) healthv1.Action {
	g := e.gpuState(cmp.Or(h.at.uuid, h.at.pci))
	if c := e.conditions[h.at.key(fmt.Sprintf("gpu.xid.%d", graphicsException))]; c == nil || c.now.GetState() != raised {
		g.exceptions = exceptions{}
	}
	unit, process := h.line.Unit, h.line.Process
	if unit != "" && process != "" && (g.exceptions[unit] != nil || len(g.exceptions) < mostUnits) {
		if g.exceptions[unit] == nil {
			g.exceptions[unit] = map[string]bool{}
		}
		if len(g.exceptions[unit]) < sameUnit {
			g.exceptions[unit][process] = true
		}
	}
	suspect := ""
	for unit, under := range g.exceptions {
		if len(under) >= sameUnit && (suspect == "" || unit < suspect) {
			suspect = unit
		}
	}
	if suspect == "" {
		return action
	}
	h.words = fmt.Sprintf("%d processes failed on %s: test the GPU with NVIDIA's diagnostics before its programs are blamed; the last: %s", sameUnit, suspect, h.words)
	return hardware
}
