package session

import (
	"testing"

	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	healthv1 "github.com/gpuaas/millwright/proto/millwright/health/v1"
)

type oneReport struct{ Health }

func (oneReport) Version() uint64 { return 1 }

func (oneReport) Report(bool) *healthv1.HealthReport { return &healthv1.HealthReport{} }

// TestReportsComeLast has all kinds of messages wait at once: what is said goes
// first, then events, and a report of the GPUs when there is nothing else.
func TestReportsComeLast(t *testing.T) {
	const each = 20
	st := &stream{
		Session: &Session{cfg: Config{Health: oneReport{}}},
		say:     make(chan *agentv1.SessionRequest, each), batches: make(chan *agentv1.SessionRequest, each), reports: make(chan struct{}, each),
	}
	for range each {
		st.reports <- struct{}{}
		st.batches <- &agentv1.SessionRequest{Message: &agentv1.SessionRequest_Events{}}
		st.say <- &agentv1.SessionRequest{Message: &agentv1.SessionRequest_Heartbeat{}}
	}
	for i := range 3 * each {
		m := st.next(t.Context())
		_, said := m.GetMessage().(*agentv1.SessionRequest_Heartbeat)
		_, event := m.GetMessage().(*agentv1.SessionRequest_Events)
		if said != (i < each) || event != (i >= each && i < 2*each) {
			t.Fatalf("message %d is %v", i, m)
		}
	}
}
