package formats_test

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	auditv1 "github.com/gpuaas/millwright/proto/millwright/audit/v1"
	containerv1 "github.com/gpuaas/millwright/proto/millwright/container/v1"
	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
	healthv1 "github.com/gpuaas/millwright/proto/millwright/health/v1"
	migv1 "github.com/gpuaas/millwright/proto/millwright/mig/v1"
	nodev1 "github.com/gpuaas/millwright/proto/millwright/node/v1"
	secretv1 "github.com/gpuaas/millwright/proto/millwright/secret/v1"
	serverv1 "github.com/gpuaas/millwright/proto/millwright/server/v1"
	slurmv1 "github.com/gpuaas/millwright/proto/millwright/slurm/v1"
	storagev1 "github.com/gpuaas/millwright/proto/millwright/storage/v1"
	systemv1 "github.com/gpuaas/millwright/proto/millwright/system/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// release names the fixtures that -update writes. Those of releases before it
// are read, never written.
const release = "v1"

var update = flag.Bool("update", false, "write the fixtures of the release in work")

// frozen are the files whose messages have fixtures.
var frozen = []protoreflect.FileDescriptor{
	taskv1.File_millwright_task_v1_envelope_proto,
	taskv1.File_millwright_task_v1_trust_proto,
	taskv1.File_millwright_task_v1_plan_proto,
	taskv1.File_millwright_task_v1_step_proto,
	taskv1.File_millwright_task_v1_package_proto,
	taskv1.File_millwright_task_v1_event_proto,
	taskv1.File_millwright_task_v1_task_proto,
	taskv1.File_millwright_task_v1_resolve_proto,
	taskv1.File_millwright_task_v1_service_proto,
	agentv1.File_millwright_agent_v1_session_proto,
	agentv1.File_millwright_agent_v1_enrolment_proto,
	agentv1.File_millwright_agent_v1_journal_proto,
	agentv1.File_millwright_agent_v1_local_proto,
	agentv1.File_millwright_agent_v1_export_proto,
	auditv1.File_millwright_audit_v1_log_proto,
	auditv1.File_millwright_audit_v1_export_proto,
	nodev1.File_millwright_node_v1_node_proto,
	nodev1.File_millwright_node_v1_bundle_proto,
	serverv1.File_millwright_server_v1_store_proto,
	containerv1.File_millwright_container_v1_run_proto,
	containerv1.File_millwright_container_v1_stop_proto,
	storagev1.File_millwright_storage_v1_mount_proto,
	storagev1.File_millwright_storage_v1_unmount_proto,
	systemv1.File_millwright_system_v1_command_proto,
	systemv1.File_millwright_system_v1_reboot_proto,
	gpuv1.File_millwright_gpu_v1_child_proto,
	gpuv1.File_millwright_gpu_v1_diagnose_proto,
	gpuv1.File_millwright_gpu_v1_reset_proto,
	gpuv1.File_millwright_gpu_v1_step_proto,
	gpuv1.File_millwright_gpu_v1_inventory_proto,
	gpuv1.File_millwright_gpu_v1_sample_proto,
	healthv1.File_millwright_health_v1_condition_proto,
	healthv1.File_millwright_health_v1_report_proto,
	healthv1.File_millwright_health_v1_service_proto,
	secretv1.File_millwright_secret_v1_place_proto,
	secretv1.File_millwright_secret_v1_remove_proto,
	secretv1.File_millwright_secret_v1_service_proto,
	serverv1.File_millwright_server_v1_secret_proto,
	migv1.File_millwright_mig_v1_configure_proto,
	migv1.File_millwright_mig_v1_step_proto,
	slurmv1.File_millwright_slurm_v1_drain_proto,
	slurmv1.File_millwright_slurm_v1_join_proto,
	slurmv1.File_millwright_slurm_v1_leave_proto,
	slurmv1.File_millwright_slurm_v1_reconfigure_proto,
	slurmv1.File_millwright_slurm_v1_resume_proto,
	slurmv1.File_millwright_slurm_v1_step_proto,
	storagev1.File_millwright_storage_v1_scratch_proto,
	taskv1.File_millwright_task_v1_secret_proto,
}

// messages returns the types that have fixtures, each oneof of which is seen
// with each of its members.
func messages() []protoreflect.MessageDescriptor {
	var out []protoreflect.MessageDescriptor
	for _, f := range frozen {
		for i := range f.Messages().Len() {
			out = append(out, f.Messages().Get(i))
		}
	}
	return out
}

// variants fills a message in as many ways as its largest oneof has members.
func variants(t *testing.T, d protoreflect.MessageDescriptor) []proto.Message {
	n := 1
	for i := range d.Oneofs().Len() {
		n = max(n, d.Oneofs().Get(i).Fields().Len())
	}
	var out []proto.Message
	for v := range n {
		out = append(out, fill(t, d, v, 0))
	}
	return out
}

// fill sets every field of a message to a value that differs from the default.
func fill(t *testing.T, d protoreflect.MessageDescriptor, variant, depth int) proto.Message {
	t.Helper()
	switch d.FullName() {
	case "google.protobuf.Timestamp":
		return &timestamppb.Timestamp{Seconds: 1790000000 + int64(variant), Nanos: 123456789}
	case "google.protobuf.Duration":
		return durationpb.New(90_500_000_000)
	case "google.protobuf.Any":
		a, err := anypb.New(&systemv1.CommandSpec{Argv: []string{"/usr/bin/true"}})
		if err != nil {
			t.Fatal(err)
		}
		return a
	}
	m := newMessage(t, d)
	for i := range d.Fields().Len() {
		fd := d.Fields().Get(i)
		if o := fd.ContainingOneof(); o != nil && !o.IsSynthetic() && fd.Index() != o.Fields().Get(variant%o.Fields().Len()).Index() {
			continue
		}
		switch {
		case fd.IsList():
			l := m.Mutable(fd).List()
			if fd.Message() == nil || depth < 4 {
				l.Append(value(t, fd, variant, depth))
			}
		case fd.IsMap():
			t.Fatalf("%s: a map has no stable bytes", fd.FullName())
		case fd.Message() == nil || depth < 4:
			m.Set(fd, value(t, fd, variant, depth))
		}
	}
	return m.Interface()
}

func value(t *testing.T, fd protoreflect.FieldDescriptor, variant, depth int) protoreflect.Value {
	n := int64(fd.Number())
	switch fd.Kind() {
	case protoreflect.MessageKind:
		return protoreflect.ValueOfMessage(fill(t, fd.Message(), variant, depth+1).ProtoReflect())
	case protoreflect.EnumKind:
		vs := fd.Enum().Values()
		return protoreflect.ValueOfEnum(vs.Get(1 + variant%(vs.Len()-1)).Number())
	case protoreflect.StringKind:
		return protoreflect.ValueOfString(fmt.Sprintf("%s-é", fd.Name()))
	case protoreflect.BytesKind:
		return protoreflect.ValueOfBytes([]byte{0, 0xff, byte(n)})
	case protoreflect.BoolKind:
		return protoreflect.ValueOfBool(true)
	case protoreflect.Int32Kind:
		return protoreflect.ValueOfInt32(int32(-n))
	case protoreflect.Int64Kind:
		return protoreflect.ValueOfInt64(-n << 33)
	case protoreflect.Uint32Kind:
		return protoreflect.ValueOfUint32(uint32(n) << 20)
	case protoreflect.Uint64Kind:
		return protoreflect.ValueOfUint64(uint64(n) << 40)
	}
	t.Fatalf("%s: no value for kind %s", fd.FullName(), fd.Kind())
	return protoreflect.Value{}
}

func newMessage(t *testing.T, d protoreflect.MessageDescriptor) protoreflect.Message {
	t.Helper()
	mt, err := protoregistry.GlobalTypes.FindMessageByName(d.FullName())
	if err != nil {
		t.Fatal(err)
	}
	return mt.New()
}

func fixture(rel string, d protoreflect.MessageDescriptor, variant int, ext string) string {
	return filepath.Join("testdata", rel, fmt.Sprintf("%s.%d.%s", d.FullName(), variant, ext))
}

// TestFixtures reads what each release wrote and asks that it still means the
// same, and that writing it again gives the same bytes: they are hashed and
// signed.
func TestFixtures(t *testing.T) {
	if *update {
		write(t)
	}
	releases, err := filepath.Glob("testdata/v*")
	if err != nil || len(releases) == 0 {
		t.Fatalf("no fixtures below testdata (%v)", err)
	}
	for _, rel := range releases {
		read := 0
		for _, d := range messages() {
			for v := 0; ; v++ {
				b, err := os.ReadFile(fixture(filepath.Base(rel), d, v, "binpb"))
				if os.IsNotExist(err) {
					break
				}
				if err != nil {
					t.Fatal(err)
				}
				check(t, filepath.Base(rel), d, v, b)
				read++
			}
		}
		if all, _ := filepath.Glob(filepath.Join(rel, "*.binpb")); len(all) != read || read == 0 {
			t.Errorf("%s: %d fixtures, %d of them read: a message was renamed or removed", rel, len(all), read)
		}
	}
}

// TestEveryFileIsFrozen asks that no file with formats is left out.
func TestEveryFileIsFrozen(t *testing.T) {
	known := map[string]bool{}
	for _, f := range frozen {
		known[f.Path()] = true
	}
	files, err := filepath.Glob("../../proto/millwright/*/v1/*.proto")
	if err != nil || len(files) != len(frozen) {
		t.Errorf("%d files, %d of them frozen (%v)", len(files), len(frozen), err)
	}
	for _, file := range files {
		if rel, err := filepath.Rel("../../proto", file); err != nil || !known[filepath.ToSlash(rel)] {
			t.Errorf("%s has no fixtures; add it to frozen", file)
		}
	}
}

// TestEveryMessageHasAFixture asks that the release in work has all of them.
func TestEveryMessageHasAFixture(t *testing.T) {
	for _, d := range messages() {
		for v := range variants(t, d) {
			if _, err := os.Stat(fixture(release, d, v, "binpb")); err != nil {
				t.Errorf("%v; run go test ./test/formats -update", err)
			}
		}
	}
}

func check(t *testing.T, rel string, d protoreflect.MessageDescriptor, v int, b []byte) {
	t.Helper()
	got := newMessage(t, d).Interface()
	if err := proto.Unmarshal(b, got); err != nil {
		t.Errorf("%s %s.%d: %v", rel, d.FullName(), v, err)
		return
	}
	text, err := os.ReadFile(fixture(rel, d, v, "json"))
	if err != nil {
		t.Error(err)
		return
	}
	want := newMessage(t, d).Interface()
	if err := protojson.Unmarshal(text, want); err != nil {
		t.Errorf("%s %s.%d: %v", rel, d.FullName(), v, err)
		return
	}
	if !proto.Equal(got, want) {
		t.Errorf("%s %s.%d: the bytes mean %v, want %v", rel, d.FullName(), v, got, want)
	}
	again, err := proto.MarshalOptions{Deterministic: true}.Marshal(got)
	if err != nil || !bytes.Equal(again, b) {
		t.Errorf("%s %s.%d: written again it has other bytes (%v)", rel, d.FullName(), v, err)
	}
}

func write(t *testing.T) {
	t.Helper()
	if err := os.MkdirAll(filepath.Join("testdata", release), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, ext := range []string{"binpb", "json"} {
		old, _ := filepath.Glob(filepath.Join("testdata", release, "*."+ext))
		for _, file := range old {
			if err := os.Remove(file); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, d := range messages() {
		for v, m := range variants(t, d) {
			b, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
			if err != nil {
				t.Fatal(err)
			}
			for ext, data := range map[string][]byte{"binpb": b, "json": asJSON(t, m)} {
				if err := os.WriteFile(fixture(release, d, v, ext), data, 0o644); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
}

// asJSON returns m as JSON. The spaces of protojson differ from build to build.
func asJSON(t *testing.T, m proto.Message) []byte {
	t.Helper()
	j, err := protojson.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := json.Indent(&out, j, "", "  "); err != nil {
		t.Fatal(err)
	}
	out.WriteByte('\n')
	return out.Bytes()
}
