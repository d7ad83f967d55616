package dcgm_test

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuaas/millwright/tasks/gpu/dcgm"
)

// four is an answer of DCGM 4 with one result.
func four(result string) string {
	return `{"DCGM Diagnostic":{"test_categories":[{"category":"Hardware","tests":[{"name":"memory","results":[` + result + `]}]}]},"metadata":{"version":"4.2.3"}}`
}

func TestParse(t *testing.T) {
	for _, tc := range []struct {
		name, in string
		want     dcgm.Report
	}{
		{"a pass of DCGM 4", four(`{"entity_group":"GPU","entity_group_id":1,"entity_id":2,"status":"Pass","info":["Allocated 90%"]}`),
			dcgm.Report{Version: "4.2.3", Tests: []dcgm.Test{{Name: "memory", GPU: 2, Status: dcgm.Pass, Message: "Allocated 90%"}}}},
		{"a fail with warnings", four(`{"entity_group":"GPU","entity_id":0,"status":"Fail","warnings":[{"error_category":1,"error_id":2,"warning":"bad row"},{"warning":"and another"}]}`),
			dcgm.Report{Version: "4.2.3", Tests: []dcgm.Test{{Name: "memory", Status: dcgm.Fail, Message: "bad row; and another"}}}},
		{"skipped, and not run", four(`{"entity_group":"GPU","entity_id":0,"status":"Skip"},{"entity_group":"GPU","entity_id":1,"status":"Not Run"}`),
			dcgm.Report{Version: "4.2.3", Tests: []dcgm.Test{{Name: "memory", Status: dcgm.Skip}, {Name: "memory", GPU: 1, Status: dcgm.Error}}}},
		{"one of a CPU", four(`{"entity_group":"CPU","entity_id":0,"status":"Pass"}`),
			dcgm.Report{Version: "4.2.3", Tests: []dcgm.Test{{Name: "memory", GPU: -1, Status: dcgm.Pass}}}},
		{"DCGM 3, all in one, after a line of warning", "WARNING: x\n" +
			`{"DCGM GPU Diagnostic":{"version":"3.1.7","test_categories":[{"tests":[null,{"name":"Denylist","results":[{"gpu_ids":"0,1","status":"PASS"}]},{"name":"PCIe","results":[{"gpu_id":"1","status":"WARN","warnings":"slow"}]}]}]}}`,
			dcgm.Report{Version: "3.1.7", Tests: []dcgm.Test{
				{Name: "Denylist", Status: dcgm.Pass}, {Name: "Denylist", GPU: 1, Status: dcgm.Pass}, {Name: "PCIe", GPU: 1, Status: dcgm.Warn, Message: "slow"},
			}}},
		{"a summary that is worse than its results", `{"DCGM Diagnostic":{"test_categories":[{"tests":[{"name":"software","results":[{"entity_group":"GPU","entity_id":0,"status":"Pass"}],"test_summary":{"status":"Fail"}}]}]}}`,
			dcgm.Report{Tests: []dcgm.Test{{Name: "software", Status: dcgm.Pass}, {Name: "software", GPU: -1, Status: dcgm.Fail}}}},
		{"it could not run at all", `{"DCGM Diagnostic":{"runtime_error":"no GPU is supported"}}`,
			dcgm.Report{Tests: []dcgm.Test{{Name: "runtime", GPU: -1, Status: dcgm.Error, Message: "no GPU is supported"}}}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := dcgm.Parse([]byte(tc.in))
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(tc.want, got); d != "" {
				t.Error(d)
			}
		})
	}
}

// TestMalformed: nothing that is not understood is taken for an answer.
func TestMalformed(t *testing.T) {
	good := four(`{"entity_group":"GPU","entity_id":0,"status":"Pass"}`)
	for _, in := range []string{
		"", "no JSON", "{", "[]", "{}", "null", good[:len(good)-1], good + "{}", good + "x",
		`{"DCGM Diagnostic":null}`, `{"DCGM Diagnostic":{}}`, `{"DCGM Diagnostic":{"test_categories":[{"tests":[]}]}}`,
		`{"DCGM Diagnostic":{"test_categories":[{"tests":[{"name":"memory","results":[]}]}]}}`,
		`{"DCGM Diagnostic":{"test_categories":[{"tests":[{"results":[{"status":"Pass"}]}]}]}}`,
		strings.Replace(good, "Pass", "Passed mostly", 1), strings.Replace(good, `"Pass"`, "1", 1), strings.Replace(good, `"status":"Pass"`, `"x":1`, 1),
		strings.Replace(good, `"entity_id":0`, `"entity_id":-1`, 1), strings.Replace(good, `"entity_id":0`, `"gpu_id":"a"`, 1),
		strings.Replace(good, `"entity_id":0`, `"entity_id":0,"gpu_id":"1"`, 1),
		strings.Replace(good, `{"DCGM`, `{"DCGM GPU Diagnostic":{},"DCGM`, 1),
		strings.Repeat(" ", 1<<20) + good,
	} {
		if r, err := dcgm.Parse([]byte(in)); !errors.Is(err, dcgm.ErrMalformed) {
			t.Errorf("%.80q is read as %+v, %v", in, r, err)
		}
	}
}

// TestStandIn reads all that the stand-in for dcgmi says.
func TestStandIn(t *testing.T) {
	files, err := filepath.Glob("../../../test/fakedcgmi/answers/*.json")
	if err != nil || len(files) == 0 {
		t.Fatalf("no answers (%v)", err)
	}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		_, err = dcgm.Parse(b)
		if torn := strings.Contains(filepath.Base(f), "torn"); (err != nil) != torn {
			t.Errorf("%s: %v", f, err)
		}
	}
}

// FuzzParse: nothing panics, and what is read is bounded and complete.
func FuzzParse(f *testing.F) {
	for _, s := range []string{"", "{}", four(`{"entity_group":"GPU","entity_id":0,"status":"Pass"}`), four(`{"gpu_ids":"0,1","status":"FAIL","warnings":["a"]}`),
		`{"DCGM Diagnostic":{"runtime_error":"x"}}`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := dcgm.Parse(b)
		if err != nil {
			if !errors.Is(err, dcgm.ErrMalformed) || len(r.Tests) > 0 {
				t.Errorf("%v with %+v", err, r)
			}
			return
		}
		if len(r.Tests) == 0 || slices.ContainsFunc(r.Tests, func(x dcgm.Test) bool {
			return x.Name == "" || x.GPU < -1 || x.Status < dcgm.Pass || x.Status > dcgm.Fail || len(x.Message) > 400 || !utf8.ValidString(x.Message)
		}) {
			t.Errorf("%+v", r)
		}
	})
}
