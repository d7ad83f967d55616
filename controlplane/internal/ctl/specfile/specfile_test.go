package specfile_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/millwright/controlplane/internal/ctl/specfile"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	storagev1 "github.com/gpuaas/millwright/proto/millwright/storage/v1"
	systemv1 "github.com/gpuaas/millwright/proto/millwright/system/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
)

func TestRead(t *testing.T) {
	tests := []struct {
		name string
		text string
		want proto.Message
	}{
		{"nothing", "", &systemv1.CommandSpec{}},
		{"only a comment", "# later\n", &systemv1.CommandSpec{}},
		{"lists and durations", "argv: [/usr/bin/sleep, 5]\ntimeout: 1h30m\nsuccess_exit_codes:\n- 0\n- 3\n", &systemv1.CommandSpec{
			Argv: []string{"/usr/bin/sleep", "5"}, Timeout: durationpb.New(90 * time.Minute), SuccessExitCodes: []int32{0, 3},
		}},
		{"nested messages", "environment:\n- name: LANG\n  value: C\n- {name: DEBUG, value: true}\n", &systemv1.CommandSpec{
			Environment: []*systemv1.EnvironmentVariable{{Name: "LANG", Value: "C"}, {Name: "DEBUG", Value: "true"}},
		}},
		{"text is taken as written", "target: /srv/data\ntmpfs: {size_bytes: 4096, mode: 0755}\n", &storagev1.MountSpec{
			Target: "/srv/data",
			Source: &storagev1.MountSpec_Tmpfs{Tmpfs: &storagev1.TmpfsSource{SizeBytes: 4096, Mode: "0755"}},
		}},
		{"JSON with tabs and JSON names", "{\n\t\"target\": \"/srv\",\n\t\"readOnly\": true,\n\t\"tmpfs\": {\"sizeBytes\": \"4096\"}\n}", &storagev1.MountSpec{
			Target: "/srv", ReadOnly: true,
			Source: &storagev1.MountSpec_Tmpfs{Tmpfs: &storagev1.TmpfsSource{SizeBytes: 4096}},
		}},
		{"block text", "argv:\n- /bin/sh\n- -c\n- |\n  echo a\n  echo b\n", &systemv1.CommandSpec{
			Argv: []string{"/bin/sh", "-c", "echo a\necho b\n"},
		}},
		{"a short enum and bytes", "as: abandon\nleaf_hash: AAEC\n", &taskv1.ResolveSpec{
			As: taskv1.ResolveAs_RESOLVE_AS_ABANDON, LeafHash: []byte{0, 1, 2},
		}},
		{"a whole enum", "as: RESOLVE_AS_ACCEPT\n", &taskv1.ResolveSpec{As: taskv1.ResolveAs_RESOLVE_AS_ACCEPT}},
		{"a time", "floor: 2027-01-31T15:04:05Z\n", &agentv1.JoinBundle{
			Floor: timestamppb.New(time.Date(2027, 1, 31, 15, 4, 5, 0, time.UTC)),
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got := tt.want.ProtoReflect().New().Interface()
			if err := specfile.Read("f", []byte(tt.text), got).Check(nil); err != nil {
				t.Fatalf("Read(%q): %v", tt.text, err)
			}
			if diff := cmp.Diff(tt.want, got, protocmp.Transform()); diff != "" {
				t.Errorf("Read(%q) (-want +got):\n%s", tt.text, diff)
			}
		})
	}
}

// TestUnreadable wants a text that cannot be read to be told as that alone: that
// its fields are missing would lead astray.
func TestUnreadable(t *testing.T) {
	missing := tasks.Problems{{Field: "argv", Rule: "is required"}}
	for _, text := range []string{"argv: [", "\xff\xfe", "- /bin/true\n", strings.Repeat("#", specfile.MaxBytes+1)} {
		var got specfile.Problems
		if err := specfile.Read("f", []byte(text), &systemv1.CommandSpec{}).Check(missing); !errors.As(err, &got) || len(got) != 1 {
			t.Errorf("%.20q: %v, want one problem", text, err)
		}
	}
	if err := specfile.Read("f", nil, &systemv1.CommandSpec{}).Check(missing); err == nil {
		t.Error("an empty text has no missing field")
	}
}

func TestMistakes(t *testing.T) {
	tests := []struct {
		name string
		spec proto.Message
		text string
		want string
	}{
		{"not YAML", &storagev1.MountSpec{}, "target: [", "f: is not YAML: line 1: did not find expected node content"},
		{"not a mapping", &storagev1.UnmountSpec{}, "- /srv\n", `f:1: "[...]": must be a mapping of fields; known fields: policy, target, wait_for_jobs`},
		{"two documents", &storagev1.UnmountSpec{}, "target: /a\n---\ntarget: /b\n", "f:2: holds more than one document; give each its own command"},
		{"unknown fields at two levels", &storagev1.MountSpec{}, "targt: /srv\nglusterfs:\n  servers: [a]\n  volum: b\n",
			"f:1: targt: unknown field; known fields: beegfs, bind, cephfs, device, glusterfs, lustre, nfs, read_only, s3, sentinel, target, tmpfs, wait, wait_for_jobs, weka\n" +
				"f:4: glusterfs.volum: unknown field; known fields: servers, subdirectory, volume"},
		{"given twice", &storagev1.UnmountSpec{}, "target: /a\ntarget: /b\n", "f:2: target: is given twice; it stands in line 1 already"},
		{"given twice by two names", &storagev1.MountSpec{}, "read_only: true\nreadOnly: true\n", "f:2: read_only: is given twice; it stands in line 1 already"},
		{"two of one choice", &storagev1.MountSpec{}, "bind: {path: /a}\ntmpfs: {size_bytes: 4096}\n", "f:2: tmpfs: excludes bind, which line 1 gives; keep one of them"},
		{"no value", &storagev1.UnmountSpec{}, "target:\n", "f:1: target: has no value; give one, in quotation marks if it is a text, or leave the field out"},
		{"no element", &systemv1.CommandSpec{}, "argv:\n- /bin/echo\n-\n", "f:3: argv[1]: has no value; put a text in quotation marks, or take the element out"},
		{"an alias", &systemv1.CommandSpec{}, "argv: [&a /bin/true, *a]\n", `f:1: argv[1]: "*a": is an alias; write the value out`},
		{"a list is wanted", &systemv1.CommandSpec{}, "argv: /bin/true\n", `f:1: argv: "/bin/true": must be a list: [a, b], or one value a line, each after a dash`},
		{"a mapping is wanted", &storagev1.MountSpec{}, "bind: /a\n", `f:1: bind: "/a": must be a mapping of fields; known fields: path`},
		{"a value is wanted", &storagev1.MountSpec{}, "target: {a: b}\n", `f:1: target: "{...}": must be a text`},
		{"all wrong values", &systemv1.CommandSpec{}, "timeout: 5\nsuccess_exit_codes: [1, x, 99999999999]\n",
			"f:1: timeout: \"5\": must be a duration such as 90s or 1h30m\n" +
				"f:2: success_exit_codes[1]: \"x\": must be a whole number from -2147483648 to 2147483647, in decimal and without a unit\n" +
				"f:2: success_exit_codes[2]: \"99999999999\": must be a whole number from -2147483648 to 2147483647, in decimal and without a unit"},
		{"a negative size", &storagev1.MountSpec{}, "tmpfs: {size_bytes: -1}\n",
			`f:1: tmpfs.size_bytes: "-1": must be a whole number from 0 to 18446744073709551615, in decimal and without a unit`},
		{"a quoted truth", &storagev1.MountSpec{}, "read_only: 'true'\n", `f:1: read_only: "true": must be true or false`},
		{"an unknown enum value", &taskv1.ResolveSpec{}, "as: keep\n", `f:1: as: "keep": must be one of undo, accept, abandon`},
		{"the enum's zero", &taskv1.ResolveSpec{}, "as: RESOLVE_AS_UNSPECIFIED\n", `f:1: as: "RESOLVE_AS_UNSPECIFIED": must be one of undo, accept, abandon`},
		{"not base64", &taskv1.ResolveSpec{}, "leaf_hash: '!'\n", `f:1: leaf_hash: "!": must be bytes in base64`},
		{"not a time", &agentv1.JoinBundle{}, "floor: today\n", `f:1: floor: "today": must be a time such as 2027-01-31T15:04:05Z`},
		{"too large", &storagev1.UnmountSpec{}, strings.Repeat("#", specfile.MaxBytes+1), "f: has 1048577 bytes; a spec has at most 1048576"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			err := specfile.Read("f", []byte(tt.text), tt.spec).Check(nil)
			var problems specfile.Problems
			if !errors.As(err, &problems) {
				t.Fatalf("Read(%q) = %v, want Problems", tt.text, err)
			}
			if diff := cmp.Diff(tt.want, err.Error()); diff != "" {
				t.Errorf("Read(%q) (-want +got):\n%s", tt.text, diff)
			}
		})
	}
}

// TestCheck joins the mistakes of the text with those that validation finds.
func TestCheck(t *testing.T) {
	const text = "target: /\nbogus: 1\ntmpfs:\n  size_bytes: many\nglusterfs: 3\n"
	d := specfile.Read("f", []byte(text), &storagev1.MountSpec{})
	err := d.Check(tasks.Problems{
		{Field: "target", Value: "/", Rule: "is the root"},
		{Field: "tmpfs.size_bytes", Value: "0", Rule: "must be told only once"},
		{Field: "tmpfs.mode", Rule: "is missing"},
		{Field: "source", Rule: "is required"},
	})
	want := "f:1: target: \"/\": is the root\n" +
		"f:2: bogus: unknown field; known fields: beegfs, bind, cephfs, device, glusterfs, lustre, nfs, read_only, s3, sentinel, target, tmpfs, wait, wait_for_jobs, weka\n" +
		"f:3: tmpfs.mode: is missing\n" +
		"f:4: tmpfs.size_bytes: \"many\": must be a whole number from 0 to 18446744073709551615, in decimal and without a unit\n" +
		"f:5: glusterfs: excludes tmpfs, which line 3 gives; keep one of them"
	if diff := cmp.Diff(want, err.Error()); diff != "" {
		t.Errorf("Check (-want +got):\n%s", diff)
	}
	other := errors.New("no spec at all")
	if err := specfile.Read("f", nil, &storagev1.MountSpec{}).Check(other); !errors.Is(err, other) {
		t.Errorf("Check of another error = %v, want it back", err)
	}
	if err := d.Check(other); errors.Is(err, other) {
		t.Errorf("Check of another error with mistakes = %v, want the mistakes", err)
	}
}

// FuzzRead looks for a document that panics, or that is accepted and then does
// not survive being written.
func FuzzRead(f *testing.F) {
	for _, s := range []string{
		"target: /srv\ntmpfs: {size_bytes: 1}", "argv: [a, b]\ntimeout: 1s", "? [a]\n: b", "&a a: *a", "{\"argv\":[\"\"]}", "environment: [{name: a}]",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		for _, spec := range []proto.Message{&storagev1.MountSpec{}, &systemv1.CommandSpec{}, &taskv1.ResolveSpec{}, &agentv1.JoinBundle{}} {
			if err := specfile.Read("f", []byte(text), spec).Check(nil); err != nil {
				continue
			}
			if _, err := proto.Marshal(spec); err != nil {
				t.Errorf("Read(%q) gave a spec that can't be written: %v", text, err)
			}
		}
	})
}
