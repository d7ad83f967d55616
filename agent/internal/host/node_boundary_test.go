//go:build millwright_node

package nodehost_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/godbus/dbus/v5"

	"github.com/gpuaas/millwright/agent/internal/host/systemd"
	"github.com/gpuaas/millwright/agent/internal/shim"
	"github.com/gpuaas/millwright/tasks/host"
)

// deaf is a way to the bus on which no word of the end of a job arrives.
type deaf struct {
	t       *testing.T
	dropped atomic.Int64
}

func (d *deaf) dial(life context.Context) (*dbus.Conn, error) {
	bus, err := new(net.Dialer).DialContext(life, "unix", "/run/dbus/system_bus_socket")
	if err != nil {
		return nil, err
	}
	ours, theirs := net.Pipe()
	var ways sync.WaitGroup
	ways.Go(func() { _, _ = io.Copy(bus, theirs); _ = bus.Close() })  // it ends when one side does
	ways.Go(func() { _ = d.filter(theirs, bus); _ = theirs.Close() }) // likewise
	d.t.Cleanup(func() {
		_ = bus.Close()  // it may be closed
		_ = ours.Close() // likewise
		ways.Wait()
	})
	conn, err := dbus.NewConn(ours, dbus.WithContext(life))
	if err != nil {
		return nil, err
	}
	if err := conn.Auth([]dbus.Auth{dbus.AuthExternal(strconv.Itoa(os.Getuid()))}); err != nil {
		return nil, err
	}
	return conn, conn.Hello()
}

// filter copies what the bus says and leaves the signals out that tell of the
// end of a job. Before the messages there are lines of text.
func (d *deaf) filter(to io.Writer, from io.Reader) error {
	r := bufio.NewReader(from)
	for {
		first, err := r.Peek(1)
		if err != nil {
			return err
		}
		var m []byte
		if first[0] != 'l' {
			m, err = r.ReadBytes('\n')
		} else if m, err = r.Peek(16); err == nil {
			fields, body := binary.LittleEndian.Uint32(m[12:]), binary.LittleEndian.Uint32(m[4:])
			m = make([]byte, 16+(fields+7)/8*8+body)
			_, err = io.ReadFull(r, m)
		}
		if err != nil {
			return err
		}
		if first[0] == 'l' && m[1] == 4 && bytes.Contains(m, []byte("JobRemoved")) {
			d.dropped.Add(1)
			continue
		}
		if _, err := to.Write(m); err != nil {
			return err
		}
	}
}

// A job whose end is not signalled is found to have ended all the same.
func TestLostJobSignals(t *testing.T) {
	needNode(t)
	name := "mwtest-deaf.service"
	writeUnit(t, newHost(t), name, "[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=/bin/sleep 1\n")
	d := &deaf{t: t}
	c := systemd.New(systemd.Config{
		Logger: slog.New(slog.NewTextHandler(t.Output(), nil)), Dial: d.dial,
		Users: func(context.Context, string) ([]host.Use, error) { return nil, nil },
		Logs:  func(context.Context, string, time.Time) []string { return nil },
	})
	defer c.Close()
	for verb, do := range map[string]func(context.Context, string) error{"start": c.StartUnit, "stop": c.StopUnit} {
		begin := time.Now()
		if verb == "stop" {
			must(t, c.StartUnit(t.Context(), name))
		}
		must(t, do(t.Context(), name))
		if took := time.Since(begin); took > 20*time.Second {
			t.Errorf("%s took %s", verb, took)
		}
	}
	if d.dropped.Load() == 0 {
		t.Error("no signal was cut off: this test shows nothing")
	}
}

// A name that is left over from before does not keep a command from running,
// and one that someone else uses is never taken for ours.
func TestLeftOverUnitNames(t *testing.T) {
	needNode(t)
	prepare := map[string]func(t *testing.T, unit string){
		"failed": func(t *testing.T, unit string) {
			systemctl(t, "reset-failed")
			run(t, "systemd-run", "--unit", unit, "--wait", "/bin/false")
			if !strings.Contains(systemctl(t, "is-failed", unit), "failed") {
				t.Fatal("no failed unit is left over")
			}
		},
		"with a file": func(t *testing.T, unit string) {
			path := filepath.Join("/run/systemd/system", unit)
			must(t, os.WriteFile(path, []byte("[Service]\nType=oneshot\nExecStart=/bin/true\n"), 0o644))
			systemctl(t, "daemon-reload")
			t.Cleanup(func() { must(t, os.Remove(path)); systemctl(t, "daemon-reload") })
		},
		"of someone else": func(t *testing.T, unit string) {
			run(t, "systemd-run", "--unit", unit, "/bin/sleep", "1000")
			t.Cleanup(func() { systemctl(t, "stop", unit) })
		},
	}
	want := map[string]struct {
		err  error
		runs int
	}{
		"failed": {nil, 1}, "with a file": {host.ErrNotStarted, 0}, "of someone else": {host.ErrOutcomeUnknown, 0},
	}
	for name, leave := range prepare {
		t.Run(name, func(t *testing.T) {
			task, count := "left-"+strconv.FormatInt(time.Now().UnixNano(), 10), filepath.Join(t.TempDir(), "count")
			unit := shim.ID{TaskID: task, Attempt: 1}.Unit()
			leave(t, unit)
			for range 2 { // the answer stays the same
				_, err := newNode(t, t.TempDir()).ForStep(task, 0).RunCommand(t.Context(), sh(`echo x >> "$0"`, count))
				if !errors.Is(err, want[name].err) {
					t.Errorf("error %v, want %v", err, want[name].err)
				}
				if name == "failed" {
					break
				}
			}
			b, _ := os.ReadFile(count) // it may not be there
			if n := bytes.Count(b, []byte("x")); n != want[name].runs {
				t.Errorf("it ran %d times, want %d", n, want[name].runs)
			}
			if name == "of someone else" && systemctl(t, "is-active", unit) != "active" {
				t.Error("what is not ours was stopped")
			}
		})
	}
}

// Commands that end, well or not, leave no units behind, however many they are,
// and systemd answers as fast as before.
func TestManyUnits(t *testing.T) {
	needNode(t)
	total := 300
	if s := os.Getenv("MILLWRIGHT_UNITS"); s != "" {
		n, err := strconv.Atoi(s)
		must(t, err)
		total = n
	}
	n := newNode(t, t.TempDir())
	answer := func() time.Duration {
		begin := time.Now()
		for range 20 {
			_, err := newHost(t).Unit(t.Context(), "millwright.slice")
			must(t, err)
		}
		return time.Since(begin) / 20
	}
	loaded := func() int {
		return len(strings.Split(systemctl(t, "list-units", "--all", "--no-legend", "--plain"), "\n"))
	}
	before, quick := loaded(), answer()
	begin, prefix := time.Now(), "many-"+strconv.FormatInt(time.Now().UnixNano(), 10)
	var next atomic.Int64
	var workers sync.WaitGroup
	for range 8 {
		workers.Go(func() {
			for i := next.Add(1); i <= int64(total); i = next.Add(1) {
				task := prefix + "-" + strconv.FormatInt(i, 10)
				out, err := n.ForStep(task, 0).RunCommand(t.Context(), host.Command{Argv: []string{[]string{"/bin/true", "/bin/false"}[i%2]}})
				if err != nil || out.ExitCode != int(i%2) {
					t.Errorf("command %d: %+v, %v", i, out, err)
				}
				if err := n.DeleteCommands(task); err != nil {
					t.Error(err)
				}
			}
		})
	}
	workers.Wait()
	t.Logf("%d commands in %s", total, time.Since(begin).Round(time.Second))
	if left := systemctl(t, "list-units", "--all", "--no-legend", "--plain", "millwright-task-"+prefix+"*"); left != "" {
		t.Errorf("units are left: %s", left)
	}
	after, slow := loaded(), answer()
	t.Logf("%d units before and %d after; an answer took %s and takes %s", before, after, quick, slow)
	if after > before+20 {
		t.Errorf("%d units were loaded before, and %d are now", before, after)
	}
	if slow > 10*quick+50*time.Millisecond {
		t.Errorf("an answer took %s before, and takes %s now", quick, slow)
	}
}

// run runs a program and asks nothing of how it ends.
func run(t *testing.T, argv ...string) {
	t.Helper()
	out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput()
	t.Logf("%s: %v %s", strings.Join(argv, " "), err, out)
}
