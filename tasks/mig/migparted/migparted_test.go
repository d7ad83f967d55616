package migparted_test

import (
	"errors"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	migv1 "github.com/gpuaas/millwright/proto/millwright/mig/v1"
	"github.com/gpuaas/millwright/tasks/mig"
	"github.com/gpuaas/millwright/tasks/mig/migparted"
)

// TestSpec: what an entry means.
func TestSpec(t *testing.T) {
	for _, test := range []struct {
		name, entries string
		want          *migv1.ConfigureSpec
	}{
		{
			"all", "[{devices: all, mig-enabled: true, mig-devices: {1g.5gb: 2, 3g.20gb: 1}}]",
			spec(&migv1.GpuLayout{Select: &migv1.GpuSelector{All: true}, Instances: instances("1g.5gb", 2, "3g.20gb", 1)}),
		},
		{
			"off", "[{devices: all, mig-enabled: false}]",
			spec(&migv1.GpuLayout{Select: &migv1.GpuSelector{All: true}, Off: true}),
		},
		{
			"off, and no devices", "[{devices: all, mig-enabled: false, mig-devices: {}}]",
			spec(&migv1.GpuLayout{Select: &migv1.GpuSelector{All: true}, Off: true}),
		},
		{
			"the mode alone", "[{devices: all, mig-enabled: true, mig-devices: {}}]",
			spec(&migv1.GpuLayout{Select: &migv1.GpuSelector{All: true}, Empty: true}),
		},
		{
			"a count of 0", "[{devices: all, mig-enabled: true, mig-devices: {1g.5gb: 0, 1c.3g.20gb: 3}}]",
			spec(&migv1.GpuLayout{Select: &migv1.GpuSelector{All: true}, Instances: instances("1c.3g.20gb", 3)}),
		},
		{
			"indices are those of all GPUs", "[{devices: [0, 4], mig-enabled: true, mig-devices: {1g.5gb+me: 1}}]",
			spec(&migv1.GpuLayout{Select: &migv1.GpuSelector{DriverIndices: []uint32{0, 4}}, Instances: instances("1g.5gb+me", 1)}),
		},
		{
			"a filter, and so an entry that need not name a GPU", `[{device-filter: "0x20B210DE", devices: [4], mig-enabled: false}, {device-filter: ["0x20B010DE", "0x20B110DE"], devices: all, mig-enabled: false}]`,
			&migv1.ConfigureSpec{SkipAbsent: true, Layouts: []*migv1.GpuLayout{
				{Select: &migv1.GpuSelector{PciDeviceIds: []string{"0x20B210DE"}, DriverIndices: []uint32{4}}, Off: true},
				{Select: &migv1.GpuSelector{PciDeviceIds: []string{"0x20B010DE", "0x20B110DE"}, All: true}, Off: true},
			}},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			f, err := migparted.Read("f", []byte("version: v1\nmig-configs: {c: "+test.entries+"}\n"))
			if err != nil {
				t.Fatal(err)
			}
			got, err := f.Spec("")
			if err != nil || !proto.Equal(got, test.want) {
				t.Errorf("got %v (%v), want %v", got, err, test.want)
			}
			if err := (mig.Configure{}).Validate(got); err != nil {
				t.Errorf("the spec is not valid: %v", err)
			}
		})
	}
}

func spec(l ...*migv1.GpuLayout) *migv1.ConfigureSpec { return &migv1.ConfigureSpec{Layouts: l} }

func instances(pairs ...any) []*migv1.Instances {
	var out []*migv1.Instances
	for i := 0; i+1 < len(pairs); i += 2 {
		out = append(out, &migv1.Instances{Profile: pairs[i].(string), Count: uint32(pairs[i+1].(int))})
	}
	return out
}

// TestMistakes: each is told with its line and what would be right.
func TestMistakes(t *testing.T) {
	const head = "version: v1\nmig-configs:\n  c:\n"
	for _, test := range []struct{ name, text, want string }{
		{"nothing", "", "f: is empty; begin with version: v1"},
		{"no YAML", "version: [", "f: is not YAML: line 1: "},
		{"a text", "hello", `f:1: "hello": must be a mapping`},
		{"two documents", head + "  - {devices: all, mig-enabled: false}\n---\na: b\n", "f:5: holds more than one document"},
		{"no version", "mig-configs: {c: [{devices: all, mig-enabled: false}]}", "f:1: version: is missing; write version: v1"},
		{"another version", "version: v2\nmig-configs: {c: [{devices: all, mig-enabled: false}]}", `f:1: version: "v2": must be v1`},
		{"no configurations", "version: v1\n", "f:1: mig-configs: is missing"},
		{"none of them", "version: v1\nmig-configs: {}\n", "f:2: mig-configs: must have one configuration at least"},
		{"no entry", "version: v1\nmig-configs:\n  c: []\n", "f:3: mig-configs.c: has 0 entries"},
		{"no value", "version: v1\nmig-configs:\n  c:\n", "f:3: mig-configs.c: has no value"},
		{"an unknown key", "version: v1\nhooks: {}\nmig-configs: {c: [{devices: all, mig-enabled: false}]}", "f:2: hooks: unknown key; known are version, mig-configs"},
		{"an unknown key of an entry", head + "  - devices: all\n    mig-enabled: false\n    mig-device: {}\n", "f:6: mig-configs.c[0].mig-device: unknown key; known are device-filter, devices, mig-enabled, mig-devices"},
		{"a key twice", head + "  - devices: all\n    devices: [1]\n    mig-enabled: false\n", "f:5: mig-configs.c[0].devices: is given twice; it stands in line 4 already"},
		{"a name twice", head + "  - {devices: all, mig-enabled: false}\n  c:\n  - {devices: all, mig-enabled: false}\n", "f:5: mig-configs.c: is given twice"},
		{"an alias", "version: v1\nmig-configs:\n  a: &x\n  - {devices: all, mig-enabled: false}\n  c: *x\n", `f:5: mig-configs.c: "*x": is an alias`},
		{"no devices", head + "  - mig-enabled: false\n", "f:4: mig-configs.c[0].devices: is missing"},
		{"devices that are none", head + "  - {devices: most, mig-enabled: false}\n", `f:4: mig-configs.c[0].devices: "most": must be all, or a list`},
		{"no device", head + "  - {devices: [], mig-enabled: false}\n", "f:4: mig-configs.c[0].devices: must be all, or a list"},
		{"an index below 0", head + "  - {devices: [-1], mig-enabled: false}\n", `f:4: mig-configs.c[0].devices[0]: "-1": must be a whole number`},
		{"an index twice", head + "  - {devices: [1, 1], mig-enabled: false}\n", `f:4: mig-configs.c[0].devices[1]: "1": is given twice`},
		{"an index that YAML reads with base 8", head + "  - {devices: [010], mig-enabled: false}\n", `f:4: mig-configs.c[0].devices[0]: "010": must be a whole number`},
		{"a count that YAML reads with base 8", head + "  - devices: all\n    mig-enabled: true\n    mig-devices:\n      1g.5gb: 07\n", `f:7: mig-configs.c[0].mig-devices.1g.5gb: "07": must be how many`},
		{"no mode", head + "  - {devices: all}\n", "f:4: mig-configs.c[0].mig-enabled: is missing"},
		{"a mode that is none", head + "  - {devices: all, mig-enabled: yes}\n", `f:4: mig-configs.c[0].mig-enabled: "yes": must be true or false`},
		{"on, and nothing said", head + "  - {devices: all, mig-enabled: true}\n", "f:4: mig-configs.c[0].mig-devices: is missing, and mig-enabled is true"},
		{"off, with devices", head + "  - devices: all\n    mig-enabled: false\n    mig-devices: {1g.5gb: 7}\n", "f:6: mig-configs.c[0].mig-devices: must be empty where mig-enabled is false"},
		{"all counts are 0", head + "  - {devices: all, mig-enabled: true, mig-devices: {1g.5gb: 0}}\n", "mig-devices: has no count above 0"},
		{"a negative count", head + "  - devices: all\n    mig-enabled: true\n    mig-devices:\n      1g.5gb: -1\n", `f:7: mig-configs.c[0].mig-devices.1g.5gb: "-1": must be how many`},
		{"no name of a profile", head + "  - devices: all\n    mig-enabled: true\n    mig-devices:\n      1g.5gb: 1\n      small: 2\n", `f:8: mig-configs.c[0].mig-devices.small: name of a MIG profile: "small" is not of the form`},
		{"an unknown attribute", head + "  - devices: all\n    mig-enabled: true\n    mig-devices:\n      1g.5gb+fast: 1\n", `f:7: mig-configs.c[0].mig-devices.1g.5gb+fast: name of a MIG profile: "1g.5gb+fast" has the attribute "fast"`},
		{"an attribute that only goes with a plus", head + "  - devices: all\n    mig-enabled: true\n    mig-devices:\n      2g.48gb-gfx: 1\n", `f:7: mig-configs.c[0].mig-devices.2g.48gb-gfx: name of a MIG profile: "2g.48gb-gfx" has the attribute "gfx"`},
		{"a filter that is none", head + "  - {device-filter: A100, devices: all, mig-enabled: false}\n", `f:4: mig-configs.c[0].device-filter: "A100": must be a device and a vendor id`},
		{"a filter with a subsystem", head + "  - {device-filter: [\"0x233010DE:0x16C010DE\"], devices: all, mig-enabled: false}\n", `f:4: mig-configs.c[0].device-filter[0]: "0x233010DE:0x16C010DE": names a subsystem, which is not served`},
		{"an empty filter", head + "  - {device-filter: [], devices: all, mig-enabled: false}\n", "f:4: mig-configs.c[0].device-filter: is empty"},
		{"too long", strings.Repeat("#", migparted.MaxBytes+1), "f: has 1048577 bytes"},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, err := migparted.Read("f", []byte(test.text))
			var ps migparted.Problems
			if !errors.As(err, &ps) || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %v, want %s", err, test.want)
			}
		})
	}
}

// TestAllMistakes: all are told at once, by line.
func TestAllMistakes(t *testing.T) {
	_, err := migparted.Read("f", []byte("version: v3\nmig-configs:\n  a:\n  - devices: none\n    mig-enabled: true\n    mig-devices: {7g: 1}\n  b:\n  - {devices: all, mig-enabled: 1}\n"))
	var ps migparted.Problems
	if !errors.As(err, &ps) {
		t.Fatal(err)
	}
	var lines []int
	for _, p := range ps {
		lines = append(lines, p.Line)
	}
	if want := []int{1, 4, 6, 8}; len(lines) != 4 || lines[0] != want[0] || lines[1] != want[1] || lines[2] != want[2] || lines[3] != want[3] {
		t.Errorf("mistakes in the lines %v, want %v:\n%v", lines, want, err)
	}
}

// TestWhich: a configuration is named, unless there is one.
func TestWhich(t *testing.T) {
	f, err := migparted.Read("f", []byte("version: v1\nmig-configs:\n  b: [{devices: all, mig-enabled: false}]\n  a: [{devices: all, mig-enabled: false}]\n"))
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct{ config, want string }{
		{"", "f has 2 configurations: say which of a, b"}, {"c", `f has no configuration "c": it has a, b`},
	} {
		if _, err := f.Spec(test.config); !errors.Is(err, migparted.ErrNoConfig) || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%q: %v, want %s", test.config, err, test.want)
		}
	}
	if s, err := f.Spec("a"); err != nil || !s.GetLayouts()[0].GetOff() {
		t.Errorf("a: %v, %v", s, err)
	}
}

// FuzzRead: whatever is read without a mistake is a valid spec.
func FuzzRead(f *testing.F) {
	f.Add([]byte(published()))
	f.Add([]byte("version: v1\nmig-configs: {c: [{device-filter: \"0x20B210DE\", devices: [0], mig-enabled: true, mig-devices: {1c.3g.40gb: 2}}]}\n"))
	f.Add([]byte("version: v1\nmig-configs:\n  c: &a\n  - <<: *a\n    devices: all\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		file, err := migparted.Read("f", data)
		if err != nil {
			var ps migparted.Problems
			if !errors.As(err, &ps) || file != nil {
				t.Fatalf("%v is no list of mistakes", err)
			}
			return
		}
		if len(file.Configs()) == 0 {
			t.Fatal("no configuration, and no mistake")
		}
		for _, name := range file.Configs() {
			s, err := file.Spec(name)
			if err != nil {
				t.Fatal(err)
			}
			if err := (mig.Configure{}).Validate(s); err != nil {
				t.Fatalf("%s: %v of %v", name, err, s)
			}
		}
	})
}

// TestOddFiles: what is no configuration is a mistake, and never the end of the
// program.
func TestOddFiles(t *testing.T) {
	for name, text := range map[string]string{
		"a comment": "# nothing\n", "an empty document": "---\n", "an end": "...\n", "a directive": "%YAML 1.1\n---\n", "null": "null\n", "zero bytes": "\x00\x00",
		"not UTF-8": "version: \xff\xfe", "deep": strings.Repeat("[", 100_000), "deep mappings": strings.Repeat("{a: ", 20_000),
		"a key that is a list": "? [a]\n: b\n", "an alias of itself": "&a [*a]\n", "a merge": "version: v1\nmig-configs:\n  <<: {a: [{devices: all, mig-enabled: false}]}\n",
		"a tag": "version: !!binary djE=\nmig-configs: {c: [{devices: all, mig-enabled: false}]}\n", "a second document that is none": "version: v1\n---\n[",
		"indices with names": "version: v1\nmig-configs: {c: [{devices: [{a: 1}, [2], null], mig-enabled: false}]}\n",
		"counts with names":  "version: v1\nmig-configs: {c: [{devices: all, mig-enabled: true, mig-devices: {1g.5gb: [1], 2g.10gb: {a: 1}}}]}\n",
	} {
		_, err := migparted.Read("f", []byte(text))
		var ps migparted.Problems
		if !errors.As(err, &ps) {
			t.Errorf("%s: %v, want mistakes", name, err)
		}
	}
}
