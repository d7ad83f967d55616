package gpu_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
	migv1 "github.com/gpuaas/millwright/proto/millwright/mig/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/all"
	"github.com/gpuaas/millwright/tasks/gpu"
	"github.com/gpuaas/millwright/tasks/tasktest"
	"github.com/gpuaas/millwright/tasks/tasktest/fakehost"
)

var some = &migv1.GpuSelector{Uuids: []string{"GPU-a"}}

func TestValidate(t *testing.T) {
	for _, tc := range []struct {
		name string
		err  error
		want string // part of what is said; empty: nothing is wrong
	}{
		{"a reset", gpu.Reset{}.Validate(&gpuv1.ResetSpec{Select: some}), ""},
		{"a reset of nothing", gpu.Reset{}.Validate(&gpuv1.ResetSpec{}), "select.all: say which GPUs"},
		{"a reset in no time", gpu.Reset{}.Validate(&gpuv1.ResetSpec{Select: some, Timeout: durationpb.New(time.Second)}), "timeout: \"1.000000000s\": must be from 5s to 15m0s"},
		{"a reset that waits for ever", gpu.Reset{}.Validate(&gpuv1.ResetSpec{Select: some, WaitForJobs: durationpb.New(-1)}), "wait_for_jobs"},
		{"a reset of a wrong UUID", gpu.Reset{}.Validate(&gpuv1.ResetSpec{Select: &migv1.GpuSelector{Uuids: []string{"0"}}}), "select.uuids[0]: \"0\""},
		{"a diagnosis", gpu.Diagnose{}.Validate(&gpuv1.DiagnoseSpec{}), ""},
		{"one of some, by DCGM", gpu.Diagnose{}.Validate(&gpuv1.DiagnoseSpec{Select: some, DcgmLevel: 3, DcgmTimeout: durationpb.New(time.Hour)}), ""},
		{"one of level 4", gpu.Diagnose{}.Validate(&gpuv1.DiagnoseSpec{DcgmLevel: 4}), "dcgm_level: \"4\": must be 1 to 3"},
		{"a time without a level", gpu.Diagnose{}.Validate(&gpuv1.DiagnoseSpec{DcgmTimeout: durationpb.New(time.Hour)}), "dcgm_timeout: is of a diagnosis by DCGM"},
		{"a time that is too long", gpu.Diagnose{}.Validate(&gpuv1.DiagnoseSpec{DcgmLevel: 1, DcgmTimeout: durationpb.New(time.Hour * 24)}), "dcgm_timeout: \"86400.000000000s\""},
		{"one of an empty selector", gpu.Diagnose{}.Validate(&gpuv1.DiagnoseSpec{Select: &migv1.GpuSelector{}}), "select.all"},
	} {
		switch {
		case tc.want == "" && tc.err != nil:
			t.Errorf("%s: %v", tc.name, tc.err)
		case tc.want != "" && (tc.err == nil || !strings.Contains(tc.err.Error(), tc.want)):
			t.Errorf("%s: %v, want %q in it", tc.name, tc.err, tc.want)
		}
	}
}

func FuzzReset(f *testing.F) {
	tasktest.FuzzValidate(f, all.Registry(), "gpu.reset", &gpuv1.ResetSpec{Select: some, When: gpuv1.ResetWhen_RESET_WHEN_FORCE})
}

func FuzzDiagnose(f *testing.F) {
	tasktest.FuzzValidate(f, all.Registry(), "gpu.diagnose", &gpuv1.DiagnoseSpec{Select: &migv1.GpuSelector{All: true}, DcgmLevel: 2})
}

const (
	pass    = gpuv1.Verdict_VERDICT_PASS
	skipped = gpuv1.Verdict_VERDICT_SKIPPED
	warn    = gpuv1.Verdict_VERDICT_WARN
	unasked = gpuv1.Verdict_VERDICT_ERROR
	fail    = gpuv1.Verdict_VERDICT_FAIL
)

// run carries out a task on a node in memory, and returns its typed result.
func run(t *testing.T, node string, kind string, spec tasks.Task[*gpuv1.DiagnoseSpec], s *gpuv1.DiagnoseSpec) *gpuv1.DiagnoseResult {
	t.Helper()
	n := fakehost.New()
	if err := n.Do(node); err != nil {
		t.Fatal(err)
	}
	reg, hosts := all.Registry(), n.Hosts(nil)
	k, err := reg.Kind(kind)
	if err != nil {
		t.Fatal(err)
	}
	plan, err := reg.Plan(t.Context(), hosts.Prober(), k, s)
	if err != nil {
		t.Fatal(err)
	}
	var outs [][]byte
	for i, sealed := range plan.GetSteps() {
		step, err := reg.Open(sealed)
		if err != nil {
			t.Fatal(err)
		}
		out, err := step.Apply(t.Context(), hosts.ForStep("t", uint32(i)))
		if err != nil {
			t.Fatal(err)
		}
		outs = append(outs, out)
	}
	r, err := spec.Result(t.Context(), hosts.Prober(), s, tasks.OwnOuts(plan, outs))
	if err != nil {
		t.Fatal(err)
	}
	return r.(*gpuv1.DiagnoseResult)
}

const two = `
gpu add H100 GPU-a
gpu add H100 GPU-b
gpu persistence GPU-a on
gpu persistence GPU-b on
program /usr/bin/dcgmi
`

// says has dcgmi of level 1 say something.
func says(words string) string {
	return "says " + strings.ReplaceAll(quoted, "WORDS", strings.ReplaceAll(words, `"`, `\"`)) + " /usr/bin/dcgmi diag -r 1 -j -i 0,1\n"
}

const quoted = `"WORDS"`

func results(list ...string) string {
	return says(`{"DCGM Diagnostic":{"test_categories":[{"tests":[{"name":"memory","results":[` + strings.Join(list, ",") + `]}]}]},"metadata":{"version":"4.2.3"}}`)
}

func one(gpu, status string) string {
	return `{"entity_group":"GPU","entity_id":` + gpu + `,"status":"` + status + `"}`
}

// TestDiagnosis: each way in which a check can end is told as what it is, of the
// GPU that it is about, and nothing that is not known passes.
func TestDiagnosis(t *testing.T) {
	dcgm := &gpuv1.DiagnoseSpec{DcgmLevel: 1}
	for _, tc := range []struct {
		name, node string
		spec       *gpuv1.DiagnoseSpec
		gpu        int // -1: the node
		check      string
		want       gpuv1.Verdict
		reason     string
		of         []gpuv1.Verdict // of all, and of each GPU
	}{
		{"all is well", "", nil, 0, "gpu.answers", pass, "", []gpuv1.Verdict{pass, pass, pass}},
		{"no XID", "", nil, 1, "gpu.xid", pass, "", nil},
		{"an XID", "gpu health GPU-b gpu.xid.79 raised fatal XID_79 fallen", nil, 1, "gpu.xid.79", fail, "XID_79", []gpuv1.Verdict{fail, pass, fail}},
		{"an XID that is over", "gpu health GPU-b gpu.xid.79 ok fatal REBOOTED over", nil, 1, "gpu.xid", pass, "", []gpuv1.Verdict{pass, pass, pass}},
		{"no kernel log", "gpu health node node.kernel_log raised warning UNREADABLE denied", nil, 0, "gpu.xid", unasked, "NO_KERNEL_LOG", []gpuv1.Verdict{unasked, unasked, unasked}},
		{"a narrow link", "gpu health GPU-a gpu.pcie_width raised degraded BELOW_MAXIMUM narrow", nil, 0, "gpu.pcie_width", warn, "BELOW_MAXIMUM", []gpuv1.Verdict{warn, warn, pass}},
		{"a note", "gpu health GPU-a gpu.ecc_uncorrected_aggregate raised info ABOVE_THRESHOLD once", nil, 0, "gpu.ecc_uncorrected_aggregate", pass, "", nil},
		{"not there", "gpu health GPU-a gpu.fabric unknown fatal NOT_SUPPORTED none", nil, 0, "gpu.fabric", skipped, "NOT_SUPPORTED", []gpuv1.Verdict{pass, pass, pass}},
		{"not told", "gpu health GPU-a gpu.temperature unknown degraded NO_PERMISSION denied", nil, 0, "gpu.temperature", unasked, "NO_PERMISSION", []gpuv1.Verdict{unasked, unasked, pass}},
		{"stale", "gpu health GPU-a gpu.temperature stale degraded UNRESPONSIVE hangs", nil, 0, "gpu.temperature", unasked, "STALE", nil},
		{"the node's own", "gpu health node node.gpu_count raised fatal FEWER gone", nil, -1, "node.gpu_count", fail, "FEWER", []gpuv1.Verdict{fail, pass, pass}},
		{"nobody looks", "gpu blind", nil, -1, "node.health", unasked, "NOT_LOOKED_AFTER", []gpuv1.Verdict{unasked, pass, pass}},
		{"persistence off", "gpu persistence GPU-b off", nil, 1, "gpu.persistence", warn, "OFF", nil},
		{"quarantine", "file /run/millwright-quarantine-GPU-a 0644 why", nil, 0, "gpu.mig_layout", fail, "QUARANTINE", nil},
		{"not as wanted", "file /etc/millwright/mig/GPU-a 0644 mig:1\ngpu intent mig:1 \"GPU-a has MIG off\"", nil, 0, "gpu.mig_layout", fail, "NOT_AS_WANTED", nil},
		{"as wanted", "file /etc/millwright/mig/GPU-a 0644 mig:1\ngpu intent mig:1 \"\"", nil, 0, "gpu.mig_layout", pass, "", nil},
		{"another is not as wanted", "file /etc/millwright/mig/GPU-a 0644 mig:1\ngpu intent mig:1 \"GPU-b has MIG off\"", nil, 0, "gpu.mig_layout", unasked, "NOT_VERIFIED", nil},
		{"half an instance", "gpu mig GPU-a on\ngpu instance GPU-a 9 0 none", nil, 0, "gpu.mig_layout", warn, "HALF_MADE", nil},
		{"lost", "gpu lose GPU-b", nil, 1, "gpu.answers", fail, "NO_ANSWER", []gpuv1.Verdict{fail, pass, fail}},
		{"hangs", "gpu deaf GPU-b", nil, 1, "gpu.answers", fail, "NO_ANSWER", []gpuv1.Verdict{fail, pass, fail}},
		{"no driver", "gpu unload", nil, -1, "node.driver", fail, "DRIVER", []gpuv1.Verdict{fail}},
		{"the driver asks", "gpu recovery GPU-a gpu_reset", nil, 0, "gpu.recovery_action", fail, "DRIVER_VERDICT", nil},

		{"DCGM passes", results(one("0", "Pass"), one("1", "Pass")), dcgm, 1, "memory", pass, "", []gpuv1.Verdict{pass, pass, pass}},
		{"DCGM fails one", results(one("0", "Pass"), one("1", "Fail")), dcgm, 1, "memory", fail, "FAIL", []gpuv1.Verdict{fail, pass, fail}},
		{"DCGM skips", results(one("0", "Skip"), one("1", "Skip")), dcgm, 0, "memory", skipped, "SKIPPED", []gpuv1.Verdict{pass, pass, pass}},
		{"DCGM could not", results(one("0", "Pass"), one("1", "Not Run")), dcgm, 1, "memory", unasked, "NOT_RUN", nil},
		{"DCGM leaves one out", results(one("0", "Pass")), dcgm, 1, "dcgm", unasked, "NOT_TESTED", nil},
		{"DCGM tells of another", results(one("0", "Pass"), one("1", "Pass"), one("5", "Pass")), dcgm, -1, "memory", unasked, "OTHER_GPU", nil},
		{"DCGM says nonsense", says("out of order"), dcgm, -1, "dcgm", unasked, "MALFORMED", nil},
		{"DCGM says nothing", "result exit=1 /usr/bin/dcgmi diag -r 1 -j -i 0,1", dcgm, -1, "dcgm", unasked, "MALFORMED", nil},
		{"DCGM passes and fails", results(one("0", "Pass"), one("1", "Pass")) + "result exit=1 /usr/bin/dcgmi diag -r 1 -j -i 0,1", dcgm, -1, "dcgm", unasked, "EXIT_CODE", nil},
		{"DCGM hangs", "result timeout /usr/bin/dcgmi diag -r 1 -j -i 0,1", dcgm, -1, "dcgm", unasked, "TIMED_OUT", []gpuv1.Verdict{unasked, pass, pass}},
		{"DCGM is killed", "result signal=9 /usr/bin/dcgmi diag -r 1 -j -i 0,1", dcgm, -1, "dcgm", unasked, "KILLED", nil},
		{"no DCGM", "remove /usr/bin/dcgmi", dcgm, -1, "dcgm", skipped, "NOT_INSTALLED", []gpuv1.Verdict{pass, pass, pass}},
		{"no GPU for DCGM", "gpu lose GPU-a\ngpu lose GPU-b", dcgm, -1, "dcgm", skipped, "NO_GPU", nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if tc.spec == nil {
				tc.spec = &gpuv1.DiagnoseSpec{}
			}
			r := run(t, two+tc.node, "gpu.diagnose", gpu.Diagnose{}, tc.spec)
			list := r.GetNode()
			if tc.gpu >= 0 {
				list = r.GetGpus()[tc.gpu].GetChecks()
			}
			i := slices.IndexFunc(list, func(c *gpuv1.GpuCheck) bool { return c.GetName() == tc.check && c.GetVerdict() == tc.want })
			if i < 0 || list[i].GetReason() != tc.reason || tc.want != pass && list[i].GetMessage() == "" && tc.check != "memory" {
				t.Errorf("want %s %v %s in %v", tc.check, tc.want, tc.reason, list)
			}
			got := []gpuv1.Verdict{r.GetVerdict()}
			for _, g := range r.GetGpus() {
				got = append(got, g.GetVerdict())
			}
			if tc.of != nil && !slices.Equal(got, tc.of) {
				t.Errorf("verdicts %v, want %v", got, tc.of)
			}
		})
	}
}
