package session

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/millwright/agent/internal/crash"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// lookEvery is how often the certificate's end is compared with the wall clock,
// which may be stepped.
const lookEvery = 30 * time.Second

// beat says at each interval that the node is there. The messages are part of
// the stream, since load balancers ignore the pings of HTTP/2.
func (st *stream) beat(ctx context.Context) error {
	ticker := time.NewTicker(st.interval)
	defer ticker.Stop()
	told := st.told
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-ticker.C:
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		head, err := st.cfg.Journal.Head(ctx)
		if err != nil {
			return fmt.Errorf("read journal: %w", err)
		}
		h := &agentv1.Heartbeat{WallTime: timestamppb.New(st.cfg.Clock.Now()), LastSeq: head.LastSeq}
		if now := st.cfg.Node.Conditions(); !sameConditions(told, now) {
			h.Conditions, h.HasConditions, told = now, true, now
		}
		if err := st.tell(ctx, &agentv1.SessionRequest{Message: &agentv1.SessionRequest_Heartbeat{Heartbeat: h}}); err != nil {
			return err
		}
		crash.Point("session.heartbeat.sent")
	}
}

func sameConditions(a, b []*taskv1.Condition) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if !proto.Equal(a[i], b[i]) {
			return false
		}
	}
	return true
}

// watch ends the session when the server has fallen silent, when a drain has
// lasted long enough, and when the identity is replaced or about to end.
func (st *stream) watch(ctx context.Context) error {
	quiet := st.interval * 5 / 2
	silent := time.NewTimer(quiet)
	defer silent.Stop()
	look := time.NewTimer(0)
	defer look.Stop()
	drained := st.drained
	var gone <-chan time.Time
	for {
		left := st.id.NotAfter.Add(-endBefore).Sub(st.cfg.Clock.Now())
		if left <= 0 {
			return errExpires
		}
		look.Reset(min(left, lookEvery))
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-st.heard:
			silent.Reset(quiet)
		case <-silent.C:
			return errSilent
		case <-st.id.Replaced:
			return errReplaced
		case <-drained:
			timer := time.NewTimer(drainWithin)
			defer timer.Stop()
			drained, gone = nil, timer.C
		case <-gone:
			return errClosed
		case <-look.C:
		}
	}
}
