package step_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
	"github.com/gpuaas/millwright/tasks/step"
	"github.com/gpuaas/millwright/tasks/tasktest/fakehost"
)

const unit = "[Mount]\nWhat=tmpfs\nWhere=/mnt/data\nType=tmpfs\nOptions=size=8192\n[Install]\nWantedBy=remote-fs.target\n"

// node returns a node after a script, and its host.
func node(t *testing.T, script string) (*fakehost.Node, host.Host) {
	t.Helper()
	n := fakehost.New()
	do(t, n, script)
	return n, n.Hosts(nil).ForStep("t", 0)
}

func do(t *testing.T, n *fakehost.Node, script string) {
	t.Helper()
	if err := n.Do(script); err != nil {
		t.Fatal(err)
	}
}

func file(path, content string) string {
	return "file " + path + " 0644 " + `"` + strings.ReplaceAll(content, "\n", `\n`) + "\"\n"
}

func mountStep(action taskv1.UnitAction) *taskv1.MountUnitStep {
	return &taskv1.MountUnitStep{Unit: "mnt-data.mount", Where: "/mnt/data", Source: "tmpfs", Fstype: "tmpfs", Action: action}
}

const (
	start   = taskv1.UnitAction_UNIT_ACTION_START
	stop    = taskv1.UnitAction_UNIT_ACTION_STOP
	restart = taskv1.UnitAction_UNIT_ACTION_RESTART
	reload  = taskv1.UnitAction_UNIT_ACTION_DAEMON_RELOAD
)

// TestThereAndBack applies each step twice, checks what is there, and undoes it
// twice: the node is as it was.
func TestThereAndBack(t *testing.T) {
	mountUnit := file("/etc/systemd/system/mnt-data.mount", unit)
	service := file("/etc/systemd/system/x.service", "[Service]\nRemainAfterExit=yes\nExecStart=/bin/true\n[Install]\nWantedBy=multi-user.target\n") + "program /bin/true\n"
	for _, tc := range []struct {
		name   string
		before string
		step   tasks.Step
		after  string // a line of the node's description; with ! one that is not there
	}{
		{"write", "", step.WriteFile(&taskv1.WriteFileStep{Path: "/etc/a", Data: []byte("x"), Mode: 0o600}), `file /etc/a 0600 "x"`},
		{"write over", file("/etc/a", "old"), step.WriteFile(&taskv1.WriteFileStep{Path: "/etc/a", Data: []byte("x"), Mode: 0o600}), `file /etc/a 0600 "x"`},
		{"remove", file("/etc/a", "old"), step.RemoveFile(&taskv1.RemoveFileStep{Path: "/etc/a"}), "!/etc/a"},
		{"remove nothing", "", step.RemoveFile(&taskv1.RemoveFileStep{Path: "/etc/a"}), "!/etc/a"},
		{"make directories", "", step.MakeDir(&taskv1.DirectoryStep{Path: "/srv/a/b", Mode: 0o750}), "dir /srv/a/b 0750"},
		{"make a directory that is there", "dir /srv/a/b 0700", step.MakeDir(&taskv1.DirectoryStep{Path: "/srv/a/b", Mode: 0o750}), "dir /srv/a/b 0700"},
		{"start", service, step.SetUnit(&taskv1.UnitStep{Unit: "x.service", Action: start}), "link /etc/systemd/system/multi-user.target.wants/x.service"},
		{"stop", service + "enable x.service", step.SetUnit(&taskv1.UnitStep{Unit: "x.service", Action: stop}), "!wants"},
		{"restart", service, step.SetUnit(&taskv1.UnitStep{Unit: "x.service", Action: restart}), "!wants"},
		{"reload", service, step.SetUnit(&taskv1.UnitStep{Unit: "x.service", Action: reload}), "!wants"},
		{"mount", mountUnit + "dir /mnt/data", step.SetMount(mountStep(start)), "mount /mnt/data tmpfs tmpfs[/] rw,relatime rw,size=8k"},
		{"mount what is mounted", mountUnit + "enable mnt-data.mount\nmount /mnt/data tmpfs tmpfs", step.SetMount(mountStep(start)), "mount /mnt/data"},
		{"unmount", mountUnit + "enable mnt-data.mount\nmount /mnt/data tmpfs tmpfs", step.SetMount(mountStep(stop)), "!mount /mnt/data"},
		{"unmount nothing", mountUnit, step.SetMount(mountStep(stop)), "!mount /mnt/data"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			n, h := node(t, tc.before)
			was := units(t, h) + strings.ReplaceAll(n.Dump(), ",size=8k", "")
			before, err := tc.step.Observe(t.Context(), h)
			if err != nil {
				t.Fatal(err)
			}
			for range 2 {
				if _, err := tc.step.Apply(t.Context(), h); err != nil {
					t.Fatal(err)
				}
				if err := tc.step.Verify(t.Context(), h); err != nil {
					t.Error(err)
				}
			}
			want, absent := strings.CutPrefix(tc.after, "!")
			if strings.Contains(n.Dump(), want) == absent {
				t.Errorf("applied:\n%s\nwant %s", n.Dump(), tc.after)
			}
			for range 2 {
				if err := tc.step.Undo(t.Context(), h, before); err != nil {
					t.Fatal(err)
				}
			}
			if now := units(t, h) + strings.ReplaceAll(n.Dump(), ",size=8k", ""); now != was {
				t.Errorf("undone:\n%s\nwant\n%s", now, was)
			}
			if tc.step.Title() == "" {
				t.Error("the step has no title")
			}
		})
	}
}

func units(t *testing.T, h host.Host) string {
	t.Helper()
	st, err := h.Unit(t.Context(), "x.service")
	if err != nil {
		t.Fatal(err)
	}
	return st.Active + " " + st.Enabled + "\n"
}

// TestOnlyWhatCanBeRestoredIsTouched checks that a step refuses at Observe what
// its undo could not bring back.
func TestOnlyWhatCanBeRestoredIsTouched(t *testing.T) {
	for name, s := range map[string]tasks.Step{
		"write over a link":      step.WriteFile(&taskv1.WriteFileStep{Path: "/etc/link"}),
		"remove a link":          step.RemoveFile(&taskv1.RemoveFileStep{Path: "/etc/link"}),
		"write over a directory": step.WriteFile(&taskv1.WriteFileStep{Path: "/srv"}),
		"directory below a link": step.MakeDir(&taskv1.DirectoryStep{Path: "/etc/link/a"}),
		"directory below a file": step.MakeDir(&taskv1.DirectoryStep{Path: "/etc/file/a"}),
	} {
		_, h := node(t, "link /etc/link /srv\n"+file("/etc/file", "x"))
		if _, err := s.Observe(t.Context(), h); err == nil {
			t.Errorf("%s: Observe gave no error", name)
		}
	}
}

// TestUndoLeavesWhatIsNotTheSteps checks undo after somebody else has acted.
func TestUndoLeavesWhatIsNotTheSteps(t *testing.T) {
	dir := step.MakeDir(&taskv1.DirectoryStep{Path: "/srv/a/b", Mode: 0o755})
	n, h := node(t, "")
	before, err := dir.Observe(t.Context(), h)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := dir.Apply(t.Context(), h); err != nil {
		t.Fatal(err)
	}
	do(t, n, file("/srv/a/other", "x"))
	if err := dir.Undo(t.Context(), h, before); err != nil || n.Dump() != "dir /srv/a 0755\nfile /srv/a/other 0644 \"x\"\n" {
		t.Errorf("undo of directories in which somebody has written: %v\n%s", err, n.Dump())
	}
	do(t, n, "mount /srv/a/b ext4 /dev/vdb1")
	if err := dir.Undo(t.Context(), h, before); !errors.Is(err, host.ErrBusy) {
		t.Errorf("undo of a directory on which somebody has mounted: %v", err)
	}

	mount := step.SetMount(mountStep(start))
	n, h = node(t, file("/etc/systemd/system/mnt-data.mount", unit))
	if before, err = mount.Observe(t.Context(), h); err != nil {
		t.Fatal(err)
	}
	do(t, n, "mount /mnt/data ext4 /dev/vdb1")
	if _, err := mount.Apply(t.Context(), h); err == nil || !strings.Contains(err.Error(), "/dev/vdb1") {
		t.Errorf("mount where somebody has mounted meanwhile: %v", err)
	}
	if err := mount.Undo(t.Context(), h, before); err != nil || !strings.Contains(n.Dump(), "mount /mnt/data ext4") {
		t.Errorf("undo took what somebody has mounted: %v\n%s", err, n.Dump())
	}
}

// TestUnmountOnlyWhatItNames checks the guards of an unmount.
func TestUnmountOnlyWhatItNames(t *testing.T) {
	s := step.SetMount(mountStep(stop))
	for name, tc := range map[string]struct{ script, says, reason string }{
		"another mount": {"mount /mnt/data ext4 /dev/vdb1", "/dev/vdb1 of type ext4 has been mounted there meanwhile", ""},
		"a mount below": {"mount /mnt/data tmpfs tmpfs\nmount /mnt/data/b ext4 /dev/vdb1", "/mnt/data/b is mounted below it", tasks.ReasonBusy},
		"in use":        {"mount /mnt/data tmpfs tmpfs\nbusy /mnt/data 4711 /bin/bash", "4711 (/bin/bash, cwd)", tasks.ReasonBusy},
	} {
		n, h := node(t, file("/etc/systemd/system/mnt-data.mount", unit)+"enable mnt-data.mount\n"+tc.script)
		was := n.Dump()
		_, err := s.Apply(t.Context(), h)
		if err == nil || !strings.Contains(err.Error(), tc.says) {
			t.Errorf("%s: Apply = %v, want one that says %q", name, err, tc.says)
		}
		var reason *tasks.ReasonError
		if got := errors.As(err, &reason); got != (tc.reason != "") || got && (reason.Reason != tc.reason || !errors.Is(err, host.ErrBusy)) {
			t.Errorf("%s: Apply = %v, want reason %q", name, err, tc.reason)
		}
		if n.Dump() != was {
			t.Errorf("%s: the node changed:\n%s", name, n.Dump())
		}
	}
}

// TestUnmountByHandMadeIsNotRestored checks that an undo says so when the unit
// cannot mount what was there.
func TestUnmountByHandMadeIsNotRestored(t *testing.T) {
	m := mountStep(stop)
	m.Source, m.Fstype = "/dev/vdb1", "ext4"
	s := step.SetMount(m)
	_, h := node(t, file("/etc/systemd/system/mnt-data.mount", unit)+"enable mnt-data.mount\nmount /mnt/data ext4 /dev/vdb1")
	before, err := s.Observe(t.Context(), h)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Apply(t.Context(), h); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := s.Undo(t.Context(), h, before); !errors.Is(err, tasks.ErrIrreversible) {
			t.Errorf("Undo = %v", err)
		}
	}
}

func TestCommandOutcomes(t *testing.T) {
	for _, tc := range []struct {
		name, script string
		codes        []int32
		reason       string
		exit         int32
	}{
		{"success", "", nil, "", 0},
		{"exit", "result exit=7 /bin/job", nil, tasks.ReasonCommandExit, 7},
		{"exit that counts", "result exit=7 /bin/job", []int32{0, 7}, "", 7},
		{"success that does not count", "", []int32{7}, tasks.ReasonCommandExit, 0},
		{"signal", "result signal=11 /bin/job", []int32{0, 11}, tasks.ReasonCommandSignal, 0},
		{"timeout", "result timeout /bin/job", nil, tasks.ReasonCommandTimeout, 0},
		{"out of memory", "result oom /bin/job", nil, tasks.ReasonCommandOOM, 0},
		{"no program", "remove /bin/job", nil, tasks.ReasonCommandNotStarted, 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, h := node(t, "program /bin/job\n"+tc.script)
			s := step.RunCommand(&taskv1.CommandStep{Argv: []string{"/bin/job"}, SuccessExitCodes: tc.codes})
			out, err := s.Apply(t.Context(), h)
			var reason *tasks.ReasonError
			if errors.As(err, &reason) != (tc.reason != "") || reason != nil && reason.Reason != tc.reason {
				t.Fatalf("Apply = %v, want reason %q", err, tc.reason)
			}
			if tc.reason == tasks.ReasonCommandNotStarted {
				if !reason.Unchanged || reason.Command != nil {
					t.Errorf("reason %+v", reason)
				}
				return
			}
			o, err := s.(tasks.CommandStep).Outcome(out)
			if err != nil || o.GetExitCode() != tc.exit {
				t.Errorf("outcome %v, %v, want exit code %d", o, err, tc.exit)
			}
			if reason != nil && (!proto.Equal(reason.Command, o) || reason.Unchanged) {
				t.Errorf("reason %+v, want outcome %v", reason, o)
			}
			if err := s.Undo(t.Context(), h, nil); !errors.Is(err, tasks.ErrIrreversible) {
				t.Errorf("Undo = %v", err)
			}
		})
	}
}

// TestCommandStopped checks that a stop gives an outcome, and an interruption
// none.
func TestCommandStopped(t *testing.T) {
	n, h := node(t, "program /bin/job\nresult block /bin/job")
	s := step.RunCommand(&taskv1.CommandStep{Argv: []string{"/bin/job"}})
	ctx, cancel := context.WithCancelCause(t.Context())
	timer := time.AfterFunc(10*time.Millisecond, func() { cancel(errors.New("the agent stops")) })
	defer timer.Stop()
	if out, err := s.Apply(ctx, h); err == nil || errors.As(err, new(*tasks.ReasonError)) || out != nil {
		t.Errorf("interrupted: %v, %v", out, err)
	}
	ctx, cancel = context.WithCancelCause(t.Context())
	timer = time.AfterFunc(10*time.Millisecond, func() { cancel(host.ErrStop) })
	defer timer.Stop()
	var reason *tasks.ReasonError
	if _, err := s.Apply(ctx, h); !errors.As(err, &reason) || reason.Reason != tasks.ReasonCommandSignal {
		t.Errorf("stopped: %v", err)
	}
	if n.Started() != 1 {
		t.Errorf("%d processes were started", n.Started())
	}
}

func TestCommandTitleAndLimit(t *testing.T) {
	s := step.RunCommand(&taskv1.CommandStep{Argv: []string{"/bin/job", "a b", "", "x\n\x1b[31m", strings.Repeat("y", 200)}, Timeout: durationpb.New(time.Hour)})
	if got := s.Title(); !strings.HasPrefix(got, `run /bin/job "a b" "" "x\n\x1b[31m" yyy`) || len(got) > 120 {
		t.Errorf("Title = %q", got)
	}
	if l, ok := s.(tasks.Limiter); !ok || l.Timeout() <= time.Hour {
		t.Error("the step's limit leaves the command no time")
	}
	if _, ok := step.RunCommand(&taskv1.CommandStep{Argv: []string{"/bin/job"}}).(tasks.Limiter); ok {
		t.Error("a command without a timeout has a limit")
	}
}

// TestForeignDrain: a drain of a person is lost when the controller forgets the
// node, and only what the controller itself says of a misfit may go.
func TestForeignDrain(t *testing.T) {
	for reason, foreign := range map[string]bool{
		"bad DIMM":                true,
		"":                        true,
		"maintenance in progress": true,
		"mw:drain: new disk":      true,
		"mw:leaves nothing":       true,
		"mw:storage.unmount-0a1b2c3d: a task unmounts /data":         true,
		"mw:leave: leaves the cluster":                               false,
		"mw:leave":                                                   false,
		"gres/gpu count reported lower than configured (4 < 8)":      false,
		"Low RealMemory (reported:900 < 100.00% of configured:1000)": false,
		"Low priority rack":                                          true,
	} {
		n := host.SlurmNode{Name: "n1", Known: true, States: []string{"IDLE", "DRAIN"}, Reason: reason}
		if got := step.ForeignDrain(n, "mw:leave", "mw:reconfigure"); got != foreign {
			t.Errorf("%q: foreign is %v", reason, got)
		}
	}
	if step.ForeignDrain(host.SlurmNode{States: []string{"IDLE"}, Reason: "bad DIMM"}) {
		t.Error("a node that is not drained has a foreign drain")
	}
}
