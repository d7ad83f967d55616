package board

import (
	"cmp"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
	healthv1 "github.com/gpuaas/millwright/proto/millwright/health/v1"
	serverv1 "github.com/gpuaas/millwright/proto/millwright/server/v1"
)

// What is shown of the conditions of one GPU, the worst first. Each condition of
// the whole node is one of every GPU, so that a thousand of them would make an
// answer that no server can send.
const (
	mostInList = 16
	mostOfOne  = 256
)

// Gpus returns the GPUs of a node, by index: those of its inventory, and behind
// them those that only a condition names, because the driver lost them or the
// node has not reported since the server was started, and no more of those than a
// node can have. Whole says that all is wanted; otherwise what is OK is left out.
func (b *Board) Gpus(node string, rows []*serverv1.HealthRow, whole bool) []*healthv1.GpuHealth {
	health, s := b.Node(node, rows), b.snapshot(node)
	gpus := inventory(node, &s)
	most := len(gpus) + maxGpus
	for _, c := range health.GetConditions() {
		uuid := c.GetCondition().GetGpuUuid()
		if len(gpus) == most {
			break
		}
		if uuid != "" && !slices.ContainsFunc(gpus, func(g *healthv1.GpuHealth) bool { return g.GetUuid() == uuid }) {
			gpus = append(gpus, &healthv1.GpuHealth{Node: node, Uuid: uuid, PciBusId: c.GetCondition().GetPciBusId()})
		}
	}
	for _, g := range gpus {
		fill(g, health, &s)
		if !whole {
			g.Inventory, g.Conditions = nil, clip(notOK(g.GetConditions()), mostInList)
		}
		g.Conditions = clip(g.GetConditions(), mostOfOne)
	}
	return gpus
}

func clip(list []*healthv1.NodeCondition, most int) []*healthv1.NodeCondition {
	return list[:min(len(list), most)]
}

// inventory returns the GPUs that the node named in its last whole report.
func inventory(node string, s *state) []*healthv1.GpuHealth {
	var out []*healthv1.GpuHealth
	for _, g := range s.inventory.GetGpus() {
		out = append(out, &healthv1.GpuHealth{
			Node: node, Uuid: g.GetUuid(), Index: proto.Uint32(g.GetIndex()), Model: g.GetModel(), PciBusId: g.GetPciBusId(), Inventory: g,
		})
	}
	slices.SortStableFunc(out, func(a, b *healthv1.GpuHealth) int { return cmp.Compare(a.GetIndex(), b.GetIndex()) })
	return out
}

// fill says how a GPU is.
func fill(g *healthv1.GpuHealth, health *healthv1.NodeHealth, s *state) {
	g.ReportTime = health.GetReportTime()
	g.Sample = sampleOf(g, s)
	if g.GetSample() != nil {
		g.SampleTime = s.sample.GetReadAt()
	}
	for _, c := range health.GetConditions() {
		if !concerns(c.GetCondition(), g) {
			continue
		}
		g.Conditions = append(g.Conditions, c)
		if c.GetLastState() == healthv1.State_STATE_UNKNOWN {
			g.UnknownConditions++
		}
	}
	WorstFirst(g.Conditions)
	var worst *healthv1.NodeCondition
	if len(g.GetConditions()) > 0 && raised(g.GetConditions()[0]) {
		worst = g.GetConditions()[0]
		g.Severity = worst.GetCondition().GetSeverity()
	}
	judge(g, health, worst)
}

// concerns reports whether a condition is about a GPU, or about its whole node.
func concerns(c *healthv1.Condition, g *healthv1.GpuHealth) bool {
	switch {
	case c.GetGpuUuid() != "":
		return c.GetGpuUuid() == g.GetUuid()
	case c.GetPciBusId() != "":
		return strings.EqualFold(c.GetPciBusId(), g.GetPciBusId())
	}
	return true
}

// judge is the one word about a GPU. It is OK only when nothing speaks against
// it.
func judge(g *healthv1.GpuHealth, health *healthv1.NodeHealth, worst *healthv1.NodeCondition) {
	driver := health.GetDriver()
	switch {
	case health.GetFreshness() != healthv1.Freshness_FRESHNESS_FRESH:
		g.State, g.Reason, g.Message = healthv1.State_STATE_STALE, health.GetReason(), health.GetMessage()
		if worst != nil {
			g.Message = worst.GetCondition().GetTitle() + ": " + worst.GetCondition().GetMessage()
		}
	case worst != nil:
		c := worst.GetCondition()
		g.State, g.Reason, g.Action = healthv1.State_STATE_RAISED, c.GetCode(), c.GetAction()
		g.Message = c.GetTitle() + ": " + c.GetMessage()
	case driver.GetState() != gpuv1.DriverState_DRIVER_STATE_OK:
		g.State, g.Reason = healthv1.State_STATE_UNKNOWN, "DRIVER"
		g.Message = strings.ToLower(strings.TrimPrefix(driver.GetState().String(), "DRIVER_STATE_")) + ": " + driver.GetMessage()
	case g.GetSample() == nil || g.Index == nil:
		g.State, g.Reason = healthv1.State_STATE_UNKNOWN, "NOT_SEEN"
		g.Message = "the driver has said nothing of this GPU lately"
	default:
		g.State = healthv1.State_STATE_OK
	}
}

// sampleOf is the newest that a GPU said: what the newest sample lacks of the
// slow tier is of the last one that has it.
func sampleOf(g *healthv1.GpuHealth, s *state) *gpuv1.GpuSample {
	newest, slow := find(s.sample, g), find(s.slow, g)
	if newest == nil || slow == nil || newest == slow {
		return newest
	}
	out := proto.CloneOf(slow)
	fresh := newest.ProtoReflect()
	out.Unknown = slices.DeleteFunc(out.GetUnknown(), func(u *gpuv1.Unknown) bool {
		fd := fresh.Descriptor().Fields().ByTextName(u.GetField())
		return fd != nil && fresh.Has(fd) || slices.ContainsFunc(newest.GetUnknown(), func(n *gpuv1.Unknown) bool { return n.GetField() == u.GetField() })
	})
	for _, u := range newest.GetUnknown() { // what was known once is not known now
		if fd := fresh.Descriptor().Fields().ByTextName(u.GetField()); fd != nil {
			out.ProtoReflect().Clear(fd)
		}
	}
	if len(newest.GetNvlinks()) > 0 {
		out.Nvlinks = nil
	}
	proto.Merge(out, newest)
	return out
}

func find(sample *gpuv1.Sample, g *healthv1.GpuHealth) *gpuv1.GpuSample {
	for _, s := range sample.GetGpus() {
		if s.GetUuid() != "" && s.GetUuid() == g.GetUuid() || s.GetUuid() == "" && g.Index != nil && s.GetIndex() == g.GetIndex() {
			return s
		}
	}
	return nil
}
