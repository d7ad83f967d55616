package admit_test

import (
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/millwright/pki/pkitest"
	"github.com/gpuaas/millwright/pki/trustroot"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/proto/rpcerr"
	"github.com/gpuaas/millwright/tasks/all"

	"github.com/gpuaas/millwright/controlplane/internal/admit"
)

func request(t testing.TB, c *pkitest.Cluster) *taskv1.CreateTasksRequest {
	t.Helper()
	env, leaves := c.Sign(t, &taskv1.TaskLeaf{TaskId: pkitest.NewTaskID(t), Node: "n", Mode: taskv1.Mode_MODE_EXECUTE, Kind: "system.command", Revision: 1})
	return &taskv1.CreateTasksRequest{RequestId: "0199c2a0-7d1e-7c3b-9f0a-3d5b1f6e2a10", Envelope: env, Leaves: leaves}
}

func admitter(c *pkitest.Cluster) *admit.Admitter {
	return admit.New(admit.Config{Registry: all.Registry(), Root: func() *trustroot.Root { return c.Root }})
}

// TestEveryAlteredByteIsRefused alters each byte of envelope and leaf in turn.
func TestEveryAlteredByteIsRefused(t *testing.T) {
	t.Parallel()
	c := pkitest.New(t)
	a, good := admitter(c), request(t, c)
	judge := func(req *taskv1.CreateTasksRequest) error {
		form, err := a.Form(req)
		if err != nil {
			return err
		}
		_, err = a.Signed(form)
		return err
	}
	if err := judge(good); err != nil {
		t.Fatalf("the genuine request: %v", err)
	}
	for name, bytes := range map[string]func(*taskv1.CreateTasksRequest) []byte{
		"payload":   func(r *taskv1.CreateTasksRequest) []byte { return r.GetEnvelope().GetPayload() },
		"signature": func(r *taskv1.CreateTasksRequest) []byte { return r.GetEnvelope().GetSignatures()[0].GetSignature() },
		"leaf":      func(r *taskv1.CreateTasksRequest) []byte { return r.GetLeaves()[0].GetLeaf() },
	} {
		for i := range bytes(good) {
			for _, bit := range []byte{0x01, 0x80} {
				altered := proto.CloneOf(good)
				bytes(altered)[i] ^= bit
				if err := judge(altered); rpcerr.Reason(err) == "" {
					t.Errorf("%s, byte %d altered: %v", name, i, err)
				}
			}
		}
	}
}

func FuzzForm(f *testing.F) {
	c := pkitest.New(f)
	a := admitter(c)
	b, err := proto.Marshal(request(f, c))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		req := &taskv1.CreateTasksRequest{}
		if proto.Unmarshal(b, req) != nil {
			return
		}
		form, err := a.Form(req)
		if err != nil {
			if rpcerr.Reason(err) == "" {
				t.Errorf("Form = %v, which has no reason", err)
			}
			return
		}
		if len(form.Leaves) != len(req.GetLeaves()) {
			t.Errorf("%d leaves came in and %d out", len(req.GetLeaves()), len(form.Leaves))
		}
	})
}
