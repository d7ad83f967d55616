package hostile_test

import (
	"crypto/sha256"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/millwright/pki"
	"github.com/gpuaas/millwright/pki/envelope"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	storagev1 "github.com/gpuaas/millwright/proto/millwright/storage/v1"
	systemv1 "github.com/gpuaas/millwright/proto/millwright/system/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/test/harness"
	"github.com/gpuaas/millwright/test/hostile"
	"github.com/gpuaas/millwright/test/relisten"
)

const program = "/usr/bin/work"

// world is a node that worked for a good server, in whose place a hostile one
// stands now.
type world struct {
	t *testing.T
	c *harness.Cluster
	n *harness.Node
	s *hostile.Server
}

// newWorld lets the node join and do something, so that its journal is not
// empty, and then takes the server away.
func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{t: t, c: harness.New(t)}
	w.n = w.c.NewNode("gpu-001")
	if err := w.n.Do("program " + program); err != nil {
		t.Fatal(err)
	}
	w.n.Gone("a liar stands between it and its server")
	w.n.Start()
	epoch := w.n.Connected().GetSessionEpoch()
	mount := &storagev1.MountSpec{Target: "/mnt/before", Source: &storagev1.MountSpec_Tmpfs{Tmpfs: &storagev1.TmpfsSource{SizeBytes: 1 << 20}}}
	id := w.c.Ended(w.c.Create(w.n, "storage.mount", mount).GetId()).GetId()
	await(t, "its end is acknowledged", func() bool { return w.n.Journal(id).GetAcknowledged() })
	w.c.StopServer()
	w.s = w.serve(epoch)
	return w
}

// serve puts a hostile server with an empty store in the server's place.
func (w *world) serve(epoch uint64) *hostile.Server {
	w.t.Helper()
	l := relisten.Listen(w.t, w.c.Address())
	return hostile.Serve(w.t, l, w.c.Identity(pki.RoleServer, "stolen"), harness.TrustDomain, epoch)
}

func command(arg string) *systemv1.CommandSpec {
	return &systemv1.CommandSpec{Argv: []string{program, arg}}
}

// leaf is a task for the node that runs the program with the argument.
func (w *world) leaf(arg string) *taskv1.TaskLeaf {
	w.t.Helper()
	id, err := uuid.NewV7()
	if err != nil {
		w.t.Fatal(err)
	}
	spec, err := proto.Marshal(command(arg))
	if err != nil {
		w.t.Fatal(err)
	}
	return &taskv1.TaskLeaf{
		TaskId: id.String(), Node: w.n.Name, Mode: taskv1.Mode_MODE_EXECUTE, Kind: "system.command", Revision: 1, Spec: spec,
		Labels: []*taskv1.Label{{Key: "a", Value: "b"}}, Reason: "a test",
	}
}

// sign signs leaves as an operator does, unless the window was changed.
func (w *world) sign(leaves []*taskv1.TaskLeaf, changes ...func(*envelope.Window)) (*taskv1.Envelope, []*taskv1.SignedLeaf) {
	w.t.Helper()
	window := w.c.Window()
	for _, change := range changes {
		change(&window)
	}
	env, signed, err := envelope.SignTaskSet(window, leaves, w.c.Key())
	if err != nil {
		w.t.Fatal(err)
	}
	return env, signed
}

// one signs a set of three, of which the task is the second.
func (w *world) one(leaf *taskv1.TaskLeaf, changes ...func(*envelope.Window)) (*taskv1.Envelope, *taskv1.SignedLeaf) {
	w.t.Helper()
	other, third := w.leaf("other"), w.leaf("third")
	other.Node, third.Node = "gpu-002", "gpu-003"
	env, signed := w.sign([]*taskv1.TaskLeaf{other, leaf, third}, changes...)
	return env, signed[1]
}

// snapshot is all that a refused task could have changed: the files of the
// journal to the last byte, which hold the ids that were seen, and the machine.
type snapshot struct {
	Journal, Mark string
	Machine       string
	Started       int
}

func (w *world) snapshot() snapshot {
	w.t.Helper()
	sum := func(name string) string {
		b, err := os.ReadFile(w.n.State(name))
		if err != nil {
			w.t.Fatal(err)
		}
		return fmt.Sprintf("%x", sha256.Sum256(b))
	}
	return snapshot{Journal: sum("state.db"), Mark: sum("state.mark"), Machine: w.n.Dump(), Started: w.n.Started()}
}

// unchanged fails the test if the node is not as it was.
func (w *world) unchanged(before snapshot) {
	w.t.Helper()
	if diff := cmp.Diff(before, w.snapshot()); diff != "" {
		w.t.Errorf("the node has changed (-before +after):\n%s", diff)
	}
}

// runs delivers the genuine task, which must run, once.
func (w *world) runs(s *hostile.Session, env *taskv1.Envelope, leaf *taskv1.SignedLeaf, id, arg string) {
	w.t.Helper()
	if a := s.Deliver("genuine", env, leaf); a.GetAccepted() == nil || a.GetAccepted().GetKnown() {
		w.t.Fatalf("the genuine task: answer %v, want it accepted as new", a)
	}
	if f := w.s.Finished(id); f.GetState() != taskv1.TaskState_TASK_STATE_SUCCEEDED {
		w.t.Errorf("the genuine task ended as %v", f)
	}
	if n := w.n.Runs(program, arg); n != 1 {
		w.t.Errorf("the genuine task ran %d times, want once", n)
	}
}

func refused(a *agentv1.AssignmentAnswer, reason string) bool {
	return a.GetRefused() != nil && (reason == "" || a.GetRefused().GetReason() == reason) && a.GetRefused().GetMessage() != ""
}

// settled waits until the node has told all that it has to tell.
func (w *world) settled(s *hostile.Session) {
	w.t.Helper()
	await(w.t, "the node has told its events", func() bool {
		events := w.s.Events()
		return len(events) > 0 && events[len(events)-1].GetSeq() >= s.Hello.GetLastSeq()
	})
}

// await polls until ok, for at most a minute.
func await(t *testing.T, what string, ok func() bool) {
	t.Helper()
	deadline := time.After(time.Minute)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-deadline:
			t.Fatalf("%s: not within a minute", what)
		case <-tick.C:
		}
	}
}
