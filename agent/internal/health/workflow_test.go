package health

import (
	"fmt"
	"strings"
	"testing"
	"time"

	healthv1 "github.com/gpuaas/millwright/proto/millwright/health/v1"
)

func graphicsLine(pid, gpc, tpc, sm int) string {
	return fmt.Sprintf("NVRM: Xid (PCI:0000:c5:00): 13, pid='%d', name=train, Graphics SM Warp Exception on (GPC %d, TPC %d, SM %d): Out Of Range Address", pid, gpc, tpc, sm)
}

// TestGraphicsExceptions has XID 13 come back on one unit and on many, under one
// process and under several: only several on one unit speak against the GPU.
func TestGraphicsExceptions(t *testing.T) {
	for name, tc := range map[string]struct {
		lines []string
		want  healthv1.Action
		words string
	}{
		"alone":                     {[]string{graphicsLine(1, 0, 0, 0)}, healthv1.Action_ACTION_RESTART_APP, "Out Of Range"},
		"one process, one unit":     {[]string{graphicsLine(1, 0, 0, 0), graphicsLine(1, 0, 0, 1), graphicsLine(1, 0, 0, 0)}, healthv1.Action_ACTION_RESTART_APP, ""},
		"two processes, one unit":   {[]string{graphicsLine(1, 2, 3, 0), graphicsLine(2, 2, 3, 0)}, healthv1.Action_ACTION_RESTART_APP, ""},
		"three processes, one unit": {[]string{graphicsLine(1, 2, 3, 0), graphicsLine(2, 2, 3, 1), graphicsLine(3, 2, 3, 0)}, healthv1.Action_ACTION_CHECK_HARDWARE, "GPC 2, TPC 3"},
		"and then elsewhere":        {[]string{graphicsLine(1, 2, 3, 0), graphicsLine(2, 2, 3, 1), graphicsLine(3, 2, 3, 0), graphicsLine(4, 0, 0, 0)}, healthv1.Action_ACTION_CHECK_HARDWARE, "GPC 2, TPC 3"},
		"three processes, three":    {[]string{graphicsLine(1, 0, 3, 0), graphicsLine(2, 1, 3, 1), graphicsLine(3, 2, 3, 0)}, healthv1.Action_ACTION_RESTART_APP, ""},
		"a name that looks like it": {[]string{
			"NVRM: Xid (PCI:0000:c5:00): 13, pid=1, name=(GPC 1, TPC 1,, x", "NVRM: Xid (PCI:0000:c5:00): 13, pid=2, name=(GPC 1, TPC 1,, x", "NVRM: Xid (PCI:0000:c5:00): 13, pid=3, name=(GPC 1, TPC 1,, x",
		}, healthv1.Action_ACTION_RESTART_APP, ""},
	} {
		t.Run(name, func(t *testing.T) {
			s := newScript(t, nil).inventory()
			for _, l := range tc.lines {
				s.line(l)
			}
			c := s.conditions["gpu.xid.13/GPU-a"].get()
			if c.GetAction() != tc.want || c.GetSeverity() != warning || !strings.Contains(c.GetMessage(), tc.words) {
				t.Errorf("%v", c)
			}
		})
	}
	s := newScript(t, nil).inventory()
	s.line(graphicsLine(1, 0, 0, 0))
	s.line(graphicsLine(2, 0, 0, 0))
	s.tick(s.at(quiet + time.Minute))
	s.line(graphicsLine(3, 0, 0, 0))
	if c := s.conditions["gpu.xid.13/GPU-a"].get(); c.GetState() != raised || c.GetAction() != healthv1.Action_ACTION_RESTART_APP {
		t.Errorf("what was over counts: %v", c)
	}
	for i := range 10_000 {
		s.line(graphicsLine(i, i%90, i/90%90, 0))
	}
	if n := len(s.gpus["GPU-a"].exceptions); n > mostUnits {
		t.Errorf("%d units are kept", n)
	}
}

// TestErrorsThatFollow holds XIDs 45 and 48, each alone and beside others,
// against the action that NVIDIA's workflows end in for a node.
func TestErrorsThatFollow(t *testing.T) {
	for _, tc := range []struct {
		xids   []int
		of     int
		sev    healthv1.Severity
		action healthv1.Action
	}{
		{[]int{45}, 45, info, none},
		{[]int{45, 45, 45, 45, 45}, 45, info, none},
		{[]int{79, 45}, 45, info, none},
		{[]int{79, 45}, 79, fatal, reboot},
		{[]int{48}, 48, fatal, resetGPU},
		{[]int{48, 63, 94}, 48, fatal, resetGPU},
		{[]int{48, 64, 95}, 95, fatal, resetGPU},
		{[]int{48, 172}, 48, fatal, resetGPU},
	} {
		s := newScript(t, nil).inventory()
		for _, n := range tc.xids {
			s.line(fmt.Sprintf("NVRM: Xid (PCI:0000:c5:00): %d, pid=7, name=train, words", n))
		}
		if c := s.conditions[fmt.Sprintf("gpu.xid.%d/GPU-a", tc.of)].get(); c.GetSeverity() != tc.sev || c.GetAction() != tc.action {
			t.Errorf("XID %d of %v: %v", tc.of, tc.xids, c)
		}
	}
}
