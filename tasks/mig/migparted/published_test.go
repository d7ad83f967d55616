package migparted_test

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"

	migv1 "github.com/gpuaas/millwright/proto/millwright/mig/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/mig"
	"github.com/gpuaas/millwright/tasks/mig/migparted"
	"github.com/gpuaas/millwright/tasks/tasktest/fakehost"
)

// The products that stand in here, by their order in the table.
const (
	a30, a40, a80, h80, h141, gh96, b180 = "A30", "A100-40", "A100-80", "H100", "H200", "GH200", "B200"
)

var (
	products = []string{a30, a40, a80, h80, h141, gh96, b180}
	none     []string
)

// layout is a published configuration: its entries, and on which products all of
// it applies. Everywhere else it is refused.
type layout struct {
	name    string
	entries string // filters@devices=MIG devices, apart by semicolons; off: MIG mode off
	on      []string
}

// The device ids of the filters (mig-parted, deployments/systemd/config-default.yaml).
const (
	idA100of40 = "0x20B010DE,0x20B110DE,0x20F110DE,0x20F610DE"
	idEighty   = "0x233010DE,0x233110DE,0x232210DE,0x20B210DE,0x20B510DE,0x20F310DE,0x20F510DE,0x232410DE"
	idNVL      = "0x232110DE,0x233A10DE"
	idGH       = "0x234210DE,0x233D10DE,0x20B610DE,0x232910DE"
)

// layouts are what mig-parted publishes: the names, devices and counts of
// deployments/systemd/config-default.yaml (1400787, 2026), and below those of
// examples/config.yaml and examples/dgx-station-80gb-config.yaml. A GPU's memory
// in a name is rounded, so that some apply to a product that they do not name.
func layouts() []layout {
	all := []layout{
		{"all-disabled", "@all=off", products}, {"all-enabled", "@all=", products},
		{"all-1g.10gb", idEighty + "@all=1g.10gb:7;" + idA100of40 + "@all=1g.10gb:4", []string{a40, a80, h80}},
		{"all-1g.24gb", "0x294110DE@all=1g.24gb:7;0x232110DE,0x2BB510DE@all=1g.24gb:4", none},
		{"all-balanced", balanced("0x294110DE", "1g.24gb", "2g.47gb", "3g.95gb") + ";0x2BB510DE@all=1g.24gb:2 2g.48gb:1;" +
			balanced("0x290110DE", "1g.23gb", "2g.45gb", "3g.90gb") + ";" + balanced("0x234810DE", "1g.18gb", "2g.36gb", "3g.72gb") + ";" +
			balanced("0x233510DE,0x233B10DE", "1g.18gb", "2g.35gb", "3g.71gb") + ";" + balanced(idNVL, "1g.12gb", "2g.24gb", "3g.47gb") + ";" +
			balanced(idEighty, "1g.10gb", "2g.20gb", "3g.40gb") + ";" + balanced(idA100of40, "1g.5gb", "2g.10gb", "3g.20gb") +
			";0x20B710DE@all=1g.6gb:2 2g.12gb:1;" + balanced(idGH, "1g.12gb", "2g.24gb", "3g.48gb"), products},
	}
	each := func(on []string, profiles ...string) {
		for _, p := range profiles { // 1g.5gb+me:1 is all-1g.5gb.me
			name, _, _ := strings.Cut(p, ":")
			all = append(all, layout{"all-" + strings.ReplaceAll(name, "+", "."), "@all=" + p, on})
		}
	}
	each([]string{a40}, "1g.5gb:7", "1g.5gb+me:1", "2g.10gb:3", "3g.20gb:2", "4g.20gb:1", "7g.40gb:1")
	each(none, "1g.24gb+gfx:4", "1g.24gb+me.all:1", "1g.24gb-me:4", "2g.48gb+gfx:2", "2g.48gb+me.all:1", "2g.48gb-me:2", "4g.96gb+gfx:1")
	each([]string{b180}, "2g.48gb:2", "4g.96gb:1") // meant for an RTX PRO 6000
	each([]string{a80, h80, b180}, "1g.20gb:4")    // a B200's are of 23 GB
	each([]string{a80, h80}, "1g.10gb+me:1", "2g.20gb:3", "3g.40gb:2", "4g.40gb:1", "7g.80gb:1")
	each([]string{a30}, "1g.6gb:4", "1g.6gb+me:1", "2g.12gb:2", "2g.12gb+me:1", "4g.24gb:1")
	each([]string{gh96}, "1g.12gb:7", "1g.12gb+me:1", "2g.24gb:3", "3g.47gb:2", "4g.47gb:1", "7g.94gb:1", "3g.48gb:2", "4g.48gb:1", "7g.96gb:1")
	each([]string{h141}, "1g.18gb:7", "1g.18gb+me:1", "1g.35gb:4", "2g.35gb:3", "3g.71gb:2", "4g.71gb:1", "7g.141gb:1")
	each([]string{h141}, "1g.36gb:4", "2g.36gb:3", "3g.72gb:2", "4g.72gb:1", "7g.144gb:1")
	each([]string{b180}, "1g.23gb:7", "1g.23gb+me:1", "1g.45gb:4", "1g.47gb:4", "2g.45gb:3", "2g.47gb:3", "3g.90gb:2", "3g.95gb:2", "4g.90gb:1", "4g.95gb:1", "7g.180gb:1", "7g.189gb:1")
	return all
}

func balanced(filter, one, two, three string) string {
	return fmt.Sprintf("%s@all=%s:2 %s:1 %s:1", filter, one, two, three)
}

// examples are those of whole machines.
func examples() []layout {
	station := func(name, devices string) layout {
		return layout{name + "-dgx-station-80", "0x20B210DE@all=" + devices + ";0x1FB010DE@all=off", nil}
	}
	return []layout{
		{"custom-config", "@0 1 2 3=off;@4=1g.5gb:7;@5=2g.10gb:3;@6=3g.20gb:2;@7=1g.5gb:2 2g.10gb:1 3g.20gb:1", nil},
		station("all-disabled", "off"), station("all-enabled", ""), station("all-1g.10gb", "1g.10gb:7"), station("all-2g.20gb", "2g.20gb:3"),
		station("all-3g.40gb", "3g.40gb:2"), station("all-4g.40gb", "4g.40gb:1"), station("all-7g.80gb", "7g.80gb:1"),
		station("all-balanced", "1g.10gb:2 2g.20gb:1 3g.40gb:1"),
		{"balanced-k8s-dgx-station-80", "0x20B210DE@0=off;0x20B210DE@1=3g.40gb:2;0x20B210DE@2=2g.20gb:3 1g.10gb:1;0x20B210DE@4=1g.10gb:7;0x1FB010DE@3=off", nil},
	}
}

// published is a file with all of them.
func published() string {
	var b strings.Builder
	b.WriteString("version: v1\nmig-configs:\n")
	for _, l := range append(layouts(), examples()...) {
		b.WriteString("  " + l.name + ":\n")
		for _, e := range strings.Split(l.entries, ";") {
			filter, rest, _ := strings.Cut(e, "@")
			devices, what, _ := strings.Cut(rest, "=")
			if devices != "all" {
				devices = "[" + strings.ReplaceAll(devices, " ", ", ") + "]"
			}
			b.WriteString("  - devices: " + devices + "\n")
			if filter != "" {
				b.WriteString("    device-filter: [\"" + strings.ReplaceAll(filter, ",", "\", \"") + "\"]\n")
			}
			if what == "off" {
				b.WriteString("    mig-enabled: false\n")
				continue
			}
			b.WriteString("    mig-enabled: true\n    mig-devices: {")
			for i, one := range strings.Fields(what) {
				name, count, _ := strings.Cut(one, ":")
				b.WriteString(map[bool]string{true: ", "}[i > 0] + "\"" + name + "\": " + count)
			}
			b.WriteString("}\n")
		}
	}
	return b.String()
}

// apply plans a spec on a node with GPUs, carries it out, and returns how many
// instances of so many slices each GPU has then.
func apply(t *testing.T, s *migv1.ConfigureSpec, gpus ...string) (map[string]string, error) {
	t.Helper()
	n := fakehost.New()
	script := "dir /etc/millwright\ndir /run\n"
	for i, g := range gpus {
		script += fmt.Sprintf("gpu add %s GPU-%d\n", g, i)
	}
	if err := n.Do(script); err != nil {
		t.Fatal(err)
	}
	h := n.Hosts(nil)
	s.AllowReset = true
	plan, err := mig.Configure{}.Plan(t.Context(), h.Prober(), s)
	if err != nil {
		return nil, err
	}
	for i, st := range plan.Steps {
		if _, err := st.Apply(t.Context(), h.ForStep("t", uint32(i))); err != nil {
			t.Fatalf("step %d: %v", i, err)
		}
	}
	if err := (mig.Configure{}).Verify(t.Context(), h.Prober(), s); err != nil {
		t.Error(err)
	}
	out := map[string]string{}
	for uuid, st := range n.Layouts() {
		if !st.Enabled {
			out[uuid] = "off"
			continue
		}
		count := map[string]int{}
		for _, in := range st.Instances {
			p, _ := st.Profile(in.Profile)
			count[fmt.Sprintf("%dg%s", p.Slices, strings.Join(p.With, ","))]++
		}
		out[uuid] = shown(count)
	}
	return out, nil
}

func shown(count map[string]int) string {
	var parts []string
	for _, k := range slices.Sorted(maps.Keys(count)) {
		parts = append(parts, fmt.Sprintf("%dx%s", count[k], k))
	}
	return strings.Join(parts, " ")
}

// asked is what an entry's devices come to, in the words of apply.
func asked(what string) string {
	if what == "off" {
		return what
	}
	count := map[string]int{}
	for _, one := range strings.Fields(what) {
		name, text, _ := strings.Cut(one, ":")
		n, err := strconv.Atoi(text)
		if err != nil {
			return "a table with " + one + ", which has no number" // agrees with nothing
		}
		slices, rest, _ := strings.Cut(name, "g.")
		_, attribute, _ := strings.Cut(rest, "gb")
		count[slices+"g"+strings.TrimPrefix(attribute, "+")] += n
	}
	return shown(count)
}

// TestPublishedLayouts: each configuration that mig-parted publishes is read, and
// on each product it applies, or is refused with the reason.
func TestPublishedLayouts(t *testing.T) {
	f, err := migparted.Read("published", []byte(published()))
	if err != nil {
		t.Fatal(err)
	}
	ids := map[string]string{a30: "0x20B710DE", a40: "0x20B010DE", a80: "0x20B210DE", h80: "0x233010DE", h141: "0x233510DE", gh96: "0x234210DE", b180: "0x290110DE"}
	applied, refused := 0, 0
	for _, l := range layouts() {
		t.Run(l.name, func(t *testing.T) {
			for _, product := range products {
				s, err := f.Spec(l.name)
				if err != nil {
					t.Fatal(err)
				}
				got, err := apply(t, s, product)
				if !slices.Contains(l.on, product) {
					refused++
					if !errors.Is(err, tasks.ErrPrecondition) || !stated(err) {
						t.Errorf("on %s: %v, %v, want a refusal with its reason", product, got, err)
					}
					continue
				}
				applied++
				want := ""
				for _, e := range strings.Split(l.entries, ";") {
					if filter, rest, _ := strings.Cut(e, "@"); filter == "" || strings.Contains(filter, ids[product]) {
						want = asked(strings.TrimPrefix(rest, "all="))
					}
				}
				if err != nil || got["GPU-0"] != want {
					t.Errorf("on %s: %q (%v), want %q", product, got["GPU-0"], err, want)
				}
			}
		})
	}
	t.Logf("%d layouts on %d products: %d apply, %d are refused", len(layouts()), len(products), applied, refused)
}

// stated reports whether a refusal says why.
func stated(err error) bool {
	for _, why := range []string{"no such profile on this GPU: ", "no layout of the spec names a GPU of the node", "impossible layout: "} {
		if strings.Contains(err.Error(), why) {
			return true
		}
	}
	return false
}

// TestPublishedExamples: those of whole machines, on the machines that they are
// for, and refused on one that lacks a GPU.
func TestPublishedExamples(t *testing.T) {
	f, err := migparted.Read("published", []byte(published()))
	if err != nil {
		t.Fatal(err)
	}
	station := []string{a80, a80, a80, "L40S", a80} // the fourth, which is a display's, has no MIG
	for _, l := range examples() {
		t.Run(l.name, func(t *testing.T) {
			s, err := f.Spec(l.name)
			if err != nil {
				t.Fatal(err)
			}
			gpus := station
			if l.name == "custom-config" {
				gpus = slices.Repeat([]string{a40}, 8)
			}
			got, err := apply(t, s, gpus...)
			if err != nil {
				t.Fatal(err)
			}
			for _, e := range strings.Split(l.entries, ";") {
				filter, rest, _ := strings.Cut(e, "@")
				devices, what, _ := strings.Cut(rest, "=")
				for i, product := range gpus {
					if filter == "0x1FB010DE" || product == "L40S" || devices != "all" && !slices.Contains(strings.Fields(devices), fmt.Sprint(i)) {
						continue
					}
					if have := got[fmt.Sprintf("GPU-%d", i)]; have != asked(what) {
						t.Errorf("GPU %d has %q, want %q", i, have, asked(what))
					}
				}
			}
		})
	}
	s, err := f.Spec("custom-config")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := apply(t, s, a40, a40, a40, a40); !errors.Is(err, tasks.ErrPrecondition) || !strings.Contains(err.Error(), "the node has no GPU 4") {
		t.Errorf("on four GPUs: %v", err)
	}
}
