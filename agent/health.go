package agent

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/millwright/agent/internal/gate"
	"github.com/gpuaas/millwright/agent/internal/session"
	"github.com/gpuaas/millwright/agent/internal/state"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// maxSkew is how far apart the clocks of node and server may be unremarked.
const maxSkew = 5 * time.Minute

// health is what the node says of itself.
type health struct {
	node *node

	mu    sync.Mutex
	since map[string]*timestamppb.Timestamp // by type and status; guarded by mu
}

// BootID returns the kernel's boot id.
func (h *health) BootID(context.Context) (string, error) { return h.node.bootID, nil }

// Facts returns what can be read of the host.
func (h *health) Facts(context.Context) *agentv1.NodeFacts {
	return session.ReadFacts(h.node.cfg.Labels)
}

// Conditions returns what is wrong, or not.
func (h *health) Conditions() []*taskv1.Condition {
	now := []*taskv1.Condition{h.policy(), h.journal(), h.identity(), h.clock(), h.doubt()}
	if c := h.gpus(); c != nil {
		now = append(now, c)
	}
	h.date(now)
	return now
}

func (h *health) policy() *taskv1.Condition {
	if _, err := gate.ReadPolicy(h.node.cfg.PolicyFile); err != nil {
		return wrong("PolicyInvalid", gate.ReasonPolicyInvalid, "no task is accepted: %v", err)
	}
	return well("PolicyInvalid")
}

func (h *health) journal() *taskv1.Condition {
	const typ = "JournalUnwritable"
	err := h.node.executor.Problem()
	if err == nil {
		err = errors.Join(h.node.store.InPlace(), h.node.store.Room())
	}
	switch {
	case err == nil:
		return well(typ)
	case state.DiskFull(err):
		return wrong(typ, "DISK_FULL", "no task is accepted: %v; make room on the disk of the node", err)
	case state.DiskBroken(err):
		return wrong(typ, "WRITE_FAILED", "no task is accepted: %v; see to the disk of the node: it is read-only, or fails", err)
	default:
		return wrong(typ, "WRITE_FAILED", "no task is accepted: %v", err)
	}
}

func (h *health) identity() *taskv1.Condition {
	const typ = "IdentityExpiring"
	from, to := h.node.enrolment.NotBefore(), h.node.enrolment.NotAfter()
	switch t := h.node.time.Now(); {
	case !t.Before(to):
		return wrong(typ, "IDENTITY_EXPIRED", "%s", h.node.enrolment.Ended())
	case t.After(from.Add(to.Sub(from) * 4 / 5)):
		return wrong(typ, "NOT_RENEWED", "the certificate could not be renewed until now")
	}
	return well(typ)
}

func (h *health) clock() *taskv1.Condition {
	if offset := h.node.session.Status().ClockOffset; offset.Abs() > maxSkew {
		return wrong("ClockSkewed", "CLOCK_SKEWED", "the server's clock minus the node's is %v; one of them is wrong", offset.Round(time.Minute))
	}
	return well("ClockSkewed")
}

func (h *health) doubt() *taskv1.Condition {
	if err := h.node.time.Doubt(); err != nil {
		return wrong("ClockUntrusted", gate.ReasonClockUntrusted, "no task is begun: %v", err)
	}
	return well("ClockUntrusted")
}

func wrong(typ, reason, format string, args ...any) *taskv1.Condition {
	return &taskv1.Condition{
		Type: typ, Status: taskv1.ConditionStatus_CONDITION_STATUS_TRUE, Reason: reason, Message: fmt.Sprintf(format, args...),
	}
}

func well(typ string) *taskv1.Condition {
	return &taskv1.Condition{Type: typ, Status: taskv1.ConditionStatus_CONDITION_STATUS_FALSE}
}

// date gives each condition the time at which its status became what it is.
func (h *health) date(now []*taskv1.Condition) {
	h.mu.Lock()
	defer h.mu.Unlock()
	at := timestamppb.New(h.node.cfg.Clock.Now())
	since := map[string]*timestamppb.Timestamp{}
	for _, c := range now {
		key := c.GetType() + "/" + c.GetStatus().String()
		if since[key] = h.since[key]; since[key] == nil {
			since[key] = at
		}
		c.TransitionTime = since[key]
	}
	h.since = since
}
