package step_test

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"strings"
	"testing"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
	"github.com/gpuaas/millwright/tasks/step"
)

// source is what the sources of the tests' node offer.
const source = "offer libmunge2 0.5.15-2\noffer munge 0.5.14-6 libmunge2\noffer munge 0.5.15-2 libmunge2\noffer rival 1 !munge\n"

func hexDigest(content string) []byte {
	sum := sha256.Sum256([]byte(content))
	return sum[:]
}

// plan renders a plan.
func plan(p tasks.Plan) string {
	var lines []string
	for _, s := range p.Steps {
		lines = append(lines, s.Title())
	}
	for _, d := range p.Differences {
		lines = append(lines, fmt.Sprintf("%s: %s, want %s", d.Subject, d.Have, d.Want))
	}
	return strings.Join(lines, "\n")
}

// TestPlanPackages checks what is planned, and what is refused with which words.
func TestPlanPackages(t *testing.T) {
	munge := step.PackageWant{Name: "munge", Version: "0.5.14-6", Hold: true}
	file := step.PackageWant{Name: "tool", File: "/opt/tool.deb", SHA256: hexDigest("DEB tool 2.0 libmunge2")}
	for _, tc := range []struct {
		name, node string
		want       []step.PackageWant
		plan       string
		refused    string // what the error says
	}{
		{"pinned and held", source, []step.PackageWant{munge},
			"install libmunge2 0.5.15-2, munge 0.5.14-6 and hold munge\npackage munge hold: none, want held\n" +
				"package munge: not installed, want 0.5.14-6\npackage libmunge2: not installed, want 0.5.15-2, which munge needs", ""},
		{"newest", source, []step.PackageWant{{Name: "munge"}},
			"install libmunge2 0.5.15-2, munge 0.5.15-2\npackage munge: not installed, want 0.5.15-2\npackage libmunge2: not installed, want 0.5.15-2, which munge needs", ""},
		{"there", source + "package munge 0.5.14-6 held", []step.PackageWant{munge}, "", ""},
		{"there in some version", "package munge 0.1", []step.PackageWant{{Name: "munge"}}, "", ""},
		{"there and not held", source + "package munge 0.5.14-6", []step.PackageWant{munge}, "hold munge\npackage munge hold: none, want held", ""},
		{"from a file", source + "deb /opt/tool.deb tool 2.0 libmunge2", []step.PackageWant{file},
			"install libmunge2 0.5.15-2, tool 2.0\npackage tool: not installed, want 2.0\npackage libmunge2: not installed, want 0.5.15-2, which tool needs", ""},
		{"no such version", source, []step.PackageWant{{Name: "munge", Version: "9"}}, "", "package munge: version 9: no source of the node offers it; they have 0.5.15-2, 0.5.14-6"},
		{"no such package", "", []step.PackageWant{munge}, "", "package munge: no source of the node offers it: add its source and run apt-get update, or name a file"},
		{"a dependency is missing", "offer munge 0.5.14-6 libmunge2", []step.PackageWant{munge}, "", "install munge: package libmunge2 : no source of the node offers it"},
		{"installed in another version", source + "package munge 0.5.15-2 held", []step.PackageWant{munge}, "", "package munge: version 0.5.15-2 is installed, and held; want 0.5.14-6: remove it"},
		{"drives another out", source + "package munge 0.5.15-2", []step.PackageWant{{Name: "rival"}}, "", "install rival: other packages would change: munge 0.5.15-2 would be removed"},
		{"no dpkg", "nodpkg", []step.PackageWant{munge}, "", "install munge: look for the node's packages: the node has neither dpkg and apt nor rpm and dnf"},
		{"dnf", "dnf\n" + source, []step.PackageWant{munge},
			"install libmunge2 0.5.15-2, munge 0.5.14-6 and hold munge\npackage munge hold: none, want held\n" +
				"package munge: not installed, want 0.5.14-6\npackage libmunge2: not installed, want 0.5.15-2, which munge needs", ""},
		{"dnf without the plugin that holds", "dnf\nnoversionlock\n" + source, []step.PackageWant{munge}, "",
			"package munge: the package python3-dnf-plugin-versionlock is missing, without which no version is held: install it, or set no_hold"},
		{"dnf without a list", "dnf", []step.PackageWant{munge}, "", "package munge: no source of the node offers it: add its source and run dnf makecache, or name a file"},
		{"there twice", "dnf\npackage munge \"1 and 2\" installed-twice", []step.PackageWant{{Name: "munge"}}, "", "package munge: it is installed in the versions 1 and 2, which an interrupted transaction has left"},
		{"no file", source, []step.PackageWant{file}, "", "package tool: read /opt/tool.deb: file does not exist"},
		{"a file with another digest", source + "deb /opt/tool.deb tool 2.1", []step.PackageWant{file}, "", "package tool: /opt/tool.deb has the SHA-256 "},
		{"no package", "file /opt/tool.deb 0644 x", []step.PackageWant{file}, "", "package tool: package file /opt/tool.deb: no package"},
		{"another package", source + "deb /opt/tool.deb tool 2.0 libmunge2",
			[]step.PackageWant{{Name: "munge", File: file.File, SHA256: file.SHA256}}, "", "package munge: /opt/tool.deb holds tool 2.0; want munge"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			n, h := node(t, tc.node)
			was := n.Dump()
			p, err := step.PlanPackages(t.Context(), h, tc.want)
			if again, err2 := step.PlanPackages(t.Context(), h, tc.want); fmt.Sprint(err) != fmt.Sprint(err2) || plan(p) != plan(again) {
				t.Errorf("planned again: %s, %v", plan(again), err2)
			}
			if got := n.Dump(); got != was {
				t.Errorf("planning changed the node:\n%s", got)
			}
			if tc.refused != "" {
				if !errors.Is(err, tasks.ErrPrecondition) || !strings.Contains(err.Error(), tc.refused) {
					t.Fatalf("error %v, want %s", err, tc.refused)
				}
				return
			}
			if err != nil || plan(p) != tc.plan {
				t.Fatalf("plan\n%s\n%v, want\n%s", plan(p), err, tc.plan)
			}
			for _, s := range p.Steps {
				if _, err := s.Apply(t.Context(), h); err != nil {
					t.Fatal(err)
				}
				if err := s.Verify(t.Context(), h); err != nil {
					t.Error(err)
				}
			}
			if p, err := step.PlanPackages(t.Context(), h, tc.want); err != nil || len(p.Steps) > 0 {
				t.Errorf("planned afterwards: %s, %v", plan(p), err)
			}
		})
	}
}

func pins(words ...string) []*taskv1.PackagePin {
	var out []*taskv1.PackagePin
	for _, w := range words {
		name, version, _ := strings.Cut(w, "=")
		out = append(out, &taskv1.PackagePin{Name: name, Version: version, Architecture: "amd64"})
	}
	return out
}

// TestPackagesThereAndBack applies each step twice, and undoes it twice: the
// node is as it was, also where a package had been there before.
func TestPackagesThereAndBack(t *testing.T) {
	install := step.InstallPackages(&taskv1.PackageInstallStep{Packages: pins("libmunge2=0.5.15-2", "munge=0.5.14-6"), Hold: []string{"munge"}})
	hold := step.InstallPackages(&taskv1.PackageInstallStep{Hold: []string{"site"}})
	remove := step.RemovePackages(&taskv1.PackageRemoveStep{Packages: pins("libmunge2=0.5.15-2", "munge=0.5.14-6"), Purge: true})
	keep := step.RemovePackages(&taskv1.PackageRemoveStep{Packages: pins("munge=0.5.14-6")})
	for _, tc := range []struct {
		name, before string
		step         tasks.Step
		after        string
	}{
		{"install", "", install, "package libmunge2 0.5.15-2 installed\npackage munge 0.5.14-6 installed held\n"},
		{"install beside", "package libmunge2 0.5.15-2 held", install, "package libmunge2 0.5.15-2 installed held\npackage munge 0.5.14-6 installed held\n"},
		{"install over the rest", "package munge 0.1 config-files", install, "package libmunge2 0.5.15-2 installed\npackage munge 0.5.14-6 installed held\n"},
		{"install over a part of the rest", "package libmunge2 0.5.15-2 config-files", install, "package libmunge2 0.5.15-2 installed\npackage munge 0.5.14-6 installed held\n"},
		{"hold", "package site 1", hold, "package site 1 installed held\n"},
		{"hold what is held", "package site 1 held", hold, "package site 1 installed held\n"},
		{"remove", "package libmunge2 0.5.15-2\npackage munge 0.5.14-6 held libmunge2", remove, ""},
		{"remove nothing", "", remove, ""},
		{"remove and keep the configuration", "package libmunge2 0.5.15-2\npackage munge 0.5.14-6 held", keep,
			"package libmunge2 0.5.15-2 installed\npackage munge 0.5.14-6 config-files\n"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			n, h := node(t, source+tc.before)
			was := n.Dump()
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
			if got := n.Dump(); got != tc.after {
				t.Errorf("the node has\n%swant\n%s", got, tc.after)
			}
			for range 2 {
				if err := tc.step.Undo(t.Context(), h, before); err != nil {
					t.Fatal(err)
				}
			}
			if got := n.Dump(); strings.ReplaceAll(got, "0.5.14-6 config", "0.1 config") != was {
				t.Errorf("after the undo the node has\n%swant\n%s", got, was)
			}
		})
	}
}

// TestVerifyPackages checks that a package that went, changed or lost its hold
// is found out.
func TestVerifyPackages(t *testing.T) {
	s := step.InstallPackages(&taskv1.PackageInstallStep{Packages: pins("munge=0.5.14-6"), Hold: []string{"munge"}})
	for script, want := range map[string]string{
		"":                                    "package munge is not installed, want 0.5.14-6",
		"package munge 0.5.15-2 held":         "package munge is installed in version 0.5.15-2, want 0.5.14-6",
		"package munge 0.5.14-6":              "package munge is not held",
		"package munge 0.5.14-6 config-files": "package munge is removed, with configuration files left",
	} {
		_, h := node(t, script)
		if err := s.Verify(t.Context(), h); !errors.Is(err, tasks.ErrNotSatisfied) || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %s", script, err, want)
		}
	}
}

// TestPackagesRefuse checks the reasons, and that nothing was changed.
func TestPackagesRefuse(t *testing.T) {
	for _, tc := range []struct {
		name, node string
		step       tasks.Step
		reason     string
		is         error
	}{
		{"locked", source + "dpkglock", step.InstallPackages(&taskv1.PackageInstallStep{Packages: pins("libmunge2=0.5.15-2")}), tasks.ReasonPackagesLocked, host.ErrPackagesLocked},
		{"more than planned", source, step.InstallPackages(&taskv1.PackageInstallStep{Packages: pins("munge=0.5.15-2")}), tasks.ReasonOtherPackages, host.ErrOtherPackages},
		{"another needs it", "package libmunge2 1\npackage site 1 libmunge2", step.RemovePackages(&taskv1.PackageRemoveStep{Packages: pins("libmunge2=1")}), tasks.ReasonOtherPackages, host.ErrOtherPackages},
	} {
		n, h := node(t, tc.node)
		was := n.Dump()
		_, err := tc.step.Apply(t.Context(), h)
		var why *tasks.ReasonError
		if !errors.As(err, &why) || why.Reason != tc.reason || !errors.Is(err, tc.is) {
			t.Errorf("%s: %v", tc.name, err)
		}
		if got := n.Dump(); got != was {
			t.Errorf("%s changed the node:\n%s", tc.name, got)
		}
	}
}

// TestRemovedForGood checks what is said when a removed package cannot come back.
func TestRemovedForGood(t *testing.T) {
	s := step.RemovePackages(&taskv1.PackageRemoveStep{Packages: pins("old=1")})
	_, h := node(t, "package old 1")
	before, err := s.Observe(t.Context(), h)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Apply(t.Context(), h); err != nil {
		t.Fatal(err)
	}
	if err := s.Undo(t.Context(), h, before); !errors.Is(err, tasks.ErrIrreversible) || !errors.Is(err, host.ErrNoPackage) {
		t.Errorf("undo: %v", err)
	}
}
