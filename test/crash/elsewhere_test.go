package main

import (
	"io"
	"slices"
	"strings"
	"testing"
	"time"
)

// The list of points that no story comes by names tests that there are, and is
// found out when it does not, or when a story comes by one.
func TestElsewhere(t *testing.T) {
	var points []point
	for _, e := range unreached() {
		points = append(points, point{Name: e.points + "x", Program: agent})
	}
	if err := checkElsewhere("../..", unreached(), points); err != nil {
		t.Error(err)
	}
	file := []shown{{"agent/internal/host/disks/disks_test.go", "TestLoopDisk", ""}}
	for _, tc := range []struct {
		entry elsewhere
		want  string
	}{
		{elsewhere{"host.none.", "because", file}, "none that begins with host.none."},
		{elsewhere{"host.disk.", "", file}, "no reason or no test"},
		{elsewhere{"host.disk.", "because", nil}, "no reason or no test"},
		{elsewhere{"host.disk.", "because", []shown{{file[0].file, "TestLoop", ""}}}, "has no TestLoop"},
		{elsewhere{"host.disk.", "because", []shown{{"none_test.go", "TestLoopDisk", ""}}}, "none_test.go"},
	} {
		if err := checkElsewhere("../..", []elsewhere{tc.entry}, points); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%+v: %v, want %q", tc.entry, err, tc.want)
		}
	}
	all := append(points, point{Name: "host.mkdir.before", Program: agent})
	r := newReport(all)
	if got := r.never(); len(got) != 1 || !strings.HasPrefix(got[0], "host.mkdir.before") {
		t.Errorf("never reached are %v", got)
	}
	mkdir := job{story{kind: "a"}, injury{all[len(all)-1], 1, "kill"}}
	r.reached(mkdir.story, mkdir.injury.point)
	r.add(mkdir, &result{}, true, nil, 0)
	if !r.show(io.Discard, time.Second, options{}) {
		t.Error("all was reached that can be, and that does not do")
	}
	r.reached(mkdir.story, points[0])
	if got := r.afterAll(); !slices.Equal(got, []string{points[0].Name}) || r.show(io.Discard, time.Second, options{}) {
		t.Errorf("reached after all are %v, and that does", got)
	}
}
