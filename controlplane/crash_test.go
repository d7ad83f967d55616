package controlplane_test

import (
	"bytes"
	"context"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/gpuaas/millwright/controlplane"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// crashPoints are the places at which the server is killed here. All are
// in package crash, and test/e2e/crash kills it at each on real nodes.
func crashPoints() []string {
	return []string{
		"server.create.committed",
		"server.hello.committed",
		"server.assign.committed",
		"server.assign.sent",
		"server.answer.committed",
		"server.events.before-commit",
		"server.events.committed",
		"server.ack.sent",
		"server.cancel.committed",
		"server.output.stored",
	}
}

// process is a server in a process of its own, built so that it kills itself at
// the point that a file names.
type process struct {
	w      *world
	binary string
	config string
	crash  string // the directory with the file

	cmd    *exec.Cmd
	exited chan struct{} // closed once it has ended
	log    bytes.Buffer  // read once it has ended
}

// TestServerKilledAtEveryPoint kills the server once at each point, while a
// task is created, assigned, accepted, deferred, run and cancelled, and checks
// that the task ends once, in the right state, with a history that says so.
func TestServerKilledAtEveryPoint(t *testing.T) {
	t.Parallel()
	binary := filepath.Join(t.TempDir(), "millwright-server")
	build := exec.CommandContext(t.Context(), "go", "build", "-tags", "millwright_crash", "-o", binary, "./cmd/millwright-server")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	for _, point := range crashPoints() {
		t.Run(point, func(t *testing.T) {
			t.Logf("SIGKILL at %s", point)
			lifeWithACrash(t, binary, point)
		})
	}
}

// lifeWithACrash takes one task through its life on a server that is killed at
// point and started again by the first call that finds it gone.
func lifeWithACrash(t *testing.T, binary, point string) {
	w, p := newProcess(t, binary)
	h := w.join("n1")
	p.arm(point)
	p.survive(func() error { return h.tryConnect() })
	leaf := w.leaf("n1")
	req := w.request(leaf)
	id := leaf.GetTaskId()
	p.survive(func() error {
		_, err := w.tasks.CreateTasks(p.ctx(), req)
		return err
	})
	p.live(h, func() error { return h.deferOnce(id) })
	p.live(h, func() error { return h.acceptOnce(id) })
	p.live(h, func() error { return h.outputOnce(id) })
	p.survive(func() error {
		_, err := w.tasks.CancelTask(p.ctx(), &taskv1.CancelTaskRequest{Id: id, Reason: "enough"})
		return err
	})
	p.live(h, func() error {
		if len(h.unfinished) > 0 {
			h.emit(finished(id, taskv1.TaskState_TASK_STATE_CANCELLED))
			h.unfinished = nil
		}
		return h.tryFlush()
	})
	p.hit(point)
	task := w.task(id)
	if task.GetState() != taskv1.TaskState_TASK_STATE_CANCELLED || !task.GetCancelRequested() || h.accepted != 1 {
		t.Errorf("accepted %d times; task = %v", h.accepted, task)
	}
	count := map[string]int{}
	for _, kind := range w.history(id) {
		count[kind]++
	}
	for _, kind := range []string{"CREATED", "ACCEPTED", "CANCEL_REQUESTED", "CANCELLED"} {
		if count[kind] != 1 {
			t.Errorf("history has %d %s: %v", count[kind], kind, w.history(id))
		}
	}
	if events := w.events(id); events[len(events)-1].GetType() != "CANCELLED" || events[len(events)-1].GetLate() {
		t.Errorf("history ends with %v", events[len(events)-1])
	}
	if out := task.GetOutputs(); len(out) != 1 || out[0].GetReceivedHeadBytes() != 3 {
		t.Errorf("outputs = %v", out)
	}
}

// newProcess founds a server and starts it in a process of its own. The world
// has no server in this process.
func newProcess(t testing.TB, binary string) (*world, *process) {
	t.Helper()
	w := newWorldWith(t, func(*controlplane.Config) {})
	w.shut()
	p := &process{w: w, binary: binary, config: filepath.Join(t.TempDir(), "server.yaml"), crash: t.TempDir()}
	text := "version: 1\nadvertise_address: server.test:7443\nheartbeat_interval: 1m\n" +
		"listen: " + w.addr + "\nhttp_listen: " + w.http + "\nstate_dir: " + w.cfg.StateDir + "\n"
	if err := os.WriteFile(p.config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.kill()
		if t.Failed() {
			t.Logf("log of the server:\n%s", p.log.String())
		}
	})
	p.start()
	return w, p
}

func (p *process) start() {
	p.w.t.Helper()
	p.cmd = exec.CommandContext(context.Background(), p.binary, "run", "--config", p.config)
	p.cmd.Env = append(os.Environ(), "MILLWRIGHT_CRASH_DIR="+p.crash)
	p.cmd.Stderr = &p.log
	if err := p.cmd.Start(); err != nil {
		p.w.t.Fatal(err)
	}
	p.exited = make(chan struct{})
	var wg sync.WaitGroup
	cmd, exited := p.cmd, p.exited
	wg.Go(func() {
		_ = cmd.Wait() // that it ends is expected here
		close(exited)
	})
	p.w.eventually("the server answers", func() bool {
		conn, err := new(net.Dialer).DialContext(p.w.ctx(), "tcp", p.w.addr)
		return err == nil && conn.Close() == nil
	})
}

func (p *process) kill() {
	if p.cmd != nil {
		_ = p.cmd.Process.Kill()
		<-p.exited
		p.cmd = nil
	}
}

func (p *process) arm(point string) {
	p.w.t.Helper()
	if err := os.WriteFile(filepath.Join(p.crash, "arm"), []byte(point), 0o600); err != nil {
		p.w.t.Fatal(err)
	}
}

// hit checks that the server was killed where it should be.
func (p *process) hit(point string) {
	p.w.t.Helper()
	if _, err := os.Stat(filepath.Join(p.crash, "hit-"+point)); err != nil {
		p.w.t.Errorf("the server was not killed at %s: %v", point, err)
	}
}

func (p *process) ctx() context.Context { return p.w.ctx() }

// survive repeats a call until it is answered, and starts the server again when
// it has died. A call may fail more than once, since the death of the server
// also ends what other calls stand on.
func (p *process) survive(call func() error) {
	p.w.t.Helper()
	for range 5 {
		err := call()
		if err == nil {
			return
		}
		if code := status.Code(err); code != codes.Unavailable && code != codes.Canceled && !errors.Is(err, errGone) {
			p.w.t.Fatalf("call: %v", err)
		}
		select {
		case <-p.exited:
			p.start()
		case <-time.After(500 * time.Millisecond): // it lives; an older session had ended
		}
	}
	p.w.t.Fatal("five times in a row a call was not answered")
}

// live is survive for a node, which first opens its session again.
func (p *process) live(h *host, call func() error) {
	p.w.t.Helper()
	p.survive(func() error {
		if !h.connected {
			if err := h.tryConnect(); err != nil {
				return err
			}
		}
		err := call()
		h.connected = err == nil
		return err
	})
}

// errGone says that the stream of a session has ended.
var errGone = errors.New("session is gone")

// try returns the first message that fits, or errGone.
func (h *host) try(fits func(*agentv1.SessionResponse) bool) (*agentv1.SessionResponse, error) {
	for i, m := range h.pending {
		if fits(m) {
			h.pending = slices.Delete(h.pending, i, i+1)
			return m, nil
		}
	}
	for {
		select {
		case m, ok := <-h.inbox:
			switch {
			case !ok:
				return nil, errGone
			case fits(m):
				return m, nil
			}
			h.pending = append(h.pending, m)
		case <-h.w.ctx().Done():
			return nil, context.DeadlineExceeded
		}
	}
}

func (h *host) trySend(m *agentv1.SessionRequest) error {
	m.SessionEpoch = h.epoch
	if err := h.stream.Send(m); err != nil {
		return errGone
	}
	return nil
}

func (h *host) tryConnect() error {
	ctx, cancel := context.WithCancel(context.Background())
	h.w.t.Cleanup(cancel)
	stream, err := agentv1.NewAgentServiceClient(h.conn).Session(ctx, grpc.WaitForReady(true))
	if err != nil {
		return err
	}
	h.stream, h.inbox, h.pending, h.epoch = stream, make(chan *agentv1.SessionResponse, 1024), nil, 0
	inbox := h.inbox
	var wg sync.WaitGroup
	wg.Go(func() {
		defer close(inbox)
		for {
			m, err := stream.Recv()
			if err != nil {
				return
			}
			inbox <- m
		}
	})
	if err := h.trySend(&agentv1.SessionRequest{Message: &agentv1.SessionRequest_Hello{Hello: h.hello()}}); err != nil {
		return err
	}
	m, err := h.try(func(m *agentv1.SessionResponse) bool { return m.GetWelcome() != nil })
	if err != nil {
		return err
	}
	h.welcome, h.epoch = m.GetWelcome(), m.GetWelcome().GetSessionEpoch()
	if err := h.tryFlush(); err != nil {
		return err
	}
	h.connected = true
	return nil
}

// tryFlush sends what the server lacked at the Welcome and all since.
func (h *host) tryFlush() error {
	from := h.welcome.GetResendFrom()
	if from > h.lastSeq() {
		return nil
	}
	if err := h.trySend(&agentv1.SessionRequest{Message: &agentv1.SessionRequest_Events{Events: &agentv1.EventBatch{
		JournalId: h.journal, Frames: h.frames[from-1:]}}}); err != nil {
		return err
	}
	_, err := h.try(func(m *agentv1.SessionResponse) bool { return m.GetAck().GetSeq() >= h.lastSeq() })
	return err
}

func isAssignmentOf(h *host, id string) func(*agentv1.SessionResponse) bool {
	return func(m *agentv1.SessionResponse) bool {
		return m.GetAssignment() != nil && h.leafOf(m.GetAssignment()).GetTaskId() == id
	}
}

// deferOnce answers the first assignment with Deferred, and waits until it is
// sent again; the second stays unanswered.
func (h *host) deferOnce(id string) error {
	m, err := h.try(isAssignmentOf(h, id))
	if err != nil {
		return err
	}
	if err := h.trySend(&agentv1.SessionRequest{Message: &agentv1.SessionRequest_Answer{Answer: &agentv1.AssignmentAnswer{
		AssignmentId: m.GetAssignment().GetAssignmentId(),
		Answer:       &agentv1.AssignmentAnswer_Deferred{Deferred: &agentv1.Deferred{Reason: "DISK_FULL"}}}}}); err != nil {
		return err
	}
	if m, err = h.try(isAssignmentOf(h, id)); err == nil {
		h.pending = append(h.pending, m)
	}
	return err
}

// acceptOnce accepts the task, unless it did so before the server died.
func (h *host) acceptOnce(id string) error {
	if h.accepted == 0 {
		m, err := h.try(isAssignmentOf(h, id))
		if err != nil {
			return err
		}
		h.accepted++
		h.emit(acceptedEvent(m.GetAssignment()))
		h.emit(&taskv1.Event{Payload: &taskv1.Event_Planned{Planned: &taskv1.TaskPlanned{TaskId: id, Plan: &taskv1.Plan{Steps: []*taskv1.PlannedStep{{Type: "command.run"}}}}}})
		h.unfinished = append(h.unfinished, &agentv1.UnfinishedTask{TaskId: id})
	}
	return h.tryFlush()
}

// outputOnce uploads what a command wrote, from where the server has it.
func (h *host) outputOnce(id string) error {
	stream, err := agentv1.NewAgentServiceClient(h.conn).UploadOutput(h.w.ctx())
	if err != nil {
		return err
	}
	if err := stream.Send(&agentv1.UploadOutputRequest{TaskId: id, Stream: taskv1.Stream_STREAM_STDOUT,
		Part: agentv1.OutputPart_OUTPUT_PART_HEAD, Data: []byte("out")}); err != nil {
		return err
	}
	m, err := stream.Recv()
	if err == nil && m.GetReceivedBytes() != 3 {
		err = errors.New("the server has another number of bytes")
	}
	return errors.Join(err, stream.CloseSend())
}
