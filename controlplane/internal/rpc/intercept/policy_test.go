package intercept_test

import (
	"context"
	"errors"
	"io"
	"maps"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/gpuaas/millwright/controlplane/internal/rpc/intercept"
	"github.com/gpuaas/millwright/pki"
)

// notServed are services of Millwright that the server does not serve, each
// with the reason.
func notServed() map[string]string {
	return map[string]string{
		"millwright.agent.v1.LocalService":  "the agent answers it on its own socket, to root",
		"millwright.audit.v1.ExportService": "the server answers it on a socket in its state directory, to who may read that",
	}
}

// methods are all RPCs of the descriptors that this program links.
func methods(t *testing.T) map[string]protoreflect.MethodDescriptor {
	t.Helper()
	all := make(map[string]protoreflect.MethodDescriptor)
	protoregistry.GlobalFiles.RangeFiles(func(f protoreflect.FileDescriptor) bool {
		name := string(f.Package())
		if !strings.HasPrefix(name, "millwright.") && name != "grpc.health.v1" {
			return true
		}
		for i := range f.Services().Len() {
			service := f.Services().Get(i)
			if notServed()[string(service.FullName())] != "" {
				continue
			}
			for j := range service.Methods().Len() {
				m := service.Methods().Get(j)
				all["/"+string(service.FullName())+"/"+string(m.Name())] = m
			}
		}
		return true
	})
	return all
}

// TestEveryRPCHasARow fails when a service gets an RPC and the table no row, and
// when the table has a row for nothing.
func TestEveryRPCHasARow(t *testing.T) {
	policy := intercept.Default()
	all := methods(t)
	for m := range all {
		if _, ok := policy[m]; !ok {
			t.Errorf("%s has no row", m)
		}
	}
	for m, row := range policy {
		if _, ok := all[m]; !ok {
			t.Errorf("the row of %s is for no RPC", m)
		}
		if _, ok := intercept.DefaultLimits()[row.Class]; !ok {
			t.Errorf("%s: class %q has no limit", m, row.Class)
		}
		if row.Audit < intercept.AuditNone || row.Audit > intercept.AuditEach {
			t.Errorf("%s: no audit decision", m)
		}
		if row.Anonymous && row.Class != intercept.ClassJoin {
			t.Errorf("%s: a call without a certificate must be limited by address", m)
		}
	}
}

// allowed is who may call what, written down once more by hand.
func allowed() map[string]string {
	return map[string]string{
		"/millwright.agent.v1.AgentService/Session":             "node",
		"/millwright.agent.v1.AgentService/UploadOutput":        "node",
		"/millwright.agent.v1.AgentService/FetchSecret":         "node",
		"/millwright.secret.v1.SecretService/PutSecret":         "operator",
		"/millwright.secret.v1.SecretService/ListSecrets":       "operator controller",
		"/millwright.secret.v1.SecretService/RemoveSecret":      "operator",
		"/millwright.agent.v1.EnrolmentService/Join":            "anonymous",
		"/millwright.agent.v1.EnrolmentService/Renew":           "node",
		"/millwright.agent.v1.EnrolmentService/StartRekey":      "anonymous",
		"/millwright.agent.v1.EnrolmentService/Rekey":           "anonymous",
		"/millwright.task.v1.TaskService/CreateTasks":           "operator controller",
		"/millwright.task.v1.TaskService/GetTask":               "operator controller",
		"/millwright.task.v1.TaskService/ListTasks":             "operator controller",
		"/millwright.task.v1.TaskService/WatchTasks":            "operator controller",
		"/millwright.task.v1.TaskService/CancelTask":            "operator controller",
		"/millwright.task.v1.TaskService/ListTaskEvents":        "operator controller",
		"/millwright.task.v1.TaskService/ReadOutput":            "operator controller",
		"/millwright.health.v1.HealthService/ListGpus":          "operator controller",
		"/millwright.health.v1.HealthService/GetGpu":            "operator controller",
		"/millwright.health.v1.HealthService/GetNodeHealth":     "operator controller",
		"/millwright.health.v1.HealthService/ListHealthChanges": "operator controller",
		"/millwright.health.v1.HealthService/WatchHealth":       "operator controller",
		"/millwright.node.v1.NodeService/GetNode":               "operator controller",
		"/millwright.node.v1.NodeService/ListNodes":             "operator controller",
		"/millwright.node.v1.NodeService/GetCluster":            "operator controller",
		"/millwright.node.v1.NodeService/CreateJoinToken":       "operator",
		"/millwright.node.v1.NodeService/EvictNode":             "operator",
		"/grpc.health.v1.Health/Check":                          "node operator controller server",
		"/grpc.health.v1.Health/List":                           "node operator controller server",
		"/grpc.health.v1.Health/Watch":                          "node operator controller server",
	}
}

// TestRolesCrosswise calls every RPC as every role over a real connection. What
// is let through ends as Unimplemented, or OK of the health service.
func TestRolesCrosswise(t *testing.T) {
	s := serve(t, services{}, nil)
	if err := intercept.Default().Covers(s.info); err != nil {
		t.Error(err)
	}
	want := allowed()
	if got := slices.Sorted(maps.Keys(methods(t))); !slices.Equal(got, slices.Sorted(maps.Keys(want))) {
		t.Fatalf("the test's own table is not complete: the RPCs are %v", got)
	}
	for _, role := range append(pki.Roles(), "") {
		conn := s.dial(t, role)
		name := string(role)
		if role == "" {
			name = "anonymous"
		}
		for method, desc := range methods(t) {
			t.Run(name+method, func(t *testing.T) {
				code := status.Code(invoke(deadline(t), conn, method, desc))
				through := code == codes.Unimplemented || code == codes.OK
				if may := slices.Contains(strings.Fields(want[method]), name); through != may {
					t.Errorf("got %s, may call it: %v", code, may)
				}
				denied := codes.PermissionDenied
				if role == "" {
					denied = codes.Unauthenticated
				}
				if !through && code != denied {
					t.Errorf("got %s, want %s", code, denied)
				}
			})
		}
	}
}

func invoke(ctx context.Context, conn *grpc.ClientConn, method string, desc protoreflect.MethodDescriptor) error {
	if !desc.IsStreamingClient() && !desc.IsStreamingServer() {
		return conn.Invoke(ctx, method, new(emptypb.Empty), new(emptypb.Empty))
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, method)
	if err != nil {
		return err
	}
	if err := stream.SendMsg(new(emptypb.Empty)); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	if err := stream.CloseSend(); err != nil {
		return err
	}
	return stream.RecvMsg(new(emptypb.Empty))
}

// TestNoRowNoCall serves with a table that lacks a row.
func TestNoRowNoCall(t *testing.T) {
	const method = "/millwright.node.v1.NodeService/GetCluster"
	policy := intercept.Default()
	delete(policy, method)
	s := serve(t, services{}, func(c *intercept.Config) { c.Policy = policy })
	if err := policy.Covers(s.info); err == nil || !strings.Contains(err.Error(), method) {
		t.Errorf("covers: %v", err)
	}
	for _, role := range append(pki.Roles(), "") {
		err := s.dial(t, role).Invoke(deadline(t), method, new(emptypb.Empty), new(emptypb.Empty))
		if c := status.Code(err); c != codes.PermissionDenied && c != codes.Unauthenticated {
			t.Errorf("%q: %v", role, err)
		}
	}
}
