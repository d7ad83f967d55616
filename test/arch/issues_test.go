package arch_test

import (
	"go/ast"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// issuesOfGPUs are all that the research names for MIG and what is near it (GPU
// side, 2.4).
const issuesOfGPUs = `mig-parted#181 gpu-operator#118 NVSentinel#1690 mig-parted#357 gpu-operator#2376 DCGM#276 DCGM#95 dcgm-exporter#706
dcgm-exporter#215 device-plugin#466 gpu-operator#1606 mig-parted#9 dra#883 dra#1006 dra#1018 gpu-operator#668 device-plugin#225
device-plugin#343 gpu-operator#2600 gpu-operator#403 gpu-admin-tools#2 mig-parted#29 gpu-operator#622 mig-parted#157 mig-parted#227
gpu-operator#351 mig-parted#97 gpu-operator#603 dra#35 k8s-test-infra#886 dra#1452 go-nvml#146 gpu-operator#1309 gpu-operator#1738
mig-parted#68 mig-parted#8 mig-parted#103 mig-parted#408 mig-parted#432 mig-parted#11 mig-parted#19 mig-parted#368
container-toolkit#1828 container-toolkit#1239 gpu-monitoring-tools#142 dcgm-exporter#443 dcgm-exporter#747 gpu-operator#2482
magic_castle#361 deepops#1214 SlinkyProject/containers#14 device-plugin#1929 device-plugin#189 device-plugin#234 HAMi#2321 DCGM#263
NVSentinel#1748 NVSentinel#155 NVSentinel#684 NVSentinel#1710 NVSentinel#1357 gpud#1227 gpud#604 go-nvml#41 go-nvml#82 go-nvml#152
open-gpu-kernel-modules#1333 dcgm-exporter#95 dcgm-exporter#599 nvidia-container-toolkit#48 nvidia-container-toolkit#251
nvidia-container-toolkit#1227`

var (
	shownByCase   = regexp.MustCompile("`([a-z0-9_]+)`")
	shownByDirect = regexp.MustCompile("`([a-z_/0-9]+) (Test[A-Za-z0-9]+)`")
)

// TestIssuesOfGPUs asks that each issue has a line in the README of tasks/mig, and
// that each line names tests that there are, or says why there is none.
func TestIssuesOfGPUs(t *testing.T) {
	readme, err := os.ReadFile(filepath.Join(root(), "tasks/mig/README.md"))
	if err != nil {
		t.Fatal(err)
	}
	known := map[string]bool{}
	for _, f := range sources(t) {
		for _, d := range f.ast.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok && f.test && fn.Recv == nil {
				known[filepath.Dir(f.path)+" "+fn.Name.Name] = true
			}
		}
	}
	_, table, _ := strings.Cut(string(readme), "| issue | here |")
	table, _, _ = strings.Cut(table, "\n\n")
	named := map[string]bool{}
	for _, line := range strings.Split(table, "\n")[2:] {
		cells := strings.Split(line, "|")
		if len(cells) != 4 {
			t.Errorf("not two cells: %s", line)
			continue
		}
		issues, _, _ := strings.Cut(cells[1], ": ")
		for _, issue := range strings.Split(issues, ", ") {
			named[strings.TrimSpace(issue)] = true
		}
		here := strings.TrimSpace(cells[2])
		tests, cases := shownByDirect.FindAllStringSubmatch(here, -1), shownByCase.FindAllStringSubmatch(here, -1)
		if len(tests)+len(cases) == 0 && !strings.HasPrefix(here, "cannot be: ") && !strings.HasPrefix(here, "open: ") {
			t.Errorf("no test, and no reason: %s", line)
		}
		for _, m := range tests {
			if !known[m[1]+" "+m[2]] {
				t.Errorf("there is no %s in %s: %s", m[2], m[1], line)
			}
		}
		for _, m := range cases {
			if _, err := os.Stat(filepath.Join(root(), "tasks/mig/testdata", m[1]+".txtar")); err != nil {
				t.Errorf("there is no case %s: %s", m[1], line)
			}
		}
	}
	for _, issue := range strings.Fields(issuesOfGPUs) {
		if !named[issue] {
			t.Errorf("%s has no line", issue)
		}
		delete(named, issue)
	}
	for issue := range named {
		t.Errorf("%q is no issue of the list", issue)
	}
}
