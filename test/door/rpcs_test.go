package door_test

import (
	"context"
	"errors"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/gpuaas/millwright/pki"
	"github.com/gpuaas/millwright/test/harness"
)

const (
	node       = string(pki.RoleNode)
	operator   = string(pki.RoleOperator)
	controller = string(pki.RoleController)
	server     = string(pki.RoleServer)
	nobody     = ""
)

// callers says who may call the RPCs of a service, and of those that differ
// from their service.
var callers = map[string][]string{
	"millwright.agent.v1.AgentService":                nil, // by method
	"millwright.agent.v1.AgentService.Session":        {node},
	"millwright.agent.v1.AgentService.UploadOutput":   {node},
	"millwright.agent.v1.AgentService.FetchSecret":    {node},
	"millwright.secret.v1.SecretService.PutSecret":    {operator},
	"millwright.secret.v1.SecretService.ListSecrets":  {operator, controller},
	"millwright.secret.v1.SecretService.RemoveSecret": {operator},
	"millwright.agent.v1.EnrolmentService.Join":       {nobody},
	"millwright.agent.v1.EnrolmentService.Renew":      {node},
	"millwright.agent.v1.EnrolmentService.StartRekey": {nobody},
	"millwright.agent.v1.EnrolmentService.Rekey":      {nobody},
	"millwright.task.v1.TaskService":                  {operator, controller},
	"millwright.health.v1.HealthService":              {operator, controller},
	"millwright.node.v1.NodeService":                  {operator, controller},
	"millwright.node.v1.NodeService.CreateJoinToken":  {operator},
	"millwright.node.v1.NodeService.EvictNode":        {operator},
	"millwright.agent.v1.LocalService":                {}, // is the agent's: it is not here
	"millwright.audit.v1.ExportService":               {}, // is on a socket of its own: it is not here
}

// may says who may call a method; a method that nobody thought of fails the
// test.
func may(t *testing.T, m protoreflect.MethodDescriptor) []string {
	t.Helper()
	if who, ok := callers[string(m.FullName())]; ok {
		return who
	}
	who, ok := callers[string(m.Parent().FullName())]
	if !ok || who == nil {
		t.Fatalf("%s is new: say in this test who may call it", m.FullName())
	}
	return who
}

// methods are all RPCs that the project has.
func methods() []protoreflect.MethodDescriptor {
	var out []protoreflect.MethodDescriptor
	protoregistry.GlobalFiles.RangeFiles(func(f protoreflect.FileDescriptor) bool {
		if !strings.HasPrefix(string(f.Package()), "millwright.") {
			return true
		}
		for i := range f.Services().Len() {
			for j := range f.Services().Get(i).Methods().Len() {
				out = append(out, f.Services().Get(i).Methods().Get(j))
			}
		}
		return true
	})
	return out
}

// TestWhoMayCallWhat calls every RPC as everyone. Who may gets an answer of the
// RPC itself, and who may not is told so.
func TestWhoMayCallWhat(t *testing.T) {
	c := harness.New(t)
	identity, _, err := join(t, c.Connect(nil), newToken(t, c, "n1", time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	conns := map[string]*grpc.ClientConn{
		node: c.Connect(identity), nobody: c.Connect(nil), operator: c.Connect(c.Identity(pki.RoleOperator, "bob")),
		controller: c.Connect(c.Identity(pki.RoleController, "slurm")), server: c.Connect(c.Identity(pki.RoleServer, "other")),
	}
	all := methods()
	if len(all) < 19 {
		t.Fatalf("%d RPCs were found", len(all))
	}
	for _, m := range all {
		for role, conn := range conns {
			allowed := slices.Contains(may(t, m), role)
			code := status.Code(call(t, conn, m, allowed))
			want := codes.PermissionDenied
			if role == nobody {
				want = codes.Unauthenticated
			}
			if m.Parent().Name() == "LocalService" || m.Parent().Name() == "ExportService" {
				want = codes.Unimplemented
			}
			switch {
			case allowed && slices.Contains([]codes.Code{codes.PermissionDenied, codes.Unauthenticated, codes.Unimplemented, codes.Unavailable, codes.Unknown}, code):
				// Join says PermissionDenied about a token, but not about none.
				t.Errorf("%s as %q: %s, though it may", m.FullName(), role, code)
			case !allowed && code != want:
				t.Errorf("%s as %q: %s, want %s", m.FullName(), role, code, want)
			}
		}
	}
	// A certificate of the cluster's CA is not enough to be a node: it must
	// have joined, and belong to the present enrolment.
	for _, stranger := range []string{"n1000", "n2"} {
		for _, m := range all {
			if m.Parent().Name() != "AgentService" {
				continue
			}
			if code := status.Code(call(t, c.Connect(c.Identity(pki.RoleNode, stranger)), m, false)); code != codes.PermissionDenied {
				t.Errorf("%s as a node that never joined: %s, want PermissionDenied", m.FullName(), code)
			}
		}
	}
	for _, other := range []string{"/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", "/millwright.task.v1.TaskService/Nothing"} {
		err := conns[operator].Invoke(t.Context(), other, &emptypb.Empty{}, &emptypb.Empty{})
		if status.Code(err) != codes.Unimplemented && status.Code(err) != codes.PermissionDenied {
			t.Errorf("%s: %v, want that there is no such RPC", other, err)
		}
	}
}

// call calls an RPC with an empty message and returns its error. A stream of one
// who may, and that is still open after a moment, has been let in; one who may
// not is waited for.
func call(t *testing.T, conn *grpc.ClientConn, m protoreflect.MethodDescriptor, allowed bool) error {
	t.Helper()
	limit := time.Minute
	if allowed && (m.IsStreamingClient() || m.IsStreamingServer()) {
		limit = 500 * time.Millisecond
	}
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	name := "/" + string(m.Parent().FullName()) + "/" + string(m.Name())
	if !m.IsStreamingClient() && !m.IsStreamingServer() {
		return conn.Invoke(ctx, name, &emptypb.Empty{}, &emptypb.Empty{})
	}
	s, err := conn.NewStream(ctx, &grpc.StreamDesc{ClientStreams: m.IsStreamingClient(), ServerStreams: m.IsStreamingServer()}, name)
	if err != nil {
		return err
	}
	if err := s.SendMsg(&emptypb.Empty{}); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	if err := s.CloseSend(); err != nil {
		return err
	}
	err = s.RecvMsg(&emptypb.Empty{})
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}
