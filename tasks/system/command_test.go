package system_test

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	systemv1 "github.com/gpuaas/millwright/proto/millwright/system/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/all"
	"github.com/gpuaas/millwright/tasks/system"
	"github.com/gpuaas/millwright/tasks/tasktest"
)

func env(pairs ...string) []*systemv1.EnvironmentVariable {
	var out []*systemv1.EnvironmentVariable
	for _, p := range pairs {
		name, value, _ := strings.Cut(p, "=")
		out = append(out, &systemv1.EnvironmentVariable{Name: name, Value: value})
	}
	return out
}

func TestValidate(t *testing.T) {
	argv := []string{"/bin/true"}
	for _, tc := range []struct {
		name string
		spec *systemv1.CommandSpec
		want []string
	}{
		{"least", &systemv1.CommandSpec{Argv: argv}, nil},
		{"all", &systemv1.CommandSpec{
			Argv: []string{"/usr/local/bin/a b", "", "-x", "ä\n"}, WorkingDirectory: "/", Environment: env("A=", "_b2=x y"),
			User: "svc_1-x", Timeout: durationpb.New(24 * time.Hour), SuccessExitCodes: []int32{0, 7, 255},
		}, nil},
		{"nothing", &systemv1.CommandSpec{}, []string{"argv"}},
		{"empty program", &systemv1.CommandSpec{Argv: []string{""}}, []string{"argv[0]"}},
		{"a search path", &systemv1.CommandSpec{Argv: []string{"true"}}, []string{"argv[0]"}},
		{"unclean program", &systemv1.CommandSpec{Argv: []string{"/bin/../bin/true"}}, []string{"argv[0]"}},
		{"zero bytes", &systemv1.CommandSpec{Argv: []string{"/bin/a\x00b", "x\x00"}, Environment: env("A=\x00"), WorkingDirectory: "/\x00"},
			[]string{"argv[0]", "argv[1]", "working_directory", "environment[0].value"}},
		{"everything at once", &systemv1.CommandSpec{
			Argv: []string{"x"}, WorkingDirectory: "y", Environment: env("2A=", "A=1", "A=2"), User: "Root",
			Timeout: durationpb.New(-1), SuccessExitCodes: []int32{-1, 256, 3, 3},
		}, []string{"argv[0]", "working_directory", "environment[0].name", "environment[2].name", "user", "timeout",
			"success_exit_codes[0]", "success_exit_codes[1]", "success_exit_codes[3]"}},
		{"reserved variables", &systemv1.CommandSpec{Argv: argv, Environment: env("PATH=/", "LD_PRELOAD=/x.so", "MILLWRIGHT_X=", "=x", "NOTIFY_SOCKET=")},
			[]string{"environment[0].name", "environment[1].name", "environment[2].name", "environment[3].name", "environment[4].name"}},
		{"user id", &systemv1.CommandSpec{Argv: argv, User: "0"}, []string{"user"}},
		{"timeout too short", &systemv1.CommandSpec{Argv: argv, Timeout: durationpb.New(time.Millisecond)}, []string{"timeout"}},
		{"timeout too long", &systemv1.CommandSpec{Argv: argv, Timeout: durationpb.New(24*time.Hour + 1)}, []string{"timeout"}},
		{"timeout out of range", &systemv1.CommandSpec{Argv: argv, Timeout: &durationpb.Duration{Seconds: 1 << 62, Nanos: -1}}, []string{"timeout"}},
		{"too many arguments", &systemv1.CommandSpec{Argv: slices.Repeat(argv, 257)}, []string{"argv"}},
		{"too many bytes", &systemv1.CommandSpec{Argv: []string{"/bin/true", strings.Repeat("x", 128<<10)}}, []string{"argv and environment"}},
		{"long path", &systemv1.CommandSpec{Argv: []string{"/" + strings.Repeat("x", 4096)}}, []string{"argv[0]"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var got []string
			err := system.Command{}.Validate(tc.spec)
			if p := (tasks.Problems{}); errors.As(err, &p) {
				for _, q := range p {
					if !strings.Contains(q.Rule, ":") {
						t.Errorf("problem %+v does not name a way out", q)
					}
					if len(q.Value) > 100 {
						t.Errorf("problem with %s repeats %d bytes", q.Field, len(q.Value))
					}
					got = append(got, q.Field)
				}
			}
			if !slices.Equal(got, tc.want) {
				t.Errorf("Validate names %q, want %q", got, tc.want)
			}
		})
	}
}

func TestDeadlineLeavesRoomForTheTimeout(t *testing.T) {
	for _, tc := range []struct {
		timeout *durationpb.Duration
		least   time.Duration
	}{{nil, time.Hour}, {durationpb.New(time.Minute), time.Minute}, {durationpb.New(24 * time.Hour), 24 * time.Hour}} {
		if got := (system.Command{}).Deadline(&systemv1.CommandSpec{Timeout: tc.timeout}); got <= tc.least {
			t.Errorf("Deadline with timeout %v = %v", tc.timeout, got)
		}
	}
}

func FuzzReboot(f *testing.F) {
	tasktest.FuzzValidate(f, all.Registry(), "system.reboot",
		&systemv1.RebootSpec{Delay: durationpb.New(time.Minute), Timeout: durationpb.New(time.Hour), Reason: "new kernel"})
}

func FuzzCommand(f *testing.F) {
	tasktest.FuzzValidate(f, all.Registry(), "system.command",
		&systemv1.CommandSpec{Argv: []string{"/bin/true", "x"}, Environment: env("A=1"), User: "nobody", Timeout: durationpb.New(time.Second)})
}

// TestNewerField asks for the revision that brought a field only where the field
// is set: an agent of revision 1 takes all other commands.
func TestNewerField(t *testing.T) {
	kind, err := all.Registry().Kind("system.command")
	if err != nil {
		t.Fatal(err)
	}
	old := &systemv1.CommandSpec{Argv: []string{"/bin/true"}, Timeout: durationpb.New(time.Minute)}
	grown := &systemv1.CommandSpec{Argv: []string{"/bin/true"}, StopGrace: durationpb.New(time.Minute)}
	if o, g := kind.Needs(old), kind.Needs(grown); o != 1 || g != 2 {
		t.Errorf("they need the revisions %d and %d, want 1 and 2", o, g)
	}
	for _, tc := range []struct {
		spec     *systemv1.CommandSpec
		revision uint32
		want     string
	}{{old, 1, ""}, {old, 2, ""}, {grown, 2, ""}, {grown, 1, "stop_grace is a field of revision 2"}} {
		b, err := proto.Marshal(tc.spec)
		if err != nil {
			t.Fatal(err)
		}
		_, err = kind.DecodeSpec(tc.revision, b)
		if (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%v as revision %d: %v, want %q", tc.spec, tc.revision, err, tc.want)
		}
	}
}
