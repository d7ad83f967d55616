package testbed_test

import (
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/gpuaas/millwright/test/testbed"
	"github.com/gpuaas/millwright/test/testbed/testbedtest"
)

// TestCutOneWay sends packets in both directions and counts those that arrive.
func TestCutOneWay(t *testing.T) {
	tb := testbedtest.Up(t, testbed.Config{Nodes: 1})
	n1 := mustNode(t, tb, "n1")
	here, err := new(net.ListenConfig).ListenPacket(t.Context(), "udp", net.JoinHostPort(tb.Address().String(), "0"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = here.Close() }()
	_, port, _ := net.SplitHostPort(here.LocalAddr().String())
	testbedtest.Exec(t, n1, "sh", "-c", `python3 -c '
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(("", 4999))
while True: open("/run/came", "ab", 0).write(s.recv(10))
' </dev/null >/dev/null 2>&1 & until grep -q ':1387 ' /proc/net/udp; do sleep 0.05; done`)
	arrives := func() (in, out bool) {
		t.Helper()
		testbedtest.Exec(t, n1, "rm", "-f", "/run/came")
		there, err := net.ResolveUDPAddr("udp", net.JoinHostPort(n1.Addr().String(), "4999"))
		if err != nil {
			t.Fatal(err)
		}
		for range 3 {
			if _, err := here.WriteTo([]byte("x"), there); err != nil {
				t.Fatal(err)
			}
		}
		testbedtest.Exec(t, n1, "bash", "-c", "for i in 1 2 3; do echo -n x > /dev/udp/server/"+port+"; done; sleep 0.3")
		if err := here.SetReadDeadline(time.Now().Add(300 * time.Millisecond)); err != nil {
			t.Fatal(err)
		}
		for {
			if _, _, err := here.ReadFrom(make([]byte, 10)); err != nil {
				break
			}
			out = true
		}
		return strings.Contains(testbedtest.Exec(t, n1, "sh", "-c", "cat /run/came 2>/dev/null; true"), "x"), out
	}
	want := func(when string, in, out bool) {
		t.Helper()
		gotIn, gotOut := arrives()
		// A cable that was plugged in elsewhere may lose the first packets.
		for deadline := time.Now().Add(10 * time.Second); (gotIn != in || gotOut != out) && time.Now().Before(deadline); {
			gotIn, gotOut = arrives()
		}
		if gotIn != in || gotOut != out {
			t.Errorf("%s: packets arrive at the node %t, want %t, and from it %t, want %t", when, gotIn, in, gotOut, out)
		}
	}
	want("at first", true, true)
	for _, step := range []struct {
		d       testbed.Direction
		in, out bool
	}{{testbed.Out, true, false}, {testbed.In, false, true}, {testbed.Both, false, false}, {testbed.In, false, true}} {
		if err := n1.CutOneWay(t.Context(), step.d); err != nil {
			t.Fatal(err)
		}
		if !n1.IsCut() {
			t.Errorf("cut %s: IsCut says no", step.d)
		}
		want(fmt.Sprintf("cut %q", step.d), step.in, step.out)
	}
	if err := n1.Heal(t.Context()); err != nil {
		t.Fatal(err)
	}
	want("after heal", true, true)
}

// TestWorseLine measures the line by the time that connections take.
func TestWorseLine(t *testing.T) {
	tb := testbedtest.Up(t, testbed.Config{Nodes: 1})
	n1 := mustNode(t, tb, "n1")
	testbedtest.Exec(t, n1, "sh", "-c", `python3 -m http.server 4998 </dev/null >/dev/null 2>&1 & until grep -q ':1386 ' /proc/net/tcp; do sleep 0.05; done`)
	connect := func() time.Duration {
		t.Helper()
		begin := time.Now()
		conn, err := (&net.Dialer{Timeout: 30 * time.Second}).DialContext(t.Context(), "tcp", net.JoinHostPort(n1.Addr().String(), "4998"))
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = conn.Close() }()
		return time.Since(begin)
	}
	if took := connect(); took >= 300*time.Millisecond {
		t.Logf("a good line took %s", took)
	}
	mend, err := n1.Worsen(t.Context(), testbed.Line{Delay: 200 * time.Millisecond, Jitter: 50 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	for range 5 {
		if took := connect(); took < 300*time.Millisecond || took > 15*time.Second {
			t.Errorf("a line of 200 ms +- 50 ms each way took %s", took)
		}
	}
	if err := mend(); err != nil {
		t.Fatal(err)
	}
	if mend, err = n1.Worsen(t.Context(), testbed.Line{Loss: 1}); err != nil {
		t.Fatal(err)
	}
	if conn, err := (&net.Dialer{Timeout: 2 * time.Second}).DialContext(t.Context(), "tcp", net.JoinHostPort(n1.Addr().String(), "4998")); err == nil {
		_ = conn.Close()
		t.Error("a line that loses all lets a connection through")
	}
	if err := mend(); err != nil {
		t.Fatal(err)
	}
	if took := connect(); took > 5*time.Second {
		t.Errorf("the line that was mended took %s", took)
	}
}
