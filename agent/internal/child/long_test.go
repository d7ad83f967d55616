package child_test

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gpuaas/millwright/agent/internal/child"
)

func start(t *testing.T, script string, env ...string) *child.Long {
	t.Helper()
	p, err := child.New(child.Config{Logger: slog.New(slog.DiscardHandler)}).Start(child.LongSpec{Argv: sh(script), Env: env})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Kill(); p.Conn().Close() }) //nolint:errcheck // it may be gone
	return p
}

func gone(t *testing.T, p *child.Long) {
	t.Helper()
	select {
	case <-p.Gone():
	case <-time.After(20 * time.Second):
		t.Fatal("it has not ended")
	}
}

func TestLong(t *testing.T) {
	t.Setenv("LD_BIND_NOW", "1") // nothing of the agent's own environment goes on
	p := start(t, `read line <&3; echo "$line $MINE $LD_BIND_NOW." >&3; echo oops >&2; exit 7`, "MINE=1")
	if _, err := fmt.Fprintln(p.Conn(), "hello"); err != nil {
		t.Fatal(err)
	}
	if got, err := bufio.NewReader(p.Conn()).ReadString('\n'); err != nil || got != "hello 1 .\n" {
		t.Errorf("%q, %v", got, err)
	}
	gone(t, p)
	if code, signal, said := p.End(); code != 7 || signal != -1 || said != "oops\n" {
		t.Errorf("code %d, signal %v, said %q", code, signal, said)
	}
	if err := p.Kill(); err != nil {
		t.Errorf("kill what is gone: %v", err)
	}
}

// Kill ends the program with what it started, and what it wrote is bounded.
func TestLongKilled(t *testing.T) {
	p := start(t, `sleep 60 & printf begin >&2; head -c 100000 /dev/zero | tr '\0' x >&2; echo end >&2; echo ready >&3; wait`)
	if _, err := bufio.NewReader(p.Conn()).ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	if err := p.Kill(); err != nil {
		t.Fatal(err)
	}
	gone(t, p)
	code, signal, said := p.End()
	if code != -1 || signal != syscall.SIGKILL || !strings.HasPrefix(said, "begin") || !strings.HasSuffix(said, "end\n") || len(said) > 5000 {
		t.Errorf("code %d, signal %v, %d bytes", code, signal, len(said))
	}
}

func TestLongMissing(t *testing.T) {
	_, err := newRunner().Start(child.LongSpec{Argv: []string{"/no/such"}})
	if !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("error %v", err)
	}
}
