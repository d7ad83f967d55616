package fakenvml_test

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpuaas/millwright/test/fakenvml"
)

// To record the layouts and symbols of a release: go mod download
// github.com/NVIDIA/go-nvml@VERSION for each of Headers, then go test
// -run TestABI -update.
var update = flag.Bool("update", false, "record layouts and symbols from the headers in the module cache")

// structures that cross the boundary, by their name in C. Those with handles in
// them are not here: go-nvml gives them to Go as interfaces; the other tests
// read them.
func structures() map[string]any {
	return map[string]any{
		"nvmlPciInfo_t": nvml.PciInfo{}, "nvmlFieldValue_t": nvml.FieldValue{}, "nvmlUtilization_t": nvml.Utilization{},
		"nvmlMemory_t": nvml.Memory{}, "nvmlMemory_v2_t": nvml.Memory_v2{}, "nvmlProcessInfo_t": nvml.ProcessInfo{},
		"nvmlGpuInstancePlacement_t": nvml.GpuInstancePlacement{}, "nvmlGpuInstanceProfileInfo_t": nvml.GpuInstanceProfileInfo{},
		"nvmlGpuInstanceProfileInfo_v2_t": nvml.GpuInstanceProfileInfo_v2{}, "nvmlGpuInstanceProfileInfo_v3_t": nvml.GpuInstanceProfileInfo_v3{},
		"nvmlComputeInstancePlacement_t": nvml.ComputeInstancePlacement{}, "nvmlComputeInstanceProfileInfo_t": nvml.ComputeInstanceProfileInfo{},
		"nvmlRowRemapperHistogramValues_t": nvml.RowRemapperHistogramValues{}, "nvmlEccSramErrorStatus_v1_t": nvml.EccSramErrorStatus_v1{},
		"nvmlGpuFabricInfo_t": nvml.GpuFabricInfo{}, "nvmlGpuFabricInfo_v2_t": nvml.GpuFabricInfo_v2{}, "nvmlGpuFabricInfo_v3_t": nvml.GpuFabricInfo_v3{},
		"nvmlTemperature_v1_t": nvml.Temperature_v1{}, "nvmlMarginTemperature_v1_t": nvml.MarginTemperature_v1{}, "nvmlRepairStatus_v1_t": nvml.RepairStatus_v1{},
	}
}

func fields(v any) []string {
	var names []string
	for f := range reflect.TypeOf(v).Fields() {
		if strings.HasPrefix(f.Name, "Pad_cgo") { // always last: C pads by itself
			continue
		}
		names = append(names, strings.ToLower(f.Name[:1])+f.Name[1:])
	}
	return names
}

// inGo is how Go lays the structures out.
func inGo() []string {
	var lines []string
	for name, v := range structures() {
		typ := reflect.TypeOf(v)
		line := fmt.Sprintf("%s %d", name, typ.Size())
		for i, f := range fields(v) {
			line += fmt.Sprintf(" %s@%d", f, typ.Field(i).Offset)
		}
		lines = append(lines, line)
	}
	slices.Sort(lines)
	return lines
}

// inC is how the C compiler lays out those that a header has.
func inC(t *testing.T, header string) []string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(header, "nvml.h"))
	must(t, err)
	var b strings.Builder
	b.WriteString("#include <nvml.h>\n#include <stddef.h>\n#include <stdio.h>\nint main(void) {\n")
	for name, v := range structures() {
		if !regexp.MustCompile(`\b` + name + `\s*;`).Match(text) {
			continue
		}
		fmt.Fprintf(&b, "printf(\"%s %%zu\", sizeof(%s));\n", name, name)
		for _, f := range fields(v) {
			fmt.Fprintf(&b, "printf(\" %s@%%zu\", offsetof(%s, %s));\n", f, name, f)
		}
		b.WriteString("printf(\"\\n\");\n")
	}
	b.WriteString("return 0; }\n")
	dir := t.TempDir()
	must(t, os.WriteFile(filepath.Join(dir, "probe.c"), []byte(b.String()), 0o600))
	cmd := exec.CommandContext(t.Context(), "gcc", "-isystem", header, "-o", "probe", "probe.c")
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("compile the probe: %v\n%s", err, out)
	}
	out, err := exec.CommandContext(t.Context(), filepath.Join(dir, "probe")).Output()
	must(t, err)
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	slices.Sort(lines)
	return lines
}

func headerOf(t *testing.T, version string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "go", "list", "-m", "-f", "{{.Dir}} {{.Version}}", "github.com/NVIDIA/go-nvml").Output()
	must(t, err)
	dir, current, _ := strings.Cut(strings.TrimSpace(string(out)), " ")
	return filepath.Join(strings.TrimSuffix(dir, current)+version, "pkg", "nvml")
}

func TestABI(t *testing.T) {
	headers := fakenvml.Headers()
	newest := headers[len(headers)-1]
	mine := inC(t, headerOf(t, newest))
	if got := inGo(); !slices.Equal(got, mine) {
		t.Errorf("go-nvml lays structures out as\n%s\nthe library as\n%s", strings.Join(got, "\n"), strings.Join(mine, "\n"))
	}
	for _, v := range headers {
		file := filepath.Join("testdata", "layout-"+v+".txt")
		if *update {
			must(t, os.WriteFile(file, []byte(strings.Join(inC(t, headerOf(t, v)), "\n")+"\n"), 0o644))
			must(t, os.WriteFile(filepath.Join("symbols", v+".txt"), []byte(strings.Join(declared(t, headerOf(t, v)), "\n")+"\n"), 0o644))
		}
		b, err := os.ReadFile(file)
		must(t, err)
		recorded := strings.Split(strings.TrimSpace(string(b)), "\n")
		if len(recorded) < 10 {
			t.Errorf("%s has %d structures only", v, len(recorded))
		}
		for _, line := range recorded {
			if !slices.Contains(mine, line) {
				t.Errorf("%s has %q, the library differs", v, line)
			}
		}
	}
}

func declared(t *testing.T, header string) []string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(header, "nvml.h"))
	must(t, err)
	var names []string
	for _, m := range regexp.MustCompile(`DECLDIR\s+(?:char\s*\*\s*)?(nvml\w+)\s*\(`).FindAllStringSubmatch(string(b), -1) {
		names = append(names, m[1])
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// TestSymbols holds the lists against the header, and what the library exports
// against the lists.
func TestSymbols(t *testing.T) {
	headers := fakenvml.Headers()
	newest, err := fakenvml.Symbols(headers[len(headers)-1])
	must(t, err)
	if got := declared(t, headerOf(t, headers[len(headers)-1])); !slices.Equal(got, newest) {
		t.Errorf("the header declares %d functions, the list has %d", len(got), len(newest))
	}
	for _, v := range headers {
		want, err := fakenvml.Symbols(v)
		must(t, err)
		lib, err := fakenvml.Build(t.Context(), fakenvml.Variant{Header: v})
		must(t, err)
		out, err := exec.CommandContext(t.Context(), "nm", "-D", "--defined-only", filepath.Join(lib.Dir, "libnvidia-ml.so.1")).Output()
		must(t, err)
		n := 0
		for line := range strings.Lines(string(out)) {
			name := strings.Fields(line)[2]
			n++
			if !slices.Contains(want, name) {
				t.Errorf("the library of %s exports %s, which its header lacks", v, name)
			}
		}
		if n < 80 {
			t.Errorf("the library of %s exports %d functions only", v, n)
		}
	}
}
