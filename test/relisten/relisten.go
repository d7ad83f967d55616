// Package relisten listens at an address where a server of the same test has just
// listened.
package relisten

import (
	"context"
	"errors"
	"net"
	"syscall"
	"testing"
	"time"
)

// patience is far more than a fork or a connection attempt lasts.
const patience = 30 * time.Second

// Listen listens at address, which may be in use for a moment longer: a child
// process that another test has just forked holds the old listener until it runs
// its own program, and a client that tries again may be given the very port as
// its own. It fails the test when the address is not free within half a minute,
// or on any other error.
func Listen(t testing.TB, address string) net.Listener {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		l, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
		if err == nil {
			return l
		}
		if !errors.Is(err, syscall.EADDRINUSE) {
			t.Fatalf("listen at %s: %v", address, err)
		}
		select {
		case <-ctx.Done():
			t.Fatalf("listen at %s: %v", address, err)
		case <-tick.C:
		}
	}
}
