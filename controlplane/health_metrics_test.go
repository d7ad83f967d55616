package controlplane_test

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
	healthv1 "github.com/gpuaas/millwright/proto/millwright/health/v1"
	nodev1 "github.com/gpuaas/millwright/proto/millwright/node/v1"
)

// scrape reads the metrics.
func (w *world) scrape() string {
	w.t.Helper()
	req := must(http.NewRequestWithContext(w.ctx(), http.MethodGet, "http://"+w.http+"/metrics", nil))(w.t)
	resp := must(http.DefaultClient.Do(req))(w.t) //nolint:bodyclose // it is closed below, which the linter does not see through must
	defer resp.Body.Close()                       // it was only read
	text := must(io.ReadAll(resp.Body))(w.t)
	if resp.StatusCode != http.StatusOK {
		w.t.Fatalf("scrape: %s\n%s", resp.Status, text)
	}
	return string(text)
}

// full is a sample in which each field is set, each number to another value.
func full(node string, i int) *gpuv1.GpuSample {
	s := &gpuv1.GpuSample{}
	fields := s.ProtoReflect().Descriptor().Fields()
	for j := range fields.Len() {
		fd := fields.Get(j)
		switch {
		case fd.IsList():
		case fd.Kind() == protoreflect.BoolKind:
			s.ProtoReflect().Set(fd, protoreflect.ValueOfBool(true))
		case fd.Kind() == protoreflect.Uint32Kind:
			s.ProtoReflect().Set(fd, protoreflect.ValueOfUint32(uint32(100+fd.Number())))
		case fd.Kind() == protoreflect.Uint64Kind:
			s.ProtoReflect().Set(fd, protoreflect.ValueOfUint64(uint64(1000*fd.Number())))
		}
	}
	s.Index, s.Uuid = uint32(i), uuid8(node, i)
	return s
}

func TestMetrics(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.join("n1")
	h.connect()
	odd := ecc("n1", 1, raised)
	odd.Key, odd.Code = "odd", "Not A \"Code\"\n"
	r := h.wholeReport(1, ecc("n1", 0, raised), odd)
	r.Sample.Tier = gpuv1.Tier_TIER_SLOW
	r.Sample.Gpus = []*gpuv1.GpuSample{full("n1", 0), {Index: 1, Uuid: uuid8("n1", 1), Unknown: []*gpuv1.Unknown{{Field: "gpu_celsius"}}}}
	r.Inventory.Gpus = append(r.Inventory.Gpus, r.Inventory.Gpus[0]) // a series may be there once
	h.tell(r)
	w.waitGpu("n1/0", raised)
	text := w.scrape()
	for _, want := range []string{
		`millwright_gpu_temperature_celsius{gpu="GPU-n1-0",node="n1"} 105`,
		`millwright_gpu_power_watts{gpu="GPU-n1-0",node="n1"} 7`,
		`millwright_gpu_sm_clock_hertz{gpu="GPU-n1-0",node="n1"} 1.09e+08`,
		`millwright_gpu_ecc_errors_total{gpu="GPU-n1-0",kind="uncorrected",node="n1"} 21000`,
		`millwright_gpu_row_remap_failure{gpu="GPU-n1-0",node="n1"} 1`,
		`millwright_gpu_state{gpu="GPU-n1-0",node="n1",state="raised"} 1`,
		`millwright_gpu_state{gpu="GPU-n1-0",node="n1",state="ok"} 0`,
		`millwright_gpu_condition{action="reset_gpu",code="gpu.ecc_uncorrected",gpu="GPU-n1-0",node="n1",severity="degraded"} 1`,
		`millwright_gpu_condition{action="reset_gpu",code="other",gpu="GPU-n1-1",node="n1",severity="degraded"} 1`,
		`millwright_gpu_report_fresh{node="n1"} 1`, `millwright_gpu_driver_up{node="n1"} 1`,
	} {
		if !strings.Contains(text, want+"\n") {
			t.Errorf("%s is missing", want)
		}
	}
	if strings.Contains(text, `millwright_gpu_temperature_celsius{gpu="GPU-n1-1"`) {
		t.Error("a temperature that nobody knows has a value")
	}
	problems, err := promlint.New(strings.NewReader(text)).Lint()
	if err != nil || len(problems) > 0 {
		t.Errorf("promlint: %v, %v", problems, err)
	}
	documented(t, text)

	h.hangUp()
	w.eventually("a node that is away has no values, and what was raised stays", func() bool {
		text = w.scrape()
		return strings.Contains(text, `millwright_gpu_report_fresh{node="n1"} 0`) && !strings.Contains(text, "millwright_gpu_power_watts{") &&
			strings.Contains(text, `millwright_gpu_state{gpu="GPU-n1-0",node="n1",state="stale"} 1`) &&
			strings.Contains(text, `millwright_gpu_condition{action="reset_gpu",code="gpu.ecc_uncorrected",gpu="GPU-n1-0",node="n1",severity="degraded"} 1`)
	})
}

// documented holds what is scraped against the README and against the alerts.
func documented(t *testing.T, text string) {
	t.Helper()
	readme := string(must(os.ReadFile("internal/metrics/README.md"))(t))
	rules := string(must(os.ReadFile("../packaging/prometheus/gpu.rules.yaml"))(t))
	served := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^(millwright_gpu_\w+)(?:\{[^}]*kind="(\w+)")?`).FindAllStringSubmatch(text, -1) {
		served[m[1]] = true
		if row := fmt.Sprintf("| `%s` | %s |", m[1], m[2]); m[2] != "" && !strings.Contains(readme, row) {
			t.Errorf("README.md has no row %s", row)
		}
		if !strings.Contains(readme, "`"+m[1]+"`") {
			t.Errorf("README.md does not have %s", m[1])
		}
	}
	for _, where := range []string{readme, rules} {
		for _, name := range regexp.MustCompile(`millwright_gpu_\w+[a-z]`).FindAllString(where, -1) {
			if !served[name] {
				t.Errorf("%s is in README.md or in an alert, and not served", name)
			}
		}
	}
}

// TestMetricsOfAHostileNode do not end the metrics of the others.
func TestMetricsOfAHostileNode(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	good, bad := w.join("n1"), w.join("n2")
	good.connect()
	bad.connect()
	good.tell(good.wholeReport(1))
	r := bad.wholeReport(1)
	for i := range 40 {
		r.Inventory.Gpus = append(r.Inventory.Gpus, &gpuv1.Gpu{Model: proto.String(strings.Repeat("ä\"\n", 3000))})
		r.Conditions = append(r.Conditions, &healthv1.Condition{Key: fmt.Sprint(i), Code: fmt.Sprint("gpu.", i), GpuUuid: strings.Repeat("ü", 250), State: raised})
	}
	bad.tell(r)
	w.waitGpu("n1/0", ok)
	w.waitGpu("n2/0", ok)
	text := w.scrape()
	if !strings.Contains(text, `millwright_gpu_state{gpu="GPU-n1-0",node="n1",state="ok"} 1`) {
		t.Error("the metrics of the good node are gone")
	}
	for line := range strings.Lines(text) {
		if len(line) > 1000 {
			t.Errorf("a series of %d bytes", len(line))
		}
	}
}

// TestMetricsOverTime: a node that names other GPUs and codes in each report adds
// series up to a bound, and one that is evicted has none.
func TestMetricsOverTime(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	n := w.join("n1")
	n.connect()
	label := regexp.MustCompile(`(gpu|code)="[^"]*"`)
	seen := map[string]bool{}
	for i := range 40 {
		r := n.wholeReport(uint64(i + 1))
		r.Inventory, r.Sample = &gpuv1.Inventory{}, nil
		for g := range 64 {
			uuid := fmt.Sprintf("GPU-%d-%d", i, g)
			r.Inventory.Gpus = append(r.Inventory.Gpus, &gpuv1.Gpu{Index: uint32(g), Uuid: &uuid})
			r.Conditions = append(r.Conditions, &healthv1.Condition{Key: uuid, GpuUuid: uuid, Code: fmt.Sprintf("gpu.%d-%d", i, g), State: raised})
		}
		n.tell(r)
		w.eventually("the report is there", func() bool {
			resp, err := w.health().GetGpu(w.ctx(), &healthv1.GetGpuRequest{Gpu: "n1/0"})
			return err == nil && resp.GetGpu().GetUuid() == fmt.Sprintf("GPU-%d-0", i)
		})
		for _, l := range label.FindAllString(w.scrape(), -1) {
			seen[l] = true
		}
	}
	if len(seen) < 1000 || len(seen) > 1024+64+4 {
		t.Errorf("%d values of labels after 40 reports of 128 new names each", len(seen))
	}
	if _, err := w.nodes.EvictNode(w.ctx(), &nodev1.EvictNodeRequest{Name: "n1"}); err != nil {
		t.Fatal(err)
	}
	if text := w.scrape(); strings.Contains(text, `node="n1"`) {
		t.Error("an evicted node has metrics")
	}
}
