// Package board knows how the GPUs of nodes are: what nodes reported last, which
// is kept in memory, over what the event log holds of their conditions, which a
// restart of the server does not lose.
//
// What is not of now is never shown as well: without a report of the session
// that a node has now, within three periods by the server's clock, each of its
// conditions is stale.
package board

import (
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"
	"unique"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
	healthv1 "github.com/gpuaas/millwright/proto/millwright/health/v1"

	"github.com/gpuaas/millwright/controlplane/internal/clock"
	"github.com/gpuaas/millwright/controlplane/internal/eventlog"
)

const (
	// MaxReport is the largest report, in bytes.
	MaxReport = 1 << 20
	// maxGpus is how many GPUs a node has at most.
	maxGpus = 64
	// maxParts is how many messages and texts a report has in its lists at most.
	// Empty ones are two bytes each on the wire and a hundred times that in memory.
	maxParts = 64 << 10
	// missed is after how many periods without a report a node is stale.
	missed = 3
	// The period of a node that does not say it, and between which it is held.
	defaultPeriod = 10 * time.Second
	minPeriod     = time.Second
	maxPeriod     = 10 * time.Minute
)

// Why what is known of a node is not of now.
const (
	reasonAway    = "NODE_AWAY"
	reasonMissing = "REPORTS_MISSING"
	reasonNever   = "NEVER_REPORTED"
)

// Config is what a board needs. Its fields may be left zero.
type Config struct {
	// Now is the wall clock; nil means the machine's.
	Now func() time.Time
	// Boot is CLOCK_BOOTTIME; nil means the machine's.
	Boot func() time.Duration
}

// Board holds the newest report of each node. It is safe for concurrent use.
type Board struct {
	cfg Config

	mu    sync.Mutex
	nodes map[string]*state // guarded by mu, and so is what is in it
}

// state is what is known of one node. Messages in it are never changed, only
// replaced.
type state struct {
	connected bool // it has a session
	reported  bool // in that session
	bootID    string
	number    uint64
	heard     time.Duration // when the last report came, by CLOCK_BOOTTIME
	at        time.Time     // the same by the wall clock
	period    time.Duration
	driver    *gpuv1.DriverStatus

	inventory  *gpuv1.Inventory
	conditions map[string]*healthv1.Condition // of the last whole report; nil without one
	wholeAt    time.Time                      // when that was made, by the node's clock
	sample     *gpuv1.Sample                  // the newest
	slow       *gpuv1.Sample                  // the newest of the slow tier
}

// New returns an empty board.
func New(cfg Config) *Board {
	if cfg.Now == nil {
		cfg.Now = clock.Now
	}
	if cfg.Boot == nil {
		cfg.Boot = clock.Boot()
	}
	return &Board{cfg: cfg, nodes: map[string]*state{}}
}

// Entered says that a node has opened a session. Until it reports in it, what is
// known of it stays stale.
func (b *Board) Entered(node string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	s := b.nodes[node]
	if s == nil {
		s = &state{period: defaultPeriod}
		b.nodes[node] = s
	}
	s.connected, s.reported = true, false
}

// Left says that a node has no session any more.
func (b *Board) Left(node string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if s := b.nodes[node]; s != nil {
		s.connected, s.reported = false, false
	}
}

// Forget drops what is known of a node that was evicted. What its session still
// brings is not taken, since it has to enter anew.
func (b *Board) Forget(node string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.nodes, node)
}

// Report takes a report of a node that has entered. One that is older than what
// is known is dropped. An error says that it is not as the format wants it, and that nothing of it was
// taken.
func (b *Board) Report(node string, r *healthv1.HealthReport) error {
	if err := check(r); err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	s := b.nodes[node]
	switch {
	case s == nil:
		return nil
	case r.GetBootId() != s.bootID:
		*s = state{connected: s.connected, bootID: r.GetBootId()}
	case r.GetNumber() <= s.number:
		return nil
	}
	s.number, s.reported, s.heard, s.at = r.GetNumber(), true, b.cfg.Boot(), b.cfg.Now()
	s.period = defaultPeriod
	if r.GetPeriod() != nil {
		s.period = min(max(r.GetPeriod().AsDuration(), minPeriod), maxPeriod)
	}
	s.driver = r.GetDriver()
	if r.GetWhole() {
		s.inventory, s.wholeAt = r.GetInventory(), r.GetReportTime().AsTime()
		s.conditions = make(map[string]*healthv1.Condition, len(r.GetConditions()))
		for _, c := range r.GetConditions() {
			share(c)
			s.conditions[c.GetKey()] = c
		}
	}
	if r.GetSample() != nil {
		s.sample = r.GetSample()
		if s.sample.GetTier() == gpuv1.Tier_TIER_SLOW {
			s.slow = s.sample
		}
	}
	return nil
}

// share keeps one copy of the texts that are the same on all nodes.
func share(c *healthv1.Condition) {
	for _, text := range []*string{&c.Code, &c.Title, &c.Meaning, &c.Reason, &c.Message} {
		*text = unique.Make(*text).Value()
	}
}

// check holds a report against the limits of the format.
func check(r *healthv1.HealthReport) error {
	if n := proto.Size(r); n > MaxReport {
		return fmt.Errorf("health report has %d bytes; at most %d are taken", n, MaxReport)
	}
	if n := parts(r.ProtoReflect(), maxParts); n > maxParts {
		return fmt.Errorf("health report has more than %d parts, which are all that are taken", maxParts)
	}
	for what, n := range map[string]int{"inventory": len(r.GetInventory().GetGpus()), "sample": len(r.GetSample().GetGpus())} {
		if n > maxGpus {
			return fmt.Errorf("health report: its %s has %d GPUs; at most %d are taken", what, n, maxGpus)
		}
	}
	if n := len(r.GetConditions()); n > eventlog.MaxConditions {
		return fmt.Errorf("health report has %d conditions; at most %d are taken", n, eventlog.MaxConditions)
	}
	if n := len(r.GetBootId()); n == 0 || n > 128 {
		return fmt.Errorf("health report: boot_id must have 1 to 128 bytes; it has %d", n)
	}
	for _, c := range r.GetConditions() {
		if err := eventlog.CheckCondition(c); err != nil {
			return fmt.Errorf("health report: %w", err)
		}
	}
	return nil
}

// parts counts what a message has in its lists, at any depth, and stops counting
// once it is more than most.
func parts(m protoreflect.Message, most int) (n int) {
	m.Range(func(fd protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case fd.IsList():
			list := v.List()
			n += list.Len()
			for i := 0; fd.Message() != nil && i < list.Len() && n <= most; i++ {
				n += parts(list.Get(i).Message(), most-n)
			}
		case fd.IsMap():
			n += v.Map().Len()
		case fd.Message() != nil:
			n += parts(v.Message(), most-n)
		}
		return n <= most
	})
	return n
}

// Overdue returns why what is known of a node is not of now, as a code and in
// words; both are empty when it is.
func (b *Board) Overdue(node string) (reason, message string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.overdue(node, b.nodes[node])
}

func (b *Board) overdue(node string, s *state) (reason, message string) {
	switch {
	case s == nil || !s.connected:
		return reasonAway, "the node has no session; see: millctl node get " + node
	case s.bootID == "":
		return reasonNever, "the node has not reported the health of its GPUs since the server was started; on the node: journalctl -u millwrightd"
	case !s.reported || b.cfg.Boot()-s.heard > missed*s.period:
		return reasonMissing, fmt.Sprintf("the node is connected, and its last report came at %s, though one is due every %s; on the node: journalctl -u millwrightd",
			s.at.UTC().Format(time.RFC3339), s.period)
	}
	return "", ""
}

// Status returns how fresh what is known of a node is, and its driver's state,
// without its conditions.
func (b *Board) Status(node string) *healthv1.NodeHealth {
	b.mu.Lock()
	defer b.mu.Unlock()
	s := b.nodes[node]
	out := &healthv1.NodeHealth{Node: node, Freshness: healthv1.Freshness_FRESHNESS_FRESH}
	if out.Reason, out.Message = b.overdue(node, s); out.Reason != "" {
		out.Freshness = healthv1.Freshness_FRESHNESS_STALE
	}
	if s == nil || s.bootID == "" {
		out.Freshness = healthv1.Freshness_FRESHNESS_NEVER
		return out
	}
	out.ReportTime, out.Period = timestamppb.New(s.at), durationpb.New(s.period)
	out.Driver, out.BootId = s.driver, s.bootID
	out.Gpus = uint32(len(s.inventory.GetGpus())) // at most 64
	out.DriverVersion = s.inventory.GetDriverVersion()
	return out
}

// Known are the nodes that have had a session since the server was started, by
// name.
func (b *Board) Known() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Sorted(maps.Keys(b.nodes))
}

// snapshot returns a copy of what is known of a node.
func (b *Board) snapshot(node string) state {
	b.mu.Lock()
	defer b.mu.Unlock()
	if s := b.nodes[node]; s != nil {
		return *s
	}
	return state{}
}
