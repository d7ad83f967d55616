package xid

import (
	"slices"
	"strings"
	"testing"
)

func table(t *testing.T) *Table {
	t.Helper()
	out, err := Builtin()
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// TestBuckets holds the table against NVIDIA's own buckets, written down here a
// second time and apart from it.
func TestBuckets(t *testing.T) {
	buckets := map[Action]string{
		None: "14,37,38,43,44,63,66,67,92,93,106,107,108,121,137,141,152,153,157,160,161",
		RestartApp: "8,11,13,25,31,32,39,40,41,60,68,69,70,71,72,75,76,77,85,126-135,80,82,83,84,86,88,89,96,97,98,99-105," +
			"94,139",
		ResetGPU:       "46,62,64,95,109,110,119,120,136,140,143,155,156,158",
		Reboot:         "79,151",
		CheckPower:     "54",
		ContactSupport: "142",
		UpdateSoftware: "78",
	}
	tab := table(t)
	for action, list := range buckets {
		numbers, err := Numbers(list)
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range numbers {
			r := tab.Row(n)
			if r.Action != action || !r.Listed || r.Judged {
				t.Errorf("XID %d: %+v, want action %s from the table", n, r, action)
			}
		}
	}
	for n, want := range map[int]Severity{43: Info, 94: Warning, 13: Warning, 78: Degraded, 95: Fatal, 79: Fatal, 54: Fatal} {
		if got := tab.Row(n).Severity; got != want {
			t.Errorf("XID %d is %s, want %s", n, got, want)
		}
	}
}

func TestRows(t *testing.T) {
	tab := table(t)
	if tab.Version == "" {
		t.Error("the table has no version")
	}
	for _, n := range tab.All() {
		r := tab.Row(n)
		if r.Title == "" || r.Meaning == "" || !strings.HasSuffix(r.Meaning, ".") {
			t.Errorf("XID %d lacks a title or a meaning that is a sentence: %+v", n, r)
		}
		if (r.Severity == Info) != (r.Action == None) {
			t.Errorf("XID %d is %s and asks for %s", n, r.Severity, r.Action)
		}
		for _, c := range r.Clears {
			if !tab.Row(c).Listed {
				t.Errorf("XID %d clears %d, which is not listed", n, c)
			}
		}
	}
	for _, n := range []int{1, 61, 122, 999} {
		if r := tab.Row(n); r.Listed || r.Action != ContactSupport || r.Severity != Fatal || r.Number != n {
			t.Errorf("XID %d, which is not listed: %+v", n, r)
		}
	}
	if !slices.Equal(tab.Row(162).Clears, []int{163}) || !tab.Row(154).DriverDecides || !tab.Row(147).LineDecides {
		t.Error("162 does not clear 163, 154 is not the driver's, or 147 not the line's")
	}
}

func TestOverride(t *testing.T) {
	tab := table(t)
	with, err := tab.With([]Override{
		{XID: "31,43", Severity: Degraded, Action: ResetGPU, Reason: "ticket 12"},
		{XID: "145", Severity: Info, Action: None},
		{XID: "61", Severity: Info},
	})
	if err != nil {
		t.Fatal(err)
	}
	if r := with.Row(43); r.Severity != Degraded || r.Action != ResetGPU || !r.Overridden || r.Source != "ticket 12" || r.Title != tab.Row(43).Title {
		t.Errorf("43: %+v", r)
	}
	if r := with.Row(145); r.LineDecides || r.Severity != Info {
		t.Errorf("145: %+v", r)
	}
	if r := with.Row(61); r.Severity != Info || r.Action != ContactSupport {
		t.Errorf("61: %+v", r)
	}
	if r := tab.Row(43); r.Overridden {
		t.Error("the first table changed")
	}
	for _, bad := range []struct {
		o    []Override
		want string
	}{
		{[]Override{{XID: "31"}}, "xids[0]: neither severity nor action"},
		{[]Override{{XID: "x", Action: None}}, `xids[0].xid: "x" is no number`},
		{[]Override{{XID: "3-1", Action: None}}, "is no number"},
		{[]Override{{XID: "1-99999", Action: None}}, "from 1 to 9999"},
		{[]Override{{XID: "31", Severity: "bad"}}, `xids[0].severity: "bad"`},
		{[]Override{{XID: "31", Action: "explode"}}, `xids[0].action: "explode"`},
		{[]Override{{XID: "31", Action: None}, {XID: "30-32", Action: None}}, "xids[1].xid: 31 is overridden twice"},
	} {
		if _, err := tab.With(bad.o); err == nil || !strings.Contains(err.Error(), bad.want) {
			t.Errorf("%+v: %v, want %q", bad.o, err, bad.want)
		}
	}
}
