package health

import (
	"maps"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/millwright/agent/internal/health/kernel"
	"github.com/gpuaas/millwright/agent/internal/health/xid"
	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
	healthv1 "github.com/gpuaas/millwright/proto/millwright/health/v1"
)

const (
	// mostConditions bounds what is kept of a node, mostEvents what is kept of one
	// GPU or switch of things that happened, and mostElsewhere of all places
	// together that are no GPU of the inventory: a line may name any place, and
	// must leave room for what is known of the GPUs.
	mostConditions = 1024
	mostEvents     = 64
	mostElsewhere  = 256
	// mostStates bounds for how many GPUs something is remembered.
	mostStates = 4 * mostGPUs
	// A condition that was raised flapRaises times within flapWithin is flapping:
	// it is well again only once it has been away for flapQuiet.
	flapRaises = 3
	flapWithin = 10 * time.Minute
	flapQuiet  = 5 * time.Minute
	// stalePeriods is after how many periods without a sample all is stale.
	stalePeriods = 3
)

// moment is a time by both clocks: the wall for people, the boot for spans.
type moment struct {
	wall time.Time
	boot time.Duration
}

// condition is one condition with what is needed to tell of it.
type condition struct {
	now     *healthv1.Condition
	told    *healthv1.HealthEdge // the last edge that was told; nil: none
	changes uint32               // since then
	was     bool                 // it was raised since then
	event   bool                 // it happens, and is not asked for
	settles bool                 // by itself, after a while

	raises []time.Duration            // when it was raised, the last few
	away   time.Duration              // since when it is away, while it is kept for flapping
	seen   time.Duration              // when it happened last
	heard  map[healthv1.Source]uint64 // how often who told of it since it was raised
}

// gpuState is what is remembered of one GPU.
type gpuState struct {
	counters    map[string]*counter
	fabricSince time.Duration
	toldAction  *uint32 // the driver's verdict, as XID 154 told it
	lastAction  uint32
	away        bool     // it was lost, or wanted a reset
	sinceReset  []uint64 // counters that only a reset makes fall
	exceptions  exceptions
}

func (g *gpuState) counter(name string, span time.Duration) *counter {
	c := g.counters[name]
	if c == nil {
		c = &counter{span: span}
		g.counters[name] = c
	}
	return c
}

// engine turns what is seen into conditions. It is not safe for concurrent use,
// and reads no clock: the same things seen at the same times give the same
// conditions.
type engine struct {
	cfg        Config
	xids       *xid.Table
	conditions map[string]*condition
	gpus       map[string]*gpuState // by UUID
	uuids      map[string]string    // by place
	driver     *gpuv1.DriverStatus
	inventory  *gpuv1.Inventory
	sample     *gpuv1.Sample
	sampled    time.Duration
	wholly     time.Duration // when all values were read last
	most       int           // the most GPUs that were there
	roster     roster
	cursor     Cursor
	version    uint64 // rises whenever a whole report has something new
}

// Cursor is how far the kernel's log was read.
type Cursor struct {
	BootID   string
	Sequence uint64
}

func newEngine(cfg Config) *engine {
	return &engine{
		cfg: cfg, xids: cfg.XIDs, conditions: map[string]*condition{}, gpus: map[string]*gpuState{}, uuids: map[string]string{}, roster: roster{},
		driver: &gpuv1.DriverStatus{State: gpuv1.DriverState_DRIVER_STATE_STARTING},
	}
}

// Rules are the conditions of a GPU that are judged by what the driver is asked.
func Rules() []Rule { return gpuRules() }

// gpuRules are all rules of a GPU that are judged by its samples.
func gpuRules() []Rule {
	return slices.Concat(deviceRules(), memoryRules(), eccRules(), pageRules(), linkRules(), heatRules())
}

// subject is what a condition is about; empty for the node.
type subject struct{ uuid, pci string }

func (s subject) key(code string) string {
	switch {
	case s.uuid != "":
		return code + "/" + s.uuid
	case s.pci != "":
		return code + "/" + s.pci
	}
	return code
}

// takeInventory takes what the GPUs are.
func (e *engine) takeInventory(inv *gpuv1.Inventory, t moment) {
	e.inventory = inv
	e.version++
	for _, g := range inv.GetGpus() {
		if g.GetUuid() != "" && g.GetPciBusId() != "" && (e.uuids[kernel.NormalPCI(g.GetPciBusId())] != "" || len(e.uuids) < mostStates) {
			e.uuids[kernel.NormalPCI(g.GetPciBusId())] = g.GetUuid()
		}
	}
	for _, g := range inv.GetGpus() {
		if g.GetUuid() != "" {
			e.gpuState(g.GetUuid()) // it has its place before any line takes it
		}
	}
	e.roster.seen(inv.GetGpus())
	e.count(len(inv.GetGpus()), t)
	e.forgetReplaced()
}

// forgetReplaced forgets the GPUs that are not there any more, once there are
// as many as there should be: they were replaced.
func (e *engine) forgetReplaced() {
	if len(e.inventory.GetGpus()) < e.most || e.cfg.Expected > len(e.inventory.GetGpus()) {
		return
	}
	here := map[string]bool{"": true}
	for _, g := range e.inventory.GetGpus() {
		if g.Uuid == nil {
			return // one cannot say who it is
		}
		here[g.GetUuid()] = true
	}
	for key, c := range e.conditions {
		if !here[c.now.GetGpuUuid()] {
			if c.told == nil {
				delete(e.conditions, key)
			} else {
				c.now.Reason = reasonReplaced
			}
		}
	}
	gone := func(uuid string) bool { return !here[uuid] }
	maps.DeleteFunc(e.gpus, func(uuid string, _ *gpuState) bool { return gone(uuid) })
	maps.DeleteFunc(e.roster, func(uuid, _ string) bool { return gone(uuid) })
}

// reasonReplaced marks the conditions of a GPU that is no longer in the node.
const reasonReplaced = "GPU_REPLACED"

// takeSample judges all rules by a sample.
func (e *engine) takeSample(s *gpuv1.Sample, t moment) {
	e.sample, e.sampled = s, t.boot
	if s.GetTier() == gpuv1.Tier_TIER_SLOW {
		e.wholly = t.boot
	}
	if s.Count != nil {
		e.count(int(s.GetCount()), t)
	}
	links := false
	for _, g := range s.GetGpus() {
		for _, l := range g.GetNvlinks() {
			links = links || l.GetActive()
		}
	}
	rules := gpuRules()
	for _, g := range s.GetGpus() {
		v := &view{now: g, of: e.inventoryOf(g.GetUuid()), gpu: e.gpuState(g.GetUuid()), links: links, at: t.boot, period: e.cfg.Period}
		at := subject{g.GetUuid(), kernel.NormalPCI(g.GetPciBusId())}
		e.settled(v, at, t)
		for i := range rules {
			if rules[i].slow && s.GetTier() != gpuv1.Tier_TIER_SLOW {
				continue
			}
			e.judged(&rules[i], at, rules[i].judge(v), t)
		}
	}
}

func (e *engine) inventoryOf(uuid string) *gpuv1.Gpu {
	for _, g := range e.inventory.GetGpus() {
		if g.GetUuid() == uuid {
			return g
		}
	}
	return &gpuv1.Gpu{}
}

// gpuState is what is remembered of a GPU; of one beyond the bound nothing is.
func (e *engine) gpuState(uuid string) *gpuState {
	g := e.gpus[uuid]
	if g == nil {
		g = &gpuState{counters: map[string]*counter{}}
		if len(e.gpus) < mostStates {
			e.gpus[uuid] = g
		}
	}
	return g
}

// judged takes a finding on what is asked for.
func (e *engine) judged(r *Rule, at subject, f finding, t moment) {
	key := at.key(r.Code)
	c := e.conditions[key]
	if c == nil {
		if c = e.add(key, r, at); c == nil {
			return
		}
	} else if f.keep && (c.now.GetState() == ok || c.now.GetState() == raised) {
		c.now.LastTime = timestamppb.New(t.wall)
		return
	}
	c.now.Title, c.now.Meaning = r.Title, r.Meaning
	if f.severity == 0 {
		f.severity = r.Severity
	}
	if f.action == 0 {
		f.action = r.Action
	}
	if f.source == 0 {
		f.source = healthv1.Source_SOURCE_DRIVER
	}
	if c.damp(&f, t) {
		c.now.LastTime = timestamppb.New(t.wall)
		return
	}
	e.change(c, f, t, timestamppb.New(t.wall))
}

// add makes a condition, unless there are as many as may be.
func (e *engine) add(key string, r *Rule, at subject) *condition {
	if len(e.conditions) >= mostConditions {
		return nil
	}
	c := &condition{now: &healthv1.Condition{
		Key: key, Code: r.Code, GpuUuid: at.uuid, PciBusId: at.pci, Severity: r.Severity, Title: r.Title, Meaning: r.Meaning,
	}}
	e.conditions[key] = c
	return c
}

// damp reports whether a condition that comes and goes is kept raised.
func (c *condition) damp(f *finding, t moment) bool {
	switch {
	case f.state == raised && c.now.GetState() != raised:
		c.raises = append(c.raises, t.boot)
		c.raises = c.raises[max(0, len(c.raises)-flapRaises):]
	case f.state == raised:
		c.away = 0
	case f.state == ok && c.now.GetState() == raised:
		if len(c.raises) < flapRaises || t.boot-c.raises[0] > flapWithin && !c.now.GetFlapping() {
			return false
		}
		if c.away == 0 {
			c.away = t.boot
		}
		c.now.Flapping = t.boot-c.away < flapQuiet
		return c.now.GetFlapping()
	}
	return false
}

// change makes a condition what was found.
func (e *engine) change(c *condition, f finding, t moment, last *timestamppb.Timestamp) {
	severity, action := f.severity, f.action
	if severity == 0 {
		severity = c.now.GetSeverity()
	}
	if f.state != raised {
		action = none
	}
	if c.now.GetState() != f.state {
		c.now.Since = timestamppb.New(t.wall)
		c.away = 0
	}
	if c.now.GetState() != f.state || f.state == raised && (c.now.GetSeverity() != severity || c.now.GetAction() != action) {
		c.changes++
		e.version++
	}
	c.was = c.was || f.state == raised
	c.now.State, c.now.Severity, c.now.Action = f.state, severity, action
	c.now.Reason, c.now.Message, c.now.LastTime = f.reason, cut(f.message), last
	if f.source != 0 {
		c.now.Source = f.source
	}
	c.now.Details = nil
	for i := 0; i+1 < len(f.details); i += 2 {
		c.now.Details = append(c.now.Details, &healthv1.Detail{Name: f.details[i], Value: f.details[i+1]})
	}
}

// tick makes stale what was not looked at for too long, and settles what
// happened long enough ago.
func (e *engine) tick(t moment) {
	if e.sampled != 0 && t.boot-e.sampled > stalePeriods*e.cfg.Period {
		e.outdated("NO_SAMPLE", "no sample for "+(t.boot-e.sampled).Round(time.Second).String(), t)
	}
	for _, c := range e.conditions {
		if c.event && c.settles && c.now.GetState() == raised && t.boot-c.seen >= quiet {
			e.change(c, finding{state: ok, reason: reasonQuiet, message: "it did not happen again"}, t, c.now.GetLastTime())
		}
	}
}

// all returns the conditions, by key. They are the engine's.
func (e *engine) all() []*condition {
	out := make([]*condition, 0, len(e.conditions))
	for _, key := range slices.Sorted(maps.Keys(e.conditions)) {
		out = append(out, e.conditions[key])
	}
	return out
}

// mostText bounds a text, in bytes.
const mostText = 512

func cut(s string) string {
	if len(s) <= mostText {
		return s
	}
	s = s[:mostText]
	for len(s) > 0 && s[len(s)-1] >= 0x80 { // not in the middle of a character
		s = s[:len(s)-1]
	}
	return s
}
