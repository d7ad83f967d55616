package dispatch

import (
	"time"

	healthv1 "github.com/gpuaas/millwright/proto/millwright/health/v1"
)

// badReportEvery is how often at most it is logged that a node's reports are not
// taken.
const badReportEvery = time.Minute

// health hands on a report. One that is not as it should be costs a line of the
// log and not the session: reports may be lost.
func (d *Dispatcher) health(s *session, r *healthv1.HealthReport) {
	err := d.cfg.Board.Report(s.peer.Node, r)
	if err == nil {
		return
	}
	now := d.cfg.Boot()
	s.mu.Lock()
	tell := s.badReports == 0 || now-s.badReportAt >= badReportEvery
	s.badReports++
	if tell {
		s.badReportAt = now
	}
	n := s.badReports
	s.mu.Unlock()
	if tell {
		s.log.Warn("report of the GPUs' health not taken", "err", err, "not_taken", n)
	}
}

// nobody is told nothing.
type nobody struct{}

func (nobody) Entered(string)                              {}
func (nobody) Left(string)                                 {}
func (nobody) Report(string, *healthv1.HealthReport) error { return nil }
