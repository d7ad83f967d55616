package hostile_test

import (
	"crypto/sha256"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	secretv1 "github.com/gpuaas/millwright/proto/millwright/secret/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// place signs the genuine task: a secret into a file of the node.
func (w *world) place(value string) (*taskv1.TaskLeaf, *taskv1.Envelope, *taskv1.SignedLeaf) {
	w.t.Helper()
	salt := []byte("0123456789abcdef")
	sum := sha256.Sum256(append(append([]byte(nil), salt...), value...))
	spec, err := proto.Marshal(&secretv1.PlaceSpec{
		Path: "/etc/munge/munge.key", User: "munge", Secret: &taskv1.SecretRef{Name: "munge-key", Salt: salt, Sha256: sum[:]}, Replace: true,
	})
	if err != nil {
		w.t.Fatal(err)
	}
	leaf := w.leaf("")
	leaf.Kind, leaf.Spec = "secret.place", spec
	leaf.SecretDigests = []*taskv1.SecretDigest{{Reference: "munge-key", Salt: salt, Sha256: sum[:]}}
	env, signed := w.one(leaf)
	return leaf, env, signed
}

// TestSwappedSecret has the server hand out keys of its own for a genuine task,
// with which it could read the cluster. The node refuses each, by its reason and
// the secret's name, and the file is as it was. The value that was signed is
// taken from the same server.
func TestSwappedSecret(t *testing.T) {
	const signed, evil = "the key that was signed", "a key of the thief"
	w := newWorld(t)
	if err := w.n.Do("user munge\ndir /etc/munge 700\nfile /etc/munge/munge.key 0400 before\nowner /etc/munge/munge.key munge munge\n"); err != nil {
		t.Fatal(err)
	}
	s := w.s.Next()
	w.settled(s)
	before := w.n.Dump()
	for name, value := range map[string]string{"another": evil, "cut": signed[:len(signed)-1], "longer": signed + "\n", "nothing": ""} {
		asked := make(chan string, 8)
		w.s.Secrets(func(r *agentv1.FetchSecretRequest) []byte { asked <- r.GetReference(); return []byte(value) })
		leaf, env, sl := w.place(signed)
		if a := s.Deliver(name, env, sl); a.GetAccepted() == nil {
			t.Fatalf("%s: the genuine task: answer %v", name, a)
		}
		f := w.s.Finished(leaf.GetTaskId())
		if f.GetState() != taskv1.TaskState_TASK_STATE_FAILED || f.GetReason() != "SECRET_WRONG" || !strings.Contains(f.GetMessage(), "munge-key") {
			t.Errorf("%s: %s %s: %s", name, f.GetState(), f.GetReason(), f.GetMessage())
		}
		if strings.Contains(f.GetMessage(), evil) || strings.Contains(f.GetMessage(), signed[:12]) {
			t.Errorf("%s: the message tells a value: %s", name, f.GetMessage())
		}
		if got := <-asked; got != "munge-key" {
			t.Errorf("%s: the node asked for %q", name, got)
		}
		if after := w.n.Dump(); after != before {
			t.Errorf("%s: the node is\n%s\nand was\n%s", name, after, before)
		}
	}
	w.s.Secrets(func(*agentv1.FetchSecretRequest) []byte { return []byte(signed) })
	leaf, env, sl := w.place(signed)
	if a := s.Deliver("genuine", env, sl); a.GetAccepted() == nil {
		t.Fatalf("the genuine task: answer %v", a)
	}
	if f := w.s.Finished(leaf.GetTaskId()); f.GetState() != taskv1.TaskState_TASK_STATE_SUCCEEDED || !strings.Contains(w.n.Dump(), signed) {
		t.Errorf("with the value that was signed: %v\n%s", f, w.n.Dump())
	}
}
