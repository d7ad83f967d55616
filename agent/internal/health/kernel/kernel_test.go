package kernel

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func record(seq int, text string) string {
	return fmt.Sprintf("4,%d,%d,-;%s\n", seq, seq*1000, strings.ReplaceAll(text, "\n", `\x0a`))
}

// TestForms holds the forms that drivers print against what is to be read in
// them, and lines that only look like them against nothing.
func TestForms(t *testing.T) {
	off := Report{Kind: OffBus, PCI: "0000:05:00", Link: -1, Recovery: -1, Fatal: Fatal, Detail: "GPU has fallen off the bus"}
	tests := []struct {
		name  string
		lines []string
		want  []Report
	}{
		{"xid with a process", []string{"NVRM: Xid (PCI:0000:c5:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."},
			[]Report{{Kind: XID, PCI: "0000:c5:00", Number: 79, Link: -1, Recovery: -1, Detail: "pid='<unknown>', name=<unknown>, GPU has fallen off the bus."}}},
		{"xid with a pid", []string{"NVRM: Xid (PCI:0000:3B:00): 31, pid=1234, name=python3, Ch 00000008, intr 00000000. MMU Fault"},
			[]Report{{Kind: XID, PCI: "0000:3b:00", Number: 31, Link: -1, Recovery: -1, Process: "1234 python3", Detail: "pid=1234, name=python3, Ch 00000008, intr 00000000. MMU Fault"}}},
		{"xid of an old driver", []string{"NVRM: Xid (0000:03:00): 13, Graphics Exception"},
			[]Report{{Kind: XID, PCI: "0000:03:00", Number: 13, Link: -1, Recovery: -1, Detail: "Graphics Exception"}}},
		{"xid of a MIG instance", []string{"NVRM: Xid (PCI:0000:01:00 GPU-I:05): 43, pid=9, name=a, Ch 1"},
			[]Report{{Kind: XID, PCI: "0000:01:00", Number: 43, Link: -1, Recovery: -1, Process: "9 a", Detail: "pid=9, name=a, Ch 1"}}},
		{"wide domain", []string{"NVRM: Xid (PCI:00000018:01:00): 48, DBE"},
			[]Report{{Kind: XID, PCI: "0018:01:00", Number: 48, Link: -1, Recovery: -1, Detail: "DBE"}}},
		{"xid without more", []string{"NVRM: Xid (PCI:0000:01:00): 62"},
			[]Report{{Kind: XID, PCI: "0000:01:00", Number: 62, Link: -1, Recovery: -1}}},
		{"nvlink 5", []string{"NVRM: Xid (PCI:0018:01:00): 149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 07 (0x004ac4e6 0x00000000)"},
			[]Report{{Kind: XID, PCI: "0018:01:00", Number: 149, Unit: "NETIR_LINK_EVT", Fatal: Fatal, Link: 7, Recovery: -1, Detail: "NETIR_LINK_EVT  Fatal   XC0 i0 Link 07 (0x004ac4e6 0x00000000)"}}},
		{"nvlink 5 without a link", []string{"NVRM: Xid (PCI:0018:01:00): 145, RLW_CTRL Nonfatal XC1 i2 Link -1 (0x1 0x2)"},
			[]Report{{Kind: XID, PCI: "0018:01:00", Number: 145, Unit: "RLW_CTRL", Fatal: NonFatal, Link: -1, Recovery: -1, Detail: "RLW_CTRL Nonfatal XC1 i2 Link -1 (0x1 0x2)"}}},
		{"recovery action", []string{"NVRM: Xid (PCI:0000:c5:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)"},
			[]Report{{Kind: XID, PCI: "0000:c5:00", Number: 154, Link: -1, Recovery: 2, Detail: "GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)"}}},
		{"switch, fatal", []string{"nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 24007, Fatal, Link 44 sourcetrack TCEN1 crumbstore DBE"},
			[]Report{{Kind: SXID, PCI: "0000:05:00", Number: 24007, Fatal: Fatal, Link: 44, Recovery: -1, Detail: "Fatal, Link 44 sourcetrack TCEN1 crumbstore DBE"}}},
		{"switch, not fatal", []string{"nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 12028, Non-fatal, Link 32 egress non-posted PRIV error (First)"},
			[]Report{{Kind: SXID, PCI: "0000:05:00", Number: 12028, Fatal: NonFatal, Link: 32, Recovery: -1, Detail: "Non-fatal, Link 32 egress non-posted PRIV error (First)"}}},
		{"off the bus, short", []string{"NVRM: GPU 0000:05:00.0: GPU has fallen off the bus."}, []Report{off}},
		{"off the bus, three records", []string{
			"NVRM: The NVIDIA GPU 0000:05:00.0", "NVRM: (PCI ID: 10de:2330) installed in this system has",
			"NVRM: fallen off the bus and is not responding to commands.",
		}, []Report{off}},
		{"off the bus, one record", []string{
			"NVRM: The NVIDIA GPU 0000:05:00.0\nNVRM: (PCI ID: 10de:2330) installed in this system has\nNVRM: fallen off the bus and is not responding to commands.",
		}, []Report{off}},
		{"cut off by another line", []string{
			"NVRM: The NVIDIA GPU 0000:05:00.0", "eth0: link up", "NVRM: fallen off the bus and is not responding to commands.",
		}, nil},
		{"not supported, not lost", []string{
			"NVRM: The NVIDIA GPU 0000:05:00.0", "NVRM: (PCI ID: 10de:2330) installed in this system is not supported by",
			"NVRM: the driver", "NVRM: Xid (PCI:0000:01:00): 62", "NVRM: fallen off the bus and is not responding to commands.",
		}, []Report{{Kind: XID, PCI: "0000:01:00", Number: 62, Link: -1, Recovery: -1}}},
		{"link detection", []string{"NVRM: knvlinkUpdatePostRxDetectLinkMask_IMPL: Failed to update Rx Detect Link mask!"},
			[]Report{{Kind: LinkDetect, Link: -1, Recovery: -1, Detail: "NVRM: knvlinkUpdatePostRxDetectLinkMask_IMPL: Failed to update Rx Detect Link mask!"}}},

		{"a process with such a name", []string{"Out of memory: Killed process 7 (NVRM: Xid (PCI:0000:01:00): 79, )"}, nil},
		{"a name with a line feed", []string{"audit: name=x\nNVRM: Xid (PCI:0000:01:00): 79, y"}, nil},
		{"a label before it", []string{"usb 1-1: Product: NVRM: Xid (PCI:0000:01:00): 79, y"}, nil},
		{"number zero", []string{"NVRM: Xid (PCI:0000:01:00): 0, y"}, nil},
		{"a number too long", []string{"NVRM: Xid (PCI:0000:01:00): 79999, y"}, nil},
		{"no number", []string{"NVRM: Xid (PCI:0000:01:00): abc"}, nil},
		{"no address", []string{"NVRM: Xid (PCI:zz): 79, y"}, nil},
		{"the word alone", []string{"NVRM: loading NVIDIA UNIX x86_64 Kernel Module", "NVRM:", ""}, nil},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			var p Parser
			var got []Report
			for i, l := range test.lines {
				rec, err := ParseRecord([]byte(record(i, l)))
				if err != nil {
					t.Fatal(err)
				}
				got = append(got, p.Parse(rec)...)
			}
			if !slices.Equal(got, test.want) {
				t.Errorf("got  %+v\nwant %+v", got, test.want)
			}
		})
	}
}

// TestWrittenByAUser: root may write to /dev/kmsg, but the kernel never lets it
// pass for the kernel.
func TestWrittenByAUser(t *testing.T) {
	rec, err := ParseRecord([]byte("12,1,1,-;NVRM: Xid (PCI:0000:01:00): 79, x\n"))
	if err != nil {
		t.Fatal(err)
	}
	var p Parser
	if got := p.Parse(rec); got != nil || rec.Facility != 1 {
		t.Errorf("facility %d, reports %+v; want 1 and none", rec.Facility, got)
	}
}

func TestParseRecord(t *testing.T) {
	got, err := ParseRecord([]byte("30,339,5140900,c,caller=T1;NET: a\\x09b\\\\ \\xzz\n SUBSYSTEM=acpi\n"))
	want := Record{Facility: 3, Level: 6, Sequence: 339, Boot: 5140900 * time.Microsecond, Text: "NET: a\tb\\\\ \\xzz"}
	if err != nil || got != want {
		t.Errorf("got %+v, %v; want %+v", got, err, want)
	}
	for _, bad := range []string{"", "\n", ";", "1,2,3;x", "a,2,3,-;x", "1,b,3,-;x", "1,2,c,-;x", "-1,2,3,-;x", "1,2,9223372036854775807,-;x"} {
		if rec, err := ParseRecord([]byte(bad)); err == nil {
			t.Errorf("%q is read as %+v", bad, rec)
		}
	}
}

func TestNormalPCI(t *testing.T) {
	for _, s := range []string{"PCI:0000:c5:00", "00000000:C5:00.0", "0000:c5:00.0", "0000:c5:00"} {
		if got := NormalPCI(s); got != "0000:c5:00" {
			t.Errorf("%q becomes %q", s, got)
		}
	}
	if got := NormalPCI("00010000:C5:00.0"); got != "10000:c5:00" || got != NormalPCI("10000:c5:00.0") {
		t.Errorf("a large domain becomes %q", got)
	}
}

// TestReader reads a pipe and a file in the form of /dev/kmsg: records one by
// one, dictionaries and rubbish passed over, gaps counted.
func TestReader(t *testing.T) {
	content := record(5, "one") + " KEY=value\n" + "rubbish\n" + record(6, "two") + record(9, "three")
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	fifo := filepath.Join(dir, "fifo")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{file, fifo} {
		r, err := Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = r.Close() }()
		w, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = w.Close() }()
		if path == fifo {
			if _, err := w.WriteString(content); err != nil {
				t.Fatal(err)
			}
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		for _, want := range []string{"one", "two", "three"} {
			rec, err := r.Next(ctx)
			if err != nil || rec.Text != want {
				t.Fatalf("%s: got %q, %v; want %q", path, rec.Text, err, want)
			}
		}
		if r.Lost() != 2 {
			t.Errorf("%s: %d records lost, want 2", path, r.Lost())
		}
		// A record that comes later, in two writes, ends the wait.
		got := make(chan string, 1)
		go func() {
			rec, _ := r.Next(ctx)
			got <- rec.Text
		}()
		late := record(10, "late")
		for _, part := range []string{late[:8], late[8:]} {
			if _, err := w.WriteString(part); err != nil {
				t.Fatal(err)
			}
		}
		if text := <-got; text != "late" {
			t.Errorf("%s: got %q, want late", path, text)
		}
		ended, stop := context.WithCancel(ctx)
		done := make(chan error, 1)
		go func() {
			_, err := r.Next(ended)
			done <- err
		}()
		stop()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("%s: got %v, want the context's end", path, err)
		}
	}
}

// TestDevice reads the kernel's own log where this machine has one.
func TestDevice(t *testing.T) {
	r, err := Open(Path)
	if err != nil {
		t.Logf("not read: %v", err)
		return
	}
	defer func() { _ = r.Close() }()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	rec, err := r.Next(ctx)
	if err != nil && !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
	t.Logf("%+v", rec)
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(record(1, "NVRM: Xid (PCI:0000:c5:00): 79, pid=1, name=x, GPU has fallen off the bus.")))
	f.Add([]byte(record(2, "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 12028, Non-fatal, Link 32 egress")))
	f.Add([]byte(record(3, "NVRM: The NVIDIA GPU 0000:05:00.0\nNVRM: x\nNVRM: fallen off the bus and is not responding to commands.")))
	f.Fuzz(func(t *testing.T, b []byte) {
		rec, err := ParseRecord(b)
		if err != nil {
			return
		}
		if len(rec.Text) > maxText {
			t.Errorf("%d bytes of text", len(rec.Text))
		}
		var p Parser
		for range 2 {
			for _, rep := range p.Parse(rec) {
				if len(rep.Detail) > maxDetail || rep.Kind == 0 || (rep.Kind == XID) != (rep.Number > 0 && rep.Number < 10000 && rep.Kind != SXID) {
					t.Errorf("%+v", rep)
				}
			}
		}
	})
}
