package relisten

import (
	"net"
	"testing"
	"time"
)

// TestListen takes an address that is given up only a moment later.
func TestListen(t *testing.T) {
	old, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed := make(chan time.Time, 1)
	time.AfterFunc(100*time.Millisecond, func() {
		closed <- time.Now()
		_ = old.Close()
	})
	l := Listen(t, old.Addr().String())
	defer func() { _ = l.Close() }()
	select {
	case <-closed:
	default:
		t.Error("it listens while the old one does")
	}
}
