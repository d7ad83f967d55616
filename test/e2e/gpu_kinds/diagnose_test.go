package gpukinds

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
	"github.com/gpuaas/millwright/test/cluster/clustertest"
)

// The verdicts under short names.
const (
	pass    = gpuv1.Verdict_VERDICT_PASS
	skipped = gpuv1.Verdict_VERDICT_SKIPPED
	unasked = gpuv1.Verdict_VERDICT_ERROR
	fail    = gpuv1.Verdict_VERDICT_FAIL
)

// diagnoses tells of a node with eight GPUs that is looked at.
func diagnoses(n *node) {
	n.own()
	n.dcgm()
	n.dcgmHangs()
	n.lost()
	n.deaf()
}

func (n *node) diagnose(spec string) *gpuv1.DiagnoseResult {
	n.t.Helper()
	task := n.Do("gpu.diagnose", n.name, spec)
	if task.GetState() != succeeded {
		n.t.Fatalf("gpu.diagnose: %s", told(task))
	}
	return result[*gpuv1.DiagnoseResult](n.t, task)
}

// check asks what came of a check.
func (n *node) check(list []*gpuv1.GpuCheck, name string, want gpuv1.Verdict, words string) {
	n.t.Helper()
	i := slices.IndexFunc(list, func(c *gpuv1.GpuCheck) bool { return c.GetName() == name })
	if i < 0 || list[i].GetVerdict() != want || !strings.Contains(list[i].GetReason()+" "+list[i].GetMessage(), words) {
		n.t.Errorf("%s is not %v with %q in %v", name, want, words, list)
	}
}

// own: all is well; then a GPU has a narrow link, and one an XID.
func (n *node) own() {
	r := n.diagnose("dcgm_level: 1\n")
	if len(r.GetGpus()) != 8 || r.GetVerdict() != pass {
		n.t.Errorf("all is well, and it is %v", r)
	}
	n.check(r.GetNode(), "dcgm", skipped, "NOT_INSTALLED")
	n.sick(2, "pcie_width=8")
	n.sh(`echo "4,1,$(awk '{printf "%d", $1*1000000}' /proc/uptime),-;NVRM: Xid (PCI:` + n.place(5) + `): 79, pid=1, words" >> ` + kmsg)
	n.await("the line is read", func() bool {
		r = n.diagnose("{}")
		return r.GetGpus()[5].GetVerdict() == fail
	})
	n.check(r.GetGpus()[2].GetChecks(), "gpu.pcie_width", gpuv1.Verdict_VERDICT_WARN, "8")
	n.check(r.GetGpus()[5].GetChecks(), "gpu.xid.79", fail, "79")
	n.check(r.GetGpus()[4].GetChecks(), "gpu.xid", pass, "")
	if r.GetVerdict() != fail || r.GetGpus()[4].GetVerdict() != pass || r.GetGpus()[2].GetVerdict() != gpuv1.Verdict_VERDICT_WARN {
		n.t.Errorf("the verdicts are %v", r)
	}
	n.sick(2, "pcie_width=16")
	out, err := n.Millctl(n.t.Context(), "task", "list", "--kind", "gpu.diagnose", "-o", "name")
	if err != nil {
		n.t.Fatal(err)
	}
	id, _, _ := strings.Cut(out.Stdout, "\n")
	shown, err := n.Millctl(n.t.Context(), "task", "get", id)
	if err != nil || !strings.Contains(shown.Stdout, "verdict: fail") || !strings.Contains(shown.Stdout, "gpu.xid.79") {
		n.t.Errorf("millctl task get shows %s (%v)", shown.Stdout, err)
	}
}

// place is a GPU's as the kernel's log has it.
func (n *node) place(i int) string {
	n.t.Helper()
	b := strings.ToLower(n.gpus()[i].Bus)
	return strings.TrimSuffix(b[4:], ".0")
}

// answer has the stand-in for dcgmi say something.
func (n *node) answer(file string, exit int) {
	n.t.Helper()
	n.put(filepath.Join(clustertest.Root(n.t), "test/fakedcgmi/answers", file), "/run/fakedcgmi/ANSWER")
	n.sh(fmt.Sprintf("echo %d > /run/fakedcgmi/EXIT", exit))
}

// dcgm: what DCGM says of each GPU, kept apart.
func (n *node) dcgm() {
	n.put(filepath.Join(clustertest.Root(n.t), "test/fakedcgmi/dcgmi"), "/usr/local/bin/dcgmi")
	n.sh("mkdir -p /run/fakedcgmi")
	const two = "select: {indices: [0, 1]}\ndcgm_level: 2\nwait_for_jobs: 5s\n"
	n.answer("pass.json", 0)
	if r := n.diagnose(two); r.GetVerdict() != pass || r.GetDcgmVersion() != "4.2.3" || len(r.GetGpus()) != 2 {
		n.t.Errorf("DCGM says pass: %v", r)
	}
	if got := n.sh("tail -1 /run/fakedcgmi/CALLS"); got != "diag -r 2 -j -i 0,1" {
		n.t.Errorf("dcgmi was called with %q", got)
	}
	n.answer("fail.json", 226)
	r := n.diagnose(two)
	n.check(r.GetGpus()[1].GetChecks(), "memory", fail, "said the stand-in")
	n.check(r.GetGpus()[0].GetChecks(), "pcie", skipped, "")
	if r.GetGpus()[0].GetVerdict() != pass || r.GetVerdict() != fail {
		n.t.Errorf("the verdicts are %v", r)
	}
	n.answer("one_gpu.json", 0)
	n.check(n.diagnose(two).GetGpus()[1].GetChecks(), "dcgm", unasked, "NOT_TESTED")
	n.answer("torn.json", 0)
	n.check(n.diagnose(two).GetNode(), "dcgm", unasked, "MALFORMED")
	n.sh("rm /run/fakedcgmi/ANSWER; echo 1 > /run/fakedcgmi/EXIT")
	n.check(n.diagnose(two).GetNode(), "dcgm", unasked, "unable to establish a connection")
}

// dcgmHangs: dcgmi does not end, and not on SIGTERM either. It is killed, and told.
func (n *node) dcgmHangs() {
	n.sh("echo hang > /run/fakedcgmi/ANSWER")
	r := n.diagnose("dcgm_level: 1\ndcgm_timeout: 5s\n")
	n.check(r.GetNode(), "dcgm", unasked, "TIMED_OUT")
	if got := n.sh("pgrep -f /usr/local/bin/[d]cgmi || true"); got != "" {
		n.t.Errorf("dcgmi still runs: %s", got)
	}
	n.answer("pass.json", 0)
}

// lost: one GPU is lost; it is told, and the others are looked at.
func (n *node) lost() {
	n.sick(6, "lost=1")
	r := n.diagnose("{}")
	n.check(r.GetGpus()[6].GetChecks(), "gpu.answers", fail, "")
	if r.GetGpus()[7].GetVerdict() != pass {
		n.t.Errorf("another GPU is %v", r.GetGpus()[7])
	}
	n.sick(6, "lost=0")
}

// deaf: the driver hangs. That is found out, and nothing is told as well.
func (n *node) deaf() {
	n.sh("echo 'call=nvmlDeviceGetMigMode sleep=inf' > " + faults)
	r := n.diagnose("select: {indices: [1]}\n")
	if r.GetVerdict() != fail {
		n.t.Errorf("the driver hangs, and all is %v", r)
	}
	n.check(r.GetGpus()[0].GetChecks(), "gpu.answers", fail, "")
	n.sh("rm -f " + faults)
}
