package session

import (
	"context"
	"time"

	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
)

// reportsApart is the least time between two reports: a storm of changes makes
// no storm of reports.
const reportsApart = time.Second

// report asks for a report to be sent when there is something newer to say, and
// waits until it was: what the session has no time for is dropped.
func (st *stream) report(ctx context.Context) error {
	if st.cfg.Health == nil {
		return nil
	}
	for {
		changed := st.cfg.Health.Changed()
		select {
		case <-ctx.Done():
			return ctx.Err()
		case st.reports <- struct{}{}:
		}
		timer := time.NewTimer(reportsApart)
		select {
		case <-ctx.Done():
		case <-timer.C:
		}
		timer.Stop()
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-changed:
		}
	}
}

// newest is the report as it is when its turn has come; nil when there is nothing
// to say. The first of a session is whole, and each one after a change. Only the
// sender calls it.
func (st *stream) newest() *agentv1.SessionRequest {
	version := st.cfg.Health.Version()
	r := st.cfg.Health.Report(!st.reported || version != st.whole)
	if r == nil {
		return nil
	}
	st.reported, st.whole = true, version
	return &agentv1.SessionRequest{Message: &agentv1.SessionRequest_Health{Health: r}}
}
