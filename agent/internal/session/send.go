package session

import (
	"context"
	"errors"
	"fmt"
	"io"

	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
)

// next waits for what is to be sent next: what is said first, then events, and
// reports when there is nothing else.
func (st *stream) next(ctx context.Context) *agentv1.SessionRequest {
	for {
		select {
		case m := <-st.say:
			return m
		default:
		}
		select {
		case m := <-st.say:
			return m
		case m := <-st.batches:
			return m
		default:
		}
		select {
		case <-ctx.Done():
			return nil
		case m := <-st.say:
			return m
		case m := <-st.batches:
			return m
		case <-st.reports:
			if m := st.newest(); m != nil {
				return m
			}
		}
	}
}

// send is the only caller of Send.
func (st *stream) send(ctx context.Context) error {
	for {
		m := st.next(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		m.SessionEpoch = st.epoch
		if err := st.rpc.Send(m); errors.Is(err, io.EOF) {
			<-ctx.Done() // the reader has the reason
			return ctx.Err()
		} else if err != nil {
			return fmt.Errorf("send: %w", err)
		}
	}
}
